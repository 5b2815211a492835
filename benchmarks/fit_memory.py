"""Fragmentation and context per runtime from peak memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.accuracy_predict import Prediction, predict
from benchmarks.accuracy_rows import Row
from benchmarks.accuracy_score import with_memory
from distplan.costmodel.fitted import DEFAULT

FEWEST = 6
ASSUMED_FRAGMENTATION, ASSUMED_CONTEXT = 0.05, 1.3 * 2.0**30
"""where too few runs say: 5 % of what comes and goes; 0.92 GiB of context and kernels (torch 2.1) and 392 MiB of NCCL
(aiconfigurator, 4 to 8 GPUs)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    fragmentation: dict[str, Any]
    context_bytes: dict[str, Any]
    predictions: tuple[Prediction, ...]
    runs: int


def fit_memory(due: Sequence[Row]) -> MemoryFit:
    """Medians of what is measured beyond what is modelled as allocated: over what comes and goes in a step
    (reserved rows), and in bytes (device rows), each kept within what an allocator and a driver can take."""
    found = with_memory(predict(due).predictions)
    fragmentation, context = defaultdict(list), defaultdict(list)
    for p in found:
        beyond = p.case.memory - p.bytes["allocated"]
        moving = (p.bytes["reserved"] - p.bytes["allocated"]) / p.case.runtime.fragmentation
        if p.case.reading == "reserved" and moving > 0.0:
            fragmentation[p.case.runtime.name].append(beyond / moving)
        if p.case.reading == "device":
            context[p.case.runtime.name].append(p.case.memory - p.bytes["reserved"])
    return MemoryFit(
        fragmentation=_entries(fragmentation, ASSUMED_FRAGMENTATION, 0.0, 0.3),
        context_bytes=_entries(context, ASSUMED_CONTEXT, 0.5 * 2.0**30, 4.0 * 2.0**30),
        predictions=tuple(found), runs=len(found),
    )


def _entries(values: dict[str, list[float]], assumed: float, least: float, most: float) -> dict[str, Any]:
    """Medians where enough runs say; the assumption stands where a median outside the bounds says that more is off."""
    entries: dict[str, Any] = {DEFAULT: {"value": assumed, "runs": 0}}
    for runtime, found in sorted(values.items()):
        if len(found) >= FEWEST and least <= float(np.median(found)) <= most:
            entries[runtime] = {"value": float(f"{np.median(found):.4g}"), "runs": len(found)}
    return entries
