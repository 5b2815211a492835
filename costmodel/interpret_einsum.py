"""Proof of one inference: an einsum on simulated ranks, forward and backward, against one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.interpret import settled
from distplan.costmodel.interpret_kernels import einsum
from distplan.costmodel.interpret_mesh import Array, Mesh, spread, transit
from distplan.costmodel.layout import Dims, Layout
from distplan.costmodel.spmd import Inference, Transition, infer_einsum, reshard

Steps = tuple[Transition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product: where its operands are, and which of them are weights."""

    operands: tuple[Layout, ...]
    is_weight: tuple[bool, ...]
    result: Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """Of one operand: another product, of the other operands and dy, moved to the operand's placement."""

    product: Product
    inference: Inference
    moves: tuple[Steps, ...]
    settle: Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is inferred for a product, forward and backward."""

    product: Product
    inference: Inference
    moves: tuple[Steps, ...]
    gradients: tuple[Gradient, ...]

    def layouts(self) -> Iterable[Layout]:
        """Every placement that a tensor has on the way."""
        for product, inference, moves in (
            (self.product, self.inference, self.moves),
            *((g.product, g.inference, g.moves) for g in self.gradients),
        ):
            yield from product.operands
            yield from inference.inputs
            yield inference.output
            yield from (step.result for steps in moves for step in steps)
        yield from (step.result for g in self.gradients for step in g.settle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Largest |difference| to the single-device result: of the output, and of each operand's gradient."""

    output: float
    gradients: tuple[float, ...]

    @property
    def error(self) -> float:
        return max((self.output, *self.gradients))


def plan(product: Product) -> Plan:
    """Inference of the product and of the gradients of all its operands.

    Every dim of an operand must occur in the result or in another operand, so that the gradients are
    products too. Raises SpmdError.
    """
    inference = infer_einsum(product.operands, product.is_weight, product.result)
    moves = tuple(reshard(a, b) for a, b in zip(product.operands, inference.inputs, strict=True))
    return Plan(
        product=product,
        inference=inference,
        moves=moves,
        gradients=tuple(_gradient(product, inference, index) for index in range(len(product.operands))),
    )


def _gradient(product: Product, inference: Inference, index: int) -> Gradient:
    """What is Partial has a gradient that is whole: the sum passes it on to all summands."""
    others = [i for i in range(len(product.operands)) if i != index]
    operands = (*(inference.inputs[i] for i in others), inference.output.whole())
    flags = (*(product.is_weight[i] for i in others), False)
    backward = Product(operands=operands, is_weight=flags, result=product.operands[index].dims)
    inner = infer_einsum(operands, flags, backward.result)
    moves = tuple(reshard(a, b) for a, b in zip(operands, inner.inputs, strict=True))
    settle = reshard(inner.output, product.operands[index].whole())
    return Gradient(product=backward, inference=inner, moves=moves, settle=settle)


def sizes_of(made: Plan, mesh: Mesh) -> dict[str, int]:
    """The least sizes that all placements of the plan divide, at least 2."""
    sizes: dict[str, int] = {}
    for layout in made.layouts():
        for dim, axes in zip(layout.dims, layout.shards, strict=True):
            sizes[dim] = lcm(sizes.get(dim, 1), mesh.degree(axes))
    return {dim: size if size > 1 else 2 for dim, size in sizes.items()}


def pieces(whole: NDArray[np.float64], layout: Layout, mesh: Mesh, rng: np.random.Generator) -> Array:
    """`whole` in `layout`: what is Partial is cut into random summands."""
    count = mesh.degree(layout.partial)
    parts = [rng.normal(size=whole.shape) for _ in range(count - 1)]
    last = whole
    for part in parts:
        last = last - part
    stacks = np.stack([spread(part, layout, mesh) for part in (*parts, last)])
    chosen: Array = stacks[mesh.position(layout.partial), np.arange(mesh.ranks)]
    return chosen


def moved(stack: Array, layout: Layout, steps: Steps, mesh: Mesh) -> Array:
    for step in steps:
        stack = transit(stack, layout, step, mesh)
        layout = step.result
    return stack


def difference(stack: Array, layout: Layout, whole: NDArray[np.float64], mesh: Mesh) -> float:
    """Largest |element| that any rank has wrong, after what is Partial is summed."""
    expected = spread(whole, layout, mesh)
    found = settled(stack, layout, mesh)
    return float(np.abs(found - expected).max()) if found.shape == expected.shape else float("inf")


def prove(made: Plan, mesh: Mesh, seed: int, sizes: Mapping[str, int] | None = None) -> Proof:
    """Execute the plan on random tensors."""
    rng = np.random.default_rng(seed)
    sizes = sizes or sizes_of(made, mesh)
    product = made.product
    dims = [operand.dims for operand in product.operands]
    wholes = [rng.normal(size=[sizes[d] for d in each]) for each in dims]
    stacks = [pieces(w, o, mesh, rng) for w, o in zip(wholes, product.operands, strict=True)]
    used = [moved(s, o, m, mesh) for s, o, m in zip(stacks, product.operands, made.moves, strict=True)]
    y = einsum(used, dims, product.result)
    right = _alone(wholes, dims, product.result)
    dy = rng.normal(size=right.shape)
    dy_stack = spread(dy, made.inference.output, mesh)
    errors = []
    for index, gradient in enumerate(made.gradients):
        inputs = [*(used[i] for i in range(len(used)) if i != index), dy_stack]
        names = [o.dims for o in gradient.product.operands]
        arrived = [
            moved(s, o, m, mesh) for s, o, m in zip(inputs, gradient.product.operands, gradient.moves, strict=True)
        ]
        grad = einsum(arrived, names, gradient.product.result)
        grad = moved(grad, gradient.inference.output, gradient.settle, mesh)
        alone = _alone([*(wholes[i] for i in range(len(wholes)) if i != index), dy], names, gradient.product.result)
        errors.append(difference(grad, product.operands[index].whole(), alone, mesh))
    return Proof(output=difference(y, made.inference.output, right, mesh), gradients=tuple(errors))


def _alone(wholes: Sequence[NDArray[np.float64]], dims: Sequence[Dims], result: Dims) -> NDArray[np.float64]:
    product: NDArray[np.float64] = einsum([whole[None] for whole in wholes], dims, result)[0]
    return product
