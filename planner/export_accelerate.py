"""The YAML of `accelerate launch`: FSDP2 with a parallelism_config, or plain data parallelism for ZeRO-0."""

from __future__ import annotations

from typing import Any

from distplan.planner.launcher import BY_HAND, Exported, Job, Unsaid, other_order
from distplan.planner.output import yaml_text

ROTATIONS = {"ring": "alltoall", "all_gather": "allgather"}
_MIXED = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}


def accelerate(job: Job) -> Exported:
    s = job.strategy
    node = job.cluster.gpus_per_node
    fsdp = shards(job)
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if fsdp else "MULTI_GPU",
        "num_processes": s.gpus,
        "num_machines": max(1, -(-s.gpus // node)),
        "machine_rank": 0,
        "mixed_precision": _MIXED.get(job.workload.precision.compute, "bf16"),
        "use_cpu": False,
        "main_training_function": "main",
    }
    if fsdp:
        content["fsdp_config"] = _fsdp(job)
        content["parallelism_config"] = _parallelism(job)
    remarks = ("micro-batch, accumulation, learning rate and data are the training script's",)
    return Exported(
        text=yaml_text(content),
        unsaid=_unsaid(job, fsdp),
        remarks=(*other_order(job), *remarks, "machine_rank, main_process_ip and main_process_port are per machine"),
    )


def shards(job: Job) -> bool:
    """Whether the file speaks of FSDP: plain data parallelism has no parallelism_config."""
    s = job.strategy
    return bool(s.zero or s.tp > 1 or s.cp > 1)


def _fsdp(job: Job) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": job.strategy.zero == 3,
        "fsdp_offload_params": job.workload.offload_optimizer,
        "fsdp_activation_checkpointing": job.strategy.recompute == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }


def rotated(job: Job) -> bool:
    return job.strategy.cp > 1 and job.strategy.cp_kind in ROTATIONS


def _parallelism(job: Job) -> dict[str, Any]:
    s = job.strategy
    values: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": s.dp_replicate,
        "parallelism_config_dp_shard_size": s.dp_shard,
        "parallelism_config_tp_size": s.tp,
        "parallelism_config_cp_size": s.cp if rotated(job) else 1,
    }
    if rotated(job):
        values |= {
            "parallelism_config_cp_backend": "torch",
            "parallelism_config_cp_comm_strategy": ROTATIONS[s.cp_kind],
        }
    return values


def _unsaid(job: Job, fsdp: bool) -> tuple[Unsaid, ...]:
    s, w = job.strategy, job.workload
    dtypes = {"bf16": "bf16-sharded", "fp16": "fp16", "fp32": "fp32"}.get(w.precision.compute, "bf16-sharded")
    other = "accelerate has no word for it"
    zero = (3 if s.zero == 3 else 2) if fsdp else 0
    script = "the training script says it"
    return (
        *job.unsaid("zero", zero, "FSDP2 shards gradients and optimizer states, and parameters if it reshards them"),
        *job.unsaid("dp_shard", s.dp_shard if fsdp else s.gpus, "all processes are data parallel"),
        *job.unsaid("dp_replicate", s.dp_replicate if fsdp else 1, "all processes are data parallel"),
        *job.unsaid("tp", s.tp if fsdp else 1, other),
        *job.unsaid("pp", 1, other),
        *job.unsaid("vpp", 1, other),
        *job.unsaid("schedule", "1f1b", other),
        *job.unsaid(
            "cp", s.cp if rotated(job) else 1, "cp_comm_strategy is alltoall or allgather; Ulysses needs DeepSpeed"
        ),
        *job.unsaid("stage_layers", "", BY_HAND),
        *job.unsaid("cp_inner", 1, "context parallelism has one level"),
        *job.unsaid("cp_kind", s.cp_kind if rotated(job) else "none", "cp_comm_strategy is alltoall or allgather"),
        *job.unsaid("sp", False, "the model's tensor parallel plan says it"),
        *job.unsaid("ep", 1, other),
        *job.unsaid("etp", 1, other),
        *job.unsaid("micro_batch", 1, script),
        *job.unsaid(
            "recompute", "full" if fsdp and s.recompute == "full" else "none", "whole layers are checkpointed, or none"
        ),
        *job.unsaid("recompute_layers", 0, "whole layers are checkpointed, or none"),
        *job.unsaid("global_batch", None, script),
        *job.unsaid("seq_len", None, script),
        *job.unsaid("precision", dtypes, "mixed_precision is one word: no, fp16, bf16 or fp8"),
        *job.unsaid("optimizer", "adamw", script),
        *job.unsaid("attention", "flash", script),
        *job.unsaid("clip_grad", True, script),
        *job.unsaid("offload_optimizer", fsdp and w.offload_optimizer, "fsdp_offload_params needs FSDP"),
    )
