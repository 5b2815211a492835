"""Event simulation of a pipeline schedule: uneven stages, messages, memory.

Every stage runs its jobs in order, each as soon as its input is there. The model of a message, shared with the
closed forms in pipeline.py: it leaves when its job ends (or at its SEND job, where the schedule lists one). With
overlap it holds its link (one per neighbour, direction and kind) for `p2p` seconds, messages queueing, and arrives
`latency` seconds later; without, it holds the sender for `p2p`. Between chunks of one stage nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distplan.costmodel import simulate_core as core
from distplan.costmodel.schedules import Schedule, ScheduleError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What each virtual stage (in the order of the model) costs per micro-batch, in seconds and any unit of memory.

    `input_gradient` is the I half of `backward`; without it halves are equal, as a matrix product's two gradients
    are. `activation` is kept from F to B (or W); between I and W the share `kept_after_input` of it. `optimizer` is
    per stage (rank) and step.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    input_gradient: Sequence[float] | None = None
    activation: Sequence[float] | None = None
    kept_after_input: float = 1.0
    p2p: float = 0.0
    latency: float = 0.0
    overlap_p2p: bool = True
    optimizer: float = 0.0

    def seconds(self, kind: str, k: int) -> float:
        """Of job `kind` on virtual stage k; jobs that only move data or book-keep take none."""
        if kind == "F":
            return self.forward[k]
        if kind in "BIW":
            half = self.backward[k] / 2 if self.input_gradient is None else self.input_gradient[k]
            return {"B": self.backward[k], "I": half, "W": self.backward[k] - half}[kind]
        return self.optimizer if kind == "OPT" else 0.0


class Event(NamedTuple):
    """A job on a stage (stream compute) or a message on its way (stream send), in seconds from the step's begin."""

    rank: int
    stream: str
    kind: str
    chunk: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """`seconds` from the first job to the end of the last; per stage `busy` seconds of computing, `bubble` =
    seconds − busy, `peak` memory and `memory` = (time, held) after each change, `ends` of its jobs in order."""

    schedule: Schedule
    seconds: float
    busy: tuple[float, ...]
    bubble: tuple[float, ...]
    peak: tuple[float, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    events: tuple[Event, ...]
    ends: tuple[tuple[float, ...], ...]


def simulate(schedule: Schedule, costs: StageCosts, *, record: bool = True) -> Simulation:
    """Run the schedule once. `record` keeps events and the memory's course; without, both are empty.

    Raises ScheduleError when the job lists wait for each other in a circle, or costs are not one per virtual stage.
    """
    virtual = schedule.stages * schedule.chunks
    for what in (costs.forward, costs.backward, costs.input_gradient, costs.activation):
        if what is not None and len(what) != virtual:
            raise ScheduleError(f"{len(what)} costs for {virtual} virtual stages of {schedule.name}")
    lists = [core.atoms_of(jobs) for jobs in schedule.jobs]
    tables = [
        core.table_of(schedule, rank, atoms, costs.seconds, costs.overlap_p2p) for rank, atoms in enumerate(lists)
    ]
    wire = core.Wire(costs.p2p, costs.latency, costs.overlap_p2p)
    ends, messages = core.run(schedule, lists, tables, wire, record)
    seconds = max(last[-1] for last in ends)
    busy = tuple(sum(table[kind, c].cost for kind, c, _ in atoms) for atoms, table in zip(lists, tables, strict=True))
    held = [_held(schedule, costs, rank, atoms) for rank, atoms in enumerate(lists)]
    return Simulation(
        schedule=schedule,
        seconds=seconds,
        busy=busy,
        bubble=tuple(seconds - b for b in busy),
        peak=tuple(max(h, default=0.0) for h in held),
        memory=tuple(_course(*row) for row in zip(held, lists, tables, ends, strict=True)) if record else (),
        events=_events(lists, tables, ends, messages, costs) if record else (),
        ends=tuple(
            tuple(end for end, whole in zip(row, core.whole_jobs(atoms), strict=True) if whole)
            for row, atoms in zip(ends, lists, strict=True)
        ),
    )


def _held(schedule: Schedule, costs: StageCosts, rank: int, atoms: list[core.Atom]) -> list[float]:
    """Memory held once each atom has taken what it keeps and before it lets go of anything, in the order of jobs:
    a forward takes its activation as it begins, a backward gives it back as it ends."""
    kept = costs.kept_after_input
    share = {"F": 1.0, ".F": 1.0, "B": -1.0, ".B": -1.0, "I": kept - 1.0, "W": -kept}
    size = [1.0 if costs.activation is None else costs.activation[k] for k in range(schedule.stages * schedule.chunks)]
    mine = [size[schedule.virtual(rank, chunk)] for chunk in range(schedule.chunks)]
    now, out = 0.0, []
    for kind, chunk, _ in atoms:
        now += share.get(kind, 0.0) * mine[chunk]
        out.append(now)
    return out


def _course(
    held: list[float], atoms: list[core.Atom], table: core.Table, ends: list[float]
) -> tuple[tuple[float, float], ...]:
    """(time, held) at each change: forwards as they begin, backwards as they end."""
    out: list[tuple[float, float]] = []
    for now, (kind, chunk, _), end, before in zip(held, atoms, ends, [0.0, *ends], strict=False):
        if kind.lstrip(".") in ("F", "B", "I", "W"):
            out.append((max(before, end - table[kind, chunk].cost) if kind.endswith("F") else end, now))
    return tuple(out)


def _events(
    lists: list[list[core.Atom]],
    tables: list[core.Table],
    ends: list[list[float]],
    messages: list[core.Message],
    costs: StageCosts,
) -> tuple[Event, ...]:
    events = [Event(x.rank, "send", f"SEND_{x.kind}", x.chunk, x.micro_batch, x.start, x.end) for x in messages]
    for rank, (atoms, table, row) in enumerate(zip(lists, tables, ends, strict=True)):
        for (kind, chunk, i), end in zip(atoms, row, strict=True):
            cost, _, gives, link = table[kind, chunk]
            if cost > 0:
                done = end - costs.p2p if gives >= 0 and link >= 0 and not costs.overlap_p2p else end
                events.append(Event(rank, "compute", kind.lstrip("."), chunk, i, done - cost, done))
    return tuple(sorted(events, key=lambda e: (e.start, e.rank, e.stream)))
