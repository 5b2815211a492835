"""Arguments for Megatron-LM's pretrain_gpt.py, and overrides for Megatron Bridge's ConfigContainer.

Both are one set of settings in the words of megatron-core's dataclasses; the arguments of Megatron-LM
are those words with dashes, and a few of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distplan.costmodel.model import Moe
from distplan.costmodel.stages import chunk_layers
from distplan.planner.launcher import Exported, Job, Unsaid, other_order
from distplan.planner.megatron_model import gpt_model, transformer_config
from distplan.planner.output import yaml_text

CP_COMM = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a", "two_level": "a2a+p2p"}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
MODULES = {"norm": "layernorm", "mlp_act": "mlp"}
LAYOUT = "pipeline_model_parallel_layout"
DATA_OUTSIDE = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
_YOURS = "data, tokenizer, learning rate, checkpoints, rotary base and norm epsilon are yours to add"
_OPTIMIZERS = {"adamw": "adam", "adamw8bit": "adam", "sgd": "sgd"}
_PRECISIONS = ("bf16", "bf16-grads", "fp16", "fp32")
_MOMENTS: Mapping[str, Any] = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
FP8: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"fp8": "hybrid"},
    "fp8-params": {"fp8": "hybrid", "fp8_param_gather": True},
    "fp8-bf16-moments": {"fp8": "hybrid", **_MOMENTS},
    "fp8-current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8-current-params": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
    "fp8-blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "fp8-blockwise-params": {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "mxfp8-params": {
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
}
"""recipe of precisions.yaml -> settings of megatron-core; the same table reads them back"""
_RECIPES = {
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
}
"""a setting of precision, or the value of fp8_recipe -> Megatron Bridge's recipe; the first that is set counts"""
_FLAGS = {
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num-experts",
    "fp8": "fp8-format",
    "grad_reduce_in_fp32": "accumulate-allreduce-grads-in-fp32",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
}
"""a field of megatron-core -> its argument, where that is not the field with dashes"""
_BY_ABSENCE = {
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "add_bias_linear": "disable-bias-linear",
}
"""a field that is true unless its argument is given"""


def megatron(job: Job) -> Exported:
    """Megatron-LM arguments, one per line; comments begin with #."""
    sections, unsaid, remarks = _settings(job)
    lines = []
    for title, values in sections.items():
        lines += [f"# {title}", *_arguments(values), ""]
    if job.strategy.zero > 1:
        lines += ["# the only format that Megatron-FSDP takes", "--ckpt-format fsdp_dtensor", ""]
    outside = job.runtime.mesh_order == DATA_OUTSIDE
    if outside:
        lines.insert(-1, "--use-tp-pp-dp-mapping")
    learned = job.model.positions == "learned"
    rows = job.model.max_seq_len if learned and job.model.max_seq_len else job.workload.seq_len
    lines += ["# model, beside its layers", f"--max-position-embeddings {rows}"]
    starts = job.unsaid("gpus", None, "torchrun starts the processes (--nnodes, --nproc-per-node)")
    order = () if outside else other_order(job)
    if job.strategy.zero > 1:
        order = (*order, "Megatron-FSDP needs CUDA_DEVICE_MAX_CONNECTIONS unset, or above 1")
    elif job.strategy.tp > 1 or job.strategy.cp > 1:
        order = (*order, "before Blackwell, tp or cp > 1 needs CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment")
    return Exported(text="\n".join(lines) + "\n", unsaid=(*starts, *unsaid), remarks=(*order, *remarks, _YOURS))


