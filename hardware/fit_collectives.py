"""Fit the constants of collectives to measured rows, with the very formula that the package ships."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from distplan.hardware.calibrated import links_of
from distplan.hardware.cluster import Cluster
from distplan.hardware.collectives import price_over
from distplan.hardware.groups import group_span
from distplan.hardware.links import Curve, Link

Array = NDArray[np.float64]

MIB = 2.0**20
OUTLIER_SCALE = 0.1
"""log error above which a row counts linearly"""
LARGE_WEIGHT, SMALL_WEIGHT = 1.0, 0.4
"""of rows from 1 MiB up, and below (assumed): training moves little in small messages"""
ROW_SPREAD = 0.1
"""log error of one row: `benchmarks.calibrate_collectives` prints medians of 2 to 6 % and 90th percentiles to 25 %"""
LATENCY_SPREAD, RATE_SPREAD = 0.7, 0.5
"""by how much latencies, and efficiencies, differ between technologies (log; data/collectives_fit.yaml)"""
FEWEST_ROWS = 4
RDMA = 0.98
"""of a fabric's line rate, at most: perftest on ConnectX-7 reads 392 of 400 Gbit/s (NVIDIA/nccl issue 2409)"""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
_TOGETHER = COLLECTIVES[:4]
"""a fabric's curves of these share one set-up, hop, efficiency and shape"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One measurement. `size`: nccl-tests' size, the full buffer also for all_gather; `nodes`: domains spanned."""

    kind: str
    ranks: int
    nodes: int
    size: float
    seconds: float


def predict(
    kind: str, ranks: Array, nodes: Array, size: Array, cluster: Cluster, links: Sequence[Link], in_switch: bool = True
) -> Array:
    """Modelled seconds of rows of one collective on one cluster, with the constants of each tier given."""
    axes = [(ranks / nodes, np.ones_like(nodes)), (nodes, np.full_like(nodes, cluster.tiers[0].size))]
    used = list(links)
    if not in_switch:
        used[0] = replace(used[0], least_switch_ranks=1e9)
    payload = size / ranks if kind == "all_gather" else size
    # a job on one node straddles nothing, whatever its size
    gpus = np.where(nodes == 1.0, ranks, np.inf)
    return price_over(kind, payload, group_span(axes, cluster, gpus), cluster.tiers, used).seconds


def predict_rows(rows: Sequence[CollectiveRow], cluster: Cluster, links: Sequence[Link]) -> Array:
    """As `predict`, of rows of any kinds."""
    seconds = np.zeros(len(rows))
    for kind in dict.fromkeys(row.kind for row in rows):
        at = [index for index, row in enumerate(rows) if row.kind == kind]
        ranks, nodes, size = (np.array([float(getattr(rows[i], n)) for i in at]) for n in ("ranks", "nodes", "size"))
        seconds[at] = predict(kind, ranks, nodes, size, cluster, links)
    return seconds


def weights_of(sizes: Iterable[float]) -> Array:
    return np.array([LARGE_WEIGHT if size >= MIB else SMALL_WEIGHT for size in sizes])


