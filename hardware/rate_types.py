"""What the rates of local operators are made of: plain data, each constant in base units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class AcceleratorLike(Protocol):
    """The fields of `Accelerator` that rates are made from."""

    @property
    def id(self) -> str: ...
    @property
    def generation(self) -> str: ...
    @property
    def num_sms(self) -> int: ...
    @property
    def peak_flops(self) -> Mapping[str, float]: ...
    @property
    def memory_bandwidth(self) -> float: ...
    @property
    def pcie_bandwidth(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a constant comes from: measured (on this device) | scaled (another dtype or device of the family,
    in proportion to peak) | assumed; the number of points behind it; the sources."""

    provenance: str
    points: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRates:
    """Constants of matrix products in one dtype; units in the formula of `rates.gemm_seconds`."""

    flops_per_second: float
    """peak × fraction: what full waves of full tiles reach as k grows"""
    bytes_per_second: float
    tile_costs: tuple[tuple[float, float, float], ...]
    """(rows, columns, relative cost of one FLOP) of each tile that the library may choose"""
    num_sms: float
    wave: float
    """0: partial waves cost their share; 1: they cost a whole wave"""
    ramp: float
    """elements of k that prologue and epilogue are worth"""
    overlap: float
    """share of the lesser of compute and traffic that is not hidden behind the greater"""
    latency: float
    """seconds"""
    group_latency: float
    """seconds for each further group of a grouped product"""
    operand_bytes: float
    result_bytes: float
    accumulate_bytes: float
    """further bytes per result element where it is added to an fp32 buffer"""
    cast_bytes: float
    """bytes moved per element of the first operand to cast it to fp8; 0 for other dtypes"""
    cast_latency: float
    """seconds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """Constants of flash attention in one direction; the formula is `rates.attention_seconds`."""

    peak_fraction: float
    """at head dim 128 and unlimited length"""
    head_dim_64: float
    """rate at head dim 64, relative to 128"""
    head_dim_256: float
    ramp: float
    """keys that the prologue of a row of blocks is worth"""
    causal_ramp: float
    """further keys where causal: blocks on the diagonal are computed in full and masked"""
    tail_rows: float
    """query rows per multiprocessor that the last, unbalanced wave is worth"""
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """All constants of one accelerator's local operators (bytes, seconds, FLOPs)."""

    accelerator: str
    family: str
    num_sms: float
    peak_flops: Mapping[str, float]
    gemm: Mapping[str, GemmRates]
    """by dtype: those that the device has a peak for"""
    misalignment: tuple[float, float]
    """compute time × when the contiguous dims are whole 16 but not 64 bytes; × when not even 16"""
    attention_forward: AttentionRates
    attention_backward: AttentionRates
    memory_bandwidth: float
    """achieved bytes/s of an elementwise kernel, read + write counted"""
    kernel_latency: float
    """seconds that a kernel takes on the device however little it does"""
    launch_latency: float
    """seconds for the host to submit one kernel"""
    host_operator: float
    """seconds of the host for one operator of an eager framework"""
    host_bandwidth: float
    """achieved bytes/s between host and device, one direction"""
    host_latency: float
    sustained: float
    """rate of products in a long, thermally settled run over that of the short runs `gemm` is fitted to"""
    origins: Mapping[str, Origin]
    attention_kernels: Mapping[str, float] = field(default_factory=dict)
    """time of an older attention kernel (flash1, flash2) over that of the best that the rates are fitted to"""
