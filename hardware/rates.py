"""Seconds of local operators: matrix products, flash attention, memory-bound kernels, launches, host copies.

Pure and elementwise over float64 arrays that broadcast, with + - * / minimum maximum ceil floor where alone, so that
one row gives the bits that it gives in a batch. Sizes are LOCAL: after every mesh axis has taken its share.
Constants come from `rates_for(accelerator)`; `Rates.origins` says which are measured, scaled or assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distplan.hardware.errors import DistplanError
from distplan.hardware.rate_tables import rates_for
from distplan.hardware.rate_types import AttentionRates, GemmRates, Origin, Rates

__all__ = [
    "BACKWARD_OVER_FORWARD",
    "Origin",
    "Rates",
    "attention_seconds",
    "gemm_seconds",
    "launch_seconds",
    "memory_seconds",
    "pcie_seconds",
    "rates_for",
]

FP32 = 4.0
"""bytes"""
BACKWARD_OVER_FORWARD = 2.5
"""FLOPs of flash attention's backward over its forward: five products against two (Dao 2023, section 4.1)."""

_CHUNK_ELEMENTS = 8192
"""a few temporaries of this many float64 fit in a core's L2 cache"""

Array = NDArray[np.float64]


def _floats(*values: ArrayLike) -> tuple[Array, ...]:
    return tuple(np.asarray(value, dtype=np.float64) for value in values)


