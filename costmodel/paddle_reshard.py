"""Resharding as Paddle 3.3.1's static pass does it: which operators and collectives, rank 0's view.

One mesh axis at a time with the transitions of a one-axis mesh. On a mesh of several axes a shard that
changes is gathered first, the last tensor dim first, then what is partial is reduced (or reduced and
scattered), then whole tensors become partial and are sliced; so S(i) -> S(j) is an all-gather and a
slice there. `best` does it by one all-to-all where the two dims are free on every other axis.

>>> reshard((2, 4), (16, 32), ("R", "S0"), ("R", "S1")).ops
('all_gather', 'slice')
>>> reshard((2, 4), (16, 32), ("R", "S0"), ("R", "S1"), best=True).collectives
(Exchange(op='all_to_all', ranks=(0, 1, 2, 3), payload_bytes=512.0),)

Source of the behaviour: the answers of PaddlePaddle 3.3.1 (shared/oracle, A2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from distplan.costmodel.paddle_attr import RuleRefusedError

Placements = Sequence[str]
"""per mesh axis: R, S<dim>, P (a sum), PAVG, PMAX"""

_FIBONACCI = 11400714819323198485
"""2^64 / golden ratio (Knuth, The Art of Computer Programming 3, section 6.4)."""

_GATHERED_COPY = ("split_with_num", "concat")
_RESHUFFLE = ("reshape", "transpose", "reshape")


@dataclass(frozen=True, slots=True)
class Exchange:
    op: str
    ranks: tuple[int, ...]
    payload_bytes: float
    """what this rank gives to the collective"""


@dataclass(frozen=True, slots=True)
class Transition:
    ops: tuple[str, ...]
    collectives: tuple[Exchange, ...]


@dataclass(slots=True)
class _State:
    """The tensor on its way: placements so far and what was inserted."""

    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    element_bytes: float
    placed: list[str]
    ops: list[str] = field(default_factory=list)
    collectives: list[Exchange] = field(default_factory=list)

    def local(self) -> tuple[int, ...]:
        """Sizes on rank 0: the first shard, the largest if uneven."""
        sizes = list(self.shape)
        for axis, placement in enumerate(self.placed):
            if placement.startswith("S"):
                dim = int(placement[1:])
                sizes[dim] = -(-sizes[dim] // self.mesh[axis])
        return tuple(sizes)

    def ranks(self, axis: int) -> tuple[int, ...]:
        """The group of rank 0 along `axis`; ids are row major."""
        stride = math.prod(self.mesh[axis + 1 :])
        return tuple(stride * i for i in range(self.mesh[axis]))

    def exchange(self, op: str, axis: int, elements: int) -> None:
        self.ops.append(op)
        self.collectives.append(Exchange(op, self.ranks(axis), elements * self.element_bytes))


def _uneven(state: _State, axis: int, dim: int) -> bool:
    return state.shape[dim] % state.mesh[axis] != 0


def _gather(state: _State, axis: int) -> None:
    """S(i) -> R; an uneven shard fails in the static pass."""
    dim = int(state.placed[axis][1:])
    if _uneven(state, axis, dim):
        raise RuleRefusedError(f"dim {dim} of {state.shape} does not divide over {state.mesh[axis]} ranks")
    state.exchange("all_gather", axis, math.prod(state.local()))
    if dim > 0:
        state.ops.extend(_GATHERED_COPY)
    state.placed[axis] = "R"


def _all_to_all(state: _State, axis: int, target: str) -> None:
    """S(i) -> S(j) by one exchange of the local shard, with local copies for the dims that are not the first."""
    source, dim = int(state.placed[axis][1:]), int(target[1:])
    if _uneven(state, axis, source) or _uneven(state, axis, dim):
        raise RuleRefusedError(f"{state.shape} does not divide over {state.mesh[axis]} ranks")
    if dim == 0:
        state.ops.append("share_data_")
    else:
        state.ops.extend(_RESHUFFLE)
    state.exchange("all_to_all", axis, math.prod(state.local()))
    if source > 0:
        state.ops.extend(_RESHUFFLE)
    state.placed[axis] = target


def _reduce(state: _State, axis: int) -> None:
    state.exchange("all_reduce", axis, math.prod(state.local()))
    state.placed[axis] = "R"


def _reduce_scatter(state: _State, axis: int, target: str) -> None:
    """P -> S(i): sums only; an uneven dim is padded, one that is not the first is transposed there and back."""
    if state.placed[axis] != "P":
        raise RuleRefusedError("only a sum can be reduced and scattered")
    dim, degree = int(target[1:]), state.mesh[axis]
    sizes = list(state.local())
    padded = -(-sizes[dim] // degree) * degree
    turned = ["transpose"] if dim > 0 else []
    state.ops.extend(turned + (["concat"] if padded != sizes[dim] else []))
    sizes[dim] = padded
    state.exchange("reduce_scatter", axis, math.prod(sizes))
    state.ops.extend(turned)
    state.placed[axis] = target


def _from_whole(state: _State, axis: int, target: str) -> None:
    state.ops.append("slice" if target.startswith("S") else "assign")
    state.placed[axis] = target


def _one_axis(state: _State, target: str) -> None:
    source = state.placed[0]
    if source == target:
        return
    if source == "R":
        _from_whole(state, 0, target)
    elif source.startswith("S"):
        if target.startswith("P"):
            raise RuleRefusedError("a shard does not become partial on a mesh of one axis")
        if target == "R":
            _gather(state, 0)
        else:
            _all_to_all(state, 0, target)
    elif target == "R":
        _reduce(state, 0)
    elif target.startswith("S"):
        _reduce_scatter(state, 0, target)
    else:
        raise RuleRefusedError("one kind of partial does not become another on a mesh of one axis")


def _hashed(axis: int) -> int:
    """Partial axes are worked off in the order in which Paddle's Fibonacci hash map holds them (0, 2, 1)."""
    return axis * _FIBONACCI % 2**64


