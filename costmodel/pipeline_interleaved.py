"""The longest path of interleaved 1F1B (arXiv 2104.04473, section 2.2) with uneven chunks and message times.

Stage s numbers its forwards k = 0..m·v−1: rows of pp micro-batches, a row per chunk, v rows to a group of pp
micro-batches; backwards the same with the chunks in reverse. It runs w = 2(pp−1−s) + (v−1)pp warm-up forwards, then
forward w+i and backward i in turn. Read backwards in time the schedule is itself with f and b exchanged, so one
function gives the way in (to the first backward of each stage) and the way out (from its last forward); between them
lies what the stage itself computes.

A path through the warm-up goes down the chain of chunks, or waits at one chunk for the row of pp micro-batches.
Waiting for part of a row on two chunks costs no more than for all of it on one, so only the first and last
micro-batch of each row are followed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def interleaved(
    f: list[Floats], b: list[Floats], count: list[int], p2p: Floats, m: Floats, pp: int, vpp: int
) -> Floats:
    """Seconds of interleaved 1F1B per row; see pipeline.py for the shapes. m is a multiple of pp, vpp ≥ 2."""
    chunk = [r for r, n in enumerate(count) for _ in range(n)]
    ahead, back = [f[r] for r in chunk], [b[r] for r in chunk]
    best = np.full_like(p2p, -np.inf)
    if np.any(m > pp):
        best = _steady(ahead, back, p2p, m, pp, vpp)
    if np.any(m <= pp):
        _, row_f = _rows(ahead, p2p, pp, vpp, vpp)
        _, row_b = _rows(back, p2p, pp, vpp, vpp)
        all_first = row_f[-1][0] + row_b[-1][0]
        for s in range(1, pp):
            all_first = np.maximum(all_first, row_f[-1][s] + row_b[-1][s])
        best = np.where(m <= pp, all_first, best)
    return best


def _steady(f: list[Floats], b: list[Floats], p2p: Floats, m: Floats, pp: int, vpp: int) -> Floats:
    enter, leave = _way_in(f, b, p2p, pp, vpp), _way_in(b, f, p2p, pp, vpp)
    best = np.full_like(p2p, -np.inf)
    for s in range(pp):
        mine = [v * pp + s for v in range(vpp)]
        met = 2 * (pp - 1 - s) + (vpp - 1) * pp + 1
        load = f[mine[0]] + b[mine[0]]
        for x in mine[1:]:
            load = load + (f[x] + b[x])
        outside = f[mine[-1]] + b[mine[-1]]
        for v in range(vpp):
            slots = _slots(met, v, pp, vpp)
            outside = outside + slots * (f[mine[v]] + b[mine[v]])
        best = np.maximum(best, (enter[s] + leave[s]) + (m * load - outside))
    return best


def _slots(met: int, row: int, pp: int, vpp: int) -> float:
    """How many of a stage's first `met` forwards are of its chunk `row`."""
    groups, rest = divmod(met, pp * vpp)
    return float(groups * pp + min(max(rest - row * pp, 0), pp))


def _rows(
    f: list[Floats], p2p: Floats, pp: int, vpp: int, rows: int
) -> tuple[list[list[Floats]], list[list[Floats]]]:
    """End of the first and of the last forward of each row on each stage, nothing but forwards having run."""
    first: list[list[Floats]] = []
    last: list[list[Floats]] = []
    for j in range(rows):
        head: list[Floats] = []
        tail: list[Floats] = []
        for s in range(pp):
            cost = f[(j % vpp) * pp + s]
            own = [last[j - 1][s]] if j else []
            sender = (head[s - 1], tail[s - 1]) if s else (first[j - 1][-1], last[j - 1][-1]) if j % vpp else None
            if sender is None:
                begin = own[0] if own else 0.0 * p2p
                end = begin + pp * cost
                begin = begin + cost
            else:
                begin = sender[0] + p2p
                begin = (np.maximum(begin, own[0]) if own else begin) + cost
                queued = np.maximum(sender[1], sender[0] + (pp - 1.0) * p2p) + p2p + cost
                end = np.maximum(begin + (pp - 1.0) * cost, queued)
            head.append(begin)
            tail.append(end)
        first.append(head)
        last.append(tail)
    return first, last


def _way_in(f: list[Floats], b: list[Floats], p2p: Floats, pp: int, vpp: int) -> list[Floats]:
    """End of the first backward of each stage (of its last chunk)."""
    first, _ = _rows(f, p2p, pp, vpp, vpp + 1)
    warm = [first[0][0]] * pp
    for row in (vpp - 1, vpp):
        held, slow = first[row][0], f[(row % vpp) * pp]
        for s in range(pp):
            cost = f[(row % vpp) * pp + s]
            if s:
                worse = cost >= slow
                held = np.where(worse, first[row][s], held + p2p + cost)
                slow = np.where(worse, cost, slow)
            place = 2 * (pp - 1 - s) - (row - vpp + 1) * pp
            if 0 <= place < pp:
                waited = np.maximum(cost, p2p) if s else cost
                warm[s] = np.maximum(first[row][s] + place * waited, held + place * slow)
    done = [warm[-1] + b[vpp * pp - 1]]
    for s in range(pp - 2, -1, -1):
        done.append(np.maximum(warm[s], done[-1] + p2p) + b[(vpp - 1) * pp + s])
    return done[::-1]
