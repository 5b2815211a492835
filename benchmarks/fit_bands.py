"""Bands: quantiles of measured over predicted, of rows whose source was left out of the fit."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.accuracy_score import model_kind
from benchmarks.fit_memory import MemoryFit
from benchmarks.fit_time import TimeFit
from distplan.costmodel.fitted import DEFAULT

Groups = dict[tuple[str, str, str], list[float]]
FEWEST = 20
LOW, HIGH = 0.1, 0.9
"""an 80 % band"""


def time_bands(fit: TimeFit, residuals: np.ndarray) -> dict[str, Any]:
    """Per (generation, runtime, model kind), per (generation, kind), per kind, and of all."""
    groups: Groups = defaultdict(list)
    for case, residual in zip(fit.cases, residuals, strict=True):
        kind = "moe" if case.row["model_kind"] in ("moe", "hybrid-moe") else "dense"
        _add(groups, case.cluster.accelerator.generation, case.runtime.name, kind, float(np.exp(residual)))
    return _entries(groups)


def memory_bands(fit: MemoryFit) -> dict[str, Any]:
    groups: Groups = defaultdict(list)
    for p in fit.predictions:
        ratio = 1.0 / (1.0 + p.memory_error)
        _add(groups, p.case.cluster.accelerator.generation, p.case.runtime.name, model_kind(p), ratio)
    return _entries(groups)


def _add(groups: Groups, generation: str, runtime: str, kind: str, value: float) -> None:
    for key in (
        (generation, runtime, kind), (generation, DEFAULT, kind), (DEFAULT, runtime, kind), (DEFAULT, DEFAULT, kind),
        (DEFAULT, DEFAULT, DEFAULT),
    ):
        groups[key].append(value)


def _entries(groups: Groups) -> dict[str, Any]:
    """Quantiles of groups large enough; a band always holds the prediction itself."""
    return {
        " ".join(key): {
            "low": round(min(1.0, float(np.quantile(values, LOW))), 4),
            "high": round(max(1.0, float(np.quantile(values, HIGH))), 4), "runs": len(values),
        }
        for key, values in sorted(groups.items())
        if len(values) >= FEWEST or key == (DEFAULT, DEFAULT, DEFAULT)
    }
