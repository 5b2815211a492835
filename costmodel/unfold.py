"""An estimate taken apart again: every operator and collective behind its totals (unfold_memory.py: tensors).

The prices are those of the estimate: the same lowered Program goes through the same `local_costs`, each
of its works as a segment of its own, so that sums over segments fall apart into operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distplan.costmodel.case import Case
from distplan.costmodel.exchanges import evaluate_terms
from distplan.costmodel.layout import join_axes
from distplan.costmodel.lower import CATEGORIES, PHASES, Lowered, Work
from distplan.costmodel.program import COLLECTIVES, SegmentProgram
from distplan.costmodel.stages import Run
from distplan.costmodel.state_path import state_path
from distplan.costmodel.strategy import Floats

PART_OF_CATEGORY: Mapping[str, str] = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound",
    "tp": "exposed tp",
    "cp": "exposed cp",
    "ep": "exposed ep",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator or collective of one segment on the critical stage, per GPU and step."""

    part: str
    """of the step time that it is counted in"""
    segment: str
    name: str
    kind: str
    phase: str
    dtype: str
    sizes: Mapping[str, float]
    """local m, n, k, batch of a product; q, kv, head_dim, lines of attention; empty for others"""
    calls: float
    seconds: float
    """what the step waits for: of a collective the exposed time; of merged products that of the one kernel"""
    flops: float
    """what the kernel executes"""
    moved_bytes: float
    """by a memory-bound kernel"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A collective of the Program and the placements that it goes between."""

    segment: str
    name: str
    kind: str
    axis: str
    phase: str
    before: str
    after: str
    behind: tuple[str, ...]
    """operators that it can hide behind"""


# ---------------------------------------------------------------- time


def operators(case: Case) -> tuple[Operator, ...]:
    """Every operator of the critical stage that runs, forward to backward. Before the software factor."""
    lowered = case.lowered()
    prices = case.eng.local_costs(lowered, case.columns, case.strategy.cp_kind).prices
    table = lowered.sizes.evaluate(case.eng.rows(case.columns, case.strategy.cp_kind).symbols)
    made = []
    run = critical_run(case, lowered, prices.seconds)
    for at, work in enumerate(lowered.works):
        calls = _calls(case, work, run)
        if calls and work.leader < 0:
            seconds = work.times * float(prices.seconds[at][0])
            flops = work.times * float(prices.kernel[at][0]) if at in prices.kernel else 0.0
            members = [other for other in lowered.works if other.leader == at]
            made.append(_operator(case, work, members, table, calls, seconds, flops))
    return tuple(made)


def _calls(case: Case, work: Work, run: Run) -> float:
    m = float(case.estimate.num_micro_batches[0])
    share = case.share(run) if PHASES[work.phase] == "recompute" else 1.0
    return run.content[work.segment] * m * share


def critical_run(case: Case, lowered: Lowered, seconds: Mapping[int, Floats]) -> Run:
    """The stage whose operators take longest per micro-batch: what the step time's parts are those of.

    seconds: of one pass of each work by its position.
    """

    def load(run: Run) -> float:
        total = 0.0
        for at, work in enumerate(lowered.works):
            total += _calls(case, work, run) * work.times * float(seconds[at][0])
        return total

    return max(case.cut.stages, key=load)


def _operator(
    case: Case, work: Work, members: Sequence[Work], table: Floats, calls: float, seconds: float, flops: float
) -> Operator:
    """`members` are products that run as part of this one: their widths add up."""
    category, phase = CATEGORIES[work.category], PHASES[work.phase]
    names = {"gemm": ("m", "n", "k", "batch", "experts"), "attention": ("q", "kv", "head_dim", "lines", "v_head_dim")}
    numbers = {"gemm": (work.m, work.n, work.k, work.batch, work.groups),
               "attention": (work.m, work.n, work.k, work.batch, work.groups)}  # fmt: skip
    sizes = {n: float(table[i, 0]) for n, i in zip(names.get(category, ()), numbers.get(category, ()), strict=True)}
    for member in members:
        sizes[member.grows] += float(table[getattr(member, member.grows), 0])
    moved = float(evaluate_terms(work.terms, table)[0]) if category == "memory_bound" else 0.0
    part = "recompute" if phase == "recompute" else PART_OF_CATEGORY[category]
    kind = "matrix product" if category == "gemm" else work.kind
    return Operator(
        part=part,
        segment=case.eng.segments[work.segment].name,
        name=_joined(work, members),
        kind=kind,
        phase=phase,
        dtype=work.dtype,
        sizes=sizes,
        calls=calls,
        seconds=calls * seconds,
        flops=calls * flops,
        moved_bytes=calls * moved,
    )


def _joined(work: Work, members: Sequence[Work]) -> str:
    """layer.attention.q+k+v"""
    name = work.name.split("@")[0]
    ending = name[name.rindex(".") :] if name.endswith(("dgrad", "wgrad")) else ""
    words = [each.name.split("@")[0].removesuffix(ending).rpartition(".")[2] for each in members]
    return "+".join([name.removesuffix(ending), *words]) + ending


# ---------------------------------------------------------------- communication


def moves(case: Case) -> tuple[Move, ...]:
    """Collectives of activations and their gradients, and of weights and their gradients, with placements."""
    made: dict[Move, None] = {}
    for program in case.programs(case.strategy.recompute):
        made |= dict.fromkeys(_moves_of(program))
    for program in case.programs("none"):
        for weight in program.segment.weights:
            path = state_path(program, weight, case.strategy.zero >= 1)
            ways = (("gradients", path.gradient, path.reduce), ("parameters", path.stored, path.gather))
            for role, start, steps in ways:
                before = start
                for step in steps:
                    move = Move(
                        segment=program.segment.name,
                        name=role,
                        kind=step.kind,
                        axis=join_axes(step.axes),
                        phase="",
                        before=f"{weight.name} {before}",
                        after=str(step.result),
                        behind=(),
                    )
                    if step.kind != "slice":
                        made[move] = None
                    before = step.result
    return tuple(made)


def _moves_of(program: SegmentProgram) -> Iterator[Move]:
    for node in program.nodes:
        if node.kind in COLLECTIVES and node.kind != "slice":
            yield Move(
                segment=program.segment.name,
                name=node.name.split("@")[0],
                kind=node.kind,
                axis=join_axes(node.axes),
                phase=node.phase,
                before=str(program.values[node.inputs[0]].layout),
                after=str(program.values[node.outputs[0]].layout),
                behind=node.behind,
            )
