"""What a strategy costs: the one function `estimate`, and the columns that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.strategy import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One collective of the Program on one device of the critical stage, per step (arrays of rows).

    `payload_bytes` is what is given to the collective, `wire_bytes` what one GPU sends with the
    algorithm chosen; both, and the seconds, are totals over `count` calls.
    """

    name: str
    """the tensor that moves, dotted"""
    axis: str
    """tp | cp | dp | dp_replicate | dp_shard | pp | ep … (mesh axes joined by '+')"""
    kind: str
    phase: str
    count: Floats
    payload_bytes: Floats
    wire_bytes: Floats
    seconds: Floats
    exposed_seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Columns, one entry per strategy. Parts add up exactly, in their order, to their total.

    `time` are the parts of `step_seconds` on the critical stage, `memory` the parts of
    `device_bytes` on the worst stage in its worst phase.
    """

    step_seconds: Floats
    step_seconds_low: Floats
    step_seconds_high: Floats
    time: Mapping[str, Floats]
    allocated_bytes: Floats
    reserved_bytes: Floats
    device_bytes: Floats
    device_bytes_low: Floats
    device_bytes_high: Floats
    usable_bytes: Floats
    memory: Mapping[str, Floats]
    worst_stage: NDArray[np.int64]
    worst_phase: NDArray[np.int64]
    """index into PHASES"""
    num_micro_batches: Floats
    recompute_layers: Floats
    """layers per stage that are recomputed (solved: the least that fits)"""
    model_flops: Floats
    hardware_flops: Floats
    kernel_flops: Floats
    """FLOPs per GPU and step: forward×3 with full s²; + recompute; what kernels execute"""
    tokens: Floats
    """tokens per step of the whole job"""
    communication: tuple[Communication, ...]
    host_bytes: Floats


PHASES = ("init", "forward peak", "loss", "backward", "optimizer step")