def fit_cluster(cluster: Cluster, rows: Sequence[CollectiveRow]) -> tuple[dict[str, dict[str, tuple[Curve, int]]], int]:
    """({tier: {curve: (constants, rows behind them)}}, rows that no fit used), drawn to what the cluster has.

    Inside a scale-up domain every collective has a curve of its own, across domains they share one (as
    benchmarks.calibrate_collectives does). Constants are multiples of the known ones; each pulls towards 1 with the
    weight of a row that is off by as many ROW_SPREADs as the constant is by its spread. Too few rows change nothing.
    """
    links = links_of(cluster)
    found: dict[str, dict[str, tuple[Curve, int]]] = {}
    used = 0
    inner, outer = cluster.tiers[0].name, len(links) - 1
    for kind in COLLECTIVES:
        mine = [row for row in rows if row.kind == kind and row.nodes == 1 and row.ranks <= cluster.tiers[0].size]
        if len(mine) >= FEWEST_ROWS:
            names = [kind, *(["in_switch"] if kind == "all_reduce" and _switched(cluster, links[0], mine) else [])]
            curves = _fit(cluster, links, 0, [[name] for name in names], mine)
            links[0] = replace(links[0], curves={**links[0].curves, **curves})
            found.setdefault(inner, {}).update({name: (curve, len(mine)) for name, curve in curves.items()})
            used += len(mine)
    for together in (_TOGETHER, ("send_recv",)):
        mine = [row for row in rows if row.kind in together and row.nodes > 1]
        if len(mine) >= FEWEST_ROWS:
            curves = _fit(cluster, links, outer, [list(together)], mine, most=RDMA)
            links[outer] = replace(links[outer], curves={**links[outer].curves, **curves})
            found.setdefault("fabric", {}).update({name: (curve, len(mine)) for name, curve in curves.items()})
            used += len(mine)
    return found, len(rows) - used


def _switched(cluster: Cluster, link: Link, rows: Sequence[CollectiveRow]) -> bool:
    reduces = cluster.tiers[0].in_switch_reduction and "in_switch" in link.curves
    return reduces and any(row.ranks >= link.least_switch_ranks for row in rows)


_SPREADS = np.array([LATENCY_SPREAD, LATENCY_SPREAD, RATE_SPREAD, LATENCY_SPREAD, LATENCY_SPREAD, RATE_SPREAD])
"""of base, per_rank, efficiency, large, knee (logs of the multiple) and own_copy (an addend, in shares of a rank)"""
_REACH = np.array([3.0, 3.0, 3.0, 3.0, 3.0, 1.0])


def _moved(curve: Curve, x: Array, most: float) -> Curve:
    base, rank, rate, large, knee = (float(value) for value in np.exp(x[:5]))
    return Curve(
        base_seconds=curve.base_seconds * base,
        rank_seconds=curve.rank_seconds * rank,
        efficiency=min(curve.efficiency * rate, max(most, curve.efficiency)),
        own_copy=float(np.clip(curve.own_copy + x[5], -0.9, 4.0)) if curve.own_copy else 0.0,
        large=min(curve.large * large, 100.0),
        knee=float(np.clip(curve.knee * knee, 0.01, 100.0)),
    )


def _fit(
    cluster: Cluster,
    links: Sequence[Link],
    tier: int,
    groups: Sequence[Sequence[str]],
    rows: Sequence[CollectiveRow],
    most: float = 1.2,
) -> dict[str, Curve]:
    """Curves of one tier (a pod's are the fabric's), the multiples of each group of them shared."""
    weight, seconds = weights_of(row.size for row in rows), np.array([row.seconds for row in rows])
    count = len(_SPREADS)

    def curves(x: Array) -> dict[str, Curve]:
        return {
            name: _moved(links[tier].curves[name], x[at * count : (at + 1) * count], most)
            for at, names in enumerate(groups)
            for name in names
        }

    def errors(x: Array) -> Array:
        own = curves(x)
        tried = [
            replace(link, curves={**link.curves, **own}) if at == tier or (tier and place.name == "pod") else link
            for at, (link, place) in enumerate(zip(links, cluster.tiers, strict=True))
        ]
        return np.asarray(weight * np.log(predict_rows(rows, cluster, tried) / seconds))

    return curves(_solved(errors, np.tile(_SPREADS, len(groups)), np.tile(_REACH, len(groups))))


def _solved(errors: Callable[[Array], Array], spreads: Array, reach: Array) -> Array:
    result = least_squares(
        lambda x: np.concatenate([errors(x), ROW_SPREAD / spreads * x]),
        np.zeros(len(spreads)),
        bounds=(-reach, reach),
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
        max_nfev=80,
    )
    return np.asarray(result.x)
