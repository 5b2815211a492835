"""Token mixers as operators: softmax attention in its kinds, and state-space or linear attention."""

from __future__ import annotations

from distplan.costmodel.layout import Dims
from distplan.costmodel.model import Attention, Custom, LayerKind, LinearAttention, Model, Workload
from distplan.costmodel.operators import (
    CONTEXT,
    HIDDEN,
    KEY,
    KEY_READ,
    QUERY,
    SCORES,
    VALUE,
    VALUE_READ,
    Builder,
    GraphError,
)

Q_WEIGHT: Dims = ("hidden", "kv_heads", "group", "head_dim")
K_WEIGHT: Dims = ("hidden", "kv_heads", "head_dim")
V_WEIGHT: Dims = ("hidden", "kv_heads", "v_head_dim")
LATENT: Dims = ("batch", "seq", "latent")
IMAGES: Dims = ("batch", "image_seq", "hidden")
IMAGE_KEY: Dims = ("batch", "image_seq", "kv_heads", "head_dim")
IMAGE_VALUE: Dims = ("batch", "image_seq", "kv_heads", "v_head_dim")
SSM: Dims = ("batch", "seq", "ssm_groups", "ssm_rep", "ssm_dim")
SSM_GROUP: Dims = ("batch", "seq", "ssm_groups", "state")
SSM_STEP: Dims = ("batch", "seq", "ssm_groups", "ssm_rep")
HEADS: Dims = ("ssm_groups", "ssm_rep")


def attention(b: Builder, a: Attention, x: str, model: Model, workload: Workload, kind: LayerKind) -> str:
    """Queries, keys and values, the attention itself, the output projection (its bias is the layer's)."""
    if a.cross:
        context = _cross(b, a, x, kind)
    else:
        qkv = _latent_qkv(b, a, x, kind) if a.kv_lora_rank else _plain_qkv(b, a, x, model, kind)
        context = _core(b, a, qkv, workload, model.attention_dropout)
    if a.gated:
        gate = b.linear("attention.gate", x, HIDDEN, ("hidden", "kv_heads", "group", "v_head_dim"), CONTEXT)
        context = b.add("glu", "attention.gated", {gate: CONTEXT, context: CONTEXT}, CONTEXT, function="sigmoid")
    return b.linear("attention.out", context, CONTEXT, ("kv_heads", "group", "v_head_dim", "hidden"), HIDDEN)


def _plain_qkv(b: Builder, a: Attention, x: str, model: Model, kind: LayerKind) -> tuple[str, str, str]:
    q = b.linear("attention.q", x, HIDDEN, Q_WEIGHT, QUERY, a.qkv_bias)
    k = b.linear("attention.k", x, HIDDEN, K_WEIGHT, KEY, a.qkv_bias)
    v = b.linear("attention.v", x, HIDDEN, V_WEIGHT, VALUE, a.qkv_bias)
    if a.qk_norm != "none":
        over_q: Dims = ("head_dim",) if a.qk_norm == "head" else ("kv_heads", "group", "head_dim")
        over_k: Dims = ("head_dim",) if a.qk_norm == "head" else ("kv_heads", "head_dim")
        q = b.norm("attention.q_norm", q, QUERY, over_q, kind.norm, False)
        k = b.norm("attention.k_norm", k, KEY, over_k, kind.norm, False)
    if model.positions == "rope":
        q = b.add("rope", "attention.q_rope", {q: QUERY}, QUERY, whole=("head_dim",))
        k = b.add("rope", "attention.k_rope", {k: KEY}, KEY, whole=("head_dim",))
    return q, k, v


def _cross(b: Builder, a: Attention, x: str, kind: LayerKind) -> str:
    """Queries of the text, keys and values of `images`, without positions; flash attention without a mask."""
    q = b.linear("attention.q", x, HIDDEN, Q_WEIGHT, QUERY, a.qkv_bias)
    k = b.linear("attention.k", "images", IMAGES, K_WEIGHT, IMAGE_KEY, a.qkv_bias)
    v = b.linear("attention.v", "images", IMAGES, V_WEIGHT, IMAGE_VALUE, a.qkv_bias)
    if a.qk_norm == "head":
        q = b.norm("attention.q_norm", q, QUERY, ("head_dim",), kind.norm, False)
        k = b.norm("attention.k_norm", k, IMAGE_KEY, ("head_dim",), kind.norm, False)
    reads = {q: QUERY, k: IMAGE_KEY, v: IMAGE_VALUE}
    return b.add("attention", "attention.core", reads, CONTEXT, tag="core_attention")


