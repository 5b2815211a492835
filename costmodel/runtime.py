"""A runtime: what a training framework allows and does, as versioned data (runtimes/*.yaml)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from distplan.costmodel import fitted
from distplan.costmodel.host import CAPTURED
from distplan.costmodel.strategy import DEGREES, STRUCTURE, Floats
from distplan.hardware.cluster import Cluster
from distplan.hardware.documents import Document, load_mapping, no_other_keys, take
from distplan.hardware.errors import UnknownNameError
from distplan.hardware.units import parse_bytes

RULE_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "kv_heads": ("refuse", "gather", "replicate"),
    "vocab": ("divide", "pad", "uneven"),
    "sp_without_tp": ("refuse", "allow"),
    "layers": ("even", "even_counted", "any"),
    "chunks": ("even", "even_counted", "layers_per_stage"),
    "f_then_b": ("divide", "any"),
    "micro_batches": ("at_least_stages", "any"),
    "interleaved": ("divide", "rounds", "at_least_stages", "any"),
    "cp_sequence": ("twice_cp", "cp"),
    "ulysses_kv": ("refuse", "replicate"),
    "zero_with_pp": ("1", "any"),
    "hsdp": ("zero3", "allow"),
    "moe_sp": ("required", "optional"),
    "ep_at_least_tp": ("true", "false"),
    "offload_with_pp": ("refuse", "allow"),
    "uneven_stages": ("none", "layers", "layers_and_recompute"),
}
"""Rule -> its variants, strict to loose (`rounds` and `at_least_stages` are not ordered; `any` covers both).

kv_heads: key/value heads that tp does not divide are refused, or held once per group of tp/kv_heads ranks
    (gathered after the projection, or replicated); the larger must be a multiple of the smaller.
vocab: must divide by tp; is padded by the model's vocab_pad_multiple (1: not padded); may be uneven.
layers, chunks: layers over pp stages, and over pp·vpp chunks where vpp > 1. even_counted: even, or even
    with the embedding, or the loss, or both counted as a layer, or these and the multi-token-prediction
    modules. layers_per_stage: two chunks a stage, or
    ceil((layers [+1, +2]) / n) = pp·vpp for a whole n.
