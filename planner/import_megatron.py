"""Megatron-LM's arguments -> facts. Options in any spelling that argparse takes (dashes; torchrun's too)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from distplan.costmodel.stages import chunk_layers
from distplan.hardware.documents import Document, Keys, take
from distplan.planner.export_megatron import CP_COMM, FP8, SHARDING
from distplan.planner.import_arguments import LOOSE
from distplan.planner.imported import Reading, check_names, one_of, option_names

_TORCHRUN = (
    "nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-id", "rdzv-backend", "rdzv-endpoint",
    "local-ranks-filter", "tee", "log-dir", "max-restarts", "role", "standalone",
)  # fmt: skip
_MODEL = {
    "layers": "num-layers",
    "hidden": "hidden-size",
    "heads": "num-attention-heads",
    "kv_heads": "num-query-groups",
    "ffn": "ffn-hidden-size",
    "vocab": "vocab-size",
    "experts": "num-experts",
    "top_k": "moe-router-topk",
}
"""our word -> the argument"""
_LAYOUT = "pipeline-model-parallel-layout"
_LEVELS = "hierarchical-context-parallel-sizes"
_LONGEST = 1_000_000
"""letters of a layout, repeats spelled out"""
_GRANULARITY = {"full": "full", "selective": "selective"}


def read_megatron(document: Document, layers: int | None = None) -> Reading:
    """Raises DocumentError with file, line and argument."""
    doc = _dashed(document)
    names = option_names("megatron").value
    notes = check_names(doc, (*names["flags"], *names["options"], *_TORCHRUN, LOOSE), strict=False)
    tp, pp, cp = _degree(doc, "tensor-model-parallel-size"), _degree(doc, "pipeline-model-parallel-size"), _cp(doc)
    model = _sizes(doc)
    known = {"layers": layers, **model} if layers else model
    vpp = _chunks(doc, known, pp)
    zero = _zero(doc)
    facts: dict[str, Any] = {
        "gpus": _gpus(doc),
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "cp": cp,
        "cp_kind": one_of(doc, "cp-comm-type", {v: k for k, v in CP_COMM.items()}, "ring") if cp > 1 else "none",
        "cp_inner": _cp_inner(doc, cp),
        "stage_layers": _by_hand(doc, known, pp),
        "ep": _degree(doc, "expert-model-parallel-size"),
        # Megatron's experts are split like everything else unless told otherwise
        "etp": take(
            doc, "expert-tensor-parallel-size", int, default=tp if "num-experts" in doc.value else 1, minimum=1
        ),
        "sp": _flag(doc, "sequence-parallel") and tp > 1,
        "zero": zero,
        "dp_replicate": _degree(doc, "num-distributed-optimizer-instances") if zero else 1,
        "micro_batch": _degree(doc, "micro-batch-size"),
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        **_recompute(doc, known, pp, vpp),
        **_workload(doc),
    }
    return Reading(facts=facts, model=model, notes=notes)


def _dashed(document: Document) -> Document:
    """torchrun takes underscores too; Megatron's own words have dashes, and a misspelt one is to be told."""
    known = {*option_names("megatron").value["flags"], *option_names("megatron").value["options"], *_TORCHRUN}

    def spelled(key: str) -> str:
        dashed = key.replace("_", "-")
        return dashed if dashed in known else key

    value = {spelled(key): item for key, item in document.value.items()}
    lines: dict[Keys, int] = {(spelled(str(keys[0])),): line for keys, line in document.lines.items()}
    return Document(file=document.file, value=value, lines=lines)


def _degree(doc: Document, option: str) -> int:
    return take(doc, option, int, default=1, minimum=1)


def _cp(doc: Document) -> int:
    return _degree(doc, "context-parallel-size")


def _cp_inner(doc: Document, cp: int) -> int:
    """The first of the two sizes, which multiply to cp: that of the all-to-all."""
    if doc.value.get("cp-comm-type") != CP_COMM["two_level"] or cp == 1:
        return 1
    sizes = doc.value.get(_LEVELS)
    two = isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    if not (two and sizes[0] * sizes[1] == cp):
        raise doc.error(f"a2a+p2p needs two sizes that multiply to context-parallel-size {cp}", _LEVELS)
    return int(sizes[0])


def _flag(doc: Document, option: str) -> bool:
    return doc.value.get(option) is not None and take(doc, option, bool)


def _gpus(doc: Document) -> int | None:
    """Nodes times processes of each, where torchrun's own options stand in the same file."""
    nodes, processes = doc.value.get("nnodes", 1), doc.value.get("nproc-per-node")
    return nodes * processes if isinstance(nodes, int) and isinstance(processes, int) else None


def _sizes(doc: Document) -> Mapping[str, Any]:
    return {
        word: take(doc, option, int, minimum=1) for word, option in _MODEL.items() if doc.value.get(option) is not None
    }


