"""Fit the constants of matrix products to measured rows, with the very formula that the package ships."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from distplan.hardware.accelerator import Accelerator
from distplan.hardware.rate_types import AttentionRates, GemmRates, Rates
from distplan.hardware.rates import FP32, gemm_seconds

Array = NDArray[np.float64]

OUTLIER_SCALE = 0.08
"""log error above which a row counts linearly: tables hold runs where the library chose a bad kernel"""
PRIOR_WEIGHT = 0.05
"""pull of each shape constant towards its start, in rows: only decides constants that the rows leave open"""
_SHAPE = ("wave", "ramp", "overlap", "bandwidth", "latency", "tile128", "tile64", "cast", "cast_latency")
_START = (0.5, 100.0, 0.1, 0.8, 3e-6, 1.15, 1.2, 5.0, 5e-6)
_LOW = (0.0, 5.0, 0.0, 0.5, 0.5e-6, 1.0, 1.0, 3.0, 0.0)
_HIGH = (1.0, 600.0, 1.0, 0.95, 10e-6, 3.0, 3.0, 20.0, 30e-6)
_UNUSED_ATTENTION = AttentionRates(
    peak_fraction=1.0, head_dim_64=1.0, head_dim_256=1.0, ramp=0.0, causal_ramp=0.0, tail_rows=0.0, latency=0.0
)


class Gemm(Protocol):
    """One measured product [m, k] x [k, n], `groups` times; seconds for all groups together."""

    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def accumulate_fp32(self) -> bool: ...
    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one accelerator and dtype as arrays, shape (rows,)."""

    m: Array
    n: Array
    k: Array
    groups: Array
    accumulate: NDArray[np.bool_]
    seconds: Array

    @classmethod
    def of(cls, rows: Sequence[Gemm]) -> "Rows":
        def column(name: str) -> Array:
            return np.array([float(getattr(row, name)) for row in rows])

        accumulate = np.array([row.accumulate_fp32 for row in rows], dtype=bool)
        return cls(
            m=column("m"),
            n=column("n"),
            k=column("k"),
            groups=column("groups"),
            accumulate=accumulate,
            seconds=column("seconds"),
        )

    @property
    def large(self) -> NDArray[np.bool_]:
        """m, n, k all at least 1,024."""
        return np.asarray(np.minimum(np.minimum(self.m, self.n), self.k) >= 1024)


def gemm_rates(accelerator: Accelerator, dtype: str, fraction: float, shape: Mapping[str, float]) -> GemmRates:
    """Constants of one accelerator from a fraction of peak and a family's shape constants."""
    size = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}.get(dtype, 4.0)
    return GemmRates(
        flops_per_second=accelerator.peak_flops[dtype] * fraction,
        bytes_per_second=accelerator.memory_bandwidth * shape["bandwidth"],
        tile_costs=((256.0, 128.0, 1.0), (128.0, 128.0, shape["tile128"]), (64.0, 64.0, shape["tile64"])),
        num_sms=float(accelerator.num_sms or 1),
        wave=shape["wave"] if accelerator.num_sms else 0.0,
        ramp=shape["ramp"],
        overlap=shape["overlap"],
        latency=shape["latency"],
        group_latency=shape.get("group_latency", 0.0),
        operand_bytes=size,
        result_bytes=max(size, 2.0),
        accumulate_bytes=shape.get("accumulate_bytes", 6.0),
        cast_bytes=shape["cast"] if dtype == "fp8" else 0.0,
        cast_latency=shape["cast_latency"] if dtype == "fp8" else 0.0,
    )


def only_gemm(dtype: str, of: GemmRates) -> Rates:
    """Rates with nothing but one dtype's product constants, for the shipped formula to read."""
    return Rates(
        accelerator="calibration",
        family="",
        num_sms=of.num_sms,
        peak_flops={},
        gemm={dtype: of},
        misalignment=(1.0, 1.0),
        attention_forward=_UNUSED_ATTENTION,
        attention_backward=_UNUSED_ATTENTION,
        memory_bandwidth=1.0,
        kernel_latency=0.0,
        launch_latency=0.0,
        host_operator=0.0,
        host_bandwidth=1.0,
        host_latency=0.0,
        sustained=1.0,
        origins={},
    )


def predicted(dtype: str, of: GemmRates, rows: Rows, cast_input: bool = True) -> Array:
    """Seconds of every row."""
    rates = only_gemm(dtype, of)
    plain, summed = (
        gemm_seconds(rates, rows.m, rows.n, rows.k, dtype, groups=rows.groups, accumulate=buffer, cast_input=cast_input)
        for buffer in (0.0, FP32)
    )
    return np.where(rows.accumulate, summed, plain)


