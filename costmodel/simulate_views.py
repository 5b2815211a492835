"""A simulation to look at: rows of text for the terminal, and a trace for the Chrome or Perfetto viewer."""

from __future__ import annotations

from typing import Any

from distplan.costmodel.simulate import Event, Simulation

FILL = {"F": "-", "B": "=", "I": "~", "W": "+", "OPT": "*", "LR": "*"}
LEGEND = "F forward -   B backward =   I input gradient ~   W weight gradient +   OPT optimizer *   . idle"
MICROSECONDS = 1e6


def timeline(simulation: Simulation, width: int = 100) -> list[str]:
    """One row of `width` characters per stage, time to the right, and a legend as the last row.

    A job is its letter and micro-batch where there is room (F3, with more than one chunk F3' for the second), filled
    up with a sign of its own; needs simulate(…, record=True).
    """
    scale = width / simulation.seconds
    label = len(f"stage {simulation.schedule.stages - 1}")
    cells = [["."] * width for _ in range(simulation.schedule.stages)]
    for event in simulation.events:
        if event.stream == "compute":
            begin = min(round(event.start * scale), width - 1)
            room = min(max(round(event.end * scale), begin + 1), width) - begin
            cells[event.rank][begin : begin + room] = _cell(event, room)
    rows = [f"{f'stage {rank}':<{label}} |{''.join(row)}|" for rank, row in enumerate(cells)]
    return [*rows, " " * (label + 2) + LEGEND]


def _cell(event: Event, room: int) -> str:
    sign = FILL.get(event.kind, "-")
    full = event.kind if event.kind in ("OPT", "LR") else f"{event.kind}{event.micro_batch}{chr(39) * event.chunk}"
    for text in (full, full.rstrip("'"), event.kind[:1]):
        if len(text) <= room:
            return text + sign * (room - len(text))
    return sign * room


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """Trace events in the Chrome format (which Perfetto reads): per stage a process with a compute and a send thread
    and a counter of memory held; times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank in range(simulation.schedule.stages):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"stage {rank}"}})
        for thread, name in enumerate(("compute", "send")):
            name_it = {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
            events.append(name_it)
    for event in simulation.events:
        numbered = event.kind not in ("OPT", "LR")
        events.append(
            {
                "name": f"{event.kind} {event.micro_batch}" if numbered else event.kind,
                "cat": event.kind,
                "ph": "X",
                "pid": event.rank,
                "tid": 0 if event.stream == "compute" else 1,
                "ts": event.start * MICROSECONDS,
                "dur": (event.end - event.start) * MICROSECONDS,
                "args": {"chunk": event.chunk, "micro_batch": event.micro_batch} if numbered else {},
            }
        )
    for rank, course in enumerate(simulation.memory):
        for when, held in course:
            counter = {"name": "memory", "ph": "C", "pid": rank, "ts": when * MICROSECONDS, "args": {"held": held}}
            events.append(counter)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
