"""The step of one strategy by event simulation of its schedule's job lists, in place of the closed form."""

from __future__ import annotations

import numpy as np

from distplan.costmodel.combine import local_tables, state_tables
from distplan.costmodel.estimate import Estimate
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime, on_cluster
from distplan.costmodel.schedules import ScheduleError, build_schedule
from distplan.costmodel.simulate import StageCosts, simulate
from distplan.costmodel.simulate_repeat import simulate_step
from distplan.costmodel.stage_load import StageLoad, stage_load
from distplan.costmodel.stages import Split
from distplan.costmodel.strategy import Floats, Strategies, Strategy
from distplan.costmodel.tables import engine
from distplan.hardware.cluster import Cluster

MOST_JOBS = 50_000
"""pairs of chunk and micro-batch that are simulated one by one"""


def load_of(
    model: Model,
    workload: Workload,
    cluster: Cluster,
    runtime: Runtime,
    strategy: Strategy,
    recompute_layers: float,
    cut: Split | None = None,
) -> StageLoad:
    """Seconds of every stage and chunk of one strategy: what the closed form gets, columns of length 1. `cut`: the
    split of the layers, the strategy's if None."""
    rows = Strategies.of([strategy])
    eng = engine(model, workload, cluster, runtime)
    gpus = np.array([float(strategy.gpus)])
    if cut is None:
        cut = eng.split(strategy.pp, strategy.vpp, strategy.schedule, strategy.stage_layers)
    local, state = local_tables(eng, rows, gpus), state_tables(eng, rows, gpus)
    layers = np.array([recompute_layers])
    s = strategy
    return stage_load(eng, local, state, local.index, state.index, gpus, layers, cut, s.pp, s.vpp, s.schedule)


def stage_costs(load: StageLoad) -> StageCosts:
    """The load of each virtual stage, in the order of the model, for the simulation."""
    columns = (load.chunk_forward, load.chunk_backward, load.chunk_input)
    forward, backward, inputs = (
        [float(x[0]) for x, count in zip(column, load.chunk_counts, strict=True) for _ in range(count)]
        for column in columns
    )
    return StageCosts(
        forward=forward, backward=backward, input_gradient=inputs, p2p=float(load.p2p[0]), overlap_p2p=load.overlap_p2p
    )


def simulate_plan(
    model: Model, workload: Workload, cluster: Cluster, runtime: Runtime, strategy: Strategy, estimate: Estimate
) -> float | None:
    """Seconds of the step with its pipeline section simulated; None without a pipeline."""
    if strategy.pp == 1:
        return None
    load = load_of(model, workload, cluster, runtime, strategy, float(estimate.recompute_layers[0]))
    beyond = beyond_closed_form(load, strategy, estimate.num_micro_batches[:1])
    if beyond is None:
        return None
    return float(
        estimate.step_seconds[0] + on_cluster(runtime, cluster).factor(cluster.accelerator.generation) * beyond
    )


def beyond_closed_form(load: StageLoad, strategy: Strategy, m: Floats) -> float | None:
    """Seconds of the simulated pipeline section less those of the closed form; `m` micro-batches, length 1. None
    where no framework's job lists are known for so many micro-batches."""
    closed = load.pipeline_time(strategy.schedule, m, strategy.pp, strategy.vpp).seconds[0]
    seconds = _simulated(load, strategy, int(m[0]))
    return None if seconds is None else float(seconds - closed)


def dialects(schedule: str) -> tuple[str, ...]:
    """Whose job lists are tried, in order: Megatron takes interleaved micro-batches in rounds of one per stage, torch
    cuts others into rounds of its own. '' is the schedule's default."""
    return ("", "torch") if schedule == "interleaved" else ("",)


def _simulated(load: StageLoad, strategy: Strategy, m: int) -> float | None:
    """torch's rounds follow from the number of micro-batches, so that no shorter run tells of the longer."""
    name, pp, vpp, costs = strategy.schedule, strategy.pp, strategy.vpp, stage_costs(load)
    for dialect in dialects(name):
        try:
            if not dialect:
                return simulate_step(name, stages=pp, micro_batches=m, chunks=vpp, costs=costs).seconds
            if m * pp * vpp <= MOST_JOBS:
                jobs = build_schedule(name, stages=pp, micro_batches=m, chunks=vpp, dialect=dialect)
                return simulate(jobs, costs, record=False).seconds
        except ScheduleError:
            continue
    return None
