"""Where a tensor lives on the mesh: for each dim the mesh axes that shard it, and what is still Partial.

The mesh has two views of the same ranks. Dense: pp, dp_replicate, dp_shard, cp, tp. Expert: pp, edp,
ep, etp, with edp·ep·etp = dp·cp·tp. tp and cp are each two axes: K and V are sharded on the `_kv` part
and replicated on the `_rep` part where there are fewer K/V heads than ranks (design.md, "Mesh");
elsewhere `_rep` has degree 1 and costs nothing by its own formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TP = ("tp_kv", "tp_rep")
CP = ("cp_kv", "cp_rep")
DATA = ("dp_replicate", "dp_shard")
EXPERT = ("edp", "ep", "etp")
MESH_AXES = ("pp", *DATA, *CP, *TP, *EXPERT)
WEIGHT_AXES = (*TP, "ep", "etp")
"""axes on which weights are sharded where they are used: there an activation gives way"""

Dims = tuple[str, ...]
Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """`shards[i]` are the axes that shard `dims[i]`, outermost first; `partial` the axes to be summed."""

    dims: Dims
    shards: tuple[Axes, ...]
    partial: Axes = ()

    def axes_of(self, dim: str) -> Axes:
        return self.shards[self.dims.index(dim)]

    @property
    def sharded(self) -> Axes:
        return tuple(axis for axes in self.shards for axis in axes)

    def whole(self) -> Layout:
        """The same shards with nothing Partial."""
        return Layout(self.dims, self.shards)

    def renamed(self, dims: Dims) -> Layout:
        """The same placement read under other dim names (k's `seq` is attention's `kv_seq`)."""
        return Layout(dims, self.shards, self.partial)

    def __str__(self) -> str:
        inside = ", ".join(
            dim + (f"_{join_axes(axes)}" if axes else "") for dim, axes in zip(self.dims, self.shards, strict=True)
        )
        return f"[{inside}]" + (f"{{U_{join_axes(self.partial)}}}" if self.partial else "")


def placed(dims: Dims, by_dim: Mapping[str, Axes] | None = None, partial: Axes = ()) -> Layout:
    """A layout of `dims` whose shards are named: placed(("seq", "hidden"), {"seq": CP})."""
    by_dim = by_dim or {}
    return Layout(dims, tuple(by_dim.get(dim, ()) for dim in dims), partial)


def ordered(axes: Iterable[str]) -> Axes:
    """Axes in mesh order, each once; names that are no mesh axes of ours follow in the order given."""
    chosen = dict.fromkeys(axes)
    known = tuple(axis for axis in MESH_AXES if axis in chosen)
    return known + tuple(axis for axis in chosen if axis not in MESH_AXES)


def join_axes(axes: Iterable[str]) -> str:
    """The name that people use: tp for its two parts, dp for both data axes."""
    left = list(ordered(axes))
    words = []
    for name, parts in (("dp", DATA), ("cp", CP), ("tp", TP)):
        if all(part in left for part in parts):
            words.append((MESH_AXES.index(parts[0]), name))
            left = [axis for axis in left if axis not in parts]
    words += [(MESH_AXES.index(axis) if axis in MESH_AXES else len(MESH_AXES), axis) for axis in left]
    return "+".join(name for _, name in sorted(words))
