"""The one merge of shardings over an einsum-like notation; no sizes, no numbers.

A tensor's dims carry letters; a dim is sharded by an ordered tuple of mesh axes, major to minor.
Every SPMD rule is this merge between a notation and the reading of the merged letters:

>>> merged = merge([("mk", [("x",), ()]), ("kn", [(), ("y",)])])
>>> merged
{'m': ('x',), 'k': (), 'n': ('y',)}
>>> read("mn", merged)
(('x',), ('y',))

A letter that the output lacks was contracted: the output is partial on its axes.

>>> merged = merge([("mk", [(), ("x",)]), ("kn", [(), ()])])
>>> contracted("mn", merged)
('x',)

Two conflicts can occur and each has a policy. `combine` settles one letter that two operands shard
by different axes; `choose` settles one axis that shards two letters (an axis may occur once in a
tensor).

>>> merge([("ab", [("x",), ()]), ("ab", [(), ("x",)])])
{'a': ('x',), 'b': ()}
>>> merge([("a", [("x",)]), ("a", [("y",)])], combine=keep_first)
{'a': ('x',)}
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Axis = TypeVar("Axis", bound=Hashable)

WHOLE = "1"
"""The letter of a dim that is never sharded; it reads as () whatever the operands say."""


class MergeConflictError(ValueError):
    """Raised by the policies that refuse; the caller adds the operator's name."""


def refuse(letter: str, held: tuple[Axis, ...], new: tuple[Axis, ...]) -> tuple[Axis, ...]:
    raise MergeConflictError(f"dim {letter} is sharded by {held} in one operand and by {new} in another")


def keep_first(letter: str, held: tuple[Axis, ...], new: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return held


def replicate(letter: str, held: tuple[Axis, ...], new: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return ()


def co_shard(letter: str, held: tuple[Axis, ...], new: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Both: the axes of the later operand that the earlier lacks become minor."""
    return held + tuple(axis for axis in new if axis not in held)


def first_met(axis: Axis, letters: Sequence[str]) -> str:
    return letters[0]


def refuse_axis(axis: Axis, letters: Sequence[str]) -> str:
    raise MergeConflictError(f"mesh axis {axis} shards the dims {', '.join(letters)} at once")


def merge(
    operands: Sequence[tuple[Sequence[str], Sequence[tuple[Axis, ...]]]],
    *,
    combine: Callable[[str, tuple[Axis, ...], tuple[Axis, ...]], tuple[Axis, ...]] = refuse,
    choose: Callable[[Axis, Sequence[str]], str] = first_met,
) -> dict[str, tuple[Axis, ...]]:
    """letter -> mesh axes, over `operands` = (letters, axes of each dim) in order of precedence.

    A dim that is not sharded takes the sharding of any other operand's. `choose` gets the letters
    in the order in which they were met with that axis; the others lose it.
    """
    merged: dict[str, tuple[Axis, ...]] = {}
    met: dict[Axis, list[str]] = {}
    for letters, shardings in operands:
        for letter, axes in zip(letters, shardings, strict=True):
            held = merged.get(letter, ())
            merged[letter] = combine(letter, held, axes) if held and axes and held != axes else held or axes
            for axis in merged[letter]:
                holders = met.setdefault(axis, [])
                if letter not in holders:
                    holders.append(letter)
    for axis, holders in met.items():
        rivals = [letter for letter in holders if axis in merged[letter]]
        if len(rivals) > 1:
            kept = choose(axis, rivals)
            for letter in rivals:
                if letter != kept:
                    merged[letter] = tuple(other for other in merged[letter] if other != axis)
    return merged


def read(letters: Sequence[str], merged: Mapping[str, tuple[Axis, ...]]) -> tuple[tuple[Axis, ...], ...]:
    """The sharding of a tensor with these letters; a letter that nobody knows is not sharded."""
    return tuple(() if letter == WHOLE else merged.get(letter, ()) for letter in letters)


def contracted(letters: Sequence[str], merged: Mapping[str, tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """The mesh axes on which an output with these letters is partial."""
    return tuple(axis for letter, axes in merged.items() if letter not in letters for axis in axes)
