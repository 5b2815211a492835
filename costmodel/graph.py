"""A model as segments of operators: embedding, one per kind of layer, head and loss."""

from __future__ import annotations

from dataclasses import replace

from distplan.costmodel.feed_forward import feed_forward_sizes, mlp, moe
from distplan.costmodel.layout import Dims
from distplan.costmodel.mixers import IMAGES, attention, linear_attention, mixer_sizes
from distplan.costmodel.model import Attention, Custom, LayerKind, LinearAttention, Mlp, Model, Moe, Vision, Workload
from distplan.costmodel.operators import (
    FFN,
    HIDDEN,
    HIGH,
    LOGITS,
    TOKENS,
    TP_DIMS,
    Builder,
    GraphError,
    Operator,
    Segment,
    Weight,
)

PIXELS: Dims = ("batch", "seq", "pixels")
MERGED: Dims = ("batch", "seq", "merged")

__all__ = [
    "HIDDEN",
    "TP_DIMS",
    "GraphError",
    "Operator",
    "Segment",
    "Weight",
    "parameters",
    "segments",
    "vision_parameters",
    "weight_elements",
]


def layer_segment(model: Model, kind: LayerKind, workload: Workload, fused_glu: bool, name: str) -> Segment:
    """The operators of one layer of `kind`: mixer and feed-forward, in sequence or side by side."""
    sizes = {"hidden": float(model.hidden)} | mixer_sizes(kind.mixer)
    sizes |= feed_forward_sizes(kind.ffn, float(workload.seq_len))
    images = isinstance(kind.mixer, Attention) and kind.mixer.cross
    if images:
        if model.vision is None:
            raise GraphError(f"{name}: cross-attention needs the images' tokens: a vision section")
        sizes["image_seq"] = workload.images_per_sequence * model.vision.tokens
    b = Builder(name, sizes, workload.lora_rank)
    if kind.parallel and kind.mixer and kind.ffn:
        return _parallel(b, model, kind, workload, fused_glu)
    x = "x"
    if kind.mixer is not None:
        y = _mixer(b, model, kind, workload, _pre_norm(b, kind, "attention.norm", x))
        bias = isinstance(kind.mixer, Attention) and kind.mixer.out_bias
        y = _close(b, model, kind, "attention.out", b.on_residual(y), bias)
        x = b.on_residual(b.add("add", "attention.residual", {x: HIDDEN, y: HIDDEN}, HIDDEN))
    if kind.ffn is not None:
        y = _feed_forward(b, kind, _pre_norm(b, kind, "mlp.norm", x), fused_glu)
        y = _close(b, model, kind, "mlp.down", b.on_residual(y), isinstance(kind.ffn, Mlp) and kind.ffn.bias)
        x = b.on_residual(b.add("add", "mlp.residual", {x: HIDDEN, y: HIDDEN}, HIDDEN))
    if images:
        return replace(b.segment(("x", "images"), x), input_dims={"images": IMAGES})
    return b.segment(("x",), x)


def _parallel(b: Builder, model: Model, kind: LayerKind, workload: Workload, fused_glu: bool) -> Segment:
    """Attention and MLP on the same residual; their sum is reduced once (GPT-J, NeoX, Falcon)."""
    x = "x"
    attention_in = _pre_norm(b, kind, "attention.norm", x)
    left = _mixer(b, model, kind, workload, attention_in)
    right = _feed_forward(b, kind, attention_in if kind.shared_norm else _pre_norm(b, kind, "mlp.norm", x), fused_glu)
    both = b.on_residual(b.add("add", "branches", {left: HIDDEN, right: HIDDEN}, HIDDEN))
    both = _close(b, model, kind, "attention.out", both, isinstance(kind.mixer, Attention) and kind.mixer.out_bias)
    if isinstance(kind.ffn, Mlp) and kind.ffn.bias:
        both = b.bias("mlp.down", both, HIDDEN, ("hidden",))
    return b.segment(("x",), b.on_residual(b.add("add", "residual", {x: HIDDEN, both: HIDDEN}, HIDDEN)))


