"""The greedy ZB-V of arXiv 2401.10241 (section 6 and appendix), as Paddle's VScheduleCreator carries it out.

Two chunks per stage laid out in a V: stage s holds virtual stages s and 2·stages−1−s, so that the first stage also
has the loss. Given the times of F, I, W, loss and a message, it fills the wait before the first backward with
forwards, then takes one input gradient and one forward per stage and round, weight gradients going where a stage
would wait, or where it waited less than the stages that waited most. Passes that know
those waits, and all habits of placing weight gradients, are tried; the first to end wins. No memory limit.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distplan.costmodel.schedules_orders import Job

LAST = 1
"""the chunk that ends in the loss, on stage 0"""
LOSS_SLACK = 0.2
"""On the loss stage a weight gradient is started if this share of it fits into the wait (Paddle's constant)."""


@dataclass(slots=True)
class _Board:
    """What has been laid so far; mutable, and local to one call of greedy_v."""

    stages: int
    micro_batches: int
    times: Mapping[str, float]
    clock: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    order: list[list[Job]] = field(default_factory=list)
    weights: list[deque[int]] = field(default_factory=list)
    done: dict[tuple[str, int, int], int] = field(default_factory=dict)
    ends: dict[tuple[str, int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = [0.0] * self.stages
        self.waited = [0.0] * self.stages
        self.order = [[] for _ in range(self.stages)]
        self.weights = [deque() for _ in range(self.stages)]

    def count(self, kind: str, chunk: int, stage: int) -> int:
        return self.done.get((kind, chunk, stage), 0)

    def forwards(self, stage: int, chunks: Sequence[int]) -> int:
        return sum(self.count("F", chunk, stage) for chunk in chunks)

    def cost(self, kind: str, chunk: int, stage: int) -> float:
        return self.times[kind] + (self.times["loss"] if stage == 0 and chunk == LAST else 0.0)

    def input_at(self, kind: str, chunk: int, stage: int) -> float | None:
        """When the neighbour has the next input ready to be sent, 0 at either end, None if not laid yet."""
        neighbour = stage - 1 if (kind == "F") == (chunk == 0) else stage + 1
        if not 0 <= neighbour < self.stages:
            return 0.0
        return self.ends.get((kind, chunk, neighbour, self.count(kind, chunk, stage)))

    def can(self, kind: str, chunk: int, stage: int) -> bool:
        mine = self.count(kind, chunk, stage)
        if mine >= self.micro_batches:
            return False
        if kind == "F" and chunk == LAST and self.count("F", 0, stage) <= mine:
            return False
        if kind == "I" and self.count(*(("F", LAST) if chunk == LAST else ("I", LAST)), stage) <= mine:
            return False
        return self.input_at(kind, chunk, stage) is not None

    def put(self, kind: str, chunk: int, stage: int) -> None:
        cost = self.cost(kind, chunk, stage)
        end = self.clock[stage] + cost
        if kind != "W":
            at = self.input_at(kind, chunk, stage)
            assert at is not None
            end = max(end, at + self.times["comm"] + cost)
        if self.count("F", 0, stage):
            self.waited[stage] += end - self.clock[stage] - cost
        i = self.count(kind, chunk, stage)
        self.order[stage].append(Job(kind, chunk, i))
        self.ends[kind, chunk, stage, i] = end
        self.clock[stage] = end
        self.done[kind, chunk, stage] = i + 1
        if kind == "I":
            self.weights[stage].append(chunk)

    def end(self) -> float:
        return max(self.clock)

    def put_weight(self, stage: int) -> None:
        self.put("W", self.weights[stage].popleft(), stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Habit:
    """Where the greedy puts weight gradients beyond the waits that they fit into; all are tried."""

    before_backward: bool
    before_forward: bool
    loss_stage: bool


def greedy_v(stages: int, micro_batches: int, times: Mapping[str, float]) -> list[list[Job]]:
    """Jobs per stage. `times`: seconds (or any unit) of F, I, W, loss and comm (one message)."""
    best: _Board | None = None
    for backward, forward, loss in itertools.product((True, False), repeat=3):
        habit = _Habit(before_backward=backward, before_forward=forward, loss_stage=loss)
        board = _refined(stages, micro_batches, times, habit, [-1.0] * stages)
        if best is None or board.end() < best.end():
            best = board
    assert best is not None
    return best.order


def _refined(
    stages: int, micro_batches: int, times: Mapping[str, float], habit: _Habit, granted: Sequence[float]
) -> _Board:
    """Laid once and, while the worst wait shrinks, again with the waits known; the one that ends first."""
    board = _lay(stages, micro_batches, times, habit, granted)
    if max(granted) < 0 or max(board.waited) < max(granted):
        again = _refined(stages, micro_batches, times, habit, board.waited)
        if again.end() < board.end():
            return again
    return board


def _lay(
    stages: int, micro_batches: int, times: Mapping[str, float], habit: _Habit, granted: Sequence[float]
) -> _Board:
    board = _Board(stages, micro_batches, times)
    for stage in range(stages):
        board.put("F", 0, stage)
    _fill_before(board, ("F", LAST), (0,), range(stages - 1, -1, -1), insert=True)
    _fill_before(board, ("I", 0), (0, LAST), range(stages), insert=False)
    while board.count("I", 0, 0) + board.count("I", LAST, 0) < 2 * micro_batches:
        for stage in range(stages):
            _next(board, "I", (0, LAST), stage, habit, granted)
        for stage in range(stages):
            _next(board, "F", (LAST, 0), stage, habit, granted)
    for stage in range(stages):
        while board.weights[stage]:
            board.put_weight(stage)
    return board


def _next(board: _Board, kind: str, chunks: Sequence[int], stage: int, habit: _Habit, granted: Sequence[float]) -> None:
    """The first of the chunks whose job of this kind can run, after the weight gradients that go before it."""
    for chunk in chunks:
        if not board.can(kind, chunk, stage):
            continue
        at = board.input_at(kind, chunk, stage)
        assert at is not None
        arrival = at + board.times["comm"]
        shares = (1.0, LOSS_SLACK) if habit.loss_stage and kind == "I" and stage == 0 else (1.0,)
        for share in shares:
            while board.weights[stage]:
                cost = board.cost("W", board.weights[stage][0], stage)
                if arrival < board.clock[stage] + cost * share:
                    break
                board.put_weight(stage)
        allowed = max(*board.waited, max(granted) - granted[stage]) - board.waited[stage]
        fill = habit.before_backward if kind == "I" else habit.before_forward
        if fill and board.weights[stage] and arrival - board.clock[stage] > allowed:
            board.put_weight(stage)
        board.put(kind, chunk, stage)
        return


def _fill_before(
    board: _Board, target: tuple[str, int], chunks: tuple[int, ...], stages: Sequence[int], *, insert: bool
) -> None:
    """Forwards of `chunks` that end before `target` can start, stage after stage along the way it travels."""
    kind, chunk = target
    last = board.order[stages[0]][-1]
    deadline = board.ends[last.kind, last.chunk, stages[0], last.micro_batch]
    if insert:
        board.put(kind, chunk, stages[0])
    for stage in stages[1:]:
        begin = (board.order[stage][-1].chunk + 1) % len(chunks)
        deadline += board.times["comm"] + board.cost(kind, chunk, stage)
        if insert:
            _fill(board, stage, chunks, begin, deadline, range(stage + 1), 0)
            board.put(kind, chunk, stage)
        else:
            along = range(board.stages - 1, stage - 1, -1)
            _fill(board, stage, chunks, begin, deadline, along, board.forwards(0, chunks))


def _fill(
    board: _Board, stage: int, chunks: tuple[int, ...], begin: int, deadline: float, along: Sequence[int], owed: int
) -> None:  # fmt: skip
    """Forwards on the stages `along`, ending at `stage`; the first `owed` of each stage may end after the deadline."""

    def fits(chunk: int, s: int) -> bool:
        if not board.can("F", chunk, s):
            return False
        at = board.input_at("F", chunk, s)
        assert at is not None
        end = max(board.clock[s], at + board.times["comm"]) + board.cost("F", chunk, s)
        return board.forwards(s, chunks) < owed or end <= deadline

    chunk = begin
    everything = len(chunks) * board.micro_batches
    while board.forwards(stage, chunks) < everything and any(fits(c, s) for c in chunks for s in along):
        for s in along:
            if fits(chunk, s):
                board.put("F", chunk, s)
        chunk = (chunk + 1) % len(chunks)