def _latent_qkv(b: Builder, a: Attention, x: str, kind: LayerKind) -> tuple[str, str, str]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): down-projections and the
    rope key are on every tp rank, up-projections are sharded by heads."""
    if a.q_lora_rank:
        low: Dims = ("batch", "seq", "q_latent")
        down = b.linear("attention.q_down", x, HIDDEN, ("hidden", "q_latent"), low)
        down = b.norm("attention.q_down_norm", down, low, ("q_latent",), kind.norm, False)
        q = b.linear("attention.q_up", down, low, ("q_latent", "kv_heads", "group", "head_dim"), QUERY)
    else:
        q = b.linear("attention.q", x, HIDDEN, Q_WEIGHT, QUERY, a.qkv_bias)
    q = b.add("rope", "attention.q_rope", {q: QUERY}, QUERY, whole=("head_dim",))
    rope: Dims = ("batch", "seq", "rope_dim")
    k_rope = b.linear("attention.k_rope", x, HIDDEN, ("hidden", "rope_dim"), rope)
    k_rope = b.add("rope", "attention.k_rope_turned", {k_rope: rope}, rope, whole=("rope_dim",))
    latent = b.linear("attention.kv_down", x, HIDDEN, ("hidden", "latent"), LATENT)
    latent = b.norm("attention.kv_down_norm", latent, LATENT, ("latent",), kind.norm, False)
    nope: Dims = ("batch", "seq", "kv_heads", "nope_dim")
    k_nope = b.linear("attention.k_up", latent, LATENT, ("latent", "kv_heads", "nope_dim"), nope)
    v = b.linear("attention.v_up", latent, LATENT, ("latent", "kv_heads", "v_head_dim"), VALUE)
    k = b.add("concat", "attention.k", {k_nope: nope, k_rope: rope}, KEY, whole=("nope_dim", "rope_dim"))
    return q, k, v


def _core(b: Builder, a: Attention, qkv: tuple[str, str, str], workload: Workload, rate: float) -> str:
    q, k, v = qkv
    if workload.attention == "flash":
        reads = {q: QUERY, k: KEY_READ, v: VALUE_READ}
        if a.sinks:
            reads[b.weight("attention.sinks", ("kv_heads", "group"), decay=False)] = ("kv_heads", "group")
        return b.add(
            "attention", "attention.core", reads, CONTEXT, tag="core_attention", window=a.window, block=a.chunk
        )
    scores = b.add(
        "einsum", "attention.scores", {q: QUERY, k: KEY_READ}, SCORES, whole=("kv_seq",), tag="core_attention"
    )
    if a.sinks:
        sinks = b.weight("attention.sinks", ("kv_heads", "group"), decay=False)
        scores = b.add(
            "bias", "attention.add_sinks", {scores: SCORES, sinks: ("kv_heads", "group")}, SCORES, fused=True
        )
    probs = _softmax(b, scores, workload.attention == "eager")
    probs = b.dropout("attention.softmax_dropout", probs, SCORES, rate, tag="core_attention", fused=False)
    return b.add(
        "einsum", "attention.context", {probs: SCORES, v: VALUE_READ}, CONTEXT, whole=("kv_seq",), tag="core_attention"
    )


def _softmax(b: Builder, scores: str, eager: bool) -> str:
    """Masked softmax in one kernel, or as torch's operators: to fp32, scale and mask, softmax, and back."""
    if not eager:
        return b.add("softmax", "attention.softmax", {scores: SCORES}, SCORES, whole=("kv_seq",), tag="core_attention")
    for name in ("scores_fp32", "masked"):
        scores = b.add("cast", f"attention.{name}", {scores: SCORES}, SCORES, dtype="fp32", tag="core_attention")
    probs = b.add(
        "softmax", "attention.softmax", {scores: SCORES}, SCORES, whole=("kv_seq",), dtype="fp32", tag="core_attention"
    )
    return b.add("cast", "attention.probs", {probs: SCORES}, SCORES, tag="core_attention")


