"""What every stage of one strategy holds, sends and does at the step's end; an estimate shows the worst stage only.

The prices are the estimate's own: the same tables, summed over what each stage holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from distplan.costmodel.combine import LocalTables, StateTables, local_tables, state_tables
from distplan.costmodel.estimate import Estimate
from distplan.costmodel.lower import PHASES as JOB_PHASES
from distplan.costmodel.lower import axis_class, lower
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.stage_costs import (
    MEMORY_PARTS,
    PHASES,
    Activations,
    StateBytes,
    WorstMemory,
    activations,
    chunks_in_flight,
    layers_only,
    run_sum,
    stage_memory,
    state_bytes,
)
from distplan.costmodel.stage_load import StageLoad
from distplan.costmodel.stages import Content, Run, Split, split
from distplan.costmodel.state import gathers
from distplan.costmodel.step_end import last_round, moved_once, optimizer_seconds, weight_content
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.tables import LOCAL_KEY, Engine, engine
from distplan.hardware.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """One strategy with the tables that price it (columns of length 1)."""

    eng: Engine
    strategy: Strategy
    estimate: Estimate
    cut: Split
    local: LocalTables
    state: StateTables

    def contents(self) -> list[Content]:
        """What each virtual stage holds, in the order of the model."""
        runs = self.cut.chunks if self.strategy.vpp > 1 else self.cut.stages
        return [run.content for run in runs for _ in range(run.count)]

    def stages(self) -> list[Run]:
        """Every stage as a run of its own."""
        return [
            Run(content=run.content, first=run.first + at, count=1)
            for run in self.cut.stages
            for at in range(run.count)
        ]

    def share(self, content: Content) -> float:
        """Part of a stage's layers that is recomputed."""
        held = sum(layers_only(content))
        return min(float(self.estimate.recompute_layers[0]), float(held)) / max(held, 1)

    def acts(self, content: Content) -> Activations:
        return activations(content, self.local.plain, self.local.chosen)

    def states(self, content: Content) -> StateBytes:
        weights = weight_content(content, self.strategy.pp)
        return state_bytes(weights, self.state.tables, self.state.zero, self.eng.workload, self.eng.runtime)


def staged(
    model: Model, workload: Workload, cluster: Cluster, runtime: Runtime, strategy: Strategy, estimate: Estimate
) -> Staged:
    """`estimate` is that of the strategy, whose micro-batches and recomputed layers are used."""
    rows = Strategies.of([strategy])
    eng = engine(model, workload, cluster, runtime)
    gpus = np.array([float(strategy.gpus)])
    v_shaped = strategy.schedule == "zb_v"
    cut = split(eng.pattern, len(eng.segments), strategy.pp, strategy.vpp, model.mtp_layers, v_shaped)
    local, state = local_tables(eng, rows, gpus), state_tables(eng, rows, gpus)
    return Staged(eng=eng, strategy=strategy, estimate=estimate, cut=cut, local=local, state=state)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOfStage:
    """Bytes on one GPU of a stage in its own worst phase; `parts` add up to `device_bytes`."""

    stage: int
    phase: str
    parts: Mapping[str, float]
    device_bytes: float


def memory_by_stage(case: Staged) -> tuple[MemoryOfStage, ...]:
    """One entry per stage; the largest is the estimate's device_bytes."""
    s, runtime = case.strategy, case.eng.runtime
    usable = float(case.estimate.usable_bytes[0])
    found = []
    for run in case.stages():
        flight = chunks_in_flight(s.schedule, run, s.pp, s.vpp, case.estimate.num_micro_batches)
        share = np.array([case.share(run.content)])
        is_last = run.first == s.pp - 1
        states, acts = case.states(run.content), case.acts(run.content)
        phases = stage_memory(run, states, acts, flight, share, runtime, is_last, usable)
        worst = WorstMemory.of(phases, runtime)
        sizes = worst.parts(phases, runtime)[:, 0]
        parts = {name: float(size) for name, size in zip(MEMORY_PARTS, sizes, strict=True)}
        phase = PHASES[int(worst.phase[0])]
        found.append(MemoryOfStage(stage=run.first, phase=phase, parts=parts, device_bytes=float(worst.device[0])))
    return tuple(found)


