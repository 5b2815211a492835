"""Rules that choose by cost instead of by precedence: concat, stack and the RMS-norm gradient.

Where the inputs disagree about a mesh axis, the axis goes to the dim for which the fewest elements
have to be laid out anew; a partial status on which all agree is kept. Axes are decided in the order
of the mesh, and a dim takes one axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from distplan.costmodel.paddle_attr import (
    Argument,
    Axes,
    DistAttr,
    DistTensor,
    Inference,
    RuleRefusedError,
    flat,
    single_axis,
)

Attributes = Mapping[str, object]
Spec = Mapping[str, object]
Placement = tuple[str, object]
"""("shard", letter) | ("partial", kind) | ("whole", None)"""


def _placements(tensor: DistTensor, letters: str, mesh: Sequence[int]) -> list[Placement]:
    placed: list[Placement] = [("whole", None)] * len(mesh)
    for axis, kind in tensor.attr.partial.items():
        placed[axis] = ("partial", kind)
    for letter, axes in zip(letters, tensor.attr.dims_mapping, strict=False):
        for axis in axes:
            placed[axis] = ("shard", letter)
    return placed


def _is_empty(tensor: DistTensor) -> bool:
    return not tensor.sizes or tensor.sizes[0] == 0


def _local_elements(tensor: DistTensor, letters: str, placed: Sequence[Placement], mesh: Sequence[int]) -> int:
    sizes = list(tensor.sizes)
    for axis, (kind, letter) in enumerate(placed):
        if kind == "shard":
            dim = letters.index(str(letter))
            sizes[dim] = -(-tensor.sizes[dim] // mesh[axis])
    return math.prod(sizes)


def _cost(
    letter: str, axis: int, inputs: Sequence[tuple[DistTensor, str, list[Placement]]], mesh: Sequence[int]
) -> float:
    """Elements to move if `axis` shards `letter`; infinite where the dim is smaller than the axis."""
    total = 0.0
    for tensor, letters, placed in inputs:
        if _is_empty(tensor):
            continue
        dim = letters.index(letter)
        if tensor.sizes[dim] < mesh[axis]:
            return math.inf
        if not _counts_as_sharded(tensor, dim):
            total += _local_elements(tensor, letters, placed, mesh) * mesh[axis]
    return total


def _counts_as_sharded(tensor: DistTensor, dim: int) -> bool:
    """Sharded by any axis: such an input is taken to cost nothing."""
    return bool(tensor.attr.dims_mapping[dim])


def align(tensors: Sequence[DistTensor], notation: Sequence[str], free: str, mesh: Sequence[int]) -> list[DistAttr]:
    """One placement for all inputs; only the letters in `free` may be sharded."""
    inputs = [(t, x, _placements(t, x, mesh)) for t, x in zip(tensors, notation, strict=True)]
    filled = [entry for entry in inputs if not _is_empty(entry[0])]
    sharded: dict[int, str] = {}
    partial: dict[int, str] = {}
    disputed: list[int] = []
    for axis in range(len(mesh)):
        stated = {placed[axis] for _, _, placed in filled}
        kind, value = filled[0][2][axis]
        if len(stated) > 1:
            disputed.append(axis)
        elif kind == "shard" and str(value) in free:
            sharded[axis] = str(value)
        elif kind == "partial" and value in ("SUM", "AVG"):
            partial[axis] = str(value)
    for axis in disputed:
        offers = [(_cost(x, axis, inputs, mesh), x) for x in free if x not in sharded.values()]
        cost, letter = min(offers, default=(math.inf, ""))
        if cost < math.inf:
            sharded[axis] = letter
    return [_settled(tensor, letters, sharded, partial) for tensor, letters, _ in inputs]


def _settled(tensor: DistTensor, letters: str, sharded: Mapping[int, str], partial: Mapping[int, str]) -> DistAttr:
    mapping: list[Axes] = [()] * len(tensor.attr.dims_mapping)
    for axis, letter in sorted(sharded.items()):
        mapping[letters.index(letter)] = (axis,)
    return DistAttr(dims_mapping=tuple(mapping), partial=dict(partial))


def _dim(attributes: Attributes, rank: int) -> int:
    axis = attributes["axis"]
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise RuleRefusedError(f"axis {axis} is outside a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


_ALPHABET = "abcdefghijklopqrstuvwxyz"


def _letters(rank: int) -> str:
    return _ALPHABET[:rank]


def concat(
    spec: Spec, mesh: Sequence[int], inputs: Sequence[Argument], outputs: Sequence[Argument], attributes: Attributes
) -> Inference:
    """Inputs aligned on every dim but `axis`; the output loses the partial status (as 3.3.1 does)."""
    tensors = flat(inputs[:1])
    first = next((i for i, t in enumerate(tensors) if not _is_empty(t)), None)
    if first is None:
        return Inference(inputs=(), outputs=())
    letters = _letters(tensors[first].ndim)
    free = letters.replace(letters[_dim(attributes, len(letters))], "")
    settled = align(tensors, [letters] * len(tensors), free, mesh)
    result = DistAttr(dims_mapping=settled[first].dims_mapping)
    return Inference(inputs=(tuple(settled),), outputs=(result,))


def concat_reverse(
    spec: Spec, mesh: Sequence[int], inputs: Sequence[Argument], outputs: Sequence[Argument], attributes: Attributes
) -> Inference:
    """Every input as the output, whole along `axis`."""
    (out,) = flat(outputs)
    at = _dim(attributes, out.ndim)
    mapping = single_axis(out.attr.dims_mapping, mesh)
    one = DistAttr(dims_mapping=(*mapping[:at], (), *mapping[at + 1 :]))
    return Inference(inputs=((one,) * len(flat(inputs)),), outputs=(out.attr,))


def concat_grad(
    spec: Spec, mesh: Sequence[int], inputs: Sequence[Argument], outputs: Sequence[Argument], attributes: Attributes
) -> Inference:
    """Forward inputs and the output gradient aligned together; the gradients are as the inputs."""
    tensors = flat(inputs)
    letters = _letters(next(t for t in tensors if not _is_empty(t)).ndim)
    free = letters.replace(letters[_dim(attributes, len(letters))], "")
    settled = align(tensors, [letters] * len(tensors), free, mesh)
    return Inference(inputs=(tuple(settled[:-1]), settled[-1]), outputs=(tuple(settled[:-1]),))


def stack(
    spec: Spec, mesh: Sequence[int], inputs: Sequence[Argument], outputs: Sequence[Argument], attributes: Attributes
) -> Inference:
    """Inputs aligned on every dim; the new dim is whole and a common partial status stays."""
    tensors = flat(inputs)
    letters = _letters(tensors[0].ndim)
    settled = align(tensors, [letters] * len(tensors), letters, mesh)
    at = _dim(attributes, len(letters) + 1)
    mapping = settled[0].dims_mapping
    result = DistAttr(dims_mapping=(*mapping[:at], (), *mapping[at:]), partial=settled[0].partial)
    return Inference(inputs=(tuple(settled),), outputs=(result,))


def rms_norm_grad(
    spec: Spec, mesh: Sequence[int], inputs: Sequence[Argument], outputs: Sequence[Argument], attributes: Attributes
) -> Inference:
    """x, inverse deviation and output gradient aligned on the batch dims; the scale's gradient is partial."""
    x, scale, inverse, gradient = flat(inputs)
    letters = _letters(x.ndim)
    free = letters[:-1]
    stated = [(t.shape, DistAttr(dims_mapping=t.attr.dims_mapping)) for t in (x, inverse, gradient)]
    summed = [DistTensor(shape=shape, attr=attr) for shape, attr in stated]
    placed = align(summed, [letters, free, letters], free, mesh)
    replicated = DistAttr(dims_mapping=((),) * scale.ndim)
    axes = [axis for dim in placed[0].dims_mapping for axis in dim]
    due = DistAttr(dims_mapping=replicated.dims_mapping, partial=dict.fromkeys(axes, "SUM"))
    return Inference(inputs=(placed[0], replicated, placed[1], placed[2]), outputs=(placed[0], due))


FUNCTIONS = {
    "concat": concat,
    "concat_grad": concat_grad,
    "concat_reverse": concat_reverse,
    "stack": stack,
    "rms_norm_grad": rms_norm_grad,
}
