"""The core of the simulation: when every job ends, each running as soon as its stage and its input are there.

Jobs become atoms, which a table per stage turns into numbers: seconds, the input needed, the input given to another
virtual stage, the link it goes over. Inputs are numbered (forward or backward, virtual stage, micro-batch), so that
the loop only indexes lists: 130,000 jobs (64 stages, 1,024 micro-batches) in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distplan.costmodel.schedules import Schedule, ScheduleError
from distplan.costmodel.schedules_orders import Job

Atom = tuple[str, int, int]
"""(kind, chunk, micro-batch). Beside the kinds of jobs: `?F`, `?B` wait for an input; `.F` computes only, `.B`
computes and gives, `>F` gives only. An overlapped pair begins when both inputs are there and ends as one."""

Seconds = Callable[[str, int], float]
"""(kind, virtual stage) -> seconds on the stage"""


class Line(NamedTuple):
    """What an atom does; `needs` and `gives` are the numbers of inputs of micro-batch 0, −1 = none."""

    cost: float
    needs: int
    gives: int
    link: int


class Message(NamedTuple):
    rank: int
    kind: str
    chunk: int
    micro_batch: int
    start: float
    end: float


class Wire(NamedTuple):
    """How messages travel: seconds on the link, seconds more to arrive, and whether the sender is free meanwhile."""

    p2p: float
    latency: float
    overlap: bool


Table = dict[tuple[str, int], Line]


def atoms_of(jobs: Sequence[Job | None]) -> list[Atom]:
    """The jobs of a stage without idle slots, overlapped pairs taken apart."""
    out: list[Atom] = []
    for job in jobs:
        if job is None:
            continue
        if job.parts:
            (_, c, i, _), (_, d, j, _) = job.parts
            out += [("?F", c, i), ("?B", d, j), (".F", c, i), (".B", d, j), (">F", c, i)]
        else:
            out.append((job.kind, job.chunk, job.micro_batch))
    return out


def whole_jobs(atoms: Sequence[Atom]) -> list[bool]:
    """Which atoms end a job."""
    return [kind[0] not in "?." for kind, _, _ in atoms]


def table_of(schedule: Schedule, rank: int, atoms: Sequence[Atom], seconds: Seconds, overlap: bool) -> Table:
    """Lines for every (kind, chunk) of a stage. Sends that the schedule lists are not made by the computation."""
    places = schedule.places()
    last, m = len(places) - 1, schedule.micro_batches
    kinds = {kind for kind, _, _ in atoms}

    def route(way: str, k: int) -> tuple[int, int]:
        """(input given, link) of what virtual stage k sends on: its output, or the gradient of its input."""
        to = k + 1 if way == "F" else k - 1
        if way == "F" and k == last:
            return (last + 1 + k) * m, -1
        if to < 0:
            return -1, -1
        given = to * m if way == "F" else (last + 1 + to) * m
        peer = places[to][0]
        return given, -1 if peer == rank else (0 if way == "F" else 1) * schedule.stages + rank

    def line(kind: str, k: int) -> Line:
        way = "F" if kind.endswith("F") else "B"
        needs = k * m if way == "F" and k > 0 else -1 if way == "F" else (last + 1 + k) * m
        if kind in ("?F", "?B"):
            return Line(0.0, needs, -1, -1)
        if kind[:4] == "RECV":
            outside = k == 0 if way == "F" else k == last
            return Line(0.0, -1 if overlap or outside else needs, -1, -1)
        given, link = route(way, k)
        if kind[:4] == "SEND":
            return Line(0.0, -1, given if link >= 0 else -1, link)
        if f"SEND_{way}" in kinds and link >= 0:
            given = -1
        if kind == ">F":
            return Line(0.0, -1, given, link)
        if kind in ("F", "B", "I", ".F", ".B"):
            ready = kind[0] == "."
            return Line(seconds(kind[-1], k), -1 if ready else needs, -1 if kind == ".F" else given, link)
        return Line(seconds(kind, k), -1, -1, -1)

    pairs = {(kind, chunk) for kind, chunk, _ in atoms}
    return {(kind, chunk): line(kind, schedule.virtual(rank, chunk)) for kind, chunk in pairs}


def run(
    schedule: Schedule, lists: Sequence[list[Atom]], tables: Sequence[Table], wire: Wire, record: bool
) -> tuple[list[list[float]], list[Message]]:
    """End of every atom per stage (a blocking send included), and the messages if they are to be recorded.

    Raises ScheduleError when stages wait for each other.
    """
    inputs = 2 * schedule.stages * schedule.chunks * schedule.micro_batches
    arrived, waiting = [-1.0] * inputs, [-1] * inputs
    links = [0.0] * (2 * schedule.stages)
    ends: list[list[float]] = [[] for _ in lists]
    messages: list[Message] = []
    p2p, latency, overlap = wire
    runnable = list(range(schedule.stages))
    while runnable:
        rank = runnable.pop()
        atoms, table, done = lists[rank], tables[rank], ends[rank]
        clock = done[-1] if done else 0.0
        for at in range(len(done), len(atoms)):
            kind, chunk, i = atoms[at]
            cost, needs, gives, link = table[kind, chunk]
            if needs >= 0:
                there = arrived[needs + i]
                if there < 0.0:
                    waiting[needs + i] = rank
                    break
                clock = max(clock, there)
            clock += cost
            if gives >= 0:
                when = clock
                if link >= 0:
                    start = max(clock, links[link]) if overlap else clock
                    when = links[link] = start + p2p
                    if not overlap:
                        clock = when
                    if record and p2p > 0:
                        way = "F" if link < len(lists) else "B"
                        messages.append(Message(rank, way, chunk, i, start, when))
                    when += latency
                arrived[gives + i] = when
                if waiting[gives + i] >= 0:
                    runnable.append(waiting[gives + i])
            done.append(clock)
    _refuse_stuck(schedule, lists, ends)
    return ends, messages


def _refuse_stuck(schedule: Schedule, lists: Sequence[list[Atom]], ends: Sequence[list[float]]) -> None:
    for rank, (atoms, done) in enumerate(zip(lists, ends, strict=True)):
        if len(done) < len(atoms):
            kind, chunk, i = atoms[len(done)]
            raise ScheduleError(
                f"the {schedule.name} job lists wait for each other in a circle: stage {rank} cannot run "
                f"{kind.lstrip('?')} of chunk {chunk}, micro-batch {i}"
            )
