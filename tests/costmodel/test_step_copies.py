"""What DeepSpeed makes of gradients between backward and update, and what torch's allocator keeps beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distplan.costmodel.case import case_of
from distplan.costmodel.estimate import Estimate, estimate
from distplan.costmodel.memory_phases import PhaseMemory, memory_phases
from distplan.costmodel.model_file import load_model, read_model
from distplan.costmodel.runtime import Runtime, load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import precision, workload
from distplan.hardware.cluster import load_cluster
from distplan.hardware.documents import Document

DP = 8


def job(recipe: str, runtime: Runtime, vocab: int = 50304, usable: float | None = None):  # type: ignore[no-untyped-def]
    """A GPT of 24 layers on 8 GPUs with ZeRO 1: (case, phases by name)."""
    facts = {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": vocab, "gated": False}
    model = read_model(Document(file="gpt", value=facts, lines={}), "gpt")
    strategy = Strategy(dp_shard=DP, zero=1)
    batch = workload(model, {}, gpus=DP, overrides={"seq_len": 2048, "global_batch": DP})
    whole = (model, replace(batch, precision=precision(recipe)), load_cluster("dgx-a100"), runtime, strategy)
    found: Estimate = estimate(*whole, usable_bytes=usable, detail=True)
    case = case_of(*whole, found)
    return case, {phase.phase: phase for phase in memory_phases(case, 0)}


def elements(case, recipe: str) -> float:  # type: ignore[no-untyped-def]
    return float(case.states(case.stages()[0].content).parameters[0]) / 2.0


def test_a_shards_gradients_are_flattened_in_two_bytes_and_cast_to_four() -> None:
    case, phases = job("fp16", load_runtime("deepspeed"), vocab=256)
    assert phases["optimizer step"].parts["temporaries"] == pytest.approx(elements(case, "fp16") / DP * 6.0)


def test_the_norm_is_taken_of_a_double_copy_of_the_largest_gradient() -> None:
    """get_grad_norm_direct: of a table of 2^20 rows the rank's shard alone, where the whole is more than that."""
    vocab = 2**20
    case, phases = job("fp16", load_runtime("deepspeed"), vocab=vocab)
    shard = elements(case, "fp16") / DP
    assert shard < vocab * 2048.0
    assert phases["optimizer step"].parts["temporaries"] == pytest.approx(shard * 8.0)


def test_wide_gradients_are_cast_whole_to_be_reduced() -> None:
    """bf16_optimizer.py holds them in one fp32 tensor, which is reduced in bf16."""
    case, phases = job("bf16", load_runtime("deepspeed"))
    assert phases["optimizer step"].parts["temporaries"] == pytest.approx(elements(case, "bf16") * 2.0)


def cached(phases: dict[str, PhaseMemory], runtime: Runtime) -> float:
    """What the optimizer step has reserved beyond its own tensors and their share of fragmentation."""
    parts = phases["optimizer step"].parts
    moving = parts["temporaries"] + parts.get("buckets", 0.0)
    return parts["fragmentation"] - moving * runtime.fragmentation


def test_blocks_of_activations_stay_reserved_beside_one_that_is_larger_than_each() -> None:
    """torch never joins freed blocks of different cudaMallocs (c10/cuda/CUDACachingAllocator.cpp)."""
    runtime = load_runtime("deepspeed")
    _, phases = job("bf16", runtime)
    backward = phases["backward"].parts
    left = backward["activations"] + backward["temporaries"] + backward.get("recompute workspace", 0.0)
    assert cached(phases, runtime) == pytest.approx(left)
    reused = replace(runtime, state=replace(runtime.state, step_contiguous=False))
    assert cached(job("bf16", reused)[1], reused) == pytest.approx(0.0, abs=1.0)


def test_the_cache_is_given_back_before_an_allocation_fails() -> None:
    """Freed blocks alone run no device out of memory: the step takes what is usable, not more."""
    runtime = load_runtime("deepspeed")
    _, roomy = job("bf16", runtime)
    step = roomy["optimizer step"]
    usable = step.device_bytes - 0.5 * cached(roomy, runtime)
    _, tight = job("bf16", runtime, usable=usable)
    assert tight["optimizer step"].device_bytes == pytest.approx(usable)
    assert 0.0 < cached(tight, runtime) < cached(roomy, runtime)


def test_no_copy_is_larger_than_what_is_copied() -> None:
    """Of every shipped model: the largest gradient is one of the stage's."""
    for name in ("llama-3.1-8b", "mixtral-8x7b"):
        model, strategy = load_model(name).model, Strategy(dp_shard=DP, zero=1)
        batch = workload(model, {}, gpus=DP, overrides={"seq_len": 2048, "global_batch": DP})
        whole = (model, batch, load_cluster("dgx-h100"), load_runtime("deepspeed"), strategy)
        tables = case_of(*whole, estimate(*whole)).state.tables
        assert np.all(tables["largest"] <= tables["produced"]) and tables["largest"].max() > 0.0
