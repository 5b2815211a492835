"""Cuts into several chunks a stage, and recomputation chosen stage by stage: a mixed-integer program (HiGHS).

    minimise    heaviest + small · Σ over rows of chunks of the row's heaviest chunk
    over        z[c, b] ∈ {0, 1}: chunk c ends after at least b layers (layers all of one kind: one integer, the end)
                r[s, k]: layers of kind k on stage s that are recomputed, u[s] ∈ {0, 1}: any at all
    such that   load of stage s ≤ heaviest, bytes of stage s in each phase ≤ what fits

Loads are prefix sums of the layers' seconds, hence linear in z. So are bytes but for what is held once however many
layers there are (workspace, gathered layers, buckets): those are taken at the default split, and whatever is
found is priced exactly before it is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.balance_problem import Problem, Sizes
from distplan.costmodel.stages import Content, chunks_of

TIME_LIMIT = 1.0
"""seconds; the gap that is left then is said"""
FEASIBILITY = 2e-6
"""seconds by which HiGHS may break a row: its mip_feasibility_tolerance of 1e-6, on either side"""
ROWS = 1e-3
"""weight of the rows of chunks: below what tells two heaviest stages apart"""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    sizes: Sizes
    again: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Program:
    """Columns: z [chunks − 1, width], r [stages, kinds], u [stages], heaviest, row of chunks [vpp]."""

    problem: Problem
    kinds: tuple[int, ...]
    rows: list[Floats]
    low: list[float]
    high: list[float]

    @property
    def width(self) -> int:
        """Columns that say where one chunk ends."""
        return 1 if len(set(self.problem.pattern)) == 1 else len(self.problem.pattern)

    @property
    def ends(self) -> int:
        return (self.problem.chunks - 1) * self.width

    @property
    def columns(self) -> int:
        pp = self.problem.strategy.pp
        return self.ends + pp * len(self.kinds) + pp + 1 + self.problem.strategy.vpp

    def again(self, stage: int, kind: int) -> int:
        return self.ends + stage * len(self.kinds) + kind

    def any(self, stage: int) -> int:
        return self.ends + self.problem.strategy.pp * len(self.kinds) + stage

    @property
    def heaviest(self) -> int:
        return self.any(self.problem.strategy.pp)

    def add(self, row: Floats, low: float, high: float) -> None:
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def before(self, smaller: int, larger: int) -> None:
        """x[smaller] ≤ x[larger]."""
        row = np.zeros(self.columns)
        row[smaller], row[larger] = -1.0, 1.0
        self.add(row, 0.0, np.inf)

    def end(self, chunk: int, values: Floats) -> tuple[Floats, float]:
        """The prefix sum `values` [layers + 1] where the chunk ends, as (row, constant)."""
        row = np.zeros(self.columns)
        if chunk < 0:
            return row, float(values[0])
        if chunk == self.problem.chunks - 1:
            return row, float(values[-1])
        row[chunk * self.width : (chunk + 1) * self.width] = np.diff(values)[: self.width]
        return row, float(values[0])

    def held(self, chunk: int, values: Floats) -> tuple[Floats, float]:
        """The sum over the chunk's layers, of which `values` are the prefix sums."""
        (row, constant), (before, less) = self.end(chunk, values), self.end(chunk - 1, values)
        return row - before, constant - less


