"""A model as operators over named dims: what is computed, before anything is placed on a mesh.

Legend: batch and seq are the micro-batch's sequences and tokens (kv_seq: the tokens that are looked
at), hidden the residual stream, kv_heads × group the query heads (group = heads / kv_heads),
head_dim, ffn, vocab (padded), positions.

A weight's dim that is in `TP_DIMS` is sharded on tp unless a placement says otherwise; nothing else
about parallelism is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distplan.costmodel.layout import TP, Axes, Dims
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Workload
from distplan.hardware.errors import DistplanError

TP_DIMS: Mapping[str, Axes] = {"kv_heads": ("tp_kv",), "group": ("tp_rep",), "ffn": TP, "vocab": TP}

TOKENS: Dims = ("batch", "seq")
HIDDEN: Dims = ("batch", "seq", "hidden")
QUERY: Dims = ("batch", "seq", "kv_heads", "group", "head_dim")
KEY: Dims = ("batch", "seq", "kv_heads", "head_dim")
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
    chunks: float = 1.0
    """the output exists one part of so many at a time (fused, chunked loss)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    name: str
    dims: Dims
    decay: bool = True
    """False: a norm's or a bias (one value per channel)"""


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


class _Builder:
    """Collects operators and weights of one segment; names are dotted and stable."""

    def __init__(self, name: str, sizes: Mapping[str, float]) -> None:
        self.name = name
        self.sizes = dict(sizes)
        self.operators: list[Operator] = []
        self.weights: list[Weight] = []
        self.residual: set[str] = set()

    def weight(self, name: str, dims: Dims, decay: bool = True) -> str:
        full = f"{self.name}.{name}"
        self.weights.append(Weight(name=full, dims=dims, decay=decay))
        return full

    def add(self, kind: str, name: str, reads: Mapping[str, Dims], result: Dims, **more: object) -> str:
        full = f"{self.name}.{name}"
        self.operators.append(
            Operator(
                kind=kind, name=full, inputs=tuple(reads), operands=tuple(reads.values()), output=full,
                result=result, **more,  # type: ignore[arg-type]
            )
        )
        return full

    def linear(self, name: str, x: str, x_dims: Dims, w_dims: Dims, result: Dims, bias: bool = False) -> str:
        w = self.weight(f"{name}.weight", w_dims)
        y = self.add("einsum", name, {x: x_dims, w: w_dims}, result)
        return self.bias(name, y, result, tuple(d for d in w_dims if d not in x_dims)) if bias else y

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

    def dropout(self, name: str, x: str, dims: Dims, rate: float, tag: str = "") -> str:
        if not rate:
            return x
        return self.add("dropout", name, {x: dims}, dims, tag=tag, fused=True)

    def on_residual(self, value: str) -> str:
        self.residual.add(value)
        return value

    def segment(self, inputs: tuple[str, ...], output: str, shares: Mapping[str, str] | None = None) -> Segment:
        return Segment(
            name=self.name, inputs=inputs, output=output, operators=tuple(self.operators),
            weights=tuple(self.weights), sizes=self.sizes, residual=frozenset(self.residual), shares=shares or {},
        )


def _core_attention(b: _Builder, a: Attention, qkv: tuple[str, str, str], workload: Workload, rate: float) -> str:
    q, k, v = qkv
    if workload.attention == "flash":
        reads = {q: QUERY, k: KEY_READ, v: KEY_READ}
        return b.add("attention", "attention.core", reads, QUERY, tag="core_attention", window=a.window)
    scores = b.add(
        "einsum", "attention.scores", {q: QUERY, k: KEY_READ}, SCORES, whole=("kv_seq",), tag="core_attention"
    )
    probs = b.add("softmax", "attention.softmax", {scores: SCORES}, SCORES, whole=("kv_seq",), tag="core_attention")
    probs = b.dropout("attention.softmax_dropout", probs, SCORES, rate, tag="core_attention")
    return b.add(
        "einsum", "attention.context", {probs: SCORES, v: KEY_READ}, QUERY, whole=("kv_seq",), tag="core_attention"
    )


