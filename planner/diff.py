"""What differs between two strategy files: strategy, setting, time, memory, communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distplan.planner.check import Evaluated
from distplan.planner.check_budgets import metrics
from distplan.planner.document import FORMAT_VERSION
from distplan.planner.plain import digest, plain, rounded

Plain = dict[str, Any]
_SAME = 1e-5
"""share below which two numbers of six digits are the same"""


def diff(a: Evaluated, b: Evaluated) -> Plain:
    """Plain data; numbers are per GPU and step, in seconds and bytes. Rows that are equal are left out,
    except in `totals`, which has every figure of merit."""
    priced = a.plan is not None and b.plan is not None
    fields = list(_fields(a, b))
    made: Plain = {
        "format_version": FORMAT_VERSION,
        "a": a.path,
        "b": b.path,
        "cannot_run": [each.path for each in (a, b) if each.plan is None],
        "strategy": [row for row in fields if row["section"] == "strategy"],
        "setting": [row for row in fields if row["section"] != "strategy"],
        "totals": [],
        "time": [],
        "memory": [],
        "communication": [],
    }
    if priced:
        left, right = a.shown, b.shown
        made["totals"] = [_row(name, *pair) for name, pair in _paired(metrics(left), metrics(right))]
        made["time"] = _rows(left["time"], right["time"])
        made["memory"] = _rows(left["memory"], right["memory"])
        made["communication"] = _exchanges(left, right)
    made["same"] = not fields and not any(made[part] for part in ("time", "memory", "communication", "cannot_run"))
    rounded_all: Plain = rounded(made)
    return rounded_all


def _fields(a: Evaluated, b: Evaluated) -> Iterator[Plain]:
    """Fields of the files that differ, dotted, section by section."""
    left, right = _sections(a), _sections(b)
    for section in left:
        flat_a, flat_b = dict(_flat(left[section])), dict(_flat(right[section]))
        for name in dict.fromkeys([*flat_a, *flat_b]):
            if flat_a.get(name) != flat_b.get(name):
                yield {"section": section, "field": name, "a": flat_a.get(name), "b": flat_b.get(name)}


def _sections(found: Evaluated) -> Plain:
    file = found.file
    return {
        "strategy": plain(file.strategy),
        "workload": plain(file.workload),
        "hardware": {"id": file.cluster.id, "digest": digest(file.cluster)},
        "runtime": {"name": file.runtime.name, "version": file.runtime.version, "digest": digest(file.runtime)},
        "limits": {
            "reserve_bytes": file.reserve_bytes,
            "memory_limit_bytes": file.memory_limit_bytes,
            "allow_tight": file.allow_tight,
            "price_per_gpu_hour": file.price_per_gpu_hour,
        },
        "model": plain(file.model) | {"layers": file.model.layers, "pattern": digest(list(file.model.pattern))},
    }


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list):
        yield prefix, " ".join(str(item) for item in value)
    else:
        yield prefix, value


def _paired(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in dict.fromkeys([*a, *b]):
        yield name, (a.get(name), b.get(name))


def _row(name: str, a: float | None, b: float | None) -> Plain:
    """`change` is relative to a; None where a is zero or one of them is not known."""
    difference = None if a is None or b is None else b - a
    change = difference / a if difference and a else None
    return {"name": name, "a": a, "b": b, "difference": difference, "change": change}


def _rows(a: Mapping[str, float], b: Mapping[str, float]) -> list[Plain]:
    pairs = ((name, left or 0.0, right or 0.0) for name, (left, right) in _paired(a, b))
    return [_row(name, left, right) for name, left, right in pairs if _differ(left, right)]


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > _SAME * max(abs(a), abs(b))


def _exchanges(a: Plain, b: Plain) -> list[Plain]:
    """Bytes on the wire, and seconds, by axis and collective."""
    left, right = _by_exchange(a), _by_exchange(b)
    rows = []
    for key in dict.fromkeys([*left, *right]):
        one, other = left.get(key, {}), right.get(key, {})
        pairs = {
            name: (one.get(name, 0.0), other.get(name, 0.0)) for name in ("wire_bytes", "seconds", "exposed_seconds")
        }
        if any(_differ(*pair) for pair in pairs.values()):
            numbers = {f"{name}_{side}": pair[at] for name, pair in pairs.items() for at, side in enumerate("ab")}
            rows.append({"axis": key[0], "kind": key[1]} | numbers)
    return rows


def _by_exchange(shown: Plain) -> dict[tuple[str, str], Plain]:
    return {(row["axis"], row["kind"]): row for row in shown["communication"]}
