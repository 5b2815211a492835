"""From measured runs to what is a cluster's own: its software factor, fragmentation, context and bands.

Every run is estimated with the cluster as it is known; what is fitted is what is left between estimate and
measurement, drawn to what is known where runs are few or disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from distplan.costmodel import fitted
from distplan.costmodel.fitting import cluster_log_factor, cluster_reach, end_seconds, log_ratio
from distplan.costmodel.model import Moe
from distplan.costmodel.runtime import on_cluster
from distplan.hardware.calibration import Entry
from distplan.hardware.cluster import Cluster
from distplan.hardware.errors import DistplanError
from distplan.hardware.fit_micro import Constant, Residual, residual
from distplan.planner import api
from distplan.planner.plan import Choice
from distplan.planner.runs_file import MeasuredRun
from distplan.planner.search import RuleError

Array = NDArray[np.float64]

FRAGMENTATION_SPREAD, CONTEXT_SPREAD = 0.04, 0.6 * 2.0**30
"""by how much the shipped runtimes differ (standard deviations of fitted.yaml's values, the default's beside them)"""
MEMORY_ERROR = 0.07
"""of a peak, relative: what it is off for other reasons (docs/accuracy.md: the median error of memory rows)"""
MOST_FRAGMENTATION, MOST_CONTEXT = 0.5, 16.0 * 2.0**30
"""assumed: beyond it the readings are of something else"""
FEWEST_OF_A_KIND = 3
LEAST_DIFFERENCE = 0.05
"""assumed: what is less is no news"""
STANDARD_ERRORS = 3.0
"""a kind of strategy is reported as off from so many on: ten kinds are looked at, and two would be chance"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFit:
    cluster: Cluster
    residuals: tuple[Residual, ...]
    """before and after; "left out": each run by the factor of all the others"""
    constants: tuple[Constant, ...]
    notes: tuple[str, ...]
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    run: MeasuredRun
    choice: Choice

    @property
    def seconds(self) -> float:
        return self.choice.step_seconds

    @property
    def end(self) -> float:
        time = {name: float(part[0]) for name, part in self.choice.estimate.time.items()}
        return end_seconds(time, self.run.strategy.zero)

    @property
    def bytes(self) -> float:
        return float(getattr(self.choice.estimate, f"{self.run.reading}_bytes")[0])

    @property
    def kind(self) -> str:
        return "moe" if any(isinstance(k.ffn, Moe) for k in self.run.job.model.kinds.values()) else "dense"


def calibrate(cluster: Cluster, runs: Sequence[MeasuredRun], source: str) -> RunsFit:
    """Fit to runs whose jobs are on `cluster`. Raises DistplanError where no run can be estimated."""
    priced, notes = _price(cluster, runs, source)
    log_factor, left_out = _time(priced)
    entries = dict(cluster.calibration.scalars)
    known = entries["software_factor"].value if "software_factor" in entries else 1.0
    entries["software_factor"] = _entry(known * float(np.exp(log_factor)), len(priced), source)
    with_memory = [each for each in priced if each.run.peak_bytes]
    moved, memory_notes = _memory(with_memory)
    notes += memory_notes
    entries |= {name: _entry(value, points, source) for name, (value, points) in moved.items()}
    made = replace(cluster, calibration=replace(cluster.calibration, scalars=entries))
    after, _ = _price(made, [each.run for each in priced], source)
    entries |= _bands(cluster, priced, left_out, after, source)
    made = replace(made, calibration=replace(made.calibration, scalars=entries))
    return RunsFit(
        cluster=made,
        residuals=tuple(_residuals(priced, after, left_out)),
        constants=tuple(_constants(priced, known, entries, moved)),
        notes=(*notes, *_kinds_that_are_off(priced, left_out)),
        runs=len(priced),
    )


def _entry(value: float, points: int, source: str) -> Entry:
    return Entry(values={"value": value}, points=points, source=source)


