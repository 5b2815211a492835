"""A runtime: what a training framework allows and does, as versioned data (runtimes/*.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Facts of one framework. `rules` and `legal` bound the space; the rest shapes the Program."""

    name: str
    version: str
    source: str
    legal: Mapping[str, tuple[str, ...]]
    """structure field -> values that the framework can run (sp, zero, cp_kind, schedule, recompute)"""
    rules: Mapping[str, str]
    """rule name -> variant, read by planner/constraints.py (kv_heads: refuse | replicate | gather, …)"""
    mesh_order: tuple[str, ...]
    """axes, outermost first"""
    sp_saves: str
    """shard (Megatron: the shard is saved and gathered again in backward) | gathered (torch)"""
    merged_input_gradients: bool
    """q, k, v (gate, up) input gradients are summed before one collective (Megatron, Paddle); torch does not"""
    grad_reduce: str
    """micro_batch | last_micro_batch: when a gradient that is not stored sharded is reduced"""
    grad_reduce_sharded: str
    """the same with gradients stored sharded (zero 2, 3)"""
    overlap: Mapping[str, bool]
    """collective class (dp_grad, dp_param, tp, cp, pp, ep) -> hidden behind compute where it can be"""
    fused_norm: bool
    loss: str
    early_stop: bool
    """full recompute skips what backward does not need (torch's non-reentrant checkpoint)"""
    param_bucket_bytes: float
    grad_bucket_bytes: float
    software_factor: float
    context_bytes: float
    fragmentation: float
    provenance: Mapping[str, str]
