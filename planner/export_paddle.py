"""Paddle's manual parallelism: fleet.DistributedStrategy with its hybrid configs, as a Python module.

What the strategy object has no word for stands beside it as keyword arguments of the call that takes it
(PipelineLayer, group_sharded_parallel, amp.decorate, recompute).
"""

from __future__ import annotations

from pprint import pformat
from typing import Any

from distplan.planner.launcher import BY_HAND, Exported, Job, Unsaid

LEVELS = {2: "os_g", 3: "p_g_os"}
"""ZeRO stage -> level of group_sharded_parallel; stage 1 is what hybrid sharding does by itself"""
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_AXES = {"dp_replicate": "dp", "dp_shard": "sharding", "pp": "pp", "cp": "sep", "tp": "mp"}


def paddle_fleet(job: Job) -> Exported:
    s = job.strategy
    constants: dict[str, Any] = {
        "HYBRID_CONFIGS": _hybrid(job),
        "PIPELINE_CONFIGS": {"accumulate_steps": job.micro_batches, "micro_batch_size": s.micro_batch},
        "PIPELINE_LAYER": _pipeline_layer(job),
        "AMP": amp(job),
        "GROUP_SHARDED_LEVEL": LEVELS.get(s.zero),
        "RECOMPUTE_LAYERS_PER_STAGE": job.recompute_layers,
    }
    text = python_constants(constants) + _STRATEGY
    return Exported(text=text, unsaid=_unsaid(job), remarks=_remarks(job))


_STRATEGY = '''

def strategy():
    """What fleet.init(is_collective=True, strategy=strategy()) takes."""
    from paddle.distributed import fleet

    made = fleet.DistributedStrategy()
    made.hybrid_configs = dict(HYBRID_CONFIGS)
    made.pipeline_configs = dict(PIPELINE_CONFIGS)
    return made
'''


def python_constants(constants: dict[str, Any]) -> str:
    """Assignments of plain data; every name and text is written as a literal, nothing is interpolated."""
    return (
        "\n".join(f"{name} = {pformat(value, width=100, sort_dicts=False)}" for name, value in constants.items()) + "\n"
    )


def _hybrid(job: Job) -> dict[str, Any]:
    s = job.strategy
    replicate, shard = (s.dp_replicate, s.dp_shard) if s.zero else (s.dp, 1)
    order = [_AXES[axis] for axis in job.runtime.mesh_order]
    return {
        "dp_degree": replicate,
        "mp_degree": s.tp,
        "pp_degree": s.pp,
        "sharding_degree": shard,
        "sep_degree": s.cp,
        "order": order,
    }


def _pipeline_layer(job: Job) -> dict[str, Any]:
    s = job.strategy
    values: dict[str, Any] = {"num_stages": s.pp}
    if s.vpp > 1:
        values["num_virtual_pipeline_stages"] = s.vpp
    if s.recompute == "full":
        values["recompute_interval"] = 1
    return values


def amp(job: Job) -> dict[str, Any]:
    """Arguments of paddle.amp.decorate; empty in fp32."""
    precision = job.workload.precision
    if precision.compute not in DTYPES:
        return {}
    return {"level": "O2", "dtype": DTYPES[precision.compute], "master_grad": precision.gradients == "fp32"}


def _unsaid(job: Job) -> tuple[Unsaid, ...]:
    s, w = job.strategy, job.workload
    model = "the model's code says it"
    taken = {"bf16": "bf16", "fp16": "fp16"}.get(w.precision.compute, "fp32")
    if w.precision.gradients == "bf16":
        taken = "bf16-grads"
    return (
        *job.unsaid("sp", False, "the model's layers say it (ColumnSequenceParallelLinear, RowSequenceParallelLinear)"),
        *job.unsaid("stage_layers", "", BY_HAND),
        *job.unsaid("cp_inner", 1, "context parallelism has one level"),
        *job.unsaid(
            "cp_kind", "ulysses" if s.cp > 1 else "none", "sep is a group; the attention of the model says what it does"
        ),
        *job.unsaid("ep", 1, "MoELayer(moe_group=...) says it"),
        *job.unsaid("etp", 1, "MoELayer(mp_group=...) says it"),
        *job.unsaid("schedule", "interleaved" if s.vpp > 1 else "1f1b", "fleet's pipeline runs 1F1B or interleaved"),
        *job.unsaid("recompute", "full" if s.recompute == "full" else "none", model),
        *job.unsaid("precision", taken, "amp.decorate has no such set of dtypes"),
        *job.unsaid("global_batch", job.micro_batches * s.micro_batch * s.dp, "accumulation is by whole micro-batches"),
        *job.unsaid("seq_len", None, "the data says it"),
        *job.unsaid("optimizer", "adamw", "the program chooses it"),
        *job.unsaid("attention", "flash", model),
        *job.unsaid("offload_optimizer", False, "group_sharded_parallel(offload=True) says it"),
    )


def _remarks(job: Job) -> tuple[str, ...]:
    s = job.strategy
    said = []
    if s.pp > 1 or s.recompute == "full":
        said.append("pass PIPELINE_LAYER to PipelineLayer, with seg_method='layer:YOUR_DECODER_LAYER'")
    if s.recompute == "full":
        said.append(
            "RECOMPUTE_LAYERS_PER_STAGE of each stage's layers recompute; recompute_interval=1 alone means all of them"
        )
    if s.zero > 1:
        said.append(
            "pass GROUP_SHARDED_LEVEL to paddle.distributed.sharding.group_sharded_parallel; ZeRO-1 alone is automatic"
        )
    if s.zero and s.cp > 1:
        said.append("the plan shards over dp_shard x cp; fleet's sharding group is dp_shard alone")
    return tuple(said)