f_then_b, micro_batches (1F1B), interleaved: micro-batches m against p stages. divide: m % p = 0;
    rounds: m % max(1, m // p) = 0.
cp_sequence: the sequence divides by 2·cp (balanced halves) or by cp (always cp for ulysses if loose).
ulysses_kv: heads must divide by tp·cp; key/value heads too, or they are replicated.
uneven_stages: what a user may choose by hand for each stage beside the default split (costmodel/balance.py).
zero_with_pp: ZeRO stages above 1 with pipeline stages. hsdp: dp_replicate > 1 with ZeRO stages.
"""

LOSSES = ("vocab_parallel", "fp32_logits", "log_softmax", "gathered", "compiled", "fused")
_OVERLAP = ("dp_grad", "dp_param", "tp", "tp_backward", "cp", "pp", "pp_interleaved", "ep")
_SELECTIVE = ("norm", "mlp_act", "operators")
_NOT_OF_A_FILE = ("overlap_efficiency", "software_factors", "cluster_factor")
_MERGED = ("always", "attention", "gathered", "never")
_TIMING = ("micro_batch", "last_micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRules:
    """How a framework stores, gathers and reduces weights, gradients and optimizer state."""

    pads_rows: bool
    """every sharded weight is padded to whole rows per rank (FSDP2); else flat buffers are cut anywhere"""
    root_unit: bool
    """embedding and head of one stage are gathered and reduced together (FSDP's root)"""
    root_resharded: bool
    """zero 3 gathers embedding and head again in backward"""
    zero2_parameters: str
    """whole (updated by an all-gather after the step) | sharded (gathered in forward, kept until backward's end)"""
    tp_gradients: str
    """gradients that are Partial on tp (norms under SP) are reduced coalesced, or per_weight"""
    tp_gradient_dtype: str
    """gradient | compute: the dtype of that reduction"""
    tp_gradient_times: int
    """1, or as often as the optimizer reads the gradient (DTensor's for-loop AdamW without FSDP: 3)"""
    kept_gradients: bool = False
    """gradients in the compute dtype stay when they have been added to those of a wider dtype"""
    step_copies: float = 4.0
    """bytes per trained element that the update makes of gradients of two bytes"""
    step_contiguous: bool = False
    """these copies are blocks of their own, larger than any that activations leave in the allocator's cache"""
    norm_copy: float = 0.0
    """bytes per element of the copy of one gradient of two bytes that its norm is taken of"""
    wide_gradients_cast: bool = False
    """gradients of a wider dtype are cast to the compute dtype all at once to be reduced"""
    init: str = "sharded"
    """how parameters get where they are kept: beside (whole on the device, copied into buffers of parameters beside
    them, those of gradients there too), host (made whole on the host), sharded (each shard where it is kept)"""
    init_optimizer: bool = False
    """moments are made before the first step, not by it"""
    load_host: str = "shard"
    """what of a checkpoint a rank reads into host memory: its shard of the states, the parameters of its stage (and
    the flat copy of them), or the whole model's parameters"""
    buckets_from: int = 2
    """the ZeRO stage from which gradients are reduced through a buffer of grad_bucket_bytes"""
    whole_gradients: str
    """a gradient that is whole where its weight is sharded on tp is kept sliced | as_produced (DTensor without FSDP)"""

    @property
    def parameters_sharded_from(self) -> int:
        """The ZeRO stage from which parameters are stored sharded."""
        return 2 if self.zero2_parameters == "sharded" else 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Facts of one framework. `rules` and `legal` bound the space; the rest shapes the Program."""

    name: str
    version: str
    source: str
    legal: Mapping[str, tuple[str, ...]]
    """structure field -> values that the framework can run (sp, zero, cp_kind, schedule, recompute);
    degree -> the only values it knows (fsdp1: tp 1), absent = any"""
    rules: Mapping[str, str]
    """rule name -> variant, read by planner/constraints.py (kv_heads: refuse | replicate | gather, …)"""
    mesh_order: tuple[str, ...]
    """axes, outermost first"""
    sp_saves: str
    """shard (Megatron: the shard is saved and gathered again in backward) | gathered (torch)"""
    merged_input_gradients: str
    """q, k, v (gate, up) input gradients are summed before one collective: always (Megatron, Paddle), never,
    gathered (DTensor: only where one gather of the input feeds them all, which is under SP), or attention (q, k, v
    are one product, gate and up are two; under SP as gathered)"""
    embedding_gradient: str
    """the vocabulary-parallel table's gradient is sharded as the table, or whole on every tp rank (DTensor)"""
    state: StateRules
    grad_reduce: str
    """micro_batch | last_micro_batch: when gradients are reduced that stay whole (zero 0, 1), and when shards of them
    are summed over dp_replicate"""
    grad_reduce_sharded: str
    """the same of gradients stored sharded (zero 2, 3), within the sharding group"""
    grad_reduce_pipeline: str
    """that of both with pp > 1, where it is last_micro_batch (torch's stages wait for the last backward); else that of
    gradients stored sharded"""
    overlap: Mapping[str, bool]
    """collective class (dp_grad, dp_param, tp, tp_backward, cp, pp, pp_interleaved, ep) -> hidden where it can be"""
    selective: tuple[str, ...]
    """what selective recomputation repeats under flash attention: norm, mlp_act (unfused: core attention), or
    operators: everything but attention, what is scattered, and every other product of a weight"""
    fused_glu: bool
    """the gated activation is one kernel, which keeps gate and up (unfused: their activation too)"""
    fused_norm: bool
    fused_rope: bool
    """one kernel rotates q and k (unfused: products with cos and sin, a rotation and a sum)"""
    fused_expert_bias: bool = True
    """the bias behind experts is added by the grouped product (unfused: by kernels of its own, times its weight)"""
    attention_kernel: str
    """flash1 | flash2 | flash3 (the best that the device has: FlashAttention-3, cuDNN)"""
    loss: str
    early_stop: bool
    """full recompute skips what backward does not need (torch's non-reentrant checkpoint)"""
    grad_bucket_bytes: float
    """one reduction's worth of gradients; 0 = one layer"""
    overlap_efficiency: Mapping[str, float]
    """collective class -> the share of it that is hidden where it can be (fitted.yaml)"""
    software_factors: Mapping[str, float]
    """generation of accelerator -> measured over modelled time (fitted.yaml)"""
    software_factor: float
    """on top of it, for a runtime file of one's own"""
    context_bytes: float
    fragmentation: float
    boundary: str = "whole"
    """ranks of tp send a boundary activation that all of them hold whole, each its own copy | scattered: each a part,
    which the next stage gathers"""
    expert_dispatch: str = "each"
    """a token goes to each of its experts (Megatron's alltoall dispatcher, torch) | once_per_domain: once to a scale-up
    domain, and on from there (DeepEP, which Megatron has as --moe-token-dispatcher-type flex)"""
    expert_overlap: str = "operators"
    """what overlap.ep hides dispatch and combine behind: operators that do not wait for them | micro_batches: all
    that another micro-batch computes meanwhile (DualPipe, arXiv 2412.19437, section 3.2.1; Megatron's
    --overlap-moe-expert-parallel-comm), as if every micro-batch had another beside it"""
    issue: str = "eager"
    """how operators reach the device: eager (one by one from Python) | compiled (a program issues its kernels)"""
    cuda_graph_modules: tuple[str, ...] = ()
    """parts of a layer that CUDA graphs replay: attn, mlp, moe_router, moe_preprocess (Megatron Core)"""
    cluster_factor: float = 1.0
    """on top of both, as runs on this very cluster measured it (`on_cluster`)"""
    provenance: Mapping[str, str]
    """field, or rules.<rule> -> the source of its value, or 'assumed: why'"""

    def hidden(self, kind: str) -> float:
        """The share of a collective of this class that disappears behind what it can hide behind.

        fsdp_grad and fsdp_param are dp_grad and dp_param of every micro-batch (ZeRO 2 and 3).
        """
        return self.overlap_efficiency.get(kind, 1.0) if self.overlap[kind.replace("fsdp", "dp")] else 0.0

    def reduces_each(self, zero: Floats, pp: int) -> tuple[Floats, Floats]:
        """1 where every micro-batch reduces gradients, 0 where the last does: (as far as they are stored sharded or
        whole, over dp_replicate after that)."""
        sharded, whole = self.grad_reduce_sharded, self.grad_reduce
        if pp > 1:
            sharded = self.grad_reduce_pipeline
            whole = whole if sharded == "micro_batch" else sharded
        within = np.where(zero >= 2.0, float(sharded == "micro_batch"), float(whole == "micro_batch"))
        return within, within * float(whole == "micro_batch")

    def factor(self, generation: str) -> float:
        """Measured over modelled time of what a micro-batch does."""
        known = self.software_factors
        return self.cluster_factor * self.software_factor * known.get(generation, known[fitted.DEFAULT])


def on_cluster(runtime: Runtime, cluster: Cluster) -> Runtime:
    """The runtime with what its runs on this cluster measured in place of fitted.yaml's figures; twice is once."""
    measured = {
        "cluster_factor": cluster.calibration.number("software_factor"),
        "fragmentation": cluster.calibration.number("fragmentation"),
        "context_bytes": cluster.calibration.number("context_bytes"),
    }
    changes: dict[str, Any] = {name: value for name, value in measured.items() if value is not None}
    return replace(runtime, **changes) if changes else runtime


def list_runtimes() -> tuple[str, ...]:
    """Names of the shipped runtimes, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def load_runtime(name_or_path: str) -> Runtime:
    """A shipped runtime by name, or a user's file (a path with a suffix or a folder in it).

    Raises UnknownNameError for a name that is not shipped, DocumentError for a file that is wrong.
    """
    if Path(name_or_path).suffix in (".yaml", ".yml", ".json") or os.sep in name_or_path:
        return _read(load_mapping(name_or_path))
    if name_or_path not in list_runtimes():
        raise UnknownNameError("runtime", name_or_path, list_runtimes())
    return _shipped(name_or_path)


_FOLDER = Path(__file__).with_name("runtimes")


@cache
def _shipped(name: str) -> Runtime:
    return _read(load_mapping(_FOLDER / f"{name}.yaml"))


def _read(doc: Document) -> Runtime:
    no_other_keys(doc, [f.name for f in fields(Runtime) if f.name not in _NOT_OF_A_FILE])
    name = take(doc, "name", str)
    return Runtime(
        name=name,
        version=take(doc, "version", str),
        source=take(doc, "source", str),
        legal=_legal(take(doc, "legal", Document)),
        rules=_rules(take(doc, "rules", Document)),
        mesh_order=_mesh_order(doc),
        sp_saves=take(doc, "sp_saves", str, choices=("shard", "gathered")),
        merged_input_gradients=take(doc, "merged_input_gradients", str, choices=_MERGED),
        embedding_gradient=take(doc, "embedding_gradient", str, choices=("sharded", "whole")),
        state=_state(take(doc, "state", Document)),
        grad_reduce=take(doc, "grad_reduce", str, choices=_TIMING),
        grad_reduce_sharded=take(doc, "grad_reduce_sharded", str, choices=_TIMING),
        grad_reduce_pipeline=take(doc, "grad_reduce_pipeline", str, choices=_TIMING),
        overlap=_overlap(take(doc, "overlap", Document)),
        selective=_selective(doc),
        fused_glu=take(doc, "fused_glu", bool),
        fused_norm=take(doc, "fused_norm", bool),
        fused_rope=take(doc, "fused_rope", bool),
        fused_expert_bias=take(doc, "fused_expert_bias", bool, default=True),
        attention_kernel=take(doc, "attention_kernel", str, choices=("flash1", "flash2", "flash3")),
        loss=take(doc, "loss", str, choices=LOSSES),
        early_stop=take(doc, "early_stop", bool),
        boundary=take(doc, "boundary", str, default="whole", choices=("whole", "scattered")),
        expert_dispatch=take(doc, "expert_dispatch", str, default="each", choices=("each", "once_per_domain")),
        expert_overlap=take(doc, "expert_overlap", str, default="operators", choices=("operators", "micro_batches")),
        issue=take(doc, "issue", str, default="eager", choices=("eager", "compiled")),
        cuda_graph_modules=_captured(doc),
        grad_bucket_bytes=take(doc, "grad_bucket_bytes", _bytes, minimum=0.0),
        overlap_efficiency=fitted.fitted().overlap_efficiency,
        software_factors=fitted.software_factors(name),
        software_factor=take(doc, "software_factor", float, default=1.0, minimum=0.1, maximum=10.0),
        context_bytes=take(doc, "context_bytes", _bytes, default=fitted.context_bytes(name), minimum=0.0),
        fragmentation=take(doc, "fragmentation", float, default=fitted.fragmentation(name), minimum=0.0, maximum=1.0),
        provenance=_provenance(take(doc, "provenance", Document)),
    )


def _state(doc: Document) -> StateRules:
    no_other_keys(doc, [f.name for f in fields(StateRules)])
    return StateRules(
        pads_rows=take(doc, "pads_rows", bool),
        root_unit=take(doc, "root_unit", bool),
        root_resharded=take(doc, "root_resharded", bool),
        zero2_parameters=take(doc, "zero2_parameters", str, choices=("whole", "sharded")),
        tp_gradients=take(doc, "tp_gradients", str, choices=("coalesced", "per_weight")),
        tp_gradient_dtype=take(doc, "tp_gradient_dtype", str, choices=("gradient", "compute")),
        tp_gradient_times=take(doc, "tp_gradient_times", int, minimum=1),
        whole_gradients=take(doc, "whole_gradients", str, choices=("sliced", "as_produced")),
        kept_gradients=take(doc, "kept_gradients", bool, default=False),
        step_copies=take(doc, "step_copies", float, default=4.0, minimum=0.0, maximum=16.0),
        step_contiguous=take(doc, "step_contiguous", bool, default=False),
        norm_copy=take(doc, "norm_copy", float, default=0.0, minimum=0.0, maximum=16.0),
        wide_gradients_cast=take(doc, "wide_gradients_cast", bool, default=False),
        init=take(doc, "init", str, default="sharded", choices=("sharded", "beside", "host")),
        init_optimizer=take(doc, "init_optimizer", bool, default=False),
        load_host=take(doc, "load_host", str, default="shard", choices=("shard", "stage", "model")),
        buckets_from=take(doc, "buckets_from", int, default=2, minimum=0, maximum=3),
    )


def _bytes(value: object) -> float:
    """Bytes with a unit, or a bare number of bytes."""
    return float(value) if isinstance(value, int | float) else parse_bytes(value)


def _legal(doc: Document) -> Mapping[str, tuple[str, ...]]:
    no_other_keys(doc, (*STRUCTURE, *DEGREES))
    legal = {}
    for key in doc.value:
        values = tuple(str(value).lower() for value in take(doc, key, list))
        for value in values:
            known = STRUCTURE.get(key)
            if value not in known if known else not value.isdigit():
                raise doc.error(f"'{value}' is not one of {', '.join(known or ('whole numbers',))}", key)
        legal[key] = values
    for key in STRUCTURE:
        if not legal.get(key):
            raise doc.error(f"'{key}' needs at least one value")
    return legal


def _rules(doc: Document) -> Mapping[str, str]:
    no_other_keys(doc, RULE_VARIANTS)
    return {rule: str(take(doc, rule, _lower, choices=variants)) for rule, variants in RULE_VARIANTS.items()}


def _provenance(doc: Document) -> Mapping[str, str]:
    return {key: take(doc, key, str) for key in doc.value}


def _lower(value: Any) -> str:
    return str(value).lower()


def _mesh_order(doc: Document) -> tuple[str, ...]:
    order = tuple(str(axis) for axis in take(doc, "mesh_order", list))
    if sorted(order) != ["cp", "dp_replicate", "dp_shard", "pp", "tp"]:
        raise doc.error("must name pp, dp_replicate, dp_shard, cp and tp once each", "mesh_order")
    return order


def _selective(doc: Document) -> tuple[str, ...]:
    parts = tuple(str(part) for part in take(doc, "selective", list))
    for part in parts:
        if part not in _SELECTIVE:
            raise doc.error(f"'{part}' is not one of {', '.join(_SELECTIVE)}", "selective")
    return parts


def _captured(doc: Document) -> tuple[str, ...]:
    modules = tuple(str(module) for module in take(doc, "cuda_graph_modules", list, default=[]))
    for module in modules:
        if module not in CAPTURED:
            raise doc.error(f"'{module}' is not one of {', '.join(CAPTURED)}", "cuda_graph_modules")
    return modules


def _overlap(doc: Document) -> Mapping[str, bool]:
    no_other_keys(doc, _OVERLAP)
    return {kind: take(doc, kind, bool) for kind in _OVERLAP}
