"""How Paddle 3.3.1 settles the two conflicts of a merge: three policies over costmodel/merge.py.

`single`    most rules: one axis per dim, refuses one letter on two axes, and an axis stays with the
            letter that met it first.
`divisible` unary operators and every contraction in reverse: co-shards, the widest first, and drops
            the minor axes until the size divides.
`follow`    softmax_grad and batch dims: the operand with the most shards leads, the other adds.
`matmul`    as `divisible`, but the free dims m and n keep what does not divide, and an axis goes to
            a batch dim before the larger of m and n before k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from distplan.costmodel.merge import MergeConflictError, co_shard, first_met, merge, refuse_axis
from distplan.costmodel.paddle_attr import Axes, RuleRefusedError

Letters = tuple[str, ...]
Operand = tuple[Letters, tuple[Axes, ...]]
Merged = dict[str, Axes]


def single(operands: Sequence[Operand], strict: bool = False) -> Merged:
    """Raises RuleRefusedError for one letter on two axes; if `strict`, for one axis on two letters too."""
    try:
        return merge(operands, choose=refuse_axis if strict else first_met)
    except MergeConflictError as error:
        raise RuleRefusedError(str(error)) from None


def _widest_first(suggestions: Sequence[Axes], mesh: Sequence[int], ordered: bool) -> list[Axes]:
    """Most axes, then most shards first; equals by axis if `ordered`, else as they came."""

    def rank(axes: Axes) -> tuple[int, int, Axes]:
        return -len(axes), -math.prod(mesh[axis] for axis in axes), axes if ordered else ()

    return sorted(suggestions, key=rank)


def divide(axes: Axes, size: int, mesh: Sequence[int]) -> Axes:
    """The axes left when minor ones go until `size` divides."""
    while axes and size % math.prod(mesh[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def _merged_letters(operands: Sequence[Operand], mesh: Sequence[int], ordered: bool = False) -> Merged:
    """Every letter with all the axes that any operand offers for it, the widest offer first."""
    offered: dict[str, list[Axes]] = {}
    for letters, mapping in operands:
        for letter, axes in zip(letters, mapping, strict=True):
            offered.setdefault(letter, []).append(axes)
    merged: Merged = {}
    for letter, suggestions in offered.items():
        merged[letter] = ()
        for suggestion in _widest_first(suggestions, mesh, ordered):
            merged[letter] = co_shard(letter, merged[letter], suggestion)
    return merged


def divisible(operands: Sequence[Operand], sizes: Mapping[str, int], mesh: Sequence[int]) -> Merged:
    """`sizes` of the letters; an axis that two letters want goes to the larger."""
    whole = _merged_letters(operands, mesh, ordered=True)
    merged = {letter: divide(axes, sizes[letter], mesh) for letter, axes in whole.items()}

    def largest(axis: int, letters: Sequence[str]) -> str:
        return max(letters, key=lambda letter: sizes[letter])

    return merge([(tuple(merged), tuple(merged.values()))], choose=largest)


def _leader(operands: Sequence[Operand], mesh: Sequence[int]) -> int:
    """The operand with more co-sharded dims, else more shards, else more dims."""
    leader, most = 0, (-1, -1, -1)
    for index, (_, mapping) in enumerate(operands):
        co_sharded = sum(len(axes) > 1 for axes in mapping)
        shards = math.prod(mesh[axis] for axis in {axis for axes in mapping for axis in axes})
        more_dims = shards == most[1] and len(mapping) > most[2]
        if co_sharded > most[0] or shards > most[1] or more_dims:
            leader, most = index, (co_sharded, shards, len(mapping))
    return leader


def follow(operands: Sequence[Operand], sizes: Mapping[str, int], mesh: Sequence[int]) -> Merged:
    """The leading operand's sharding, and the axes that the other adds to its dims; as far as sizes divide.

    Refuses a leader of fewer dims than the other operand.
    """
    leader = _leader(operands, mesh)
    merged = dict(zip(*operands[leader], strict=True))
    used = {axis for axes in merged.values() for axis in axes}
    for index, (letters, mapping) in enumerate(operands):
        if index == leader:
            continue
        if len(letters) > len(merged):
            raise RuleRefusedError("the operand with the most shards has fewer batch dims than the other")
        added = dict(zip(letters, mapping, strict=True))
        for letter, own in merged.items():
            joined = own + tuple(axis for axis in added.get(letter, ()) if axis not in used)
            merged[letter] = divide(joined, sizes[letter], mesh)
            used = (used | set(joined)) - set(joined[len(merged[letter]) :])
    return merged


def _only(operands: Sequence[Operand], wanted: Callable[[str], bool]) -> list[Operand]:
    chosen = []
    for letters, mapping in operands:
        kept = [(x, axes) for x, axes in zip(letters, mapping, strict=True) if wanted(x)]
        chosen.append((tuple(x for x, _ in kept), tuple(axes for _, axes in kept)))
    return chosen


def matmul(operands: Sequence[Operand], sizes: Mapping[str, int], mesh: Sequence[int]) -> Merged:
    """Batch dims follow one operand; what they leave goes to the larger of m and n, then to k.

    m and n keep what does not divide.
    """
    merged = follow(_only(operands, lambda letter: letter not in "mnk"), sizes, mesh)
    taken = {axis for axes in merged.values() for axis in axes}
    own = _merged_letters(_only(operands, lambda letter: letter in "mnk"), mesh)
    for letter in [*sorted(set(own) - {"k"}, key=lambda x: (-sizes[x], x)), "k"]:
        left = tuple(axis for axis in own[letter] if axis not in taken)
        merged[letter] = left if letter != "k" else divide(left, sizes[letter], mesh)
        taken |= set(merged[letter])
    return merged