def _mixer(b: Builder, model: Model, kind: LayerKind, workload: Workload, x: str) -> str:
    if isinstance(kind.mixer, Attention):
        return attention(b, kind.mixer, x, model, workload, kind)
    if isinstance(kind.mixer, Custom):
        return kind.mixer.build(b, x)
    assert isinstance(kind.mixer, LinearAttention)
    return linear_attention(b, kind.mixer, x, kind)


def _feed_forward(b: Builder, kind: LayerKind, x: str, fused_glu: bool) -> str:
    if isinstance(kind.ffn, Moe):
        return moe(b, kind.ffn, x, fused_glu)
    if isinstance(kind.ffn, Custom):
        return kind.ffn.build(b, x)
    assert isinstance(kind.ffn, Mlp)
    return mlp(b, kind.ffn, x, fused_glu)


def _norm(b: Builder, kind: LayerKind, name: str, x: str) -> str:
    return b.norm(name, x, HIDDEN, ("hidden",), kind.norm, kind.norm_bias, kind.norm_weight)


def _pre_norm(b: Builder, kind: LayerKind, name: str, x: str) -> str:
    return _norm(b, kind, name, x) if kind.norm_position in ("pre", "sandwich") else x


def _close(b: Builder, model: Model, kind: LayerKind, name: str, y: str, bias: bool) -> str:
    """What follows a sublayer before the residual: its output's bias, a norm, dropout."""
    part = name.split(".", 1)[0]
    if bias:
        y = b.bias(name, y, HIDDEN, ("hidden",))
    if kind.norm_position in ("post", "sandwich"):
        y = _norm(b, kind, f"{part}.post_norm", y)
    return b.dropout(f"{part}.dropout", y, HIDDEN, model.dropout)


def embedding_segment(model: Model, lora_rank: int = 0, beside: tuple[Segment, ...] = ()) -> Segment:
    sizes = {"hidden": float(model.hidden), "vocab": float(model.vocab), "positions": float(model.max_positions)}
    b = Builder("embedding", sizes, lora_rank)
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
    return replace(b.segment(("tokens",), b.on_residual(x)), beside=beside)


def vision_segments(model: Model, workload: Workload) -> tuple[Segment, ...]:
    """An image tower: patches embedded, its layers, and what projects them to the text's hidden.

    The micro-batch's patches are one sequence of `images_per_sequence` images, each of which sees only itself.
    Images lie where the embedding does, on the first stage (Megatron Core's multimodal models, LLaVA).
    """
    v = model.vision
    if v is None or not workload.images_per_sequence:
        return ()
    frozen = not workload.train_vision or workload.lora_rank > 0
    head_dim = v.hidden // v.heads
    attention = Attention(
        heads=v.heads,
        kv_heads=v.heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        qkv_bias=v.bias,
        out_bias=v.bias,
        chunk=v.patches,
    )
    feed = Mlp(ffn=v.ffn, gated=v.gated, bias=v.bias, activation="gelu")
    kind = LayerKind(name="vision", mixer=attention, ffn=feed, norm=v.norm, norm_bias=v.norm == "layernorm")
    tower = replace(model, hidden=v.hidden, positions="none", dropout=0.0, attention_dropout=0.0)
    seen = workload.images_per_sequence * v.patches
    tokens = {"seq": seen, "kv_seq": seen}
    layer = layer_segment(tower, kind, replace(workload, lora_rank=0), True, "vision.layer")
    parts = (
        _patch_segment(v, tokens),
        replace(layer, sizes=dict(layer.sizes) | tokens, times=float(v.layers), full=True),
    )
    untrained = tuple(
        replace(part, frozen=True, weights=tuple(replace(weight, trained=False) for weight in part.weights))
        for part in parts
    )
    return (*(untrained if frozen else parts), _projector_segment(model, v, workload, kind))


