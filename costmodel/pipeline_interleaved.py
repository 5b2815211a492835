"""The longest path of interleaved 1F1B (arXiv 2104.04473, section 2.2) with uneven chunks and message times.

Stage s numbers its forwards k = 0..m·v−1: rows of pp micro-batches, a row per chunk, v rows to a group of pp
micro-batches; backwards the same with the chunks in reverse. It runs w = 2(pp−1−s) + (v−1)pp warm-up forwards, then
forward w+i and backward i in turn. Read backwards in time the schedule is itself with f and b exchanged, so one
function gives the way in (to the first backward of each stage) and the way out (from its last forward).

In the middle a path that stays on one stage pays what that computes; one that changes stages pays in each slot for at
most one forward and one backward. The chunks that run forward at the same time are pp neighbours in the model, so if
the dearest of every pp neighbours together cost hardly more than the heaviest stage, staying is the longest path, and
a row is *settled*. Other rows, those whose messages take longer than a job, and those with so few micro-batches that
there is hardly a middle are followed slot by slot (pipeline_waves.py). With m = pp all forwards come first, then all
backwards, and each half is exact.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.pipeline_waves import follow_slots

Floats = NDArray[np.float64]

SETTLED = 0.01
"""share of a step that a path may gain by changing stages before the row is followed slot by slot: an accuracy"""
BLOCK = 2048
"""rows worked on at a time, so that a slot's arrays stay in the processor's cache; changes no bit"""


def interleaved(
    f: list[Floats], b: list[Floats], count: list[int], p2p: Floats, m: Floats, pp: int, vpp: int, follow: bool
) -> Floats:
    """Seconds of interleaved 1F1B per row; see pipeline.py for the shapes. vpp ≥ 2; m is what a runtime allows.

    Without `follow` every row is taken as settled: a lower bound that is quick to evaluate.
    """
    chunk = np.repeat(np.arange(len(count)), count)
    held = _rows(tuple(count), pp, vpp)
    few = np.concatenate([chunk[row * pp : (row + 1) * pp] for row, _ in held])
    settled = np.ones(len(m), dtype=np.bool_)
    if follow:
        settled = _settled(f, b, tuple(count), p2p, pp) & (m >= 3.0 * pp)
    rounds = m == pp * np.floor(m / pp)
    seconds = np.empty_like(m)
    for chosen, solve, chunks in (
        (m <= pp, _forwards_first, chunk),
        ((m > pp) & rounds & settled, partial(_stay, held, vpp), few),
        ((m > pp) & rounds & ~settled, follow_slots, chunk),
        ((m > pp) & ~rounds, _any_order, chunk),
    ):
        rows_of = np.flatnonzero(chosen)
        for first in range(0, len(rows_of), BLOCK):
            rows = rows_of[first : first + BLOCK]
            # [way in or way out, chunk of the stage, stage, row]
            cost = np.stack([np.stack([x[rows] for x in side]) for side in (f, b)])[:, chunks]
            seconds[rows] = solve(cost.reshape(2, len(chunks) // pp, pp, -1), p2p[rows], m[rows])
    return seconds


Rows = tuple[tuple[int, int], ...]
"""(row, how many rows from it on are the same): a row is the n-th chunk of every stage"""


@lru_cache(maxsize=4096)
def _rows(count: tuple[int, ...], pp: int, vpp: int) -> Rows:
    """All rows one by one; where all but the first and the last are the same, those between stand for each other."""
    ends = np.cumsum(count)
    between = np.searchsorted(ends, [pp, (vpp - 1) * pp - 1], side="right")
    if vpp <= 4 or between[0] != between[1]:
        return tuple((row, 1) for row in range(vpp))
    return ((0, 1), (1, vpp - 3), (vpp - 2, 1), (vpp - 1, 1))


def _settled(f: list[Floats], b: list[Floats], count: tuple[int, ...], p2p: Floats, pp: int) -> NDArray[np.bool_]:
    """Rows in which no path can gain more than SETTLED by changing stages: not while forwards and backwards alternate,
    not among the forwards before, nor among the backwards after."""
    dearest = [_dearest(times, count, pp) for times in (f, b)]
    loads = [tuple(_load(times, runs) for times in (f, b)) for runs in _stages(count, pp)]
    heaviest, heaviest_f, heaviest_b = loads[0][0] + loads[0][1], loads[0][0], loads[0][1]
    for load_f, load_b in loads[1:]:
        heaviest = np.maximum(heaviest, load_f + load_b)
        heaviest_f, heaviest_b = np.maximum(heaviest_f, load_f), np.maximum(heaviest_b, load_b)
    least = np.minimum(f[0], b[0])
    for x, y in zip(f, b, strict=True):
        least = np.minimum(least, np.minimum(x, y))
    most = (1.0 + SETTLED) * pp
    settled: NDArray[np.bool_] = (
        (dearest[0] + dearest[1] <= most * heaviest)
        & (dearest[0] <= most * heaviest_f)
        & (dearest[1] <= most * heaviest_b)
        & (p2p <= least)
    )
    return settled


def _dearest(times: list[Floats], count: tuple[int, ...], pp: int) -> Floats:
    """Seconds of a group if in every slot the dearest of the chunks that run together counted."""
    total = 0.0 * times[0]
    for runs, slots in _neighbours(count, pp):
        most = times[runs[0]]
        for r in runs[1:]:
            most = np.maximum(most, times[r])
        total = total + slots * most
    return total


def _load(times: list[Floats], runs: tuple[int, ...]) -> Floats:
    load = times[runs[0]]
    for r in runs[1:]:
        load = load + times[r]
    return load


@lru_cache(maxsize=4096)
def _neighbours(count: tuple[int, ...], pp: int) -> list[tuple[tuple[int, ...], int]]:
    """(runs, how often) of the pp neighbouring chunks that run together, over the slots of a group."""
    run_of = [r for r, n in enumerate(count) for _ in range(n)]
    chunks = len(run_of)
    sets = Counter(tuple(sorted({run_of[(x + k) % chunks] for k in range(pp)})) for x in range(chunks))
    return list(sets.items())


@lru_cache(maxsize=4096)
def _stages(count: tuple[int, ...], pp: int) -> list[tuple[int, ...]]:
    """The different lists of runs that stages hold."""
    run_of = [r for r, n in enumerate(count) for _ in range(n)]
    return list(dict.fromkeys(tuple(run_of[s::pp]) for s in range(pp)))


def _stay(held: Rows, vpp: int, cost: Floats, p2p: Floats, m: Floats) -> Floats:
    """Way in, everything that one stage computes in the middle, way out: the longest over the stages.

    Everything grows evenly over rows that are the same, so their first and last say where the longest path is.
    """
    pp = cost.shape[2]
    both = cost[0] + cost[1]
    ends = _way_in(held, vpp, cost[0], cost[1], p2p) + _way_in(held, vpp, cost[1], cost[0], p2p)
    middle = -both[-1]
    for at, (row, times) in enumerate(held):
        middle = middle + (times * m - _met(row, times, pp, vpp)) * both[at]
    best: Floats = np.maximum.reduce(ends + middle, axis=0)
    slow = np.flatnonzero(p2p > np.minimum.reduce(cost, axis=(0, 1, 2)))
    if len(slow):
        groups = np.maximum(0.0, np.floor(m[slow] / pp) - 3.0)
        ridden = (ends[0, slow] + middle[0, slow]) + groups * _ride(held, vpp, cost[..., slow], p2p[slow])
        best[slow] = np.maximum(best[slow], ridden)
    return best


def _ride(held: Rows, vpp: int, cost: Floats, p2p: Floats) -> Floats:
    """Seconds that a path gains per group of pp micro-batches, over staying on the first stage, by riding with a
    forward (or a backward) through all its chunks: where a message outlasts the job beside which it travels."""
    pp = cost.shape[2]
    least, stays = cost[:, 0, 0], 0.0 * p2p
    whole = np.add.accumulate(cost, axis=2)[:, :, -1]
    for at, (_, times) in enumerate(held):
        least = np.minimum(least, cost[:, at, 0])
        stays = stays + times * (cost[0, at, 0] + cost[1, at, 0])
    most = np.zeros_like(p2p)
    for way, waits in ((0, -1), (1, 0)):
        # from the first stage's first chunk to its last, then that stage's own jobs until the next group
        ridden = cost[way, -1, 0] + (vpp - 1.0) * pp * p2p
        for at, (_, times) in enumerate(held[:-1]):
            ridden = ridden + times * whole[way, at]
        own = (pp - 1.0) * cost[way, waits, 0] + pp * least[1 - way]
        most = np.maximum(most, (ridden + own) - pp * stays)
    return most


@lru_cache(maxsize=4096)
def _met(row: int, times: int, pp: int, vpp: int) -> Floats:
    """[stage, 1]: how many forwards of its chunks `row`, …, `row`+`times`−1 a stage runs before its first backward."""
    met = 2 * (pp - 1 - np.arange(pp)) + (vpp - 1) * pp + 1
    groups, rest = np.divmod(met, pp * vpp)
    slots: Floats = (groups * times * pp + np.clip(rest - row * pp, 0, times * pp)).astype(np.float64)
    return slots[:, None]


def _way_in(held: Rows, vpp: int, f: Floats, b: Floats, p2p: Floats) -> Floats:
    """End of the first backward of each stage [stage, row]: down the chain of chunks to the stage's chunk j, then
    its own forwards; or by way of a later stage's first backward."""
    pp = f.shape[1]
    down = np.add.accumulate(f + p2p, axis=1)
    left = _met(*held[0], pp, vpp) * f[0]
    for at, (row, times) in enumerate(held[1:], start=1):
        left = left + _met(row, times, pp, vpp) * f[at]
    warm = down[0] + (left - f[0])
    before = down[0, -1]
    for at in range(1, len(held)):
        times = held[at - 1][1]
        left = left - (times * pp) * f[at - 1]
        if times > 1:
            before = before + (times - 1) * down[at - 1, -1]
        warm = np.maximum(warm, (before + down[at]) + (left - f[at]))
        before = before + down[at, -1]
    warm = warm - p2p
    first: Floats = np.empty_like(warm)
    first[-1] = warm[-1] + b[-1, -1]
    for s in range(pp - 2, -1, -1):
        first[s] = np.maximum(warm[s], first[s + 1] + p2p) + b[-1, s]
    return first