def solve(
    problem: Problem, *, recompute: bool, most: float | None = None, time_limit: float = TIME_LIMIT
) -> tuple[Solved | None, float]:
    """(the best cut, a bound in seconds that no heaviest stage is below). `recompute`: choose the layers that each
    stage recomputes, else those of the default split stay. `most`: seconds that the heaviest stage may have (the
    default's if None). No cut where none was found in time, or there is none.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    kinds = tuple(range(1, len(problem.eng.segments) - 1)) if recompute else ()
    program = _Program(problem=problem, kinds=kinds, rows=[], low=[], high=[])
    _order(program)
    for stage in range(problem.strategy.pp):
        _stage(program, stage, 0 if recompute else problem.default_again)
    integer, upper = np.zeros(program.columns), np.full(program.columns, np.inf)
    integer[: program.heaviest] = 1.0
    upper[: program.ends] = 1.0 if program.width > 1 else float(len(problem.pattern))
    upper[program.any(0) : program.heaviest] = 1.0
    upper[program.heaviest] = (problem.default_heaviest if most is None else most) * (1.0 + 1e-9)
    objective = np.zeros(program.columns)
    objective[program.heaviest] = 1.0
    objective[program.heaviest + 1 :] = ROWS
    found: Any = milp(
        objective,
        integrality=integer,
        bounds=Bounds(0.0, upper),
        constraints=LinearConstraint(csr_array(np.array(program.rows)), np.array(program.low), np.array(program.high)),
        options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
    )
    bound = getattr(found, "mip_dual_bound", None)
    # rows of chunks are in the objective, and no row's heaviest chunk is heavier than its stage
    rows = 1.0 + ROWS * problem.strategy.vpp
    seconds = 0.0 if bound is None or not np.isfinite(bound) else max(0.0, float(bound) / rows - FEASIBILITY)
    if found.x is None:
        return None, seconds
    return Solved(sizes=_sizes(program, found.x), again=_again(program, found.x)), seconds


def _order(program: _Program) -> None:
    """Every chunk ends at or after the one before; a chunk in the middle has a layer."""
    problem = program.problem
    numbers = np.arange(len(problem.pattern) + 1.0)
    for chunk in range(problem.chunks):
        row, constant = program.held(chunk, numbers)
        program.add(row, _least(problem, chunk) - constant, np.inf)
    if program.width == 1:
        return
    for chunk in range(problem.chunks - 1):
        at = chunk * program.width
        for layer in range(program.width):
            if layer + 1 < program.width:
                program.before(at + layer + 1, at + layer)
            further = at + program.width + layer + int(_least(problem, chunk + 1))
            if chunk + 2 < problem.chunks and further < at + 2 * program.width:
                program.before(at + layer, further)


def _least(problem: Problem, chunk: int) -> float:
    """The first and the last chunk have embedding or head to hold."""
    return 0.0 if chunk in (0, problem.chunks - 1) else float(min(problem.default[chunk], 1))


def _prefix(problem: Problem, per_segment: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.add.accumulate(np.array([per_segment[segment] for segment in problem.pattern]))])


def _stage(program: _Program, stage: int, again: int) -> None:
    """Load and bytes of one stage; `again` of its layers recomputed where the program does not choose."""
    problem, s = program.problem, program.problem.strategy
    chunks = chunks_of(stage, s.pp, s.vpp, s.schedule)
    edges = [problem.content(0, 0, chunk) for chunk in chunks]
    # where the program does not choose, the share that the default split repeats stays
    held = max(1, problem.stage_layers(problem.default)[stage])
    share = 0.0 if program.kinds else min(again, held) / held
    seconds = [once + share * more for once, more in zip(problem.busy, problem.repeat, strict=True)]
    total = np.zeros(program.columns)
    total[program.heaviest] = 1.0
    constant = 0.0
    for number, (chunk, edge) in enumerate(zip(chunks, edges, strict=True)):
        row, fixed = program.held(chunk, _prefix(problem, seconds))
        fixed += sum(n * t for n, t in zip(edge, seconds, strict=True))
        total, constant = total - row, constant + fixed
        of_row = -row
        of_row[program.heaviest + 1 + number] = 1.0
        program.add(of_row, fixed, np.inf)
    for kind, segment in enumerate(program.kinds):
        total[program.again(stage, kind)] -= problem.repeat[segment]
    program.add(total, constant, np.inf)
    _bytes(program, stage, chunks, again)


def _bytes(program: _Program, stage: int, chunks: Sequence[int], again: int) -> None:
    problem = program.problem
    base = problem.stage_content(problem.default, stage)
    edges = tuple(sum(column) for column in zip(*(problem.content(0, 0, c) for c in chunks), strict=True))
    again = 0 if program.kinds else again
    here = problem.phases(base, stage, again)
    segments = sorted(set(problem.pattern))
    slopes = {k: _slope(problem, base, stage, again, k) for k in segments}
    for phase, used in enumerate(here):
        each = [slopes[k][phase] if k in slopes else 0.0 for k in range(len(base))]
        inside = sum((b - e) * slope for b, e, slope in zip(base, edges, each, strict=True))
        total, constant = np.zeros(program.columns), used - inside
        for chunk in chunks:
            row, fixed = program.held(chunk, _prefix(problem, each))
            total, constant = total + row, constant + fixed
        for kind, segment in enumerate(program.kinds):
            saved, workspace = _saved(problem, base, stage, segment, phase)
            total[program.again(stage, kind)] -= saved
            total[program.any(stage)] = max(total[program.any(stage)], workspace)
        scale = 1.0 / problem.limit
        program.add(total * scale, -np.inf, (problem.limit - constant) * scale)
    _choices(program, stage, chunks, edges)


def _choices(program: _Program, stage: int, chunks: Sequence[int], edges: Content) -> None:
    """Of each kind no more layers are recomputed than there are, and none without the workspace."""
    problem = program.problem
    for kind, segment in enumerate(program.kinds):
        total, constant = np.zeros(program.columns), float(edges[segment])
        ones = [float(k == segment) for k in range(len(edges))]
        for chunk in chunks:
            row, fixed = program.held(chunk, _prefix(problem, ones))
            total, constant = total + row, constant + fixed
        total[program.again(stage, kind)] = -1.0
        program.add(total, -constant, np.inf)
        allowed = np.zeros(program.columns)
        allowed[program.any(stage)] = len(problem.pattern) + problem.eng.model.mtp_layers
        allowed[program.again(stage, kind)] = -1.0
        program.add(allowed, 0.0, np.inf)


def _slope(problem: Problem, base: Content, stage: int, again: int, segment: int) -> tuple[float, ...]:
    """Bytes of one more layer, per phase."""
    more = tuple(n + (k == segment) for k, n in enumerate(base))
    least = tuple(max(n, 1) if k == segment else n for k, n in enumerate(base))
    here, there = problem.phases(least, stage, again), problem.phases(more, stage, again)
    if base[segment] == 0:
        here = problem.phases(base, stage, again)
    return tuple(b - a for a, b in zip(here, there, strict=True))


def _saved(problem: Problem, base: Content, stage: int, segment: int, phase: int) -> tuple[float, float]:
    """(bytes saved by one recomputed layer of the kind, workspace of any): read off stages of that kind alone."""
    alone = tuple(2 if k == segment else n for k, n in enumerate((base[0], *[0] * (len(base) - 2), base[-1])))
    none, one, two = (problem.phases(alone, stage, again)[phase] for again in (0, 1, 2))
    return one - two, one + (one - two) - none


def _sizes(program: _Program, x: Floats) -> Sizes:
    layers = len(program.problem.pattern)
    numbers = np.arange(layers + 1.0)
    ends = [round(float(program.end(chunk, numbers)[0] @ x)) for chunk in range(program.problem.chunks - 1)]
    return tuple(int(n) for n in np.diff([0, *ends, layers]))


def _again(program: _Program, x: Floats) -> tuple[int, ...]:
    kinds = range(len(program.kinds))
    return tuple(
        round(sum(float(x[program.again(stage, kind)]) for kind in kinds))
        for stage in range(program.problem.strategy.pp)
    )
