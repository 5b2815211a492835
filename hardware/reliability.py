"""How often a job of many accelerators stops, how long it then stands, and how fast it writes checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from distplan.hardware.documents import Document, load_mapping, no_other_keys, take
from distplan.hardware.facts import Fact, read_sources, take_fact
from distplan.hardware.units import parse_bytes_per_second, parse_gpu_seconds, parse_seconds

if TYPE_CHECKING:
    from distplan.hardware.cluster import Cluster

RELIABILITY_FILE = Path(__file__).parent / "data" / "reliability.yaml"
QUANTITIES = {"mtbf": parse_gpu_seconds, "restart_time": parse_seconds, "checkpoint_bandwidth": parse_bytes_per_second}
"""key of the `reliability` section of a system -> how it is read"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """`facts` are what each number is the median of."""

    mtbf_gpu_seconds: float
    """seconds of one GPU between two failures that stop its job"""
    restart_seconds: float
    """from the failure to the next step, reading the checkpoint included"""
    checkpoint_bandwidth: float
    """bytes/s per GPU of the job"""
    facts: Mapping[str, tuple[Fact, ...]]


def read_reliability(doc: Document, sources: Mapping[str, str]) -> dict[str, Fact]:
    """The facts of a system's own `reliability` section; DocumentError with the line where it is wrong."""
    no_other_keys(doc, QUANTITIES)
    found = {key: take_fact(doc, key, parse, sources, default=None) for key, parse in QUANTITIES.items()}
    for key, fact in found.items():
        if fact is not None and key != "restart_time" and fact.value <= 0.0:
            raise doc.error("more than 0 is needed", key)
    return {f"reliability.{key}": fact for key, fact in found.items() if fact is not None}


@cache
def published() -> Mapping[str, tuple[Fact, ...]]:
    """key -> the published figures (data/reliability.yaml)."""
    doc = load_mapping(RELIABILITY_FILE)
    sources = read_sources(doc)
    made = {}
    for key, parse in QUANTITIES.items():
        entries = {str(number): entry for number, entry in enumerate(take(doc, key, list))}
        section = Document(file=doc.file, value=entries, lines=doc.lines, where=(key,))
        made[key] = tuple(take_fact(section, number, parse, sources) for number in entries)
    return made


def reliability_of(cluster: Cluster) -> Reliability:
    """What the system's file says; where it says nothing, the median of what is published."""
    facts = {key: _own(cluster, key) or published()[key] for key in QUANTITIES}
    values = {key: statistics.median(fact.value for fact in known) for key, known in facts.items()}
    return Reliability(
        mtbf_gpu_seconds=values["mtbf"], restart_seconds=values["restart_time"],
        checkpoint_bandwidth=values["checkpoint_bandwidth"], facts=facts,
    )  # fmt: skip


def _own(cluster: Cluster, key: str) -> tuple[Fact, ...]:
    fact = cluster.facts.get(f"reliability.{key}")
    return () if fact is None else (fact,)
