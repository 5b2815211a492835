"""The `ideal` dialect of SPMD inference: which placements an operator needs, and what it gives.

One algorithm for every einsum: merge the operands' shardings letter by letter; an output letter
keeps its axes, an axis on a contracted letter leaves the output Partial. Where two letters want one
axis, the weight keeps tp and the activation keeps the data axes (design.md, "SPMD"). Other kinds
are einsums plus a set of dims that must be whole. A kind without a rule is an error, never free.

Sizes are symbolic here: every shard divides or is padded, and divisibility is a constraint of the
search, not of inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from distplan.costmodel.layout import TP, WEIGHT_AXES, Axes, Dims, Layout, ordered
from distplan.costmodel.merge import co_shard, merge
from distplan.hardware.errors import DistplanError


class SpmdError(DistplanError):
    """An operator kind has no rule, or a transition between two placements does not exist."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of a reshard: `kind` on `axes` (joined into one group) along `dim` (and `to_dim`)."""

    kind: str
    """all_gather | reduce_scatter | all_reduce | all_to_all | slice"""
    axes: Axes
    dim: str
    to_dim: str
    result: Layout


@dataclass(frozen=True, slots=True)
class Inference:
    inputs: tuple[Layout, ...]
    """what each input must be resharded to"""
    output: Layout
    letters: Mapping[str, Axes]
    """the axes that shard each dim inside the operator"""


def merge_letters(operands: Sequence[Layout], is_weight: Sequence[bool], whole: Iterable[str]) -> dict[str, Axes]:
    """Axes of each letter over all operands; each axis goes to one letter only.

    `whole` letters are never sharded. Priority where an axis is wanted by two letters: on tp a
    weight's letter wins, on the other axes an activation's; then the first operand's. tp is one
    group to a runtime: a weight that is sharded on a part of it takes all of it from other letters.
    """
    must_be_whole = set(whole)
    by_weights = {
        (dim, axis)
        for operand, weight in zip(operands, is_weight, strict=True)
        if weight
        for dim, axes in zip(operand.dims, operand.shards, strict=True)
        for axis in axes
        if axis in TP
    }
    if by_weights:
        operands = [
            Layout(
                o.dims,
                tuple(
                    tuple(a for a in axes if a not in TP or (dim, a) in by_weights)
                    for dim, axes in zip(o.dims, o.shards, strict=True)
                ),
                o.partial,
            )
            for o in operands
        ]
    holders: dict[tuple[str, str], list[bool]] = {}
    terms = []
    for operand, weight in zip(operands, is_weight, strict=True):
        shards = tuple(() if d in must_be_whole else axes for d, axes in zip(operand.dims, operand.shards, strict=True))
        terms.append((operand.dims, shards))
        for dim, axes in zip(operand.dims, shards, strict=True):
            for axis in axes:
                holders.setdefault((dim, axis), []).append(weight)

    def stays(axis: str, rivals: Sequence[str]) -> str:
        preferred = [dim for dim in rivals if (axis in WEIGHT_AXES) in holders.get((dim, axis), [])]
        return (preferred or list(rivals))[0]

    return merge(terms, combine=_joined, choose=stays)


def _joined(letter: str, held: Axes, new: Axes) -> Axes:
    """Both; an order that has the axes of the other is kept, so that only the operand with fewer moves."""
    if [axis for axis in new if axis in held] == list(held):
        return new
    return co_shard(letter, held, new)


