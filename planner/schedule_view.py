"""Pipeline schedules side by side: what was asked -> simulated runs -> plain data and a drawn timeline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distplan.costmodel.schedules import (
    ONE_CHUNK,
    SCHEDULES,
    SINGLE,
    TWO_CHUNKS,
    UNIT_TIMES,
    Schedule,
    ScheduleError,
    build_schedule,
)
from distplan.costmodel.schedules_orders import Job
from distplan.costmodel.simulate import Simulation, StageCosts, simulate
from distplan.costmodel.simulate_views import timeline
from distplan.costmodel.strategy import V_SHAPED
from distplan.hardware.errors import DistplanError, UnknownNameError
from distplan.planner.plain import rounded

Plain = dict[str, Any]
MAX_JOBS = 1 << 18
"""forwards and backwards of a schedule; some seconds of simulation"""
MAX_SOUGHT = 1 << 15
"""the same of one whose order is itself sought job by job (Paddle's zb_v)"""
MAX_STAGES = 1 << 10
LOOPED_CHUNKS = 2
"""chunks per stage of looped schedules unless told: the least that loops"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Of one stage and micro-batch, all its chunks together, in any one unit of time."""

    forward: float
    backward: float
    input_gradient: float
    """the part of `backward` that the previous stage waits for"""


EVEN_TIMES = StageTimes(forward=1.0, backward=2.0, input_gradient=1.0)
"""two matrix products in backward for one in forward"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `distplan schedule` was asked. `times`: one for all stages, or one per stage."""

    stages: int
    micro_batches: int
    chunks: int | None = None
    """None: 1, or 2 where the schedule needs several"""
    times: tuple[StageTimes, ...] = (EVEN_TIMES,)
    p2p: float = 0.0
    latency: float = 0.0
    overlap_p2p: bool = True
    dialect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A schedule that cannot run as asked, and why."""

    name: str
    why: str


def run_schedule(name: str, asked: Question) -> Simulation:
    """One schedule, simulated. Raises UnknownNameError (name, dialect) and ScheduleError (a refusal)."""
    if name not in SCHEDULES:
        raise UnknownNameError("schedule", name, SCHEDULES)
    chunks = chunks_of(name, asked.chunks)
    _check_size(asked, chunks, MAX_SOUGHT if (name, asked.dialect) == ("zb_v", "paddle") else MAX_JOBS)
    mean = _mean(asked.times)
    schedule = build_schedule(
        name,
        stages=asked.stages,
        micro_batches=asked.micro_batches,
        chunks=chunks,
        dialect=asked.dialect,
        times={
            **UNIT_TIMES,
            "F": mean.forward / chunks,
            "I": mean.input_gradient / chunks,
            "W": (mean.backward - mean.input_gradient) / chunks,
            "comm": asked.p2p + asked.latency,
        },
    )
    return simulate(schedule, costs_of(schedule, asked))


def compare(names: Sequence[str], asked: Question) -> list[Simulation | Refused]:
    """Each schedule under the same times; a dialect holds for those that have it. Raises UnknownNameError."""
    for name in names:
        if name not in SCHEDULES:
            raise UnknownNameError("schedule", name, SCHEDULES)
    known = {dialect for name in names for dialect in SCHEDULES[name]}
    if asked.dialect and asked.dialect not in known:
        raise UnknownNameError("dialect", asked.dialect, sorted(known))
    found: list[Simulation | Refused] = []
    for name in names:
        single = name in SINGLE or name in V_SHAPED
        dialect = asked.dialect if asked.dialect in SCHEDULES[name] else ""
        one = Question(
            stages=asked.stages,
            micro_batches=asked.micro_batches,
            chunks=None if single else asked.chunks,
            times=asked.times,
            p2p=asked.p2p,
            latency=asked.latency,
            overlap_p2p=asked.overlap_p2p,
            dialect=dialect,
        )
        try:
            found.append(run_schedule(name, one))
        except ScheduleError as error:
            found.append(Refused(name=name, why=str(error)))
    return found


def chunks_of(name: str, asked: int | None) -> int:
    """Chunks per stage: those asked for, else what the schedule has, or the least that loops."""
    if asked is not None:
        return asked
    return ONE_CHUNK if name in SINGLE else TWO_CHUNKS if name in V_SHAPED else LOOPED_CHUNKS


def costs_of(schedule: Schedule, asked: Question) -> StageCosts:
    """Every chunk is an equal part of its stage; memory is counted in micro-batches of a whole stage."""
    if len(asked.times) not in (1, schedule.stages):
        raise DistplanError(f"--times: {len(asked.times)} stages are given, {schedule.stages} are needed, or one")
    ranks = [rank for rank, _ in schedule.places()]
    mine = [asked.times[rank % len(asked.times)] for rank in ranks]
    chunks = schedule.chunks
    return StageCosts(
        forward=[t.forward / chunks for t in mine],
        backward=[t.backward / chunks for t in mine],
        input_gradient=[t.input_gradient / chunks for t in mine],
        activation=[1.0 / chunks] * len(mine),
        p2p=asked.p2p,
        latency=asked.latency,
        overlap_p2p=asked.overlap_p2p,
    )


def _mean(times: Sequence[StageTimes]) -> StageTimes:
    n = len(times)
    return StageTimes(
        forward=sum(t.forward for t in times) / n,
        backward=sum(t.backward for t in times) / n,
        input_gradient=sum(t.input_gradient for t in times) / n,
    )


def _check_size(asked: Question, chunks: int, most: int) -> None:
    if asked.stages > MAX_STAGES:
        raise ScheduleError(f"{asked.stages:,} stages: a schedule is drawn for at most {MAX_STAGES:,}")
    jobs = 2 * asked.stages * asked.micro_batches * chunks
    if jobs > most:
        raise ScheduleError(
            f"{asked.stages} stages, {asked.micro_batches:,} micro-batches and {chunks} chunk(s) are {jobs:,} jobs, "
            f"at most {most:,} are simulated; fewer micro-batches show the same pattern"
        )


def document(run: Simulation) -> Plain:
    """One simulated schedule as plain data. Times in the unit of --times, memory in micro-batches of a stage."""
    shown = summary(run)
    shown["per_stage"] = [
        {"stage": stage, "busy": busy, "bubble": bubble, "bubble_share": bubble / run.seconds, "peak_memory": peak}
        for stage, (busy, bubble, peak) in enumerate(zip(run.busy, run.bubble, run.peak, strict=True))
    ]
    shown["jobs"] = [" ".join(_named(job) for job in jobs if job) for jobs in run.schedule.jobs]
    return rounded(shown)


def summary(run: Simulation) -> Plain:
    """Bubble share: idle time of all stages over their step time, the mean of the stages' own shares."""
    schedule = run.schedule
    return rounded(
        {
            "schedule": schedule.name,
            "dialect": schedule.dialect,
            "stages": schedule.stages,
            "micro_batches": schedule.micro_batches,
            "chunks": schedule.chunks,
            "step_time": run.seconds,
            "bubble_share": sum(run.bubble) / (run.seconds * schedule.stages),
            "peak_memory_first": run.peak[0],
            "peak_memory_last": run.peak[-1],
            "peak_memory": max(run.peak),
        }
    )


def comparison(found: Sequence[Simulation | Refused]) -> list[Plain]:
    """Rows of summary(); a schedule that cannot run has its name and `refused`."""
    return [
        {"schedule": item.name, "refused": item.why} if isinstance(item, Refused) else summary(item) | {"refused": None}
        for item in found
    ]


def _named(job: Job) -> str:
    if job.parts:
        return "+".join(_named(part) for part in job.parts)
    if job.kind in ("OPT", "LR", "UNSHARD", "RESHARD", "REDUCE"):
        return job.kind
    return f"{job.kind}{job.micro_batch}" + (f".{job.chunk}" if job.chunk else "")


LEAST_WIDTH = 24
"""columns below which a row is wider than the terminal"""
BANDS = 4
"""pieces of a timeline drawn below each other"""
ROWS = 16
"""stages drawn; of more, the first and the last"""
_ROOM = 3
"""columns that let a job show its letter and its number"""
_PIECE = re.compile(r"OPT\**|LR\**|[FBIW]\d*'*[-=~+]*|\.+|.")
_NAMES: Mapping[str, str] = {
    "F": "F- forward",
    "B": "B= backward",
    "I": "I~ input gradient",
    "W": "W+ weight gradient",
    "O": "OPT* optimizer",
    ".": ". idle",
}


def drawn(run: Simulation, width: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Rows of a timeline `width` columns wide: (label, pieces of (kind, text)); kind is F, B, I, W, O, '.', or ''.

    What is too long for one row goes on below, `BANDS` pieces at most: the first and the last; of more than
    `ROWS` stages the first and the last.
    """
    stages = run.schedule.stages
    label = len(f"stage {stages - 1}")
    room = max(width, LEAST_WIDTH) - label - 3
    jobs = max(sum(e.rank == rank and e.stream == "compute" for e in run.events) for rank in (0, stages - 1))
    share = max(run.busy) / run.seconds
    bands = max(1, -(-int(jobs * _ROOM / max(share, 0.01)) // room))
    lines = [row[label + 2 : -1] for row in timeline(run, room * bands)[:-1]]
    half = BANDS // 2
    shown = range(bands) if bands <= BANDS else [*range(half), *range(bands - half, bands)]
    ranks = range(stages) if stages <= ROWS else [*range(ROWS // 2), *range(stages - ROWS // 2, stages)]
    before = -1
    for band in shown:
        if before >= 0:
            yield "", [("", "" if band == before + 1 else f"... {band - before - 1} times this width ...")]
        previous = -1
        for rank in ranks:
            if rank != previous + 1:
                yield "...", []
            pieces = _pieces(lines[rank][band * room : (band + 1) * room], lines[rank][: band * room])
            yield f"{f'stage {rank}':<{label}} |", [*pieces, ("", "|")]
            previous = rank
        before = band


def _pieces(text: str, before: str) -> list[tuple[str, str]]:
    """A row cut into jobs; a job that began on the row before gives its kind to the rest of it."""
    signs = {"-": "F", "=": "B", "~": "I", "+": "W", "*": "O", "L": "O"}
    found: list[tuple[str, str]] = []
    for piece in _PIECE.findall(text):
        first = piece[0]
        if first.isdigit() or first == "'":
            last = next((c for c in reversed(before) if c.isalpha()), ".")
            first = found[-1][0] if found else last
        kind = signs.get(first, first)
        found.append(("O" if kind in "OPTLR" else kind, piece))
    return found


def legend(run: Simulation) -> str:
    kinds = {event.kind[0] for event in run.events if event.stream == "compute"}
    return "   ".join(words for kind, words in _NAMES.items() if kind in kinds or kind == ".")
