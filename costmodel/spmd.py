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

from distplan.costmodel.layout import TP, Axes, Dims, Layout, ordered
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
        for operand, weight in zip(operands, is_weight, strict=True) if weight
        for dim, axes in zip(operand.dims, operand.shards, strict=True)
        for axis in axes if axis in TP
    }
    if by_weights:
        operands = [
            Layout(o.dims, tuple(
                tuple(a for a in axes if a not in TP or (dim, a) in by_weights)
                for dim, axes in zip(o.dims, o.shards, strict=True)
            ), o.partial)
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
        preferred = [dim for dim in rivals if (axis in TP) in holders.get((dim, axis), [])]
        return (preferred or list(rivals))[0]

    return merge(terms, combine=co_shard, choose=stays)


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
    """Same letters, same place. A sum of equal Partials stays Partial if `linear`; else all are reduced."""
    equal = linear and all(o.partial == operands[0].partial for o in operands)
    partial = operands[0].partial if equal else ()
    settled = [o for o in operands if not o.partial] or list(operands)
    letters = merge_letters(settled, [False] * len(settled), whole)
    for operand in operands:
        for dim in operand.dims:
            letters.setdefault(dim, ())
    inputs = tuple(Layout(o.dims, tuple(letters[dim] for dim in o.dims), partial) for o in operands)
    return Inference(inputs, Layout(result, tuple(letters.get(dim, ()) for dim in result), partial), letters)


def reshard(src: Layout, dst: Layout) -> tuple[Transition, ...]:
    """The transitions from `src` to `dst`, same dims; axes that make the same step are one group.

    tp never joins another axis in a group: no runtime has such a process group. Where several axes
    leave one dim the inner ones leave first, and they arrive outer first, so that a shard stays one
    contiguous block.
    Raises SpmdError for a target that is Partial where the source is not.
    """
    missing = [axis for axis in dst.partial if axis not in src.partial]
    if missing:
        raise SpmdError(f"no transition from {src} to {dst}: {', '.join(missing)} would become Partial")
    steps: dict[tuple[str, str, str, bool], list[str]] = {}
    target = {axis: dim for dim, axes in zip(dst.dims, dst.shards, strict=True) for axis in axes}
    source = {axis: dim for dim, axes in zip(src.dims, src.shards, strict=True) for axis in axes}
    for axis in ordered([*source, *target, *src.partial]):
        here, there = source.get(axis), target.get(axis)
        if axis in src.partial:
            if axis in dst.partial:
                continue
            key = ("reduce_scatter", there, "") if there else ("all_reduce", "", "")
        elif here == there:
            continue
        elif here and there:
            key = ("all_to_all", here, there)
        elif here:
            key = ("all_gather", here, "")
        else:
            key = ("slice", str(there), "")
        steps.setdefault((key[0], key[1] or "", key[2], axis in TP), []).append(axis)
    order = ("slice", "all_gather", "all_to_all", "reduce_scatter", "all_reduce")
    losing = {to_dim for kind, _, to_dim, _ in steps if kind == "all_to_all"}
    inner_first = len(losing) > 1
    done: list[Transition] = []
    now = src
    ranked = sorted(enumerate(steps.items()), key=lambda item: (
        order.index(item[1][0][0]), -item[0] if inner_first and item[1][0][0] == "all_to_all" else item[0]
    ))
    for _, ((kind, dim, to_dim, _), axes) in ranked:
        now = _after(now, kind, tuple(axes), dim, to_dim)
        done.append(Transition(kind, tuple(axes), dim, to_dim, now))
    return tuple(done)


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
