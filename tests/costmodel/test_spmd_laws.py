"""Laws of the ideal dialect: what is inferred, executed on simulated ranks, is what one device computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distplan.costmodel.interpret_einsum import Plan, Product, difference, moved, pieces, plan, prove, sizes_of
from distplan.costmodel.interpret_mesh import Mesh
from distplan.costmodel.layout import TP, Layout, ordered
from distplan.costmodel.spmd import SpmdError, infer_einsum, infer_elementwise, reshard

NAMES = (("x", "y", "z"), ("dp_shard", "cp_kv", "tp_kv"), ("tp_kv", "tp_rep", "cp_kv"), ("tp_rep", "dp_shard", "x"))
LAWS = settings(max_examples=1500, deadline=None, derandomize=True)
FEWER = settings(LAWS, max_examples=400)
EXACT = 1e-9


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.sampled_from(NAMES))[: draw(st.integers(1, 3))]
    return Mesh(tuple((name, draw(st.sampled_from((2, 2, 3)))) for name in names))


@st.composite
def layouts(draw: st.DrawFn, dims: tuple[str, ...], mesh: Mesh) -> Layout:
    """Every axis shards a dim (co-sharding in any order), or is Partial, or does neither."""
    shards: dict[str, list[str]] = {dim: [] for dim in dims}
    partial = []
    for axis in draw(st.permutations([name for name, _ in mesh.axes])):
        place = draw(st.sampled_from((*dims, *dims, "", "+")))
        if place == "+":
            partial.append(axis)
        elif place:
            shards[place].append(axis)
    return Layout(dims, tuple(tuple(shards[dim]) for dim in dims), tuple(partial))


@st.composite
def products(draw: st.DrawFn, mesh: Mesh) -> Product:
    """Two or three operands over at most five letters; each letter is in two of operands and result."""
    count = draw(st.sampled_from((2, 2, 2, 3)))
    terms: list[list[str]] = [[] for _ in range(count + 1)]
    for letter in "abcde"[: draw(st.integers(1, 5))]:
        for at in draw(st.sampled_from([c for c in _choices(count)])):
            terms[at].append(letter)
    assume(all(terms[:count]))
    operands = tuple(draw(layouts(tuple(draw(st.permutations(term))), mesh)) for term in terms[:count])
    flags = tuple(draw(st.booleans()) for _ in range(count))
    return Product(operands=operands, is_weight=flags, result=tuple(terms[count]))


def _choices(count: int) -> list[tuple[int, ...]]:
    everywhere = range(count + 1)
    found = [(a, b) for a in everywhere for b in everywhere if a < b]
    return [*found, tuple(everywhere)]


@LAWS
@given(st.data())
def test_an_inferred_product_and_its_gradients_equal_those_of_one_device(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    made = plan(data.draw(products(mesh)))
    assert prove(made, mesh, seed=1).error < EXACT


@LAWS
@given(st.data())
def test_a_reshard_ends_in_its_target_and_keeps_the_tensor(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    dims = ("a", "b", "c")[: data.draw(st.integers(1, 3))]
    source, target = data.draw(layouts(dims, mesh)), data.draw(layouts(dims, mesh))
    target = Layout(dims, target.shards, tuple(a for a in target.partial if a in source.partial))
    steps = reshard(source, target)
    rng = np.random.default_rng(2)
    whole = rng.normal(size=[mesh.ranks] * len(dims))
    stack = moved(pieces(whole, source, mesh, rng), source, steps, mesh)
    assert difference(stack, target, whole, mesh) < EXACT
    end = steps[-1].result if steps else source
    assert (end.shards, set(end.partial)) == (target.shards, set(target.partial))


@FEWER
@given(st.data())
def test_a_group_never_mixes_tp_with_other_axes_and_nothing_moves_that_stays(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    source, target = data.draw(layouts(("a", "b"), mesh)), data.draw(layouts(("a", "b"), mesh))
    target = Layout(target.dims, target.shards, ())
    for step in reshard(source, target):
        assert len({axis in TP for axis in step.axes}) == 1
    assert reshard(target, target) == ()


@FEWER
@given(st.data())
def test_a_sum_of_equally_partial_tensors_needs_no_communication(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    layout = data.draw(layouts(("a", "b"), mesh))
    found = infer_elementwise((layout, layout), ("a", "b"), linear=True)
    assert found.inputs == (layout, layout)
    assert found.output == layout


@FEWER
@given(st.data())
def test_no_axis_shards_two_letters_and_contracted_axes_are_partial(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    product = data.draw(products(mesh))
    found = infer_einsum(product.operands, product.is_weight, product.result)
    used = [axis for axes in found.letters.values() for axis in axes]
    assert len(used) == len(set(used))
    spent = {axis for dim, axes in found.letters.items() if dim not in product.result for axis in axes}
    assert spent <= set(found.output.partial)
    assert not set(found.output.partial) & set(found.output.sharded)


def test_an_execution_notices_a_reduction_that_is_missing() -> None:
    """The proof can fail: the same product with its output read as if it were whole."""
    mesh = Mesh((("x", 2),))
    sharded = Product(
        operands=(Layout(("m", "k"), ((), ("x",))), Layout(("k", "n"), (("x",), ()))),
        is_weight=(False, False), result=("m", "n"),
    )  # fmt: skip
    made = plan(sharded)
    assert prove(made, mesh, seed=3).error < EXACT
    whole = Plan(
        product=made.product, moves=made.moves, gradients=made.gradients,
        inference=type(made.inference)(made.inference.inputs, made.inference.output.whole(), made.inference.letters),
    )  # fmt: skip
    assert prove(whole, mesh, seed=3).output > 0.1


def test_what_is_whole_cannot_become_partial() -> None:
    with pytest.raises(SpmdError, match="would become Partial"):
        reshard(Layout(("a",), ((),)), Layout(("a",), ((),), ("x",)))


def test_sizes_are_the_least_that_all_placements_divide() -> None:
    made = plan(Product(
        operands=(Layout(("m", "k"), (("x", "y"), ())), Layout(("k", "n"), ((), ()))),
        is_weight=(False, False), result=("m", "n"),
    ))  # fmt: skip
    assert sizes_of(made, Mesh((("x", 2), ("y", 3)))) == {"m": 6, "k": 2, "n": 2}


def test_axes_keep_mesh_order_and_strangers_follow() -> None:
    assert ordered(["zz", "tp_kv", "dp_shard", "aa"]) == ("dp_shard", "tp_kv", "zz", "aa")
