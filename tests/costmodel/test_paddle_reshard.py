"""Laws of resharding as the static pass does it, and of the mode that spares its waste."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distplan.costmodel.paddle_attr import RuleRefusedError
from distplan.costmodel.paddle_reshard import reshard

MESH, SHAPE = (2, 4), (16, 32)
PLACED = st.tuples(*(st.sampled_from(("R", "S0", "S1", "P")) for _ in MESH)).filter(
    lambda p: p[0] != p[1] or not p[0].startswith("S")
)


@settings(max_examples=200, deadline=None)
@given(source=PLACED, target=PLACED)
def test_the_best_mode_never_gives_more_to_collectives(source: tuple[str, ...], target: tuple[str, ...]) -> None:
    def given_bytes(best: bool) -> float:
        exchanges = reshard(MESH, SHAPE, source, target, best=best).collectives
        return sum(e.payload_bytes * (len(e.ranks) - 1) for e in exchanges)

    assert given_bytes(True) <= given_bytes(False)


@given(placed=PLACED)
def test_staying_costs_nothing(placed: tuple[str, ...]) -> None:
    assert reshard(MESH, SHAPE, placed, placed).ops == ()


def test_on_two_axes_a_moved_shard_is_gathered_and_sliced_and_at_best_exchanged() -> None:
    real = reshard(MESH, SHAPE, ("R", "S0"), ("R", "S1"))
    best = reshard(MESH, SHAPE, ("R", "S0"), ("R", "S1"), best=True)
    assert [e.op for e in real.collectives] == ["all_gather"]
    assert [e.op for e in best.collectives] == ["all_to_all"]


@settings(max_examples=50, deadline=None)
@given(source=PLACED, target=PLACED, factor=st.sampled_from((2, 3, 8)))
def test_bytes_grow_with_the_tensor(source: tuple[str, ...], target: tuple[str, ...], factor: int) -> None:
    once, more = reshard(MESH, SHAPE, source, target), reshard(MESH, (16 * factor, 32), source, target)
    assert [e.payload_bytes * factor for e in once.collectives] == [e.payload_bytes for e in more.collectives]


@pytest.mark.parametrize(("source", "target"), [("S0", "P"), ("PAVG", "S0"), ("PMAX", "P")])
def test_what_the_real_system_has_no_function_for_is_refused(source: str, target: str) -> None:
    with pytest.raises(RuleRefusedError):
        reshard((4,), SHAPE, (source,), (target,))


def test_an_uneven_sum_is_padded_before_it_is_scattered() -> None:
    done = reshard((4,), (10, 30), ("P",), ("S0",))
    assert done.ops == ("concat", "reduce_scatter")
    assert done.collectives[0].payload_bytes == 12 * 30 * 4
