"""Fragmentation and context per runtime from peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.accuracy_fill import Case
from benchmarks.accuracy_predict import Prediction, predict, predict_cases
from benchmarks.accuracy_rows import Row
from benchmarks.accuracy_score import with_memory
from benchmarks.fit_time import source_of
from distplan.costmodel.fitted import DEFAULT
from distplan.costmodel.fitted import context_bytes as runtime_context
from distplan.costmodel.runtime import Runtime

FEWEST, FEWEST_SOURCES = 6, 2
"""what one source alone read is that source's, not its runtime's"""
ASSUMED_FRAGMENTATION, ASSUMED_CONTEXT = 0.05, 1.3 * 2.0**30
"""where too few runs say: 5 % of what comes and goes; 0.92 GiB of context and kernels (torch 2.1) and 392 MiB of NCCL
(aiconfigurator, 4 to 8 GPUs)"""
FRAGMENTATIONS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3)
LEAST_CONTEXT, MOST_CONTEXT = 0.5 * 2.0**30, 6.0 * 2.0**30
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
        mine = [p.case for p in found if p.case.runtime.name == runtime and p.case.reading in ("reserved", "device")]
        if len(mine) < FEWEST or len({source_of(case.row) for case in mine}) < FEWEST_SOURCES:
            continue
        share, size = _least_error(mine)
        fragmentation[runtime] = {"value": share, "runs": len(mine)}
        devices = sum(case.reading == "device" for case in mine)
        if devices >= FEWEST:
            context[runtime] = {"value": float(f"{size:.4g}"), "runs": devices}
    cases = [
        _with(
            p.case,
            fragmentation.get(p.case.runtime.name, fragmentation[DEFAULT])["value"],
            context.get(p.case.runtime.name, {"value": _stated_context(p.case, context[DEFAULT]["value"])})["value"],
        )
        for p in found
    ]
    return MemoryFit(
        fragmentation=fragmentation, context_bytes=context, predictions=tuple(predict_cases(cases)), runs=len(found)
    )


def _stated_context(case: Case, default: float) -> float:
    """What the table says of this version of the framework's libraries, else the default."""
    shipped = runtime_context(case.runtime.name)
    return case.runtime.context_bytes if case.runtime.context_bytes != shipped else default


def _least_error(cases: Sequence[Case]) -> tuple[float, float]:
    """(fragmentation, context) of the least mean absolute log error; the context is a median within its bounds."""
    measured = np.array([case.memory for case in cases])
    device = np.array([case.reading == "device" for case in cases])
    best = (float("inf"), ASSUMED_FRAGMENTATION, ASSUMED_CONTEXT)
    for share in FRAGMENTATIONS:
        reserved = np.array([p.bytes["reserved"] for p in predict_cases([_with(case, share, 0.0) for case in cases])])
        rest = float(np.median((measured - reserved)[device])) if device.any() else ASSUMED_CONTEXT
        size = min(max(rest, LEAST_CONTEXT), MOST_CONTEXT)
        error = float(np.mean(np.abs(np.log((reserved + size * device) / measured))))
        best = min(best, (error, share, size))
    return best[1], best[2]


_RUNTIMES: dict[tuple[int, float, float], Runtime] = {}


def _with(case: Case, fragmentation: float, context: float) -> Case:
    """The case in its runtime with these constants; cases that shared a runtime share the new one."""
    key = (id(case.runtime), fragmentation, context)
    if key not in _RUNTIMES:
        _RUNTIMES[key] = replace(case.runtime, fragmentation=fragmentation, context_bytes=context)
    return replace(case, runtime=_RUNTIMES[key])
