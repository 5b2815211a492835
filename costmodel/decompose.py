"""Norms as the separate operators that run where no fused kernel exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distplan.costmodel.operators import Operator, Segment


def decompose_norms(segment: Segment) -> Segment:
    """Every norm as a cast to fp32, the normalisation, and the product with its weight.

    So the input and the normalised value are kept in fp32 (torch's rms_norm without a fused kernel:
    aten/src/ATen/native/layer_norm.cpp, rms_norm_composite).
    """
    operators = tuple(part for op in segment.operators for part in _parts(op))
    return replace(segment, operators=operators, beside=tuple(decompose_norms(part) for part in segment.beside))


def _parts(op: Operator) -> Iterator[Operator]:
    if op.kind != "norm":
        yield op
        return
    x, *weights = op.inputs
    dims, *weight_dims = op.operands
    upcast, normal = f"{op.name}.fp32", f"{op.name}.normalised"
    yield replace(
        op, kind="cast", name=upcast, operands=(dims,), inputs=(x,), output=upcast, dtype="fp32", function="", whole=()
    )
    last = normal if weights else op.output
    dtype = "fp32" if weights else op.dtype
    yield replace(op, name=normal, inputs=(upcast,), operands=(dims,), output=last, dtype=dtype)
    for number, (weight, over) in enumerate(zip(weights, weight_dims, strict=True)):
        output = op.output if number == len(weights) - 1 else f"{op.name}.scaled"
        yield replace(
            op,
            kind="bias" if number else "mul",
            name=output,
            inputs=(last, weight),
            operands=(dims, over),
            output=output,
            function="",
            whole=(),
        )
        last = output
