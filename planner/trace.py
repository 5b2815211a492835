"""Traces for the Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) viewers, as JSON text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from distplan.costmodel.simulate import Simulation
from distplan.costmodel.simulate_views import chrome_trace
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


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Beside `path` and renamed; DistplanError, and the old file whole, if that fails."""
    write_atomically(path, json.dumps(trace, allow_nan=False) + "\n")
