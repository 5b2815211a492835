"""A machine: one kind of accelerator, and the tiers of links between more and more of them."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from distplan.hardware.accelerator import Accelerator, accelerator_names, load_accelerator, read_accelerator
from distplan.hardware.calibration import NOTHING, Calibration, read_calibration
from distplan.hardware.documents import Document, load_mapping, no_other_keys, take
from distplan.hardware.errors import UnknownNameError
from distplan.hardware.facts import Fact, count, read_sources, take_fact
from distplan.hardware.links import CURVES, load_links
from distplan.hardware.reliability import read_reliability
from distplan.hardware.units import parse_bytes, parse_bytes_per_second, parse_dollars_per_hour, parse_seconds

SYSTEMS_FILE = Path(__file__).parent / "data" / "systems.yaml"
TOPOLOGIES = ("switch", "mesh", "cube_mesh", "torus", "pcie")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Links that join ranks inside a domain: the scale-up domain, the node, a pod, the whole fabric."""

    name: str
    size: float
    """ranks in one domain; infinite for the outermost tier"""
    bandwidth: float
    """bytes/s per GPU and direction, line rate, oversubscription already taken off"""
    latency: float
    """seconds to send a small message to a neighbour; the file's, or what the technology was measured at"""
    topology: str
    """switch | mesh (a link per pair) | cube_mesh | torus | pcie | fabric"""
    technology: str
    """key of data/collectives.yaml"""
    in_switch_reduction: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Accelerators and tiers, inner to outer; the last tier is a fabric without bound."""

    id: str
    name: str
    accelerator: Accelerator
    tiers: tuple[Tier, ...]
    gpus_per_node: int
    host_memory_bytes: float
    """per node, for offload; 0 where not known"""
    price_per_gpu_hour: float
    """US dollars: the median of the listings in `prices`; 0 where none is known"""
    prices: tuple[Fact, ...]
    facts: Mapping[str, Fact]
    """scaleup.bandwidth, fabric.bandwidth, gpus_per_node, reliability.mtbf, … -> Fact"""
    calibration: Calibration = NOTHING
    """what was measured on this very cluster (distplan calibrate)"""


_SYSTEM_KEYS: tuple[str, ...] = ("name", "accelerator", "aliases", "gpus_per_node", "scaleup", "node", "fabric", "nics")
_SYSTEM_KEYS += ("nic_bandwidth", "host_memory", "prices", "reliability", "reference_for", "sources", "calibration")


def read_cluster(doc: Document, id: str, sources: Mapping[str, str]) -> Cluster:
    """The system in a section of a file; DocumentError with the line where it is wrong."""
    no_other_keys(doc, _SYSTEM_KEYS)
    facts = {"gpus_per_node": take_fact(doc, "gpus_per_node", count, sources, minimum=1, maximum=10_000)}
    tiers = _read_tiers(doc, sources, facts)
    optional = (("nics", count), ("nic_bandwidth", parse_bytes_per_second), ("host_memory", parse_bytes))
    for key, parse in optional:
        fact = take_fact(doc, key, parse, sources, default=None)
        if fact is not None:
            facts[key] = fact
    reliability = take(doc, "reliability", Document, default=None)
    if reliability is not None:
        facts |= read_reliability(reliability, sources)
    prices = _read_prices(doc, sources)
    measured = take(doc, "calibration", Document, default=None)
    return Cluster(
        id=id,
        name=take(doc, "name", str, default=id),
        accelerator=_accelerator_of(doc, id, sources),
        tiers=tiers,
        gpus_per_node=int(facts["gpus_per_node"].value),
        host_memory_bytes=facts["host_memory"].value if "host_memory" in facts else 0.0,
        price_per_gpu_hour=statistics.median([price.value for price in prices] or [0.0]),
        prices=prices,
        facts=facts,
        calibration=NOTHING if measured is None else read_calibration(measured, CURVES),
    )


def _accelerator_of(doc: Document, id: str, sources: Mapping[str, str]) -> Accelerator:
    if isinstance(doc.value.get("accelerator"), dict):
        return read_accelerator(doc.section("accelerator"), f"{id}-accelerator", sources)
    name = take(doc, "accelerator", str)
    try:
        return load_accelerator(name)
    except UnknownNameError as error:
        raise doc.error(str(error), "accelerator") from None


def _read_prices(doc: Document, sources: Mapping[str, str]) -> tuple[Fact, ...]:
    if not isinstance(doc.value.get("prices"), list):
        price = take_fact(doc, "prices", parse_dollars_per_hour, sources, default=None)
        return () if price is None else (price,)
    entries = Document(
        file=doc.file,
        value={str(n): price for n, price in enumerate(doc.value["prices"])},
        lines=doc.lines,
        where=(*doc.where, "prices"),
    )
    return tuple(take_fact(entries, key, parse_dollars_per_hour, sources) for key in entries.value)


def _read_tiers(doc: Document, sources: Mapping[str, str], facts: dict[str, Fact]) -> tuple[Tier, ...]:
    gpus_per_node = facts["gpus_per_node"].value
    scaleup = take(doc, "scaleup", Document)
    keys = ("technology", "topology", "domain", "bandwidth", "latency", "in_switch_reduction", "note")
    no_other_keys(scaleup, keys)
    domain = take_fact(scaleup, "domain", count, sources, default=facts["gpus_per_node"], minimum=1)
    facts["scaleup.domain"] = domain
    tiers = [_read_tier(scaleup, "scaleup", domain.value, sources, facts)]
    node = take(doc, "node", Document, default=None)
    if node is not None:
        no_other_keys(node, ("technology", "topology", "bandwidth", "latency", "note"))
        if gpus_per_node <= domain.value:
            raise doc.error("a node tier needs more GPUs per node than the scale-up domain holds", "node")
        tiers.append(_read_tier(node, "node", gpus_per_node, sources, facts))
    fabric = take(doc, "fabric", Document)
    no_other_keys(fabric, ("technology", "bandwidth", "latency", "pod_gpus", "oversubscription", "note"))
    outer = _read_tier(fabric, "fabric", math.inf, sources, facts)
    ratio = take_fact(fabric, "oversubscription", count, sources, default=None, minimum=1, maximum=1000)
    pod = take_fact(fabric, "pod_gpus", count, sources, default=None, minimum=tiers[-1].size)
    if pod is not None:
        facts["fabric.pod_gpus"] = pod
        tiers.append(replace(outer, name="pod", size=pod.value))
    if ratio is not None:
        facts["fabric.oversubscription"] = ratio
        outer = replace(outer, bandwidth=outer.bandwidth / ratio.value)
    return (*tiers, outer)


def _read_tier(doc: Document, name: str, size: float, sources: Mapping[str, str], facts: dict[str, Fact]) -> Tier:
    technology = take(doc, "technology", str, choices=tuple(load_links()))
    bandwidth = take_fact(doc, "bandwidth", parse_bytes_per_second, sources)
    facts[f"{name}.bandwidth"] = bandwidth
    default = "fabric" if name == "fabric" else "pcie" if technology.startswith("pcie") else "switch"
    pair = load_links()[technology].curves["send_recv"]
    hop = pair.base_seconds + pair.rank_seconds
    return Tier(
        name=name,
        size=size,
        bandwidth=bandwidth.value,
        latency=take(doc, "latency", parse_seconds, default=hop, minimum=1e-9),
        topology=take(doc, "topology", str, default=default, choices=(*TOPOLOGIES, "fabric")),
        technology=technology,
        in_switch_reduction=take(doc, "in_switch_reduction", bool, default=False),
    )


@cache
def _catalogue() -> tuple[Document, Mapping[str, str], Mapping[str, str]]:
    """The shipped file, its citations, and every name that people type -> system id."""
    doc = load_mapping(SYSTEMS_FILE)
    entries = take(doc, "systems", Document)
    names: dict[str, str] = {}
    reference: dict[str, str] = {}
    for id in entries.value:
        system = entries.section(id)
        accelerator = take(system, "reference_for", str, default=None)
        if accelerator is not None:
            reference[accelerator] = id
        names |= {alias: id for alias in take(system, "aliases", list, default=[])}
    names |= {name: reference[id] for name, id in accelerator_names().items() if id in reference}
    return entries, read_sources(doc), names | {id: id for id in entries.value}


def list_clusters() -> tuple[str, ...]:
    """Ids of the shipped systems, in the file's order."""
    return tuple(_catalogue()[0].value)