def _effective(placed: Placements) -> list[str]:
    """A dim that several axes shard counts for the last of them (co-sharding is not supported here)."""
    last = {placement: axis for axis, placement in enumerate(placed) if placement.startswith("S")}
    return ["R" if p.startswith("S") and last[p] != axis else p for axis, p in enumerate(placed)]


def _exchanged(state: _State, wanted: Sequence[str]) -> None:
    """Best mode: S(i) -> S(j) directly, where no other axis shards j before or i after."""
    for axis, target in enumerate(wanted):
        source = state.placed[axis]
        moving = source.startswith("S") and target.startswith("S") and source != target
        if moving and target not in state.placed and source not in wanted:
            _all_to_all(state, axis, target)


def _several_axes(state: _State, wanted: Sequence[str], best: bool) -> None:
    if best:
        _exchanged(state, wanted)
    by_dim = sorted((int(p[1:]), axis) for axis, p in enumerate(state.placed) if p.startswith("S"))
    for _, axis in reversed(by_dim):
        if state.placed[axis] != wanted[axis]:
            _gather(state, axis)
    for axis in sorted(range(len(wanted)), key=_hashed):
        target = wanted[axis]
        if not state.placed[axis].startswith("P") or state.placed[axis] == target:
            continue
        if target.startswith("S"):
            _reduce_scatter(state, axis, target)
        else:
            _reduce(state, axis)
    # where a tensor becomes partial the static pass leaves its slices out
    changed = [axis for axis, target in enumerate(wanted) if state.placed[axis] != target]
    to_partial = [axis for axis in changed if wanted[axis].startswith("P")]
    for axis in to_partial or changed:
        _from_whole(state, axis, wanted[axis])


def reshard(
    mesh: Sequence[int],
    shape: Sequence[int],
    source: Placements,
    target: Placements,
    *,
    element_bytes: float = 4.0,
    best: bool = False,
    to_other_mesh: bool = False,
) -> Transition:
    """The transition of a tensor of global `shape` (elements) over `mesh`; bytes per rank.

    With `to_other_mesh` the local tensor is first sent, as it is, to a mesh of the same shape; its
    collectives stand in rank 0's program too. Raises RuleRefusedError where Paddle does.
    """
    state = _State(tuple(mesh), tuple(shape), element_bytes, _effective(source))
    if to_other_mesh:
        state.ops.append("send_v2")
        state.collectives.append(Exchange("send_v2", (), math.prod(state.local()) * element_bytes))
        state.ops.append("dist.reshard")
        if state.placed[0] == "R" and target[0].startswith("S"):
            return Transition((*state.ops, "dist.reshard"), tuple(state.collectives))
    if len(mesh) == 1:
        _one_axis(state, target[0])
    else:
        _several_axes(state, _effective(target), best)
    return Transition(tuple(state.ops), tuple(state.collectives))
