"""What every stage of one strategy holds, sends and does at the step's end; an estimate shows the worst stage only.

The prices are the estimate's own: the same tables, summed over what each stage holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from distplan.costmodel.case import Case
from distplan.costmodel.lower import PHASES as JOB_PHASES
from distplan.costmodel.lower import axis_class
from distplan.costmodel.stage_costs import MEMORY_PARTS, PHASES, WorstMemory, chunks_in_flight, run_sum, stage_memory
from distplan.costmodel.stage_load import StageLoad, by_segment
from distplan.costmodel.stages import Content
from distplan.costmodel.state import gathers
from distplan.costmodel.step_end import last_round, once_a_step, optimizer_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOfStage:
    """Bytes on one GPU of a stage in its own worst phase; `parts` add up to `device_bytes`."""

    stage: int
    phase: str
    parts: Mapping[str, float]
    device_bytes: float


def memory_by_stage(case: Case) -> tuple[MemoryOfStage, ...]:
    """One entry per stage; the largest is the estimate's device_bytes."""
    s, runtime = case.strategy, case.eng.runtime
    usable = float(case.estimate.usable_bytes[0])
    found = []
    for run in case.stages():
        flight = chunks_in_flight(s.schedule, run, s.pp, s.vpp, case.estimate.num_micro_batches)
        share = np.array([case.share(run)])
        is_last = run.first == s.pp - 1
        states, acts = case.states(run.content), case.acts(run.content)
        phases = stage_memory(run, states, acts, flight, share, runtime, is_last, usable)
        worst = WorstMemory.of(phases, runtime)
        sizes = worst.parts(phases, runtime)[:, 0]
        parts = {name: float(size) for name, size in zip(MEMORY_PARTS, sizes, strict=True)}
        phase = PHASES[int(worst.phase[0])]
        found.append(MemoryOfStage(stage=run.first, phase=phase, parts=parts, device_bytes=float(worst.device[0])))
    return tuple(found)


def kept_by_chunk(case: Case) -> list[float]:
    """Bytes that each virtual stage keeps of one micro-batch from its forward to its backward."""
    kept = []
    for chunk in case.chunks():
        acts, share = case.acts(chunk.content), case.share(case.holder_of(chunk))
        kept.append(float(acts.kept[0] - share * (acts.kept[0] - acts.least[0])))
    return kept


def always_held(case: Case) -> list[float]:
    """Bytes of parameters, gradients, optimizer states and context of each stage."""
    held = [case.states(run.content) for run in case.stages()]
    return [float((x.parameters + x.gradients + x.optimizer)[0]) + case.eng.runtime.context_bytes for x in held]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind on one axis that a virtual stage runs in the forward or backward of a micro-batch."""

    job: str
    """F or B; a recomputed forward is in B"""
    axis: str
    """tp, cp, ep or dp"""
    kind: str
    seconds: float
    exposed_seconds: float


def traffic_by_chunk(case: Case) -> list[tuple[Traffic, ...]]:
    """Per virtual stage, in the order of the Program; before the software factor."""
    local = case.eng.local_costs(case.lowered(), case.columns, case.strategy.cp_kind)
    found = []
    for chunk in case.chunks():
        content, share = chunk.content, case.share(case.holder_of(chunk))
        sums: dict[tuple[str, str, str], list[float]] = {}
        for exchange in local.exchanges:
            work, phase = exchange.work, JOB_PHASES[exchange.work.phase]
            times = content[work.segment] * work.times * (share if phase == "recompute" else 1.0)
            key = ("F" if phase == "forward" else "B", axis_class(work.axes), work.kind)
            both = sums.setdefault(key, [0.0, 0.0])
            both[0] += times * float(exchange.seconds[0])
            both[1] += times * float(exchange.exposed_seconds[0])
        rows = [Traffic(job=j, axis=a, kind=k, seconds=t, exposed_seconds=e) for (j, a, k), (t, e) in sums.items() if t]
        found.append((*rows, *_of_state(case, content)))
    return found


def _of_state(case: Case, content: Content) -> tuple[Traffic, ...]:
    """What ZeRO moves every micro-batch; its exposed time is not told apart."""
    runtime, zero = case.eng.runtime, case.state.zero
    gather, reduction, replication = (
        by_segment(case.state, name, case.strategy.pp) for name in ("gather", "reduce", "replicate")
    )
    in_forward, in_backward = gathers(zero, runtime.state, len(gather))
    within, across = runtime.reduces_each(zero, case.strategy.pp)
    kind = "reduce_scatter" if zero[0] >= 1.0 else "all_reduce"
    tables = (
        ("F", "all_gather", gather * in_forward),
        ("B", "all_gather", gather * in_backward),
        ("B", kind, reduction * within),
        ("B", "all_reduce", replication * across),
    )
    sums = [(job, kind, float(run_sum(content, table)[0])) for job, kind, table in tables]
    return tuple(Traffic(job=job, axis="dp", kind=kind, seconds=t, exposed_seconds=0.0) for job, kind, t in sums if t)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """Seconds of what a step has once, per stage where a list; its exposed parts are those of the estimate."""

    reduce: list[float]
    """gradients, beginning during the last backward"""
    reduce_hidden: list[float]
    gather: list[float]
    """parameters, at the beginning of the step"""
    exposed_gather: float
    exposed_reduce: float
    tied: float
    """the all-reduce of a tied embedding's gradients, between the first and the last stage"""
    clip: float
    optimizer: list[float]

    @property
    def seconds(self) -> float:
        """What the step is longer than its pipeline section."""
        return self.exposed_gather + self.exposed_reduce + self.tied + self.clip + max(self.optimizer)


def step_end(case: Case, load: StageLoad) -> StepEnd:
    """`load` of the same strategy (replay.load_of). How much hides where is said at step_end.py."""
    eng, pp = case.eng, case.strategy.pp
    forward = [
        float(f[0]) for f, run in zip(load.stage_forward, case.cut.stages, strict=True) for _ in range(run.count)
    ]
    backward = [
        float(b[0]) for b, run in zip(load.stage_backward, case.cut.stages, strict=True) for _ in range(run.count)
    ]
    p2p = float(load.p2p[0])
    last = float(last_round(case.estimate.num_micro_batches, pp, case.strategy.vpp, case.strategy.schedule)[0])
    reduces, hidden, gatherings, left, late = [], [], [], [0.0], [0.0]
    for stage, run in enumerate(case.stages()):
        behind = np.array([last * forward[stage]]), np.array([last * backward[stage]])
        once = once_a_step(eng, case.state, run.content, pp, *behind)
        reduce, gather = float(once.reduce[0]), float(once.gather[0])
        left.append(reduce - float(once.reduce_hidden[0]) - (sum(backward[:stage]) + stage * p2p))
        late.append(gather - float(once.gather_hidden[0]) - (sum(forward[:stage]) + stage * p2p))
        reduces.append(reduce)
        hidden.append(float(once.reduce_hidden[0]))
        gatherings.append(gather)
    return StepEnd(
        reduce=reduces,
        reduce_hidden=hidden,
        gather=gatherings,
        exposed_gather=max(late),
        exposed_reduce=max(left),
        tied=float(case.state.tables["tied"][0]),
        clip=float(case.state.tables["clip"][0]),
        optimizer=[float(optimizer_seconds(eng, case.states(run.content))[0]) for run in case.stages()],
    )