def linear_attention(b: Builder, a: LinearAttention, x: str, kind: LayerKind) -> str:
    """Mamba-2 (arXiv 2405.21060), gated delta net (arXiv 2412.06464) or lightning attention (arXiv 2401.04658).

    Projections, a short convolution, the chunked scan, a gated norm and the output projection.
    """
    if a.kind not in ("mamba2", "gated_delta_net", "lightning"):
        raise GraphError(f"a mixer of kind '{a.kind}' has no operators; known: mamba2, gated_delta_net, lightning")
    gate = b.linear("mixer.gate", x, HIDDEN, ("hidden", *HEADS, "ssm_dim"), SSM, a.bias)
    values = b.linear("mixer.value", x, HIDDEN, ("hidden", *HEADS, "ssm_dim"), SSM, a.bias)
    keys = b.linear("mixer.key", x, HIDDEN, ("hidden", "ssm_groups", "state"), SSM_GROUP, a.bias)
    queries = b.linear("mixer.query", x, HIDDEN, ("hidden", "ssm_groups", "state"), SSM_GROUP, a.bias)
    if a.conv_kernel:
        values = _conv(b, "mixer.value_conv", values, SSM, (*HEADS, "ssm_dim"), a.conv_bias)
        keys = _conv(b, "mixer.key_conv", keys, SSM_GROUP, ("ssm_groups", "state"), a.conv_bias)
        queries = _conv(b, "mixer.query_conv", queries, SSM_GROUP, ("ssm_groups", "state"), a.conv_bias)
    reads = {values: SSM, keys: SSM_GROUP, queries: SSM_GROUP}
    steps = {"mamba2": ("step",), "gated_delta_net": ("beta", "decay"), "lightning": ()}[a.kind]
    for name in steps:
        reads[b.linear(f"mixer.{name}", x, HIDDEN, ("hidden", *HEADS), SSM_STEP, a.bias)] = SSM_STEP
    weights = {"mamba2": ("a_log", "skip", "step_bias"), "gated_delta_net": ("a_log", "step_bias"), "lightning": ()}
    for name in weights[a.kind]:
        reads[b.weight(f"mixer.{name}", HEADS, decay=False)] = HEADS
    y = b.add("scan", "mixer.scan", reads, SSM, function=a.kind, tag="core_attention")
    over: Dims = ("ssm_dim",) if a.kind == "gated_delta_net" else (*HEADS, "ssm_dim")
    w = b.weight("mixer.norm.weight", over, decay=False)
    y = b.add("gated_norm", "mixer.norm", {y: SSM, gate: SSM, w: over}, SSM, function=kind.norm, tag="norm")
    return b.linear("mixer.out", y, SSM, (*HEADS, "ssm_dim", "hidden"), HIDDEN, False)


def _conv(b: Builder, name: str, x: str, dims: Dims, channels: Dims, bias: bool) -> str:
    reads = {x: dims, b.weight(f"{name}.weight", (*channels, "conv_kernel")): (*channels, "conv_kernel")}
    if bias:
        reads[b.weight(f"{name}.bias", channels, decay=False)] = channels
    return b.add("conv", name, reads, dims, function="silu")


def mixer_sizes(mixer: Attention | LinearAttention | Custom | None) -> dict[str, float]:
    """True sizes of the dims that a mixer's weights have."""
    if isinstance(mixer, Attention):
        a = mixer
        return {
            "kv_heads": float(a.kv_heads),
            "group": a.heads / a.kv_heads,
            "head_dim": float(a.head_dim),
            "v_head_dim": float(a.v_head_dim),
            "q_latent": float(a.q_lora_rank),
            "latent": float(a.kv_lora_rank),
            "rope_dim": float(a.qk_rope_head_dim),
            "nope_dim": float(a.head_dim - a.qk_rope_head_dim),
        }
    if isinstance(mixer, Custom):
        return dict(mixer.sizes)
    if isinstance(mixer, LinearAttention):
        m = mixer
        groups = m.heads if m.kind == "lightning" else m.key_heads or m.groups
        return {
            "ssm_groups": float(groups),
            "ssm_rep": m.heads / groups,
            "ssm_dim": float(m.head_dim),
            "state": float(m.state),
            "conv_kernel": float(m.conv_kernel),
            "scan_chunk": float(m.chunk),
        }
    return {}
