"""Simulated collectives are the ones of the textbooks, on meshes of two axes and two views."""

from __future__ import annotations

import numpy as np
import pytest

from distplan.costmodel.interpret_mesh import (
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    spread,
    starts,
    take_block,
)
from distplan.costmodel.layout import Layout
from distplan.costmodel.spmd import SpmdError

MESH = Mesh((("x", 2), ("y", 3)))
WHOLE = np.arange(12.0 * 6.0).reshape(12, 6)


def test_ranks_run_over_the_last_axis_first_and_groups_follow_the_order_asked_for() -> None:
    assert MESH.ranks == 6
    assert MESH.groups(("y",)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert MESH.groups(("x",)).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert MESH.groups(("y", "x")).tolist() == [[0, 3, 1, 4, 2, 5]]
    assert MESH.position(("x",)).tolist() == [0, 0, 0, 1, 1, 1]


def test_the_first_axis_of_a_dim_is_outermost() -> None:
    stack = spread(WHOLE, Layout(("a", "b"), (("y", "x"), ())), MESH)
    assert [int(block[0, 0]) // 6 for block in stack] == [0, 4, 8, 2, 6, 10]


def test_all_gather_undoes_a_shard() -> None:
    stack = spread(WHOLE, Layout(("a", "b"), (("x", "y"), ())), MESH)
    for block in all_gather(stack, MESH, ("x", "y"), 0):
        np.testing.assert_array_equal(block, WHOLE)


def test_reduce_scatter_is_an_all_reduce_and_a_block_of_it() -> None:
    stack = np.random.default_rng(0).normal(size=(6, 6, 4))
    summed = all_reduce(stack, MESH, ("y",))
    np.testing.assert_allclose(summed[4], stack[3] + stack[4] + stack[5])
    np.testing.assert_allclose(reduce_scatter(stack, MESH, ("y",), 0)[4], summed[4][2:4])


def test_all_to_all_moves_a_shard_from_one_dim_to_another() -> None:
    stack = spread(WHOLE, Layout(("a", "b"), (("y",), ())), MESH)
    moved = all_to_all(stack, MESH, ("y",), 0, 1)
    np.testing.assert_array_equal(moved, spread(WHOLE, Layout(("a", "b"), ((), ("y",))), MESH))


def test_a_block_that_does_not_divide_is_padded_with_zeros() -> None:
    stack = np.ones((6, 1, 2))
    blocks = take_block(stack, MESH, ("y",), 0)
    assert blocks[:, 0, 0].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_starts_are_the_first_indices_of_the_blocks() -> None:
    layout = Layout(("a", "b"), (("x",), ("y",)))
    found = starts(layout, MESH, (6, 2))
    assert found["a"].tolist() == [0, 0, 0, 6, 6, 6]
    assert found["b"].tolist() == [0, 2, 4, 0, 2, 4]


def test_the_two_views_have_the_same_ranks_and_a_group_lies_in_one() -> None:
    mesh = Mesh((("dp_shard", 2), ("tp_kv", 2)), (("edp", 2), ("ep", 2)))
    assert mesh.groups(("ep",)).tolist() == mesh.groups(("tp_kv",)).tolist()
    with pytest.raises(SpmdError, match="both views"):
        mesh.groups(("ep", "tp_kv"))
