"""One device: what it can compute, hold and move, each number with where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from distplan.hardware.documents import Document, load_mapping, no_other_keys, take
from distplan.hardware.errors import UnknownNameError
from distplan.hardware.facts import Fact, count, read_sources, take_fact
from distplan.hardware.units import parse_bytes, parse_bytes_per_second, parse_flops_per_second, parse_watts

ACCELERATORS_FILE = Path(__file__).parent / "data" / "accelerators.yaml"
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp16_acc16", "fp8", "int8", "fp4", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A device as a planner sees it. Rates are peaks; hardware/rates.py says what is achieved of them."""

    id: str
    name: str
    vendor: str
    generation: str
    """volta, turing, ampere, ada, hopper, blackwell, blackwell-rtx, cdna3, …: devices that share constants"""
    num_sms: int
    """streaming multiprocessors, compute units or the vendor's equal; 0 where not known"""
    peak_flops: Mapping[str, float]
    """dtype -> dense FLOP/s (int8: OP/s) of the matrix units; fp32 is the vector rate"""
    memory_bytes: float
    """what the driver lets a process allocate"""
    memory_label_bytes: float
    """what the vendor prints on the box"""
    memory_bandwidth: float
    """bytes/s, peak"""
    scaleup_technology: str
    """nvlink4, xgmi, …; empty without"""
    pcie_bandwidth: float
    """bytes/s per direction to the host; 0 where not known"""
    facts: Mapping[str, Fact]
    """field (peak_flops.bf16, memory_bandwidth, …) -> Fact; what only informs (tdp_watts, l2_bytes,
    scaleup_bandwidth per direction) is here alone"""


_KEYS: tuple[str, ...] = ("name", "vendor", "generation", "aliases", "num_sms", "peak_flops", "memory", "memory_label")
_KEYS += ("memory_bandwidth", "l2", "scaleup", "pcie_bandwidth", "tdp", "notes")
_QUANTITIES: Mapping[str, tuple[str, Callable[[Any], float], float]] = {
    "num_sms": ("num_sms", count, 1.0),
    "memory_label": ("memory_label_bytes", parse_bytes, 2.0**20),
    "l2": ("l2_bytes", parse_bytes, 1.0),
    "pcie_bandwidth": ("pcie_bandwidth", parse_bytes_per_second, 1.0),
    "tdp": ("tdp_watts", parse_watts, 1.0),
}
"""optional key of the file -> field, parser, least value"""


def read_accelerator(doc: Document, id: str, sources: Mapping[str, str]) -> Accelerator:
    """The accelerator in a section of a file; DocumentError with the line where it is wrong."""
    no_other_keys(doc, _KEYS)
    facts: dict[str, Fact] = {}
    peaks = take(doc, "peak_flops", Document)
    no_other_keys(peaks, DTYPES)
    if not peaks.value:
        raise doc.error("at least one dtype is needed, such as bf16: 989 TFLOP/s", "peak_flops")
    for dtype in peaks.value:
        facts[f"peak_flops.{dtype}"] = take_fact(peaks, dtype, parse_flops_per_second, sources)
    facts["memory_bytes"] = take_fact(doc, "memory", parse_bytes, sources, minimum=2.0**20)
    facts["memory_bandwidth"] = take_fact(doc, "memory_bandwidth", parse_bytes_per_second, sources)
    for key, (field, parse, minimum) in _QUANTITIES.items():
        fact = take_fact(doc, key, parse, sources, default=None, minimum=minimum)
        if fact is not None:
            facts[field] = fact
    scaleup = take(doc, "scaleup", Document, default=None)
    if scaleup is not None:
        no_other_keys(scaleup, ("technology", "bandwidth"))
        facts["scaleup_bandwidth"] = take_fact(scaleup, "bandwidth", parse_bytes_per_second, sources)
    values = {name: fact.value for name, fact in facts.items()}
    return Accelerator(
        id=id,
        name=take(doc, "name", str, default=id),
        vendor=take(doc, "vendor", str, default="unknown"),
        generation=take(doc, "generation", str, default="unknown"),
        num_sms=int(values.get("num_sms", 0.0)),
        peak_flops={dtype: values[f"peak_flops.{dtype}"] for dtype in peaks.value},
        memory_bytes=values["memory_bytes"],
        memory_label_bytes=values.get("memory_label_bytes", values["memory_bytes"]),
        memory_bandwidth=values["memory_bandwidth"],
        scaleup_technology="" if scaleup is None else take(scaleup, "technology", str),
        pcie_bandwidth=values.get("pcie_bandwidth", 0.0),
        facts=facts,
    )


@cache
def _catalogue() -> tuple[Document, Mapping[str, str], Mapping[str, str]]:
    """The shipped file, its citations, and every id and alias -> id."""
    doc = load_mapping(ACCELERATORS_FILE)
    entries = take(doc, "accelerators", Document)
    names = {id: id for id in entries.value}
    for id in entries.value:
        names |= {alias: id for alias in take(entries.section(id), "aliases", list, default=[])}
    return entries, read_sources(doc), names


def list_accelerators() -> tuple[str, ...]:
    """Ids of the shipped accelerators, in the file's order."""
    return tuple(_catalogue()[0].value)


def accelerator_names() -> Mapping[str, str]:
    """Every id and every alias -> id."""
    return _catalogue()[2]


@cache
def load_accelerator(name: str) -> Accelerator:
    """A shipped accelerator by id or alias (h100-sxm, a100-80g, …); UnknownNameError otherwise."""
    entries, sources, names = _catalogue()
    id = names.get(name.strip().lower())
    if id is None:
        raise UnknownNameError("accelerator", name, names)
    return read_accelerator(entries.section(id), id, sources)