def _forwards_first(cost: Floats, p2p: Floats, m: Floats) -> Floats:
    """At most as many micro-batches m as stages: all forwards, then all backwards; exact for Megatron's m = pp.

    Within the forwards a path goes down the chain of chunks, or waits at one chunk for its whole row; waiting for
    parts of a row on two chunks never costs more than all of it on one. The backwards are the same, read from the
    end.
    """
    _, vpp, pp, _ = cost.shape
    heads: list[Floats] = []
    tails: list[Floats] = []
    for row in range(vpp):
        for s in range(pp):
            here = cost[:, row, s]
            begin = tails[-pp] if row else 0.0 * here
            queued = begin
            if heads:
                begin = np.maximum(begin, heads[-1] + p2p) if row else heads[-1] + p2p
                queued = np.maximum(tails[-1], heads[-1] + (m - 1.0) * p2p) + p2p
            heads.append(begin + here)
            tails.append(np.maximum(begin + m * here, queued + here))
    best: Floats = tails[-pp][0] + tails[-pp][1]
    for tail in tails[-pp + 1 :]:
        best = np.maximum(best, tail[0] + tail[1])
    return best


def _any_order(cost: Floats, p2p: Floats, m: Floats) -> Floats:
    """A lower bound whatever the order of a stage's jobs, as where pp does not divide m: the first micro-batch's way
    to a stage, all that the stage does, and the last one's way back."""
    _, vpp, pp, _ = cost.shape
    ways = 0.0 * p2p
    best = ways
    for s in range(pp):
        load = cost[0, 0, s] + cost[1, 0, s]
        way = load + 2.0 * p2p
        for row in range(1, vpp):
            load = load + (cost[0, row, s] + cost[1, row, s])
        best = np.maximum(best, ways + m * load)
        ways = ways + way
    return best
