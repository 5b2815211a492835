"""The notions of semi-automatic parallel training under their standard names.

ProcessMesh, Shard, Replicate, Partial, shard_tensor, reshard and dims_mapping mean what they mean in
PaddlePaddle's distributed API (and DTensor): placements[i] says what mesh axis i does to a tensor.

>>> mesh = ProcessMesh((2, 4), ("dp", "tp"))
>>> dims_mapping((Shard(0), Replicate()), 2)
((0,), ())
>>> print(layout_of(("batch", "hidden"), mesh, (Shard(0), Partial())))
[batch_dp, hidden]{U_tp}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distplan.costmodel.graph import segments
from distplan.costmodel.layout import CP, DATA, MESH_AXES, TP, Axes, Dims, Layout
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.operators import Segment
from distplan.costmodel.spmd import Transition
from distplan.costmodel.spmd import reshard as transitions
from distplan.hardware.errors import DistplanError, did_you_mean

AXES: Mapping[str, Axes] = {"tp": TP, "cp": CP, "dp": DATA} | {axis: (axis,) for axis in MESH_AXES}
"""the names that a placement may use -> the mesh axes of layout.py"""


class PlacementError(DistplanError):
    """A placement names a tensor, a dim or a mesh axis that does not exist."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The tensor is cut along `dim` (a position, or a dim's name)."""

    dim: int | str

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank of the axis holds a term; the value is their `kind` (sum, avg, max, min, prod, any, all)."""

    kind: str = "sum"

    def __str__(self) -> str:
        return "Partial()" if self.kind == "sum" else f"Partial({self.kind})"


Placement = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True)
class ProcessMesh:
    """A mesh of `shape` whose axes are `dim_names`, outermost first; ranks are numbered row by row."""

    shape: tuple[int, ...]
    dim_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dim_names) or len(set(self.dim_names)) != len(self.dim_names):
            raise PlacementError(
                f"mesh {self.shape} needs {len(self.shape)} different axis names, got {self.dim_names}"
            )
        if any(size < 1 for size in self.shape):
            raise PlacementError(f"mesh {self.shape}: every axis needs at least one rank")

    @property
    def size(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


def dims_mapping(placements: Sequence[Placement], ndim: int) -> tuple[tuple[int, ...], ...]:
    """Per tensor dim the mesh axes that shard it, outermost first; () is Paddle's −1, not sharded."""
    mapping: list[tuple[int, ...]] = [()] * ndim
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            if not isinstance(placement.dim, int) or not 0 <= placement.dim < ndim:
                raise PlacementError(f"{placement}: a tensor of {ndim} dims has dims 0 to {ndim - 1}")
            mapping[placement.dim] = (*mapping[placement.dim], axis)
    return tuple(mapping)


def placements_of(
    mapping: Sequence[Sequence[int]], partial: Mapping[int, str], mesh_ndim: int
) -> tuple[Placement, ...]:
    """The placements of a dims_mapping and the kinds of the Partial axes."""
    found: list[Placement] = [Replicate()] * mesh_ndim
    for dim, axes in enumerate(mapping):
        for axis in axes:
            found[axis] = Shard(dim)
    for axis, kind in partial.items():
        found[axis] = Partial(kind)
    return tuple(found)


def layout_of(dims: Dims, mesh: ProcessMesh, placements: Sequence[Placement]) -> Layout:
    """The Layout of a tensor with these dim names; Shard may name its dim."""
    if len(placements) != len(mesh.shape):
        raise PlacementError(f"{len(placements)} placements for a mesh of {len(mesh.shape)} axes {mesh.dim_names}")
    at = [replace(p, dim=_position(p, dims)) if isinstance(p, Shard) else p for p in placements]
    shards = tuple(tuple(mesh.dim_names[axis] for axis in axes) for axes in dims_mapping(at, len(dims)))
    partial = tuple(name for name, p in zip(mesh.dim_names, placements, strict=True) if isinstance(p, Partial))
    return Layout(dims, shards, partial)


def _position(shard: Shard, dims: Dims) -> int:
    if isinstance(shard.dim, int):
        return shard.dim
    if shard.dim not in dims:
        raise PlacementError(f"{shard}: the tensor's dims are {', '.join(dims)}{did_you_mean(shard.dim, dims)}")
    return dims.index(shard.dim)


def reshard(
    dims: Dims, mesh: ProcessMesh, src: Sequence[Placement], dst: Sequence[Placement]
) -> tuple[Transition, ...]:
    """The collectives that lead from `src` to `dst`, axis by axis."""
    return transitions(layout_of(dims, mesh, src), layout_of(dims, mesh, dst))


def shard_tensor(
    model: Model, tensor: str, mesh: ProcessMesh, placements: Sequence[Placement], workload: Workload
) -> Model:
    """The model with one tensor of its graph marked; inference completes the rest.

    `tensor` is a dotted name of `distplan models show --graph`; the mesh's axes are tp, cp, dp or a mesh axis.
    Raises PlacementError for a name that does not exist.
    """
    dims = tensor_dims(model, workload)
    if tensor not in dims:
        raise PlacementError(f"{model.name} has no tensor '{tensor}'{did_you_mean(tensor, dims)}")
    layout = layout_of(dims[tensor], mesh, placements)
    if layout.partial:
        raise PlacementError(f"{tensor}: a mark cannot be Partial; inference finds what is")
    marks = dict.fromkeys(mesh.dim_names, str(Replicate()))
    marks |= {axis: str(Shard(dim)) for dim, axes in zip(layout.dims, layout.shards, strict=True) for axis in axes}
    marked = replace(model, placements={**model.placements, tensor: marks})
    check_marks(marked, workload)
    return marked


def tensor_dims(model: Model, workload: Workload) -> dict[str, Dims]:
    """Dims of every weight and value of the model's graph, by dotted name."""
    return dict(_tensors(segments(model, workload, True)))


def _tensors(parts: Sequence[Segment]) -> Iterator[tuple[str, Dims]]:
    for segment in parts:
        for weight in segment.weights:
            yield weight.name, weight.dims
        for op in segment.operators:
            yield op.output, op.result


def marks_of(model: Model) -> tuple[tuple[str, tuple[tuple[str, Axes], ...]], ...]:
    """The model's marks as (tensor, ((dim, axes), …)) in the form that a Structure has; dim '' = replicated."""
    return tuple(
        (
            tensor,
            tuple(
                (mark[len("Shard(") : -1] if mark.startswith("Shard(") else "", AXES[axis])
                for axis, mark in marks.items()
            ),
        )
        for tensor, marks in model.placements.items()
    )


def check_marks(model: Model, workload: Workload) -> None:
    """PlacementError where a mark names a tensor, an axis or a dim that does not exist, or is no placement."""
    if not model.placements:
        return
    dims = tensor_dims(model, workload)
    for tensor, marks in model.placements.items():
        if tensor not in dims:
            raise PlacementError(f"placements: {model.name} has no tensor '{tensor}'{did_you_mean(tensor, dims)}")
        for axis, mark in marks.items():
            if axis not in AXES:
                raise PlacementError(f"placements: {tensor}: no mesh axis '{axis}'{did_you_mean(axis, AXES)}")
            if mark in ("Replicate()", "Replicate"):
                continue
            if not (mark.startswith("Shard(") and mark.endswith(")")):
                raise PlacementError(f"placements: {tensor}: {axis}: '{mark}' is neither Shard(dim) nor Replicate()")
            _position(Shard(mark[len("Shard(") : -1]), dims[tensor])
