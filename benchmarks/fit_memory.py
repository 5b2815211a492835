"""Fragmentation and context per runtime from peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
FRAGMENTATIONS = np.linspace(0.0, 0.3, 31)
LEAST_CONTEXT, MOST_CONTEXT = 0.5 * 2.0**30, 10.0 * 2.0**30
"""what a driver alone takes; and with a dozen communicators of a large job and what libraries hold for themselves"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    fragmentation: dict[str, Any]
    context_bytes: dict[str, Any]
    predictions: tuple[Prediction, ...]
    """with these constants"""
    runs: int


def fit_memory(due: Sequence[Row]) -> MemoryFit:
    """Of every runtime with enough runs the fragmentation (share of what comes and goes in a step) and the context
    (bytes) that leave the least mean error: of reserved and device readings together; context of the latter alone."""
    found = with_memory(predict(due).predictions)
    fragmentation: dict[str, Any] = {DEFAULT: {"value": ASSUMED_FRAGMENTATION, "runs": 0}}
    context: dict[str, Any] = {DEFAULT: {"value": ASSUMED_CONTEXT, "runs": 0}}
    for runtime in sorted({p.case.runtime.name for p in found}):
        mine = [p for p in found if p.case.runtime.name == runtime and p.case.reading in ("reserved", "device")]
        if len(mine) < FEWEST:
            continue
        share, size = _least_error(mine)
        fragmentation[runtime] = {"value": round(share, 3), "runs": len(mine)}
        devices = sum(p.case.reading == "device" for p in mine)
        if devices >= FEWEST:
            context[runtime] = {"value": float(f"{size:.4g}"), "runs": devices}
    fitted = tuple(_with(p, fragmentation, context) for p in found)
    return MemoryFit(fragmentation=fragmentation, context_bytes=context, predictions=fitted, runs=len(found))


def _least_error(found: Sequence[Prediction]) -> tuple[float, float]:
    """(fragmentation, context) of the least mean absolute log error; the context is a median within its bounds."""
    allocated = np.array([p.bytes["allocated"] for p in found])
    moving = np.array([(p.bytes["reserved"] - p.bytes["allocated"]) / p.case.runtime.fragmentation for p in found])
    measured = np.array([p.case.memory for p in found])
    device = np.array([p.case.reading == "device" for p in found])
    best = (float("inf"), ASSUMED_FRAGMENTATION, ASSUMED_CONTEXT)
    for share in FRAGMENTATIONS:
        reserved = allocated + share * moving
        rest = float(np.median((measured - reserved)[device])) if device.any() else ASSUMED_CONTEXT
        size = min(max(rest, LEAST_CONTEXT), MOST_CONTEXT)
        error = float(np.mean(np.abs(np.log((reserved + size * device) / measured))))
        best = min(best, (error, float(share), size))
    return best[1], best[2]


def _with(p: Prediction, fragmentation: dict[str, Any], context: dict[str, Any]) -> Prediction:
    """The prediction with the fitted constants of its runtime."""
    name = p.case.runtime.name
    share = fragmentation.get(name, fragmentation[DEFAULT])["value"]
    moving = (p.bytes["reserved"] - p.bytes["allocated"]) / p.case.runtime.fragmentation
    reserved = p.bytes["allocated"] + share * moving
    device = reserved + context.get(name, context[DEFAULT])["value"]
    return replace(p, bytes={"allocated": p.bytes["allocated"], "reserved": reserved, "device": device})
