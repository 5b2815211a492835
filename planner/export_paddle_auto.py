"""Paddle's semi-automatic parallelism, as a Python module: ProcessMesh and placements for dygraph, and
dist.Strategy for the static Engine (dist.to_static).
"""

from __future__ import annotations

from typing import Any

from distplan.costmodel.model import Moe
from distplan.planner.export_paddle import DTYPES, python_constants
from distplan.planner.launcher import BY_HAND, Exported, Job, Unsaid
from distplan.planner.paddle_placements import EXPERT_AXES, weight_places

SCHEDULES = {"f_then_b": "FThenB", "1f1b": "1F1B", "interleaved": "VPP", "zb_h1": "ZBH1", "zb_v": "ZBVPP"}
DATA_AXES = ("dp_replicate", "dp_shard")


def paddle_auto(job: Job) -> Exported:
    axes = tuple(axis for axis in job.runtime.mesh_order)
    places = weight_places(job, tuple(axis for axis in axes if axis != "pp"))
    s = job.strategy
    constants: dict[str, Any] = {
        "AXES": list(axes),
        "SHAPE": [int(job.facts[axis]) for axis in axes],
        "EXPERT_AXES": list(EXPERT_AXES),
        "EXPERT_SHAPE": [s.dp * s.cp * s.tp // (s.ep * s.etp), s.ep, s.etp],
        "PLACEMENTS": {name: list(placed) for name, placed in places.dense.items()},
        "EXPERT_PLACEMENTS": {name: list(placed) for name, placed in places.experts.items()},
        "INPUT": _input(axes),
        "HIDDEN": _hidden(job, axes),
        "ZERO": s.zero,
        "ACCUMULATION": job.micro_batches,
        "STRATEGY": engine_strategy(job),
    }
    return Exported(
        text=python_constants(constants) + _FUNCTIONS, unsaid=_unsaid(job), remarks=_remarks(job, places.whole)
    )


_FUNCTIONS = '''

def mesh():
    """All ranks."""
    import numpy as np
    import paddle.distributed as dist

    return dist.ProcessMesh(np.arange(int(np.prod(SHAPE))).reshape(SHAPE), dim_names=AXES)


def stage_mesh(stage):
    """The ranks of one pipeline stage."""
    return mesh().get_mesh_with_dim("pp", stage)


def expert_mesh(stage):
    """The ranks of one pipeline stage, as experts see them."""
    import numpy as np
    import paddle.distributed as dist

    ranks = np.array(stage_mesh(stage).process_ids).reshape(EXPERT_SHAPE)
    return dist.ProcessMesh(ranks, dim_names=EXPERT_AXES)


def placements(words):
    """['Replicate', 'Shard(1)'] as Paddle's placements."""
    import paddle.distributed as dist

    return [dist.Replicate() if word == "Replicate" else dist.Shard(int(word[6:-1])) for word in words]


def shard_weight(name, weight, stage):
    """A weight, by its name in the plan, on the ranks of its stage."""
    import paddle.distributed as dist

    if name in EXPERT_PLACEMENTS:
        return dist.shard_tensor(weight, expert_mesh(stage), placements(EXPERT_PLACEMENTS[name]))
    return dist.shard_tensor(weight, stage_mesh(stage), placements(PLACEMENTS[name]))


def shard_input(tokens, stage=0):
    """Token ids [batch, sequence]."""
    import paddle.distributed as dist

    return dist.shard_tensor(tokens, stage_mesh(stage), placements(INPUT))


def to_stage(hidden, stage):
    """The residual stream [batch, sequence, hidden], where a layer of this stage takes it."""
    import paddle.distributed as dist

    return dist.reshard(hidden, stage_mesh(stage), placements(HIDDEN))


def shard_optimizer(optimizer):
    """ZeRO on dp_shard, and gradient accumulation."""
    import paddle.distributed as dist

    if ZERO == 0:
        return dist.shard_optimizer(optimizer, gradient_accumulation_steps=ACCUMULATION)
    stage = {1: dist.ShardingStage1, 2: dist.ShardingStage2, 3: dist.ShardingStage3}[ZERO]
    return dist.shard_optimizer(optimizer, stage("dp_shard"), gradient_accumulation_steps=ACCUMULATION)


def strategy():
    """What dist.to_static(layer, loader, loss, optimizer, strategy=strategy()) takes."""
    import copy

    import paddle.distributed as dist

    return dist.Strategy(copy.deepcopy(STRATEGY))
'''


def _input(axes: tuple[str, ...]) -> list[str]:
    shards = dict.fromkeys(DATA_AXES, "Shard(0)") | {"cp": "Shard(1)"}
    return [shards.get(axis, "Replicate") for axis in axes if axis != "pp"]


def _hidden(job: Job, axes: tuple[str, ...]) -> list[str]:
    shards = dict.fromkeys(DATA_AXES, "Shard(0)") | {"cp": "Shard(1)"}
    if job.strategy.sp:
        shards["tp"] = "Shard(1)"
    return [shards.get(axis, "Replicate") for axis in axes if axis != "pp"]


def engine_strategy(job: Job) -> dict[str, dict[str, Any]]:
    """Sections of dist.Strategy; what is off is left out, since Paddle takes any key without a word."""
    s, precision = job.strategy, job.workload.precision
    sections: dict[str, dict[str, Any]] = {}
    if s.zero:
        sections["sharding"] = {"enable": True, "stage": s.zero, "degree": s.dp_shard}
    if s.pp > 1:
        sections["pipeline"] = {
            "enable": True,
            "schedule_mode": SCHEDULES[s.schedule],
            "pp_degree": s.pp,
            "vpp_degree": s.vpp,
            "micro_batch_size": s.micro_batch,
            "accumulate_steps": job.micro_batches,
        }
    elif job.micro_batches > 1:
        sections["gradient_merge"] = {"enable": True, "k_steps": job.micro_batches, "avg": True}
    if s.recompute == "full":
        sections["recompute"] = {"enable": True}
    if precision.compute in DTYPES:
        master = precision.gradients == "fp32"
        sections["amp"] = {"enable": True, "dtype": DTYPES[precision.compute], "level": "o2", "use_master_grad": master}
    return sections


def _unsaid(job: Job) -> tuple[Unsaid, ...]:
    s, w = job.strategy, job.workload
    model = "the model's code says it"
    taken = {"bf16": "bf16-grads" if w.precision.gradients == "bf16" else "bf16", "fp16": "fp16"}
    return (
        *job.unsaid("stage_layers", "", BY_HAND),
        *job.unsaid("cp_inner", 1, "context parallelism has one level"),
        *job.unsaid(
            "cp_kind", "all_gather" if s.cp > 1 else "none", "attention over a sharded sequence gathers keys and values"
        ),
        *job.unsaid("recompute", "full" if s.recompute == "full" else "none", model),
        *job.unsaid(
            "recompute_layers", 0, "recompute wraps the layers that the model's code names, all of them or none"
        ),
        *job.unsaid("precision", taken.get(w.precision.compute, "fp32"), "amp has no such set of dtypes"),
        *job.unsaid("seq_len", None, "the data says it"),
        *job.unsaid("optimizer", "adamw", "the program chooses it"),
        *job.unsaid("attention", "flash", model),
        *job.unsaid("offload_optimizer", False, "the program says it"),
    )


def _remarks(job: Job, whole: tuple[str, ...]) -> tuple[str, ...]:
    s = job.strategy
    said = []
    if s.vpp > 1:
        said.append("set strategy().pipeline.vpp_seg_method to the name of your decoder layer's class")
    if s.zero and s.cp > 1:
        said.append("the plan shards over dp_shard x cp; ShardingStage works on one axis, dp_shard")
    if whole:
        said.append(f"weights that tp = {s.tp} does not divide stay whole on it: {', '.join(whole)}")
    if job.model.vocab % s.tp:
        said.append(f"pad the vocabulary of {job.model.vocab} to a multiple of tp = {s.tp}")
    if any(isinstance(kind.ffn, Moe) for kind in job.model.kinds.values()):
        said.append("dispatch and combine are the model's: reshard tokens between stage_mesh and expert_mesh")
    return tuple(said)
