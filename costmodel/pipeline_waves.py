"""The longest path of interleaved 1F1B whatever its chunks and messages take: slots followed one by one.

Terms as in pipeline_interleaved.py. Forward k of stage s and backward k−w lie in the same *slot* k+s, whose inputs
all come from the slot before: slots are worked off one after the other, all stages and both ways at once, up to
where they meet: exact for up to three groups. The groups beyond three lie in between: there a path stays on one
stage and pays what that computes, or leaves a stage (one of a few) and comes back to it, a group later, by the
longest way; exact but for paths that change stages otherwise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FOLLOWED = 5
"""stages whose way back to themselves is followed for the groups in the middle: a time-for-accuracy choice"""


def follow_slots(cost: Floats, p2p: Floats, m: Floats) -> Floats:
    """Seconds per row, m > pp; cost is [way in or way out, chunk of the stage, stage, row]."""
    _, vpp, pp, _ = cost.shape
    groups = np.floor(m / pp)
    best = np.full_like(m, -np.inf)
    work = _Work(cost, cost[::-1], p2p, ways=2)
    done = 0
    for few in (2, 3):
        mine = groups == 2.0 if few == 2 else groups >= 3.0
        if not mine.any():
            continue
        # the last slot of the way in and of the way out, counted from either end
        last = few * pp * vpp + pp - 1 + pp * vpp - 1 - 2
        for slot in range(done, last - last // 2 + 1):
            work.slot(slot)
            if slot == last // 2:
                entering = work.crossing(slot)
            if slot == last - last // 2:
                leaving = work.backward.done[1, ::-1].copy(), work.forward.done[1].copy()
        done = last - last // 2 + 1
        stay, back = _between(cost, p2p, m, few, entering[2] + leaving[0])
        best = np.where(mine, _meet(entering, leaving, stay, back), best)
    return best


def _between(cost: Floats, p2p: Floats, m: Floats, groups: int, critical: Floats) -> tuple[Floats, Floats]:
    """Seconds [stage, row] for the micro-batches beyond `groups` groups: staying on the stage, or coming back.

    The way back is followed for every stage where there are at most FOLLOWED; otherwise for the first and the last,
    near which most paths turn, some between, and the one with the longest path without it (`critical`: the paths
    through each stage's own jobs, for `groups` groups).
    """
    _, vpp, pp, _ = cost.shape
    load = cost[0, 0] + cost[1, 0]
    for row in range(1, vpp):
        load = load + (cost[0, row] + cost[1, row])
    more = np.maximum(m - float(groups * pp), 0.0)
    stay = more * load
    back = stay.copy()
    if groups > 2 and np.any(more > 0.0):
        ways = min(pp, FOLLOWED)
        spread = [k * (pp - 1) // max(ways - 1 - (pp > FOLLOWED), 1) for k in range(ways)]
        from_stage = np.repeat(np.array(spread)[:, None], len(m), axis=1)
        if pp > FOLLOWED:
            from_stage[-1] = np.argmax(critical + stay, axis=0)
        longest = more * (_return(cost, p2p, from_stage) / pp)
        for way, stage in zip(longest, from_stage, strict=True):
            back = np.where(np.arange(pp)[:, None] == stage, np.maximum(back, way), back)
    return stay, back


def _meet(
    entering: tuple[Floats, Floats, Floats], leaving: tuple[Floats, Floats], stay: Floats, back: Floats
) -> Floats:
    """Longest path over the edges into a slot: from the stage's own job before, or a message, to the end."""
    (message_f, message_b, clock), (after_f, after_b) = entering, leaving
    stages = len(clock)
    best: Floats = clock[0] + after_f[0] + back[0]
    for s in range(stages):
        around_f, around_b = np.maximum(stay[s], stay[s - 1]), np.maximum(stay[s], stay[(s + 1) % stages])
        best = np.maximum(best, clock[s] + after_f[s] + back[s])
        best = np.maximum(best, message_f[s] + after_f[s] + around_f)
        best = np.maximum(best, message_b[s] + after_b[s] + around_b)
    return best


def _return(cost: Floats, p2p: Floats, stage: NDArray[np.int64]) -> Floats:
    """Longest way from the end of a backward of `stage` [way, row] to that of the backward a group later."""
    _, vpp, pp, _ = cost.shape
    work = _Work(cost[:1], cost[1:], p2p, ways=len(stage))
    work.clock[:] = -np.inf
    came = np.empty(stage.shape)
    first = 2 * pp * vpp - 1
    for slot in range(first, first + pp * vpp + pp):
        number = work.slot(slot)
        begin, end = number - pp * vpp, number - 2 * pp * vpp
        if begin < pp:
            here = stage == pp - 1 - begin
            work.backward.done[:, begin][here] = 0.0
            work.clock[:, pp - 1 - begin][here] = 0.0
        if end >= 0:
            here = stage == pp - 1 - end
            came[here] = work.backward.done[:, end][here]
    return came


class _Work:
    """Forwards and backwards of all stages, slot by slot; [way, chunk of the stage, stage, row] with a cost that may
    be the same for all ways."""

    def __init__(self, forward: Floats, backward: Floats, p2p: Floats, ways: int) -> None:
        # backwards: the chain runs through the chunks and stages in reverse
        self.cost, self.back, self.p2p = forward, np.ascontiguousarray(backward[:, ::-1, ::-1]), p2p
        shape = (ways, *forward.shape[1:])
        self.forward, self.backward = _Chain(shape), _Chain(shape)
        self.clock = np.zeros_like(self.forward.done)

    def slot(self, slot: int) -> int:
        """Work off a slot; the number of the last stage's backward in it (negative: none yet)."""
        _, vpp, pp, _ = self.cost.shape
        begun = min(slot + 1, pp)
        self.forward.step(self.cost, self.p2p, slot, self.clock[:, :begun], begun)
        number: int = slot - (pp * vpp - 1)
        started = min(max(number + 1, 0), pp)
        if started:
            self.backward.step(self.back, self.p2p, number, self.forward.done[:, ::-1][:, :started], started)
        waiting = pp - started
        if waiting in (0, pp):
            self.clock = self.forward.done if waiting else self.backward.done[:, ::-1]
        else:
            self.clock = np.concatenate(
                (self.forward.done[:, :waiting], self.backward.done[:, ::-1][:, waiting:]), axis=1
            )
        return number

    def crossing(self, slot: int) -> tuple[Floats, Floats, Floats]:
        """What the next slot waits for, from the near end, [stage, row]: forward and backward messages, own jobs."""
        number = slot + 1 - self.cost.shape[1] * self.cost.shape[2] + 1
        return (
            self.forward.messages(self.p2p, slot + 1),
            self.backward.messages(self.p2p, number)[::-1],
            self.clock[0].copy(),
        )


class _Chain:
    """Work that goes down the stages and around: ends of the last job of every stage, and when its links are free."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        ways, self.rows, self.stages, batch = shape
        self.done = np.full((ways, self.stages, batch), -np.inf)
        self.free = self.done.copy()

    def messages(self, p2p: Floats, number: int) -> Floats:
        """When the inputs of job `number` of the first stage, `number`−s of stage s, arrive; −inf without message."""
        arrive: Floats = np.maximum(self.free[0], np.roll(self.done[0], 1, axis=0)) + p2p
        if number // self.stages % self.rows == 0:
            arrive[0] = -np.inf
        return arrive

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
