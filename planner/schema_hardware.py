"""The JSON Schema of a hardware file. Quantities take the units that hardware/units.py knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from distplan.hardware.accelerator import DTYPES
from distplan.hardware.calibration import ATTENTION, CURVE, DIRECTIONS, GEMM, SCALARS, TIERS, Key
from distplan.hardware.calibration import DTYPES as DTYPES_MEASURED
from distplan.hardware.cluster import TOPOLOGIES
from distplan.hardware.facts import STATUSES
from distplan.hardware.links import CURVES, load_links
from distplan.hardware.units import (
    BYTES,
    BYTES_PER_SECOND,
    DOLLARS_PER_HOUR,
    FLOPS_PER_SECOND,
    GPU_SECONDS,
    SECONDS,
    WATTS,
    Dimension,
)

Schema = dict[str, Any]
_NUMBER = r"(\d[\d_,]*)?\.?\d+([eE][-+]?\d+)?"
_COUNT = {"type": "number", "minimum": 0}
_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}

SYSTEM_QUANTITIES: Mapping[str, Dimension | None] = {
    "gpus_per_node": None,
    "nics": None,
    "nic_bandwidth": BYTES_PER_SECOND,
    "host_memory": BYTES,
}
ACCELERATOR_QUANTITIES: Mapping[str, Dimension | None] = {
    "num_sms": None,
    "memory": BYTES,
    "memory_label": BYTES,
    "memory_bandwidth": BYTES_PER_SECOND,
    "l2": BYTES,
    "pcie_bandwidth": BYTES_PER_SECOND,
    "tdp": WATTS,
}
RELIABILITY_QUANTITIES: Mapping[str, Dimension | None] = {
    "mtbf": GPU_SECONDS,
    "restart_time": SECONDS,
    "checkpoint_bandwidth": BYTES_PER_SECOND,
}
"""key -> dimension; None = a plain count"""
TIER_QUANTITIES: Mapping[str, Mapping[str, Dimension | None]] = {
    "scaleup": {"domain": None, "bandwidth": BYTES_PER_SECOND},
    "node": {"bandwidth": BYTES_PER_SECOND},
    "fabric": {"bandwidth": BYTES_PER_SECOND, "pod_gpus": None, "oversubscription": None},
}


def hardware_schema(about: Mapping[str, Mapping[str, str]]) -> Schema:
    """A system, with `$defs/accelerator`; `about` are the meanings of fields.yaml."""
    system = _noted(_system(about), about["system"])
    return {
        "type": "object",
        "properties": system,
        "required": ["accelerator", "gpus_per_node", "scaleup", "fabric"],
        "additionalProperties": False,
        "$defs": {"accelerator": _accelerator(about["accelerator"])},
    }


def _system(about: Mapping[str, Mapping[str, str]]) -> Schema:
    price = _fact(DOLLARS_PER_HOUR)
    reliability = {key: _fact(dimension) for key, dimension in RELIABILITY_QUANTITIES.items()}
    return {
        "name": _TEXT,
        "accelerator": {"anyOf": [_TEXT, {"$ref": "#/$defs/accelerator"}]},
        "aliases": _TEXTS,
        **{name: _fact(dimension) for name, dimension in SYSTEM_QUANTITIES.items()},
        **{name: _tier(name, about["tier"]) for name in TIER_QUANTITIES},
        "prices": {"anyOf": [price, {"type": "array", "items": price}]},
        "reliability": {
            "type": "object", "properties": _noted(reliability, about["reliability"]), "additionalProperties": False,
        },
        "reference_for": _TEXT,
        "calibration": _calibration(),
        "sources": {"type": "object", "additionalProperties": _TEXT},
    }  # fmt: skip


def _calibration() -> Schema:
    """What `distplan calibrate` writes; hardware/calibration.py has the keys."""
    links = {tier: _group(CURVES, CURVE) for tier in TIERS}
    properties: Schema = {
        "gemm": _group(DTYPES_MEASURED, GEMM),
        "attention": _group(DIRECTIONS, ATTENTION),
        "links": {"type": "object", "properties": links, "additionalProperties": False},
        **{name: _entry(keys) for name, keys in SCALARS.items()},
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _group(names: Iterable[str], keys: Mapping[str, Key]) -> Schema:
    return {"type": "object", "properties": {name: _entry(keys) for name in names}, "additionalProperties": False}


def _entry(keys: Mapping[str, Key]) -> Schema:
    properties: Schema = {
        name: {"type": "number", "minimum": key.low, "maximum": key.high}
        if key.dimension is None
        else {"type": "string", "pattern": _pattern(key.dimension)}
        for name, key in keys.items()
    } | {"points": {"type": "integer", "minimum": 0}, "source": _TEXT}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _tier(name: str, about: Mapping[str, str]) -> Schema:
    properties: Schema = {"technology": {"enum": list(load_links())}}
    if name != "fabric":
        properties["topology"] = {"enum": [*TOPOLOGIES, "fabric"]}
    properties |= {key: _fact(dimension) for key, dimension in TIER_QUANTITIES[name].items()}
    properties |= {"latency": {"type": "string", "pattern": _pattern(SECONDS)}, "note": _TEXT}
    if name == "scaleup":
        properties["in_switch_reduction"] = {"type": "boolean"}
    return {
        "type": "object",
        "properties": _noted(properties, about),
        "required": ["technology", "bandwidth"],
        "additionalProperties": False,
    }


def _accelerator(about: Mapping[str, str]) -> Schema:
    peaks = {dtype: _fact(FLOPS_PER_SECOND) for dtype in DTYPES}
    links = {"technology": _TEXT, "bandwidth": _fact(BYTES_PER_SECOND)}
    properties: Schema = {
        "name": _TEXT,
        "vendor": _TEXT,
        "generation": _TEXT,
        "aliases": _TEXTS,
        **{name: _fact(dimension) for name, dimension in ACCELERATOR_QUANTITIES.items()},
        "peak_flops": {
            "type": "object", "properties": peaks, "minProperties": 1, "additionalProperties": False,
        },
        "scaleup": {
            "type": "object", "properties": links, "required": ["technology", "bandwidth"],
            "additionalProperties": False,
        },
        "notes": {},
    }  # fmt: skip
    return {
        "type": "object",
        "properties": _noted(properties, about),
        "required": ["peak_flops", "memory", "memory_bandwidth"],
        "additionalProperties": False,
    }


def _noted(properties: Schema, about: Mapping[str, str]) -> Schema:
    return {name: {"description": about[name]} | inner for name, inner in properties.items()}


def _fact(dimension: Dimension | None) -> Schema:
    """`80 GiB`, or {value: 80 GiB, status, source, note}."""
    value = _COUNT if dimension is None else {"type": "string", "pattern": _pattern(dimension)}
    properties = {
        "value": value,
        "status": {"enum": list(STATUSES)},
        "source": {"anyOf": [_TEXT, _TEXTS]},
        **{name: _TEXT for name in ("note", "date", "kind")},
    }
    whole = {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}
    return {"anyOf": [value, whole]}


def _pattern(dimension: Dimension) -> str:
    units = "|".join(re.sub(r"([.$/^+*?()\[\]{}|\\])", r"\\\1", unit) for unit in dimension.units)
    return rf"^\s*{_NUMBER}\s*({units})\s*$"
