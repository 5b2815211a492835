"""Our Program asks for what PyTorch 2.13 asks for: FLOPs, collectives and bytes of its own accounts, exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.oracle_schedules import read_lines
from benchmarks.oracle_torch import (
    account,
    check,
    degrees_of,
    differences,
    model_of,
    runtime_of,
    stored_account,
    workload_of,
    zero_of,
)
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


def _strategy(case: dict[str, Any]) -> Strategy:
    degrees = {name: int(column[0]) for name, column in degrees_of(case).items() if name != "gpus"}
    return Strategy(**degrees, sp=case["sp"], zero=zero_of(case), recompute=case["ac"], recompute_layers=case["layers"])


def _estimated(case: dict[str, Any]) -> Estimate:
    strategy = _strategy(case)
    workload = replace(workload_of(case), global_batch=case["mb"] * strategy.dp)
    return estimate(model_of(case), workload, load_cluster("dgx-h100"), runtime_of(case), strategy, detail=True)


VARIED = {
    "no wrapper": {"dp_mode": "none", "sp": True, "ac": "none"},
    "replicate": {"dp_mode": "replicate", "sp": True},
    "parameters kept after forward": {"dp_mode": "fsdp", "sp": False, "reshard_after_forward": False},
    "FSDP, recomputed": {"dp_mode": "fsdp", "sp": True, "reshard_after_forward": True, "ac": "full"},
    "root resharded": {"dp_mode": "fsdp", "root_reshard": True},
    "HSDP": {"dp_mode": "hsdp", "sp": True},
}


@pytest.mark.parametrize("kind", VARIED)
def test_the_table_that_users_see_has_the_same_calls_bytes_and_flops(
    cases: dict[str, dict[str, Any]], kind: str
) -> None:
    case = next(c for c in cases.values() if VARIED[kind].items() <= c.items() and c["tp"] > 1)
    found, stored = _estimated(case), stored_account(case)
    assert found.kernel_flops[0] == sum(stored.flops.values())
    axes = {"dp": ("dp+cp", "dp_shard+cp"), "dp_shard": ("dp_shard+cp",)}
    for collective, axis in {(c, axis) for _, c, axis, _ in stored.communication}:
        real = [v for (_, c, a, _), v in stored.communication.items() if (c, a) == (collective, axis)]
        ours = [c for c in found.communication if c.kind == collective and c.axis in axes.get(axis, (axis,))]
        assert sum(float(c.count[0]) for c in ours) == sum(v[0] for v in real)
        assert sum(float(c.payload_bytes[0]) for c in ours) == sum(v[1] for v in real)


def test_which_gradients_are_merged_is_the_runtimes_fact(cases: dict[str, dict[str, Any]]) -> None:
    """5L+1 all-reduces in torch, 2L+1 in Megatron and Paddle (README of the oracle, B1.3): one field apart."""
    case = cases["torch-0060"]
    key = ("backward", "all_reduce", "tp", "bf16")
    assert account(case).communication[key][0] == 5 * case["layers"] + 1
    merging = replace(runtime_of(case), merged_input_gradients=load_runtime("megatron").merged_input_gradients)
    assert account(case, merging).communication[key][0] == 2 * case["layers"] + 1
    # Aleph-Alpha/scaling: q, k and v are one linear, gate and up are two, and each reduces its own input's gradient
    apart = replace(merging, merged_input_gradients="attention")
    assert account(case, apart).communication[key][0] == 3 * case["layers"] + 1
