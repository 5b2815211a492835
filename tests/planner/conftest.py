"""One invented plan for what shows and stores plans; its numbers mean nothing beyond adding up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distplan.costmodel.estimate import Communication, Estimate
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Precision, Workload
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import load_cluster
from distplan.planner.plan import Choice, Counts, Plan, RuleCount, Violation


def column(value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([value])


def invented_estimate(*, bubble: float, activations: float) -> Estimate:
    time = {"matmul": 6.0, "attention": 1.5, "exposed_tp": 0.5, "bubble": bubble, "optimizer": 0.25, "exposed_pp": 0.0}
    memory = {"parameters": 10.0 * 2**30, "gradients": 20.0 * 2**30, "activations": activations}
    step, device = sum(time.values()), sum(memory.values())
    moved = Communication(
        name="layer.mlp.out",
        axis="tp",
        kind="reduce_scatter",
        phase="forward",
        count=column(160.0),
        payload_bytes=column(2e9),
        wire_bytes=column(1.75e9),
        seconds=column(0.7),
        exposed_seconds=column(0.25),
    )
    return Estimate(
        step_seconds=column(step),
        step_seconds_low=column(step * 0.9),
        step_seconds_high=column(step * 1.1),
        time={name: column(part) for name, part in time.items()},
        allocated_bytes=column(device * 0.9),
        reserved_bytes=column(device * 0.95),
        device_bytes=column(device),
        device_bytes_low=column(device * 0.9),
        device_bytes_high=column(device * 1.05),
        usable_bytes=column(79.0 * 2**30),
        memory={name: column(part) for name, part in memory.items()},
        worst_stage=np.array([0]),
        worst_phase=np.array([1]),
        num_micro_batches=column(32.0),
        recompute_layers=column(0.0),
        model_flops=column(3.6e15),
        model_flops_causal=column(3.2e15),
        hardware_flops=column(3.9e15),
        kernel_flops=column(3.7e15),
        tokens=column(4.0 * 2**20),
        communication=(moved, replace(moved, phase="backward"), replace(moved, axis="dp_shard", kind="all_gather")),
        host_bytes=column(0.0),
    )


def invented_choice(strategy: Strategy, *, bubble: float, activations: float, best: float | None) -> Choice:
    estimate = invented_estimate(bubble=bubble, activations=activations)
    step = float(estimate.step_seconds[0])
    return Choice(
        strategy=strategy,
        gpus=64,
        global_batch=512,
        verdict="fits",
        estimate=estimate,
        step_seconds=step,
        simulated_seconds=None,
        tokens_per_second_per_gpu=4.0 * 2**20 / step / 64,
        cost_per_token=None,
        gpu_seconds_per_token=64 * step / (4.0 * 2**20),
        relative=1.0 if best is None else step / best,
        tie=best is not None and step < best * 1.05,
        warnings=(Violation(code="DP099", sentence="hidden 100 per rank is no multiple of 64", warning=True),),
    )


@pytest.fixture
def invented_plan() -> Plan:
    layer = LayerKind(
        name="layer",
        mixer=Attention(heads=64, kv_heads=8, head_dim=128, v_head_dim=128),
        ffn=Mlp(ffn=28672, gated=True),
    )
    precision = Precision(
        name="bf16",
        compute="bf16",
        parameters="bf16",
        gradients="fp32",
        master="fp32",
        moments=("fp32", "fp32"),
        matmul="bf16",
    )
    best = invented_choice(
        Strategy(dp_shard=2, tp=8, pp=4, vpp=5, sp=True, schedule="interleaved"),
        bubble=0.75,
        activations=30.0 * 2**30,
        best=None,
    )
    tie = invented_choice(
        Strategy(dp_shard=4, tp=8, pp=2, sp=True), bubble=0.8, activations=40.0 * 2**30, best=best.step_seconds
    )
    slow = invented_choice(
        Strategy(dp_shard=4, tp=4, pp=4, sp=True, recompute="full"),
        bubble=3.0,
        activations=20.0 * 2**30,
        best=best.step_seconds,
    )
    return Plan(
        model=Model(
            name="invented-70b",
            hidden=8192,
            vocab=128256,
            kinds={"layer": layer},
            pattern=("layer",) * 80,
            tied_embedding=False,
        ),
        workload=Workload(seq_len=8192, global_batch=512, precision=precision),
        cluster=load_cluster("dgx-h100"),
        runtime=load_runtime("megatron"),
        gpus=(64,),
        global_batches=(512,),
        objective="step-time",
        reserve_bytes=0.0,
        memory_limit_bytes=None,
        allow_tight=False,
        price_per_gpu_hour=None,
        best=best,
        runners_up=(tie, slow),
        counts=Counts(
            enumerated=100,
            rejected=(RuleCount(code="DP012", title="heads % tp", rejected=60),),
            legal=40,
            costed=40,
            fits=10,
            tight=5,
            out=25,
        ),
        notes=("one sentence for the reader",),
    )
