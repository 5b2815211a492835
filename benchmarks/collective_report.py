"""Modelled against measured seconds of collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from benchmarks.collective_rows import Row
from distplan.hardware.cluster import Cluster, load_cluster
from distplan.hardware.fit_collectives import MIB
from distplan.hardware.fit_collectives import predict as predict_on
from distplan.hardware.links import Link


def predict(rows: list[Row], links: Mapping[str, Link], in_switch: bool = True) -> NDArray[np.float64]:
    """Modelled seconds of every row, one call per system and collective."""
    seconds = np.zeros(len(rows))
    batches: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        batches[(row.system, row.kind)].append(index)
    for (system, kind), indices in batches.items():
        cluster: Cluster = load_cluster(system)
        mine = [rows[index] for index in indices]
        ranks = np.array([float(row.ranks) for row in mine])
        nodes = np.array([float(row.nodes) for row in mine])
        size = np.array([row.size for row in mine])
        used = [links[tier.technology] for tier in cluster.tiers]
        seconds[indices] = predict_on(kind, ranks, nodes, size, cluster, used, in_switch)
    return seconds


def report(rows: list[Row], links: Mapping[str, Link]) -> None:
    groups: dict[tuple[str, str, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[(row.system, row.kind, row.ranks, row.nodes)].append(row)
    print(
        f"{'system':16} {'collective':15} {'ranks':>5} {'nodes':>5} {'rows':>5} {'median':>8} {'worst':>8}  below 1 MiB"
    )
    everything: dict[str, list[float]] = defaultdict(list)
    for (system, kind, ranks, nodes), mine in sorted(groups.items()):
        errors = predict(mine, links) / np.array([r.seconds for r in mine]) - 1.0
        big = np.array([r.size >= MIB for r in mine])
        large, small = errors[big], errors[~big]
        everything[kind if nodes == 1 else f"{kind}, nodes"] += list(np.abs(large))
        worst = large[np.argmax(np.abs(large))] if len(large) else float("nan")
        middle = np.median(np.abs(large)) if len(large) else float("nan")
        below = f"{np.median(np.abs(small)):.0%} of {len(small)}" if len(small) else ""
        print(f"{system:16} {kind:15} {ranks:5} {nodes:5} {len(large):5} {middle:8.1%} {worst:+8.1%}  {below}")
    print("\nfrom 1 MiB up, all devices:")
    for kind, errors in sorted(everything.items()):
        if errors:
            print(
                f"  {kind:24} {len(errors):5} rows  median {np.median(errors):6.1%}"
                f"  90th {np.quantile(errors, 0.9):6.1%}"
            )
