"""Our Program asks for what PyTorch 2.13 asks for: FLOPs, collectives and bytes of its own accounts, exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.oracle_schedules import read_lines
from benchmarks.oracle_torch import account, check, differences, model_of, runtime_of, stored_account, workload_of
from distplan.costmodel.estimate import Estimate, estimate
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import load_cluster

FILE = Path(__file__).parents[1] / "data" / "oracle" / "torch_cases.jsonl.gz"


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    return {case["id"]: case for case in read_lines(FILE)}


def test_every_case_agrees_in_every_field() -> None:
    tallies = check(FILE)
    assert len(tallies) == 8
    assert [line for tally in tallies.values() for line in tally.differ] == []


@pytest.mark.parametrize(
    ("fact", "broken"),
    [
        ("FLOPs", {"layers": 3}),
        ("collectives, calls", {"sp": False}),
        ("collectives, bytes in", {"world": 32}),
        ("gradients, bytes", {"vocab": 32008}),
        ("activations within 2 %", {"mb": 2}),
    ],
)
def test_another_case_would_not_agree(cases: dict[str, dict[str, Any]], fact: str, broken: dict[str, Any]) -> None:
    assert differences(cases["torch-0084"])[fact] == ""
    assert differences(cases["torch-0084"] | broken)[fact]


def _estimated(case: dict[str, Any], strategy: Strategy) -> Estimate:
    cluster = load_cluster("dgx-h100")
    workload = replace(workload_of(case), global_batch=case["mb"] * strategy.dp)
    return estimate(model_of(case), workload, cluster, runtime_of(case), strategy, detail=True)


def test_the_table_that_users_see_has_the_same_calls_and_bytes(cases: dict[str, dict[str, Any]]) -> None:
    case = cases["torch-0084"]
    strategy = Strategy(dp_shard=16, tp=4, sp=True, zero=3, micro_batch=case["mb"])
    table = _estimated(case, strategy).communication
    real = stored_account(case).communication
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        for axis in ("tp", "dp"):
            stored = [v for (_, k, a, _), v in real.items() if (k, a) == (kind, axis)]
            ours = [line for line in table if line.kind == kind and line.axis.startswith(axis)]
            assert sum(float(line.count[0]) for line in ours) == sum(v[0] for v in stored)
            assert sum(float(line.payload_bytes[0]) for line in ours) == sum(v[1] for v in stored)


def test_kernel_flops_of_the_estimate_are_what_torch_counts(cases: dict[str, dict[str, Any]]) -> None:
    case = cases["torch-0084"]
    strategy = Strategy(dp_shard=16, tp=4, sp=True, zero=3, micro_batch=case["mb"])
    assert _estimated(case, strategy).kernel_flops[0] == sum(stored_account(case).flops.values())


def test_which_gradients_are_merged_is_the_runtimes_fact(cases: dict[str, dict[str, Any]]) -> None:
    """5L+1 all-reduces in torch, 2L+1 in Megatron and Paddle (README of the oracle, B1.3): one field apart."""
    case = cases["torch-0060"]
    key = ("backward", "all_reduce", "tp", "bf16")
    assert account(case).communication[key][0] == 5 * case["layers"] + 1
    merging = replace(runtime_of(case), merged_input_gradients=load_runtime("megatron").merged_input_gradients)
    assert account(case, merging).communication[key][0] == 2 * case["layers"] + 1
