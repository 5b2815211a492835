"""Bands: quantiles of measured over predicted (either way), of rows whose source was left out of the fit."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.accuracy_score import model_kind
from benchmarks.fit_memory import MemoryFit
from benchmarks.fit_time import TimeFit
from distplan.costmodel.fitted import DEFAULT
from distplan.costmodel.fitting import SHARE

Groups = dict[tuple[str, str, str], list[float]]
FEWEST = 20
TRUSTED = 0.15
"""memory: a group whose median error is larger is missing physics, which a band must not hide in a verdict"""
ASSUMED_MEMORY = {"low": 0.95, "high": 1.05, "runs": 0}


def time_bands(fit: TimeFit, residuals: np.ndarray) -> dict[str, Any]:
    """Per (generation, runtime, model kind), per (generation, kind), per kind, and of all."""
    groups: Groups = defaultdict(list)
    for case, residual in zip(fit.cases, residuals, strict=True):
        kind = "moe" if case.row["model_kind"] in ("moe", "hybrid-moe") else "dense"
        _add(groups, case.cluster.accelerator.generation, case.runtime.name, kind, float(np.exp(residual)))
    return {key: _band(values) for key, values in _large(groups).items()}


def memory_bands(fit: MemoryFit) -> dict[str, Any]:
    groups: Groups = defaultdict(list)
    for p in fit.predictions:
        ratio = 1.0 / (1.0 + p.memory_error)
        _add(groups, p.case.cluster.accelerator.generation, p.case.runtime.name, model_kind(p), ratio)
    known = {
        key: _band(values)
        for key, values in _large(groups).items()
        if float(np.median(np.abs(np.log(values)))) <= TRUSTED
    }
    return {" ".join((DEFAULT,) * 3): ASSUMED_MEMORY} | known


def _add(groups: Groups, generation: str, runtime: str, kind: str, value: float) -> None:
    for key in (
        (generation, runtime, kind),
        (generation, DEFAULT, kind),
        (DEFAULT, runtime, kind),
        (DEFAULT, DEFAULT, kind),
        (DEFAULT, DEFAULT, DEFAULT),
    ):
        groups[key].append(value)


def _large(groups: Groups) -> dict[str, list[float]]:
    return {
        " ".join(key): values
        for key, values in sorted(groups.items())
        if len(values) >= FEWEST or key == (DEFAULT, DEFAULT, DEFAULT)
    }


def _band(values: list[float]) -> dict[str, Any]:
    """As far up as down (a factor): the prediction is its middle, though a source left out may be off to one side."""
    reach = float(np.exp(np.quantile(np.abs(np.log(values)), SHARE)))
    return {"low": round(1.0 / reach, 4), "high": round(reach, 4), "runs": len(values)}
