"""Seconds and wire bytes of a collective over the tiers that its group really spans.

`payload_bytes` is what one rank gives: the full tensor to all_reduce, reduce_scatter and broadcast, its
own shard to all_gather and ring_exchange, its own tensor to all_to_all and send_recv. `wire_bytes` is
what one GPU sends with the algorithm chosen. Wire factors are those of nccl-tests
(NVIDIA/nccl-tests doc/PERFORMANCE.md); the choice between ring, tree and in-switch reduction is NCCL's
(NVIDIA/nccl src/graph/tuning.cc): the one that takes least time. Constants: hardware/links.py.

Every term carries a factor that is zero for a group of one rank, so that such a group costs exactly 0;
so does an empty payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distplan.hardware.calibrated import links_of
from distplan.hardware.cluster import Cluster, Tier
from distplan.hardware.groups import Group
from distplan.hardware.links import Link

Floats = NDArray[np.float64]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast", "ring_exchange")
ALGORITHMS = ("none", "ring", "tree", "in_switch", "direct", "pat")
"""names of CollectiveCost.algorithm's codes"""
NONE, RING, TREE, IN_SWITCH, DIRECT, PAT = (float(code) for code in range(len(ALGORITHMS)))

PAT_RATE, PAT_HOP, PAT_RANK_SECONDS = 0.75, 1.0 / 3.5, 2.8e-6
"""of the ring's rate, of its hop, and per rank: NCCL's own figures (src/graph/tuning.cc), not measured here"""


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    seconds: Floats
    wire_bytes: Floats
    algorithm: Floats
    """index into ALGORITHMS"""
    step_seconds: Floats
    """of one of the n-1 steps of ring_exchange; otherwise equal to seconds"""


def price(
    kind: str,
    payload_bytes: Floats,
    group: Group,
    cluster: Cluster,
    *,
    leaving: Floats | None = None,
    inside: Floats | float = 1.0,
) -> CollectiveCost:
    """Cost of one collective of `kind` (see KINDS), elementwise over payloads and groups.

    `leaving`: of an all_to_all, the part of what goes to other domains that really crosses their links, because
    what several ranks of a domain want is sent there once and passed on inside it; `inside`: the part of what moves
    inside a domain that is left where a rank, too, gets once what several of its experts want.
    """
    links = links_of(cluster)
    if kind == "all_to_all" and leaving is not None:
        cost = _all_to_all(np.asarray(payload_bytes, dtype=np.float64), group, cluster.tiers, links, leaving, inside)
        return _issued(cost, payload_bytes)
    return price_over(kind, payload_bytes, group, cluster.tiers, links)


def p2p_seconds(payload_bytes: Floats, group: Group, cluster: Cluster) -> Floats:
    """Seconds to send `payload_bytes` to the neighbour in the group, over the outermost tier it spans."""
    return price("send_recv", payload_bytes, group, cluster).seconds


def price_over(
    kind: str, payload_bytes: Floats, group: Group, tiers: Sequence[Tier], links: Sequence[Link]
) -> CollectiveCost:
    """As `price`, with the constants of each tier given (for calibration)."""
    if kind not in KINDS:
        raise KeyError(kind)
    payload = np.asarray(payload_bytes, dtype=np.float64)
    if kind == "all_to_all":
        cost = _all_to_all(payload, group, tiers, links)
    elif kind in ("send_recv", "ring_exchange"):
        cost = _neighbours(kind, payload, group, tiers, links)
    else:
        cost = _reduction_or_gather(kind, payload, group, tiers, links)
    return _issued(cost, payload)


def _issued(cost: CollectiveCost, payload: Floats) -> CollectiveCost:
    """Nothing to send, nothing called."""
    issued = np.minimum(payload, 1.0)
    return replace(cost, seconds=issued * cost.seconds, step_seconds=issued * cost.step_seconds)


# ---------------------------------------------------------------- what all kinds share


