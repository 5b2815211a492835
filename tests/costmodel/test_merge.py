"""The one merge: what no operand disputes stays, and each policy settles its own conflict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distplan.costmodel.merge import (
    WHOLE,
    MergeConflictError,
    co_shard,
    contracted,
    keep_first,
    merge,
    read,
    refuse_axis,
    replicate,
)

AXES = st.sampled_from(((), ("x",), ("y",), ("x", "y")))


@given(axes=st.lists(AXES, min_size=3, max_size=3))
def test_a_dim_takes_the_sharding_of_whichever_operand_has_one(axes: list[tuple[str, ...]]) -> None:
    stated = [a if i == 1 else () for i, a in enumerate(axes)]
    assert merge([("a", [a]) for a in stated]) == {"a": axes[1]}


@given(pairs=st.lists(st.tuples(AXES, AXES), min_size=1, max_size=3))
def test_after_the_merge_an_axis_shards_one_letter(pairs: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
    merged = merge([("ab", list(pair)) for pair in pairs], combine=co_shard)
    used = [axis for axes in merged.values() for axis in axes]
    assert len(used) == len(set(used))


@pytest.mark.parametrize(("combine", "expected"), [(keep_first, ("x",)), (replicate, ()), (co_shard, ("x", "y"))])
def test_a_letter_on_two_axes(combine: object, expected: tuple[str, ...]) -> None:
    assert merge([("a", [("x",)]), ("a", [("y",)])], combine=combine) == {"a": expected}  # type: ignore[arg-type]
    with pytest.raises(MergeConflictError):
        merge([("a", [("x",)]), ("a", [("y",)])])


def test_an_axis_on_two_letters_goes_to_the_first_or_to_the_chosen() -> None:
    operands = [("mk", [("x",), ()]), ("kn", [(), ("x",)])]
    assert merge(operands) == {"m": ("x",), "k": (), "n": ()}
    assert merge(operands, choose=lambda axis, letters: letters[-1])["n"] == ("x",)
    with pytest.raises(MergeConflictError, match="axis x shards the dims m, n"):
        merge(operands, choose=refuse_axis)


def test_an_output_is_partial_on_the_axes_of_what_it_lacks() -> None:
    merged = merge([("mk", [("x",), ("y",)]), ("kn", [("y",), ()])])
    assert read("mn", merged) == (("x",), ())
    assert contracted("mn", merged) == ("y",)
    assert read((WHOLE, "z"), merged) == ((), ())
