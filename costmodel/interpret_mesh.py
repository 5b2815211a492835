"""Simulated ranks: one array per rank, stacked along a first dim, and the collectives between them.

Rank numbers run over the mesh axes outermost first. A dim that several axes shard is cut into
contiguous blocks, the first axis of the tuple outermost. A block that a group does not divide is
padded with zeros, which is what sharded storage does (a rank may then hold padding only).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.layout import Axes, Layout
from distplan.costmodel.spmd import SpmdError, Transition

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of the axes, outermost first: (("dp_shard", 2), ("tp_kv", 2)).

    `expert` is another view of the same ranks (edp, ep, etp); a group lies in one of the views.
    """

    axes: tuple[tuple[str, int], ...]
    expert: tuple[tuple[str, int], ...] = ()

    @property
    def ranks(self) -> int:
        count = 1
        for _, degree in self.axes:
            count *= degree
        return count

    def degree(self, axes: Axes) -> int:
        """Ranks in a group that spans `axes`; an axis that the mesh does not have has degree 1."""
        degrees = dict(self.axes) | dict(self.expert)
        count = 1
        for axis in axes:
            count *= degrees.get(axis, 1)
        return count

    def groups(self, axes: Axes) -> Ints:
        """[groups, members]: ranks that differ on `axes` only, in the order of the tuple, outermost first.

        Raises SpmdError for axes of both views.
        """
        return _groups(self, axes)

    def position(self, axes: Axes) -> Ints:
        """[ranks]: the place of every rank in its group."""
        return _position(self, axes)


@lru_cache(maxsize=4096)
def _position(mesh: Mesh, axes: Axes) -> Ints:
    groups = mesh.groups(axes)
    places = np.empty(mesh.ranks, dtype=np.int64)
    places[groups] = np.arange(groups.shape[1])[None, :]
    return places


@lru_cache(maxsize=4096)
def _groups(mesh: Mesh, axes: Axes) -> Ints:
    experts = {name for name, _ in mesh.expert}
    view = mesh.expert if experts.intersection(axes) else mesh.axes
    names = [name for name, _ in view]
    group = [names.index(axis) for axis in axes if axis in names]
    if view is mesh.expert and len(group) < len([axis for axis in axes if mesh.degree((axis,)) > 1]):
        raise SpmdError(f"{', '.join(axes)} are axes of both views of the ranks and span no group")
    ids = np.arange(mesh.ranks, dtype=np.int64).reshape([degree for _, degree in view])
    rest = [at for at in range(len(names)) if at not in group]
    return ids.transpose(rest + group).reshape(-1, mesh.degree(axes))


def all_gather(stack: Array, mesh: Mesh, axes: Axes, dim: int) -> Array:
    """Blocks of the group, concatenated along local dim number `dim`, on every member."""
    groups = mesh.groups(axes)
    parts = np.moveaxis(stack[groups], 1, dim + 1)
    shape = parts.shape
    whole = parts.reshape(*shape[: dim + 1], shape[dim + 1] * shape[dim + 2], *shape[dim + 3 :])
    return _back(np.broadcast_to(whole[:, None], (*groups.shape, *whole.shape[1:])), groups)


def all_reduce(stack: Array, mesh: Mesh, axes: Axes, kind: str = "sum") -> Array:
    groups = mesh.groups(axes)
    members = stack[groups]
    total = members.max(axis=1) if kind == "max" else members.sum(axis=1)
    return _back(np.broadcast_to(total[:, None], members.shape), groups)


def reduce_scatter(stack: Array, mesh: Mesh, axes: Axes, dim: int) -> Array:
    return take_block(all_reduce(stack, mesh, axes), mesh, axes, dim)


def take_block(stack: Array, mesh: Mesh, axes: Axes, dim: int) -> Array:
    """Every rank keeps its own block of local dim `dim`; nothing is sent."""
    blocks = _blocks(stack, mesh.degree(axes), dim)
    chosen: Array = blocks[np.arange(mesh.ranks), mesh.position(axes)]
    return chosen


def all_to_all(stack: Array, mesh: Mesh, axes: Axes, dim: int, to_dim: int) -> Array:
    """Block j of `to_dim` goes to member j, which lays what it gets one after the other along `dim`."""
    groups = mesh.groups(axes)
    sent = _blocks(stack, mesh.degree(axes), to_dim)[groups]
    received = np.moveaxis(sent.swapaxes(1, 2), 2, dim + 2)
    shape = received.shape
    joined = received.reshape(*shape[: dim + 2], shape[dim + 2] * shape[dim + 3], *shape[dim + 4 :])
    return _back(joined, groups)


def _blocks(stack: Array, count: int, dim: int) -> Array:
    """[ranks, count, …]: local dim `dim` cut into equal blocks, padded with zeros."""
    padding = -stack.shape[dim + 1] % count
    if padding:
        widths = [(0, 0)] * stack.ndim
        widths[dim + 1] = (0, padding)
        stack = np.pad(stack, widths)
    shape = stack.shape
    cut = stack.reshape(*shape[: dim + 1], count, shape[dim + 1] // count, *shape[dim + 2 :])
    return np.moveaxis(cut, dim + 1, 1)


def _back(members: Array, groups: Ints) -> Array:
    stack = np.empty((groups.size, *members.shape[2:]), dtype=members.dtype)
    stack[groups] = members
    return stack


def transit(stack: Array, layout: Layout, step: Transition, mesh: Mesh, kind: str = "sum", cut: bool = False) -> Array:
    """`step` executed on a stack in `layout`. `kind`: sum | max, what the stack is Partial in.

    `cut`: the step communicates nothing; what a rank does not have it makes up from its own block.
    """
    at = {dim: number for number, dim in enumerate(layout.dims)}
    dim, to_dim, axes = at.get(step.dim, -1), at.get(step.to_dim, -1), step.axes
    if step.kind == "slice":
        return take_block(stack, mesh, axes, dim)
    if step.kind == "all_reduce":
        return stack if cut else all_reduce(stack, mesh, axes, kind)
    if step.kind == "reduce_scatter":
        return take_block(stack, mesh, axes, dim) if cut else reduce_scatter(stack, mesh, axes, dim)
    if step.kind == "all_gather":
        return _repeated(stack, mesh, axes, dim) if cut else all_gather(stack, mesh, axes, dim)
    if step.kind == "all_to_all":
        if cut:
            return _repeated(take_block(stack, mesh, axes, to_dim), mesh, axes, dim)
        return all_to_all(stack, mesh, axes, dim, to_dim)
    raise SpmdError(f"'{step.kind}' is not a collective that can be executed")


def _repeated(stack: Array, mesh: Mesh, axes: Axes, dim: int) -> Array:
    return np.concatenate([stack] * mesh.degree(axes), axis=dim + 1)


def spread(whole: NDArray[np.generic], layout: Layout, mesh: Mesh) -> Array:
    """A tensor without ranks -> its blocks, one per rank; `layout.partial` is not looked at."""
    stack: Array = np.broadcast_to(whole[None], (mesh.ranks, *whole.shape))
    for number, axes in enumerate(layout.shards):
        if axes:
            stack = take_block(stack, mesh, axes, number)
    return stack


def starts(layout: Layout, mesh: Mesh, local: tuple[int, ...]) -> Mapping[str, Ints]:
    """For each dim, [ranks]: the index in the whole tensor of the first element of the rank's block."""
    return {dim: mesh.position(axes) * size for dim, axes, size in zip(layout.dims, layout.shards, local, strict=True)}
