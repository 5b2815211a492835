"""Prices of the collectives of a lowered Program, and what is left of them after what hides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.layout import CP
from distplan.costmodel.lower import PHASES, Lowered, Terms, Work, axis_class
from distplan.costmodel.model import Moe
from distplan.costmodel.strategy import Floats
from distplan.hardware.cluster import Cluster
from distplan.hardware.collectives import price
from distplan.hardware.groups import Group, group_span


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of degrees: varying dims and degrees of the mesh axes by name, and the axes' strides."""

    symbols: Mapping[str, Floats]
    strides: Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class TwoRows:
    """All rows, and those that differ in other degrees than the experts': `index` says which of them each row is."""

    all: Rows
    dense: Rows
    index: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One collective of a segment, per micro-batch and row: all rows where experts have a part in it, else the rows
    that differ in other degrees. A single strategy has one row of either."""

    work: Work
    payload_bytes: Floats
    wire_bytes: Floats
    seconds: Floats
    exposed_seconds: Floats


Costs = Mapping[int, tuple[Floats, Floats, Floats]]
"""position of a collective -> payload and wire bytes, seconds"""


def evaluate_terms(terms: Terms, table: Floats) -> Floats:
    """Bytes of Σ size · factor; zero terms give zeros."""
    total = np.zeros(table.shape[1])
    for number, factor in terms:
        total = total + table[number] * factor
    return total


def span(axes: Sequence[str], rows: Rows, cluster: Cluster) -> Group:
    """The process group of some mesh axes."""
    inner_first = [axis for axis in rows.strides if axis in axes]
    return group_span([(rows.symbols[a], rows.strides[a]) for a in inner_first], cluster, rows.symbols.get("gpus"))


def price_exchanges(
    works: Sequence[Work],
    positions: Sequence[int],
    rows: Rows,
    table: Floats,
    cluster: Cluster,
    routings: Mapping[int, Moe],
) -> dict[int, tuple[Floats, Floats, Floats]]:
    """Costs of the collectives among the works at `positions`, those that are alike priced once."""
    groups: dict[tuple[str, tuple[str, ...]], dict[tuple[Terms, int | None], list[int]]] = {}
    for at in positions:
        work = works[at]
        if work.axes:
            routed = routings and work.kind == "all_to_all" and axis_class(work.axes) == "ep"
            alike = groups.setdefault((work.kind, work.axes), {})
            alike.setdefault((work.terms, work.segment if routed else None), []).append(at)
    costs: dict[int, tuple[Floats, Floats, Floats]] = {}
    spans: dict[tuple[str, ...], Group] = {}
    for (kind, axes), alike in groups.items():
        if axes not in spans:
            spans[axes] = span(axes, rows, cluster)
        payload = np.array([evaluate_terms(terms, table) for terms, _ in alike])
        group = spans[axes]
        segments = [segment for _, segment in alike]
        moes = [routings[segment] for segment in segments if segment is not None]
        if moes:
            domains = np.array([reached(moe, group.size / group.inside[0]) for moe in moes])
            ranks = np.array([reached(moe, group.size) for moe in moes])
            sent = payload * _with_tokens(segments, payload)
            cost = price(kind, sent, group, cluster, leaving=domains, inside=ranks)
        else:
            cost = price(kind, payload, group, cluster)
        for row, same in enumerate(alike.values()):
            costs |= dict.fromkeys(same, (payload[row], cost.wire_bytes[row], cost.seconds[row]))
    return costs


SMALL = 1.0 / 64.0
"""of the largest payload that a segment sends to experts: what is smaller are the slots' weights (4 bytes for a
hidden state)"""


def _with_tokens(segments: Sequence[int | None], payload: Floats) -> Floats:
    """0 for the weights of slots, which travel in the tokens' own messages where those go once; else 1."""
    most: dict[int | None, Floats] = {}
    for segment, given in zip(segments, payload, strict=True):
        most[segment] = np.maximum(most.get(segment, given), given)
    return np.array([given > SMALL * most[at] for at, given in zip(segments, payload, strict=True)], dtype=float)


def reached(moe: Moe, parts: Floats) -> Floats:
    """Of the slots of a token, the share that are the first in their part, of so many parts of the experts' ranks.

    Parts (scale-up domains, or ranks) that k experts of a token are in: R·(1 − (1 − 1/R)^k) of R in reach by uniform
    draws. Node-limited routing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) has those in reach that hold one of the
    top_groups of groups, drawn without replacement.
    """
    groups, away = float(moe.groups), np.ones_like(parts)
    for drawn in range(moe.top_groups):
        away = away * np.maximum(0.0, (groups - groups / parts - drawn) / (groups - drawn))
    reach = np.where(parts < groups, parts * (1.0 - away), parts * (moe.top_groups / groups))
    reach = np.maximum(1.0, reach)
    missed, share = np.ones_like(reach), 1.0 - 1.0 / reach
    for _ in range(moe.top_k):
        missed = missed * share
    found: Floats = reach * (1.0 - missed) / moe.top_k
    return found


def exposures(
    lowered: Lowered,
    costs: Costs,
    seconds: Mapping[int, Floats],
    index: NDArray[np.int64],
    hides: Mapping[str, float],
    experts_behind_all: bool,
) -> dict[int, Floats]:
    """What is left of each collective after the works that it hides behind; those that share them add up first.

    `seconds` are those of the other works, `hides` what share of what could hide a class of collective really does.
    `experts_behind_all`: what goes to experts hides behind all that the segment computes, of another micro-batch.
    """

    def of_all(at: int) -> Floats:
        return seconds[at] if at in lowered.experts else seconds[at][index]

    exposed: dict[int, Floats] = {}
    sharing: dict[tuple[int, ...], list[int]] = {}
    share: dict[int, float] = {}
    for at in sorted(costs):
        work = lowered.works[at]
        axis = axis_class(work.axes)
        name = f"{axis}_backward" if axis == "tp" and work.phase == PHASES.index("backward") else axis
        overlaps = work.kind == "ring_exchange" if set(work.axes) <= set(CP) else True
        share[at] = hides.get(name, 0.0)
        if work.behind and overlaps and share[at]:
            sharing.setdefault(work.behind, []).append(at)
        else:
            exposed[at] = costs[at][2]
    for behind, members in sharing.items():
        cover = [of_all(at) if members[0] in lowered.experts else seconds[at] for at in behind]
        covered = _covered([costs[at][2] for at in members], cover)
        exposed |= {at: costs[at][2] * (1.0 - share[at] * covered) for at in members}
    if not experts_behind_all or not hides.get("ep", 0.0):
        return exposed
    by_segment: dict[int, list[int]] = {}
    for at in sorted(costs):
        if axis_class(lowered.works[at].axes) == "ep":
            by_segment.setdefault(lowered.works[at].segment, []).append(at)
    for segment, members in by_segment.items():
        computed = [at for at, work in enumerate(lowered.works) if work.segment == segment and not work.axes]
        both = [of_all(at) for at in computed if lowered.works[at].phase != PHASES.index("recompute")]
        covered = _covered([costs[at][2] for at in members], both)
        exposed |= {at: costs[at][2] * (1.0 - hides["ep"] * covered) for at in members}
    return exposed


def _covered(collectives: Sequence[Floats], works: Sequence[Floats]) -> Floats:
    """Part of the collectives, one after the other, that takes no longer than the works, one after the other."""
    total, cover = collectives[0], works[0]
    for more in collectives[1:]:
        total = total + more
    for more in works[1:]:
        cover = cover + more
    covered: Floats = np.minimum(total, cover) / np.maximum(total, np.finfo(np.float64).tiny)
    return covered
