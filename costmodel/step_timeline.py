"""A whole step of one strategy on the streams of every stage: what computes, what is sent, what is held, when.

The pipeline section is the simulation that `estimate` reports; around it stand the gathering of parameters, the
reduction of gradients and the optimizer. Everything ends at the estimate's step time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distplan.costmodel.by_stage import StepEnd, Traffic, always_held, kept_by_chunk, step_end, traffic_by_chunk
from distplan.costmodel.case import case_of
from distplan.costmodel.estimate import Estimate
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.replay import dialects, load_of, stage_costs
from distplan.costmodel.runtime import Runtime, on_cluster
from distplan.costmodel.schedules import Schedule, ScheduleError, build_schedule
from distplan.costmodel.simulate import Event, Simulation, simulate
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import Cluster

LANES = ("compute", "p2p", "tp", "cp", "ep", "dp", "pp")
MAX_JOBS = 50_000
"""jobs (forwards and backwards of all stages) of the longest timeline; of more micro-batches the first are shown"""


class Box(NamedTuple):
    """Something on a lane of a stage, in seconds from the step's begin; micro_batch −1: of the whole step."""

    stage: int
    lane: str
    name: str
    start: float
    end: float
    chunk: int = 0
    micro_batch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """`memory` are (time, bytes) of each stage: states, context and saved activations."""

    boxes: tuple[Box, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    seconds: float
    shown: int
    """micro-batches in the timeline"""
    micro_batches: int
    """of the step"""
    simulation: Simulation
    """of the pipeline section, whose times are before the software factor"""


def step_timeline(
    model: Model,
    workload: Workload,
    cluster: Cluster,
    runtime: Runtime,
    strategy: Strategy,
    estimate: Estimate,
    *,
    max_jobs: int = MAX_JOBS,
) -> StepTimeline:
    """`estimate` is that of the strategy. With more jobs than max_jobs a step of fewer micro-batches is shown."""
    case = case_of(model, workload, cluster, runtime, strategy, estimate)
    load = load_of(model, workload, cluster, runtime, strategy, float(estimate.recompute_layers[0]))
    kept = kept_by_chunk(case)
    micro_batches = int(estimate.num_micro_batches[0])
    schedule = _schedule(strategy, _shown(strategy, micro_batches, max_jobs))
    shown = schedule.micro_batches
    run = simulate(schedule, replace(stage_costs(load), activation=kept))
    end = step_end(case, load)
    factor = on_cluster(runtime, cluster).factor(cluster.accelerator.generation)
    begin = end.exposed_gather
    boxes = [*_pipeline(run, traffic_by_chunk(case), factor, begin), *_ends(run, end, factor)]
    held = always_held(case)
    memory = tuple(
        ((0.0, base), *((begin + when * factor, base + more) for when, more in course))
        for base, course in zip(held, run.memory, strict=True)
    )
    return StepTimeline(
        boxes=tuple(sorted(boxes, key=lambda box: (box.stage, LANES.index(box.lane), box.start))),
        memory=memory,
        seconds=run.seconds * factor + end.seconds,
        shown=shown,
        micro_batches=micro_batches,
        simulation=run,
    )


def _shown(strategy: Strategy, micro_batches: int, max_jobs: int) -> int:
    """As many micro-batches as max_jobs allows, in whole rounds of pp with the same rest; two rounds at least."""
    most = max_jobs // (2 * strategy.pp * strategy.vpp)
    if micro_batches <= most:
        return micro_batches
    rest = micro_batches % strategy.pp
    rounds = max(2, (most - rest) // strategy.pp)
    return min(micro_batches, rounds * strategy.pp + rest)


def _schedule(strategy: Strategy, micro_batches: int) -> Schedule:
    """The job lists that the estimate simulates (replay.py); where there are none for so many micro-batches, those
    for the next lower number in whole rounds of pp. Raises ScheduleError where there are none at all."""
    whole = micro_batches - micro_batches % strategy.pp
    tries = [(dialect, micro_batches) for dialect in dialects(strategy.schedule)]
    if len(tries) > 1:
        tries.append(("", whole))
    for at, (dialect, number) in enumerate(tries, start=1):
        try:
            return build_schedule(
                strategy.schedule, stages=strategy.pp, micro_batches=number, chunks=strategy.vpp, dialect=dialect
            )
        except ScheduleError:
            if at == len(tries):
                raise
    raise AssertionError("unreachable")


def _pipeline(run: Simulation, traffic: Sequence[Sequence[Traffic]], factor: float, begin: float) -> Iterator[Box]:
    for event in run.events:
        start, end = begin + event.start * factor, begin + event.end * factor
        lane = "compute" if event.stream == "compute" else "p2p"
        if event.kind == "OPT":
            continue
        yield Box(event.rank, lane, f"{event.kind} {event.micro_batch}", start, end, event.chunk, event.micro_batch)
        if lane == "compute" and event.kind in ("F", "B", "I"):
            yield from _inside(run.schedule, event, traffic, start, end, factor)


def _inside(
    schedule: Schedule, event: Event, traffic: Sequence[Sequence[Traffic]], start: float, end: float, factor: float
) -> Iterator[Box]:
    """The collectives of one job, axis by axis one after the other from the job's begin: a job is not resolved into
    layers. Those that would not fit (hidden beyond the job) are drawn shorter, all by the same factor."""
    job = "F" if event.kind == "F" else "B"
    by_axis: Mapping[str, list[Traffic]] = defaultdict(list)
    for item in traffic[schedule.virtual(event.rank, event.chunk)]:
        if item.job == job:
            by_axis[item.axis].append(item)
    for axis, items in by_axis.items():
        total = sum(item.seconds for item in items) * factor
        scale = factor * min(1.0, (end - start) / total)
        at = start
        for item in items:
            until = min(at + item.seconds * scale, end)
            name = f"{axis} {item.kind.replace('_', ' ')}"
            if until > at:
                yield Box(event.rank, axis, name, at, until, event.chunk, event.micro_batch)
            at = until


def _ends(run: Simulation, end: StepEnd, factor: float) -> Iterator[Box]:
    """What a step has once. Gradients begin to be reduced during a stage's last backward."""
    begin = end.exposed_gather
    done = begin + run.seconds * factor + end.exposed_reduce
    last: dict[int, float] = defaultdict(float)
    for event in run.events:
        if event.stream == "compute" and event.kind != "OPT":
            last[event.rank] = max(last[event.rank], event.end)
    for stage, (gather, reduce, hidden) in enumerate(zip(end.gather, end.reduce, end.reduce_hidden, strict=True)):
        after = begin + last[stage] * factor - hidden
        boxes = [
            Box(stage, "dp", "parameter gathering", 0.0, gather),
            Box(stage, "dp", "gradient reduction", after, after + reduce),
            Box(stage, "dp", "gradient norm", done + end.tied, done + end.tied + end.clip),
        ]
        if stage in (0, len(end.gather) - 1):
            boxes.append(Box(stage, "pp", "tied embedding gradients", done, done + end.tied))
        updated = done + end.tied + end.clip
        boxes.append(Box(stage, "compute", "optimizer", updated, updated + end.optimizer[stage]))
        yield from (box for box in boxes if box.end > box.start)
