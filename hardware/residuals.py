"""How far predictions are from measurements, in one line per accelerator × kind."""

import numpy as np
from numpy.typing import NDArray


def residual_line(label: str, predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> str:
    """n, median |error|, 90th percentile of |error|, bias (median signed error); error = predicted/measured - 1."""
    error = predicted / measured - 1.0
    if not len(error):
        return f"{label:<64} n=   0"
    middle, worst = np.percentile(np.abs(error), [50, 90])
    return f"{label:<64} n={len(error):4d}  median {middle:6.1%}  p90 {worst:6.1%}  bias {np.median(error):+6.1%}"
