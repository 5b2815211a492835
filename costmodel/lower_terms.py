"""Bytes of values as terms: sizes of the SizeTable, each times the bytes of an element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distplan.costmodel.graph import LOG_SOFTMAX, LOGITS_FP32
from distplan.costmodel.model import DTYPE_BYTES, Precision, Workload
from distplan.costmodel.program import Node, SegmentProgram
from distplan.costmodel.sizes import SizeTable, layout_size


def dtype_bytes(dtype: str, precision: Precision) -> float:
    """Bytes per element of a Program's dtype under a recipe."""
    name = {"compute": precision.compute, "parameter": precision.compute, "gradient": precision.gradients}.get(dtype)
    if dtype == "int64":
        return 8.0
    return DTYPE_BYTES[name or dtype]


def segment_sizes(program: SegmentProgram, workload: Workload) -> Mapping[str, float]:
    """Sizes of a segment's dims; an image tower has a sequence of its own."""
    return {"seq": float(workload.seq_len), "kv_seq": float(workload.seq_len)} | dict(program.segment.sizes)


def traffic(
    node: Node, program: SegmentProgram, sizes: Mapping[str, float], table: SizeTable, precision: Precision
) -> tuple[tuple[int, float], ...]:
    """Bytes that a memory-bound kernel reads and writes. Lookups touch the rows that they need, no more."""
    values = program.values
    if node.fused:
        moved = [v for v in (*node.inputs, *node.outputs) if values[v].dtype == "bool"]
    elif node.kind == "embedding":
        moved = [*node.outputs, *node.outputs]
    elif node.kind == "embedding_grad":
        moved = [node.inputs[1]] * 3
    elif node.kind in ("pick", "cross_entropy"):
        moved = list(node.outputs)
    elif node.kind in ("bias_grad", "position_embedding_grad"):
        moved = list(node.inputs)
    else:
        moved = [*node.inputs, *node.outputs]
    return terms_of(moved, program, sizes, table, precision, {}, chunked=False)


def terms_of(
    names: Sequence[str],
    program: SegmentProgram,
    sizes: Mapping[str, float],
    table: SizeTable,
    precision: Precision,
    cast: Mapping[str, float],
    chunked: bool = True,
) -> tuple[tuple[int, float], ...]:
    """(size, bytes per element) per distinct size, in order of first use; `cast`: bytes per element of values that
    are not there in their own dtype."""
    merged: dict[int, float] = {}
    for name in names:
        value = program.values[name]
        number = table.number(layout_size(value.layout, sizes))
        chunks = value.chunks if chunked else 1.0
        element = cast[name] if name in cast else dtype_bytes(value.dtype, precision)
        merged[number] = merged.get(number, 0.0) + element / chunks
    return tuple(merged.items())


def transients_of(
    program: SegmentProgram,
    sizes: Mapping[str, float],
    table: SizeTable,
    precision: Precision,
    cast: Mapping[str, float],
    only_forward: bool = False,
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The largest sets of values that are neither saved nor weights and live at the same time.

    A value lives from its node to its last reader; sets contained in another are dropped. What is remade in backward
    is a value like others in forward.
    """
    kept = set(program.saved) | {w.name for w in program.segment.weights}
    kept |= set(program.gradients.values())
    nodes = program.nodes
    if only_forward:
        nodes = tuple(node for node in nodes if node.phase == "forward")
    else:
        kept |= set(program.remade)
    last: dict[str, int] = {}
    for at, node in enumerate(nodes):
        for name in (*node.inputs, *node.outputs):
            last[name] = at
    alive: set[str] = set()
    sets: list[frozenset[str]] = []
    for at, node in enumerate(nodes):
        fresh = {v for v in node.outputs if v not in kept}
        if node.in_place or node.kind in ("bias", "slice") or node.fused:
            fresh = set() if node.inputs[0] in kept else {v for v in fresh if v != node.outputs[0]}
        alive |= fresh
        sets.append(frozenset(alive))
        alive = {v for v in alive if last[v] > at}
    widest = [s for s in dict.fromkeys(sets) if s and not any(s < other for other in sets)]
    found = {terms_of(sorted(s), program, sizes, table, precision, cast) for s in widest}
    return tuple(sorted(found))


def held_outputs(program: SegmentProgram, workload: Workload) -> tuple[str, ...]:
    """Values that backward does not read and that stay all the same: the model's output, which the training loop
    holds."""
    if program.segment.name != "head" or workload.loss not in LOG_SOFTMAX:
        return ()
    return next(node for node in program.nodes if node.name == f"head.{LOGITS_FP32}").inputs