def _attention(b: _Builder, a: Attention, x: str, model: Model, workload: Workload, kind: LayerKind) -> str:
    q_weight: Dims = ("hidden", "kv_heads", "group", "head_dim")
    k_weight: Dims = ("hidden", "kv_heads", "head_dim")
    q = b.linear("attention.q", x, HIDDEN, q_weight, QUERY, a.qkv_bias)
    k = b.linear("attention.k", x, HIDDEN, k_weight, KEY, a.qkv_bias)
    v = b.linear("attention.v", x, HIDDEN, k_weight, KEY, a.qkv_bias)
    if a.qk_norm != "none":
        over_q: Dims = ("head_dim",) if a.qk_norm == "head" else ("kv_heads", "group", "head_dim")
        over_k: Dims = ("head_dim",) if a.qk_norm == "head" else ("kv_heads", "head_dim")
        q = b.norm("attention.q_norm", q, QUERY, over_q, kind.norm, False)
        k = b.norm("attention.k_norm", k, KEY, over_k, kind.norm, False)
    if model.positions == "rope":
        q = b.add("rope", "attention.q_rope", {q: QUERY}, QUERY, whole=("head_dim",))
        k = b.add("rope", "attention.k_rope", {k: KEY}, KEY, whole=("head_dim",))
    context = _core_attention(b, a, (q, k, v), workload, model.attention_dropout)
    return b.linear("attention.out", context, QUERY, ("kv_heads", "group", "head_dim", "hidden"), HIDDEN)


def _mlp(b: _Builder, m: Mlp, x: str, runtime_fuses: bool) -> str:
    up = b.linear("mlp.up", x, HIDDEN, ("hidden", "ffn"), FFN, m.bias)
    if m.gated:
        gate = b.linear("mlp.gate", x, HIDDEN, ("hidden", "ffn"), FFN, m.bias)
        if runtime_fuses:
            h = b.add("glu", "mlp.act", {gate: FFN, up: FFN}, FFN, function=m.activation, tag="mlp_act")
        else:
            act = b.add("activation", "mlp.act", {gate: FFN}, FFN, function=m.activation, tag="mlp_act")
            h = b.add("mul", "mlp.product", {act: FFN, up: FFN}, FFN, tag="mlp_act")
    else:
        h = b.add("activation", "mlp.act", {up: FFN}, FFN, function=m.activation, tag="mlp_act")
    return b.linear("mlp.down", h, FFN, ("ffn", "hidden"), HIDDEN)


def _sizes(model: Model, kind: LayerKind) -> dict[str, float]:
    sizes = {"hidden": float(model.hidden)}
    if isinstance(kind.mixer, Attention):
        a = kind.mixer
        sizes |= {"kv_heads": float(a.kv_heads), "group": a.heads / a.kv_heads, "head_dim": float(a.head_dim)}
    if isinstance(kind.ffn, Mlp):
        sizes["ffn"] = float(kind.ffn.ffn)
    return sizes


def layer_segment(model: Model, kind: LayerKind, workload: Workload, fused_glu: bool) -> Segment:
    """The operators of one layer of `kind`. Raises GraphError for mixers or feed-forwards without operators."""
    if not isinstance(kind.mixer, Attention) or kind.mixer.kv_lora_rank or not isinstance(kind.ffn, Mlp):
        mixer = "latent attention" if isinstance(kind.mixer, Attention) else type(kind.mixer).__name__
        what = mixer if isinstance(kind.ffn, Mlp) else type(kind.ffn).__name__
        raise GraphError(
            f"{model.name}: layers of kind '{kind.name}' ({what}) cannot be priced yet; "
            "dense decoders (softmax attention and MLP in every layer) can"
        )
    b = _Builder("layer" if len(model.kinds) == 1 else f"layer.{kind.name}", _sizes(model, kind))
    pre, post = kind.norm_position in ("pre", "sandwich"), kind.norm_position in ("post", "sandwich")

    def norm(name: str, x: str) -> str:
        return b.norm(name, x, HIDDEN, ("hidden",), kind.norm, kind.norm_bias, kind.norm_weight)

    def close(name: str, y: str, bias: bool) -> str:
        if bias:
            y = b.bias(name, y, HIDDEN, ("hidden",))
        if post:
            y = norm(f"{name.split('.')[0]}.post_norm", y)
        return b.dropout(f"{name.split('.')[0]}.dropout", y, HIDDEN, model.dropout)

    x = "x"
    attention_in = norm("attention.norm", x) if pre else x
    attention = _attention(b, kind.mixer, attention_in, model, workload, kind)
    if kind.parallel:
        mlp_in = attention_in if kind.shared_norm or not pre else norm("mlp.norm", x)
        mlp = _mlp(b, kind.ffn, mlp_in, fused_glu)
        both = b.add("add", "branches", {attention: HIDDEN, mlp: HIDDEN}, HIDDEN)
        b.on_residual(both)
        both = close("attention.out", both, kind.mixer.out_bias)
        if kind.ffn.bias:
            both = b.bias("mlp.down", both, HIDDEN, ("hidden",))
        y = b.add("add", "residual", {x: HIDDEN, both: HIDDEN}, HIDDEN)
        return b.segment(("x",), b.on_residual(y))
    attention = close("attention.out", b.on_residual(attention), kind.mixer.out_bias)
    x1 = b.on_residual(b.add("add", "attention.residual", {x: HIDDEN, attention: HIDDEN}, HIDDEN))
    mlp = _mlp(b, kind.ffn, norm("mlp.norm", x1) if pre else x1, fused_glu)
    mlp = close("mlp.down", b.on_residual(mlp), kind.ffn.bias)
    y = b.add("add", "mlp.residual", {x1: HIDDEN, mlp: HIDDEN}, HIDDEN)
    return b.segment(("x",), b.on_residual(y))


