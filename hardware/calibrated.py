"""The constants of a cluster: those shipped for its devices and links, and in their place what was measured on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from distplan.hardware.accelerator import Accelerator
from distplan.hardware.calibration import Calibration, Entry
from distplan.hardware.cluster import Cluster, Tier
from distplan.hardware.links import Curve, Link, link_of
from distplan.hardware.rate_types import AttentionRates, GemmRates, Origin, Rates
from distplan.hardware.rates import rates_for

_SIBLINGS = {"fp16": "bf16", "bf16": "fp16"}
"""dtypes that the same kernels serve at the same peak: what was measured of one is scaled for the other"""

_CURVE_FIELDS = {
    "base": "base_seconds",
    "per_rank": "rank_seconds",
    "efficiency": "efficiency",
    "own_copy": "own_copy",
    "large": "large",
    "knee": "knee",
}
"""key of calibration.CURVE -> field of links.Curve"""


def links_of(cluster: Cluster) -> list[Link]:
    """Constants of every tier's links, inner to outer."""
    return [_link(tier, cluster.calibration) for tier in cluster.tiers]


def _link(tier: Tier, calibration: Calibration) -> Link:
    link = link_of(tier.technology, tier.latency)
    own = calibration.links.get("fabric" if tier.name == "pod" else tier.name)
    if not own:
        return link
    curves = {kind: curve_of(entry.values) for kind, entry in own.items()}
    source = "; ".join(sorted({entry.source for entry in own.values()}))
    return replace(link, curves={**link.curves, **curves}, status="measured", source=source)


def curve_of(values: Mapping[str, float]) -> Curve:
    """calibration.CURVE's keys as a Curve."""
    return Curve(**{field: values[key] for key, field in _CURVE_FIELDS.items()})


def values_of(curve: Curve) -> dict[str, float]:
    """`curve_of`'s inverse."""
    return {key: float(getattr(curve, field)) for key, field in _CURVE_FIELDS.items()}


def rates_of(cluster: Cluster) -> Rates:
    """Constants of its device's local operators. Raises DistplanError where the device has no matrix peak at all."""
    return with_measured(rates_for(cluster.accelerator), cluster.accelerator, cluster.calibration)


def with_measured(rates: Rates, accelerator: Accelerator, calibration: Calibration) -> Rates:
    """`rates` of `accelerator` with what the calibration has measured in place; origins say so."""
    origins = dict(rates.origins)
    gemm = dict(rates.gemm)
    for dtype, shipped in rates.gemm.items():
        sibling = _SIBLINGS.get(dtype, dtype)
        found = dtype if dtype in calibration.gemm else sibling
        if found in calibration.gemm:
            entry = calibration.gemm[found]
            gemm[dtype] = _gemm(shipped, accelerator.peak_flops[dtype], accelerator, entry)
            status = "measured" if found == dtype else "scaled"
            origins |= {f"gemm.{dtype}.{part}": _origin(entry, status) for part in ("peak_fraction", "shape")}
    of_attention = {}
    for direction, of in (("forward", rates.attention_forward), ("backward", rates.attention_backward)):
        of_attention[direction] = of
        if direction in calibration.attention:
            entry = calibration.attention[direction]
            of_attention[direction] = AttentionRates(**entry.values)
            origins[f"attention_{direction}"] = _origin(entry)
    memory, host, sustained = (calibration.scalars.get(k) for k in ("memory_fraction", "host_fraction", "sustained"))
    for name, scalar in (("memory_bandwidth", memory), ("host_bandwidth", host), ("sustained", sustained)):
        if scalar is not None:
            origins[name] = _origin(scalar)
    nominal_host = accelerator.pcie_bandwidth
    return replace(
        rates,
        gemm=MappingProxyType(gemm),
        attention_forward=of_attention["forward"],
        attention_backward=of_attention["backward"],
        memory_bandwidth=accelerator.memory_bandwidth * memory.value if memory else rates.memory_bandwidth,
        host_bandwidth=nominal_host * host.value if host and nominal_host else rates.host_bandwidth,
        sustained=sustained.value if sustained else rates.sustained,
        origins=MappingProxyType(origins),
    )


def _origin(entry: Entry, status: str = "measured") -> Origin:
    return Origin(provenance=status, points=entry.points, source=entry.source)


def _gemm(shipped: GemmRates, peak: float, accelerator: Accelerator, entry: Entry) -> GemmRates:
    of = entry.values
    costs = {128.0: of["tile_128"], 64.0: of["tile_64"]}
    return replace(
        shipped,
        flops_per_second=peak * of["peak_fraction"],
        bytes_per_second=accelerator.memory_bandwidth * of["bandwidth_fraction"],
        latency=of["latency"],
        overlap=of["overlap"],
        ramp=of["ramp"],
        wave=of["wave"],
        tile_costs=tuple((m, n, costs.get(m, cost)) for m, n, cost in shipped.tile_costs),
    )
