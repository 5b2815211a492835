"""Feed-forward parts as operators: the plain or gated MLP, and the mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from distplan.costmodel.layout import Dims
from distplan.costmodel.model import Custom, Mlp, Moe
from distplan.costmodel.operators import HIDDEN, TOKENS, Builder, Segment

ROUTING: Dims = ("batch", "seq", "routes")
SLOTS: Dims = ("experts", "capacity", "hidden")
LATENT_SLOTS: Dims = ("experts", "capacity", "moe_latent")
LATENT: Dims = ("batch", "seq", "moe_latent")
SLOT_FFN: Dims = ("experts", "capacity", "expert_ffn")
SLOT: Dims = ("experts", "capacity")
WEIGHTED = "weighted"
"""function of the bias behind the experts: as the slot's weight was applied before it, it is multiplied by that too"""


def mlp(b: Builder, m: Mlp, x: str, fused_glu: bool, name: str = "mlp", width: str = "ffn") -> str:
    """The MLP without the bias of its output, which is the layer's."""
    wide: Dims = ("batch", "seq", width)
    up = b.linear(f"{name}.up", x, HIDDEN, ("hidden", width), wide, m.bias)
    if not m.gated:
        h = b.add("activation", f"{name}.act", {up: wide}, wide, function=m.activation, tag="mlp_act")
    else:
        gate = b.linear(f"{name}.gate", x, HIDDEN, ("hidden", width), wide, m.bias)
        h = _glu(b, name, gate, up, wide, m.activation, fused_glu)
    return b.linear(f"{name}.down", h, wide, (width, "hidden"), HIDDEN)


def _glu(b: Builder, name: str, gate: str, up: str, dims: Dims, activation: str, fused: bool) -> str:
    if fused:
        return b.add("glu", f"{name}.act", {gate: dims, up: dims}, dims, function=activation, tag="mlp_act")
    act = b.add("activation", f"{name}.act", {gate: dims}, dims, function=activation, tag="mlp_act")
    return b.add("mul", f"{name}.product", {act: dims, up: dims}, dims, tag="mlp_act")


def moe(b: Builder, m: Moe, x: str, fused_glu: bool) -> str:
    """Router, dispatch to slots, experts, combine; shared experts beside them.

    A slot holds one (token, expert) pair. Tokens are permuted into slots where they are; that the slots then
    move to their experts' ranks is a transition of placements. A slot's weight multiplies inside the
    activation, so that the experts' outputs need not be kept.
    """
    scores = b.linear(
        "moe.router", x, HIDDEN, ("hidden", "router_experts"), ("batch", "seq", "router_experts"), m.router_bias
    )
    probs = b.add(
        "route",
        "moe.route",
        {scores: ("batch", "seq", "router_experts")},
        ROUTING,
        whole=("router_experts",),
        dtype="fp32",
    )
    inner, slots, tokens = (x, SLOTS, HIDDEN)
    if m.latent:
        inner, slots, tokens = (
            b.linear("moe.latent_in", x, HIDDEN, ("hidden", "moe_latent"), LATENT),
            LATENT_SLOTS,
            LATENT,
        )
    width = slots[-1]
    moved = b.add("dispatch", "moe.dispatch", {inner: tokens, probs: ROUTING}, slots)
    weights = b.add("dispatch_weights", "moe.dispatch_weights", {probs: ROUTING}, SLOT, dtype="fp32")
    up = b.linear("moe.up", moved, slots, ("experts", width, "expert_ffn"), SLOT_FFN)
    up = _expert_bias(b, "moe.up", up, SLOT_FFN, "expert_ffn") if m.bias else up
    if m.gated:
        gate = b.linear("moe.gate", moved, slots, ("experts", width, "expert_ffn"), SLOT_FFN)
        gate = _expert_bias(b, "moe.gate", gate, SLOT_FFN, "expert_ffn") if m.bias else gate
        reads = {gate: SLOT_FFN, up: SLOT_FFN, weights: SLOT}
    else:
        reads = {up: SLOT_FFN, weights: SLOT}
    h = b.add("weighted_glu", "moe.act", reads, SLOT_FFN, function=m.activation, tag="mlp_act")
    y = b.linear("moe.down", h, SLOT_FFN, ("experts", "expert_ffn", width), slots)
    y = _expert_bias(b, "moe.down", y, slots, width, WEIGHTED) if m.bias else y
    out = b.add("combine", "moe.combine", {y: slots, probs: ROUTING}, tokens)
    if m.latent:
        out = b.linear("moe.latent_out", out, LATENT, ("moe_latent", "hidden"), HIDDEN)
    if not m.shared_ffn:
        return out
    dense = Mlp(ffn=m.shared_ffn, gated=m.gated, activation=m.activation)
    shared = b.on_residual(mlp(b, dense, x, fused_glu, "moe.shared", "shared_ffn"))
    if m.shared_gate:
        gate = b.linear("moe.shared_gate", x, HIDDEN, ("hidden",), TOKENS)
        shared = b.add("scale", "moe.shared_scaled", {shared: HIDDEN, gate: TOKENS}, HIDDEN, function="sigmoid")
    return b.add("add", "moe.sum", {b.on_residual(out): HIDDEN, shared: HIDDEN}, HIDDEN)


def _expert_bias(b: Builder, name: str, y: str, dims: Dims, width: str, function: str = "") -> str:
    w = b.weight(f"{name}.bias", ("experts", width), decay=False)
    return b.add("bias", f"{name}.add_bias", {y: dims, w: ("experts", width)}, dims, fused=True, function=function)


def feed_forward_sizes(ffn: Mlp | Moe | Custom | None, seq_len: float) -> dict[str, float]:
    """True sizes of a feed-forward's dims; `capacity` is slots per expert of one sequence.

    capacity = tokens · top_k / experts (Switch Transformers, arXiv 2101.03961, section 2.2), times the capacity
    factor; without one (`dropless`) the fullest rank's load over the mean multiplies it, strategy by strategy.
    """
    if isinstance(ffn, Custom):
        return dict(ffn.sizes)
    if isinstance(ffn, Mlp):
        return {"ffn": float(ffn.ffn)}
    if isinstance(ffn, Moe):
        even = seq_len * ffn.top_k / ffn.experts
        sizes = {
            "experts": float(ffn.experts),
            "router_experts": float(ffn.experts),
            "expert_ffn": float(ffn.ffn),
            "shared_ffn": float(ffn.shared_ffn),
            "moe_latent": float(ffn.latent),
            "routes": float(ffn.top_k),
            "even_capacity": even,
            "capacity": even * (ffn.capacity_factor or 1.0),
        }
        return sizes if ffn.capacity_factor else sizes | {"dropless": 1.0}
    return {}


def evenly_routed(segment: Segment) -> Segment:
    """The segment with as many slots as its tokens use, whatever its capacity factor."""
    even = segment.sizes.get("even_capacity")
    return segment if even is None else replace(segment, sizes=dict(segment.sizes) | {"capacity": even})
