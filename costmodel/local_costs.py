"""Prices of one micro-batch on one device: every node of the lowered Program, for all rows at once.

Arrays are [..., rows]. Sums over nodes are left to right (np.add.accumulate), so that a row alone
gives the bits that it gives in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.host import host_operators
from distplan.costmodel.layout import CP, TP
from distplan.costmodel.lower import CATEGORIES, PHASES, Lowered, Work, axis_class
from distplan.costmodel.model import DTYPE_BYTES, Moe
from distplan.costmodel.strategy import Floats
from distplan.hardware.cluster import Cluster
from distplan.hardware.collectives import price
from distplan.hardware.groups import Group, group_span
from distplan.hardware.rates import BACKWARD_OVER_FORWARD, Rates, attention_seconds, gemm_seconds, memory_seconds

Terms = tuple[tuple[int, float], ...]

UNFUSED: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "rope": {"rope": (4.5, 5.0), "rope_grad": (4.5, 5.0)},
    "norm": {"norm": (2.5, 4.0), "norm_grad": (5.7, 8.0)},
    "sort": {"sort": (1.0, 1.0)},
    "expert_bias": {"expert_bias": (14.0, 6.0), "expert_bias_grad": (20.0, 9.0)},
}
"""(bytes over those of one kernel that reads its inputs and writes its outputs, kernels) of what is not fused.

Counted from torch's eager operators: rope multiplies by cos (reads 1 tensor, writes 1), negates half (1/2, 1/2),
concatenates (1, 1), multiplies by sin (1, 1) and adds (2, 1): 9 for 2, in whatever dtype. A norm in fp32 squares
(4, 4), takes the mean (4) and multiplies (4, 4): 20 for 8. Its gradient multiplies by the factor (4, 4) and by the
value (8, 4), sums that (4), spreads the mean's (4), raises to the power 1 (4, 4), doubles (4, 4), multiplies (8, 4)
and adds (8, 4): 68 for 12 (torch/csrc/autograd/FunctionsManual.cpp, pow_backward and mean_backward). Casts are
operators of their own (decompose.py).
The bias behind experts times its slot's weight in fp32, expert by expert (Megatron Core, moe/experts.py, _apply_bias):
product (0, 4), sum (6, 4), concatenation (4, 4) and cast (4, 2) are 28 for the 2 read; backward two casts (6, 6), two
products and sums (12, 12) and a concatenation (4) are 40 for 2.
"""
FUSED: Mapping[str, tuple[float, float]] = {"expert_bias": (0.0, 0.0), "sort": (0.0, 0.0)}
"""what costs nothing where it is fused: the bias with the product, the order of experts with the dispatch"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One collective of a segment, per micro-batch and row."""

    work: Work
    payload_bytes: Floats
    wire_bytes: Floats
    seconds: Floats
    exposed_seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCosts:
    """Per segment and micro-batch. `seconds` is [phase, category, segment, row]; flops [phase, segment, row]."""

    seconds: Floats
    full_flops: Floats
    """matrix products and attention over the whole square of scores"""
    kernel_flops: Floats
    """what kernels execute: half of it if causal, 2.5 times forward in flash attention's backward"""
    attention_flops: Floats
    """[segment, row]: the part of the forward's full_flops that is attention over the square"""
    saved_bytes: Floats
    remade_bytes: Floats
    transient_bytes: Floats
    boundary_bytes: Floats
    """what a rank sends to the next stage"""
    boundary_gather: Floats
    """seconds in which the next stage's ranks gather what each of them was sent a part of"""
    weight_gradient: Floats
    """seconds [segment, row] of backward that nothing before it in the pipeline waits for"""
    exchanges: tuple[Exchange, ...]
    host_operators: Floats
    """operators that the host issues, per [phase, segment, row]"""


def evaluate_terms(terms: Terms, table: Floats) -> Floats:
    """Bytes of Σ size · factor; zero terms give zeros."""
    total = np.zeros(table.shape[1])
    for number, factor in terms:
        total = total + table[number] * factor
    return total


def span(axes: Sequence[str], symbols: Mapping[str, Floats], strides: Mapping[str, Floats], cluster: Cluster) -> Group:
    """The process group of some mesh axes."""
    inner_first = sorted(axes, key=lambda axis: float(strides[axis][0]))
    return group_span([(symbols[a], strides[a]) for a in inner_first], cluster, symbols.get("gpus"))


