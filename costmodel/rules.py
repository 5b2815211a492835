"""The rule of every kind of operator: which placements it needs, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping

from distplan.costmodel.graph import Operator
from distplan.costmodel.layout import CP, Axes, Layout, placed
from distplan.costmodel.program import Structure, residual_placement
from distplan.costmodel.spmd import Inference, SpmdError, infer_einsum, infer_elementwise

LINEAR = ("add",)
ELEMENTWISE = (
    "add", "bias", "activation", "glu", "mul", "rope", "dropout", "cast", "norm", "softmax", "scale", "concat",
    "gated_norm", "weighted_glu", "route",
)  # fmt: skip
REDUCTIONS = ("reduce", "pick")
SLOTS = ("dispatch", "dispatch_weights", "combine")


def infer(op: Operator, operands: tuple[Layout, ...], is_weight: tuple[bool, ...], structure: Structure) -> Inference:
    """The rule of `op.kind`. Raises SpmdError for a kind that has none."""
    if op.kind in ("einsum", "embedding"):
        return infer_einsum(operands, is_weight, op.result, op.whole)
    if op.kind == "position_embedding":
        inner = infer_elementwise(operands[:1], op.result, False)
        table = Layout(operands[1].dims, ((),) * len(operands[1].dims))
        return Inference((*inner.inputs, table), inner.output, inner.letters)
    if op.kind in ELEMENTWISE:
        return infer_elementwise(operands, op.result, op.kind in LINEAR, op.whole)
    if op.kind in REDUCTIONS:
        return infer_einsum(tuple(o.whole() for o in operands), is_weight, op.result, op.whole)
    if op.kind == "cross_entropy":
        inner = infer_einsum(tuple(o.whole() for o in operands), is_weight, op.result, op.whole)
        return Inference(inner.inputs, inner.output.whole(), inner.letters)
    if op.kind == "attention":
        return _infer_attention(op, operands, is_weight, structure)
    if op.kind in ("scan", "conv"):
        return _infer_scan(op, operands, is_weight)
    if op.kind in SLOTS:
        return _infer_slots(op, operands)
    raise SpmdError(f"operator kind '{op.kind}' ({op.name}) has no SPMD rule")


SLOT_AXES = {"capacity": ("edp", "etp", "ep")}
"""slots lie where their tokens are: the dense axes are the expert axes, seen otherwise"""


def _infer_slots(op: Operator, operands: tuple[Layout, ...]) -> Inference:
    """Tokens on every dense axis to slots on every expert axis and back, a local permutation."""
    tokens = residual_placement(True)
    inputs = tuple(placed(o.dims, SLOT_AXES if "capacity" in o.dims else tokens) for o in operands)
    return Inference(inputs, placed(op.result, SLOT_AXES if "capacity" in op.result else tokens), {})


def _infer_scan(op: Operator, operands: tuple[Layout, ...], is_weight: tuple[bool, ...]) -> Inference:
    """A scan, and the convolution before it, run over all tokens: cp turns from tokens to heads."""
    turned = [
        o if weight or not set(CP) & set(o.axes_of("seq")) else _turned(o.whole(), "seq", {"ssm_groups": CP})
        for o, weight in zip(operands, is_weight, strict=True)
    ]
    inference = infer_einsum(turned, is_weight, op.result)
    return Inference(inference.inputs, inference.output.whole(), inference.letters)


def returned_to_tokens(layout: Layout) -> Layout:
    """A scan's output with cp back on its tokens."""
    pairs = zip(layout.dims, layout.shards, strict=True)
    return Layout(layout.dims, tuple(CP if d == "seq" else tuple(a for a in axes if a not in CP) for d, axes in pairs))


def _infer_attention(
    op: Operator, operands: tuple[Layout, ...], is_weight: tuple[bool, ...], structure: Structure
) -> Inference:
    """Flash attention: kv_seq and head_dim whole; Ulysses turns cp from tokens to heads, two-level its inner part."""
    q, k, v = (o.whole() for o in operands[:3])
    if structure.cp_kind == "ulysses":
        q = _turned(q, "seq", {"kv_heads": CP[:1], "group": CP[1:]})
        k, v = (_turned(o, "kv_seq", {"kv_heads": CP[:1]}) for o in (k, v))
    elif structure.cp_kind == "two_level":
        q = _turned(q, "seq", {"kv_heads": CP[1:]}, CP[1:])
        k, v = (_turned(o, "kv_seq", {"kv_heads": CP[1:]}, CP[1:]) for o in (k, v))
    return infer_einsum((q, k, v, *operands[3:]), is_weight, op.result, ("kv_seq", "head_dim", "v_head_dim"))


def _turned(layout: Layout, seq: str, onto: Mapping[str, Axes], turning: Axes = CP) -> Layout:
    shards = []
    for dim, axes in zip(layout.dims, layout.shards, strict=True):
        kept = tuple(axis for axis in axes if axis not in turning) if dim == seq else axes
        shards.append((*kept, *onto.get(dim, ())))
    return Layout(layout.dims, tuple(shards))