def curve_seconds(latency: Floats, transfer: Floats, large: Floats, knee: Floats) -> Floats:
    """links.Curve's formula; the tiny addend only keeps 0/0 from being asked for."""
    return latency + transfer + large * latency * transfer / (transfer + knee * latency + 1e-30)


def _crossed(group: Group) -> list[Floats]:
    """Per tier 1.0 where the group uses its links, else 0.0."""
    flags = [np.minimum(group.inside[0] - 1.0, 1.0)]
    return flags + [np.minimum(outer - 1.0, 1.0) for outer in group.spans[:-1]]


def _outermost(values: Sequence[float], crossed: Sequence[Floats]) -> Floats:
    """Of each row the value that belongs to the outermost tier it crosses."""
    chosen = np.full_like(crossed[0], values[0])
    for value, flag in zip(values[1:], crossed[1:], strict=True):
        chosen = np.where(flag > 0.0, value, chosen)
    return chosen


def _share(tier: Tier, link: Link, ranks: Floats) -> Floats:
    """Share of a GPU's scale-up links that a group of `ranks` in one domain can use."""
    if link.share_by_ranks:
        index = np.minimum(np.maximum(ranks, 1.0), float(len(link.share_by_ranks))).astype(np.intp) - 1
        return np.asarray(link.share_by_ranks, dtype=np.float64)[index]
    if tier.topology == "mesh":
        return np.maximum(ranks - 1.0, 1.0) / max(tier.size - 1.0, 1.0)
    return np.ones_like(ranks)


def _lanes(tier: Tier, below: Floats) -> Floats:
    """GPUs of an inner domain that share the traffic leaving it: all on a fabric, one on a PCIe tree."""
    return below if tier.topology == "fabric" else np.ones_like(below)


def _ring_steps(group: Group) -> list[Floats]:
    """How many of a ring's n-1 hops run over each tier's links."""
    counts = [group.size, *group.spans]
    return [inner - outer for inner, outer in pairwise(counts)]


def _ceil_log2(count: Floats) -> Floats:
    """Exact for whole numbers: the exponent of count - 1/2."""
    return np.frexp(count - 0.5)[1].astype(np.float64)


# ---------------------------------------------------------------- all_reduce, all_gather, reduce_scatter, broadcast


def _reduction_or_gather(
    kind: str, payload: Floats, group: Group, tiers: Sequence[Tier], links: Sequence[Link]
) -> CollectiveCost:
    n = group.size
    passes = 2.0 if kind == "all_reduce" else 1.0
    full = payload * n if kind == "all_gather" else payload
    wire = passes * (n - 1.0) / n * full
    crossed = _crossed(group)
    seconds = _ring(kind, wire, full, group, tiers, links, crossed)
    algorithm = np.where(n > 1.0, RING, NONE)
    if kind == "all_reduce":
        reduces = tiers[0].in_switch_reduction & (group.inside[0] >= links[0].least_switch_ranks)
        tree = _tree(payload, group, tiers, links, crossed, reduces)
        better = (reduces | (group.spans[0] > 1.0)) & (tree < seconds)
        seconds = np.where(better, tree, seconds)
        algorithm = np.where(better, np.where(reduces, IN_SWITCH, TREE), algorithm)
        k = group.spans[0]
        through_switch = payload + 2.0 * (k - 1.0) / k * payload / group.inside[0]
        wire = np.where(better & reduces, through_switch, wire)
    if kind in ("all_gather", "reduce_scatter"):
        pat = _pat(kind, wire, group, tiers, links, crossed)
        better = (group.inside[0] == 1.0) & (pat < seconds)
        seconds = np.where(better, pat, seconds)
        algorithm = np.where(better, PAT, algorithm)
    return CollectiveCost(seconds, wire, algorithm, seconds)


