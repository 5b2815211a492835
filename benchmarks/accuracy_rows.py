"""Rows of a truth file: which are due, and what each measured, in seconds and bytes."""

from __future__ import annotations

import csv
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from distplan.hardware.errors import DistplanError

Row = Mapping[str, str]
DEFAULTS = Path(__file__).with_name("truth_defaults.yaml")
APART = ("digitised", "fine-tuning", "flagged")


@cache
def defaults() -> Mapping[str, Any]:
    """truth_defaults.yaml: what fills the cells that a row leaves empty."""
    tables: Mapping[str, Any] = yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))
    return tables


def first_match(table: str, row: Row, *, keys: Sequence[str]) -> Mapping[str, Any] | None:
    """The first entry of a table of truth_defaults.yaml whose patterns (of `keys`) are all found in the row."""
    for entry in defaults()[table]:
        if all(re.search(entry[key], row[key]) for key in keys if key in entry):
            return dict(entry)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """`due` rows to score, one per same_workload_group; `apart` rows by why they stand apart."""

    given: int
    due: tuple[Row, ...]
    apart: Mapping[str, tuple[Row, ...]]
    not_due: Mapping[str, int]


def read_rows(path: str) -> list[Row]:
    """All rows of a truth file. Raises DistplanError where it cannot be read or lacks the columns."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows: list[Row] = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DistplanError(f"{path} cannot be read: {error}") from None
    needed = {"id", "derived_complete_time", "derived_complete_mem", "trust", "task", "framework"}
    missing = needed - set(rows[0] if rows else ())
    if missing:
        raise DistplanError(f"{path} is no truth file: it lacks {', '.join(sorted(missing))}")
    return rows


def select(rows: Sequence[Row]) -> Selection:
    """Rows that are due: complete, trusted, pre-training, and of a repeated workload the median one."""
    kept: list[Row] = []
    apart: dict[str, list[Row]] = {name: [] for name in APART}
    why: Counter[str] = Counter()
    for row in rows:
        if "1" not in (row["derived_complete_time"], row["derived_complete_mem"]):
            why["configuration or result incomplete"] += 1
        elif row["trust"] == "low":
            why["trust low"] += 1
        elif row["trust"] == "digitised":
            apart["digitised"].append(row)
        elif row["task"] != "pretrain":
            apart["fine-tuning"].append(row)
        elif row["derived_flag"]:
            apart["flagged"].append(row)
        else:
            kept.append(row)
    due = _medians(kept)
    why["repeats of a workload (the median stands for them)"] = len(kept) - len(due)
    return Selection(
        given=len(rows), due=tuple(due), apart={name: tuple(found) for name, found in apart.items()}, not_due=dict(why)
    )


def _medians(rows: Sequence[Row]) -> list[Row]:
    """One row per same_workload_group, that of the (lower) median step time; the others as they are."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["same_workload_group"] or row["id"], []).append(row)
    found = []
    for members in groups.values():
        timed = [(seconds, row) for row in members if (seconds := measured_seconds(row))]
        if not timed:
            found.append(members[0])
            continue
        middle = statistics.median_low([seconds for seconds, _ in timed])
        found.append(next(row for seconds, row in timed if seconds == middle))
    return found


def number(row: Row, *names: str) -> float:
    """The first of the cells that holds a number; 0 where none does."""
    for name in names:
        try:
            return float(row[name])
        except ValueError:
            continue
    return 0.0


def measured_seconds(row: Row) -> float:
    """Seconds of a step as measured; 0 where the row times nothing."""
    if row["derived_complete_time"] != "1":
        return 0.0
    said = number(row, "step_time_s", "derived_step_time_s")
    if said:
        return said
    tokens = number(row, "global_batch", "derived_global_batch") * number(row, "seq_len", "derived_seq_len")
    gpus = number(row, "n_gpus")
    rate = number(row, "tokens_per_s_per_gpu", "derived_tokens_per_s_per_gpu")
    if not rate:
        rate = _tokens_per_second(row)
    return tokens / (rate * gpus) if rate and gpus else 0.0


_PEAK = {"H100": 989.5e12, "H800": 989.5e12, "A100": 312e12, "A800": 312e12}
"""bf16 FLOP/s that MFU is printed against (the truth file's README, conventions)"""


def _tokens_per_second(row: Row) -> float:
    """Tokens/s per GPU behind a printed FLOP/s or MFU, with FLOPs counted as the source does."""
    flops = number(row, "tflops_per_gpu") * 1e12
    if not flops:
        flops = number(row, "mfu") / 100.0 * _PEAK.get(row["derived_gpu_family"], 0.0)
    formula = first_match("flop_formulas", {**row, "kind": row["tflops_kind"]}, keys=("kind",))
    assert formula is not None
    weights = number(row, "params_b") * 1e9
    width = number(row, "num_layers") * number(row, "hidden") * number(row, "seq_len", "derived_seq_len")
    each = formula["weights"] * weights + formula["attention"] * width
    return flops / each if each else 0.0


def measured_memory(row: Row) -> tuple[float, str]:
    """(bytes, reading) of the peak: allocated | reserved | device | unsaid; (0, "") where none is printed."""
    gib = number(row, "peak_mem_gib", "derived_peak_mem_gib")
    value = gib * 2.0**30
    if not value:
        unit = re.match(r"[A-Za-z]+", row["mem_unit"])
        value = number(row, "mem_reported") * defaults()["memory_unit_bytes"].get(unit[0] if unit else "", 0)
    if not value or row["derived_complete_mem"] != "1":
        return 0.0, ""
    entry = first_match("memory_reading", row, keys=("mem_kind", "framework"))
    assert entry is not None
    return value, str(entry["reading"])
