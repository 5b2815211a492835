"""One strategy's pipeline as a problem of cutting its layers: what a cut costs, by the estimate's own prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distplan.costmodel.combine import LocalTables, StateTables, local_tables, state_tables
from distplan.costmodel.estimate import Estimate
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.replay import beyond_closed_form, load_of
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.stage_costs import (
    Activations,
    StateBytes,
    activations,
    chunks_in_flight,
    layers_only,
    stage_memory,
    state_bytes,
)
from distplan.costmodel.stage_load import segment_seconds
from distplan.costmodel.stages import Content, Run, Split, chunk_layers, chunks_of, split_of
from distplan.costmodel.step_end import weight_content
from distplan.costmodel.step_time import group_costs
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.tables import Engine, engine
from distplan.hardware.cluster import Cluster

Sizes = tuple[int, ...]
"""layers of every chunk, in the order of the model"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A way to cut the layers, priced. `again`: layers of every stage that are recomputed."""

    sizes: Sizes
    again: tuple[int, ...]
    seconds: float
    """of the step, its pipeline simulated"""
    heaviest: float
    """seconds of the heaviest stage, forward and backward of one micro-batch"""
    device_bytes: float
    """of the worst stage"""


@dataclass(slots=True, kw_only=True)
class Problem:
    """A strategy with the tables that price it (columns of length 1). Seconds are per segment and micro-batch."""

    eng: Engine
    cluster: Cluster
    runtime: Runtime
    strategy: Strategy
    global_batch: float
    usable: float
    local: LocalTables
    state: StateTables
    busy: tuple[float, ...]
    """forward and backward of each segment"""
    repeat: tuple[float, ...]
    """its recomputation"""
    default: Sizes
    default_again: int
    """layers of every stage that the default split recomputes"""
    limit: float = 0.0
    """device bytes that a stage may take: what fits, or what the default takes where that is more"""
    held: dict[Content, tuple[StateBytes, Activations]] = field(default_factory=dict)

    @property
    def pattern(self) -> tuple[int, ...]:
        return self.eng.pattern

    @property
    def chunks(self) -> int:
        return self.strategy.pp * self.strategy.vpp

    @property
    def micro_batches(self) -> float:
        return self.global_batch / (self.strategy.dp * self.strategy.micro_batch)

    def content(self, start: int, end: int, chunk: int) -> Content:
        """What a chunk holds that has the layers from start to end."""
        counts = [0] * len(self.eng.segments)
        for segment in self.pattern[start:end]:
            counts[segment] += 1
        counts[0] += chunk == 0
        if chunk == self.chunks - 1:
            mtp = self.eng.model.mtp_layers
            counts[-1] += 1 + mtp
            counts[-2] += mtp
        return tuple(counts)

    def cut(self, sizes: Sequence[int], again: Sequence[int]) -> Split:
        s = self.strategy
        mtp = self.eng.model.mtp_layers
        return split_of(self.pattern, len(self.eng.segments), sizes, s.pp, s.vpp, s.schedule, mtp, again)

    def stage_chunks(self, stage: int) -> tuple[int, ...]:
        return chunks_of(stage, self.strategy.pp, self.strategy.vpp, self.strategy.schedule)

    def stage_layers(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Layers of every stage, multi-token-prediction modules among them, as recomputation counts them."""
        s = self.strategy
        last = self.eng.model.mtp_layers
        return tuple(
            sum(sizes[c] + (last if c == self.chunks - 1 else 0) for c in chunks_of(stage, s.pp, s.vpp, s.schedule))
            for stage in range(s.pp)
        )

    def stage_content(self, sizes: Sequence[int], stage: int) -> Content:
        """What all chunks of a stage hold."""
        s = self.strategy
        starts = [sum(sizes[:chunk]) for chunk in range(len(sizes) + 1)]
        parts = [self.content(starts[c], starts[c + 1], c) for c in chunks_of(stage, s.pp, s.vpp, s.schedule)]
        return tuple(sum(column) for column in zip(*parts, strict=True))

    @property
    def default_heaviest(self) -> float:
        """Seconds of the default split's heaviest stage."""
        return max(self.default_loads())

    def default_loads(self) -> list[float]:
        again = self.default_again if self.strategy.recompute != "none" else 0
        return [self.load(self.stage_content(self.default, stage), again) for stage in range(self.strategy.pp)]

    def bound(self, *, recompute: bool) -> float:
        """No cut's heaviest stage is lighter, whatever the memory: the mean; layers all of one kind go one by one to
        the lightest stage, which is the best there is. `recompute`: it may be chosen, so that none is counted."""
        loads, s = self.default_loads(), self.strategy
        if recompute:
            loads = [self.load(self.stage_content(self.default, stage), 0) for stage in range(s.pp)]
        mean = sum(loads) / s.pp
        if len(set(self.pattern)) > 1 or s.recompute == "full":
            return mean
        repeats = s.recompute != "none"
        one = self.busy[1] + (self.repeat[1] if repeats else 0.0)
        ends = [self.content(0, 0, chunk) for chunk in range(self.chunks)]
        stages = [chunks_of(stage, s.pp, s.vpp, s.schedule) for stage in range(s.pp)]
        again = len(self.pattern) if repeats else 0
        filled = [sum(self.load(ends[chunk], again) for chunk in chunks) for chunks in stages]
        for _ in self.pattern:
            at = min(range(s.pp), key=filled.__getitem__)
            filled[at] += one
        return max(mean, *filled)

    def load(self, content: Content, again: int) -> float:
        """Seconds of a stage per micro-batch with `again` of its layers recomputed."""
        layers = layers_only(content)
        share = min(again, sum(layers)) / max(sum(layers), 1)
        once = sum(n * seconds for n, seconds in zip(content, self.busy, strict=True))
        return once + share * sum(n * seconds for n, seconds in zip(content, self.repeat, strict=True))

    def phases(self, content: Content, stage: int, again: int) -> tuple[float, ...]:
        """Device bytes of a stage in each of its phases."""
        if content not in self.held:
            acts = activations(content, self.local.plain, self.local.chosen)
            weights = weight_content(content, self.strategy.pp)
            kept = state_bytes(weights, self.state.tables, self.state.zero, self.eng.workload, self.eng.runtime)
            self.held[content] = kept, acts
        state, acts = self.held[content]
        s = self.strategy
        run = Run(content=content, first=stage, count=1)
        flight = chunks_in_flight(s.schedule, run, s.pp, s.vpp, np.array([self.micro_batches]))
        number = sum(layers_only(content))
        share = np.array([min(again, number) / max(number, 1)])
        found = stage_memory(run, state, acts, flight, share, self.eng.runtime, stage == s.pp - 1, self.usable)
        return tuple(float((p.allocated + p.fragmentation)[0] + self.eng.runtime.context_bytes) for p in found)

    def fits(self, content: Content, stage: int, again: int) -> bool:
        return max(self.phases(content, stage, again)) <= self.limit

    def least_again(self, content: Content, stage: int) -> int | None:
        """The least number of layers whose recomputation makes the stage fit; None if not even all of them do."""
        number = sum(layers_only(content))
        if self.fits(content, stage, 0):
            return 0
        if not number or not self.fits(content, stage, number):
            return None
        low, high = 1, number
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(content, stage, middle) else (middle + 1, high)
        return low

    def priced(self, sizes: Sequence[int], again: Sequence[int], seconds: float | None = None) -> Cut:
        """The step with these layers in the chunks, as the estimate prices it, its pipeline simulated (`seconds`:
        what was simulated before)."""
        s, eng = self.strategy, self.eng
        cut = self.cut(sizes, again)
        rows, gpus = Strategies.of([s]), np.array([float(s.gpus)])
        costs = group_costs(
            eng,
            rows,
            gpus,
            self.local,
            self.state,
            pp=s.pp,
            vpp=s.vpp,
            schedule=s.schedule,
            usable=self.usable,
            global_batch=self.global_batch,
            detail=False,
            cut=cut,
        )
        load = load_of(eng.model, eng.workload, self.cluster, self.runtime, s, float(costs.recompute_layers[0]), cut)
        if seconds is None:
            seconds = 0.0
            for part in costs.time:
                seconds += float(part[0])
            factor = self.eng.runtime.factor(self.cluster.accelerator.generation)
            seconds += factor * (beyond_closed_form(load, s, np.array([self.micro_batches])) or 0.0)
        heaviest = max(float((f + b)[0]) for f, b in zip(load.stage_forward, load.stage_backward, strict=True))
        return Cut(
            sizes=tuple(sizes),
            again=tuple(again),
            seconds=seconds,
            heaviest=heaviest,
            device_bytes=float(costs.device[0]),
        )


def problem_of(
    model: Model, workload: Workload, cluster: Cluster, runtime: Runtime, strategy: Strategy, estimate: Estimate
) -> Problem:
    """`estimate`: of the strategy with the default split, columns of length 1."""
    eng = engine(model, workload, cluster, runtime)
    rows, gpus = Strategies.of([strategy]), np.array([float(strategy.gpus)])
    local, state = local_tables(eng, rows, gpus), state_tables(eng, rows, gpus)
    forward, backward, repeat, _ = segment_seconds(eng, local, state, local.index, state.index, strategy.pp)
    usable, taken = float(estimate.usable_bytes[0]), float(estimate.device_bytes[0])
    return Problem(
        eng=eng,
        cluster=cluster,
        runtime=runtime,
        strategy=strategy,
        global_batch=float(workload.global_batch),
        usable=usable,
        local=local,
        state=state,
        busy=tuple(float(x) for x in (forward + backward)[:, 0]),
        repeat=tuple(float(x) for x in repeat[:, 0]),
        default=chunk_layers(len(eng.pattern), strategy.pp * strategy.vpp, model.mtp_layers),
        default_again=int(estimate.recompute_layers[0]),
        # the parts of the estimate are summed in another order than here
        limit=max(usable / eng.memory_band.high, taken * (1.0 + 1e-9)),
    )