def local_costs(
    lowered: Lowered,
    num_segments: int,
    symbols: Mapping[str, Floats],
    strides: Mapping[str, Floats],
    cluster: Cluster,
    rates: Rates,
    *,
    causal: bool,
    hides: Mapping[str, float],
    kernel_time: float = 1.0,
    unfused: Sequence[str] = (),
    routings: Mapping[int, Moe] = MappingProxyType({}),
    experts_behind_all: bool = False,
    scattered: bool = False,
    captured: Sequence[str] = (),
) -> LocalCosts:
    """Seconds, FLOPs and bytes of every segment, for rows of `symbols` (varying dims and degrees).

    `routings`: experts of the segments whose tokens are sent once to a scale-up domain. `experts_behind_all`: what
    goes to experts hides behind all that the segment computes, of another micro-batch. `scattered`: each rank of tp
    sends its part of a boundary activation that all of them hold (Narayanan et al. 2021, section 4.1). `captured`:
    parts of a layer that CUDA graphs replay.
    """
    table = lowered.sizes.evaluate(symbols)
    rows = table.shape[1]
    works = lowered.works
    seconds = np.zeros((len(works), rows))
    full = np.zeros((len(works), rows))
    kernel = np.zeros((len(works), rows))
    _gemms(works, table, rates, seconds, full, kernel)
    _attentions(works, table, rates, symbols, seconds, full, kernel, causal=causal, kernel_time=kernel_time)
    _kernels(works, table, rates, seconds, unfused)
    exchanges = _exchanges(works, table, symbols, strides, cluster, seconds, hides, routings, experts_behind_all)
    for at, exchange in exchanges.items():
        seconds[at] = exchange.exposed_seconds
    shape = (len(PHASES), len(CATEGORIES), num_segments, rows)
    totals = np.zeros(shape)
    full_flops = np.zeros((len(PHASES), num_segments, rows))
    kernel_flops = np.zeros((len(PHASES), num_segments, rows))
    attention = np.zeros((num_segments, rows))
    weight_gradient = np.zeros((num_segments, rows))
    kernels = {kind: costs[1] for name in unfused for kind, costs in UNFUSED[name].items()}
    operators = host_operators(works, table, captured, symbols, kernels)
    issued = np.zeros((len(PHASES), num_segments, rows))
    for at, work in enumerate(works):
        if work.times != 1.0:
            for each in (seconds, full, kernel):
                each[at] *= work.times
        totals[work.phase, work.category, work.segment] += seconds[at]
        issued[work.phase, work.segment] += operators[at]
        if work.accumulate:
            weight_gradient[work.segment] += seconds[at]
        if work.category < 2:
            full_flops[work.phase, work.segment] += full[at]
            kernel_flops[work.phase, work.segment] += kernel[at]
            if work.category == 1 and work.phase == 0:
                attention[work.segment] += full[at]
    transients = []
    for sets in lowered.transients:
        most = np.zeros(rows)
        for terms in sets:
            most = np.maximum(most, evaluate_terms(terms, table))
        transients.append(most)
    boundary, gather = _boundary(lowered, table, symbols, strides, cluster, scattered)
    return LocalCosts(
        seconds=totals,
        full_flops=full_flops,
        kernel_flops=kernel_flops,
        attention_flops=attention,
        weight_gradient=weight_gradient,
        saved_bytes=np.array([evaluate_terms(t, table) for t in lowered.saved]),
        remade_bytes=np.array([evaluate_terms(t, table) for t in lowered.remade]),
        transient_bytes=np.array(transients),
        boundary_bytes=boundary,
        boundary_gather=gather,
        exchanges=tuple(exchanges.values()),
        host_operators=issued,
    )


def _boundary(
    lowered: Lowered,
    table: Floats,
    symbols: Mapping[str, Floats],
    strides: Mapping[str, Floats],
    cluster: Cluster,
    scattered: bool,
) -> tuple[Floats, Floats]:
    """(bytes a rank sends, seconds of the gather that follows)"""
    number, factor = lowered.boundary
    whole = table[number] * factor
    if lowered.boundary_sharded or not scattered:
        return whole, np.zeros_like(whole)
    group = span(TP, symbols, strides, cluster)
    part = whole / group.size
    return part, price("all_gather", part, group, cluster).seconds


