"""The longest path of interleaved 1F1B (arXiv 2104.04473, section 2.2) with uneven chunks and message times.

Stage s numbers its forwards k = 0..m·v−1: rows of pp micro-batches, a row per chunk, v rows to a group of pp
micro-batches; backwards the same with the chunks in reverse. It runs w = 2(pp−1−s) + (v−1)pp warm-up forwards, then
forward w+i and backward i in turn. So forward k of stage s and backward k−w lie in the same *slot* k+s, whose inputs
all come from the slot before: slots are worked off one by one, all stages at once.

Read backwards in time the schedule is itself with f and b exchanged. The first slots from either end are followed
exactly, as far as one group beyond the warm-up. Between them a path stays on one stage and pays what that computes;
or it leaves and comes back to the stage with the most work, a group of micro-batches later, by the longest way. This
is exact but for paths that change stages otherwise in between. With m = pp all forwards come first, and the two
halves, each exact, meet.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK = 2048
"""rows worked on at a time, so that a slot's arrays stay in the processor's cache; changes no bit"""


def interleaved(
    f: list[Floats], b: list[Floats], count: list[int], p2p: Floats, m: Floats, pp: int, vpp: int
) -> Floats:
    """Seconds of interleaved 1F1B per row; see pipeline.py for the shapes. m is a multiple of pp, vpp ≥ 2."""
    chunk = np.repeat(np.arange(len(count)), count)
    seconds = np.empty_like(m)
    for first in range(0, len(m), BLOCK):
        rows = slice(first, first + BLOCK)
        # [way in or way out, chunk of the stage, stage, row]
        cost = np.stack([np.stack([x[rows] for x in side]) for side in (f, b)])[:, chunk]
        cost = cost.reshape(2, vpp, pp, -1)
        few = m[rows] <= pp
        best = np.zeros_like(m[rows])
        if few.any():
            best = _forwards_first(cost, p2p[rows])
        if not few.all():
            best = np.where(few, best, _steady(cost, p2p[rows], m[rows]))
        seconds[rows] = best
    return seconds


def _steady(cost: Floats, p2p: Floats, m: Floats) -> Floats:
    """More micro-batches than stages: both ends meet on the stage where the sum is longest.

    With 2, 3, 4 or more groups there is room to follow either end for (v−1)·pp/2, (2v−1)·pp/2, v·pp slots.
    """
    _, vpp, pp, _ = cost.shape
    depths = [(vpp - 1) * pp // 2, (2 * vpp - 1) * pp // 2, vpp * pp]
    deepest = 0 if not np.any(m >= 3 * pp) else 1 if not np.any(m >= 4 * pp) else 2
    reached = _follow(cost, p2p, depths[: deepest + 1])
    group = np.minimum(np.floor(m / pp), 4.0)
    both = cost[0] + cost[1]
    load = both[0].copy()
    for row in range(1, vpp):
        load += both[row]
    more, heaviest, period = m - 4.0 * pp, np.zeros(len(m), dtype=np.int64), load[0]
    if np.any(more > 0.0):
        heaviest = np.argmax(load, axis=0)
        period = _return(cost, p2p, heaviest) / pp
    best = np.full_like(m, -np.inf)
    for choice in range(deepest + 1):
        mine = group <= 2.0 if choice == 0 else group == 3.0 if choice == 1 else group >= 4.0
        for s in range(pp):
            outside = _outside(both[:, s], depths[choice], s, pp)
            ends = reached[choice][0, s] + reached[choice][1, s]
            path = ends + (m * load[s] - outside)
            if choice == 2:
                longer = ends + (4.0 * pp * load[s] - outside) + more * period
                path = np.where((heaviest == s) & (more > 0.0), np.maximum(path, longer), path)
            best = np.where(mine, np.maximum(best, path), best)
    return best


def _outside(both: Floats, depth: int, s: int, pp: int) -> Floats:
    """What stage s, whose chunks take `both`, computes in the slots followed from either end, both ends together."""
    vpp = len(both)
    begun = 2 * (pp - 1 - s) + (vpp - 1) * pp + 1 + depth
    outside = 0.0 * both[0]
    for row in range(vpp):
        seen = _slots(begun, row, pp, vpp) + _slots(depth + 1, vpp - 1 - row, pp, vpp)
        outside = outside + seen * both[row]
    return outside


def _slots(begun: int, row: int, pp: int, vpp: int) -> float:
    """How many of a stage's first `begun` forwards are in rows of number `row` of their group."""
    groups, rest = divmod(begun, pp * vpp)
    return float(groups * pp + min(max(rest - row * pp, 0), pp))