def infer_einsum(
    operands: Sequence[Layout], is_weight: Sequence[bool], result: Dims, whole: Iterable[str] = ()
) -> Inference:
    """Placements of a product of `operands` summed over the letters that `result` does not name.

    A Partial operand passes through (the operator is linear in it) where no other operand is
    sharded or Partial on that axis; otherwise it has to be reduced first.
    """
    letters = merge_letters(operands, is_weight, whole)
    used = {axis for axes in letters.values() for axis in axes}
    kept: list[Axes] = []
    for index, operand in enumerate(operands):
        others = {a for j, o in enumerate(operands) if j != index for a in o.partial}
        kept.append(tuple(axis for axis in operand.partial if axis not in used and axis not in others))
    inputs = tuple(
        Layout(o.dims, tuple(letters[dim] for dim in o.dims), keep) for o, keep in zip(operands, kept, strict=True)
    )
    contracted = ordered(
        [axis for dim, axes in letters.items() if dim not in result for axis in axes]
        + [axis for keep in kept for axis in keep]
    )
    output = Layout(result, tuple(letters.get(dim, ()) for dim in result), contracted)
    return Inference(inputs, output, letters)


def infer_elementwise(operands: Sequence[Layout], result: Dims, linear: bool, whole: Iterable[str] = ()) -> Inference:
    """Same letters, same place. A sum of equal Partials stays Partial if `linear`; else all are reduced.

    Operands that are to be reduced have no say in where the others' letters lie, but keep their own.
    """
    equal = linear and all(o.partial == operands[0].partial for o in operands)
    partial = operands[0].partial if equal else ()
    settled = [o for o in operands if not o.partial] or list(operands)
    letters = merge_letters(settled, [False] * len(settled), whole)
    used = {axis for axes in letters.values() for axis in axes}
    for operand in operands:
        for dim, axes in zip(operand.dims, operand.shards, strict=True):
            letters.setdefault(dim, tuple(axis for axis in axes if axis not in used))
    inputs = tuple(Layout(o.dims, tuple(letters[dim] for dim in o.dims), partial) for o in operands)
    return Inference(inputs, Layout(result, tuple(letters.get(dim, ()) for dim in result), partial), letters)


@lru_cache(maxsize=65536)
def reshard(src: Layout, dst: Layout) -> tuple[Transition, ...]:
    """The transitions from `src` to `dst`, same dims; axes that make the same step are one group.

    tp never joins another axis in a group: no runtime has such a process group. A shard is always one
    contiguous block, the first axis of a dim outermost: axes leave a dim inner first and arrive outer
    first. Where one step per axis cannot keep that order, what is in the way is gathered.
    Raises SpmdError for a target that is Partial where the source is not.
    """
    missing = [axis for axis in dst.partial if axis not in src.partial]
    if missing:
        raise SpmdError(f"no transition from {src} to {dst}: {', '.join(missing)} would become Partial")
    direct = _axis_by_axis(src, dst)
    return direct if _keeps_blocks(src, direct, dst) else _dim_by_dim(src, dst)


def _axis_by_axis(src: Layout, dst: Layout) -> tuple[Transition, ...]:
    """Every axis takes the one step that it needs."""
    left = _steps(src, dst)
    done: list[Transition] = []
    now = src
    while left:
        kind, dim, to_dim, axes = next((step for step in left if _may_go(step, now, dst, left)), left[0])
        left.remove((kind, dim, to_dim, axes))
        now = _after(now, kind, axes, dim, to_dim)
        done.append(Transition(kind, axes, dim, to_dim, now))
    return tuple(done)


Step = tuple[str, str, str, Axes]
_ORDER = ("slice", "reduce_scatter", "all_to_all", "all_gather", "all_reduce")
"""what makes a tensor smaller comes before what makes it larger"""


