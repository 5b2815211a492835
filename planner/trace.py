"""Traces for the Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) viewers, as JSON text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from distplan.costmodel.simulate import Simulation
from distplan.costmodel.simulate_views import MICROSECONDS, chrome_trace
from distplan.costmodel.step_timeline import LANES, StepTimeline
from distplan.hardware.documents import write_atomically

Trace = dict[str, Any]


def trace_of(runs: Sequence[Simulation]) -> Trace:
    """One trace of several schedules: each stage is a process, named after its schedule where there are several."""
    events: list[dict[str, Any]] = []
    first = 0
    for run in runs:
        for event in chrome_trace(run)["traceEvents"]:
            moved = event | {"pid": event["pid"] + first}
            if event["name"] == "process_name" and len(runs) > 1:
                moved["args"] = {"name": f"{run.schedule.name} {event['args']['name']}"}
            events.append(moved)
        first += run.schedule.stages
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def trace_of_step(step: StepTimeline) -> Trace:
    """A strategy's step: per stage a process with a thread per stream and a counter of the bytes held."""
    events: list[dict[str, Any]] = []
    used = sorted({(box.stage, LANES.index(box.lane)) for box in step.boxes})
    for stage in range(len(step.memory)):
        events.append({"name": "process_name", "ph": "M", "pid": stage, "args": {"name": f"stage {stage}"}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": stage, "args": {"sort_index": stage}})
    for stage, number in used:
        of = {"ph": "M", "pid": stage, "tid": number}
        name = LANES[number] if LANES[number] in ("compute", "p2p") else f"{LANES[number]} communication"
        events.append({"name": "thread_name", **of, "args": {"name": name}})
        events.append({"name": "thread_sort_index", **of, "args": {"sort_index": number}})
    for box in step.boxes:
        numbered = {"chunk": box.chunk, "micro_batch": box.micro_batch} if box.micro_batch >= 0 else {}
        start = _microseconds(box.start)
        events.append(
            {
                "name": box.name,
                "cat": box.name.split()[0] if box.lane in ("compute", "p2p") else box.lane,
                "ph": "X",
                "pid": box.stage,
                "tid": LANES.index(box.lane),
                "ts": start,
                "dur": round(_microseconds(box.end) - start, _DIGITS),
                "args": numbered,
            }
        )
    for stage, course in enumerate(step.memory):
        for when, held in course:
            counter = {"name": "memory", "ph": "C", "pid": stage, "ts": _microseconds(when)}
            events.append(counter | {"args": {"bytes": round(held)}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_DIGITS = 3
"""of microseconds: nanoseconds, the finest that the viewers show"""


def _microseconds(seconds: float) -> float:
    return round(seconds * MICROSECONDS, _DIGITS)


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Beside `path` and renamed; DistplanError, and the old file whole, if that fails."""
    write_atomically(path, json.dumps(trace, allow_nan=False) + "\n")