def _follow(cost: Floats, p2p: Floats, depths: list[int]) -> list[Floats]:
    """End of backward number d on every stage, for each d of `depths`, from both ends: [way, stage, row] each."""
    _, vpp, pp, _ = cost.shape
    work = _Work(cost, p2p)
    found = [np.empty_like(work.clock) for _ in depths]
    for slot in range(depths[-1] + pp + pp * vpp - 1):
        number = work.slot(slot)
        for k, depth in enumerate(depths):
            if 0 <= number - depth < pp:
                found[k][:, pp - 1 - (number - depth)] = work.backward.done[:, number - depth]
    return found


def _return(cost: Floats, p2p: Floats, stage: NDArray[np.int64]) -> Floats:
    """Longest way from the end of a backward of `stage` (per row) to that of the backward a group later."""
    _, vpp, pp, _ = cost.shape
    work = _Work(cost[:1], p2p, cost[1:])
    work.clock[:] = -np.inf
    came = np.empty_like(p2p)
    first = 2 * pp * vpp - 1
    for slot in range(first, first + pp * vpp + pp):
        number = work.slot(slot)
        for from_end, at in ((number - pp * vpp, 0.0), (number - 2 * pp * vpp, -1.0)):
            if 0 <= from_end < pp:
                here = stage == pp - 1 - from_end
                done = work.backward.done[0, from_end]
                if at < 0.0:
                    came[here] = done[here]
                else:
                    done[here] = at
                    work.clock[0, pp - 1 - from_end] = done
    return came


class _Work:
    """Forwards and backwards of all stages, slot by slot, from one end (or both, the other with f and b exchanged)."""

    def __init__(self, cost: Floats, p2p: Floats, other: Floats | None = None) -> None:
        back = cost[::-1] if other is None else other
        # backwards: the chain runs through the chunks and stages in reverse
        self.cost, self.back, self.p2p = cost, np.ascontiguousarray(back[:, ::-1, ::-1]), p2p
        self.forward, self.backward = _Chain(cost.shape), _Chain(cost.shape)
        self.clock = np.zeros_like(self.forward.done)

    def slot(self, slot: int) -> int:
        """Work off a slot; the number of the last stage's backward in it (negative: none yet)."""
        _, vpp, pp, _ = self.cost.shape
        begun = min(slot + 1, pp)
        self.forward.step(self.cost, self.p2p, slot, self.clock[:, :begun], begun)
        number = slot - (pp * vpp - 1)
        started = min(max(number + 1, 0), pp)
        if started:
            self.backward.step(self.back, self.p2p, number, self.forward.done[:, ::-1][:, :started], started)
        waiting = pp - started
        self.clock[:, :waiting] = self.forward.done[:, :waiting]
        self.clock[:, waiting:] = self.backward.done[:, ::-1][:, waiting:]
        return number


class _Chain:
    """Work that goes down the stages and around: ends of the last job of every stage, and when its links are free."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        ways, self.rows, self.stages, batch = shape
        self.done = np.full((ways, self.stages, batch), -np.inf)
        self.free = self.done.copy()

    def step(self, cost: Floats, p2p: Floats, number: int, ready: Floats, begun: int) -> None:
        """Job `number` of the first stage, `number`−s of stage s, on the first `begun` stages, once `ready`."""
        row, place = number // self.stages % self.rows, number % self.stages
        done, free = self.done, self.free
        np.maximum(free[:, 1:begun], done[:, : begun - 1], out=free[:, 1:begun])
        free[:, 1:begun] += p2p
        if row:
            np.maximum(free[:, 0], done[:, -1], out=free[:, 0])
            free[:, 0] += p2p
            np.maximum(free[:, :begun], ready, out=done[:, :begun])
        else:
            np.maximum(free[:, 1:begun], ready[:, 1:], out=done[:, 1:begun])
            done[:, 0] = ready[:, 0]
        done[:, : place + 1] += cost[:, row, : place + 1]
        if begun > place + 1:
            done[:, place + 1 : begun] += cost[:, row - 1, place + 1 : begun]


def _forwards_first(cost: Floats, p2p: Floats) -> Floats:
    """As many micro-batches as stages: all forwards, then all backwards; exact.

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
                queued = np.maximum(tails[-1], heads[-1] + (pp - 1.0) * p2p) + p2p
            heads.append(begin + here)
            tails.append(np.maximum(begin + pp * here, queued + here))
    best = tails[-pp][0] + tails[-pp][1]
    for tail in tails[-pp + 1 :]:
        best = np.maximum(best, tail[0] + tail[1])
    return best