def _ring(
    kind: str,
    wire: Floats,
    full: Floats,
    group: Group,
    tiers: Sequence[Tier],
    links: Sequence[Link],
    crossed: Sequence[Floats],
) -> Floats:
    """A ring over all ranks; the slowest tier it runs over sets its rate."""
    curves = [link.curves["all_gather" if kind == "broadcast" else kind] for link in links]
    own = curves[0].own_copy * full / group.size
    rate = tiers[0].bandwidth * curves[0].efficiency * _share(tiers[0], links[0], group.inside[0])
    transfer = crossed[0] * (wire + own) / rate
    base = crossed[0] * curves[0].base_seconds
    steps = _ring_steps(group)
    latency = steps[0] * curves[0].rank_seconds
    for t in range(1, len(tiers)):
        rate_t = tiers[t].bandwidth * curves[t].efficiency
        through = wire / _lanes(tiers[t], group.inside[t - 1])
        transfer = np.maximum(transfer, crossed[t] * through / rate_t)
        base = np.maximum(base, crossed[t] * curves[t].base_seconds)
        latency = latency + steps[t] * curves[t].rank_seconds
    large = _outermost([curve.large for curve in curves], crossed)
    knee = _outermost([curve.knee for curve in curves], crossed)
    return curve_seconds(base + latency, transfer, large, knee)


def _pat(
    kind: str, wire: Floats, group: Group, tiers: Sequence[Tier], links: Sequence[Link], crossed: Sequence[Floats]
) -> Floats:
    """Parallel aggregated trees, which NCCL uses for groups of one GPU per node: few hops, a lower rate."""
    curves = [link.curves[kind] for link in links]
    transfer = np.zeros_like(wire)
    for tier, curve, flag in zip(tiers[1:], curves[1:], crossed[1:], strict=True):
        transfer = np.maximum(transfer, flag * wire / (tier.bandwidth * curve.efficiency * PAT_RATE))
    base = _outermost([curve.base_seconds for curve in curves], crossed)
    hop = _outermost([curve.rank_seconds for curve in curves], crossed) * PAT_HOP
    together = np.minimum(group.size - 1.0, 1.0)
    latency = together * (base + _ceil_log2(group.size) * hop + group.size * PAT_RANK_SECONDS)
    large = _outermost([curve.large for curve in curves], crossed)
    knee = _outermost([curve.knee for curve in curves], crossed)
    return curve_seconds(latency, transfer, large, knee)


def _tree(
    payload: Floats,
    group: Group,
    tiers: Sequence[Tier],
    links: Sequence[Link],
    crossed: Sequence[Floats],
    reduces: NDArray[np.bool_],
) -> Floats:
    """All-reduce up and down a double binary tree of domains, reduced in the switch where it can be.

    A node of the two trees sends payload once where there are two domains, 1.5 times where there are
    three and twice beyond (leaf in one tree: up; inner in the other: up and down to two children).
    """
    curves = [link.curves["all_reduce"] for link in links]
    switch = links[0].curves.get("in_switch", curves[0])
    g = group.inside[0]
    rate = tiers[0].bandwidth * _share(tiers[0], links[0], g)
    ringed = (2.0 * (g - 1.0) / g + curves[0].own_copy / g) * payload / (rate * curves[0].efficiency)
    switched = payload / (rate * switch.efficiency)
    transfer = crossed[0] * np.where(reduces, switched, ringed)
    base = np.where(reduces, switch.base_seconds, curves[0].base_seconds)
    per_rank = np.where(reduces, switch.rank_seconds, curves[0].rank_seconds)
    latency = crossed[0] * base + (g - 1.0) * per_rank
    for t in range(1, len(tiers)):
        volume = np.minimum(group.spans[t - 1] / 2.0, 2.0) * payload / _lanes(tiers[t], group.inside[t - 1])
        rate_t = tiers[t].bandwidth * curves[t].efficiency
        transfer = np.maximum(transfer, crossed[t] * volume / rate_t)
        hops = _ceil_log2(group.spans[t - 1]) - _ceil_log2(group.spans[t])
        latency = latency + hops * curves[t].rank_seconds + crossed[t] * curves[t].base_seconds
    large = _outermost([curve.large for curve in curves], crossed)
    knee = _outermost([curve.knee for curve in curves], crossed)
    alone = reduces & (group.spans[0] == 1.0)
    large = np.where(alone, switch.large, large)
    knee = np.where(alone, switch.knee, knee)
    return curve_seconds(latency, transfer, large, knee)


