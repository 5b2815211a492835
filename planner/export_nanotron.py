"""nanotron's YAML: parallelism, tokens, optimizer and model. What it needs beside them is not a plan's to say."""

from __future__ import annotations

from typing import Any

from distplan.costmodel.model import Attention, Mlp, Moe
from distplan.hardware.errors import DistplanError
from distplan.planner.launcher import BY_HAND, Exported, Job, Unsaid, other_order
from distplan.planner.output import yaml_text

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def nanotron(job: Job) -> Exported:
    s, w = job.strategy, job.workload
    content = {
        "parallelism": _parallelism(job),
        "tokens": {
            "sequence_length": w.seq_len,
            "micro_batch_size": s.micro_batch,
            "batch_accumulation_per_replica": job.micro_batches,
        },
        "optimizer": {
            "zero_stage": min(s.zero, 1),
            "accumulate_grad_in_fp32": w.precision.gradients == "fp32",
            "clip_grad": 1.0 if w.clip_grad else None,
        },
        "model": {
            "dtype": DTYPES.get(w.precision.compute, "bfloat16"),
            "make_vocab_size_divisible_by": job.model.vocab_pad_multiple,
            "model_config": _model(job),
        },
    }
    needs = "nanotron also needs general, data_stages, tokenizer, checkpoints, train_steps, init_method, learning rate"
    return Exported(text=yaml_text(content), unsaid=_unsaid(job), remarks=(*other_order(job), f"{needs}: add yours"))


def _parallelism(job: Job) -> dict[str, Any]:
    s = job.strategy
    return {
        "dp": s.dp,
        "pp": s.pp,
        "tp": s.tp,
        "context_parallel_size": s.cp,
        "expert_parallel_size": s.ep,
        "pp_engine": "afab" if s.schedule == "f_then_b" else "1f1b",
        "tp_mode": "REDUCE_SCATTER" if s.sp else "ALL_REDUCE",
        "tp_linear_async_communication": s.sp and job.runtime.overlap["tp"],
        "recompute_layer": s.recompute == "full",
    }


def _model(job: Job) -> dict[str, Any]:
    """A Llama or Qwen2 configuration, which are the decoders that nanotron has."""
    model = job.model
    kind = model.kinds[model.pattern[0]]
    attention = kind.mixer
    if not isinstance(attention, Attention) or kind.norm != "rmsnorm" or model.positions != "rope":
        raise DistplanError(f"{model.name}: nanotron trains decoders with attention, RMSNorm and rotary positions")
    moe = next((k.ffn for k in model.kinds.values() if isinstance(k.ffn, Moe)), None)
    dense = next((k.ffn for k in model.kinds.values() if isinstance(k.ffn, Mlp)), None)
    values: dict[str, Any] = {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "intermediate_size": dense.ffn if dense else moe.ffn if moe else 0,
        "vocab_size": model.vocab,
        "max_position_embeddings": max(model.max_seq_len, job.workload.seq_len),
        "tie_word_embeddings": model.tied_embedding,
        "attention_bias": attention.qkv_bias,
        "is_qwen2_config": True,
    }
    if moe:
        values["moe_config"] = {
            "num_experts": moe.experts,
            "top_k": moe.top_k,
            "moe_intermediate_size": moe.ffn,
            "enable_shared_expert": bool(moe.shared_ffn),
            "layers": [i for i, name in enumerate(model.pattern) if isinstance(model.kinds[name].ffn, Moe)],
        }
        if moe.shared_ffn:
            values["moe_config"]["shared_expert_intermediate_size"] = moe.shared_ffn
    return values


def _unsaid(job: Job) -> tuple[Unsaid, ...]:
    s, w = job.strategy, job.workload
    recipes = {"bf16": "bf16" if w.precision.gradients == "fp32" else "bf16-grads", "fp16": "fp16"}
    other = "nanotron has no word for it"
    return (
        *job.unsaid("gpus", None, "torchrun starts the processes"),
        *job.unsaid("zero", min(s.zero, 1), "zero_stage is 0 or 1"),
        *job.unsaid("dp_shard", s.dp, "dp is one group"),
        *job.unsaid("dp_replicate", 1, "dp is one group"),
        *job.unsaid("vpp", 1, other),
        *job.unsaid("schedule", "f_then_b" if s.schedule == "f_then_b" else "1f1b", "pp_engine is afab or 1f1b"),
        *job.unsaid("stage_layers", "", BY_HAND),
        *job.unsaid("cp_inner", 1, "context parallelism has one level"),
        *job.unsaid("cp_kind", "ring" if s.cp > 1 else "none", "context parallelism is a ring"),
        *job.unsaid("etp", 1, other),
        *job.unsaid("recompute", "full" if s.recompute == "full" else "none", "whole layers recompute, or none"),
        *job.unsaid("recompute_layers", 0, "every layer recomputes, or none"),
        *job.unsaid("precision", recipes.get(w.precision.compute, "fp32"), other),
        *job.unsaid("optimizer", "adamw", "adamW or sgd with their settings are yours to add"),
        *job.unsaid("attention", "flash", other),
        *job.unsaid("offload_optimizer", False, other),
    )
