"""From micro-benchmarks to a cluster's own constants, with how far the model was from them before and is after."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distplan.hardware.calibrated import links_of, rates_of, values_of
from distplan.hardware.calibration import GEMM, Calibration, Entry
from distplan.hardware.cluster import Cluster
from distplan.hardware.errors import DistplanError
from distplan.hardware.fit_attention import SHAPE, fit_direction
from distplan.hardware.fit_collectives import CollectiveRow, fit_cluster, predict_rows
from distplan.hardware.fit_gemm import Rows, fit_device
from distplan.hardware.microbench import AttentionRow, Bench, CopyRow, GemmRow
from distplan.hardware.rate_types import AttentionRates, Rates
from distplan.hardware.rates import attention_seconds, gemm_seconds, memory_seconds, pcie_seconds

Array = NDArray[np.float64]

FEWEST_ROWS = 3
"""of products, of one direction of attention, of copies; fewer keep the shipped constant"""
LARGE_COPY = 64 * 2.0**20
"""bytes: from here on a copy is bandwidth, not latency, and leaves every cache"""
MOST_OF_PEAK = 1.3
"""of the peak rate: what is faster was not waited for (boost clocks give some per cent over the nominal peak)"""

_IDEAL = AttentionRates(peak_fraction=1.0, head_dim_64=1.0, head_dim_256=1.0, ramp=0.0, causal_ramp=0.0, tail_rows=0.0,
                        latency=0.0)  # fmt: skip
"""nothing but the peak rate"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Relative errors of one kind of measurement, before and after: medians and 90th percentiles of their size."""

    kind: str
    points: int
    before_median: float
    before_p90: float
    after_median: float
    after_p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One refitted constant, in base units."""

    name: str
    before: float
    after: float
    points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroFit:
    cluster: Cluster
    """with the calibration refined"""
    residuals: tuple[Residual, ...]
    constants: tuple[Constant, ...]
    notes: tuple[str, ...]


def calibrate(cluster: Cluster, bench: Bench) -> MicroFit:
    """Refit what the file has enough measurements of. Raises DistplanError for what no device of this kind can do."""
    before = rates_of(cluster)
    bench = replace(bench, collectives=tuple(_over_domains(cluster, bench, row) for row in bench.collectives))
    _check(cluster, before, bench)
    notes: list[str] = []
    gemm = _fit_gemm(cluster, before, bench, notes)
    attention = _fit_attention(cluster, before, bench, notes)
    scalars = _fit_scalars(cluster, before, bench, notes)
    links = _fit_links(cluster, bench, notes)
    known = cluster.calibration
    merged = Calibration(
        gemm={**known.gemm, **gemm},
        attention={**known.attention, **attention},
        links={tier: {**known.links.get(tier, {}), **links.get(tier, {})} for tier in {**known.links, **links}},
        scalars={**known.scalars, **scalars},
    )
    made = replace(cluster, calibration=merged)
    # the settled rate is relative to that of the short runs, which has just moved
    settled = _sustained(rates_of(made), bench, notes)
    if settled is not None:
        made = replace(made, calibration=replace(merged, scalars={**merged.scalars, "sustained": settled}))
    return MicroFit(
        cluster=made,
        residuals=tuple(_residuals(cluster, made, bench)),
        constants=tuple(_constants(cluster, made)),
        notes=tuple(notes),
    )


def _check(cluster: Cluster, rates: Rates, bench: Bench) -> None:
    for row in bench.gemm:
        if row.dtype not in rates.gemm:
            raise DistplanError(f"{bench.file}: a product in {row.dtype}, which {rates.accelerator} does not have")
        least = 2.0 * row.m * row.n * row.k / rates.peak_flops[row.dtype]
        _not_faster(bench, f"a {row.dtype} product of {row.m} x {row.n} x {row.k}", row.seconds, least, "peak rate")
    ideal = replace(rates, attention_forward=_IDEAL, attention_backward=_IDEAL, attention_kernels={})
    for each in bench.attention:
        what = f"attention {each.work} of {each.batch} x {each.length} tokens"
        _not_faster(bench, what, each.seconds, float(_attention_seconds(ideal, [each])[0]), "peak rate")
    for sent in bench.collectives:
        _not_faster(bench, _named(sent), sent.seconds, _least_seconds(cluster, sent), "links' rate")
    for after, size in bench.context.items():
        if size > cluster.accelerator.memory_label_bytes:
            raise DistplanError(
                f"{bench.file}: a context of {size / 2**30:.4g} GiB after {after} is more than the device has"
            )


def _not_faster(bench: Bench, what: str, seconds: float, least: float, bound: str) -> None:
    if least > MOST_OF_PEAK * seconds:
        raise DistplanError(
            f"{bench.file}: {what} in {seconds:.3g} s is {least / seconds:.4g} times the {bound}: "
            "its end was not waited for, or it ran on another system"
        )


def _named(row: CollectiveRow) -> str:
    return f"{row.kind} of {row.size:.4g} bytes over {row.ranks} ranks in {row.nodes} domain{'s' * (row.nodes > 1)}"


def _least_seconds(cluster: Cluster, row: CollectiveRow) -> float:
    """No collective is faster: what a rank must receive from all others, or a domain through all of its links."""
    if row.nodes == 1:
        return row.size * (1.0 - 1.0 / row.ranks) / cluster.tiers[0].bandwidth
    fastest = max(tier.bandwidth for tier in cluster.tiers[1:] or cluster.tiers)
    return row.size * (1.0 - 1.0 / row.nodes) / (fastest * row.ranks / row.nodes)


def _over_domains(cluster: Cluster, bench: Bench, row: CollectiveRow) -> CollectiveRow:
    """The row with its nodes as scale-up domains, where these are larger than a node (GB200 NVL72)."""
    if row.ranks > row.nodes * cluster.gpus_per_node:
        raise DistplanError(
            f"{bench.file}: {row.ranks} ranks on {row.nodes} node{'s' if row.nodes > 1 else ''}, "
            f"but a node of {cluster.id} holds {cluster.gpus_per_node} GPUs"
        )
    domain = cluster.tiers[0].size
    return replace(row, nodes=math.ceil(row.ranks / domain)) if domain > cluster.gpus_per_node else row


def _too_few(what: str, points: int, notes: list[str]) -> bool:
    if points >= FEWEST_ROWS:
        return False
    if points:
        notes.append(f"{what}: {points} measurement{'s are' if points > 1 else ' is'} too few, at least {FEWEST_ROWS} "
                     "are needed; the constant is kept as it was")  # fmt: skip
    return True


def _short(bench: Bench, dtype: str) -> list[GemmRow]:
    return [row for row in bench.gemm if row.dtype == dtype and not row.settled]


def _fit_gemm(cluster: Cluster, rates: Rates, bench: Bench, notes: list[str]) -> dict[str, Entry]:
    found = {}
    for dtype in dict.fromkeys(row.dtype for row in bench.gemm):
        rows = _short(bench, dtype)
        if _too_few(f"products in {dtype}", len(rows), notes):
            continue
        fraction, shape = fit_device(cluster.accelerator, dtype, Rows.of(rows), rates.gemm[dtype])
        values = {
            "peak_fraction": fraction,
            "bandwidth_fraction": shape["bandwidth"],
            "tile_128": shape["tile128"],
            "tile_64": shape["tile64"],
        } | {name: shape[name] for name in ("latency", "overlap", "ramp", "wave")}
        found[dtype] = Entry(values={name: values[name] for name in GEMM}, points=len(rows), source=bench.source)
    return found


def _best_kernels(rates: Rates, bench: Bench, direction: str) -> tuple[list[AttentionRow], Array]:
    """(rows of the best kernel if measured often enough, else all; time of each one's kernel over the best's)."""
    mine = [row for row in bench.attention if row.work == direction]
    best = [row for row in mine if rates.attention_kernels.get(row.kernel, 1.0) <= 1.0]
    rows = best if len(best) >= FEWEST_ROWS else mine
    return rows, np.array([rates.attention_kernels.get(row.kernel, 1.0) for row in rows])


def _fit_attention(cluster: Cluster, rates: Rates, bench: Bench, notes: list[str]) -> dict[str, Entry]:
    found = {}
    for direction, known in (("forward", rates.attention_forward), ("backward", rates.attention_backward)):
        rows, slower = _best_kernels(rates, bench, direction)
        if not _too_few(f"attention {direction}", len(rows), notes):
            of = fit_direction(cluster.accelerator, rows, known, slower)
            values = {name: float(getattr(of, name)) for name in ("peak_fraction", *SHAPE)}
            found[direction] = Entry(values=values, points=len(rows), source=bench.source)
    return found


def _fit_scalars(cluster: Cluster, rates: Rates, bench: Bench, notes: list[str]) -> dict[str, Entry]:
    found = {}
    accelerator = cluster.accelerator
    for name, path, nominal, latency in (
        ("memory_fraction", "device", accelerator.memory_bandwidth, rates.kernel_latency),
        ("host_fraction", "host", accelerator.pcie_bandwidth, rates.host_latency),
    ):
        rows = [row for row in bench.copies if row.path == path and row.bytes >= LARGE_COPY]
        what = "device" if path == "device" else "host and device"
        if _too_few(f"copies of 64 MiB and more ({what})", len(rows), notes):
            continue
        if not nominal:
            notes.append(f"{accelerator.id} has no pcie_bandwidth, so that the copies to the host say nothing")
            continue
        rate = float(np.median([row.bytes / max(row.seconds - latency, 0.1 * row.seconds) for row in rows]))
        if not 0.01 <= rate / nominal <= MOST_OF_PEAK:
            raise DistplanError(f"{bench.file}: copies ({what}) at {rate / nominal:.2f} times the nominal bandwidth")
        found[name] = Entry(values={"value": rate / nominal}, points=len(rows), source=bench.source)
    if "nccl" in bench.context:
        found["context_bytes"] = Entry(values={"value": bench.context["nccl"]}, points=1, source=bench.source)
    elif "cuda" in bench.context:
        notes.append("the context was measured without NCCL (run the script under torchrun); it is kept as it was")
    return found


def _sustained(rates: Rates, bench: Bench, notes: list[str]) -> Entry | None:
    rows = [row for row in bench.gemm if row.settled]
    if not rows:
        return None
    ratio = float(np.median([_gemm_seconds(rates, [row])[0] / row.seconds for row in rows]))
    return Entry(values={"value": min(ratio, 1.0)}, points=len(rows), source=bench.source)


def _fit_links(cluster: Cluster, bench: Bench, notes: list[str]) -> dict[str, dict[str, Entry]]:
    found, unused = fit_cluster(cluster, bench.collectives)
    if unused:
        notes.append(
            f"{unused} of {len(bench.collectives)} collectives are too few of their kind and tier to be fitted; "
            "those constants are kept as they were"
        )
    return {
        tier: {
            name: Entry(values=values_of(curve), points=points, source=bench.source)
            for name, (curve, points) in of.items()
        }
        for tier, of in found.items()
    }


# ---------------------------------------------------------------- what the model says of the rows


def _gemm_seconds(rates: Rates, rows: Sequence[GemmRow]) -> Array:
    m, n, k = (np.array([float(getattr(row, name)) for row in rows]) for name in ("m", "n", "k"))
    return gemm_seconds(rates, m, n, k, rows[0].dtype, cast_input=False)


def _attention_seconds(rates: Rates, rows: Sequence[AttentionRow]) -> Array:
    seconds = np.zeros(len(rows))
    for at, row in enumerate(rows):
        args = (row.flops_full, row.head_dim, row.length, row.length, row.causal, row.work == "backward")
        slower = rates.attention_kernels.get(row.kernel, 1.0)
        seconds[at] = float(attention_seconds(rates, *args)) * slower
    return seconds


def _copy_seconds(rates: Rates, rows: Sequence[CopyRow]) -> Array:
    moved = np.array([row.bytes for row in rows])
    return memory_seconds(rates, moved) if rows[0].path == "device" else pcie_seconds(rates, moved)


def _collective_seconds(cluster: Cluster, rows: Sequence[CollectiveRow]) -> Array:
    return predict_rows(rows, cluster, links_of(cluster))


def _residuals(before: Cluster, after: Cluster, bench: Bench) -> list[Residual]:
    """Kinds in a fixed order, each with the model's seconds by the constants of both clusters."""
    groups: dict[str, tuple[list[Any], Callable[[Cluster, Any], Array]]] = {}

    def add(kind: str, row: Any, of: Callable[[Cluster, Any], Array]) -> None:
        groups.setdefault(kind, ([], of))[0].append(row)

    for row in bench.gemm:
        add(f"gemm {row.dtype}{', settled' if row.settled else ''}", row, _settled)
    for attention in bench.attention:
        add(f"attention {attention.work}", attention, lambda c, r: _attention_seconds(rates_of(c), r))
    for copy in bench.copies:
        add(f"copy, {copy.path}", copy, lambda c, r: _copy_seconds(rates_of(c), r))
    for each in bench.collectives:
        where = "in a domain" if each.nodes == 1 else "across"
        add(f"{each.kind}, {where}", each, _collective_seconds)
    return [residual(kind, of(before, rows), of(after, rows), _measured(rows)) for kind, (rows, of) in groups.items()]


