"""Fit the constants of flash attention to measured rows, with the very formula that the package ships."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from distplan.hardware.accelerator import Accelerator
from distplan.hardware.fit_gemm import (
    FEWEST_FOR_SHAPE,
    OUTLIER_SCALE,
    PRIOR_WEIGHT,
    ROW_SPREAD,
    SHAPE_SPREAD,
    gemm_rates,
    only_gemm,
)
from distplan.hardware.rate_types import AttentionRates, Rates
from distplan.hardware.rates import attention_seconds

Array = NDArray[np.float64]

SHAPE = ("head_dim_64", "head_dim_256", "ramp", "causal_ramp", "tail_rows", "latency")
START = {
    "head_dim_64": 0.8,
    "head_dim_256": 1.0,
    "ramp": 150.0,
    "causal_ramp": 300.0,
    "tail_rows": 60.0,
    "latency": 5e-6,
}
_LOW = (0.5, 0.5, 0.0, 0.0, 0.0, 1e-6)
_HIGH = (1.3, 1.6, 1000.0, 1000.0, 400.0, 40e-6)
_ANY_GEMM = {
    "bandwidth": 1.0, "tile128": 1.0, "tile64": 1.0, "wave": 0.0, "ramp": 0.0, "overlap": 0.0, "latency": 0.0,
    "cast": 0.0, "cast_latency": 0.0,
}  # fmt: skip


class AttentionRow(Protocol):
    """One measured kernel over whole sequences (queries = keys = length); `work` is forward | backward | both."""

    @property
    def work(self) -> str: ...
    @property
    def causal(self) -> bool: ...
    @property
    def head_dim(self) -> float: ...
    @property
    def length(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def flops_full(self) -> float: ...


def attention_rates(fraction: float, shape: Mapping[str, float]) -> AttentionRates:
    """Constants of one direction."""
    return AttentionRates(
        peak_fraction=fraction,
        head_dim_64=shape["head_dim_64"],
        head_dim_256=shape["head_dim_256"],
        ramp=shape["ramp"],
        causal_ramp=shape["causal_ramp"],
        tail_rows=shape["tail_rows"],
        latency=shape["latency"],
    )


def bench_rates(accelerator: Accelerator, forward: AttentionRates, backward: AttentionRates) -> Rates:
    """Rates with nothing but the attention constants, for the shipped formula to read."""
    rates = only_gemm("bf16", gemm_rates(accelerator, "bf16", 1.0, _ANY_GEMM))
    return replace(
        rates,
        peak_flops=accelerator.peak_flops,
        num_sms=float(accelerator.num_sms or 1),
        attention_forward=forward,
        attention_backward=backward,
    )


def predicted(rates: Rates, rows: Sequence[AttentionRow]) -> Array:
    """Seconds of every row, shape (rows,)."""

    def column(name: str) -> Array:
        return np.array([float(getattr(row, name)) for row in rows])

    flops, head_dim, length = column("flops_full"), column("head_dim"), column("length")
    causal = np.array([row.causal for row in rows])
    works = np.array([row.work for row in rows])

    def seconds(backward: bool) -> Array:
        args = (rates, flops, head_dim, length, length)
        return np.where(causal, attention_seconds(*args, True, backward), attention_seconds(*args, False, backward))

    forward, back = seconds(False), seconds(True)
    return np.where(works == "forward", forward, np.where(works == "backward", back, forward + back))


def measured(rows: Sequence[AttentionRow]) -> Array:
    """Seconds of every row, shape (rows,)."""
    return np.array([row.seconds for row in rows])


def _solve(residuals: Callable[[Array], Array], count: int, first: Array) -> Array:
    """Fractions forward, backward (each of `count`), then the two shapes, within bounds and with a linear tail."""
    begin = np.concatenate([np.full(count, 0.6), np.full(count, 0.5), first, first])
    low = np.concatenate([np.full(2 * count, 0.1), _LOW, _LOW])
    high = np.concatenate([np.full(2 * count, 1.0), _HIGH, _HIGH])
    fitted = least_squares(
        residuals,
        np.clip(begin, low * 1.001 + 1e-9, high * 0.999),
        bounds=(low, high),
        x_scale=begin,
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
    )
    return np.asarray(fitted.x)


def fit(
    accelerators: Sequence[Accelerator],
    rows_of: Sequence[Sequence[AttentionRow]],
    start: Mapping[str, float] = START,
    prior_weight: float = PRIOR_WEIGHT,
) -> tuple[list[float], dict[str, float], list[float], dict[str, float]]:
    """(forward fractions, forward shape, backward fractions, backward shape) of a family; accelerators weigh alike.

    Backward constants are meaningful only where the rows hold a backward pass. Head-dim ratios are shared.
    """
    count, first = len(accelerators), np.array([start[name] for name in SHAPE])
    total = sum(len(rows) for rows in rows_of)
    own = len(SHAPE)

    def unpack(values: Array) -> tuple[Array, dict[str, float], Array, dict[str, float]]:
        shapes = values[2 * count :]
        forward = dict(zip(SHAPE, shapes[:own], strict=True))
        backward = dict(zip(SHAPE, shapes[own:], strict=True))
        return values[:count], forward, values[count : 2 * count], backward

    def residuals(values: Array) -> Array:
        ahead, forward, back, backward = unpack(values)
        parts = []
        for one, rows, fraction, back_fraction in zip(accelerators, rows_of, ahead, back, strict=True):
            rates = bench_rates(one, attention_rates(fraction, forward), attention_rates(back_fraction, backward))
            weight = np.sqrt(total / count / len(rows))
            parts.append(weight * np.log(predicted(rates, rows) / measured(rows)))
        pull = prior_weight * (values[2 * count :] - np.concatenate([first, first])) / np.concatenate([first, first])
        return np.concatenate([*parts, pull, PRIOR_WEIGHT * np.log(back / (0.8 * ahead))])

    solved = _solve(residuals, count, first)
    ahead, forward, back, backward = unpack(solved)
    return (
        [float(value) for value in ahead],
        {name: float(value) for name, value in forward.items()},
        [float(value) for value in back],
        {name: float(value) for name, value in backward.items()},
    )


def fit_direction(
    accelerator: Accelerator, rows: Sequence[AttentionRow], known: AttentionRates, slower: Array
) -> AttentionRates:
    """Constants of one direction from a device's own rows, all of that direction, drawn to those it is `known` by.

    `slower`: of every row, the time of the kernel that was measured over the best one's. As `fit_gemm.fit_device`.
    """
    start = np.array([known.peak_fraction, *(getattr(known, name) for name in SHAPE)])
    usual = np.array([0.6, *START.values()])
    scale = np.where(start > 0.1 * usual, start, usual)
    truth = measured(rows) / slower

    def made(values: Array) -> AttentionRates:
        return attention_rates(float(values[0]), dict(zip(SHAPE, (float(value) for value in values[1:]), strict=True)))

    def errors(of: AttentionRates) -> Array:
        return np.asarray(np.log(predicted(bench_rates(accelerator, of, of), rows) / truth))

    if len(rows) < FEWEST_FOR_SHAPE:
        return replace(known, peak_fraction=min(1.0, known.peak_fraction * float(np.exp(np.median(errors(known))))))

    def residuals(values: Array) -> Array:
        pull = ROW_SPREAD / SHAPE_SPREAD * (values[1:] - start[1:]) / scale[1:]
        return np.concatenate([errors(made(values)), pull])

    fitted = least_squares(
        residuals,
        start,
        bounds=(np.minimum([0.05, *_LOW], start), np.maximum([1.0, *_HIGH], start)),
        x_scale=scale,
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
    )
    return made(np.asarray(fitted.x))