def _chunked(function: Callable[..., Array], *arrays: Array) -> Array:
    """function(*arrays), in pieces of the last axis that stay in cache; elementwise, so the bits are the same."""
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    size = math.prod(shape)
    if size <= _CHUNK_ELEMENTS:
        return function(*arrays)
    result = np.empty(shape)
    step = max(1, _CHUNK_ELEMENTS * shape[-1] // size)
    for start in range(0, shape[-1], step):
        piece = (
            array if array.ndim == 0 or array.shape[-1] == 1 else array[..., start : start + step] for array in arrays
        )
        result[..., start : start + step] = function(*piece)
    return result


def _gemm_of(rates: Rates, dtype: str) -> GemmRates:
    found = rates.gemm.get(dtype)
    if found is None:
        known = ", ".join(rates.gemm)
        raise DistplanError(f"{rates.accelerator} has no {dtype} matrix rate; choose a precision that has one: {known}")
    return found


def _tile_flops(of: GemmRates, m: Array, n: Array, batch: Array) -> Array:
    """FLOPs per element of k that the device is busy for, over all its multiprocessors: least over tile shapes."""
    least: Array | None = None
    for rows, columns, cost in of.tile_costs:
        waves = np.ceil(m / rows) * np.ceil(n / columns) * (batch / of.num_sms)
        whole = np.ceil(waves)
        waves = np.maximum(1.0, np.add(waves * (1.0 - of.wave), whole * of.wave))
        busy = waves * (2.0 * rows * columns * cost * of.num_sms)
        least = busy if least is None else np.minimum(least, busy)
    assert least is not None
    return least


def _misaligned(rates: Rates, of: GemmRates, dim: Array) -> Array | float:
    """Factor on compute time for a contiguous dim that is no whole number of 64, or even 16, bytes."""
    full, least = 64.0 / of.operand_bytes, 16.0 / of.operand_bytes
    rest = dim - np.floor(dim / full) * full
    if not rest.any():
        return 1.0
    some, none = rates.misalignment
    return np.where(rest == 0.0, 1.0, np.where(np.floor(dim / least) * least == dim, some, none))


def gemm_seconds(
    rates: Rates,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    dtype: str,
    *,
    batch: ArrayLike = 1.0,
    groups: ArrayLike = 1.0,
    accumulate: float = 0.0,
    cast_input: bool = True,
) -> Array:
    """Seconds of [m, k] × [k, n], `batch` or `groups` times in one call; m, n, k, batch, groups broadcast.

        compute = tile × wave × (k + ramp) / rate × misalignment
        traffic = (operands + result) / bandwidth
        seconds = latency + max(compute, traffic) + overlap · min(compute, traffic)

    with the least `tile × wave` over the library's tile shapes (waves of C/SMs blocks, partial waves between their
    share and a whole one). `groups` are products of a grouped kernel (experts): blocks fill waves together, and each
    group adds its latency. `accumulate` are the bytes of an element of the buffer that the result is added to (weight
    gradients; 0: none), whose traffic is measured for fp32 and in proportion for others. fp8 with `cast_input` includes
    casting the first operand from bf16, as a linear layer does; the bare kernel is `cast_input=False`.
    n and k (where it accumulates: m and n) are taken to be contiguous in memory and are what alignment looks at.

    m, n, k of zero give the latency. Form: NVIDIA's matrix-multiplication guide and arXiv 2401.14489 (blocks, waves);
    constants fitted by `benchmarks.calibrate`.
    Errors raised: DistplanError where the device has no such dtype.
    """
    of = _gemm_of(rates, dtype)

    def seconds(m: Array, n: Array, k: Array, batch: Array, groups: Array) -> Array:
        return _gemm_chunk(rates, of, m, n, k, batch, groups, accumulate, cast_input)

    return _chunked(seconds, *_floats(m, n, k, batch, groups))


def _gemm_chunk(
    rates: Rates,
    of: GemmRates,
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    groups: Array,
    accumulate: float,
    cast_input: bool,
) -> Array:
    times = batch * groups
    compute = _tile_flops(of, m, n, times) * ((k + of.ramp) / of.flops_per_second)
    misaligned = np.maximum(_misaligned(rates, of, n), _misaligned(rates, of, m if accumulate else k))
    if misaligned.ndim or misaligned != 1.0:
        compute = compute * misaligned
    result = (of.result_bytes + of.accumulate_bytes) * (accumulate / FP32) if accumulate else of.result_bytes
    traffic = ((m + n) * (k * of.operand_bytes) + m * n * result) * (times / of.bytes_per_second)
    seconds = np.maximum(compute, traffic) + np.minimum(compute, traffic) * of.overlap
    seconds = seconds + (of.latency + (groups - 1.0) * of.group_latency)
    if of.cast_bytes and cast_input:
        seconds = seconds + (m * k * (times * (of.cast_bytes / of.bytes_per_second)) + of.cast_latency)
    return np.asarray(seconds)


def _head_dim_rate(of: AttentionRates, head_dim: Array) -> Array:
    """Rate at a head dim over that at 128: linear between 64, 128 and 256; below 64 the tensor cores idle."""
    low = of.head_dim_64 + (1.0 - of.head_dim_64) * (np.clip(head_dim, 64.0, 128.0) - 64.0) / 64.0
    high = (of.head_dim_256 - 1.0) * (np.clip(head_dim, 128.0, 256.0) - 128.0) / 128.0
    return (low + high) * np.minimum(1.0, head_dim / 64.0)


def attention_seconds(
    rates: Rates,
    flops_full: ArrayLike,
    head_dim: ArrayLike,
    q_len: ArrayLike,
    kv_len: ArrayLike,
    causal: bool,
    backward: bool,
    dtype: str = "bf16",
) -> Array:
    """Seconds of one flash attention kernel; arrays broadcast.

    `flops_full` are the FORWARD FLOPs of the two products over the whole q_len × kv_len rectangle of scores,
    4 · batch · heads · q_len · kv_len · head_dim (a mean head_dim where keys and values differ), for backward too:
    the factors are applied here. Causal (aligned at the last key) executes 1 − q_len/(2·kv_len) of it, half where
    they are equal; backward 2.5 times as much.

        executed = flops_full · share · (2.5 if backward)
        seconds = latency + (executed · (1 + ramp/kv_len) + tail) / (peak · fraction · f(head_dim))

    where `ramp` is greater if causal, and `tail` is the last, unbalanced wave: 4 · head_dim · kv_len · rows · SMs.
    A device without work (flops_full = 0) costs the latency and the tail. fp8 recipes run attention in bf16 (so here).
    Errors raised: DistplanError where the device has no such dtype.
    """
    of = rates.attention_backward if backward else rates.attention_forward
    _gemm_of(rates, dtype)
    peak = rates.peak_flops["bf16" if dtype == "fp8" else dtype]
    flops_full, head_dim, q_len, kv_len = _floats(flops_full, head_dim, q_len, kv_len)
    times = BACKWARD_OVER_FORWARD if backward else 1.0
    share = 1.0 - np.minimum(q_len, kv_len) / (2.0 * kv_len) if causal else 1.0
    ramp = of.ramp + of.causal_ramp if causal else of.ramp
    work = flops_full * (share * (1.0 + ramp / kv_len))
    tail = head_dim * kv_len * (4.0 * of.tail_rows * rates.num_sms)
    rate = _head_dim_rate(of, head_dim) * (peak * of.peak_fraction / times)
    return np.asarray((work + tail) / rate + of.latency)


def memory_seconds(rates: Rates, num_bytes: ArrayLike, launches: ArrayLike = 1.0) -> Array:
    """Seconds of memory-bound kernels that move `num_bytes` in all (reads + writes) in `launches` kernels.

    T = launches · latency + bytes / bandwidth (the form of te42kyfo/gpu-benches: half of the bandwidth is reached at
    latency · bandwidth bytes).
    """
    num_bytes, launches = _floats(num_bytes, launches)
    return np.asarray(num_bytes / rates.memory_bandwidth + launches * rates.kernel_latency)


def launch_seconds(rates: Rates, launches: ArrayLike) -> Array:
    """Seconds for the host to submit `launches` kernels: a floor under the device's time, not added to it."""
    return np.asarray(np.asarray(launches, dtype=np.float64) * rates.launch_latency)


def pcie_seconds(rates: Rates, num_bytes: ArrayLike) -> Array:
    """Seconds to copy between host and device over one path that no other GPU uses at the time."""
    return np.asarray(np.asarray(num_bytes, dtype=np.float64) / rates.host_bandwidth + rates.host_latency)
