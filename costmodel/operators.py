"""Operators over named dims: what is computed, before anything is placed on a mesh.

Legend: batch and seq are the micro-batch's sequences and tokens (kv_seq: the tokens that are looked
at), hidden the residual stream, kv_heads × group the query heads (group = heads / kv_heads),
head_dim (v_head_dim of values where it differs), ffn, shared_ffn (shared experts), vocab (padded),
positions; experts × capacity the slots of dispatched tokens, expert_ffn; ssm_groups × ssm_rep the
heads of a state-space mixer (keys are shared by a group), ssm_dim, state.

A weight's dim that is in `TP_DIMS` is sharded on those axes unless a placement says otherwise;
nothing else about parallelism is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distplan.costmodel.layout import TP, Axes, Dims
from distplan.hardware.errors import DistplanError

TP_DIMS: Mapping[str, Axes] = {
    "kv_heads": ("tp_kv",),
    "group": ("tp_rep",),
    "ffn": TP,
    "shared_ffn": TP,
    "vocab": TP,
    "ssm_groups": TP,
    "experts": ("ep",),
    "expert_ffn": ("etp",),
}

HIGH = ".high"
"""ends the name of a kind whose products stay in the compute dtype (the first and last layers of a recipe)"""

TOKENS: Dims = ("batch", "seq")
HIDDEN: Dims = ("batch", "seq", "hidden")
QUERY: Dims = ("batch", "seq", "kv_heads", "group", "head_dim")
CONTEXT: Dims = ("batch", "seq", "kv_heads", "group", "v_head_dim")
KEY: Dims = ("batch", "seq", "kv_heads", "head_dim")
VALUE: Dims = ("batch", "seq", "kv_heads", "v_head_dim")
VALUE_READ: Dims = ("batch", "kv_seq", "kv_heads", "v_head_dim")
KEY_READ: Dims = ("batch", "kv_seq", "kv_heads", "head_dim")
SCORES: Dims = ("batch", "kv_heads", "group", "seq", "kv_seq")
FFN: Dims = ("batch", "seq", "ffn")
LOGITS: Dims = ("batch", "seq", "vocab")


class GraphError(DistplanError):
    """The architecture has a kind of layer that no operator describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator. `operands[i]` are the dim names under which it reads `inputs[i]`."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    operands: tuple[Dims, ...]
    output: str
    result: Dims
    function: str = ""
    dtype: str = "compute"
    """of the output: compute | fp32 | bool | int64"""
    whole: Dims = ()
    """dims that must not be sharded"""
    tag: str = ""
    """the recomputable part it belongs to: core_attention | norm | mlp_act | ''"""
    fused: bool = False
    """runs inside its producer's kernel: it moves no bytes of its own"""
    window: int = 0
    """attention: tokens that a query sees; 0 = all"""
    block: int = 0
    """attention within blocks of so many tokens; 0 = no blocks"""
    chunks: float = 1.0
    """the output exists one part of so many at a time (fused, chunked loss)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    name: str
    dims: Dims
    decay: bool = True
    """False: a norm's or a bias (one value per channel)"""
    trained: bool = True
    """False: frozen, with neither gradient nor optimizer state"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of operators that one pipeline stage holds whole: embedding, a layer kind, or head and loss."""

    name: str
    inputs: tuple[str, ...]
    output: str
    operators: tuple[Operator, ...]
    weights: tuple[Weight, ...]
    sizes: Mapping[str, float]
    """true size of each dim that its weights have, in elements (vocab: unpadded)"""
    residual: frozenset[str] = frozenset()
    """values that lie on the residual stream's placement"""
    shares: Mapping[str, str] = field(default_factory=dict)
    """a weight of this segment -> the weight of another segment that it is a copy of (tied embedding)"""
    input_dims: Mapping[str, Dims] = field(default_factory=dict)
    """dims of inputs that are neither tokens nor the residual stream"""
    beside: tuple[Segment, ...] = ()
    """what stands with this segment on its stage: the parts of an image tower, with the embedding"""
    times: float = 1.0
    """of a segment that stands beside another: so many alike, one after the other"""
    frozen: bool = False
    """nothing behind its output is trained: it has a forward only"""
    full: bool = False
    """its attention is not causal"""


