"""Prices of one micro-batch on one device: every node of the lowered Program, for all rows at once.

Arrays are [..., rows]. What experts have no part in is priced on the rows that differ in other degrees, and works
that are alike are priced once. Sums over nodes are left to right, so that a row alone gives the bits that it gives
in a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.exchanges import Exchange, Rows, TwoRows, evaluate_terms, exposures, price_exchanges, span
from distplan.costmodel.host import host_operators
from distplan.costmodel.layout import TP
from distplan.costmodel.lower import CATEGORIES, PHASES, Lowered, Terms, Work
from distplan.costmodel.model import DTYPE_BYTES, Moe
from distplan.costmodel.strategy import Floats
from distplan.hardware.cluster import Cluster
from distplan.hardware.collectives import price
from distplan.hardware.rates import BACKWARD_OVER_FORWARD, Rates, attention_seconds, gemm_seconds, memory_seconds

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


@dataclass(frozen=True, slots=True)
class Prices:
    """Of one pass of each work by its position, one entry per row that it depends on."""

    seconds: dict[int, Floats] = field(default_factory=dict)
    full: dict[int, Floats] = field(default_factory=dict)
    kernel: dict[int, Floats] = field(default_factory=dict)
    issued: dict[int, Floats] = field(default_factory=dict)
    """operators of the host"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCosts:
    """Per segment and micro-batch. `seconds` and flops are [phase, segment, row]."""

    seconds: Floats
    passes: Floats
    """[category, segment, row]: seconds of forward and backward, without what is recomputed"""
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
    prices: Prices
    """what the sums above are of"""