def _gemms(works: Sequence[Work], table: Floats, rates: Rates, seconds: Floats, full: Floats, kernel: Floats) -> None:
    """Matrix products at the rate of a thermally settled run; those that are part of a merged one cost nothing.

    Operands of narrow products are cast by kernels of their own (casting.py).
    """
    joined: dict[int, list[Work]] = {}
    groups: dict[tuple[str, float], list[int]] = {}
    for at, work in enumerate(works):
        if work.category == 0 and work.leader >= 0:
            joined.setdefault(work.leader, []).append(work)
        elif work.category == 0:
            groups.setdefault((work.dtype, work.accumulate), []).append(at)
    names = ("m", "n", "k", "batch", "groups")
    for (dtype, accumulate), positions in groups.items():
        dims = {name: table[[getattr(works[p], name) for p in positions]] for name in names}
        for row, position in enumerate(positions):
            for member in joined.get(position, ()):
                dims[member.grows][row] += table[getattr(member, member.grows)]
        m, n, k, batch, products = dims.values()
        seconds[positions] = (
            gemm_seconds(rates, m, n, k, dtype, batch=batch, groups=products, accumulate=accumulate, cast_input=False)
            / rates.sustained
        )
        full[positions] = kernel[positions] = 2.0 * m * n * k * batch * products


def _attentions(
    works: Sequence[Work],
    table: Floats,
    rates: Rates,
    symbols: Mapping[str, Floats],
    seconds: Floats,
    full: Floats,
    kernel: Floats,
    *,
    causal: bool,
    kernel_time: float,
) -> None:
    """Flash attention; `kernel_time` is that of the runtime's kernel over that of the best one.

    A window w of s tokens executes w/s·(2 − w/s) of the causal half. Under cp a rank holds two of 2·cp pieces of the
    sequence, an early and a late one, so that each executes the same share; kernels are as long as a piece. A ring
    runs one per rank; every further one reads its output and adds it to the running one (Ring Attention, arXiv
    2310.01889, section 3; Transformer Engine's out correction), in backward the gradients.
    """
    for at, work in enumerate(works):
        if work.category != 1:
            continue
        numbers = (work.m, work.n, work.k, work.groups, work.batch)
        q_len, kv_len, head_dim, v_head_dim, lines = (table[number] for number in numbers)
        backward = work.kind == "attention_grad"
        square = 2.0 * lines * q_len * kv_len * (head_dim + v_head_dim)
        length = np.where(q_len < kv_len, 0.5 * q_len, kv_len) * work.length
        priced = square * work.share
        masked = causal and not work.full
        seconds[at] = attention_seconds(rates, priced, head_dim, length, length, masked, backward, work.dtype) * (
            kernel_time / rates.sustained
        )
        if work.ring:
            steps = kv_len / q_len - 1.0
            merged = (lines * q_len) * (head_dim + v_head_dim if backward else v_head_dim)
            latency = (rates.attention_backward if backward else rates.attention_forward).latency
            moved = steps * (merged * 3.0 * DTYPE_BYTES[work.dtype])
            seconds[at] += memory_seconds(rates, moved, steps) + steps * latency
        full[at] = (square * work.share if work.full else square) * (2.0 if backward else 1.0)
        executed = square * (work.share * 0.5 if masked else work.share)
        kernel[at] = executed * (BACKWARD_OVER_FORWARD if backward else 1.0)


def _kernels(works: Sequence[Work], table: Floats, rates: Rates, seconds: Floats, unfused: Sequence[str]) -> None:
    positions = [at for at, work in enumerate(works) if work.category == 2]
    if positions:
        passes = dict(FUSED) | {kind: costs for name in unfused for kind, costs in UNFUSED[name].items()}
        moved = np.array([evaluate_terms(works[p].terms, table) for p in positions])
        costs = np.array([passes.get(works[p].kind, (1.0, works[p].launches)) for p in positions])
        seconds[positions] = memory_seconds(rates, moved * costs[:, :1], costs[:, 1:])
        for position in positions:
            if works[position].kind == "sort":
                seconds[position] *= np.minimum(table[works[position].groups] - 1.0, 1.0)


