"""The space is complete, has no row twice, and counts what it never builds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import dense, mixture, workload

from distplan.costmodel.model import Model
from distplan.costmodel.runtime import list_runtimes, load_runtime
from distplan.costmodel.strategy import DEGREES, STRUCTURE, Strategies, Strategy
from distplan.hardware.errors import DistplanError
from distplan.planner.constraints import Context, apply, codes, explain_row
from distplan.planner.rules import MASKS
from distplan.planner.space import enumerate_all, legal_chunks, space

NAMES = (*DEGREES, *STRUCTURE)


def context(
    gpus: int, runtime: str = "megatron", *, model: Model | None = None, batch: int = 48, seq: int = 4096,
    domain: int = 8,
) -> Context:  # fmt: skip
    work = workload(batch, seq)
    return Context(model=model or dense(), workload=work, runtime=load_runtime(runtime), gpus=gpus, domain=domain)


def rows_of(strategies: Strategies) -> list[Strategy]:
    return [strategies[i] for i in range(len(strategies))]


def legal(of: Context, bounds: Mapping[str, tuple[int | str | bool, ...]] | None = None) -> list[Strategy]:
    return [row for chunk in legal_chunks(space(of, bounds or {}), of, {}) for row in rows_of(chunk)]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def canonical(s: Strategy, of: Context) -> bool:
    """Written from the words in space.py's head, row by row."""
    sharded_over = s.dp_shard * s.cp
    whole = s.dp_replicate == 1
    one_domain = sharded_over == of.domain
    options = whole if s.zero == 0 else sharded_over > 1 and (whole or one_domain)
    single = s.schedule == "f_then_b" and s.micro_batch * s.dp == of.workload.global_batch
    repeated = single and "1f1b" in of.runtime.legal["schedule"] and of.runtime.rules["micro_batches"] == "any"
    return (
        options
        and (s.cp_kind == "none") == (s.cp == 1)
        and (1 < s.cp_inner < s.cp and s.cp % s.cp_inner == 0 if s.cp_kind == "two_level" else s.cp_inner == 1)
        and s.cp_inner <= of.domain
        and not (s.sp and s.tp == 1)
        and (s.schedule in ("interleaved", "zb_v")) == (s.vpp > 1)
        and (s.schedule != "zb_v" or s.vpp == 2)
        and (s.pp > 1 or s.schedule == "1f1b")
        and not repeated
    )


