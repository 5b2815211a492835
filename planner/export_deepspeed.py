"""DeepSpeed's JSON. It has no comments; what it cannot say stands under the key `distplan`, which it ignores.

Degrees of model parallelism belong to the program that builds the model. Where DeepSpeed has a word for
one (AutoTP, Ulysses, AutoEP, the pipeline's stages) it is written.
"""

from __future__ import annotations

from typing import Any

from distplan.planner.launcher import BY_HAND, Exported, Job, Unsaid, other_order
from distplan.planner.output import json_text

MOST_ZERO_WITH_AUTOTP = 2
_PRECISIONS = ("bf16", "bf16-grads", "fp16", "fp32")


def deepspeed(job: Job) -> Exported:
    s, w = job.strategy, job.workload
    precision, taken = _precision(job)
    content: dict[str, Any] = {
        "train_batch_size": w.global_batch,
        "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": job.micro_batches,
        "gradient_clipping": 1.0 if w.clip_grad else 0.0,
        "zero_optimization": _zero(job),
        **precision,
        **_model_parallel(job),
    }
    if s.recompute == "full":
        content["activation_checkpointing"] = {
            "partition_activations": False,
            "number_checkpoints": job.recompute_layers,
        }
    unsaid = (*_unsaid(job), *job.unsaid("precision", taken, "DeepSpeed has no such set of dtypes"))
    remarks = _remarks(job)
    exported = Exported(text="", unsaid=unsaid, remarks=(*other_order(job), *remarks))
    content["distplan"] = {"not_expressed": list(exported.sentences)}
    return Exported(text=json_text(content), unsaid=exported.unsaid, remarks=exported.remarks)


def autotp(job: Job) -> bool:
    """Whether DeepSpeed itself can shard the model: AutoTP trains with ZeRO-0, 1, 2 and without a pipeline."""
    return job.strategy.pp == 1 and job.strategy.zero <= MOST_ZERO_WITH_AUTOTP


def _zero(job: Job) -> dict[str, Any]:
    s = job.strategy
    values: dict[str, Any] = {"stage": s.zero}
    if s.zero:
        values["overlap_comm"] = job.runtime.overlap["dp_grad"]
    if s.zero == 3 and s.dp_replicate > 1 and s.dp_shard > 1:
        values["zero_hpz_partition_size"] = s.dp_shard
    if job.workload.offload_optimizer and s.zero:
        values["offload_optimizer"] = {"device": "cpu"}
    return values


def _precision(job: Job) -> tuple[dict[str, Any], str]:
    """Settings, and the recipe that they amount to."""
    name = job.workload.precision.name
    taken = (
        name if name in _PRECISIONS else {"bf16": "bf16", "fp16": "fp16"}.get(job.workload.precision.compute, "fp32")
    )
    if taken == "fp16":
        return {"fp16": {"enabled": True}}, taken
    if taken == "fp32":
        return {}, taken
    accumulates = "bf16" if taken == "bf16-grads" else "fp32"
    return {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": accumulates}}, taken


def _model_parallel(job: Job) -> dict[str, Any]:
    s = job.strategy
    values: dict[str, Any] = {}
    if s.tp > 1 and autotp(job):
        values["tensor_parallel"] = {"autotp_size": s.tp}
    if s.pp > 1:
        values["pipeline"] = {"stages": s.pp, "activation_checkpoint_interval": int(s.recompute == "full")}
    if s.cp > 1 and s.cp_kind == "ulysses":
        values["sequence_parallel_size"] = s.cp
    if s.ep > 1:
        values["expert_parallel"] = {"enabled": True, "autoep_size": s.ep, "expert_tensor_parallel_size": s.etp}
    return values


def _unsaid(job: Job) -> tuple[Unsaid, ...]:
    s, w = job.strategy, job.workload
    ulysses = s.cp_kind == "ulysses"
    whole = "only hpZ (ZeRO-3) knows groups inside dp"
    grouped = s.zero == 3 and s.dp_replicate > 1 and s.dp_shard > 1
    tp, cp = (s.tp if autotp(job) else 1), (s.cp if ulysses else 1)
    program = "the program that builds the model says it"
    return (
        *job.unsaid("tp", tp, f"{program}; AutoTP excludes pipelines and ZeRO-3"),
        *job.unsaid("sp", False, program),
        *job.unsaid("vpp", 1, "its pipeline is not interleaved"),
        *job.unsaid("schedule", "1f1b", "its pipeline is 1F1B"),
        *job.unsaid("cp", cp, f"{program}; DeepSpeed's own context parallelism is Ulysses"),
        *job.unsaid("stage_layers", "", BY_HAND),
        *job.unsaid("cp_inner", 1, "context parallelism has one level"),
        *job.unsaid("cp_kind", "ulysses" if ulysses else "none", program),
        *job.unsaid("etp", s.etp if s.ep > 1 else 1, program),
        *job.unsaid("dp_shard", s.dp_shard if grouped else s.dp, whole),
        *job.unsaid("dp_replicate", s.dp_replicate if grouped else 1, whole),
        *job.unsaid("recompute", "full" if s.recompute == "full" else "none", program),
        *job.unsaid("recompute_layers", job.recompute_layers if s.recompute == "full" else 0, program),
        *job.unsaid("gpus", s.dp * tp * s.pp * cp, "the launcher starts the processes"),
        *job.unsaid("seq_len", None, "the data says it"),
        *job.unsaid("optimizer", "adamw", "the program chooses it, or an `optimizer` section with its learning rate"),
        *job.unsaid("attention", "flash", program),
        *job.unsaid("offload_optimizer", w.offload_optimizer and s.zero > 0, "offload needs ZeRO"),
    )


def _remarks(job: Job) -> tuple[str, ...]:
    s = job.strategy
    said = []
    if s.pp > 1:
        said.append(f"PipelineModule(num_stages={s.pp}) is what cuts the model; pipeline.stages only repeats it")
    if s.zero == 3 and s.dp_replicate > 1:
        said.append("hpZ shards parameters in groups, and optimizer states and gradients over all of dp")
    if s.recompute == "full":
        said.append("the model must call deepspeed.checkpointing (or gradient checkpointing) for its layers")
    if s.cp > 1 and s.cp_kind == "ulysses":
        said.append("Ulysses needs attention registered with UlyssesSPAttentionHF, or DistributedAttention")
    return tuple(said)
