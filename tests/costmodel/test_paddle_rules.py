"""Laws of the paddle dialect, and the facts in which it differs from a textbook."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distplan.costmodel.paddle_attr import DistAttr, DistTensor, RuleRefusedError, as_integers, attr, tensor
from distplan.costmodel.paddle_rules import attribute_names, infer, rule_names, spec_of
from distplan.hardware.errors import UnknownNameError

MESH = (2, 4)


def mapping(rank: int) -> st.SearchStrategy[list[int]]:
    """Placements of a tensor of `rank` dims on MESH: each axis on at most one dim."""
    places = st.tuples(*(st.integers(-1, rank - 1) for _ in MESH))
    return places.map(lambda at: [next((a for a, dim in enumerate(at) if dim == d), -1) for d in range(rank)])


def one(answer: object) -> DistAttr:
    assert isinstance(answer, DistAttr)
    return answer


@settings(max_examples=150, deadline=None)
@given(x=mapping(3), y=mapping(2))
def test_the_placements_that_matmul_asks_for_are_a_fixed_point(x: list[int], y: list[int]) -> None:
    first = infer("matmul", "forward", MESH, [tensor((8, 64, 32), x), tensor((32, 48), y)])
    again = [DistTensor(shape=s, attr=one(a)) for s, a in zip(((8, 64, 32), (32, 48)), first.inputs, strict=True)]
    assert infer("matmul", "forward", MESH, again) == first


@settings(max_examples=150, deadline=None)
@given(x=mapping(3), y=mapping(3))
def test_no_axis_serves_two_dims_or_a_dim_and_a_partial_sum(x: list[int], y: list[int]) -> None:
    done = infer("matmul", "forward", MESH, [tensor((8, 64, 32), x), tensor((8, 32, 48), y)])
    for answer in (*done.inputs, *done.outputs):
        used = [axis for axes in one(answer).dims_mapping for axis in axes] + list(one(answer).partial)
        assert len(used) == len(set(used))


@settings(max_examples=100, deadline=None)
@given(out=mapping(3))
def test_in_reverse_the_inputs_of_a_matmul_give_the_output_back(out: list[int]) -> None:
    sizes = ((8, 64, 32), (32, 48), (8, 64, 48))
    whole = [tensor(size, [-1] * len(size)) for size in sizes[:2]]
    back = infer("matmul", "reverse", MESH, whole, outputs=[tensor(sizes[2], out)])
    forth = [DistTensor(shape=s, attr=one(a)) for s, a in zip(sizes[:2], back.inputs, strict=True)]
    assert as_integers(one(infer("matmul", "forward", MESH, forth).outputs[0])) == out


@pytest.mark.parametrize(
    ("x", "y", "out", "partial"),
    [
        ([0, -1], [0, -1], [0, -1], {}),  # m before k
        ([-1, 0], [-1, 0], [-1, 0], {}),  # n before k
        ([0, -1], [-1, 0], [0, -1], {}),  # the larger of m and n
        ([-1, 0], [1, -1], [-1, -1], {0: "SUM", 1: "SUM"}),  # two axes on k co-shard it
    ],
)
def test_matmul_prefers_the_dims_of_the_output(x: list[int], y: list[int], out: list[int], partial: object) -> None:
    done = one(infer("matmul", "forward", MESH, [tensor((64, 32), x), tensor((32, 48), y)]).outputs[0])
    assert (as_integers(done), done.partial) == (out, partial)


def test_a_residual_reduces_its_partial_operand_first_and_a_product_does_not() -> None:
    whole = tensor((16, 32), [-1, -1])
    due = DistTensor(shape=(16, 32), attr=attr([-1, -1], {0: "SUM"}))
    assert one(infer("add", "forward", MESH, [whole, due]).inputs[1]).partial == {}
    assert one(infer("multiply", "forward", MESH, [whole, due]).outputs[0]).partial == {0: "SUM"}
    assert one(infer("add_n", "forward", MESH, [(due, due)]).outputs[0]).partial == {0: "SUM"}


def test_a_vocabulary_sharded_table_is_partial_statically_and_gathered_dynamically() -> None:
    inputs = [tensor((8, 16), [-1, -1]), tensor((1024, 64), [1, -1])]
    assert one(infer("embedding", "forward", MESH, inputs).outputs[0]).partial == {1: "SUM"}
    gathered = infer("embedding_no_vocab_parallel", "forward", MESH, inputs)
    assert as_integers(one(gathered.inputs[1])) == [-1, -1]
    with pytest.raises(RuleRefusedError):
        infer("embedding", "forward", MESH, inputs, attributes={"padding_idx": 3})


def test_unary_drops_what_does_not_divide_and_binary_keeps_it() -> None:
    uneven = tensor((7, 12), [0, 1])
    assert as_integers(one(infer("silu", "forward", MESH, [uneven]).outputs[0])) == [-1, 1]
    assert as_integers(one(infer("add", "forward", MESH, [uneven, uneven]).outputs[0])) == [0, 1]


def test_one_dim_on_two_axes_is_refused_by_binary_rules() -> None:
    with pytest.raises(RuleRefusedError, match=r"sharded by \(0,\) in one operand and by \(1,\) in another"):
        infer("add", "forward", MESH, [tensor((16, 32), [0, -1]), tensor((16, 32), [1, -1])])


def test_a_reshape_folds_the_shardings_of_flattened_dims_into_a_co_shard() -> None:
    done = infer("reshape", "forward", MESH, [tensor((8, 16, 32), [0, 1, -1])], attributes={"shape": [-1, 32]})
    assert as_integers(one(done.inputs[0])) == [[0, 1], -1, -1]
    assert as_integers(one(done.outputs[0])) == [[0, 1], -1]


def test_a_rule_that_is_missing_is_an_error_with_the_near_miss() -> None:
    with pytest.raises(UnknownNameError, match="did you mean"):
        infer("matmull", "forward", MESH, [])
    with pytest.raises(UnknownNameError):
        spec_of("adamw", "reverse")


def test_attributes_are_named_in_the_order_of_the_real_function() -> None:
    assert attribute_names("lookup_table_v2") == ["padding_idx", "sparse"]
    assert len(rule_names()) > 150
