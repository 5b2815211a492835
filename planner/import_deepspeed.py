"""DeepSpeed's JSON -> facts. `"auto"`, which the Hugging Face integration fills in, is read as not said."""

from __future__ import annotations

from typing import Any

from distplan.hardware.documents import Document, take
from distplan.planner.imported import Reading, check_names, option_names

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd", "adam8bit": "adamw8bit"}


def read_deepspeed(document: Document, layers: int | None = None) -> Reading:
    """Raises DocumentError with file, line and key."""
    doc = _without_auto(document)
    names = option_names("deepspeed").value
    notes = check_names(doc, names["top"], strict=False)
    zero = take(doc, "zero_optimization", Document, default=None)
    if zero is not None:
        check_names(zero, names["zero_optimization"], strict=True)
    batch = {key: take(doc, key, int, default=None, minimum=1) for key in _BATCH}
    dp, assumed = _data_parallel(doc, batch)
    facts: dict[str, Any] = {
        "micro_batch": batch["train_micro_batch_size_per_gpu"] or 1,
        "global_batch": batch["train_batch_size"],
        "dp": dp,
        "sp": False,
        "vpp": 1,
        "schedule": "1f1b",
        **_zero(zero),
        **_model_parallel(doc),
        **_recompute(doc),
        "precision": _precision(doc),
        "optimizer": _optimizer(doc),
        "attention": "flash",
        "seq_len": None,
        "clip_grad": take(doc, "gradient_clipping", float, default=0.0, minimum=0.0) > 0.0,
    }
    facts |= _groups(zero, facts)
    if dp is not None:
        facts["gpus"] = dp * facts["tp"] * facts["pp"] * facts["cp"]
    return Reading(facts=facts, notes=(*notes, *assumed))


def _without_auto(document: Document) -> Document:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item != "auto"}
        return value

    return Document(file=document.file, value=plain(document.value), lines=document.lines)


def _data_parallel(doc: Document, batch: dict[str, int | None]) -> tuple[int | None, tuple[str, ...]]:
    """dp is not in the file: it is what makes its three batch sizes agree. And a sentence where one is open."""
    total, micro, steps = (batch[key] for key in _BATCH)
    if total is None or micro is None or steps is None:
        return None, ("the file leaves a batch size open, so dp follows from --gpus",)
    if total % (micro * steps):
        raise doc.error(
            f"{total} is not a multiple of {micro} (micro-batch) x {steps} (accumulation)", "train_batch_size"
        )
    return total // (micro * steps), ()


def _zero(zero: Document | None) -> dict[str, Any]:
    if zero is None:
        return {"zero": 0, "offload_optimizer": False}
    offload = take(zero, "offload_optimizer", Document, default=None)
    device = "none" if offload is None else take(offload, "device", str, default="none")
    return {
        "zero": take(zero, "stage", int, default=0, minimum=0, maximum=3),
        "offload_optimizer": device in ("cpu", "nvme") or take(zero, "cpu_offload", bool, default=False),
    }


def _groups(zero: Document | None, facts: dict[str, Any]) -> dict[str, Any]:
    """hpZ's secondary groups are dp_shard."""
    if zero is None or zero.value.get("zero_hpz_partition_size") is None:
        return {}
    shard = take(zero, "zero_hpz_partition_size", int, minimum=1)
    if shard == 1 or facts["dp"] is None:
        return {}
    if facts["dp"] % shard:
        raise zero.error(f"{shard} does not divide dp = {facts['dp']}", "zero_hpz_partition_size")
    return {"dp_shard": shard, "dp_replicate": facts["dp"] // shard}


def _model_parallel(doc: Document) -> dict[str, Any]:
    tensor = take(doc, "tensor_parallel", Document, default=None)
    pipeline = take(doc, "pipeline", Document, default=None)
    experts = take(doc, "expert_parallel", Document, default=None)
    cp = take(doc, "sequence_parallel_size", int, default=1, minimum=1)
    tp = 1 if tensor is None else take(tensor, "autotp_size", int, default=0, minimum=0)
    return {
        "tp": max(1, tp),
        "pp": 1 if pipeline is None else take(pipeline, "stages", int, default=1, minimum=1),
        "cp": cp,
        "cp_kind": "ulysses" if cp > 1 else "none",
        "ep": 1 if experts is None else take(experts, "autoep_size", int, default=1, minimum=1),
        "etp": 1 if experts is None else take(experts, "expert_tensor_parallel_size", int, default=1, minimum=1),
    }


def _recompute(doc: Document) -> dict[str, Any]:
    section = take(doc, "activation_checkpointing", Document, default=None)
    if section is None:
        return {"recompute": "none", "recompute_layers": 0}
    layers = take(section, "number_checkpoints", int, default=0, minimum=0)
    return {"recompute": "full", "recompute_layers": layers}


def _precision(doc: Document) -> str:
    if _enabled(doc, "bf16") or _enabled(doc, "bfloat16"):
        types = take(doc, "data_types", Document, default=None)
        dtype = None if types is None else take(types, "grad_accum_dtype", str, default=None)
        return "bf16-grads" if dtype in ("bf16", "bfloat16") else "bf16"
    return "fp16" if _enabled(doc, "fp16") else "fp32"


def _enabled(doc: Document, key: str) -> bool:
    section = take(doc, key, Document, default=None)
    return section is not None and take(section, "enabled", bool, default=False)


def _optimizer(doc: Document) -> str:
    section = take(doc, "optimizer", Document, default=None)
    name = "adamw" if section is None else take(section, "type", str, default="adamw")
    if name.lower() not in _OPTIMIZERS and section is not None:
        raise section.error(f"'{name[:40]}' is not one that can be priced: Adam, AdamW, SGD", "type")
    return _OPTIMIZERS[name.lower()]
