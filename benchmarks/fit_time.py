"""Software factors and overlap efficiencies from step times.

Seconds of a step are factor · modelled(overlaps) + end(overlaps), where the end (exposed data-parallel traffic at
the step's end, the optimizer) is not software's. For given overlaps the factors are weighted medians in closed
form; the overlaps are what scipy searches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize_scalar

from benchmarks.accuracy_fill import Case
from benchmarks.accuracy_predict import cases_of, predict_cases
from benchmarks.accuracy_rows import Row
from distplan.costmodel.fitted import DEFAULT, OVERLAPS
from distplan.costmodel.fitting import drawn, end_seconds, log_ratio, weighted_median
from distplan.costmodel.runtime import Runtime, list_runtimes

FEWEST_RUNS = 8
"""a runtime on a generation has a factor of its own from so many on; the others take the generation's"""
PRIOR_RUNS = 50.0
"""a generation's factor counts as so many runs in that of a runtime. Of 4, 8, 20, 50 and 200 by the median error of
dense runs with their source left out: 8.6, 8.5, 8.2, 8.0, 7.8 %; of those fitted 5.5 % up to 50, then 5.9 % (their mean
rises from 7.5 to 7.7 %). Chosen on these very runs, so that the former flatters a little."""
CAP = 0.35
"""residuals of log seconds count up to here: what is further off is another run than the row says"""
ASSUMED_OVERLAP = 0.8
"""assumed, not fitted: of a kind that no run hides, and of the kinds whose turn comes later while one is searched"""
PASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFit:
    """Timed rows with their cases; `weights` make every source count by the root of its rows."""

    rows: tuple[Row, ...]
    cases: tuple[Case, ...]
    weights: np.ndarray
    measured: np.ndarray

    def groups(self) -> list[tuple[str, str]]:
        """(runtime, generation) per row"""
        return [(case.runtime.name, case.cluster.accelerator.generation) for case in self.cases]

    def counts(self, runtime: str, generation: str) -> tuple[int, int]:
        """(runs, sources) behind a factor."""
        mine = [
            row
            for row, (name, family) in zip(self.rows, self.groups(), strict=True)
            if runtime in (name, DEFAULT) and generation in (family, DEFAULT)
        ]
        return len(mine), len({source_of(row) for row in mine})

    def uses(self, at: int, kind: str) -> bool:
        """Whether a collective of this kind may hide behind something in the run."""
        case = self.cases[at]
        if kind.startswith("fsdp") != (case.strategy.zero >= 2) and "dp" in kind:
            return False
        degree = {"tp": "tp", "tp_backward": "tp", "cp": "cp", "ep": "ep"}.get(kind, "dp")
        return bool(case.runtime.overlap[kind.replace("fsdp", "dp")]) and getattr(case.strategy, degree) > 1

    def runs_with(self, kind: str) -> int:
        return sum(self.uses(at, kind) for at in range(len(self.cases)))


def source_of(row: Row) -> str:
    return row["source"].split("@")[0].split(" (")[0]


