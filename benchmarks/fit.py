"""Fit the constants of costmodel/fitted.yaml to measured runs, and print what they explain.

    python -m benchmarks.fit runs.csv [-o costmodel/fitted.yaml]

Only these: a software factor per runtime and generation, how well each kind of collective hides, fragmentation and
context per runtime; and the quantiles of the residuals. Beside each fit stands the error where the source of the
run was left out of it. Sources weigh alike, whatever their number of rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.accuracy_rows import read_rows, select
from benchmarks.fit_bands import memory_bands, time_bands
from benchmarks.fit_memory import fit_memory
from benchmarks.fit_time import TimeFit, errors_of, factors_of, fit_overlaps, prepare, source_of
from distplan.costmodel.fitted import FILE, fitted
from distplan.hardware.errors import DistplanError

FEWEST_OF_A_CLUSTER = 5
HEAD = "# Constants fitted to end-to-end runs, and nothing else: written by benchmarks/fit.py, read by fitted.py.\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="a truth file (CSV)")
    parser.add_argument("-o", "--output", default=str(FILE))
    parser.add_argument("--keep-overlaps", action="store_true", help="take the overlap efficiencies as they are")
    options = parser.parse_args(arguments)
    try:
        due = select(read_rows(options.file)).due
    except DistplanError as error:
        print(error, file=sys.stderr)
        return 2
    fit = prepare(due)
    overlaps = dict(fitted().overlap_efficiency) if options.keep_overlaps else fit_overlaps(fit)
    factors = factors_of(fit, overlaps, fit.rows)
    residuals = _left_out(fit, overlaps)
    memory = fit_memory(due)
    cluster, run, groups = _spreads(fit, errors_of(fit, overlaps, factors))
    document = {
        "note": f"written by python -m benchmarks.fit from {len(fit.rows)} timed and {memory.runs} memory rows",
        "software_factor": _factor_entries(fit, factors),
        "overlap_efficiency": {
            kind: {"value": round(value, 3), "runs": fit.runs_with(kind)} for kind, value in overlaps.items()
        },
        "fragmentation": memory.fragmentation,
        "context_bytes": memory.context_bytes,
        "spread": {
            "cluster": {"value": round(cluster, 3), "runs": groups},
            "run": {"value": round(run, 3), "runs": groups},
        },
        "time_band": time_bands(fit, residuals),
        "memory_band": memory_bands(memory),
    }
    _print(fit, overlaps, factors, residuals)
    body = yaml.safe_dump(document, sort_keys=False, width=120)
    Path(options.output).write_text(HEAD + body, encoding="utf-8")
    return 0


def _left_out(fit: TimeFit, overlaps: Mapping[str, float]) -> np.ndarray:
    """log(measured / predicted) of every row with the factors of all other sources."""
    found = np.zeros(len(fit.rows))
    for source in dict.fromkeys(source_of(row) for row in fit.rows):
        others = [row for row in fit.rows if source_of(row) != source]
        mine = [at for at, row in enumerate(fit.rows) if source_of(row) == source]
        factors = factors_of(fit, overlaps, others)
        found[mine] = errors_of(fit, overlaps, factors)[mine]
    return found


def _factor_entries(fit: TimeFit, factors: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for (runtime, generation), value in sorted(factors.items()):
        runs, sources = fit.counts(runtime, generation)
        entries.setdefault(runtime, {})[generation] = {"value": round(value, 4), "runs": runs, "sources": sources}
    return entries


def _print(
    fit: TimeFit, overlaps: Mapping[str, float], factors: Mapping[tuple[str, str], float], residuals: np.ndarray
) -> None:
    for kind, value in overlaps.items():
        print(f"overlap efficiency {kind:12} {value:.2f} ({fit.runs_with(kind)} runs)")
    for (runtime, generation), value in sorted(factors.items()):
        print(f"software factor    {runtime:14} {generation:10} {value:.3f} {fit.counts(runtime, generation)}")
    inside = errors_of(fit, overlaps, factors)
    for name, values in (("fitted", inside), ("source left out", residuals)):
        print(f"{name:16} {_line(values)}")
    for source in dict.fromkeys(source_of(row) for row in fit.rows):
        mine = [at for at, row in enumerate(fit.rows) if source_of(row) == source]
        print(f"  {source[:44]:44} {len(mine):4}  fitted {_line(inside[mine])}   left out {_line(residuals[mine])}")


def _spreads(fit: TimeFit, residuals: np.ndarray) -> tuple[float, float, int]:
    """(standard deviation of the medians of groups of runs, robust deviation inside them, groups). A group: source,
    system, dense or with experts."""
    groups: dict[tuple[str, str, bool], list[float]] = {}
    for row, case, residual in zip(fit.rows, fit.cases, residuals, strict=True):
        groups.setdefault((source_of(row), case.cluster.id, "moe" in row["model_kind"]), []).append(float(residual))
    large = [np.array(values) for values in groups.values() if len(values) >= FEWEST_OF_A_CLUSTER]
    inside = np.concatenate([values - np.median(values) for values in large])
    return float(np.std([np.median(values) for values in large])), 1.4826 * float(np.median(np.abs(inside))), len(large)


def _line(values: Sequence[float] | np.ndarray) -> str:
    """Absolute relative errors of predicted over measured."""
    size = np.abs(np.exp(-np.asarray(values)) - 1.0)
    median, mean, p90 = 100 * np.median(size), 100 * size.mean(), 100 * np.quantile(size, 0.9)
    return f"median {median:5.1f} %, mean {mean:5.1f} %, p90 {p90:5.1f} %"


if __name__ == "__main__":
    sys.exit(main())
