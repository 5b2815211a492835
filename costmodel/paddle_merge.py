"""How Paddle 3.3.1 settles the two conflicts of a merge: three policies over costmodel/merge.py.

`single`    most rules: one axis per dim (of a co-sharded dim the most minor), refuses one letter on
            two axes, and an axis stays with the letter that met it first.
`divisible` unary operators and every contraction in reverse: co-shards, the widest first, and drops
            the minor axes until the size divides.
`matmul`    as `divisible`, but the free dims m and n keep what does not divide, and an axis goes to
            a batch dim before m before n before k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from distplan.costmodel.merge import (
    MergeConflictError,
    co_shard,
    first_met,
    merge,
    refuse_axis,
)
from distplan.costmodel.paddle_attr import Axes, RuleRefusedError, last_axis

Letters = tuple[str, ...]
Operand = tuple[Letters, tuple[Axes, ...]]
Merged = dict[str, Axes]


def single(operands: Sequence[Operand], strict: bool = False) -> Merged:
    """Raises RuleRefusedError for one letter on two axes; if `strict`, for one axis on two letters too."""
    plain = [(letters, last_axis(mapping)) for letters, mapping in operands]
    try:
        return merge(plain, choose=refuse_axis if strict else first_met)
    except MergeConflictError as error:
        raise RuleRefusedError(str(error)) from None


def _widest_first(suggestions: Sequence[Axes], mesh: Sequence[int]) -> list[Axes]:
    return sorted(suggestions, key=lambda axes: (-len(axes), -math.prod(mesh[a] for a in axes)))


def divide(axes: Axes, size: int, mesh: Sequence[int]) -> Axes:
    """The axes left when minor ones go until `size` divides."""
    while axes and size % math.prod(mesh[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def divisible(
    operands: Sequence[Operand],
    sizes: Mapping[str, int],
    mesh: Sequence[int],
    *,
    keeps: str = "",
    choose: Callable[[int, Sequence[str]], str] | None = None,
) -> Merged:
    """`sizes` of the letters; the letters in `keeps` may stay sharded unevenly."""
    suggestions: dict[str, list[Axes]] = {}
    for letters, mapping in operands:
        for letter, axes in zip(letters, mapping, strict=True):
            suggestions.setdefault(letter, []).append(axes)
    merged: Merged = {}
    for letter, offered in suggestions.items():
        axes: Axes = ()
        for suggestion in _widest_first(offered, mesh):
            axes = co_shard(letter, axes, suggestion)
        merged[letter] = axes if letter in keeps else divide(axes, sizes[letter], mesh)
    largest = choose or (lambda axis, letters: max(letters, key=lambda letter: sizes[letter]))
    return merge([(tuple(merged), tuple(merged.values()))], choose=largest)


def matmul(operands: Sequence[Operand], sizes: Mapping[str, int], mesh: Sequence[int]) -> Merged:
    rank = {"m": 1, "n": 2, "k": 3}

    def batch_m_n_k(axis: int, letters: Sequence[str]) -> str:
        return min(letters, key=lambda letter: (rank.get(letter, 0), -sizes[letter]))

    return divisible(operands, sizes, mesh, keeps="mn", choose=batch_m_n_k)