def kept_by_chunk(case: Staged) -> list[float]:
    """Bytes that each virtual stage keeps of one micro-batch from its forward to its backward."""
    kept = []
    for content in case.contents():
        acts, share = case.acts(content), case.share(content)
        kept.append(float(acts.kept[0] - share * (acts.kept[0] - acts.least[0])))
    return kept


def always_held(case: Staged) -> list[float]:
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


def traffic_by_chunk(case: Staged) -> list[tuple[Traffic, ...]]:
    """Per virtual stage, in the order of the Program; before the software factor."""
    s, eng = case.strategy, case.eng
    columns = {name: np.array([float(getattr(s, name))]) for name in LOCAL_KEY} | {"gpus": np.array([float(s.gpus)])}
    structure = eng.structure(str(s.sp).lower(), s.cp_kind, s.recompute)
    local = eng.local_costs(lower(eng.program(structure), eng.workload), columns, s.cp_kind)
    found = []
    for content in case.contents():
        sums: dict[tuple[str, str, str], list[float]] = {}
        for exchange in local.exchanges:
            work, phase = exchange.work, JOB_PHASES[exchange.work.phase]
            times = content[work.segment] * work.times * (case.share(content) if phase == "recompute" else 1.0)
            key = ("F" if phase == "forward" else "B", axis_class(work.axes), work.kind)
            both = sums.setdefault(key, [0.0, 0.0])
            both[0] += times * float(exchange.seconds[0])
            both[1] += times * float(exchange.exposed_seconds[0])
        rows = [Traffic(job=j, axis=a, kind=k, seconds=t, exposed_seconds=e) for (j, a, k), (t, e) in sums.items() if t]
        found.append((*rows, *_of_state(case, content)))
    return found


def _of_state(case: Staged, content: Content) -> tuple[Traffic, ...]:
    """What ZeRO moves every micro-batch; its exposed time is not told apart."""
    runtime, zero = case.eng.runtime, case.state.zero
    gather = case.state.tables["gather"][:-1]
    in_forward, in_backward = gathers(zero, runtime.state, len(gather))
    timing = runtime.grad_reduce_pipeline if case.strategy.pp > 1 else runtime.grad_reduce_sharded
    each = 1.0 if timing == "micro_batch" and zero[0] >= 2.0 else 0.0
    tables = (
        ("F", "all_gather", gather * in_forward),
        ("B", "all_gather", gather * in_backward),
        ("B", "reduce_scatter", case.state.tables["reduce"][:-1] * each),
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


def step_end(case: Staged, load: StageLoad) -> StepEnd:
    """`load` of the same strategy (replay.load_of). How much hides where is said at step_end.py."""
    eng, pp = case.eng, case.strategy.pp
    forward = [
        float(f[0]) for f, run in zip(load.stage_forward, case.cut.stages, strict=True) for _ in range(run.count)
    ]
    backward = [
        float(b[0]) for b, run in zip(load.stage_backward, case.cut.stages, strict=True) for _ in range(run.count)
    ]
    of_param, of_grad = eng.runtime.hidden("dp_param"), eng.runtime.hidden("dp_grad")
    p2p = float(load.p2p[0])
    vpp = case.strategy.vpp if case.strategy.schedule == "interleaved" else 1
    last = float(last_round(case.estimate.num_micro_batches, pp, vpp)[0])
    reduces, hidden, gatherings, left, late = [], [], [], [0.0], [0.0]
    for stage, run in enumerate(case.stages()):
        content = weight_content(run.content, pp)
        reduce, gather = (float(x[0]) for x in moved_once(eng, case.state, content, pp))
        parts = max(1, sum(content))
        most = (parts - 1.0) / parts
        behind = of_grad * min(last * backward[stage], reduce * most)
        left.append(reduce - behind - (sum(backward[:stage]) + stage * p2p))
        before = sum(forward[:stage]) + stage * p2p
        late.append(gather - of_param * min(last * forward[stage], gather * most) - before)
        reduces.append(reduce)
        hidden.append(behind)
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
