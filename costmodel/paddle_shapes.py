"""Rules of shape transforms: where every output dim comes from, and which shardings survive.

An output dim comes from a group of input dims (flattened if several), of which it is the
`part`-th piece. A sharding survives on the first dim of a group and on the first piece. Forward
reshape and flatten fold the shardings of a whole group into a co-shard of its first dim.

>>> for source in sources((6, 12, 48), (72, 6, 8)):
...     print(source.dims, source.pieces, source.part)
(0, 1) (72,) 0
(2,) (6, 8) 0
(2,) (6, 8) 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distplan.costmodel.paddle_attr import (
    Argument,
    Axes,
    DistAttr,
    DistTensor,
    Inference,
    Mapping2d,
    RuleRefusedError,
    flat,
    single_axis,
)
from distplan.costmodel.paddle_engine import Spec
from distplan.costmodel.paddle_notation import Attributes

Arguments = Sequence[Argument]


@dataclass(frozen=True, slots=True)
class Source:
    dims: tuple[int, ...]
    """input dims; empty = a new dim of size 1"""
    pieces: tuple[int, ...]
    part: int


def sources(given: Sequence[int], wanted: Sequence[int]) -> list[Source]:
    """Where each dim of shape `wanted` comes from in shape `given` (of equally many elements)."""
    if math.prod(given) != math.prod(wanted):
        raise RuleRefusedError(f"{list(given)} and {list(wanted)} do not hold equally many elements")
    found: list[Source] = []
    left = right = 0
    while left < len(given) or right < len(wanted):
        start, first = left, right
        have, need = 1, 1
        if left < len(given):
            have, left = given[left], left + 1
        if right < len(wanted):
            need, right = wanted[right], right + 1
        if have == 1 and need != 1:
            right = first
            continue
        if need == 1 and have != 1:
            left = start
        while need not in (1, have):
            if have < need:
                have, left = have * given[left], left + 1
            else:
                need, right = need * wanted[right], right + 1
        pieces = tuple(wanted[first:right])
        if have == need == 1 and left > start and pieces:
            found.append(Source((start,), pieces, 0))
            continue
        dims = tuple(dim for dim in range(start, left) if given[dim] > 1)
        found += [_source(dims, pieces, part) for part in range(len(pieces))]
    return found


def _source(dims: tuple[int, ...], pieces: tuple[int, ...], part: int) -> Source:
    return Source(dims if pieces[part] > 1 else (), pieces, part)


def _folded(source: Source, shape: Sequence[int], mapping: Mapping2d, mesh: Sequence[int]) -> Axes:
    """The shardings of a group on its first dim, as far as they divide that dim and the first piece."""
    axes: Axes = ()
    for dim in source.dims:
        joined = axes + mapping[dim]
        degree = math.prod(mesh[axis] for axis in joined)
        fits = len(source.dims) == 1 or shape[source.dims[0]] % degree == 0
        if not mapping[dim] or not fits or (len(source.pieces) > 1 and source.pieces[0] % degree):
            break
        axes = joined
    return axes


def _chained(source: Source, shape: Sequence[int], mapping: Mapping2d, mesh: Sequence[int]) -> Axes:
    """The shardings of a flattened group, unchecked; of a group in pieces the first dim's, if it divides."""
    first = mapping[source.dims[0]]
    if len(source.pieces) > 1:
        return first if source.pieces[0] % math.prod(mesh[axis] for axis in first) == 0 else ()
    axes: Axes = ()
    for dim in source.dims:
        if not mapping[dim]:
            break
        axes += mapping[dim]
    return axes


def through(
    found: Sequence[Source], shape: Sequence[int], mapping: Mapping2d, mesh: Sequence[int], fold: bool
) -> tuple[Mapping2d, Mapping2d]:
    """Placements of the input as it must be and of the output."""
    survive = _folded if fold else _chained
    kept: list[Axes] = [()] * len(shape)
    out: list[Axes] = []
    for source in found:
        axes = survive(source, shape, mapping, mesh) if source.dims and source.part == 0 else ()
        out.append(axes)
        if axes:
            kept[source.dims[0]] = axes
    return tuple(kept), tuple(out)


UNKNOWN_SIZE = 256
"""Stands for a dim whose size is not known (-1) in the input, as in the real rule."""


