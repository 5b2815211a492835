"""torchtitan's overrides (or its TOML of before 0.3) -> facts."""

from __future__ import annotations

from typing import Any

from distplan.costmodel.strategy import CHUNKED
from distplan.hardware.documents import Document, Keys, take
from distplan.planner.export_torchtitan import SCHEDULES
from distplan.planner.import_arguments import LOOSE
from distplan.planner.imported import Reading, check_names, one_of, option_names

_SECTIONS = ("parallelism", "training")
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_AC = "activation-checkpoint:"
_SCHEDULES = {v: k for k, v in SCHEDULES.items()}
_ROTATIONS = {"allgather": "all_gather", "alltoall": "ring"}


def read_torchtitan(document: Document, layers: int | None = None) -> Reading:
    """`layers` of the model, where they are known, tell the chunks that layers per stage mean. Raises DocumentError."""
    parallel = _section(document, "parallelism")
    training = _section(document, "training")
    names = option_names("torchtitan").value
    for section, part in (("parallelism", parallel), ("training", training)):
        check_names(part, [f"{section}.{name}" for name in names[section]], strict=True)
    pp = _degree(parallel, "pipeline_parallel_degree")
    cp = _degree(parallel, "context_parallel_degree")
    shard = _shard(parallel)
    replicate = _degree(parallel, "data_parallel_replicate_degree")
    zero = _zero(parallel, pp, shard, cp)
    if zero == 0 and shard is not None:
        # nothing is sharded: all of dp is one group, which the plans write as dp_shard
        replicate, shard = 1, replicate
    schedule = one_of(parallel, "parallelism.pipeline_parallel_schedule", _SCHEDULES, "1f1b") if pp > 1 else "1f1b"
    facts: dict[str, Any] = {
        "dp_replicate": replicate,
        "dp_shard": shard,
        "tp": _degree(parallel, "tensor_parallel_degree"),
        "pp": pp,
        "cp": cp,
        "cp_kind": one_of(parallel, "parallelism.context_parallel_rotate_method", _ROTATIONS, "all_gather")
        if cp > 1
        else "none",
        "ep": _degree(parallel, "expert_parallel_degree"),
        "etp": _degree(parallel, "expert_tensor_parallel_degree"),
        "zero": zero,
        "schedule": schedule,
        "vpp": _chunks(parallel, layers, pp, schedule),
        **_recompute(document),
        **_batch(parallel, training, pp),
        "precision": _precision(training),
        "optimizer": "adamw",
        "attention": "flash",
    }
    facts["sp"] = facts["tp"] > 1 and take(parallel, "parallelism.enable_sequence_parallel", bool, default=True)
    open_cut = parallel.value.get(_PER_STAGE) is not None and layers is None
    notes = ("vpp is taken from the schedule; pipeline_parallel_layers_per_stage needs --model",) if open_cut else ()
    return Reading(facts=facts, notes=notes)


def _chunks(parallel: Document, layers: int | None, pp: int, schedule: str) -> int:
    """vpp: two chunks a rank where the schedule has several, unless layers per stage say otherwise."""
    if layers is None or pp == 1 or parallel.value.get(_PER_STAGE) is None:
        return 2 if pp > 1 and schedule in CHUNKED else 1
    each = take(parallel, _PER_STAGE, int, minimum=1)
    # torchtitan counts the embedding and the head as a layer each unless told otherwise
    for end in ("first", "last"):
        layers += take(parallel, f"parallelism.pipeline_parallel_{end}_stage_less_layers", int, default=1, minimum=0)
    chunks = -(-layers // each)
    if chunks % pp:
        raise parallel.error(
            f"{layers} layers, {each} per stage, make {chunks} stages, no multiple of {pp}", _PER_STAGE
        )
    return chunks // pp


def _section(document: Document, section: str) -> Document:
    """The options of one section, --section.no-flag as false, dashes as underscores."""
    values: dict[str, Any] = {}
    lines: dict[Keys, int] = {}
    for key, value in document.value.items():
        name = key.replace("-", "_")
        if not name.startswith(f"{section}."):
            continue
        off = name.startswith(f"{section}.no_")
        plain = name.replace(".no_", ".", 1) if off else name
        values[plain] = False if off else value
        lines[plain,] = document.lines.get((key,), 1)
    return Document(file=document.file, value=values, lines=lines)


def _degree(parallel: Document, name: str) -> int:
    return take(parallel, f"parallelism.{name}", int, default=1, minimum=1)


def _shard(parallel: Document) -> int | None:
    """-1, the default, is what remains of the GPUs."""
    raw = take(parallel, "parallelism.data_parallel_shard_degree", int, default=-1, minimum=-1)
    if raw == 0:
        raise parallel.error("0 is no degree; 1 means off, -1 the rest", "parallelism.data_parallel_shard_degree")
    return None if raw == -1 else raw


def _zero(parallel: Document, pp: int, shard: int | None, cp: int) -> int:
    if shard is not None and shard * cp == 1:
        return 0
    default = "never" if pp > 1 else "always"
    words = {"always": "always", "never": "never", "default": default, True: "always", False: "never"}
    chosen = one_of(parallel, "parallelism.fsdp_reshard_after_forward", {str(k): v for k, v in words.items()}, default)
    return 3 if chosen == "always" else 2


def _recompute(document: Document) -> dict[str, Any]:
    words = [word.replace("_", "-") for word in document.value.get(LOOSE, ()) if ":" in word]
    chosen = [word[len(_AC) :] for word in words if word.startswith(_AC)]
    mode = chosen[-1] if chosen else document.value.get("activation_checkpoint.mode", "none")
    if mode not in ("none", "selective", "full"):
        raise document.error(f"'{str(mode)[:40]}' is not one of none, selective, full", "activation_checkpoint.mode")
    return {"recompute": mode, "recompute_layers": 0}


def _batch(parallel: Document, training: Document, pp: int) -> dict[str, Any]:
    local = take(training, "training.local_batch_size", int, default=8, minimum=1)
    total = take(training, "training.global_batch_size", int, default=-1, minimum=-1)
    micro = (
        take(parallel, "parallelism.pipeline_parallel_microbatch_size", int, default=1, minimum=1) if pp > 1 else local
    )
    norm = training.value.get("training.max_norm", 1.0)
    return {
        "micro_batch": micro,
        "global_batch": total if total > 0 else None,
        "local_batch": local,
        "seq_len": take(training, "training.seq_len", int, default=2048, minimum=1),
        "clip_grad": str(norm) != "inf",
        "offload_optimizer": take(training, "training.enable_cpu_offload", bool, default=False),
    }


def _precision(training: Document) -> str:
    words = {"bfloat16": "bf16-sharded", "float32": "fp32"}
    return one_of(training, "training.mixed_precision_param", words, "bf16-sharded")
