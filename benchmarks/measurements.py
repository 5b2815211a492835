"""Measured kernels read from the collected tables, as plain arrays in base units.

Two tables are read: `measured.csv` (columns kind, device, detail, value, unit, source) and `micro.csv` (columns
id, kind, gpu, shape, dtype, achieved, ..., source, source_cell). They overlap: a row is kept once per
(accelerator, origin, operator, shape). A row whose table marks it SUSPECT is left out.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

_TERA = 1e12

_NAMES = yaml.safe_load((Path(__file__).parent / "device_names.yaml").read_text(encoding="utf-8"))
_ACCELERATOR_OF_DEVICE = {name: accelerator for accelerator, names in _NAMES.items() for name in names}

_DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "bf16 (see source)": "bf16",
    "bf16/fp16": "bf16",
    "fp16": "fp16",
    "FP16": "fp16",
    "16-bit (unsaid which)": "bf16",
    "fp8": "fp8",
    "FP8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8 (e4m3fn)": "fp8",
    "tf32": "tf32",
    "TF32": "tf32",
    "fp32": "fp32",
    "FP32": "fp32",
}

_ORIGINS = {
    "ai-dynamo/aiconfigurator": "library-table",
    "MooreThreads/SimuMax": "training-layouts",
    "Azure/AI-benchmarking-guide": "settled",
    "stas00/ml-engineering": "best-shape",
    "mag-/gpu_benchmark": "best-shape",
    "xzwgit/gpu-flops-bench": "short",
    "Dao-AILab/flash-attention": "flash-attention",
    "direct measurement on one machine": "settled",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One measured matrix product [m, k] x [k, n], `groups` times; seconds for all groups together."""

    accelerator: str
    origin: str
    dtype: str
    m: int
    n: int
    k: int
    groups: int
    accumulate_fp32: bool
    seconds: float
    source: str


def accelerator_of(device: str) -> str | None:
    """Our id of the device that a table names, or None where we ship no such device."""
    return _ACCELERATOR_OF_DEVICE.get(device)


def origin_of(source: str) -> str:
    """The class of a source: how its numbers were taken."""
    for repository, origin in _ORIGINS.items():
        if repository in source:
            return origin
    return "other"


def short_source(source: str) -> str:
    found = re.match(r"(?:github:)?([\w.-]+/[\w.-]+@[0-9a-f]{7})", source)
    return "github:" + found.group(1) if found else source.split(" (", maxsplit=1)[0]


def _integers(text: str, names: str) -> list[int] | None:
    found = [re.search(rf"\b{name}=(\d+)", text) for name in names.split()]
    return [int(item.group(1)) for item in found if item] if all(found) else None


def _shape(text: str) -> list[int] | None:
    found = re.search(r"(\d+)x(\d+)x(\d+)", text)
    return [int(item) for item in found.groups()] if found else None


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if "SUSPECT" not in str(row)]


def _gemm(
    device: str, source: str, dtype: str, shape: list[int] | None, rate: float, **more: bool | int
) -> Gemm | None:
    accelerator = _ACCELERATOR_OF_DEVICE.get(device)
    if accelerator is None or dtype not in _DTYPES or shape is None or rate <= 0:
        return None
    m, n, k = shape
    groups = int(more.get("groups", 1))
    return Gemm(
        accelerator=accelerator,
        origin=origin_of(source) + ("-grouped" if groups > 1 else ""),
        dtype=_DTYPES[dtype],
        m=m,
        n=n,
        k=k,
        groups=groups,
        accumulate_fp32=bool(more.get("accumulate_fp32", False)),
        seconds=2.0 * m * n * k * groups / rate,
        source=short_source(source),
    )


def _executed_shape(detail: str, shape: list[int] | None) -> list[int] | None:
    """Grouped rows name the layer's M, N, K in all three stages; a backward stage contracts over N or M."""
    if shape is None:
        return None
    m, n, k = shape
    if "stage=bwd_grad_act" in detail:
        return [m, k, n]
    return [n, k, m] if "stage=bwd_grad_w" in detail else shape


def _gemm_of_measured(row: dict[str, str]) -> Gemm | None:
    kind, detail, value = row["kind"], row["detail"], float(row["value"])
    shape = _integers(detail, "m n k") or _integers(detail, "M N K") or _shape(detail)
    dtype = re.search(r"dtype=([\w/]+)", detail)
    name = dtype.group(1) if dtype else "bf16"
    if kind in ("gemm_tflops", "mamf_tflops", "gemm_best_in_table"):
        return _gemm(row["device"], row["source"], name, shape, value * _TERA)
    if kind == "power_throttle" and "8192^3 bf16 matmul, random inputs" in detail:
        return _gemm(row["device"], row["source"], "bf16", [8192, 8192, 8192], value * _TERA)
    if kind not in ("gemm_efficiency", "grouped_gemm_efficiency"):
        return None
    peak = re.search(r"peak\((\d+) TFLOPS\)", detail)
    groups = _integers(detail, "ng")
    return _gemm(
        row["device"],
        row["source"],
        "bf16",
        _executed_shape(detail, shape),
        value * float(peak.group(1)) * _TERA if peak else 0.0,
        groups=groups[0] if groups else 1,
        accumulate_fp32="accumulate=True" in detail and re.search(r"\b(out|main_grad)_dtype=fp32", detail) is not None,
    )


def _gemm_of_micro(row: dict[str, str]) -> Gemm | None:
    if row["kind"] not in ("gemm", "gemm (best shape found)", "gemm (best shape found, MAMF)", "gemm (square)"):
        return None
    shape = _shape(row["shape"])
    if row["unit"] == "TFLOP/s per device" and shape:
        # A device here is one of the two cores of a chip, and a chip is what we call an accelerator: both at once.
        both = [2 * shape[0], *shape[1:]]
        return _gemm(row["gpu"], row["source"], row["dtype"], both, 2 * float(row["achieved"]) * _TERA)
    if row["unit"] == "ms" and shape:
        rate = 2e3 * shape[0] * shape[1] * shape[2] / float(row["achieved"])
    elif row["unit"].startswith(("TFLOP/s", "TFLOPS")):
        rate = float(row["achieved"]) * _TERA
    else:
        return None
    return _gemm(row["gpu"], row["source"], row["dtype"], shape, rate)


def gemms(measured: Path, micro: Path) -> list[Gemm]:
    """Every usable product of the two tables, once each, in a fixed order."""
    rows = [_gemm_of_measured(row) for row in read_rows(measured)] + [_gemm_of_micro(row) for row in read_rows(micro)]
    kept: dict[tuple[object, ...], Gemm] = {}
    for row in rows:
        if row is not None:
            key = (row.accelerator, row.origin, row.dtype, row.m, row.n, row.k, row.groups, row.accumulate_fp32)
            kept.setdefault((*key, round(row.seconds * 1e9)) if "layouts" in row.origin else key, row)
    return [kept[key] for key in sorted(kept, key=str)]