def brute(of: Context) -> set[Strategy]:
    """Every combination of degrees that multiply, and of all options that exist; filtered one by one."""
    found = set()
    kept = [value for value in STRUCTURE["cp_kind"]]
    for tp, pp, cp, replicate in itertools.product(divisors(of.gpus), repeat=4):
        if of.gpus % (tp * pp * cp * replicate):
            continue
        shard = of.gpus // (tp * pp * cp * replicate)
        vpps = range(1, of.model.layers // pp + 3)
        batches = divisors(of.workload.global_batch)
        for vpp, batch, kind, inner, sp, zero, schedule in itertools.product(
            vpps, batches, kept, range(1, cp + 1), (False, True), range(4), STRUCTURE["schedule"]
        ):
            row = Strategy(
                dp_replicate=replicate, dp_shard=shard, tp=tp, pp=pp, vpp=vpp, cp=cp, cp_inner=inner, cp_kind=kind,
                sp=sp, zero=zero, micro_batch=batch, schedule=schedule, recompute="full",
            )  # fmt: skip
            if canonical(row, of):
                found.add(row)
    rows = sorted(found, key=str)
    ok, _ = apply(Strategies.of(rows), of)
    return {row for row, keep in zip(rows, ok, strict=True) if keep}


@pytest.mark.parametrize(
    ("gpus", "runtime"), [(1, "any"), (8, "any"), (8, "megatron"), *((6, name) for name in list_runtimes())]
)
def test_space_is_every_legal_canonical_row(runtime: str, gpus: int) -> None:
    of = context(gpus, runtime, model=dense(layers=6), domain=4, batch=24)
    assert set(legal(of, {"recompute": ("full",)})) == brute(of)


@pytest.mark.parametrize("runtime", list_runtimes())
def test_no_row_occurs_twice(runtime: str) -> None:
    rows = rows_of(enumerate_all(context(12, runtime), {}))
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("runtime", list_runtimes())
def test_degrees_multiply_to_the_gpus(runtime: str) -> None:
    rows = enumerate_all(context(24, runtime), {}).columns
    product = rows["dp_replicate"] * rows["dp_shard"] * rows["tp"] * rows["pp"] * rows["cp"]  # type: ignore[operator]
    assert set(product) == {24.0}


@pytest.mark.parametrize("runtime", [name for name in list_runtimes() if name != "any"])
@pytest.mark.parametrize("gpus", [8, 12, 16])
def test_what_one_runtime_runs_any_does_not_refuse(runtime: str, gpus: int) -> None:
    one, union = context(gpus, runtime), context(gpus, "any")
    rows = legal(one)
    ok, counts = apply(Strategies.of(rows), union)
    assert rows and ok.all(), counts


@pytest.mark.parametrize("runtime", list_runtimes())
def test_counts_in_two_steps_are_those_of_the_whole_space_row_by_row(runtime: str) -> None:
    of = context(24, runtime, batch=48, model=dense(layers=10, heads=12, hidden=768, vocab=50257, pad=1))
    whole = enumerate_all(of, {})
    ok, expected = apply(whole, of)
    found = space(of, {})
    counts = dict(found.rejected)
    rows = [row for chunk in legal_chunks(found, of, counts) for row in rows_of(chunk)]
    assert found.enumerated == len(whole)
    assert {k: v for k, v in counts.items() if v} == {k: v for k, v in expected.items() if v}
    assert rows == rows_of(whole.take(ok))


@settings(max_examples=20, deadline=None)
@given(chunk_rows=st.integers(1, 4000))
def test_order_does_not_depend_on_the_chunk(chunk_rows: int) -> None:
    of = context(8, "any")
    (whole,) = legal_chunks(space(of, {}), of, {}, 1 << 30)
    chunks = list(legal_chunks(space(of, {}), of, {}, chunk_rows))
    for name in NAMES:
        assert np.array_equal(np.concatenate([chunk.columns[name] for chunk in chunks]), whole.columns[name])


def test_a_row_alone_is_judged_as_in_its_batch() -> None:
    of = context(16, "any", model=dense(heads=12, hidden=768))
    whole = enumerate_all(of, {})
    ok, _ = apply(whole, of)
    step = max(1, len(whole) // 300)
    for i in range(0, len(whole), step):
        alone = all(v.warning for v in explain_row(whole[i], of))
        assert alone == ok[i], whole[i]


def test_experts_are_spread_over_the_ranks_of_a_stage() -> None:
    of = context(16, "megatron", model=mixture(8))
    rows = legal(of)
    assert {row.ep for row in rows} == {1, 2, 4, 8}
    for row in rows:
        ranks = row.dp * row.cp * row.tp
        assert ranks % (row.ep * row.etp) == 0
        assert row.sp == (row.tp > 1)


def test_dense_models_have_no_expert_degrees() -> None:
    assert {(row.ep, row.etp) for row in legal(context(16))} == {(1, 1)}


def test_shards_fill_the_group_or_one_domain_unless_listed() -> None:
    of = context(64, batch=64, domain=8)
    assert {row.dp_shard * row.cp for row in legal(of) if row.dp_replicate > 1} == {8}
    assert {row.dp_shard for row in legal(of, {"dp_shard": (2, 4)})} == {2, 4}


@pytest.mark.parametrize(
    ("bounds", "field", "values"),
    [
        ({"tp": (2, 4)}, "tp", {2, 4}),
        ({"pp": (2,), "vpp": (2,)}, "vpp", {2}),
        ({"recompute": ("full",)}, "recompute", {"full"}),
        ({"zero": (1,), "dp": (8,)}, "zero", {1}),
        ({"tp": (4,), "sp": (True,)}, "sp", {True}),
        ({"micro_batch": (1, 3)}, "micro_batch", {1, 3}),
        ({"cp": (8,), "cp_kind": ("two_level",)}, "cp_inner", {2, 4}),
        ({"cp": (8,), "cp_kind": ("two_level",), "cp_inner": (4,)}, "cp_inner", {4}),
    ],
)
def test_bounds_hold(bounds: dict[str, tuple[int | str | bool, ...]], field: str, values: set[object]) -> None:
    assert {getattr(row, field) for row in legal(context(8), bounds)} == values


def test_a_bound_that_the_runtime_refuses_is_counted_under_its_code() -> None:
    of = context(8)
    found = space(of, {"zero": (3,), "dp": (8,)})
    counts: dict[str, int] = {}
    assert not sum(len(chunk) for chunk in legal_chunks(found, of, counts))
    assert counts["DP030"] == found.enumerated > 0


@pytest.mark.parametrize(
    ("bounds", "word"),
    [({"tpp": (2,)}, "tp"), ({"tp": (0,)}, "tp"), ({"recompute": ("ful",)}, "full"), ({"tp": (True,)}, "tp")],
)
def test_a_wrong_bound_is_refused_with_what_would_be_right(
    bounds: dict[str, tuple[int | str | bool, ...]], word: str
) -> None:
    with pytest.raises(DistplanError, match=word):
        space(context(8), bounds)


def test_every_mask_has_words_and_every_code_a_mask() -> None:
    assert list(codes()) == list(MASKS)


def test_405b_on_16384_gpus_is_enumerated_whole_and_quickly() -> None:
    model = dense(layers=126, heads=128, kv_heads=8, hidden=16384, ffn=53248, vocab=128256)
    of = context(16384, model=model, batch=2048, seq=8192)
    start = time.perf_counter()
    found = space(of, {})
    left = sum(len(chunk) for chunk in legal_chunks(found, of, {}))
    assert time.perf_counter() - start < 3.0
    assert left > 100_000
    # pp·vpp = 64 counts embedding and loss (126 + 2), as the published plan does
    published = {"tp": (8,), "pp": (16,), "cp": (1,), "vpp": (8,), "micro_batch": (1,)}
    assert legal(of, published)
    assert math.prod((8, 16, 128)) == of.gpus