class Builder:
    """Collects operators and weights of one segment; names are dotted and stable."""

    def __init__(self, name: str, sizes: Mapping[str, float], lora_rank: int = 0) -> None:
        self.name = name
        self.sizes = dict(sizes) | ({"lora": float(lora_rank)} if lora_rank else {})
        self.lora_rank = lora_rank
        self.operators: list[Operator] = []
        self.weights: list[Weight] = []
        self.residual: set[str] = set()

    def weight(self, name: str, dims: Dims, decay: bool = True) -> str:
        full = f"{self.name}.{name}"
        trained = not self.lora_rank or "lora" in dims
        self.weights.append(Weight(name=full, dims=dims, decay=decay, trained=trained))
        return full

    def add(self, kind: str, name: str, reads: Mapping[str, Dims], result: Dims, **more: object) -> str:
        full = f"{self.name}.{name}"
        self.operators.append(
            Operator(
                kind=kind,
                name=full,
                inputs=tuple(reads),
                operands=tuple(reads.values()),
                output=full,
                result=result,
                **more,  # type: ignore[arg-type]
            )
        )
        return full

    def linear(self, name: str, x: str, x_dims: Dims, w_dims: Dims, result: Dims, bias: bool = False) -> str:
        """A product with a new weight; the bias has the dims that the product adds."""
        w = self.weight(f"{name}.weight", w_dims)
        y = self.add("einsum", name, {x: x_dims, w: w_dims}, result)
        if self.lora_rank and "batch" in result:
            y = self._adapted(name, y, x, x_dims, w_dims, result)
        return self.bias(name, y, result, tuple(d for d in w_dims if d not in x_dims)) if bias else y

    def _adapted(self, name: str, y: str, x: str, x_dims: Dims, w_dims: Dims, result: Dims) -> str:
        """y + (x·A)·B with the low-rank A and B (LoRA, arXiv 2106.09685, section 4.1)."""
        given = tuple(dim for dim in w_dims if dim in x_dims)
        made = tuple(dim for dim in w_dims if dim not in x_dims)
        low = (*(dim for dim in x_dims if dim not in given), "lora")
        a = self.weight(f"{name}.lora_a.weight", (*given, "lora"))
        b = self.weight(f"{name}.lora_b.weight", ("lora", *made))
        down = self.add("einsum", f"{name}.lora_a", {x: x_dims, a: (*given, "lora")}, low)
        up = self.add("einsum", f"{name}.lora_b", {down: low, b: ("lora", *made)}, result)
        return self.add("add", f"{name}.adapted", {y: result, up: result}, result)

    def bias(self, name: str, y: str, dims: Dims, bias_dims: Dims) -> str:
        b = self.weight(f"{name}.bias", bias_dims, decay=False)
        return self.add("bias", f"{name}.add_bias", {y: dims, b: bias_dims}, dims, fused=True)

    def norm(self, name: str, x: str, dims: Dims, over: Dims, kind: str, bias: bool, weight: bool = True) -> str:
        reads = {x: dims}
        if weight:
            reads[self.weight(f"{name}.weight", over, decay=False)] = over
        if bias:
            reads[self.weight(f"{name}.bias", over, decay=False)] = over
        return self.add("norm", name, reads, dims, function=kind, whole=over, tag="norm")

    def dropout(self, name: str, x: str, dims: Dims, rate: float, tag: str = "", fused: bool = True) -> str:
        """`fused` with the addition to the residual that follows."""
        if not rate:
            return x
        return self.add("dropout", name, {x: dims}, dims, tag=tag, fused=fused)

    def on_residual(self, value: str) -> str:
        self.residual.add(value)
        return value

    def segment(self, inputs: tuple[str, ...], output: str, shares: Mapping[str, str] | None = None) -> Segment:
        return Segment(
            name=self.name,
            inputs=inputs,
            output=output,
            operators=tuple(self.operators),
            weights=tuple(self.weights),
            sizes=self.sizes,
            residual=frozenset(self.residual),
            shares=shares or {},
        )