def _steps(src: Layout, dst: Layout) -> list[Step]:
    """(kind, dim, to_dim, axes) in order of preference."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    target = {axis: dim for dim, axes in zip(dst.dims, dst.shards, strict=True) for axis in axes}
    source = {axis: dim for dim, axes in zip(src.dims, src.shards, strict=True) for axis in axes}
    for axis in dict.fromkeys([*source, *target, *src.partial]):
        here, there = source.get(axis, ""), target.get(axis, "")
        if axis in src.partial:
            if axis in dst.partial:
                continue
            step = ("reduce_scatter", there, "") if there else ("all_reduce", "", "")
        elif here == there:
            continue
        elif here and there:
            step = ("all_to_all", here, there)
        else:
            step = ("all_gather", here, "") if here else ("slice", there, "")
        found.setdefault((*step, _family(axis)), []).append(axis)
    steps = [(kind, dim, to_dim, ordered(axes)) for (kind, dim, to_dim, _), axes in found.items()]
    return sorted(steps, key=lambda step: _ORDER.index(step[0]))


def _family(axis: str) -> str:
    """Axes of one family may share a process group."""
    return "tp" if axis in TP else axis if axis in WEIGHT_AXES or axis == "edp" else "data"


def _may_go(step: Step, now: Layout, dst: Layout, left: Sequence[Step]) -> bool:
    """Inner axes leave a dim first and outer ones arrive first, so that a shard stays one block."""
    kind, dim, to_dim, axes = step
    others = {axis for other in left if other != step for axis in other[3]}
    if kind in ("all_gather", "all_to_all"):
        held = now.axes_of(dim)
        inner = held[max(held.index(axis) for axis in axes) + 1 :]
        if any(axis in others for axis in inner):
            return False
    gains = {"slice": dim, "reduce_scatter": dim, "all_to_all": to_dim}.get(kind, "")
    if gains:
        wanted = dst.axes_of(gains)
        outer = wanted[: min(wanted.index(axis) for axis in axes)]
        return all(axis in now.axes_of(gains) for axis in outer)
    return True


def _after(layout: Layout, kind: str, axes: Axes, dim: str, to_dim: str) -> Layout:
    gains = {"slice": dim, "reduce_scatter": dim, "all_to_all": to_dim}.get(kind, "")
    loses = {"all_gather": dim, "all_to_all": dim}.get(kind, "")
    shards = []
    for name, old in zip(layout.dims, layout.shards, strict=True):
        new = tuple(axis for axis in old if not (name == loses and axis in axes))
        shards.append((*new, *axes) if name == gains else new)
    partial = layout.partial
    if kind in ("reduce_scatter", "all_reduce"):
        partial = tuple(axis for axis in partial if axis not in axes)
    return Layout(layout.dims, tuple(shards), partial)


def _keeps_blocks(src: Layout, steps: Sequence[Transition], dst: Layout) -> bool:
    """Whether only innermost axes leave a dim, and the last step ends in `dst`."""
    now = src
    for step in steps:
        if step.kind in ("all_gather", "all_to_all") and now.axes_of(step.dim)[-len(step.axes) :] != step.axes:
            return False
        now = step.result
    return now.shards == dst.shards and set(now.partial) == set(dst.partial)


def _dim_by_dim(src: Layout, dst: Layout) -> tuple[Transition, ...]:
    """What a dim has beyond the axes that it keeps is gathered; then the new axes arrive, outer first."""
    now = src
    done: list[Transition] = []

    def step(kind: str, axes: Axes, dim: str) -> None:
        nonlocal now
        now = _after(now, kind, axes, dim, "")
        done.append(Transition(kind, axes, dim, "", now))

    kept: dict[str, int] = {}
    for dim, old, new in zip(src.dims, src.shards, dst.shards, strict=True):
        kept[dim] = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        for run in reversed(_runs((axis, _family(axis)) for axis in old[kept[dim] :])):
            step("all_gather", run, dim)
    for dim, new in zip(dst.dims, dst.shards, strict=True):
        for run in _runs((axis, (_family(axis), axis in src.partial)) for axis in new[kept[dim] :]):
            step("reduce_scatter" if run[0] in src.partial else "slice", run, dim)
    left = ordered(axis for axis in now.partial if axis not in dst.partial)
    for run in _runs((axis, _family(axis)) for axis in left):
        step("all_reduce", run, "")
    return tuple(done)


def _runs(keyed: Iterable[tuple[str, object]]) -> list[Axes]:
    """Neighbours with an equal key, together."""
    runs: list[tuple[object, list[str]]] = []
    for axis, key in keyed:
        if runs and runs[-1][0] == key:
            runs[-1][1].append(axis)
        else:
            runs.append((key, [axis]))
    return [tuple(axes) for _, axes in runs]
