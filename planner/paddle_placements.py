"""Where the weights of a model lie on a Paddle ProcessMesh: placements of the tensors as Paddle stores them.

The graph's weights have one dim per meaning (kv_heads, group, head_dim); a Linear of Paddle is a matrix
[in, out]. Neighbouring dims with the same role in their einsum are one dim of the stored tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from distplan.costmodel.graph import segments
from distplan.costmodel.operators import TP_DIMS, Segment, Weight
from distplan.planner.launcher import Job

Placed = tuple[str, ...]
"""per axis of a mesh: 'Replicate' or 'Shard(i)'"""
EXPERT_AXES = ("edp", "ep", "etp")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlaces:
    """weight -> its placements on the dense mesh of a stage, or (experts) on the expert mesh."""

    dense: Mapping[str, Placed]
    experts: Mapping[str, Placed]
    whole: tuple[str, ...]
    """weights that tp does not divide, and that stay whole on it"""


def weight_places(job: Job, axes: tuple[str, ...]) -> WeightPlaces:
    """Placements of every weight of the graph. `axes`: of the dense mesh, without pp."""
    dense: dict[str, Placed] = {}
    experts: dict[str, Placed] = {}
    whole: list[str] = []
    for segment in segments(job.model, job.workload, True):
        for weight in segment.weights:
            if weight.name in segment.shares:
                continue
            groups = _groups(segment, weight)
            mesh = EXPERT_AXES if "experts" in weight.dims else axes
            chosen = tuple(_placement(axis, groups, segment, weight, job) for axis in mesh)
            (experts if "experts" in weight.dims else dense)[weight.name] = chosen
            wanted = {name for dim in weight.dims for name in _by_dim(job, weight).get(dim, ())}
            if job.strategy.tp > 1 and wanted & {"tp", "tp_kv", "tp_rep"} and chosen[-1] == "Replicate":
                whole.append(weight.name)
    return WeightPlaces(dense=dense, experts=experts, whole=tuple(whole))


def _by_dim(job: Job, weight: Weight) -> Mapping[str, tuple[str, ...]]:
    """dim -> mesh axes: the graph's own, or what the model's `placements` say of this weight."""
    said = job.model.placements.get(weight.name)
    if said is None:
        return TP_DIMS
    return {text[6:-1]: (axis,) for axis, text in said.items() if text.startswith("Shard(")}


def _groups(segment: Segment, weight: Weight) -> list[tuple[str, ...]]:
    """The weight's dims, those of one dim of the stored tensor together."""
    reader = next((op for op in segment.operators if weight.name in op.inputs), None)
    if reader is None or reader.kind != "einsum":
        return [(dim,) for dim in weight.dims] if weight.decay else [weight.dims]
    other = next((dims for name, dims in zip(reader.inputs, reader.operands, strict=True) if name != weight.name), ())

    def role(dim: str) -> str:
        return "batch" if dim in reader.result and dim in other else "kept" if dim in reader.result else "summed"

    return [tuple(dims) for _, dims in groupby(weight.dims, key=role)]


def _placement(axis: str, groups: list[tuple[str, ...]], segment: Segment, weight: Weight, job: Job) -> str:
    by_dim = _by_dim(job, weight)
    names = {"tp", "tp_kv", "tp_rep"} if axis == "tp" else {axis}
    degree = {"tp": job.strategy.tp, "ep": job.strategy.ep, "etp": job.strategy.etp}.get(axis, 1)
    for index, dims in enumerate(groups):
        sharded = [dim for dim in dims if names & set(by_dim.get(dim, ()))]
        if not sharded:
            continue
        parts = 1.0
        for dim in sharded:
            parts *= segment.sizes[dim]
        return (
            f"Shard({index})" if dims[0] == sharded[0] and (parts % degree == 0 or "vocab" in sharded) else "Replicate"
        )
    return "Replicate"
