"""runs.csv: measured training runs, one a row, in columns named as the options of `estimate`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distplan.costmodel.model_file import ModelFile, load_model
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import Cluster
from distplan.hardware.documents import read_text
from distplan.hardware.errors import DistplanError, DocumentError, did_you_mean
from distplan.hardware.units import parse_bytes, parse_seconds
from distplan.planner import api
from distplan.planner.cli_options import DIMENSIONS, MACHINE, SOLVED, WORKLOAD, canonical
from distplan.planner.cli_run import given_bounds, job_setting
from distplan.planner.inputs import one_number
from distplan.planner.strategy_from import strategy_from

MEASURED = ("step_time", "peak_memory", "memory_kind")
READINGS = ("allocated", "reserved", "device")
REMARKS = ("name", "id", "date", "note", "notes", "source")
"""columns for the reader"""
_JOB = (*DIMENSIONS, *SOLVED, "sp", *WORKLOAD, "gpus", "runtime", "mesh_order")
_COLUMNS = ("model", *_JOB, *MEASURED, *REMARKS)
MOST_RUNS = 2000
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One row: the job, its strategy, and what was measured (0 = not). Bytes are those of `reading`."""

    place: str
    """file:line"""
    job: api.Setting
    strategy: Strategy
    step_seconds: float
    peak_bytes: float
    reading: str
    """allocated | reserved (torch's) | device (nvidia-smi's)"""


def read_runs(path: str, cluster: Cluster, runtime: str | None = None) -> list[MeasuredRun]:
    """The runs of a CSV file on `cluster`; `runtime` is that of rows that name none. DocumentError with the line."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    models: dict[str, ModelFile] = {}
    runs: list[MeasuredRun] = []
    names: list[str] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells) or cells[0].startswith("#"):
                continue
            if not names:
                names = _header(path, reader.line_num, cells)
                continue
            if len(cells) != len(names):
                raise _wrong(path, reader.line_num, f"has {len(cells)} cells, the header has {len(names)}")
            if len(runs) >= MOST_RUNS:
                raise _wrong(path, reader.line_num, f"there are more than {MOST_RUNS:,} runs")
            row = {name: cell.strip() for name, cell in zip(names, cells, strict=True) if cell.strip()}
            try:
                runs.append(_run(f"{path}:{reader.line_num}", row, cluster, runtime, models))
            except DistplanError as error:
                raise _wrong(path, reader.line_num, str(error)) from None
    except csv.Error as error:
        raise _wrong(path, reader.line_num, f"is no CSV: {error}") from None
    if not runs:
        raise DocumentError("holds no run: a header and one line per run are expected", file=path)
    return runs


def _wrong(path: str, line: int, problem: str) -> DocumentError:
    return DocumentError(problem, file=path, line=line)


def _header(path: str, line: int, cells: list[str]) -> list[str]:
    if len(cells) == 1 and ";" in cells[0]:
        raise _wrong(path, line, "columns are separated by ';', and commas are expected")
    names = [canonical(cell.strip().removeprefix("--").lower()).replace("-", "_") for cell in cells]
    for name in names:
        if name not in _COLUMNS:
            known = did_you_mean(name, _COLUMNS)
            hint = known or f"; columns are options of estimate, {', '.join(MEASURED)}, and for remarks: note"
            raise _wrong(path, line, f"unknown column '{name}'{hint}")
        if names.count(name) > 1:
            raise _wrong(path, line, f"the column {name} occurs twice")
    for name in ("model", "step_time"):
        if name not in names:
            raise _wrong(path, line, f"the column {name} is missing")
    return names


def _run(
    place: str, row: Mapping[str, str], cluster: Cluster, runtime: str | None, models: dict[str, ModelFile]
) -> MeasuredRun:
    if "model" not in row:
        raise DistplanError("the model is missing")
    name = row["model"]
    if name not in models:
        models[name] = load_model(name)
    options: dict[str, Any] = dict.fromkeys((*_JOB, *MACHINE)) | {key: row[key] for key in _JOB if key in row}
    options |= {"hardware": cluster, "runtime": row.get("runtime", runtime), "sp": _truth(row.get("sp"))}
    gpus = one_number("gpus", row["gpus"]) if "gpus" in row else None
    strategy = strategy_from(given_bounds(options), gpus=gpus)
    if strategy.recompute == "full" and not strategy.recompute_layers:
        # what ran did not depend on what we think fits: all layers, as frameworks do unless told a number
        strategy = replace(strategy, recompute_layers=models[name].model.layers)
    return MeasuredRun(
        place=place,
        job=job_setting(models[name], options, gpus=strategy.gpus),
        strategy=strategy,
        step_seconds=_seconds(row.get("step_time", "")),
        peak_bytes=_bytes(row.get("peak_memory", ""), cluster),
        reading=_reading(row.get("memory_kind", "device")),
    )


def _truth(text: str | None) -> bool | None:
    if text is None:
        return None
    if text.lower() not in _TRUTH:
        raise DistplanError(f"sp '{text}': true or false is expected")
    return _TRUTH[text.lower()]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _seconds(text: str) -> float:
    """`12.3s`, or seconds."""
    if not text:
        raise DistplanError("the step_time is missing")
    bare = _number(text)
    seconds = parse_seconds(text) if bare is None else bare
    if not (math.isfinite(seconds) and 1e-4 <= seconds <= 1e5):
        raise DistplanError(f"step_time '{text}' is no time that a step takes")
    return seconds


def _bytes(text: str, cluster: Cluster) -> float:
    """`71.2 GiB`, or a number of GiB; 0 where there is none."""
    if not text:
        return 0.0
    bare = _number(text)
    size = parse_bytes(text) if bare is None else bare * 2.0**30
    most = 1.1 * cluster.accelerator.memory_label_bytes
    if not (math.isfinite(size) and 2.0**20 <= size <= most):
        raise DistplanError(
            f"peak_memory '{text}' is none that a device of {most / 1.1 / 2**30:.0f} GiB can have; "
            "a bare number is in GiB"
        )
    return size


def _reading(text: str) -> str:
    if text.lower() not in READINGS:
        raise DistplanError(f"memory_kind '{text}' is not one of {', '.join(READINGS)}")
    return text.lower()