def _price(cluster: Cluster, runs: Sequence[MeasuredRun], source: str) -> tuple[list[_Priced], list[str]]:
    priced, refused = [], []
    for run in runs:
        try:
            best = api.estimate_setting(replace(run.job, cluster=cluster), run.strategy).best
        except RuleError as error:
            refused.append(f"{run.place} is left out: {run.job.runtime.name} cannot run it: {error}")
            continue
        except DistplanError as error:
            raise DistplanError(f"{run.place}: {error}") from None
        assert best is not None
        priced.append(_Priced(run=run, choice=best))
    if not priced:
        raise RuleError(f"no run can be estimated: {refused[0]}")
    return priced, refused


def _time(priced: Sequence[_Priced]) -> tuple[float, Array]:
    """(log of the factor, log of measured over predicted of every run with the factor of all the others)."""
    measured = np.array([each.run.step_seconds for each in priced])
    end = np.array([each.end for each in priced])
    busy = np.array([each.seconds for each in priced]) - end
    ratios = log_ratio(measured, busy, end)
    others = [cluster_log_factor(np.delete(ratios, at)) if len(ratios) > 1 else 0.0 for at in range(len(ratios))]
    return cluster_log_factor(ratios), np.log(measured / (np.exp(others) * busy + end))


def _memory(priced: Sequence[_Priced]) -> tuple[dict[str, tuple[float, int]], list[str]]:
    """{fragmentation, context_bytes: (value, runs)}: least squares of measured - allocated with a linear tail, each
    constant drawn to the known one by its spread. Context needs device readings, fragmentation those and reserved."""
    mine = [each for each in priced if each.run.reading != "allocated"]
    if not mine:
        return {}, []
    runtimes = [on_cluster(each.run.job.runtime, each.run.job.cluster) for each in mine]
    share, context = runtimes[0].fragmentation, runtimes[0].context_bytes
    if any((each.fragmentation, each.context_bytes) != (share, context) for each in runtimes):
        return {}, [
            "peak memory: the runs are of runtimes with different allowances; calibrate with the runs of one of them"
        ]
    estimates = [each.choice.estimate for each in mine]
    allocated = np.array([float(each.allocated_bytes[0]) for each in estimates])
    over = np.array([float(each.reserved_bytes[0]) for each in estimates]) - allocated
    device = np.array([each.run.reading == "device" for each in mine])
    measured = np.array([each.run.peak_bytes for each in mine])
    moving = over / share if share > 0.0 else np.zeros_like(over)

    def residuals(values: Array) -> Array:
        tried = allocated + values[0] * moving + values[1] * 2.0**30 * device
        pull = (values - start) / np.array([FRAGMENTATION_SPREAD, CONTEXT_SPREAD / 2.0**30])
        return np.concatenate([(tried - measured) / (MEMORY_ERROR * measured), pull])

    start = np.array([share, context / 2.0**30])
    fit = least_squares(
        residuals,
        start,
        bounds=([0.0, 0.0], [max(MOST_FRAGMENTATION, share), max(MOST_CONTEXT, context) / 2.0**30]),
        loss="soft_l1",
    )
    found = {"fragmentation": (float(fit.x[0]), len(mine))} if share > 0.0 else {}
    if device.any():
        found["context_bytes"] = (float(fit.x[1]) * 2.0**30, int(device.sum()))
    return found, []


def _bands(
    cluster: Cluster, priced: Sequence[_Priced], left_out: Array, after: Sequence[_Priced], source: str
) -> dict[str, Entry]:
    """Bands of the kinds of model that were run: the residuals of left-out runs against the band there was."""
    found = {}
    generation = cluster.accelerator.generation
    for kind in dict.fromkeys(each.kind for each in priced):
        at = [number for number, each in enumerate(priced) if each.kind == kind]
        runtime = priced[at[0]].run.job.runtime.name
        known = fitted.measured_band(cluster, f"time_band_{kind}") or fitted.time_band(generation, runtime, kind)
        found[f"time_band_{kind}"] = _band(left_out[at], known, source)
        errors = np.array(
            [np.log(each.run.peak_bytes / each.bytes) for each in after if each.kind == kind and each.run.peak_bytes]
        )
        if len(errors):
            held = fitted.measured_band(cluster, f"memory_band_{kind}") or fitted.memory_band(generation, runtime, kind)
            found[f"memory_band_{kind}"] = _band(errors, held, source)
    return found