def _settled(cluster: Cluster, rows: Sequence[GemmRow]) -> Array:
    rates = rates_of(cluster)
    return _gemm_seconds(rates, rows) / (rates.sustained if rows[0].settled else 1.0)


def _measured(rows: Sequence[Any]) -> Array:
    return np.array([row.seconds for row in rows])


def residual(kind: str, before: Array, after: Array, measured: Array) -> Residual:
    """Of model against measurement; error = predicted / measured - 1."""
    was, now = (np.abs(np.asarray(values) / measured - 1.0) for values in (before, after))
    return Residual(
        kind=kind,
        points=len(measured),
        before_median=float(np.median(was)),
        before_p90=float(np.quantile(was, 0.9)),
        after_median=float(np.median(now)),
        after_p90=float(np.quantile(now, 0.9)),
    )


def _constants(before: Cluster, after: Cluster) -> list[Constant]:
    """The leading constant of every entry that changed; all of them stand in the file."""
    was, now = rates_of(before), rates_of(after)
    calibration, known = after.calibration, before.calibration
    found = []
    for dtype, entry in calibration.gemm.items():
        if known.gemm.get(dtype) != entry:
            peak = now.peak_flops[dtype]
            fractions = (was.gemm[dtype].flops_per_second / peak, now.gemm[dtype].flops_per_second / peak)
            found.append(_constant(f"gemm.{dtype}.peak_fraction", *fractions, entry))
    for direction, entry in calibration.attention.items():
        if known.attention.get(direction) != entry:
            old: float = getattr(was, f"attention_{direction}").peak_fraction
            found.append(_constant(f"attention.{direction}.peak_fraction", old, entry.values["peak_fraction"], entry))
    old_scalars = _scalars(before, was)
    for name, entry in calibration.scalars.items():
        if known.scalars.get(name) != entry and name in old_scalars:
            found.append(_constant(name, old_scalars[name], entry.value, entry))
    for tier, link, own in zip(after.tiers, links_of(before), links_of(after), strict=True):
        for name, entry in calibration.links.get(tier.name, {}).items():
            if known.links.get(tier.name, {}).get(name) != entry:
                rates = (link.curves[name].efficiency, own.curves[name].efficiency)
                found.append(_constant(f"links.{tier.name}.{name}.efficiency", *rates, entry))
    return found


def _constant(name: str, before: float, after: float, entry: Entry) -> Constant:
    return Constant(name=name, before=before, after=after, points=entry.points)


def _scalars(cluster: Cluster, rates: Rates) -> Mapping[str, float]:
    """What the scalars were, where hardware knows (the context is a runtime's)."""
    accelerator = cluster.accelerator
    known = {"memory_fraction": rates.memory_bandwidth / accelerator.memory_bandwidth, "sustained": rates.sustained}
    nominal = accelerator.pcie_bandwidth
    return known | ({"host_fraction": rates.host_bandwidth / nominal} if nominal else {})