def local_costs(
    lowered: Lowered,
    num_segments: int,
    rows: TwoRows,
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
    """Seconds, FLOPs and bytes of every segment.

    `routings`: experts of the segments whose tokens are sent once to a scale-up domain. `experts_behind_all`: what
    goes to experts hides behind all that the segment computes, of another micro-batch. `scattered`: each rank of tp
    sends its part of a boundary activation that all of them hold (Narayanan et al. 2021, section 4.1). `captured`:
    parts of a layer that CUDA graphs replay.
    """
    works, prices = lowered.works, Prices()
    costs: dict[int, tuple[Floats, Floats, Floats]] = {}
    dense = lowered.sizes.evaluate(rows.dense.symbols)
    table = lowered.sizes.evaluate(rows.all.symbols) if lowered.experts else dense[:, rows.index]
    levels = (
        (rows.dense, dense, [at for at in range(len(works)) if at not in lowered.experts]),
        (rows.all, table, sorted(lowered.experts)),
    )
    kernels = {kind: passes[1] for name in unfused for kind, passes in UNFUSED[name].items()}
    for of, sizes, positions in levels:
        _gemms(works, positions, sizes, rates, prices)
        _attentions(works, positions, sizes, rates, prices, causal=causal, kernel_time=kernel_time)
        _kernels(works, positions, sizes, rates, prices, unfused)
        costs |= price_exchanges(works, positions, of, sizes, cluster, routings)
        issued = host_operators([works[at] for at in positions], sizes, captured, of.symbols, kernels)
        prices.issued.update(zip(positions, issued, strict=True))
    exposed = exposures(lowered, costs, prices.seconds, rows.index, hides, experts_behind_all)
    prices.seconds.update(exposed)
    sums = [_sums(works, positions, prices) for _, _, positions in levels]
    leading = {name: (len(PHASES),) for name in ("phases", "full", "kernel", "issued")} | {"passes": (len(CATEGORIES),)}
    whole = {
        name: _whole(cells, sums[1][name], rows.index, (*leading.get(name, ()), num_segments))
        for name, cells in sums[0].items()
    }
    boundary, gather = _boundary(lowered, dense, rows.dense, cluster, scattered)
    return LocalCosts(
        seconds=whole["phases"],
        passes=whole["passes"],
        full_flops=whole["full"],
        kernel_flops=whole["kernel"],
        attention_flops=whole["attention"],
        weight_gradient=whole["weight_gradient"],
        saved_bytes=np.array([evaluate_terms(t, table) for t in lowered.saved]),
        remade_bytes=np.array([evaluate_terms(t, table) for t in lowered.remade]),
        transient_bytes=np.array([_most(sets, lowered, dense, table, rows.index) for sets in lowered.transients]),
        boundary_bytes=boundary[rows.index],
        boundary_gather=gather[rows.index],
        exchanges=tuple(
            Exchange(work=works[at], payload_bytes=given, wire_bytes=wire, seconds=time, exposed_seconds=exposed[at])
            for at, (given, wire, time) in sorted(costs.items())
        ),
        host_operators=whole["issued"],
        prices=prices,
    )


def _boundary(lowered: Lowered, table: Floats, rows: Rows, cluster: Cluster, scattered: bool) -> tuple[Floats, Floats]:
    """(bytes a rank sends, seconds of the gather that follows)"""
    number, factor = lowered.boundary
    whole = table[number] * factor
    if lowered.boundary_sharded or not scattered:
        return whole, np.zeros_like(whole)
    group = span(TP, rows, cluster)
    part = whole / group.size
    return part, price("all_gather", part, group, cluster).seconds


Cells = dict[tuple[int, ...], Floats]
"""rows by what they are summed over; what nothing adds to is not there"""


def _sums(works: Sequence[Work], positions: Iterable[int], prices: Prices) -> dict[str, Cells]:
    """What LocalCosts has of these works: seconds by category first, from left to right."""
    by_category: Cells = {}
    cells: dict[str, Cells] = {
        name: {} for name in ("phases", "passes", "full", "kernel", "attention", "weight_gradient", "issued")
    }
    for at in positions:
        work = works[at]
        if work.leader >= 0:
            continue
        taken = work.times * prices.seconds[at]
        _add(cells["issued"], (work.phase, work.segment), prices.issued[at])
        _add(by_category, (work.phase, work.category, work.segment), taken)
        if work.accumulate:
            _add(cells["weight_gradient"], (work.segment,), taken)
        if work.category < 2:
            _add(cells["full"], (work.phase, work.segment), work.times * prices.full[at])
            _add(cells["kernel"], (work.phase, work.segment), work.times * prices.kernel[at])
            if work.category == 1 and work.phase == 0:
                _add(cells["attention"], (work.segment,), work.times * prices.full[at])
    for phase, category, segment in sorted(by_category):
        taken = by_category[phase, category, segment]
        _add(cells["phases"], (phase, segment), taken)
        if phase != PHASES.index("recompute"):
            _add(cells["passes"], (category, segment), taken)
    return cells


def _add(cells: Cells, key: tuple[int, ...], more: Floats) -> None:
    cells[key] = cells[key] + more if key in cells else more


def _whole(of_dense: Cells, of_experts: Cells, index: NDArray[np.int64], shape: tuple[int, ...]) -> Floats:
    """Both together, for all rows."""
    whole = np.zeros((*shape, len(index)))
    for key, values in of_dense.items():
        whole[key] = values[index]
    for key, values in of_experts.items():
        whole[key] += values
    return whole


def _most(sets: Sequence[Terms], lowered: Lowered, dense: Floats, table: Floats, index: NDArray[np.int64]) -> Floats:
    """Bytes of the largest of some sets of values."""
    most = np.zeros(dense.shape[1])
    of_experts = [terms for terms in sets if any(number in lowered.expert_sizes for number, _ in terms)]
    for terms in sets:
        if terms not in of_experts:
            most = np.maximum(most, evaluate_terms(terms, dense))
    most = most[index]
    for terms in of_experts:
        most = np.maximum(most, evaluate_terms(terms, table))
    return most


def _gemms(works: Sequence[Work], positions: Iterable[int], table: Floats, rates: Rates, prices: Prices) -> None:
    """Matrix products at the rate of a thermally settled run; those that are part of a merged one cost nothing.

    Operands of narrow products are cast by kernels of their own (casting.py).
    """
    names = ("m", "n", "k", "batch", "groups")
    joined: dict[int, list[Work]] = {}
    for at in positions:
        if works[at].leader >= 0:
            joined.setdefault(works[at].leader, []).append(works[at])
            prices.seconds[at] = np.zeros(table.shape[1])
    groups: dict[tuple[str, float], dict[tuple[tuple[int, ...], ...], list[int]]] = {}
    for at in positions:
        work = works[at]
        if work.category == 0 and work.leader < 0:
            parts: list[tuple[int, ...]] = [(getattr(work, name),) for name in names]
            for member in joined.get(at, ()):
                parts[names.index(member.grows)] += (getattr(member, member.grows),)
            groups.setdefault((work.dtype, work.accumulate), {}).setdefault(tuple(parts), []).append(at)
    for (dtype, accumulate), alike in groups.items():
        m, n, k, batch, products = (
            np.array([_added(part, table) for part in parts]) for parts in zip(*alike, strict=True)
        )
        seconds = (
            gemm_seconds(rates, m, n, k, dtype, batch=batch, groups=products, accumulate=accumulate, cast_input=False)
            / rates.sustained
        )
        flops = 2.0 * m * n * k * batch * products
        for row, same in enumerate(alike.values()):
            prices.seconds.update(dict.fromkeys(same, seconds[row]))
            prices.full.update(dict.fromkeys(same, flops[row]))
            prices.kernel.update(dict.fromkeys(same, flops[row]))


def _added(numbers: tuple[int, ...], table: Floats) -> Floats:
    total: Floats = table[numbers[0]]
    for number in numbers[1:]:
        total = total + table[number]
    return total


def _attentions(
    works: Sequence[Work],
    positions: Iterable[int],
    table: Floats,
    rates: Rates,
    prices: Prices,
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
    for at in positions:
        work = works[at]
        if work.category != 1:
            continue
        numbers = (work.m, work.n, work.k, work.groups, work.batch)
        q_len, kv_len, head_dim, v_head_dim, lines = (table[number] for number in numbers)
        backward = work.kind == "attention_grad"
        square = 2.0 * lines * q_len * kv_len * (head_dim + v_head_dim)
        length = np.where(q_len < kv_len, 0.5 * q_len, kv_len) * work.length
        priced = square * work.share
        masked = causal and not work.full
        seconds = attention_seconds(rates, priced, head_dim, length, length, masked, backward, work.dtype) * (
            kernel_time / rates.sustained
        )
        if work.ring:
            steps = kv_len / q_len - 1.0
            merged = (lines * q_len) * (head_dim + v_head_dim if backward else v_head_dim)
            latency = (rates.attention_backward if backward else rates.attention_forward).latency
            moved = steps * (merged * 3.0 * DTYPE_BYTES[work.dtype])
            seconds += memory_seconds(rates, moved, steps) + steps * latency
        prices.seconds[at] = seconds
        prices.full[at] = (square * work.share if work.full else square) * (2.0 if backward else 1.0)
        executed = square * (work.share * 0.5 if masked else work.share)
        prices.kernel[at] = executed * (BACKWARD_OVER_FORWARD if backward else 1.0)


def _kernels(
    works: Sequence[Work], positions: Iterable[int], table: Floats, rates: Rates, prices: Prices, unfused: Sequence[str]
) -> None:
    passes = dict(FUSED) | {kind: costs for name in unfused for kind, costs in UNFUSED[name].items()}
    alike: dict[tuple[Terms, tuple[float, float], int], list[int]] = {}
    for at in positions:
        if works[at].category == 2:
            costs = passes.get(works[at].kind, (1.0, works[at].launches))
            sorted_by = works[at].groups if works[at].kind == "sort" else -1
            alike.setdefault((works[at].terms, costs, sorted_by), []).append(at)
    for (terms, (times, launches), experts), same in alike.items():
        seconds = memory_seconds(rates, evaluate_terms(terms, table) * times, launches)
        if experts >= 0:
            seconds = seconds * np.minimum(table[experts] - 1.0, 1.0)
        prices.seconds.update(dict.fromkeys(same, seconds))
