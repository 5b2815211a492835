"""How Paddle 3.3.1 settles the two conflicts of a merge: three policies over costmodel/merge.py.

`single`    most rules: one axis per dim, refuses one letter on two axes, and an axis stays with the
            letter that met it first.
`divisible` unary operators and every contraction in reverse: co-shards, the widest first, and drops
            the minor axes until the size divides.
`follow`    softmax_grad: the operand with the most shards leads, the other adds what is free.
`matmul`    as `divisible`, but the free dims m and n keep what does not divide, and an axis goes to
            a batch dim before the larger of m and n before k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from distplan.costmodel.merge import (
    MergeConflictError,
    co_shard,
    first_met,
    merge,
    refuse_axis,
)
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


def _widest_first(suggestions: Sequence[Axes], mesh: Sequence[int]) -> list[Axes]:
    return sorted(suggestions, key=lambda axes: (-len(axes), -math.prod(mesh[a] for a in axes)))


def divide(axes: Axes, size: int, mesh: Sequence[int]) -> Axes:
    """The axes left when minor ones go until `size` divides."""
    while axes and size % math.prod(mesh[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def _merged_letters(operands: Sequence[Operand], mesh: Sequence[int]) -> Merged:
    """Every letter with all the axes that any operand offers for it, the widest offer first."""
    offered: dict[str, list[Axes]] = {}
    for letters, mapping in operands:
        for letter, axes in zip(letters, mapping, strict=True):
            offered.setdefault(letter, []).append(axes)
    merged: Merged = {}
    for letter, suggestions in offered.items():
        axes: Axes = ()
        for suggestion in _widest_first(suggestions, mesh):
            axes = co_shard(letter, axes, suggestion)
        merged[letter] = axes
    return merged


def divisible(operands: Sequence[Operand], sizes: Mapping[str, int], mesh: Sequence[int]) -> Merged:
    """`sizes` of the letters; an axis that two letters want goes to the larger."""
    merged = {letter: divide(axes, sizes[letter], mesh) for letter, axes in _merged_letters(operands, mesh).items()}

    def largest(axis: int, letters: Sequence[str]) -> str:
        return max(letters, key=lambda letter: sizes[letter])

    return merge([(tuple(merged), tuple(merged.values()))], choose=largest)


def follow(operands: Sequence[Operand], sizes: Mapping[str, int], mesh: Sequence[int]) -> Merged:
    """The operand with the most shards, then the axes that the other adds to a dim; as far as sizes divide."""

    def shards(operand: Operand) -> tuple[bool, int]:
        co_sharded = sum(len(axes) > 1 for axes in operand[1])
        return co_sharded > 0, math.prod(mesh[axis] for axes in operand[1] for axis in axes)

    ranked = sorted(operands, key=shards, reverse=True)
    first, *others = ranked
    merged = dict(zip(*first, strict=True))
    used = {axis for axes in merged.values() for axis in axes}
    for letters, mapping in others:
        for letter, axes in zip(letters, mapping, strict=True):
            fresh = tuple(axis for axis in axes if axis not in used)
            kept = divide(merged[letter] + fresh, sizes[letter], mesh)
            used = (used | set(fresh)) - (set(merged[letter] + fresh) - set(kept))
            merged[letter] = kept
    return merged


def _owners(operands: Sequence[Operand], shapes: Sequence[Sequence[int]], mesh: Sequence[int]) -> dict[int, str]:
    """Batch letter that an axis serves: the first met, where its own tensor's size divides (or is 1)."""
    owners: dict[int, str] = {}
    for (letters, mapping), shape in zip(operands, shapes, strict=True):
        for letter, axes, size in zip(letters, mapping, shape, strict=True):
            if letter not in ("m", "n", "k"):
                for axis in axes if size == 1 else divide(axes, size, mesh):
                    owners.setdefault(axis, letter)
    return owners


def matmul(
    operands: Sequence[Operand], shapes: Sequence[Sequence[int]], sizes: Mapping[str, int], mesh: Sequence[int]
) -> Merged:
    """Batch dims, then the larger of m and n, then k. m and n keep what does not divide."""
    merged = _merged_letters(operands, mesh)
    owners = _owners(operands, shapes, mesh)
    free = sorted(("m", "n"), key=lambda letter: (-sizes.get(letter, 0), letter))
    taken: set[int] = set()
    for letter in [*(x for x in merged if x not in ("m", "n", "k")), *free, "k"]:
        if letter not in merged:
            continue
        batch = letter not in ("m", "n", "k")
        axes = tuple(a for a in merged[letter] if a not in taken and (not batch or owners.get(a) == letter))
        merged[letter] = axes if letter in free else divide(axes, sizes[letter], mesh)
        taken |= set(merged[letter])
    return merged
