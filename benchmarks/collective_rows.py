"""Published collective benchmarks as rows: who measured what on which system.

Reads the two collections (measured.csv, micro.csv); a measurement that both print counts once.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distplan.hardware.cluster import load_cluster

KINDS = {"alltoall": "all_to_all", "sendrecv": "send_recv", "all-gather": "all_gather", "all-reduce": "all_reduce"}
KINDS |= {"reduce-scatter": "reduce_scatter"}


@dataclass(frozen=True)
class Row:
    system: str
    kind: str
    ranks: int
    nodes: int
    size: float
    """nccl-tests' size: the full buffer also for all_gather"""
    seconds: float
    source: str


SYSTEMS = [
    ("p4de", "aws-p4de"),
    ("p5en", "aws-p5en"),
    ("p5.48xlarge", "aws-p5"),
    ("p6-b200", "aws-p6-b200"),
    ("a3-megagpu", "gcp-a3-mega"),
    ("A3 Mega", "gcp-a3-mega"),
    ("a3-highgpu", "gcp-a3-high"),
    ("A3 High", "gcp-a3-high"),
    ("A3 Ultra", "gcp-a3-ultra"),
    ("oci-hpc", "oci-bm-gpu-h100"),
    ("NVL8 partitions", "dgx-b200"),
    ("NVL4 partitions", "dgx-b200"),
    ("V100", "dgx-v100"),
    ("A100", "dgx-a100"),
    ("H20 ", "h20-96gb-node"),
    ("H200", "hgx-h200"),
    ("H100", "dgx-h100"),
    ("GB200", "gb200-nvl72"),
    ("GB300", "gb300-nvl72"),
    ("B200", "dgx-b200"),
    ("B300", "dgx-b300"),
    ("RTX PRO 6000", "rtxpro6000-8"),
    ("MI300X", "mi300x-8x400g"),
]
"""the first text found in a row's device, detail or source -> the system that was measured"""


def _number(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMG])(iB)?)?", text.strip())
    if match is None:
        return 0.0
    return float(match[1]) * {None: 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]


def _bus_factor(kind: str, ranks: int) -> float:
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return 1.0 if kind == "send_recv" else (ranks - 1) / ranks


def _system(*texts: str) -> str | None:
    together = " ".join(texts)
    return next((system for text, system in SYSTEMS if text in together), None)


def measured_rows(path: Path) -> Iterable[Row]:
    for row in csv.DictReader(path.open()):
        detail, source = row["detail"], row["source"]
        unusable = (
            "SUSPECT",
            "not named",
            "printed",
            "NVLS off;",
            "older stack",
            "Tree;",
            "1 GPU per node",
            "nccom",
            "NVLS_ENABLE=0",
        )
        if "partitions" in row["device"]:  # racks cut into domains of 8 and 4; the faster of tree and ring counts
            detail = detail.replace("NVLS off; tree", "")
        if row["kind"] not in ("collective_busbw", "collective_latency") or any(
            word in row["device"] + detail for word in unusable
        ):
            continue
        kind = re.split(r"[;,]", detail)[0].strip()
        kind = KINDS.get(kind, kind)
        ranks = re.search(r"gpus=(\d+)", detail)
        size = re.search(r"size(?:_bytes)?=([\w.]+)", detail) or re.search(r"\b(\d+ ?[MG]iB)\b", detail)
        system = _system(row["device"], detail, source)
        if ranks is None or size is None or system is None or kind not in KINDS.values():
            continue
        nodes = re.search(r"nodes=(\d+)", detail) or re.search(r"partitions x(\d)", row["device"])
        n, size_bytes, busbw = int(ranks[1]), _number(size[1]), float(row["value"])
        k = int(nodes[1]) if nodes else max(1, n // load_cluster(system).gpus_per_node)
        latency = row["kind"] == "collective_latency"
        time = re.search(r"([\d.]+)", row["value"]) if latency else re.search(r"time_us=([\d.]+)", detail)
        if kind == "send_recv" or (time is None and busbw < 1.0):
            continue
        seconds = float(time[1]) * 1e-6 if time else size_bytes * _bus_factor(kind, n) / busbw / 1e9
        yield Row(system, kind, n, 1 if "NVL72" in row["device"] else k, size_bytes, seconds, source)


def micro_rows(path: Path) -> Iterable[Row]:
    for row in csv.DictReader(path.open()):
        if not row["kind"].startswith("collective") or not row["size_bytes"] or not row["n_gpus"]:
            continue
        kind = row["kind"].split()[1]
        kind = KINDS.get(kind, kind)
        system = _system(row["gpu"], row["source"])
        # vidur's all-reduce over two nodes shares one NIC, and its calls are timed from Python
        if system is None or ("vidur" in row["source"] and kind != "send_recv"):
            continue
        if "A100 DGX" in row["gpu"] and row["n_nodes"] == "2":
            continue
        unit, value = row["unit"], float(row["achieved"])
        n = int(row["n_gpus"])
        if unit.startswith("ms"):
            seconds = value * 1e-3
        elif row["derived_unit"].startswith("us"):
            seconds = float(row["derived_achieved"]) * 1e-6
        else:
            continue
        yield Row(system, kind, n, int(row["n_nodes"] or 1), float(row["size_bytes"]), seconds, row["source"])


def distinct(rows: Iterable[Row]) -> list[Row]:
    """One row per measurement: both files print some tables."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.size > 0 and row.seconds > 0:
            key = (row.system, row.kind, row.ranks, row.nodes, row.size, float(f"{row.seconds:.3g}"))
            found.setdefault(key, row)
    return list(found.values())
