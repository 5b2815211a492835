"""The longest path of 1F1B with uneven stages and messages that take time.

Write g = f + b. Stage s runs w = pp−1−s warm-up forwards, then one forward and one backward in turn. Paths
alternate: down the stages by forwards of one micro-batch, over to a backward, up, over to the next forward. Every
path from the first forward to the last backward meets as many forwards as backwards on each stage, m+pp−1 of each
in all, and pays 2·p2p for each time it goes from a stage to the next and back. So it consists of
- one pass over all stages, and, when it ever turns from a backward to a forward on stage s or after, another pass
  over s..pp−1;
- windows: round trips over neighbouring stages i..j, which advance j−i+1 micro-batches and cost Σg + 2·p2p·(j−i);
- or, instead of what lies beyond a stage t in either pass, the pp−1−t warm-up forwards (cool-down backwards) of the
  slowest stage or link before t, one after the other.
Terms are linear in stage indices inside a run, so only the ends of runs are tried. Stages s ≤ pp−m run all forwards
before all backwards and take no part in windows ("early"). The bound is exact but for how the last, partly filled
windows are laid.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NEVER = -np.inf


def one_f_one_b(f: list[Floats], b: list[Floats], count: list[int], p2p: Floats, m: Floats) -> Floats:
    """Seconds of 1F1B per row; see pipeline.py for the shapes. f, b, p2p in seconds, no empty run."""
    stages = sum(count)
    first = [sum(count[:r]) for r in range(len(count))]
    last = [first[r] + count[r] - 1 for r in range(len(count))]
    g = [x + y for x, y in zip(f, b, strict=True)]
    after = _sums_after(g, count)
    whole = (after[0] + count[0] * g[0]) + (2.0 * (stages - 1)) * p2p
    best = _one_pass(f, b, g, count, first, p2p, m, whole)
    early = np.maximum(stages + 1.0 - m, 0.0)
    low = [np.maximum(float(x), early) for x in first]
    size = [np.maximum(z - s + 1.0, 0.0) for z, s in zip(last, low, strict=True)]
    gains = [_gains(x, g, after, low, last, p2p) for x in (f, b)]
    for r in range(len(count)):
        left = m - 1.0 - stages + low[r]
        base = whole + size[r] * g[r] + after[r] + 2.0 * (stages - 1.0 - low[r]) * p2p
        base = base + (gains[0][r] + gains[1][r])
        time = base + _windows(g[r:], size[r:], left, p2p, linked=stages > 1)
        best = np.where((size[r] > 0.0) & (left >= 0.0), np.maximum(best, time), best)
    return best


def _sums_after(g: list[Floats], count: list[int]) -> list[Floats]:
    """Σ g over the stages after each run."""
    after = [g[0] * 0.0] * len(g)
    for r in range(len(g) - 2, -1, -1):
        after[r] = after[r + 1] + count[r + 1] * g[r + 1]
    return after


def _one_pass(
    f: list[Floats], b: list[Floats], g: list[Floats], count: list[int], first: list[int],
    p2p: Floats, m: Floats, whole: Floats,
) -> Floats:  # fmt: skip
    """Paths that never turn back to a forward: one pass down to stage t and up, queueing on the way.

    On early stages all m−1 further forwards and all m−1 further backwards may queue; turning at a later t, which has
    w = pp−1−t warm-up forwards, m−1+w in all.
    """
    stages = sum(count)
    best = whole if stages == 1 else whole + (m - 1.0) * p2p
    if not np.any(m <= stages):
        return best
    turn = stages - m
    down, slow_f, slow_b = 0.0 * p2p, 0.0 * p2p, 0.0 * p2p
    for r, n in enumerate(count):
        met = np.minimum(np.maximum(turn + 1.0 - first[r], 0.0), float(n))
        down = down + met * g[r]
        slow_f = np.where(met > 0.0, np.maximum(slow_f, f[r]), slow_f)
        slow_b = np.where(met > 0.0, np.maximum(slow_b, b[r]), slow_b)
    link = np.where(turn >= 1.0, p2p, 0.0)
    slow_f, slow_b = np.maximum(slow_f, link), np.maximum(slow_b, link)
    path = down + 2.0 * turn * p2p + (m - 1.0) * (slow_f + slow_b)
    slow, fast = np.maximum(slow_f, slow_b), np.minimum(slow_f, slow_b)
    beyond = whole
    for r in range(len(count) - 1, -1, -1):
        for t in dict.fromkeys((first[r] + count[r] - 1, first[r])):
            tail = beyond - (first[r] + count[r] - 1.0 - t) * (g[r] + 2.0 * p2p)
            queue = (m - 1.0) * slow + (stages - 1.0 - t) * fast
            path = np.where(t >= turn, np.maximum(path, tail + queue), path)
        beyond = beyond - count[r] * (g[r] + 2.0 * p2p)
    return np.where(turn >= 0.0, np.maximum(best, path), best)


def _gains(
    x: list[Floats], g: list[Floats], after: list[Floats], low: list[Floats], last: list[int], p2p: Floats
) -> list[Floats]:
    """Per run r: the most that queueing (on times x) before some stage t of run r or later, instead of passing over
    the stages after t, adds to a pass. At least 0: t = pp−1 changes nothing."""
    stages = last[-1] + 1
    slow: Floats | None = None
    found: list[Floats] = []
    for r in range(len(g)):
        slow = x[r] if slow is None else np.maximum(slow, x[r])
        best = np.full_like(p2p, NEVER)
        turns = [low[r], np.full_like(p2p, float(last[r]))]
        if r == 0 and last[0] > 0:
            turns.append(np.maximum(low[0], 1.0))
        for t in turns:
            queued = stages - 1.0 - t
            passed = after[r] + (last[r] - t) * g[r] + 2.0 * queued * p2p
            best = np.maximum(best, queued * np.maximum(slow, np.where(t >= 1.0, p2p, 0.0)) - passed)
        found.append(np.where(low[r] <= last[r], best, NEVER))
    for r in range(len(g) - 2, -1, -1):
        found[r] = np.maximum(found[r], found[r + 1])
    return found


def _windows(g: list[Floats], size: list[Floats], left: Floats, p2p: Floats, *, linked: bool) -> Floats:
    """The most that `left` micro-batches cost in windows that begin at the first of these runs and end at a run's end.

    K = ⌈left/L⌉ round trips over L stages, of which the K·L − left visits too many are taken from either end; or
    ⌊left/L⌋ whole ones and the rest one by one, at the slowest stage (or link) of the window.
    """
    best = np.full_like(p2p, NEVER)
    length, cost, slow = 0.0 * p2p, -2.0 * p2p, 0.0 * p2p
    if linked:
        slow = p2p
    for k in range(len(g)):
        length = length + size[k]
        cost = cost + size[k] * (g[k] + 2.0 * p2p)
        slow = np.maximum(slow, g[k])
        span = np.maximum(length, 1.0)
        whole = np.floor(left / span)
        rest = left - whole * span
        trips = np.ceil(left / span)
        extra = trips * span - left
        cut = _removed(g, size, trips, extra, range(k + 1))
        if k > 0:
            cut = np.minimum(cut, _removed(g, size, trips, extra, range(k, -1, -1)))
        best = np.maximum(best, trips * cost - 2.0 * extra * p2p - cut)
        best = np.maximum(best, whole * cost + rest * slow)
    return best


def _removed(g: list[Floats], size: list[Floats], trips: Floats, extra: Floats, order: Iterable[int]) -> Floats:
    """Seconds of `extra` visits taken from the runs in `order`, at most one per trip and stage."""
    removed, to_go = 0.0 * extra, extra
    for r in order:
        here = np.minimum(to_go, size[r] * trips)
        removed = removed + here * g[r]
        to_go = to_go - here
    return removed