def target_shape(shape: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """`wanted` with 0 (as the input) and one -1 (what is left) filled in."""
    filled = [shape[dim] if size == 0 and dim < len(shape) else size for dim, size in enumerate(wanted)]
    total, known = math.prod(shape), math.prod(size for size in filled if size != -1)
    if filled.count(-1) > 1:
        raise RuleRefusedError(f"target shape {list(wanted)} has more than one -1")
    if -1 in filled:
        if known <= 0 or total % (total // known or 1):
            raise RuleRefusedError(f"{total} elements do not fill the target shape {list(wanted)}")
        filled[filled.index(-1)] = total // known
    if math.prod(filled) != total:
        raise RuleRefusedError(f"{total} elements do not fill the target shape {list(wanted)}")
    return tuple(filled)


def _integers(value: object) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [value] if isinstance(value, int) else []


def flattened_shape(shape: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    start, stop = start % len(shape), stop % len(shape)
    return (*shape[:start], math.prod(shape[start : stop + 1]), *shape[stop + 1 :])


def squeezed(shape: Sequence[int], axes: Sequence[int]) -> list[Source]:
    """All dims of size 1 leave if `axes` is empty, else the named ones that are of size 1."""
    named = {axis % len(shape) for axis in axes} if axes else set(range(len(shape)))
    kept = [dim for dim, size in enumerate(shape) if size != 1 or dim not in named]
    return [Source((dim,) if shape[dim] != 1 else (), (shape[dim],), 0) for dim in kept]


def unsqueezed(shape: Sequence[int], axes: Sequence[int]) -> list[Source]:
    found = [Source((dim,) if size != 1 else (), (size,), 0) for dim, size in enumerate(shape)]
    for axis in sorted(axis if axis >= 0 else axis + len(shape) + 1 for axis in axes):
        found.insert(axis, Source((), (1,), 0))
    return found


def _wanted(kind: str, shape: Sequence[int], attributes: Attributes) -> list[Source]:
    """Sources of the outputs of reshape, flatten, squeeze and unsqueeze of a tensor of `shape`."""
    if kind == "reshape":
        return sources(shape, target_shape(shape, _integers(attributes["shape"])))
    if kind == "flatten":
        start, stop = _integers(attributes["start_axis"])[0], _integers(attributes["stop_axis"])[0]
        return sources(shape, flattened_shape(shape, start, stop))
    axes = _integers(attributes["axis"])
    return squeezed(shape, axes) if kind == "squeeze" else unsqueezed(shape, axes)


def inverted(found: Sequence[Source], shape: Sequence[int]) -> list[Source]:
    """Sources of a squeeze or unsqueeze, read from the output to the input."""
    came = {source.dims[0]: out for out, source in enumerate(found) if source.dims}
    return [Source((came[dim],) if dim in came else (), (size,), 0) for dim, size in enumerate(shape)]


def _shape_of(found: Sequence[Source]) -> tuple[int, ...]:
    return tuple(source.pieces[source.part] for source in found)


def transform(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """Forward; `kind` reshape and flatten fold shardings and pass a partial status on."""
    (x,) = flat(inputs)
    shape = tuple(UNKNOWN_SIZE if size == -1 else size for size in x.sizes)
    found = _wanted(spec["kind"], shape, attributes)
    fold = spec["kind"] in ("reshape", "flatten")
    mapping = x.attr.dims_mapping if fold else single_axis(x.attr.dims_mapping, mesh)
    kept, out = through(found, shape, mapping, mesh, fold)
    partial = dict(x.attr.partial) if fold else {}
    answer = DistAttr(dims_mapping=kept, partial=partial)
    results = [DistAttr(dims_mapping=out, partial=partial)]
    if spec.get("shape_output"):
        results.append(DistAttr(dims_mapping=((), *kept), partial=partial))
    return Inference(inputs=(answer,), outputs=tuple(results))


def transform_reverse(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """From the output's placement to the input's."""
    (x,), (out,) = flat(inputs), flat(outputs)
    kind = spec["kind"]
    if kind == "reshape":
        back = sources(out.sizes, x.sizes)
    else:
        forth = _wanted(kind, x.sizes, attributes)
        back = sources(_shape_of(forth), x.sizes) if kind == "flatten" else inverted(forth, x.sizes)
    mapping = single_axis(out.attr.dims_mapping, mesh)
    kept, placed = through(back, out.sizes, mapping, mesh, fold=False)
    passes = kind in ("reshape", "flatten")
    return Inference(
        inputs=(DistAttr(dims_mapping=placed, partial=dict(x.attr.partial) if passes else {}),),
        outputs=(DistAttr(dims_mapping=kept, partial=dict(out.attr.partial) if kind == "reshape" else {}),),
    )


def reshape_grad(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """The gradient's placement follows the forward input's, as in the forward rule."""
    x, gradient = flat(inputs)
    shaped = DistTensor(shape=x.shape, attr=x.attr)
    done = transform({"kind": "reshape"}, mesh, [shaped], (), {"shape": list(gradient.sizes)})
    return Inference(inputs=(done.inputs[0], done.outputs[0]), outputs=(done.inputs[0],))


FUNCTIONS = {"transform": transform, "transform_reverse": transform_reverse, "reshape_grad": reshape_grad}