def _patch_segment(v: Vision, tokens: dict[str, float]) -> Segment:
    sizes = tokens | {"hidden": float(v.hidden), "pixels": float(v.pixels), "positions": float(v.patches)}
    b = Builder("vision.patches", sizes)
    x = b.linear("embed", "pixels", PIXELS, ("pixels", "hidden"), HIDDEN, v.bias)
    if v.position_table:
        rows = b.weight("position.weight", ("positions", "hidden"))
        x = b.add("position_embedding", "position", {x: HIDDEN, rows: ("positions", "hidden")}, HIDDEN)
    return replace(b.segment(("pixels",), b.on_residual(x)), input_dims={"pixels": PIXELS})


def _projector_segment(model: Model, v: Vision, workload: Workload, kind: LayerKind) -> Segment:
    """The tower's last norm, and one or two matrices from the patches of a token to the text's hidden."""
    width = v.hidden * v.outputs * (v.patches / v.tokens if v.concatenated else 1.0)
    tokens = workload.images_per_sequence * v.tokens
    sizes = {"seq": tokens, "hidden": float(model.hidden), "merged": width, "ffn": float(v.projector or 1)}
    b = Builder("vision.projector", sizes)
    x = b.norm("norm", "x", MERGED, ("merged",), kind.norm, kind.norm_bias)
    if v.projector:
        x = b.linear("up", x, MERGED, ("merged", "ffn"), FFN)
        x = b.add("activation", "act", {x: FFN}, FFN, function="gelu", tag="mlp_act")
        x = b.linear("down", x, FFN, ("ffn", "hidden"), HIDDEN)
    else:
        x = b.linear("linear", x, MERGED, ("merged", "hidden"), HIDDEN)
    made = b.segment(("x",), b.on_residual(x))
    frozen = workload.lora_rank > 0
    weights = tuple(replace(weight, trained=not frozen) for weight in made.weights)
    return replace(made, input_dims={"x": MERGED}, weights=weights, frozen=frozen)


def vision_parameters(model: Model, workload: Workload) -> float:
    """Weights of the image tower and its projector; they are not in `parameters`, which counts the language model."""
    total = 0.0
    for part in vision_segments(model, replace(workload, images_per_sequence=1.0)):
        total += part.times * sum(weight_elements(part, weight) for weight in part.weights)
    return total


def mtp_segment(model: Model, workload: Workload, fused_glu: bool) -> Segment:
    """One multi-token-prediction module: two norms, a projection of [hidden; next token] and a layer.

    Embedding and head are the model's own (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """
    layer = layer_segment(model, model.kinds[model.mtp_kind], workload, fused_glu, "layer.mtp")
    b = Builder("layer.mtp", layer.sizes, workload.lora_rank)
    kind = model.kinds[model.mtp_kind]
    here = _norm(b, kind, "hidden_norm", "x")
    ahead = _norm(b, kind, "token_norm", "x")
    left = b.linear("project_hidden", here, HIDDEN, ("hidden", "mtp_hidden"), ("batch", "seq", "mtp_hidden"))
    right = b.linear("project_token", ahead, HIDDEN, ("hidden", "mtp_hidden"), ("batch", "seq", "mtp_hidden"))
    dims: Dims = ("batch", "seq", "mtp_hidden")
    joined = b.add("add", "joined", {left: dims, right: dims}, dims)
    sizes = dict(layer.sizes) | {"mtp_hidden": float(model.hidden)}
    first = b.segment(("x",), joined)
    rest = tuple(_read_from(op, joined) for op in layer.operators)
    return Segment(
        name="layer.mtp",
        inputs=("x",),
        output=layer.output,
        operators=first.operators + rest,
        weights=first.weights + layer.weights,
        sizes=sizes,
        residual=layer.residual,
    )


def _read_from(op: Operator, source: str) -> Operator:
    return replace(op, inputs=tuple(source if name == "x" else name for name in op.inputs))


LOGITS_FP32 = "logits_fp32"
LOG_SOFTMAX = ("log_softmax", "gathered")