def _band(residuals: Array, known: fitted.Band, source: str) -> Entry:
    reach = cluster_reach(residuals, float(np.log(known.high / known.low)) / 2.0)
    values = {"low": float(np.exp(-reach)), "high": float(np.exp(reach))}
    return Entry(values=values, points=len(residuals), source=source)


def _residuals(priced: Sequence[_Priced], after: Sequence[_Priced], left_out: Array) -> list[Residual]:
    measured = np.array([each.run.step_seconds for each in priced])
    before = np.array([each.seconds for each in priced])
    found = [residual("step time", before, np.array([each.seconds for each in after]), measured)]
    if len(priced) > 1:
        found.append(residual("step time, left out", before, measured / np.exp(left_out), measured))
    for reading in ("allocated", "reserved", "device"):
        at = [n for n, each in enumerate(priced) if each.run.peak_bytes and each.run.reading == reading]
        if at:
            peaks = np.array([priced[n].run.peak_bytes for n in at])
            was, now = (np.array([of[n].bytes for n in at]) for of in (priced, after))
            found.append(residual(f"peak memory, {reading}", was, now, peaks))
    return found


def _constants(
    priced: Sequence[_Priced], known: float, entries: Mapping[str, Entry], moved: Mapping[str, tuple[float, int]]
) -> list[Constant]:
    factor = entries["software_factor"]
    found = [Constant(name="software_factor", before=known, after=factor.value, points=factor.points)]
    runtime = on_cluster(priced[0].run.job.runtime, priced[0].run.job.cluster)
    for name, (value, points) in moved.items():
        found.append(Constant(name=name, before=float(getattr(runtime, name)), after=value, points=points))
    return found


def _kinds_that_are_off(priced: Sequence[_Priced], left_out: Array) -> list[str]:
    """Sentences: kinds of runs whose residuals differ from those of all others by more than chance."""
    node = priced[0].run.job.cluster.gpus_per_node
    kinds: dict[str, list[bool]] = {
        "tp above 1": [each.run.strategy.tp > 1 for each in priced],
        "pp above 1": [each.run.strategy.pp > 1 for each in priced],
        "vpp above 1": [each.run.strategy.vpp > 1 for each in priced],
        "cp above 1": [each.run.strategy.cp > 1 for each in priced],
        "ep above 1": [each.run.strategy.ep > 1 for each in priced],
        "zero 2 or 3": [each.run.strategy.zero > 1 for each in priced],
        "recompute full": [each.run.strategy.recompute == "full" for each in priced],
        "more than one node": [each.run.strategy.gpus > node for each in priced],
        "a model with experts": [each.kind == "moe" for each in priced],
        "products in fp8 or fp4": [each.run.job.workload.precision.matmul in ("fp8", "fp4") for each in priced],
    }
    together: dict[tuple[bool, ...], list[str]] = {}
    for words, flags in kinds.items():
        together.setdefault(tuple(flags), []).append(words)
    found = []
    for same, names in together.items():
        inside, words = np.array(same), " and ".join(names)
        few = int(min(inside.sum(), (~inside).sum()))
        if few < FEWEST_OF_A_KIND:
            continue
        difference = float(np.median(left_out[inside]) - np.median(left_out[~inside]))
        error = float(np.hypot(_median_error(left_out[inside]), _median_error(left_out[~inside])))
        if abs(difference) > max(LEAST_DIFFERENCE, STANDARD_ERRORS * error):
            found.append(
                f"runs with {words} take {abs(np.expm1(difference)):.0%} {'more' if difference > 0 else 'less'} time "
                f"against the calibrated estimate than the others ({int(inside.sum())} and {int((~inside).sum())} "
                "runs): one factor does not describe both"
            )
    return found


def _median_error(values: Array) -> float:
    """Standard error of a median: 1.2533 sigma / sqrt(n), sigma from the median deviation."""
    return 1.2533 * 1.4826 * float(np.median(np.abs(values - np.median(values)))) / float(np.sqrt(len(values)))
