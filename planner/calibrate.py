"""`calibrate`: from files of measurements to a hardware file with a cluster's own constants."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distplan.costmodel.runtime import load_runtime
from distplan.hardware import fit_micro
from distplan.hardware.calibration import check_bounds, content_of
from distplan.hardware.cluster import Cluster, hardware_document, load_cluster
from distplan.hardware.documents import write_atomically
from distplan.hardware.errors import DistplanError
from distplan.hardware.fit_micro import Constant, Residual
from distplan.hardware.microbench import Bench, check_device, read_bench, read_nccl_tests
from distplan.planner import calibrate_runs
from distplan.planner.output import yaml_text
from distplan.planner.plain import rounded
from distplan.planner.runs_file import MeasuredRun, read_runs

HEAD = "# Written by `distplan calibrate`: a system with constants measured on it (docs/calibrate.md).\n"
STILL_OFF = 0.3
"""median error that is worth a word (assumed; of shipped constants it is 2 to 10 %, docs/accuracy.md)"""
SCRIPT = Path(__file__).with_name("benchmark_script.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """One file's worth: what it moved, and how far the estimates were off before and are after."""

    file: str
    kind: str
    """micro-benchmarks | runs"""
    measurements: int
    residuals: tuple[Residual, ...]
    constants: tuple[Constant, ...]
    notes: tuple[str, ...]


def calibrate(
    files: Sequence[str],
    hardware: str,
    *,
    runtime: str | None = None,
    collective: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
) -> tuple[Cluster, list[Calibrated]]:
    """The cluster with what the files measured: micro-benchmarks first, then runs on what those gave.

    A .json is a bench.json, a .csv runs, any other text that of nccl-tests (`collective`, `ranks` and `nodes` are for
    those that do not say). Raises DistplanError; all files are read before anything is fitted.
    """
    cluster = load_cluster(hardware)
    if runtime is not None:
        load_runtime(runtime)
    twice = next((file for at, file in enumerate(files) if _place(file) in map(_place, files[:at])), None)
    if twice is not None:
        raise DistplanError(f"{twice}: is given twice; its measurements would count double")
    benches = [
        read_bench(file)
        if file.lower().endswith(".json")
        else read_nccl_tests(file, collective=collective, ranks=ranks, nodes=nodes)
        for file in files
        if not file.lower().endswith(".csv")
    ]
    for bench in benches:
        check_device(bench, cluster)
    runs = {file: read_runs(file, cluster, runtime) for file in files if file.lower().endswith(".csv")}
    done = []
    for bench in benches:
        fit = fit_micro.calibrate(cluster, bench)
        cluster = fit.cluster
        check_bounds(cluster.calibration)
        done.append(_micro(bench, fit))
    if runs:
        together = [run for of in runs.values() for run in of]
        name = ", ".join(Path(file).name for file in runs)
        of_runs = calibrate_runs.calibrate(cluster, together, name)
        cluster = of_runs.cluster
        check_bounds(cluster.calibration)
        done.append(_runs(name, together, of_runs))
    return cluster, done


def _place(file: str) -> str:
    return os.path.realpath(file)


def _micro(bench: Bench, fit: fit_micro.MicroFit) -> Calibrated:
    number = len(bench.gemm) + len(bench.attention) + len(bench.copies) + len(bench.collectives) + len(bench.context)
    return Calibrated(
        file=bench.source,
        kind="micro-benchmarks",
        measurements=number,
        residuals=fit.residuals,
        constants=fit.constants,
        notes=(*fit.notes, *_still_off(fit.residuals)),
    )


def _runs(name: str, runs: Sequence[MeasuredRun], fit: calibrate_runs.RunsFit) -> Calibrated:
    return Calibrated(
        file=name,
        kind="runs",
        measurements=len(runs),
        residuals=fit.residuals,
        constants=fit.constants,
        notes=(*fit.notes, *_still_off(fit.residuals)),
    )


def _still_off(residuals: Sequence[Residual]) -> list[str]:
    return [
        f"{each.kind}: the calibrated model is still off by {each.after_median:.0%} in the median; "
        "such measurements contradict each other, or what is known of this hardware"
        for each in residuals
        if each.after_median > STILL_OFF
    ]


def document(cluster: Cluster, done: Sequence[Calibrated]) -> dict[str, Any]:
    """Plain data of what was done, with the section that the file gets."""
    return {
        "hardware": cluster.id,
        "files": [rounded(asdict(each) | _listed(each)) for each in done],
        "calibration": content_of(cluster.calibration),
    }


def _listed(each: Calibrated) -> dict[str, Any]:
    return {name: [asdict(item) for item in getattr(each, name)] for name in ("residuals", "constants")} | {
        "notes": list(each.notes)
    }


def hardware_text(hardware: str, cluster: Cluster) -> str:
    """The hardware file: `hardware` as it is described, with the calibration of `cluster`."""
    content = hardware_document(hardware)
    content.pop("calibration", None)
    sources = content.pop("sources", None)
    content |= {"calibration": content_of(cluster.calibration)} | ({"sources": sources} if sources else {})
    return HEAD + yaml_text(content)


def write_hardware(path: str, hardware: str, cluster: Cluster) -> None:
    """Whole or not at all. Raises DistplanError."""
    write_atomically(path, hardware_text(hardware, cluster))


def benchmark_script() -> str:
    """The script that measures: one file, which needs torch alone."""
    return SCRIPT.read_text(encoding="utf-8")
