"""Measured rates of device memory and of the path to the host, as fractions of nominal."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurements import accelerator_of, read_rows, short_source
from distplan.hardware.accelerator import Accelerator

_GIGA = 1e9
_KERNELS = ("STREAM copy", "STREAM mul", "STREAM add", "STREAM triad", "HBM bandwidth", "device-to-device copy")
_OCCUPIED = ("scale at full", "triad at full", "3pt stencil at full", "5pt stencil at full")
_LOCAL_COPY = "p2pBandwidthLatencyTest diagonal"
"""reads 2 to 14 % under STREAM on A100 and H100: used only where a device has nothing else"""
_UNUSABLE = ("outlier", "concurrently", "bidirectional")


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthRow:
    """One measured rate: `path` is memory | local-copy | host."""

    accelerator: str
    path: str
    bytes_per_second: float
    source: str


def _path(row: dict[str, str]) -> str | None:
    kind, detail = row["kind"], row["detail"]
    if any(word in detail for word in _UNUSABLE):
        return None
    if kind in ("pcie_h2d", "pcie_d2h", "c2c_h2d", "c2c_d2h"):
        return "host"
    if kind == "mem_bw" and (detail.startswith(_KERNELS) or any(word in detail for word in _OCCUPIED)):
        return "memory"
    if kind == "mem_bw" and detail.startswith(_LOCAL_COPY):
        return "local-copy"
    return "local-copy" if kind == "fitted_mem_efficiency" and "op class default" in detail else None


def bandwidth_rows(measured: Path) -> list[BandwidthRow]:
    """Rows that a training step's elementwise kernels resemble: reads and writes at full occupancy."""
    found = []
    for row in read_rows(measured):
        path, accelerator = _path(row), accelerator_of(row["device"])
        if path is None or accelerator is None:
            continue
        rate = float(row["value"]) * _GIGA
        if row["kind"] == "fitted_mem_efficiency":
            rate *= float(row["detail"].split("of ")[1].split(" GB/s")[0])
        found.append(
            BandwidthRow(accelerator=accelerator, path=path, bytes_per_second=rate, source=short_source(row["source"]))
        )
    return found


def fractions(rows: list[BandwidthRow], accelerator: Accelerator, host: bool) -> tuple[float, int, str] | None:
    """(mean fraction of nominal, points, sources) of one accelerator, or None."""
    own = [row for row in rows if row.accelerator == accelerator.id]
    chosen = [row for row in own if row.path == ("host" if host else "memory")]
    chosen = chosen or ([] if host else [row for row in own if row.path == "local-copy"])
    nominal = accelerator.pcie_bandwidth if host else accelerator.memory_bandwidth
    if not chosen or not nominal:
        return None
    mean = sum(row.bytes_per_second for row in chosen) / len(chosen) / nominal
    return mean, len(chosen), "; ".join(sorted({row.source for row in chosen}))
