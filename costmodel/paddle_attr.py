"""Placements as Paddle's semi-automatic parallel states them, over a concrete mesh and shape.

`dims_mapping[i]` holds the mesh axes (indices into the mesh's shape) that shard tensor dim i, major
to minor; `partial` maps a mesh axis to the kind of reduction that is still due on it.

>>> attr([0, -1, [2, 1]])
DistAttr(dims_mapping=((0,), (), (2, 1)), partial={})
>>> as_integers(attr([0, -1, [2, 1]]))
[0, -1, [2, 1]]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distplan.hardware.errors import DistplanError

Axes = tuple[int, ...]
Mapping2d = tuple[Axes, ...]


class RuleRefusedError(DistplanError):
    """The rule has no answer for these placements; Paddle raises there too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistAttr:
    dims_mapping: Mapping2d
    partial: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistTensor:
    """A tensor with its placement. `shape` is None for an optional input that is absent."""

    shape: tuple[int, ...] | None
    attr: DistAttr

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.shape or ()

    @property
    def ndim(self) -> int:
        return len(self.sizes)


Argument = DistTensor | tuple[DistTensor, ...]
"""One input or output of an operator; a tuple is one list argument."""

Answer = DistAttr | tuple[DistAttr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """What the inputs have to be resharded to, and what the outputs are."""

    inputs: tuple[Answer, ...]
    outputs: tuple[Answer, ...]


def attr(dims_mapping: Iterable[int | Sequence[int]], partial: Mapping[int, str] | None = None) -> DistAttr:
    axes = ((d,) if isinstance(d, int) else tuple(d) for d in dims_mapping)
    return DistAttr(dims_mapping=tuple(() if a == (-1,) else a for a in axes), partial=dict(partial or {}))


def as_integers(of: DistAttr) -> list[int | list[int]]:
    """The integer list of the documents: -1 = not sharded, a list = co-shard."""
    return [-1 if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in of.dims_mapping]


def tensor(shape: Sequence[int], dims_mapping: Iterable[int | Sequence[int]]) -> DistTensor:
    return DistTensor(shape=tuple(shape), attr=attr(dims_mapping))


ABSENT = DistTensor(shape=None, attr=DistAttr(dims_mapping=()))


def single_axis(mapping: Mapping2d, mesh: Sequence[int]) -> Mapping2d:
    """What a rule that knows one axis per dim sees of a co-sharded tensor: the widest, the first of equals."""
    return tuple((max(axes, key=lambda axis: mesh[axis]),) if len(axes) > 1 else axes for axes in mapping)


def plain(argument: Argument, mesh: Sequence[int]) -> Argument:
    """An argument as a rule without co-sharding sees it."""
    if isinstance(argument, tuple):
        return tuple(placed(tensor, single_axis(tensor.attr.dims_mapping, mesh)) for tensor in argument)
    return placed(argument, single_axis(argument.attr.dims_mapping, mesh))


def placed(of: DistTensor, mapping: Mapping2d) -> DistTensor:
    return replace(of, attr=replace(of.attr, dims_mapping=mapping))


def flat(arguments: Iterable[Argument]) -> list[DistTensor]:
    """Every tensor, lists opened."""
    tensors: list[DistTensor] = []
    for argument in arguments:
        tensors.extend((argument,) if isinstance(argument, DistTensor) else argument)
    return tensors