def fit_family(
    accelerators: Sequence[Accelerator], dtype: str, rows_of: Sequence[Rows]
) -> tuple[list[float], dict[str, float]]:
    """Fraction of peak of each accelerator, and the family's shape constants, from all rows together.

    Large shapes weigh twice the small ones, each accelerator as much as any other; least squares of the log ratio
    with a linear tail.
    """
    count, start = len(accelerators), np.array(_START)
    weights = [np.where(rows.large, 1.0, 0.5) * np.sqrt(200.0 / len(rows.m)) for rows in rows_of]

    def residuals(values: Array) -> Array:
        shape = dict(zip(_SHAPE, values[count:], strict=True))
        parts = [
            weight * np.log(predicted(dtype, gemm_rates(one, dtype, fraction, shape), rows) / rows.seconds)
            for one, fraction, rows, weight in zip(accelerators, values[:count], rows_of, weights, strict=True)
        ]
        pull = PRIOR_WEIGHT * (values[count:] - start) / start
        return np.concatenate([*parts, pull])

    fit = least_squares(
        residuals,
        np.concatenate([np.full(count, 0.75), start]),
        bounds=(np.concatenate([np.full(count, 0.2), _LOW]), np.concatenate([np.full(count, 1.2), _HIGH])),
        x_scale=np.concatenate([np.full(count, 0.75), start]),
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
    )
    return list(fit.x[:count]), dict(zip(_SHAPE, (float(value) for value in fit.x[count:]), strict=True))


def fraction_of(
    accelerator: Accelerator, dtype: str, shape: Mapping[str, float], rows: Rows, cast_input: bool = False
) -> float:
    """The fraction of peak at which the formula gives the rows' times, by their median (bisection)."""
    low, high = 0.02, 1.25
    for _ in range(40):
        middle = (low + high) / 2.0
        times = predicted(dtype, gemm_rates(accelerator, dtype, middle, shape), rows, cast_input)
        low, high = (middle, high) if np.median(times / rows.seconds) > 1.0 else (low, middle)
    return (low + high) / 2.0


def fit_weight_gradient(accelerator: Accelerator, shape: Mapping[str, float], rows: Rows) -> tuple[float, float, float]:
    """(fraction, accumulate_bytes, group_latency) of training layouts, with the family's other constants held."""

    def residuals(values: Array) -> Array:
        of = gemm_rates(accelerator, "bf16", values[0], shape)
        of = replace(of, accumulate_bytes=values[1], group_latency=values[2] * 1e-6)
        large = np.where(rows.groups > 1, 0.5, np.where(rows.large, 1.0, 0.25))
        return np.asarray(large * np.log(predicted("bf16", of, rows) / rows.seconds))

    fit = least_squares(
        residuals,
        [0.7, 8.0, 2.0],
        bounds=([0.2, 6.0, 0.0], [1.2, 40.0, 60.0]),
        x_scale=[0.7, 8.0, 2.0],
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
    )
    return float(fit.x[0]), float(fit.x[1]), float(fit.x[2]) * 1e-6


ROW_SPREAD = 0.05
"""log error of one row of a good table: the medians that `benchmarks.calibrate` prints are 3 to 6 %"""
SHAPE_SPREAD = 0.5
"""by how much shape constants differ between the fitted families, relative (data/rates/fitted.yaml)"""
FEWEST_FOR_SHAPE = 12
"""rows from which the shape constants move too; fewer give the fraction of peak alone"""
_DEVICE_SHAPE = _SHAPE[:7]
"""the cast to fp8 is no part of what a device's own table measures"""


def shape_of(accelerator: Accelerator, rates: GemmRates) -> dict[str, float]:
    """The shape constants that `gemm_rates` takes, of rates as they are."""
    costs = {rows: cost for rows, _, cost in rates.tile_costs}
    return {
        "wave": rates.wave,
        "ramp": rates.ramp,
        "overlap": rates.overlap,
        "bandwidth": rates.bytes_per_second / accelerator.memory_bandwidth,
        "latency": rates.latency,
        "tile128": costs[128.0],
        "tile64": costs[64.0],
        "cast": rates.cast_bytes,
        "cast_latency": rates.cast_latency,
        "group_latency": rates.group_latency,
        "accumulate_bytes": rates.accumulate_bytes,
    }


def fit_device(accelerator: Accelerator, dtype: str, rows: Rows, known: GemmRates) -> tuple[float, dict[str, float]]:
    """(fraction of peak, shape constants) of one device from its own rows, drawn to those it is `known` by.

    Least squares of the log ratio with a linear tail; a shape constant pulls towards what is known with the weight
    of one row that is off by as many ROW_SPREADs as the constant is by SHAPE_SPREADs. Rows without a cast.
    """
    shape = shape_of(accelerator, known)
    fraction = known.flops_per_second / accelerator.peak_flops[dtype]
    if len(rows.m) < FEWEST_FOR_SHAPE:
        return fraction_of(accelerator, dtype, shape, rows), shape
    start = np.array([fraction, *(shape[name] for name in _DEVICE_SHAPE)])
    usual = np.array([0.75, *_START[:7]])
    scale = np.where(start > 0.1 * usual, start, usual)
    weight = np.where(rows.large, 1.0, 0.5)

    def residuals(values: Array) -> Array:
        tried = shape | dict(zip(_DEVICE_SHAPE, values[1:], strict=True))
        times = predicted(dtype, gemm_rates(accelerator, dtype, values[0], tried), rows, cast_input=False)
        pull = ROW_SPREAD / SHAPE_SPREAD * (values[1:] - start[1:]) / scale[1:]
        return np.concatenate([weight * np.log(times / rows.seconds), pull])

    fit = least_squares(
        residuals,
        start,
        bounds=(np.minimum([0.02, *_LOW[:7]], start), np.maximum([1.25, *_HIGH[:7]], start)),
        x_scale=scale,
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
    )
    found = dict(zip(_DEVICE_SHAPE, (float(value) for value in fit.x[1:]), strict=True))
    return float(fit.x[0]), shape | found