# ---------------------------------------------------------------- all_to_all


def _all_to_all(
    payload: Floats,
    group: Group,
    tiers: Sequence[Tier],
    links: Sequence[Link],
    once: Floats | None = None,
    passed_on: Floats | float = 1.0,
) -> CollectiveCost:
    """Every rank sends 1/n of its payload to every rank; what leaves a domain passes the rank's own NIC.

    `once`: see `leaving` of price; what a domain gets then moves inside it (hierarchical dispatch, DeepSeek-V3,
    arXiv 2412.19437, section 3.2.2), at the same time as the next piece crosses. `passed_on`: its `inside`.
    """
    n = group.size
    curves = [link.curves["all_to_all"] for link in links]
    crossed = _crossed(group)
    g = group.inside[0]
    rate = tiers[0].bandwidth * curves[0].efficiency * _share(tiers[0], links[0], g)
    inside = n if once is None else g
    transfer = crossed[0] * (g - 1.0 + curves[0].own_copy) / inside * passed_on * payload / rate
    base = crossed[0] * curves[0].base_seconds
    latency = (g - 1.0) * curves[0].rank_seconds
    for t in range(1, len(tiers)):
        leaving = (n - group.inside[t - 1]) / n * payload
        leaving = leaving if once is None else leaving * once
        through = leaving / (tiers[t].bandwidth * curves[t].efficiency)
        transfer = np.maximum(transfer, crossed[t] * through)
        base = np.maximum(base, crossed[t] * curves[t].base_seconds)
        peers = group.inside[t] - group.inside[t - 1]
        latency = latency + crossed[t] * peers * curves[t].rank_seconds
    large = _outermost([curve.large for curve in curves], crossed)
    knee = _outermost([curve.knee for curve in curves], crossed)
    seconds = curve_seconds(base + latency, transfer, large, knee)
    wire = (n - 1.0) / n * payload
    if once is not None:
        wire = (g - 1.0) / g * payload * passed_on + (n - g) / n * payload * once
    return CollectiveCost(seconds, wire, np.where(n > 1.0, DIRECT, NONE), seconds)


# ---------------------------------------------------------------- send_recv, ring_exchange


def _pair_share(tier: Tier) -> float:
    """Share of a GPU's links that one pair can use: one link of a mesh; a quarter of a torus's (assumed:
    one of the four directions of a 2D torus)."""
    if tier.topology == "mesh":
        return 1.0 / max(tier.size - 1.0, 1.0)
    return 0.25 if tier.topology == "torus" else 1.0


def _neighbours(
    kind: str, payload: Floats, group: Group, tiers: Sequence[Tier], links: Sequence[Link]
) -> CollectiveCost:
    """One send to the neighbour, or the n-1 of a ring, over the slowest tier that lies between."""
    n = group.size
    crossed = _crossed(group)
    step = np.zeros_like(payload * n)
    for tier, link, flag in zip(tiers, links, crossed, strict=True):
        curve = link.curves["send_recv"]
        share = link.share_by_ranks[1] if len(link.share_by_ranks) > 1 else _pair_share(tier)
        transfer = flag * payload / (tier.bandwidth * curve.efficiency * share)
        latency = flag * (curve.base_seconds + curve.rank_seconds)
        large, knee = np.full_like(latency, curve.large), np.full_like(latency, curve.knee)
        step = np.maximum(step, curve_seconds(latency, transfer, large, knee))
    repeats = n - 1.0 if kind == "ring_exchange" else np.minimum(n - 1.0, 1.0)
    algorithm = np.where(n > 1.0, RING if kind == "ring_exchange" else DIRECT, NONE)
    return CollectiveCost(repeats * step, repeats * payload, algorithm, step)
