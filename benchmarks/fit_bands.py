"""Bands: quantiles of measured over predicted (either way), of rows whose source was left out of the fit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from benchmarks.accuracy_score import model_kind
from benchmarks.fit_memory import MemoryFit
from benchmarks.fit_time import TimeFit, source_of
from distplan.costmodel.fitted import DEFAULT
from distplan.costmodel.fitting import SHARE

Value = TypeVar("Value")
Groups = dict[tuple[str, str, str], list[float]]
FEWEST, FEWEST_OF_A_SOURCE = 20, 5
"""rows of a group; and of the second of its sources, so that a band is not of one source alone"""
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
    sources: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for p in fit.predictions:
        key = (p.case.cluster.accelerator.generation, p.case.runtime.name, model_kind(p))
        _add(groups, *key, 1.0 / (1.0 + p.memory_error))
        _add(sources, *key, source_of(p.case.row))
    several = {key: values for key, values in groups.items() if _second_source(sources[key]) >= FEWEST_OF_A_SOURCE}
    known = {
        key: _band(values)
        for key, values in _large(several).items()
        if float(np.median(np.abs(np.log(values)))) <= TRUSTED
    }
    return {" ".join((DEFAULT,) * 3): ASSUMED_MEMORY} | known


def _second_source(names: Sequence[str]) -> int:
    """Rows of the source that has the second most."""
    counts = sorted(Counter(names).values(), reverse=True)
    return counts[1] if len(counts) > 1 else 0


def _add(
    groups: dict[tuple[str, str, str], list[Value]], generation: str, runtime: str, kind: str, value: Value
) -> None:
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
