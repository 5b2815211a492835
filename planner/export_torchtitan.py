"""torchtitan's configuration: overrides for `torchtitan.train`, one per line (0.3 reads no TOML any more).

The model is chosen by --module and --config, which are not written: they belong to the model's code.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from distplan.costmodel.strategy import CHUNKED
from distplan.planner.launcher import BY_HAND, Exported, Job, Unsaid, other_order

SCHEDULES = {"f_then_b": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb_v": "ZBVZeroBubble"}
CHECKPOINTS = {"none": "none", "selective": "selective", "full": "full"}
_PRECISIONS = ("bf16-sharded", "fp32")


def torchtitan(job: Job) -> Exported:
    s = job.strategy
    settings, cut = _parallelism(job)
    precision = _precision(job)
    lines = [
        "# parallelism",
        *(_override("parallelism", name, value) for name, value in settings.items()),
        "",
        "# batch, precision",
        *(_override("training", name, value) for name, value in {**_batch(job), **precision}.items()),
        "",
        "# recomputation; a choice, so it stands after all options",
        f"activation-checkpoint:{CHECKPOINTS[s.recompute]}",
    ]
    head = "run as: torchrun ... -m torchtitan.train --module MODULE --config CONFIG $(grep -v '^#' FILE)"
    return Exported(
        text="\n".join(lines) + "\n", unsaid=_unsaid(job, cut), remarks=(*other_order(job), head, *_remarks(job))
    )


def _override(section: str, name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{section}.{'' if value else 'no-'}{name}"
    return f"--{section}.{name} {value}"


def degrees(job: Job) -> tuple[int, int]:
    """data_parallel_replicate_degree and _shard_degree: ZeRO-0 is plain data parallelism."""
    s = job.strategy
    return (s.dp_replicate, s.dp_shard) if s.zero else (s.dp, 1)


def _parallelism(job: Job) -> tuple[dict[str, Any], bool]:
    """Options, and whether the stages are cut by layers per stage."""
    s = job.strategy
    replicate, shard = degrees(job)
    values: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if s.zero == 3 else "never",
        "tensor_parallel_degree": s.tp,
        "enable_sequence_parallel": s.sp,
        "context_parallel_degree": s.cp,
        "expert_parallel_degree": s.ep,
        "pipeline_parallel_degree": s.pp,
    }
    if s.pp == 1:
        return values, False
    values["pipeline_parallel_schedule"] = SCHEDULES.get(s.schedule, "1F1B")
    values["pipeline_parallel_microbatch_size"] = s.micro_batch
    cut = stage_cut(job.model.layers, s.pp * s.vpp)
    if cut is None:
        return values, False
    first, last, layers = cut
    values |= {"pipeline_parallel_first_stage_less_layers": first, "pipeline_parallel_last_stage_less_layers": last}
    values["pipeline_parallel_layers_per_stage"] = layers
    return values, True


def stage_cut(layers: int, chunks: int) -> tuple[int, int, int] | None:
    """Weights of embedding and head in layers, and layers per stage, that give exactly so many chunks."""
    for first, last in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = layers + first + last
        if ceil(weight / ceil(weight / chunks)) == chunks and ceil(weight / chunks) >= max(first, last):
            return first, last, ceil(weight / chunks)
    return None


def _batch(job: Job) -> dict[str, Any]:
    """Without a pipeline a local batch is a micro-batch; with one it is what passes through it in a step."""
    s, w = job.strategy, job.workload
    local = s.micro_batch * (job.micro_batches if s.pp > 1 else 1)
    values: dict[str, Any] = {"local_batch_size": local, "global_batch_size": w.global_batch, "seq_len": w.seq_len}
    if s.pp > 1:
        values["disable_cuda_graphs"] = True
    return values | {"max_norm": 1.0} if w.clip_grad else values | {"max_norm": "inf"}


def _precision(job: Job) -> dict[str, Any]:
    fp32 = job.workload.precision.compute == "fp32"
    return {
        "dtype": "float32",
        "mixed_precision_param": "float32" if fp32 else "bfloat16",
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": job.workload.offload_optimizer,
    }


def _unsaid(job: Job, cut: bool) -> tuple[Unsaid, ...]:
    s, w = job.strategy, job.workload
    replicate, shard = degrees(job)
    sharded = shard * s.cp > 1
    shards = "fully_shard keeps gradients and optimizer states sharded on dp_shard x cp"
    chunks = "the file has layers per stage in its place" if cut else "no number of layers per stage gives these chunks"
    return (
        *job.unsaid("zero", (3 if s.zero == 3 else 2) if sharded else 0, shards),
        *job.unsaid("dp_shard", shard if sharded else replicate, shards),
        *job.unsaid("dp_replicate", replicate if sharded else 1, shards),
        *job.unsaid("sp", s.sp and s.tp > 1, "sequence parallelism needs tp > 1"),
        *job.unsaid("vpp", 2 if s.pp > 1 and s.schedule in CHUNKED else 1, chunks),
        *job.unsaid(
            "schedule", s.schedule if s.pp > 1 and s.schedule in SCHEDULES else "1f1b", "torch has no such schedule"
        ),
        *job.unsaid("stage_layers", "", BY_HAND),
        *job.unsaid("cp_inner", 1, "context parallelism has one level"),
        *job.unsaid("cp_kind", "all_gather" if s.cp > 1 else "none", "torchtitan 0.3 gathers keys and values"),
        *job.unsaid("etp", 1, "tensor parallelism inside experts is not an option of its own"),
        *job.unsaid("recompute_layers", 0, "every layer is checkpointed, or none"),
        *job.unsaid(
            "precision", taken_precision(w.precision.compute), "fp32 parameters are cast where they are gathered"
        ),
        *job.unsaid("optimizer", "adamw", "the model's configuration chooses it"),
        *job.unsaid("attention", "flash", "the model's configuration chooses it"),
    )


def taken_precision(compute: str) -> str:
    return "fp32" if compute == "fp32" else "bf16-sharded"


def _remarks(job: Job) -> tuple[str, ...]:
    s = job.strategy
    return ("pipeline_parallel_schedule is not checked before the schedule is built",) if s.pp > 1 else ()