def megatron_bridge(job: Job) -> Exported:
    """A YAML of overrides for a recipe's ConfigContainer."""
    sections, unsaid, remarks = _settings(job)
    layers = {name: value for name, value in sections["model"].items() if name != "attention_backend"}
    model = {**layers, **sections["parallelism"], **sections["recomputation"], "seq_length": job.workload.seq_len}
    data, batch = sections["data parallelism"], sections["batch"]
    shares = {name: data[name] for name in ("use_distributed_optimizer", "overlap_param_gather") if name in data}
    chosen = sections["precision and optimizer"]
    kept = ("optimizer", "clip_grad", "optimizer_cpu_offload", "optimizer_offload_fraction")
    content: dict[str, Any] = {
        "model": model,
        "train": {name: batch[name] for name in ("micro_batch_size", "global_batch_size")},
        "ddp": {name: value for name, value in data.items() if name != "use_megatron_fsdp"},
        "optimizer": shares | {name: chosen[name] for name in kept if name in chosen},
        "dataset": {"seq_length": job.workload.seq_len},
    }
    if "use_megatron_fsdp" in data:
        content["dist"] = {"use_megatron_fsdp": True}
    recipe = next((name for key, name in _RECIPES.items() if key in (*chosen, chosen.get("fp8_recipe"))), None)
    if recipe:
        content["mixed_precision"] = recipe
    more = (
        *job.unsaid("gpus", None, "torchrun or Slurm starts the processes"),
        *job.unsaid("attention", "flash", "the attention backend is an enum, which a YAML of overrides cannot hold"),
    )
    fsdp = "set checkpoint.ckpt_format to fsdp_dtensor, the only one that Megatron-FSDP takes"
    gather = "check fp8_param_gather of the mixed_precision recipe: the plan gathers parameters in fp8"
    moments = "dtypes of moments are no text: set optimizer.exp_avg_dtype and exp_avg_sq_dtype in your recipe"
    return Exported(
        text=yaml_text(content),
        unsaid=(*more, *unsaid),
        remarks=(
            *other_order(job),
            *remarks,
            *((fsdp,) if job.strategy.zero > 1 else ()),
            *((gather,) if "fp8_param_gather" in chosen else ()),
            *((moments,) if "exp_avg_dtype" in chosen else ()),
            "these are overrides: choose the recipe of your model, and merge this file into its ConfigContainer",
        ),
    )


def _settings(job: Job) -> tuple[Mapping[str, Mapping[str, Any]], tuple[Unsaid, ...], tuple[str, ...]]:
    """Sections of settings (field of megatron-core -> value), what they cannot say, and remarks."""
    config, remarks = transformer_config(job.model)
    recompute, unsaid_recompute = _recompute(job)
    data, unsaid_data = _data_parallel(job)
    precision, unsaid_precision = _precision(job)
    batch = {
        "micro_batch_size": job.strategy.micro_batch,
        "global_batch_size": job.workload.global_batch,
        "seq_length": job.workload.seq_len,
    }
    sections = {
        "parallelism": _parallel(job),
        "data parallelism": data,
        "recomputation": recompute,
        "batch": batch,
        "precision and optimizer": precision,
        "model": {
            **config,
            **gpt_model(job.model),
            "attention_backend": "flash" if job.workload.attention == "flash" else "unfused",
        },
    }
    if job.strategy.recompute == "selective" and set(job.runtime.selective) - set(MODULES):
        remarks = (*remarks, f"{job.runtime.name} chooses operator by operator what it repeats, Megatron by module")
    unsaid = (
        *job.unsaid("schedule", "interleaved" if job.strategy.vpp > 1 else "1f1b", "Megatron runs 1F1B or interleaved"),
        *_sp_alone(job),
        *unsaid_data,
        *unsaid_recompute,
        *unsaid_precision,
    )
    return sections, unsaid, remarks