def prepare(due: Sequence[Row]) -> TimeFit:
    """The timed rows, unit factors and full overlap in their runtimes."""
    cases = [case for case in cases_of(due)[0] if case.seconds > 0.0]
    number: dict[str, int] = defaultdict(int)
    for case in cases:
        number[source_of(case.row)] += 1
    weights = np.array([number[source_of(case.row)] ** -0.5 for case in cases])
    return TimeFit(
        rows=tuple(case.row for case in cases),
        cases=tuple(cases),
        weights=weights,
        measured=np.array([case.seconds for case in cases]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """Seconds that the factor multiplies, and those of the step's end, per row."""

    busy: np.ndarray
    end: np.ndarray


def modelled(fit: TimeFit, overlaps: Mapping[str, float], sample: Sequence[int] | None = None) -> Modelled:
    """Prices with unit factors."""
    changed: dict[int, Runtime] = {}
    cases = []
    for at in range(len(fit.cases)) if sample is None else sample:
        case = fit.cases[at]
        unit = replace(case.runtime, overlap_efficiency=dict(overlaps), software_factors={DEFAULT: 1.0})
        cases.append(replace(case, runtime=changed.setdefault(id(case.runtime), unit)))
    found = predict_cases(cases)
    end = np.array([end_seconds(p.time, p.case.strategy.zero) for p in found])
    return Modelled(busy=np.array([p.seconds for p in found]) - end, end=end)


def _factors(ratio: np.ndarray, weights: np.ndarray, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Weighted medians of log ratios: of all, of each generation, and of each runtime on it, drawn to the former."""
    found = {(DEFAULT, DEFAULT): float(np.exp(weighted_median(ratio, weights)))}
    for generation in sorted({generation for _, generation in keys}):
        at = np.array([key[1] == generation for key in keys])
        whole = drawn(ratio[at], weights[at], float(np.log(found[DEFAULT, DEFAULT])), PRIOR_RUNS)
        found[DEFAULT, generation] = float(np.exp(whole))
        for runtime in sorted({name for name, where in keys if where == generation}):
            mine = np.array([key == (runtime, generation) for key in keys])
            if mine.sum() >= FEWEST_RUNS and runtime in list_runtimes():  # what is not shipped is one source's own
                found[runtime, generation] = float(np.exp(drawn(ratio[mine], weights[mine], whole, PRIOR_RUNS)))
    return found


def _ratio(fit: TimeFit, model: Modelled, at: np.ndarray) -> np.ndarray:
    return log_ratio(fit.measured[at], model.busy, model.end)


_PRICED: dict[tuple[float, ...], Modelled] = {}


def _priced(fit: TimeFit, overlaps: Mapping[str, float]) -> Modelled:
    key = tuple(overlaps.values())
    if key not in _PRICED:
        _PRICED[key] = modelled(fit, overlaps)
    return _PRICED[key]


def factors_of(fit: TimeFit, overlaps: Mapping[str, float], rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Software factors from `rows` of the fit."""
    ids = {row["id"] for row in rows}
    at = np.array([number for number, row in enumerate(fit.rows) if row["id"] in ids])
    model = _priced(fit, overlaps)
    part = Modelled(busy=model.busy[at], end=model.end[at])
    keys = fit.groups()
    return _factors(_ratio(fit, part, at), fit.weights[at], [keys[number] for number in at])


def factor_for(factors: Mapping[tuple[str, str], float], key: tuple[str, str]) -> float:
    for known in (key, (DEFAULT, key[1]), (DEFAULT, DEFAULT)):
        if known in factors:
            return factors[known]
    raise AssertionError("no default factor")


def errors_of(fit: TimeFit, overlaps: Mapping[str, float], factors: Mapping[tuple[str, str], float]) -> np.ndarray:
    """log(measured / predicted) per row."""
    model = _priced(fit, overlaps)
    factor = np.array([factor_for(factors, key) for key in fit.groups()])
    return np.asarray(np.log(fit.measured / (factor * model.busy + model.end)))


def fit_overlaps(fit: TimeFit) -> dict[str, float]:
    """Efficiencies in 0 … 1 that leave the least weighted capped error, one kind of collective after the other, on a
    sample of every source and framework in which that kind may hide (the data-parallel kinds are in many alike)."""
    overlaps = dict.fromkeys(OVERLAPS, ASSUMED_OVERLAP)
    for kind in OVERLAPS * PASSES:
        sample = [at for at in _sample(fit, 5 if "dp" in kind else 50) if fit.uses(at, kind)]
        if sample:
            overlaps[kind] = _least_loss((fit, dict(overlaps), kind, sample))
    return overlaps


def _least_loss(problem: tuple[TimeFit, Mapping[str, float], str, Sequence[int]]) -> float:
    """The bounded search never tries the bounds themselves, where the least may well lie."""
    found = minimize_scalar(_loss, args=problem, bounds=(0.0, 1.0), method="bounded", options={"xatol": 0.01})
    assert found.success, found.message
    return round(min((float(found.x), 0.0, 1.0), key=lambda value: _loss(value, *problem)), 3)


def _loss(value: float, fit: TimeFit, others: Mapping[str, float], kind: str, sample: Sequence[int]) -> float:
    """Weighted mean of capped errors with `kind` at `value`, each row's with the factors that the other sources ask
    for: those of its own would make up for what the overlap does not explain."""
    overlaps = {**others, kind: float(value)}
    model, at, weights = modelled(fit, overlaps, sample), np.array(sample), fit.weights[list(sample)]
    every = fit.groups()
    keys = [every[number] for number in sample]
    sources = np.array([source_of(fit.rows[number]) for number in sample])
    ratio = _ratio(fit, model, at)
    factor = np.ones(len(at))
    for source in dict.fromkeys(sources):
        rest, mine = np.flatnonzero(sources != source), np.flatnonzero(sources == source)
        rest = rest if len(rest) else mine
        factors = _factors(ratio[rest], weights[rest], [keys[number] for number in rest])
        factor[mine] = [factor_for(factors, keys[number]) for number in mine]
    error = np.abs(np.log(fit.measured[at] / (factor * model.busy + model.end)))
    return float(np.sum(weights * np.minimum(error, CAP)) / np.sum(weights))


def _sample(fit: TimeFit, most: int) -> list[int]:
    """Up to `most` rows of every (source, framework, generation), evenly spaced."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at, (row, case) in enumerate(zip(fit.rows, fit.cases, strict=True)):
        groups[source_of(row), case.framework, case.cluster.accelerator.generation].append(at)
    chosen: list[int] = []
    for members in groups.values():
        step = max(1.0, len(members) / most)
        chosen += [members[int(number * step)] for number in range(min(most, len(members)))]
    return sorted(chosen)
