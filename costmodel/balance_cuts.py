"""Cuts of the layers into stages with the lightest heaviest stage: dynamic programming, exact.

best(s, j) = min over i of max(best(s−1, i), load of stage s with the layers i … j), over the stages that fit. With
several chunks a stage this needs layers all of one kind: then a stage's seconds and bytes depend on their number
alone, and they are spread over its chunks afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distplan.costmodel.balance_problem import Problem, Sizes
from distplan.costmodel.stages import Content, chunks_of

MOST_CUTS = 8
"""of the cuts with the same heaviest stage, so many are simulated"""
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Equally good cuts with what each stage recomputes, the smoothest first, and their heaviest stage in seconds."""

    cuts: tuple[tuple[Sizes, tuple[int, ...]], ...]
    heaviest: float


Stage = Callable[[int, int, int], tuple[float, int] | None]
"""(stage, first layer, end) -> (seconds, layers recomputed), None where it does not fit"""


def lightest(problem: Problem, again: int | None, most: float = math.inf) -> Found | None:
    """`again` layers of every stage recomputed, or (None) of each the least that fits. None where no cut fits with
    all stages within `most` seconds."""
    pp, layers = problem.strategy.pp, len(problem.pattern)
    stage = _stages(problem, again, most)
    least = [_least(problem, s) for s in range(pp)]
    table, heaviest = _table(stage, pp, layers, least)
    if math.isinf(heaviest):
        return None
    equal = heaviest * (1.0 + _ROUNDING)
    cuts = [_smoothest(stage, pp, layers, least, equal)]
    for sizes in _within(stage, table, pp, layers, least, equal):
        if sizes not in cuts:
            cuts.append(sizes)
        if len(cuts) == MOST_CUTS:
            break
    priced = tuple((_chunks(problem, sizes), _recomputed(stage, sizes)) for sizes in cuts)
    return Found(cuts=priced, heaviest=heaviest)


def dynamic(problem: Problem) -> bool:
    """Can this module cut it."""
    return problem.strategy.vpp == 1 or len(set(problem.pattern)) == 1


def _least(problem: Problem, stage: int) -> int:
    """Layers that a stage has at least: one a chunk, but for those with embedding or head."""
    chunks = chunks_of(stage, problem.strategy.pp, problem.strategy.vpp, problem.strategy.schedule)
    return sum(chunk not in (0, problem.chunks - 1) for chunk in chunks)


def _chunks(problem: Problem, sizes: Sizes) -> Sizes:
    """Layers of every chunk for those of every stage: the remainder goes to a stage's first chunks, and the chunk
    with the head gets least."""
    s = problem.strategy
    layers = [0] * problem.chunks
    for stage, number in enumerate(sizes):
        each, rest = divmod(number, s.vpp)
        for at, chunk in enumerate(chunks_of(stage, s.pp, s.vpp, s.schedule)):
            layers[chunk] = each + (at < rest)
    return tuple(layers)


def _stages(problem: Problem, again: int | None, most: float) -> Stage:
    known: dict[tuple[int, int, int], tuple[float, int] | None] = {}
    prefix = {0: problem.content(0, 0, -1)}
    for end in range(1, len(problem.pattern) + 1):
        counts = list(prefix[end - 1])
        counts[problem.pattern[end - 1]] += 1
        prefix[end] = tuple(counts)
    nothing = (0,) * problem.chunks
    edges = {s: problem.stage_content(nothing, s) for s in range(problem.strategy.pp)}

    def stage(s: int, start: int, end: int) -> tuple[float, int] | None:
        key = s, start, end
        if key not in known:
            content = tuple(b - a + e for a, b, e in zip(prefix[start], prefix[end], edges[s], strict=True))
            known[key] = priced(content, s)
        return known[key]

    def priced(content: Content, s: int) -> tuple[float, int] | None:
        # seconds are cheap to add up, bytes are not
        if problem.load(content, again or 0) > most:
            return None
        number = problem.least_again(content, s) if again is None else again
        if number is None or (again is not None and not problem.fits(content, s, number)):
            return None
        seconds = problem.load(content, number)
        return (seconds, number) if seconds <= most else None

    return stage


def _table(stage: Stage, pp: int, layers: int, least: list[int]) -> tuple[list[list[float]], float]:
    """(the lightest heaviest of stages s … pp−1 with the layers from i on [s][i], that of all)."""
    table = [[math.inf] * (layers + 1) for _ in range(pp)] + [[math.inf] * layers + [0.0]]
    for s in range(pp - 1, -1, -1):
        for start in range(layers + 1):
            best = math.inf
            for end in range(start + least[s], layers + 1):
                after = table[s + 1][end]
                if after >= best:
                    continue
                found = stage(s, start, end)
                if found is not None:
                    best = min(best, max(found[0], after))
            table[s][start] = best
    return table, table[0][0]


def _smoothest(stage: Stage, pp: int, layers: int, least: list[int], most: float) -> Sizes:
    """The cut with no stage above `most` and the least sum of squares."""
    costs = [[math.inf] * (layers + 1) for _ in range(pp)] + [[math.inf] * layers + [0.0]]
    ends = [[layers] * (layers + 1) for _ in range(pp)]
    for s in range(pp - 1, -1, -1):
        for start in range(layers + 1):
            for end in range(start + least[s], layers + 1):
                after = costs[s + 1][end]
                found = stage(s, start, end) if math.isfinite(after) else None
                if found is not None and found[0] <= most and found[0] * found[0] + after < costs[s][start]:
                    costs[s][start], ends[s][start] = found[0] * found[0] + after, end
    sizes, start = [], 0
    for s in range(pp):
        sizes.append(ends[s][start] - start)
        start = ends[s][start]
    return tuple(sizes)


def _within(
    stage: Stage,
    table: list[list[float]],
    pp: int,
    layers: int,
    least: list[int],
    most: float,
    s: int = 0,
    start: int = 0,
) -> Iterator[Sizes]:
    """Every cut with no stage above `most`."""
    if s == pp:
        yield ()
        return
    for end in range(start + least[s], layers + 1):
        if table[s + 1][end] > most:
            continue
        found = stage(s, start, end)
        if found is not None and found[0] <= most:
            for rest in _within(stage, table, pp, layers, least, most, s + 1, end):
                yield (end - start, *rest)


def _recomputed(stage: Stage, sizes: Sizes) -> tuple[int, ...]:
    again, start = [], 0
    for s, size in enumerate(sizes):
        found = stage(s, start, start + size)
        assert found is not None
        again.append(found[1])
        start += size
    return tuple(again)
