"""Whole decoder blocks propagate through our paddle dialect as through PaddlePaddle 3.3.1's PIR programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.oracle_pir import check, decoder, placements_of, stored_records
from benchmarks.oracle_schedules import read_lines
from distplan.costmodel.estimate import estimate
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Workload
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import precision
from distplan.hardware.cluster import load_cluster

FILE = Path(__file__).parents[1] / "data" / "oracle" / "paddle_pir_blocks.jsonl.gz"


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return list(read_lines(FILE))


def test_every_operator_reshard_collective_and_gradient_agrees() -> None:
    tallies = check(FILE)
    assert {"pir matmul_grad", "pir reshards", "pir final collectives", "pir weights' gradients"} < set(tallies)
    assert [line for tally in tallies.values() for line in tally.differ] == []


def test_our_program_has_as_many_operators_as_paddles(cases: list[dict[str, Any]]) -> None:
    assert all(len(decoder(case).block.records) == len(stored_records(case)) for case in cases)


def test_other_placements_of_the_inputs_would_not_agree(cases: list[dict[str, Any]]) -> None:
    case = next(case for case in cases if case["strategy"] == "DP x TP")
    real = decoder(case).block
    other = decoder(case | {"w": case["w"] | {"q": {"mp": "S0"}}}).block
    assert other.records != real.records
    assert other.collectives() != real.collectives()


def test_the_gradient_of_a_replicated_weight_is_left_partial_on_dp(cases: list[dict[str, Any]]) -> None:
    case = next(case for case in cases if case["strategy"] == "single-axis DP")
    made = decoder(case)
    for name, weight in made.weights.items():
        gradient = made.block.gradient(weight)
        assert gradient is not None, name
        assert placements_of(gradient.attr, 1) == ("P",)


@pytest.mark.parametrize("layers", [1, 2])
def test_all_reduces_under_tp_are_those_of_our_engine_with_paddles_runtime(
    cases: list[dict[str, Any]], layers: int
) -> None:
    """4L + 1 of [tokens, hidden] (README of the oracle, A3): forward 2L, backward 2L + 1. Paddle gathers the
    vocabulary-parallel table where our embedding all-reduces its output, so the embedding is left out."""
    case = next(c for c in cases if c["strategy"].startswith("TP, vocab") and c["layers"] == layers)
    sizes = case["model"]
    whole = 4.0 * sizes["B"] * sizes["S"] * sizes["H"]
    sent = decoder(case).block.collectives()
    theirs = sum(n for exchange, n in sent.items() if exchange.op == "all_reduce" and exchange.payload_bytes == whole)
    head_dim = sizes["H"] // sizes["heads"]
    mixer = Attention(heads=sizes["heads"], kv_heads=sizes["kv"], head_dim=head_dim, v_head_dim=head_dim)
    kind = LayerKind(name="layer", mixer=mixer, ffn=Mlp(ffn=sizes["ffn"], gated=True))
    model = Model(
        name="pir", hidden=sizes["H"], vocab=sizes["vocab"], kinds={"layer": kind}, pattern=("layer",) * layers,
        tied_embedding=False, positions="none",
    )  # fmt: skip
    workload = Workload(seq_len=sizes["S"], global_batch=sizes["B"], precision=precision("fp32"))
    strategy = Strategy(tp=4, micro_batch=sizes["B"], zero=0)
    found = estimate(model, workload, load_cluster("dgx-h100"), load_runtime("paddle"), strategy, detail=True)
    ours = [c for c in found.communication if c.kind == "all_reduce" and not c.name.startswith("embedding")]
    assert sum(float(c.count[0]) for c in ours if float(c.payload_bytes[0]) == whole * float(c.count[0])) == theirs
    assert theirs == 4 * layers + 1