def cluster_names() -> Mapping[str, str]:
    """Every system id, alias, and accelerator's id or alias -> system id."""
    return _catalogue()[2]


def is_file_name(text: str) -> bool:
    """Whether this names a hardware file, and not something shipped."""
    return os.sep in text or text.lower().endswith((".yaml", ".yml", ".json"))


def load_cluster(name_or_path: str | os.PathLike[str]) -> Cluster:
    """A shipped system, an accelerator's reference system, or a user's YAML file.

    Anything with a path separator or a .yaml, .yml or .json ending is a file. Raises UnknownNameError
    with near misses, or DocumentError.
    """
    text = os.fspath(name_or_path)
    if is_file_name(text):
        doc = load_mapping(text)
        return read_cluster(doc, Path(text).stem, read_sources(doc))
    return _shipped(text.strip().lower())


def hardware_document(name_or_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a hardware file that describes the same system as `load_cluster`; citations are in the file."""
    text = os.fspath(name_or_path)
    if is_file_name(text):
        return dict(load_mapping(text).value)
    cluster = load_cluster(text)
    entries, sources, _ = _catalogue()
    content = {k: v for k, v in entries.value[cluster.id].items() if k not in ("aliases", "reference_for", "sources")}
    cited = _cited(content)
    return content | {"sources": {key: sources[key] for key in sources if key in cited}}


def _cited(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = node.get("source", [])
        return set([own] if isinstance(own, str) else own).union(*(_cited(value) for value in node.values()))
    return set().union(*(_cited(value) for value in node)) if isinstance(node, list) else set()


@cache
def _shipped(name: str) -> Cluster:
    entries, sources, names = _catalogue()
    id = names.get(name)
    if id is None:
        raise UnknownNameError("hardware", name, names)
    return read_cluster(entries.section(id), id, sources)


def with_network_scaled(cluster: Cluster, factor: float) -> Cluster:
    """Every tier's bandwidth times `factor`; latencies stay."""
    return replace(cluster, tiers=tuple(replace(tier, bandwidth=tier.bandwidth * factor) for tier in cluster.tiers))


def with_compute_scaled(cluster: Cluster, factor: float) -> Cluster:
    """Every peak FLOP/s times `factor`; memory bandwidth stays."""
    peaks = {dtype: peak * factor for dtype, peak in cluster.accelerator.peak_flops.items()}
    return replace(cluster, accelerator=replace(cluster.accelerator, peak_flops=peaks))
