"""Projections of one input that a framework computes as one matrix product: query, key and value; gate and up.

Their weights are one tensor (Megatron-LM's linear_qkv and linear_fc1), so forward has one product with the widths
added, the input's gradient one with the inner dims added (and no sum afterwards), the weights' gradient one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distplan.costmodel.program import Node, SegmentProgram

_TOGETHER = (
    ("attention.q", "attention.k", "attention.v"),
    ("attention.kv_down", "attention.k_rope"),
    ("mlp.up", "mlp.gate"),
    ("moe.up", "moe.gate"),
    ("shared.up", "shared.gate"),
    ("mixer.gate", "mixer.value", "mixer.key", "mixer.query"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """`leader[name, phase]` of every product that is part of another one; `sums` are additions that vanish."""

    leader: Mapping[tuple[str, str], str]
    sums: frozenset[tuple[str, str]]


def joined_products(program: SegmentProgram) -> Joined:
    """Which products of a Program are one, where its runtime merges them."""
    rule = program.structure.merged_input_gradients
    together = {"always": _TOGETHER, "attention": _TOGETHER[:2]}.get(rule, ())
    if not together:
        return Joined(leader={}, sums=frozenset())
    groups: dict[tuple[str, ...], list[Node]] = {}
    for node in program.nodes:
        key = _key(node, program.segment.name, together)
        if key:
            groups.setdefault(key, []).append(node)
    leader: dict[tuple[str, str], str] = {}
    summed: dict[tuple[str, str], set[str]] = {}
    for members in groups.values():
        for node in members[1:]:
            leader[node.name, node.phase] = members[0].name
        if members[0].function == "dgrad" and len(members) > 1:
            outputs = {name for node in members for name in node.outputs}
            summed[members[0].name, members[0].phase] = outputs
    sums = {
        (node.name, node.phase)
        for node in program.nodes
        for outputs in summed.values()
        if node.kind == "add" and node.inputs and set(node.inputs) <= outputs
    }
    return Joined(leader=leader, sums=frozenset(sums))


def _key(node: Node, segment: str, together: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What the products of one merged product share; empty for others."""
    if node.kind != "einsum":
        return ()
    plain = node.name.removeprefix(f"{segment}.").removesuffix(".dgrad").removesuffix(".wgrad")
    group = next((names for names in together if plain in names), None)
    if group is None:
        return ()
    return (group[0], node.phase, node.function, node.inputs[0] if node.function == "" else "")
