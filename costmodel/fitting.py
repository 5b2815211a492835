"""How factors and bands are fitted to measured steps: what `benchmarks.fit` and `distplan calibrate` share.

Seconds of a step are factor · busy + end, where the end is not software's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.fitted import fitted

Array = NDArray[np.float64]

PRIOR_RUNS = 8.0
"""a shipped band counts as so many in a cluster's own (8 runs are the fewest that an 80 % quantile is taken from)"""
SHARE = 0.8
"""of the runs that a band covers"""


def end_seconds(time: Mapping[str, float], zero: int) -> float:
    """Of a step's parts, the seconds that no software factor multiplies: the optimizer, and what is exposed of the
    reduction and the gathering that happen once a step (ZeRO below 2)."""
    return (time["exposed dp"] if zero < 2 else 0.0) + time["optimizer"]


def log_ratio(measured: Array, busy: Array, end: Array) -> Array:
    """Log of the factor that each run asks for."""
    return np.asarray(np.log(np.maximum(measured - end, 0.05 * measured) / busy))


def weighted_median(values: Array, weights: Array) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2.0)])


def drawn(values: Array, weights: Array, towards: float, prior_runs: float) -> float:
    """The median, drawn to `towards`, which counts as `prior_runs` runs."""
    number = len(values)
    return (weighted_median(values, weights) * number + towards * prior_runs) / (number + prior_runs)


def cluster_log_factor(ratios: Array) -> float:
    """Of a cluster's own runs: their median, drawn to 0 (as shipped) the less, the better they agree.

    The mean of a normal prior: what is shipped counts as scatter² / cluster² runs, where the scatter is the runs' own
    (robust), with one run's worth of run² (`spread` of fitted.yaml).
    """
    spread = fitted().spread
    number = len(ratios)
    own = 1.4826 * float(np.median(np.abs(ratios - np.median(ratios))))
    scatter = ((number - 1) * own**2 + spread["run"] ** 2) / number
    return float(np.median(ratios)) * number / (number + scatter / spread["cluster"] ** 2)


def cluster_reach(residuals: Array, shipped: float) -> float:
    """Log half-width of a band from residuals of runs left out: their quantile, with the shipped half-width as
    PRIOR_RUNS runs. The quantile is that of one more run of the same kind (a sample's own is too narrow)."""
    number = len(residuals)
    level = min(1.0, SHARE * (number + 1) / number)
    own = float(np.quantile(np.abs(residuals), level, method="higher"))
    return (own * number + shipped * PRIOR_RUNS) / (number + PRIOR_RUNS)