def embedding_segment(model: Model) -> Segment:
    sizes = {"hidden": float(model.hidden), "vocab": float(model.vocab), "positions": float(model.max_positions)}
    b = _Builder("embedding", sizes)
    table = b.weight("word.weight", ("vocab", "hidden"))
    x = b.add("embedding", "word", {"tokens": TOKENS, table: ("vocab", "hidden")}, HIDDEN)
    b.on_residual(x)
    if model.positions == "learned":
        rows = b.weight("position.weight", ("positions", "hidden"))
        x = b.add("position_embedding", "position", {x: HIDDEN, rows: ("positions", "hidden")}, HIDDEN)
    if model.embedding_norm:
        norm = next(iter(model.kinds.values())).norm
        x = b.norm("norm", x, HIDDEN, ("hidden",), norm, model.embedding_norm_bias)
    x = b.dropout("dropout", x, HIDDEN, model.dropout)
    return b.segment(("tokens",), b.on_residual(x))


def head_segment(model: Model, workload: Workload) -> Segment:
    """Final norm, output projection and loss.

    The fused loss makes its logits in max(1, vocab / hidden) chunks, so that a chunk takes about the
    memory of the hidden states (Liger-Kernel, arXiv 2410.10989, section 3.2).
    """
    b = _Builder("head", {"hidden": float(model.hidden), "vocab": float(model.vocab)})
    last = model.kinds[model.pattern[-1]]
    x = "x"
    if model.final_norm:
        x = b.norm("norm", x, HIDDEN, ("hidden",), last.norm, last.norm_bias, last.norm_weight)
    dims: Dims = ("vocab", "hidden") if model.tied_embedding else ("hidden", "vocab")
    w = b.weight("output.weight", dims)
    shares = {w: "embedding.word.weight"} if model.tied_embedding else {}
    chunks = max(1.0, model.vocab / model.hidden) if workload.loss == "fused" else 1.0
    logits = b.add("einsum", "output", {x: HIDDEN, w: dims}, LOGITS, chunks=chunks)
    if model.head_bias:
        logits = b.bias("output", logits, LOGITS, ("vocab",))
    logits32 = b.add("cast", "logits_fp32", {logits: LOGITS}, LOGITS, dtype="fp32", chunks=chunks)
    whole: Dims = ("vocab",) if workload.loss == "fp32_logits" else ()
    top = b.add("reduce", "loss.max", {logits32: LOGITS}, TOKENS, function="max", dtype="fp32", whole=whole)
    target = b.add("pick", "loss.target", {logits32: LOGITS, "labels": TOKENS}, TOKENS, dtype="fp32", whole=whole)
    total = b.add(
        "reduce", "loss.sum_exp", {logits32: LOGITS, top: TOKENS}, TOKENS, function="sum_exp", dtype="fp32", whole=whole
    )
    reads = {logits32: LOGITS, top: TOKENS, total: TOKENS, target: TOKENS, "labels": TOKENS}
    loss = b.add("cross_entropy", "loss", reads, TOKENS, dtype="fp32", whole=whole, function=workload.loss)
    return b.segment(("x", "labels"), loss, shares)


def segments(model: Model, workload: Workload, fused_glu: bool) -> tuple[Segment, ...]:
    """Embedding, one segment per layer kind in order of first use, head and loss."""
    used = list(dict.fromkeys(model.pattern))
    layers = (layer_segment(model, model.kinds[name], workload, fused_glu) for name in used)
    return (embedding_segment(model), *layers, head_segment(model, workload))


def weight_elements(segment: Segment, weight: Weight) -> float:
    """Number of elements of the whole weight, with the true (unpadded) vocabulary."""
    count = 1.0
    for dim in weight.dims:
        count *= segment.sizes[dim]
    return count


def parameters(model: Model, workload: Workload) -> tuple[float, float]:
    """(total, active): parameters of the model, and those that one token uses; shared weights once."""
    total = 0.0
    used = list(dict.fromkeys(model.pattern))
    for segment in segments(model, workload, True):
        own = 0.0
        for weight in segment.weights:
            own += 0.0 if weight.name in segment.shares else weight_elements(segment, weight)
        names = [n for n in used if segment.name in ("layer", f"layer.{n}")]
        total += own * (sum(model.pattern.count(n) for n in names) if segment.name.startswith("layer") else 1)
    return total, total
