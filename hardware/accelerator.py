"""One device: what it can compute, hold and move, each number with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STATUSES = ("measured", "nominal", "unverified")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number with its origin.

    status: measured (someone ran it) | nominal (a vendor's or a table's figure, read in the sources named)
    | unverified (from general knowledge or of low confidence: check before relying on it).
    """

    value: float
    """in base units"""
    unit: str
    """the unit that the source prints, for reports"""
    text: str
    """as written in the file: 3.35 TB/s"""
    status: str
    sources: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A device as a planner sees it. Rates are peaks; hardware/rates.py says what is achieved of them."""

    id: str
    name: str
    vendor: str
    generation: str
    """volta, turing, ampere, ada, hopper, blackwell, cdna3, …: the family that shares constants"""
    num_sms: int
    """streaming multiprocessors or the vendor's equal; 0 where not known"""
    peak_flops: Mapping[str, float]
    """dtype -> dense FLOP/s (int8: OP/s) of the matrix units; fp32 is the vector rate"""
    memory_bytes: float
    """what the driver lets a process allocate"""
    memory_label_bytes: float
    """what the vendor prints on the box"""
    memory_bandwidth: float
    """bytes/s, peak"""
    tdp_watts: float
    """0 where not known"""
    l2_bytes: float
    """0 where not known"""
    scaleup_bandwidth: float
    """bytes/s per direction over NVLink, xGMI and the like; 0 without"""
    scaleup_technology: str
    """nvlink3, xgmi4, …; empty without"""
    pcie_bandwidth: float
    """bytes/s per direction to the host; 0 where not known"""
    facts: Mapping[str, Fact]
    """field (peak_flops.bf16, memory_bandwidth, …) -> Fact"""
