"""The YAML (or JSON) of `accelerate config` -> facts."""

from __future__ import annotations

from typing import Any

from distplan.hardware.documents import Document, take
from distplan.planner.export_accelerate import ROTATIONS
from distplan.planner.imported import Reading, check_names, one_of, option_names

_TYPES = {"FSDP": "FSDP", "MULTI_GPU": "MULTI_GPU", "NO": "MULTI_GPU"}
_DTYPES = {"no": "fp32", "bf16": "bf16-sharded", "fp16": "fp16", "fp8": "fp8"}
_STRATEGIES = {
    "FULL_SHARD": "3", "SHARD_GRAD_OP": "2", "NO_SHARD": "0", "HYBRID_SHARD": "3", "HYBRID_SHARD_ZERO2": "2",
    "1": "3", "2": "2", "3": "0", "4": "3", "5": "2",
}  # fmt: skip
"""FSDP1's sharding strategy, by name or by torch's number -> ZeRO stage"""


def read_accelerate(document: Document, layers: int | None = None) -> Reading:
    """Raises DocumentError with file, line and key."""
    names = option_names("accelerate").value
    check_names(document, names["top"], strict=True)
    kind = one_of(document, "distributed_type", _TYPES, "MULTI_GPU")
    gpus = take(document, "num_processes", int, default=None, minimum=1)
    fsdp = take(document, "fsdp_config", Document, default=None) if kind == "FSDP" else None
    parallel = take(document, "parallelism_config", Document, default=None)
    if fsdp is not None:
        check_names(fsdp, names["fsdp_config"], strict=True)
    degrees = _degrees(parallel, names["parallelism_config"])
    facts: dict[str, Any] = {
        "gpus": gpus,
        **degrees,
        "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "sp": False, "micro_batch": 1, "schedule": "1f1b",
        "zero": _zero(fsdp),
        "recompute": "full" if fsdp is not None and _flag(fsdp, "activation_checkpointing") else "none",
        "recompute_layers": 0,
        "offload_optimizer": fsdp is not None and _flag(fsdp, "offload_params"),
        "precision": one_of(document, "mixed_precision", _DTYPES, "fp32"),
        "optimizer": "adamw",
        "attention": "flash",
        "clip_grad": True,
        "global_batch": None,
        "seq_len": None,
    }  # fmt: skip
    if fsdp is None and gpus is not None:
        facts["dp_shard"] = gpus
    return Reading(facts=facts)


def _degrees(parallel: Document | None, names: list[str]) -> dict[str, Any]:
    if parallel is None:
        return {"dp_replicate": 1, "tp": 1, "cp": 1, "cp_kind": "none"}
    check_names(parallel, names, strict=True)
    prefix = "parallelism_config_"
    found: dict[str, Any] = {}
    for fact in ("dp_replicate", "dp_shard", "tp", "cp"):
        found[fact] = take(parallel, f"{prefix}{fact}_size", int, default=1, minimum=1)
    kinds = {rotation: kind for kind, rotation in ROTATIONS.items()}
    rotation = one_of(parallel, f"{prefix}cp_comm_strategy", kinds, "all_gather")
    return found | {"cp_kind": rotation if found["cp"] > 1 else "none"}


def _flag(fsdp: Document, name: str) -> bool:
    key = f"fsdp_{name}" if f"fsdp_{name}" in fsdp.value else name
    return take(fsdp, key, bool, default=False)


def _zero(fsdp: Document | None) -> int:
    if fsdp is None:
        return 0
    if str(fsdp.value.get("fsdp_version", 1)) == "2":
        return 3 if take(fsdp, "fsdp_reshard_after_forward", bool, default=True) else 2
    return int(one_of(fsdp, "fsdp_sharding_strategy", _STRATEGIES, "3"))
