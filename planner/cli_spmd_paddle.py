"""`spmd --dialect paddle`: what PaddlePaddle's rule of that name answers, and the proof where it is a product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distplan.costmodel.interpret_einsum import Steps, difference, moved, pieces
from distplan.costmodel.interpret_kernels import einsum
from distplan.costmodel.interpret_mesh import Mesh
from distplan.costmodel.layout import Dims, Layout
from distplan.costmodel.paddle_attr import Answer, DistAttr, DistTensor, as_integers
from distplan.costmodel.paddle_rules import infer, rule_names
from distplan.costmodel.spmd import reshard
from distplan.hardware.errors import did_you_mean
from distplan.planner.cli_spmd import EXACT, MAX_RANKS, merge_rows, place, read_sizes, step_rows
from distplan.planner.inputs import InputError
from distplan.planner.spmd_question import OPERANDS, Question, read_attributes, read_mesh, read_notation, read_shapes

PRODUCT = "matmul"
LEAST = 8
"""size of a dim of an einsum without --shapes, times the ranks"""


def answer(question: Question) -> dict[str, Any]:
    """The rule's answer as plain data, like cli_spmd's. Raises DistplanError, RuleRefusedError too."""
    mesh = read_mesh(question.mesh)
    rule = question.rule or PRODUCT
    if rule not in rule_names():
        raise InputError(f"--op {rule}: the paddle dialect has no such rule{did_you_mean(rule, rule_names())}")
    operands, result = _dims(question)
    layouts = place(question, operands, mesh)
    sizes = read_sizes(question, operands, {dim: LEAST * mesh.ranks for dims in operands for dim in dims})
    axes = [axis for axis, _ in mesh.axes]
    tensors = [_tensor(layout, sizes, axes) for layout in layouts]
    attributes = read_attributes(question.attributes)
    found = infer(rule, "forward", [degree for _, degree in mesh.axes], tensors, attributes=attributes)
    needs = tuple(_layout(a, layout.dims, axes) for a, layout in zip(_flat(found.inputs), layouts, strict=True))
    outputs = _flat(found.outputs)
    moves = tuple(reshard(src, dst) for src, dst in zip(layouts, needs, strict=True))
    rows = [
        row for name, layout, steps in zip(OPERANDS, layouts, moves, strict=False)
        for row in step_rows(f"forward: {name}", layout, steps, mesh, sizes)
    ]  # fmt: skip
    output = _layout(outputs[0], result, axes) if result is not None else None
    return {
        "dialect": "paddle",
        "notation": f"{rule}: {question.notation}" if question.notation else rule,
        "mesh": dict(mesh.axes),
        "operands": _shown(layouts, [tensor.attr for tensor in tensors]),
        "sizes": sizes,
        "merge": merge_rows(_letters(needs, output), layouts, result) if result is not None else [],
        "needs": _shown(needs, _flat(found.inputs)),
        "result": f"{output} {_integers(outputs[0])}" if output is not None else "; ".join(map(_integers, outputs)),
        "partial": [axes[axis] for axis in outputs[0].partial],
        "communication": rows,
        "proof": _proof(layouts, moves, needs, output, mesh),
    }


def _dims(question: Question) -> tuple[tuple[Dims, ...], Dims | None]:
    """Dim names of the operands: letters of the notation, or 0, 1, … of each shape."""
    if question.notation is not None:
        operands, result = read_notation(question.notation)
        if question.rule not in (None, PRODUCT):
            raise InputError(f"--op {question.rule} has its own notation; say the operands with --shapes instead")
        if not _is_product(operands, result):
            raise InputError(
                f"'{question.notation}': the rule matmul multiplies '…mk,…kn->…mn'; --op NAME --shapes names any other"
            )
        return operands, result
    shapes = read_shapes(question.shapes)
    if not shapes:
        raise InputError("--shapes is missing: what are the operands? For example --shapes 64x32,32x48")
    if len(shapes) > len(OPERANDS):
        raise InputError(f"--shapes: {len(shapes)} operands, at most {len(OPERANDS)} can be placed")
    named = zip(OPERANDS, shapes, strict=False)
    return tuple(tuple(f"{name}{at}" for at in range(len(shape))) for name, shape in named), None


def _is_product(operands: Sequence[Dims], result: Dims) -> bool:
    """…mk,…kn->…mn: what the rule matmul is about."""
    if len(operands) != 2 or min(map(len, operands)) < 2:
        return False
    x, y = operands
    return x[:-2] == y[:-2] and x[-1] == y[-2] and result == (*x[:-1], y[-1])


def _tensor(layout: Layout, sizes: dict[str, int], axes: Sequence[str]) -> DistTensor:
    mapping = tuple(tuple(axes.index(axis) for axis in each) for each in layout.shards)
    partial = {axes.index(axis): "SUM" for axis in layout.partial}
    return DistTensor(shape=tuple(sizes[d] for d in layout.dims), attr=DistAttr(dims_mapping=mapping, partial=partial))


def _layout(attr: DistAttr, dims: Dims, axes: Sequence[str]) -> Layout:
    shards = tuple(tuple(axes[axis] for axis in each) for each in attr.dims_mapping)
    return Layout(dims, shards, tuple(axes[axis] for axis in attr.partial))


def _flat(answers: Sequence[Answer]) -> list[DistAttr]:
    return [attr for each in answers for attr in ((each,) if isinstance(each, DistAttr) else each)]


def _integers(attr: DistAttr) -> str:
    """The notation of Paddle's documents: dims_mapping=[0, -1], and the axes that are Partial."""
    partial = f", partial on {sorted(attr.partial)}" if attr.partial else ""
    return f"dims_mapping={as_integers(attr)}{partial}"


def _shown(layouts: Sequence[Layout], attrs: Sequence[DistAttr]) -> dict[str, str]:
    named = zip(OPERANDS, layouts, attrs, strict=False)
    return {name: f"{layout} {_integers(attr)}" for name, layout, attr in named}


def _letters(needs: Sequence[Layout], output: Layout | None) -> dict[str, tuple[str, ...]]:
    letters: dict[str, tuple[str, ...]] = {}
    for layout in (*needs, *((output,) if output is not None else ())):
        for dim, axes in zip(layout.dims, layout.shards, strict=True):
            letters[dim] = axes or letters.get(dim, ())
    return letters


def _proof(
    layouts: Sequence[Layout], moves: Sequence[Steps], needs: Sequence[Layout], output: Layout | None, mesh: Mesh
) -> dict[str, Any]:
    """The product executed on random operands; dims that no axis divides are not shown here."""
    if output is None:
        return {"reason": "only products are executed: give a notation such as 'mk,kn->mn' for the rule matmul"}
    if mesh.ranks > MAX_RANKS:
        return {"reason": f"{mesh.ranks} ranks are not simulated, at most {MAX_RANKS} are"}
    rng = np.random.default_rng(0)
    sizes = {dim: mesh.ranks for layout in layouts for dim in layout.dims}
    wholes = [rng.normal(size=[sizes[dim] for dim in layout.dims]) for layout in layouts]
    stacks = [
        moved(pieces(whole, layout, mesh, rng), layout, steps, mesh)
        for whole, layout, steps in zip(wholes, layouts, moves, strict=True)
    ]
    dims = [layout.dims for layout in needs]
    right = einsum([whole[None] for whole in wholes], dims, output.dims)[0]
    error = difference(einsum(stacks, dims, output.dims), output, right, mesh)
    return {"passed": error <= EXACT, "ranks": mesh.ranks, "sizes": sizes, "differences": {"result": error}}