def _exchanges(
    works: Sequence[Work],
    table: Floats,
    symbols: Mapping[str, Floats],
    strides: Mapping[str, Floats],
    cluster: Cluster,
    seconds: Floats,
    hides: Mapping[str, float],
    routings: Mapping[int, Moe],
    experts_behind_all: bool,
) -> dict[int, Exchange]:
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for at, work in enumerate(works):
        if work.axes:
            groups.setdefault((work.kind, work.axes), []).append(at)
    costs: dict[int, tuple[Floats, Floats, Floats]] = {}
    spans: dict[tuple[str, ...], Group] = {}
    for (kind, axes), positions in groups.items():
        if axes not in spans:
            spans[axes] = span(axes, symbols, strides, cluster)
        payload = np.array([evaluate_terms(works[p].terms, table) for p in positions])
        group = spans[axes]
        if kind == "all_to_all" and axis_class(axes) == "ep" and routings:
            moes = [routings[works[p].segment] for p in positions]
            domains = np.array([reached(moe, group.size / group.inside[0]) for moe in moes])
            ranks = np.array([reached(moe, group.size) for moe in moes])
            sent = payload * _with_tokens(works, positions, payload)
            cost = price(kind, sent, group, cluster, leaving=domains, inside=ranks)
        else:
            cost = price(kind, payload, group, cluster)
        for row, position in enumerate(positions):
            costs[position] = (payload[row], cost.wire_bytes[row], cost.seconds[row])
    exposed = _exposed(works, costs, seconds, hides)
    if experts_behind_all and hides.get("ep", 0.0):
        exposed |= _between_micro_batches(works, costs, seconds, hides["ep"])
    return {
        at: Exchange(work=works[at], payload_bytes=payload, wire_bytes=wire, seconds=time, exposed_seconds=exposed[at])
        for at, (payload, wire, time) in sorted(costs.items())
    }


SMALL = 1.0 / 64.0
"""of the largest payload that a segment sends to experts: what is smaller are the slots' weights (4 bytes for a
hidden state)"""


def _with_tokens(works: Sequence[Work], positions: Sequence[int], payload: Floats) -> Floats:
    """0 for the weights of slots, which travel in the tokens' own messages where those go once; else 1."""
    most: dict[int, Floats] = {}
    for row, position in enumerate(positions):
        segment = works[position].segment
        most[segment] = np.maximum(most.get(segment, payload[row]), payload[row])
    return np.array([payload[row] > SMALL * most[works[p].segment] for row, p in enumerate(positions)], dtype=float)


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


def _between_micro_batches(
    works: Sequence[Work], costs: Mapping[int, tuple[Floats, Floats, Floats]], seconds: Floats, share: float
) -> dict[int, Floats]:
    """What is left of dispatch and combine of both passes after all that the segment computes in both passes."""
    nothing = np.zeros(seconds.shape[1])
    cover: dict[int, Floats] = {}
    total: dict[int, Floats] = {}
    members = [at for at in sorted(costs) if axis_class(works[at].axes) == "ep"]
    for at in members:
        total[works[at].segment] = total.get(works[at].segment, nothing) + costs[at][2]
    for at, work in enumerate(works):
        if not work.axes and work.phase != PHASES.index("recompute"):
            cover[work.segment] = cover.get(work.segment, nothing) + seconds[at]
    exposed = {}
    for at in members:
        segment = works[at].segment
        covered = np.minimum(total[segment], cover[segment]) / np.maximum(total[segment], np.finfo(np.float64).tiny)
        exposed[at] = costs[at][2] * (1.0 - share * covered)
    return exposed


def _exposed(
    works: Sequence[Work],
    costs: Mapping[int, tuple[Floats, Floats, Floats]],
    seconds: Floats,
    hides: Mapping[str, float],
) -> dict[int, Floats]:
    """What is left of each collective after the works that it hides behind; those that share them add up first.

    `hides`: collective class -> the share of what could hide that really does.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}
    share: dict[int, float] = {}
    exposed: dict[int, Floats] = {}
    for at in sorted(costs):
        work = works[at]
        axis = axis_class(work.axes)
        name = f"{axis}_backward" if axis == "tp" and work.phase == PHASES.index("backward") else axis
        overlaps = work.kind == "ring_exchange" if set(work.axes) <= set(CP) else True
        share[at] = hides.get(name, 0.0)
        if work.behind and overlaps and share[at]:
            sharing.setdefault(work.behind, []).append(at)
        else:
            exposed[at] = costs[at][2]
    for behind, members in sharing.items():
        total = costs[members[0]][2]
        for at in members[1:]:
            total = total + costs[at][2]
        cover = seconds[behind[0]]
        for position in behind[1:]:
            cover = cover + seconds[position]
        covered = np.minimum(total, cover) / np.maximum(total, np.finfo(np.float64).tiny)
        for at in members:
            exposed[at] = costs[at][2] * (1.0 - share[at] * covered)
    return exposed


def category_total(costs: LocalCosts, phase: int) -> Floats:
    """Seconds of a phase per [segment, row], over categories left to right."""
    total: NDArray[np.float64] = costs.seconds[phase, 0]
    for category in range(1, len(CATEGORIES)):
        total = total + costs.seconds[phase, category]
    return total
