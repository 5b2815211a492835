"""A small model and an estimate of a few lines: what the search does must not depend on the physics."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from distplan.costmodel.estimate import Estimate
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Moe, Precision, Workload
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.strategy import Strategies
from distplan.hardware.cluster import Cluster

BF16 = Precision(
    name="bf16", compute="bf16", parameters="bf16", gradients="fp32", master="fp32",
    moments=("fp32", "fp32"), matmul="bf16",
)  # fmt: skip


def dense(
    layers: int = 12, heads: int = 16, kv_heads: int = 4, hidden: int = 1024, ffn: int = 4096,
    vocab: int = 32000, pad: int = 128,
) -> Model:  # fmt: skip
    head_dim = hidden // heads
    mixer = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim)
    kind = LayerKind(name="layer", mixer=mixer, ffn=Mlp(ffn=ffn, gated=True))
    return Model(
        name="small", hidden=hidden, vocab=vocab, kinds={"layer": kind}, pattern=("layer",) * layers,
        tied_embedding=False, vocab_pad_multiple=pad,
    )  # fmt: skip


def mixture(experts: int, layers: int = 12) -> Model:
    mixer = Attention(heads=16, kv_heads=16, head_dim=64, v_head_dim=64)
    kind = LayerKind(name="layer", mixer=mixer, ffn=Moe(experts=experts, top_k=2, ffn=512))
    return Model(
        name="mixture", hidden=1024, vocab=32000, kinds={"layer": kind}, pattern=("layer",) * layers,
        tied_embedding=False,
    )  # fmt: skip


def workload(global_batch: int = 64, seq_len: int = 4096) -> Workload:
    return Workload(seq_len=seq_len, global_batch=global_batch, precision=BF16)


def estimate(
    model: Model,
    workload: Workload,
    cluster: Cluster,
    runtime: Runtime,
    strategies: Strategies,
    *,
    usable_bytes: float | None,
    detail: bool,
) -> Estimate:
    """Elementwise: compute over GPUs with a bubble, a tax per tp, and parameters over what shards them."""
    s = {name: strategies.degree(name) for name in strategies.columns}
    dp = s["dp_replicate"] * s["dp_shard"]
    m = workload.global_batch / (s["micro_batch"] * dp)
    parameters = 12.0 * model.layers * model.hidden * model.hidden
    tokens = float(workload.global_batch * workload.seq_len)
    slow = 1.0 + (s["pp"] - 1.0) / (m * s["vpp"]) + 0.25 * (s["recompute"] == 2)
    slow += 0.02 * (s["tp"] - 1.0) * (2.0 - s["sp"])
    peak, network = cluster.accelerator.peak_flops["bf16"], cluster.tiers[-1].bandwidth
    gpus = dp * s["tp"] * s["pp"] * s["cp"]
    seconds = 6.0 * parameters * tokens / (peak * gpus) * slow + 4.0 * parameters * (dp - 1.0) / dp / network
    states = np.where(s["zero"] > 0, 6.0 + 12.0 / (s["dp_shard"] * s["cp"]), 18.0) * parameters / (s["tp"] * s["pp"])
    kept = 34.0 * model.hidden * workload.seq_len * s["micro_batch"] * model.layers / (s["tp"] * s["cp"])
    memory = states + np.where(s["recompute"] == 2, 0.1, 1.0) * kept
    zeros = np.zeros(len(strategies))
    rest: dict[str, Any] = {f.name: zeros for f in fields(Estimate)}
    return Estimate(**rest | {
        "step_seconds": seconds, "step_seconds_low": 0.9 * seconds, "step_seconds_high": 1.1 * seconds,
        "time": {"compute": seconds}, "device_bytes": memory,
        "device_bytes_low": 0.95 * memory, "device_bytes_high": 1.05 * memory,
        "usable_bytes": np.full(len(strategies), usable_bytes or cluster.accelerator.memory_bytes),
        "memory": {"states": states, "activations": memory - states},
        "worst_stage": zeros.astype(np.int64), "worst_phase": zeros.astype(np.int64) + 1,
        "tokens": np.full(len(strategies), tokens), "communication": (),
    })  # fmt: skip