def head_segment(model: Model, workload: Workload) -> Segment:
    """Final norm, output projection and loss.

    The fused loss makes its logits in max(1, vocab / hidden) chunks, so that a chunk takes about the
    memory of the hidden states (Liger-Kernel, arXiv 2410.10989, section 3.2). torch's own cross entropy makes
    the log-softmax a tensor beside the fp32 logits, and a gradient of each (log_softmax of a log-softmax is the
    same); compiled, logits are widened in registers and no fp32 copy exists (torch.compile of the loss).
    """
    b = Builder("head", {"hidden": float(model.hidden), "vocab": float(model.vocab)}, workload.lora_rank)
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
    if model.logit_softcap:
        logits = b.add("activation", "softcap", {logits: LOGITS}, LOGITS, function="tanh", chunks=chunks)
    whole: Dims = ("vocab",) if workload.loss in ("fp32_logits", "gathered") else ()
    logits32 = logits
    if workload.loss != "compiled":
        logits32 = b.add("cast", LOGITS_FP32, {logits: LOGITS}, LOGITS, dtype="fp32", chunks=chunks, whole=whole)
    if workload.loss in LOG_SOFTMAX:
        logits32 = b.add("cast", "log_softmax", {logits32: LOGITS}, LOGITS, dtype="fp32", whole=whole)
    top = b.add("reduce", "loss.max", {logits32: LOGITS}, TOKENS, function="max", dtype="fp32", whole=whole)
    target = b.add("pick", "loss.target", {logits32: LOGITS, "labels": TOKENS}, TOKENS, dtype="fp32", whole=whole)
    total = b.add(
        "reduce", "loss.sum_exp", {logits32: LOGITS, top: TOKENS}, TOKENS, function="sum_exp", dtype="fp32", whole=whole
    )
    reads = {logits32: LOGITS, top: TOKENS, total: TOKENS, target: TOKENS, "labels": TOKENS}
    loss = b.add("cross_entropy", "loss", reads, TOKENS, dtype="fp32", whole=whole, function=workload.loss)
    return b.segment(("x", "labels"), loss, shares)


def segments(model: Model, workload: Workload, fused_glu: bool) -> tuple[Segment, ...]:
    """Embedding, one segment per layer kind in order of first use, the MTP module if any, head and loss."""
    used = list(dict.fromkeys(model.pattern))
    names = [f"layer.{n}" if len(used) > 1 or n.endswith(HIGH) else "layer" for n in used]
    layers = [
        layer_segment(model, model.kinds[n], workload, fused_glu, name) for n, name in zip(used, names, strict=True)
    ]
    if model.mtp_layers:
        layers.append(mtp_segment(model, workload, fused_glu))
    embedding = embedding_segment(model, workload.lora_rank, vision_segments(model, workload))
    return (embedding, *layers, head_segment(model, workload))


def weight_elements(segment: Segment, weight: Weight) -> float:
    """Number of elements of the whole weight, with the true (unpadded) vocabulary.

    Raises GraphError for a dim of a custom block whose size is not given.
    """
    unknown = [dim for dim in weight.dims if dim not in segment.sizes]
    if unknown:
        raise GraphError(f"{weight.name}: no size is given for its dim '{unknown[0]}' (Custom.sizes)")
    count = 1.0
    for dim in weight.dims:
        count *= segment.sizes[dim]
    return count


def parameters(model: Model, workload: Workload) -> tuple[float, float]:
    """(total, active) parameters, shared weights once and without MTP modules, as they are published.

    Active are those that one token uses: of routed experts top_k, of everything else all, embedding included.
    """
    total = active = 0.0
    used = list(dict.fromkeys(model.pattern))
    for number, segment in enumerate(segments(model, workload, True)):
        if segment.name == "layer.mtp":
            continue
        times = float(model.pattern.count(used[number - 1])) if segment.name.startswith("layer") else 1.0
        for weight in segment.weights:
            if weight.name in segment.shares:
                continue
            elements = weight_elements(segment, weight) * times
            total += elements
            in_use = segment.sizes["routes"] / segment.sizes["experts"] if "experts" in weight.dims else 1.0
            active += elements * in_use
    return total, active