def _laid_out(doc: Document, pp: int) -> tuple[int, ...]:
    """Layers of every chunk of a layout such as Et|(tt|)*6tL: `|` ends a chunk, `*n` repeats a letter, a bar or a
    group."""
    written = take(doc, _LAYOUT, str).replace(",", "")
    long = sum(int(times) for times in re.findall(r"\*(\d{1,4})", written))
    if len(written) * max(1, long) > _LONGEST:
        raise doc.error("is longer than any model", _LAYOUT)
    spelled = re.sub(r"\(([^()]*)\)(?:\*(\d{1,4}))?", lambda m: _repeated(m[1]) * int(m[2] or 1), written)
    chunks = tuple(chunk.count("t") for chunk in _repeated(spelled).split("|"))
    if len(chunks) % pp:
        raise doc.error(f"{len(chunks)} chunks do not go round {pp} stages", _LAYOUT)
    return chunks


def _repeated(written: str) -> str:
    return re.sub(r"([^()*])\*(\d{1,4})", lambda m: m[1] * int(m[2]), written)


def _by_hand(doc: Document, model: Mapping[str, Any], pp: int) -> str:
    """A layout that is not the default cut of as many layers; it must hold all of them."""
    if doc.value.get(_LAYOUT) is None:
        return ""
    chunks = _laid_out(doc, pp)
    layers = model.get("layers", sum(chunks))
    if sum(chunks) != layers:
        raise doc.error(f"holds {sum(chunks)} layers (t) of {layers}", _LAYOUT)
    defaults = {chunk_layers(layers, len(chunks), mtp) for mtp in (0, take(doc, "mtp-num-layers", int, default=0))}
    return "" if chunks in defaults else ",".join(str(number) for number in chunks)


def _chunks(doc: Document, model: Mapping[str, Any], pp: int) -> int:
    if doc.value.get(_LAYOUT) is not None:
        return len(_laid_out(doc, pp)) // pp
    if doc.value.get("num-layers-per-virtual-pipeline-stage") is None:
        return _degree(doc, "num-virtual-stages-per-pipeline-rank")
    each = take(doc, "num-layers-per-virtual-pipeline-stage", int, minimum=1)
    if "layers" not in model:
        raise doc.error("needs --num-layers in the same file, or --model", "num-layers-per-virtual-pipeline-stage")
    counted = model["layers"] + sum(
        _flag(doc, f"account-for-{part}-in-pipeline-split") for part in ("embedding", "loss")
    )
    if counted % (pp * each):
        raise doc.error(
            f"{counted} layers do not make whole chunks of {each} on {pp} stages",
            "num-layers-per-virtual-pipeline-stage",
        )
    return int(counted // (pp * each))


def _zero(doc: Document) -> int:
    if _flag(doc, "use-megatron-fsdp"):
        words = {name: str(zero) for zero, name in SHARDING.items()} | {"optim": "1", "no_shard": "0"}
        return int(one_of(doc, "data-parallel-sharding-strategy", words, "0"))
    return int(_flag(doc, "use-distributed-optimizer"))


def _recompute(doc: Document, model: Mapping[str, Any], pp: int, vpp: int) -> dict[str, Any]:
    if _flag(doc, "recompute-activations"):
        return {"recompute": "selective", "recompute_layers": 0}
    granularity = one_of(doc, "recompute-granularity", _GRANULARITY, "none")
    if granularity != "full":
        return {"recompute": granularity, "recompute_layers": 0}
    method = one_of(doc, "recompute-method", {"uniform": "uniform", "block": "block"}, "uniform")
    if method == "uniform":
        # groups of layers, but all of them; 0 leaves the number to be solved
        return {"recompute": "full", "recompute_layers": -(-model["layers"] // pp) if "layers" in model else 0}
    return {"recompute": "full", "recompute_layers": vpp * take(doc, "recompute-num-layers", int, minimum=1)}


def _workload(doc: Document) -> dict[str, Any]:
    if doc.value.get("fp8-format") is not None:
        precision = _fp8(doc)
    elif _flag(doc, "bf16"):
        precision = "bf16-grads" if _flag(doc, "grad-reduce-in-bf16") else "bf16"
    else:
        precision = "fp16" if _flag(doc, "fp16") else "fp32"
    clip = take(doc, "clip-grad", float, default=1.0, minimum=0.0)
    return {
        "global_batch": take(doc, "global-batch-size", int, default=None, minimum=1),
        "seq_len": take(doc, "seq-length", int, default=None, minimum=1),
        "precision": precision,
        "optimizer": one_of(doc, "optimizer", {"adam": "adamw", "sgd": "sgd"}, "adamw"),
        "attention": one_of(
            doc,
            "attention-backend",
            {"flash": "flash", "fused": "flash", "auto": "flash", "unfused": "unfused", "local": "unfused"},
            "flash",
        ),
        "clip_grad": clip > 0.0,
        "offload_optimizer": _flag(doc, "optimizer-cpu-offload"),
    }


def _fp8(doc: Document) -> str:
    """The recipe whose scaling, gathered parameters and moments these are; the format is a matter of range only."""
    for name, settings in FP8.items():
        scaling = doc.value.get("fp8-recipe", "delayed") == settings.get("fp8_recipe", "delayed")
        gathered = _flag(doc, "fp8-param-gather") == ("fp8_param_gather" in settings)
        moments = (doc.value.get("exp-avg-dtype") == "bf16") == ("exp_avg_dtype" in settings)
        if scaling and gathered and moments:
            return name
    return "fp8"
