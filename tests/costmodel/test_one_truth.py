"""One strategy alone equals itself inside a batch, bit for bit."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from distplan.costmodel import tables
from distplan.costmodel.estimate import Estimate, estimate, tabulate
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import STRUCTURE, Strategies, Strategy
from distplan.costmodel.workload import workload
from distplan.hardware.calibration import Calibration, Entry
from distplan.hardware.cluster import Cluster, load_cluster
from distplan.planner.constraints import Context
from distplan.planner.space import legal_chunks, space


def random_rows(
    model_name: str, gpus: int, runtime_name: str, count: int, cluster: Cluster | None = None, **overrides: Any
) -> tuple[object, ...]:
    found = load_model(model_name)
    work = workload(found.model, found.workload, gpus=gpus, overrides=overrides)
    runtime, cluster = load_runtime(runtime_name), cluster or load_cluster("dgx-h100")
    context = Context(model=found.model, workload=work, runtime=runtime, gpus=gpus, domain=8)
    chunks = list(legal_chunks(space(context, {}), context, {}))
    columns = {name: np.concatenate([c.columns[name] for c in chunks]) for name in chunks[0].columns}
    chosen = np.random.default_rng(0).choice(len(columns["tp"]), size=count, replace=False)
    return found.model, work, cluster, runtime, Strategies({n: c[chosen] for n, c in columns.items()})


def columns_of(found: Estimate) -> dict[str, np.ndarray]:
    columns = {}
    for f in fields(Estimate):
        value = getattr(found, f.name)
        if isinstance(value, np.ndarray):
            columns[f.name] = value
        elif isinstance(value, dict):
            columns |= {f"{f.name}.{key}": part for key, part in value.items()}
    return columns


def fresh() -> None:
    """Forget every combination that has been priced, so that the next batch prices its own."""
    tables._engine.cache_clear()


@pytest.mark.parametrize(
    "model,gpus,runtime,count",
    [
        ("llama-3.1-405b", 1024, "megatron", 2000),
        ("gemma-2-27b", 256, "torchtitan", 300),
        ("gpt3-175b", 768, "any", 300),
        ("deepseek-v3", 96, "megatron", 200),
    ],
)
def test_a_row_alone_in_a_batch_and_in_odd_chunks_has_the_same_bits(
    model: str, gpus: int, runtime: str, count: int
) -> None:
    given = random_rows(model, gpus, runtime, count)
    rows = given[4]
    fresh()
    whole = columns_of(estimate(*given, detail=False))  # type: ignore[arg-type]
    for size in (1, 37):
        fresh()
        parts = [
            columns_of(estimate(*given[:4], rows.take(slice(at, at + size))))  # type: ignore
            for at in range(0, count, size)
        ]
        for name, column in whole.items():
            assert np.array_equal(column, np.concatenate([part[name] for part in parts])), (name, size)


def test_tables_that_a_search_fills_at_once_have_the_bits_of_those_filled_batch_by_batch() -> None:
    given = random_rows("mixtral-8x7b", 64, "megatron", 400)
    rows = given[4]
    fresh()
    whole = columns_of(estimate(*given))  # type: ignore[arg-type]
    fresh()
    tabulate(*given[:4], lambda names: rows.take(np.lexsort([rows.columns[n] for n in names])))  # type: ignore[arg-type]
    eng = tables.engine(*given[:4])  # type: ignore[arg-type]
    filled = len(eng.state.places)
    again = columns_of(estimate(*given))  # type: ignore[arg-type]
    assert len(eng.state.places) == filled > 0, "nothing was left to be filled in"
    for name, column in whole.items():
        assert np.array_equal(column, again[name]), name


def test_a_calibrated_cluster_with_uneven_experts_and_two_level_rings_has_the_same_bits_too() -> None:
    measured = {"value": 1.234567}
    own = Calibration(scalars={"software_factor": Entry(values=measured, points=3, source="runs.csv")})
    cluster = replace(load_cluster("dgx-h100"), calibration=own)
    given = random_rows("mixtral-8x7b", 64, "any", 200, cluster, moe_imbalance=[1.1, 1.3, 2.0], seq_len=16384)
    rows = given[4]
    assert "two_level" in {STRUCTURE["cp_kind"][int(kind)] for kind in rows.columns["cp_kind"]}  # type: ignore[attr-defined]
    fresh()
    whole = columns_of(estimate(*given, detail=False))  # type: ignore[arg-type]
    parts = [columns_of(estimate(*given[:4], rows.take(slice(at, at + 1)))) for at in range(200)]  # type: ignore
    for name, column in whole.items():
        assert np.array_equal(column, np.concatenate([part[name] for part in parts])), name
    total = sum(column for name, column in whole.items() if name.startswith("time."))
    np.testing.assert_allclose(total, whole["step_seconds"], rtol=1e-12)


def test_stages_that_all_differ_are_priced_however_many() -> None:
    """numpy.choose takes 64 arrays; 48 stages of alternating layers have two or three phases each."""
    found = load_model("llama-4-maverick")
    work = workload(found.model, found.workload, gpus=48, overrides={"global_batch": 480})
    strategy = Strategies.of([Strategy(pp=48)])
    priced = estimate(found.model, work, load_cluster("dgx-h100"), load_runtime("deepspeed"), strategy, detail=True)
    assert sum(part[0] for part in priced.memory.values()) == priced.device_bytes[0]


@pytest.mark.parametrize(
    "runtime,system,strategy",
    [
        ("any", "ws-4090", Strategy(dp_replicate=2, dp_shard=8, pp=2, vpp=4, zero=3, schedule="interleaved")),
        ("torchtitan", "dgx-h100", Strategy(tp=2, dp_shard=8, pp=2, zero=2, micro_batch=2, sp=True)),
        ("deepspeed", "dgx-a100", Strategy(dp_shard=32, zero=3, micro_batch=2)),
        ("megatron", "dgx-h100", Strategy(tp=8, cp=2, cp_kind="all_gather", dp_shard=2, sp=True)),
    ],
)
def test_the_table_of_collectives_exposes_what_the_step_does(runtime: str, system: str, strategy: Strategy) -> None:
    """Tied embedding and software factor included: a user compares the two."""
    found = load_model("gemma-2-9b")
    work = workload(found.model, found.workload, gpus=strategy.gpus, overrides={"global_batch": 512})
    where = load_cluster(system), load_runtime(runtime)
    priced = estimate(found.model, work, *where, strategy, usable_bytes=1e15, detail=True)
    of_step = sum(float(seconds[0]) for part, seconds in priced.time.items() if part.startswith("exposed"))
    moved = [row for row in priced.communication if row.kind != "send_recv"]
    assert sum(float(row.exposed_seconds[0]) for row in moved) == pytest.approx(of_step, rel=1e-9)
    assert all(row.exposed_seconds[0] <= row.seconds[0] * (1.0 + 1e-9) for row in moved)


@pytest.mark.parametrize("micro_batches", [1, 8, 128])
@pytest.mark.parametrize("runtime,zero", [("megatron", 1), ("torchtitan", 2), ("torchtitan", 3), ("deepspeed", 3)])
def test_where_nothing_hides_the_table_of_collectives_takes_what_the_step_waits(
    runtime: str, zero: int, micro_batches: int
) -> None:
    """Only what every micro-batch does is stretched by the software factor, however often a step has it."""
    found, shipped = load_model("gemma-2-9b"), load_runtime(runtime)
    overrides = {"global_batch": 16 * micro_batches, "seq_len": 1024}
    work = workload(found.model, found.workload, gpus=16, overrides=overrides)
    bare = replace(shipped, software_factor=2.0, overlap=dict.fromkeys(shipped.overlap, False))
    strategy = Strategy(dp_shard=16, zero=zero)
    priced = estimate(found.model, work, load_cluster("dgx-h100"), bare, strategy, usable_bytes=1e15, detail=True)
    assert priced.num_micro_batches[0] == micro_batches
    of_weights = [row for row in priced.communication if row.name in ("gradients", "parameters")]
    assert sum(float(row.seconds[0]) for row in of_weights) == pytest.approx(float(priced.time["exposed dp"][0]))
    assert all(row.exposed_seconds[0] == pytest.approx(row.seconds[0], rel=1e-9) for row in of_weights)
