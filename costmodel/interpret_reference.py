"""Single-device execution of a segment's graph: forward, and backward by the chain rule per operator.

It knows no mesh, no Program and no collective: the operators of graph.py in order, then in reverse.
Its gradients are held to finite differences by the tests. Arrays have no dim of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distplan.costmodel.graph import Operator, Segment
from distplan.costmodel.interpret_gradients import forward, gradient
from distplan.costmodel.interpret_kernels import Call, InterpretError, einsum
from distplan.costmodel.interpret_mesh import Array
from distplan.costmodel.layout import Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What the operators do not say: causality, how far a window reaches at most, the loss's scale."""

    causal: bool
    window: int
    scale: float
    sizes: Mapping[str, int]


def reference_forward(segment: Segment, inputs: Mapping[str, Array], alone: Alone) -> dict[str, Array]:
    """Every value of the graph by name; `<name>.lse` and `<name>.mask` beside those of attention and dropout."""
    values = {name: array[None] for name, array in inputs.items()}
    for op in segment.operators:
        shape = tuple(alone.sizes[dim] for dim in op.result)
        made = forward(_call(op, op.kind, op.operands, alone, [(op.result, shape)]), [values[n] for n in op.inputs])
        for suffix, array in zip(("", ".lse" if op.kind == "attention" else ".mask"), made, strict=False):
            values[op.output + suffix] = array
    return {name: array[0] for name, array in values.items()}


def reference_backward(
    segment: Segment, values: Mapping[str, Array], dy: Array | None, alone: Alone
) -> dict[str, Array]:
    """Gradients of all values that the output depends on; `dy` of the output (None: the loss's scale)."""
    grads: dict[str, Array] = {} if dy is None else {segment.output: dy}
    for op in reversed(segment.operators):
        if op.kind != "cross_entropy" and op.output not in grads:
            continue
        for name, part in _backward(op, values, grads.get(op.output), alone):
            grads[name] = grads[name] + part if name in grads else part
    return grads


def _call(
    op: Operator, kind: str, dims: Sequence[Dims], alone: Alone, out: Sequence[tuple[Dims, tuple[int, ...]]]
) -> Call:
    zero = np.zeros(1, dtype=np.int64)
    return Call(
        kind=kind, function=op.function, dims=tuple(dims), result=op.result,
        starts=tuple({dim: zero for dim in each} for each in dims), causal=alone.causal,
        window=min(op.window, alone.window), block=min(op.block, alone.window), scale=alone.scale,
        shapes=tuple(shape for _, shape in out), out_dims=tuple(names for names, _ in out),
        out_starts=tuple({dim: zero for dim in names} for names, _ in out),
    )  # fmt: skip


def _backward(op: Operator, values: Mapping[str, Array], dy: Array | None, alone: Alone) -> list[tuple[str, Array]]:
    """(input, gradient) pairs of one operator."""
    if op.kind == "einsum":
        return [_einsum(op, index, values, _given(op, dy)) for index in range(2)]
    if op.kind == "add":
        return [(name, _given(op, dy)) for name in op.inputs]
    passing = [(op.inputs[0], _given(op, dy))] if op.kind in ("bias", "position_embedding") else []
    reads, targets = _kernel_arguments(op, values, dy)
    names = dict(zip(op.inputs, op.operands, strict=True))
    out = [(names[target], values[target].shape) for target in targets]
    call = _call(op, f"{op.kind}_grad", [dims for dims, _ in reads], alone, out)
    made = gradient(call, [array[None] for _, array in reads])
    return passing + [(target, array[0]) for target, array in zip(targets, made, strict=True)]


def _given(op: Operator, dy: Array | None) -> Array:
    if dy is None:
        raise InterpretError(f"{op.name}: nothing gives a gradient to its output")
    return dy


def _einsum(op: Operator, index: int, values: Mapping[str, Array], dy: Array) -> tuple[str, Array]:
    other = 1 - index
    operands = (values[op.inputs[other]][None], dy[None])
    return op.inputs[index], einsum(operands, (op.operands[other], op.result), op.operands[index])[0]


def _kernel_arguments(
    op: Operator, values: Mapping[str, Array], dy: Array | None
) -> tuple[list[tuple[Dims, Array]], tuple[str, ...]]:
    """What the gradient kernel reads, with dim names, and the inputs that it gives gradients of."""
    inputs = [(dims, values[name]) for name, dims in zip(op.inputs, op.operands, strict=True)]
    if op.kind == "cross_entropy":
        return [inputs[at] for at in (0, 1, 2, 4)], op.inputs[:1]
    if op.kind == "embedding":
        return [inputs[0], (op.result, _given(op, dy))], op.inputs[1:]
    first = (op.result, _given(op, dy))
    output = (op.result, values[op.output])
    if op.kind == "attention":
        lse = (op.result[:-1], values[f"{op.output}.lse"])
        return [first, *inputs[:3], output, lse, *inputs[3:]], op.inputs
    if op.kind in ("bias", "position_embedding"):
        return [first], op.inputs[1:]
    if op.kind in ("dispatch", "dispatch_weights", "combine"):
        return [first, inputs[-1]], op.inputs[:1]
    kept = {"norm": inputs[:2], "softmax": [output], "rope": [], "cast": [], "concat": []}
    if op.kind == "dropout":
        return [first, (op.result, values[f"{op.output}.mask"])], op.inputs
    return [first, *kept.get(op.kind, inputs)], op.inputs