def _parallel(job: Job) -> dict[str, Any]:
    s = job.strategy
    values: dict[str, Any] = {
        "tensor_model_parallel_size": s.tp,
        "pipeline_model_parallel_size": s.pp,
        "context_parallel_size": s.cp,
        "sequence_parallel": s.sp and s.tp > 1,
    }
    if any(isinstance(kind.ffn, Moe) for kind in job.model.kinds.values()):
        values |= {"expert_model_parallel_size": s.ep, "expert_tensor_parallel_size": s.etp}
    if s.vpp > 1:
        values["virtual_pipeline_model_parallel_size"] = s.vpp
    if s.cp > 1:
        values["cp_comm_type"] = CP_COMM[s.cp_kind]
    if s.cp_inner > 1:
        values["hierarchical_context_parallel_sizes"] = [s.cp_inner, s.cp // s.cp_inner]
    chunks = s.pp * s.vpp
    first, last = counted(job.model.layers, chunks)
    mtp = job.model.mtp_layers
    if s.stage_layers and s.pp > 1:
        return values | {LAYOUT: layout(s.stage_layers, mtp)}
    if s.pp > 1 and mtp and (job.model.layers + first + last) % chunks:
        return values | {LAYOUT: layout(chunk_layers(job.model.layers, chunks, mtp), mtp)}
    if first:
        values["account_for_embedding_in_pipeline_split"] = True
    if last:
        values["account_for_loss_in_pipeline_split"] = True
    return values


def layout(layers: Sequence[int], mtp_layers: int) -> str:
    """Megatron's words for the layers of every chunk: E embedding, t layer, m multi-token prediction, L loss."""
    sizes = ["t" * number for number in layers]
    sizes[0] = f"E{sizes[0]}"
    sizes[-1] = f"{sizes[-1]}{'m' * mtp_layers}L"
    return "|".join(sizes)


def counted(layers: int, chunks: int) -> tuple[int, int]:
    """Whether embedding and loss count as a layer, so that the chunks come out even (as the estimate splits)."""
    for first, last in ((0, 0), (0, 1), (1, 0), (1, 1)):
        if (layers + first + last) % chunks == 0:
            return first, last
    return 0, 0


def _sp_alone(job: Job) -> tuple[Unsaid, ...]:
    return job.unsaid("sp", job.strategy.sp and job.strategy.tp > 1, "sequence parallelism needs tp > 1")


def _data_parallel(job: Job) -> tuple[dict[str, Any], tuple[Unsaid, ...]]:
    s, overlap = job.strategy, job.runtime.overlap
    values: dict[str, Any] = {"use_distributed_optimizer": s.zero > 0}
    if overlap["dp_grad"]:
        values["overlap_grad_reduce"] = True
    if overlap["dp_param"] and s.zero > 0:
        values["overlap_param_gather"] = True
    if s.zero > 1:
        values |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": SHARDING[s.zero]}
    if s.zero and s.dp_replicate > 1:
        values["num_distributed_optimizer_instances"] = s.dp_replicate
    precision = job.workload.precision
    if precision.compute == "bf16" or (precision.compute == "fp16" and precision.gradients == "fp32"):
        values["grad_reduce_in_fp32"] = precision.gradients == "fp32"
    if s.zero:
        return values, ()
    why = "without a distributed optimizer nothing is sharded, and all of dp is one group"
    return values, (*job.unsaid("dp_shard", s.dp, why), *job.unsaid("dp_replicate", 1, why))


def _recompute(job: Job) -> tuple[dict[str, Any], tuple[Unsaid, ...]]:
    s = job.strategy
    why = "--recompute-num-layers is a number of layers per virtual stage, at least 1"
    if s.recompute == "none":
        return {}, job.unsaid("recompute_layers", 0, why)
    if s.recompute == "selective":
        parts = MODULES if set(job.runtime.selective) - set(MODULES) else job.runtime.selective
        modules = [MODULES[part] for part in parts]
        if job.workload.attention != "flash":
            modules.insert(0, "core_attn")
        values = {"recompute_granularity": "selective", "recompute_modules": modules or ["core_attn"]}
        return values, job.unsaid("recompute_layers", 0, why)
    layers = max(1, -(-job.recompute_layers // s.vpp))
    full: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "block"}
    return full | {"recompute_num_layers": layers}, job.unsaid("recompute_layers", layers * s.vpp, why)


def _precision(job: Job) -> tuple[dict[str, Any], tuple[Unsaid, ...]]:
    w = job.workload
    known = _known(job)
    values: dict[str, Any] = {}
    if known != "fp32":
        values["fp16" if known == "fp16" else "bf16"] = True
    values |= FP8.get(known, {})
    values |= {"optimizer": _OPTIMIZERS[w.optimizer], "clip_grad": 1.0 if w.clip_grad else 0.0}
    if w.offload_optimizer:
        values |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    taken = "adamw" if w.optimizer == "adamw8bit" else w.optimizer
    return values, (
        *job.unsaid("precision", known, "no set of arguments has these dtypes"),
        *job.unsaid("optimizer", taken, "Megatron has no 8-bit moments"),
    )


def _known(job: Job) -> str:
    """The recipe, or the plain one of its compute dtype where no arguments make it."""
    name = job.workload.precision.name
    # parameters are gathered in fp8 by the distributed optimizer
    gathers = "fp8_param_gather" in FP8.get(name, {}) and job.strategy.zero == 0
    if name in _PRECISIONS or (name in FP8 and not gathers):
        return name
    return {"fp16": "fp16", "bf16": "bf16"}.get(job.workload.precision.compute, "fp32")


def _arguments(values: Mapping[str, Any]) -> list[str]:
    lines = []
    if LAYOUT in values:  # says the virtual stages too; Megatron takes only one of the two arguments
        values = {field: value for field, value in values.items() if field != "virtual_pipeline_model_parallel_size"}
    for field, value in values.items():
        flag = _FLAGS.get(field, field.replace("_", "-"))
        if field in _BY_ABSENCE:
            lines += [] if value else [f"--{_BY_ABSENCE[field]}"]
        elif field == "grad_reduce_in_fp32":
            lines.append(f"--{flag}" if value else "--grad-reduce-in-bf16")
        elif field == "num_query_groups":
            lines += ["--group-query-attention", f"--{flag} {value}"]
        elif field == "moe_layer_freq":
            lines.append(f"--{flag} {value}".replace(", ", ","))
        elif isinstance(value, list):
            lines.append(f"--{flag} {' '.join(str(item) for item in value)}")
        elif value is True:
            lines.append(f"--{flag}")
        elif value is not False and value is not None:
            lines.append(f"--{flag} {value}")
    return lines
