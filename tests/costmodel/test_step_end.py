"""What a step has once: clipping, offloading and reduction move the bytes of the recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distplan.costmodel.estimate import estimate
from distplan.costmodel.model_file import load_model
from distplan.costmodel.replay import load_of
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster
from distplan.hardware.rates import memory_seconds, pcie_seconds, rates_for

H100 = load_cluster("dgx-h100")
RATES = rates_for(H100.accelerator)


@pytest.mark.parametrize(
    "recipe, gradient, parameter",
    [("bf16", 4.0, 2.0), ("bf16-grads", 2.0, 2.0), ("bf16-sharded", 4.0, 4.0), ("fp32", 4.0, 4.0)],
)
def test_clipping_reads_and_offloading_sends_the_bytes_of_the_recipe(
    recipe: str, gradient: float, parameter: float
) -> None:
    """Clipping reads every gradient; ZeRO-Offload sends gradients down and parameters up (Ren et al. 2021)."""
    model, runtime = load_model("gpt2").model, load_runtime("megatron")
    job = workload(model, {"precision": recipe}, gpus=1, overrides={"seq_len": 1024, "global_batch": 8})

    def update(**options: bool) -> tuple[float, float]:
        found = estimate(model, replace(job, **options), H100, runtime, Strategy(), detail=True)
        return float(found.time["optimizer"][0]), float(found.memory["gradients"][0]) / gradient

    plain, elements = update(clip_grad=False)
    assert update(clip_grad=True)[0] - plain == pytest.approx(float(memory_seconds(RATES, elements * gradient)))
    sent = float(pcie_seconds(RATES, elements * (gradient + parameter)))
    assert update(clip_grad=False, offload_optimizer=True)[0] - plain == pytest.approx(sent)


def reductions(runtime: str, strategy: Strategy, micro_batches: int) -> dict[str, float]:
    """Axis -> how often a step reduces the gradients of one layer over it."""
    model, shipped = load_model("llama-3.2-1b").model, load_runtime(runtime)
    overrides = {"seq_len": 1024, "global_batch": strategy.dp * micro_batches}
    job = workload(model, {}, gpus=strategy.gpus, overrides=overrides)
    found = estimate(model, job, H100, shipped, strategy, usable_bytes=1e15, detail=True)
    assert found.num_micro_batches[0] == micro_batches
    layers = model.layers / strategy.pp
    rows = [row for row in found.communication if row.name == "gradients" and row.axis != "tp"]
    return {row.axis: round(float(row.count[0]) / layers) for row in rows}


DDP = Strategy(dp_replicate=16)
HSDP = Strategy(dp_replicate=2, dp_shard=8, zero=3)
PIPELINED = Strategy(dp_replicate=8, pp=2)


@pytest.mark.parametrize(
    "runtime, strategy, within, across",
    [
        ("torchtitan", DDP, 0, 4),  # replicate() all-reduces in every backward (torchtitan/train.py has no no_sync)
        ("fsdp1", DDP, 0, 4),  # NO_SHARD without no_sync
        ("maxtext", DDP, 0, 4),  # summed gradients are carried through lax.scan reduced
        ("megatron", DDP, 0, 1),  # no_sync until the last micro-batch (schedules.py)
        ("deepspeed", DDP, 0, 1),  # at the gradient-accumulation boundary
        ("torchtitan", HSDP, 4, 4),  # PyTorch PR #126166: reduce-scatter and all-reduce without intervention
        ("fsdp1", HSDP, 4, 4),
        ("deepspeed", HSDP, 4, 1),  # MiCS all-reduces at the boundary
        ("megatron-fsdp", HSDP, 4, 1),
        ("torchtitan", PIPELINED, 0, 1),  # pipelining/stage.py: backward_maybe_with_nosync
    ],
)
def test_gradients_are_reduced_as_often_as_the_runtime_does(
    runtime: str, strategy: Strategy, within: int, across: int
) -> None:
    found = reductions(runtime, strategy, 4)
    replicas = found.pop("dp_replicate")
    assert (set(found.values()) or {0}, replicas) == ({within}, across)


def test_what_every_micro_batch_reduces_costs_more_with_more_micro_batches() -> None:
    """torchtitan's DDP and HSDP send gradients as often as there are micro-batches, Megatron's DDP once."""
    model = load_model("llama-3.1-8b").model

    def waited(runtime: str, strategy: Strategy, micro_batches: int) -> float:
        shipped = load_runtime(runtime)
        bare = replace(shipped, overlap=dict.fromkeys(shipped.overlap, False))
        overrides = {"seq_len": 1024, "global_batch": strategy.dp * micro_batches}
        job = workload(model, {}, gpus=strategy.gpus, overrides=overrides)
        found = estimate(model, job, H100, bare, strategy, usable_bytes=1e15)
        return float(found.time["exposed dp"][0])

    for runtime, strategy, times in (("torchtitan", DDP, 8), ("torchtitan", HSDP, 8), ("megatron", DDP, 1)):
        assert waited(runtime, strategy, 8) == pytest.approx(times * waited(runtime, strategy, 1), rel=1e-9)


def test_a_tied_copy_on_the_last_stage_costs_a_micro_batch_what_a_head_of_its_own_does() -> None:
    """It is a second weight there, gathered before use and its gradient reduced like any other."""
    tied = load_model("gemma-2-9b").model
    loads = []
    for model in (tied, replace(tied, tied_embedding=False)):
        job = workload(model, {}, gpus=16, overrides={"seq_len": 1024, "global_batch": 32})
        strategy = Strategy(dp_shard=8, pp=2, zero=3)
        loads.append(load_of(model, job, H100, load_runtime("megatron-fsdp"), strategy, 0.0))
    for of_tied, of_own in zip(*((load.stage_forward[-1], load.stage_backward[-1]) for load in loads), strict=True):
        assert of_tied == pytest.approx(of_own, rel=1e-3)  # the copy's are calls of their own
