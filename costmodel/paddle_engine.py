"""The generic SPMD rule: letters, one merge, letters read back (keys: see paddle_rules.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distplan.costmodel import paddle_merge
from distplan.costmodel.merge import WHOLE, contracted, read
from distplan.costmodel.paddle_attr import (
    Answer,
    Argument,
    Axes,
    DistAttr,
    DistTensor,
    Inference,
    Mapping2d,
    RuleRefusedError,
    flat,
    plain,
)
from distplan.costmodel.paddle_derived import derive
from distplan.costmodel.paddle_notation import DROPPED, Attributes, Letters, letters

Spec = Mapping[str, Any]

CO_SHARDED = ("divisible", "copy", "matmul", "follow")
"""Merges that see all axes of a co-sharded dim; the others see the widest one."""


def seen(spec: Spec, mesh: Sequence[int], arguments: Sequence[Argument]) -> Sequence[Argument]:
    """The arguments as the rule sees them: of a co-sharded dim one axis, unless it knows of co-sharding."""
    if spec.get("co_shards") or spec.get("merge") in CO_SHARDED:
        return arguments
    return [plain(argument, mesh) for argument in arguments]


def _variant(spec: Spec, attributes: Attributes) -> Spec:
    """`when` and `unless`: what an attribute that is true, or is not, changes in the rule."""
    changed = dict(spec)
    for key, wanted in (("when", True), ("unless", False)):
        for name, changes in spec.get(key, {}).items():
            if bool(attributes.get(name)) is wanted:
                changed.update(changes)
    return changed


def _prepared(spec: Spec, inputs: Sequence[Argument], attributes: Attributes) -> tuple[Spec, Attributes]:
    attributes = {**attributes, **derive(spec.get("derive", {}), flat(inputs), attributes)}
    return _variant(spec, attributes), attributes


def _expand(templates: Sequence[str | Sequence[str]], arguments: Sequence[Argument]) -> list[str]:
    """One template per tensor."""
    expanded: list[str] = []
    for template, argument in zip(templates, arguments, strict=False):
        if isinstance(template, str):
            expanded.append(template)
        else:
            expanded.extend(list(template) * len(flat([argument])))
    return expanded


def _notations(
    spec: Spec, inputs: Sequence[Argument], outs: Sequence[str], out_ranks: Sequence[int | None], attributes: Attributes
) -> tuple[list[Letters], list[Letters], list[Letters]]:
    """Letters of the inputs as merged, of the inputs as read, and of the outputs."""
    tensors = flat(inputs)
    count = len(tensors)
    if count != len(_expand(spec["in"], inputs)):
        raise RuleRefusedError(f"the rule has {len(spec['in'])} inputs, {count} are given")
    ranks: list[int | None] = [None if t.shape is None else t.ndim for t in tensors]
    into = spec.get("into", spec["in"])
    templates = [*_expand(spec["in"], inputs), *_expand(into, inputs), *outs]
    spelt = letters(templates, [*ranks, *ranks, *out_ranks], attributes, spec.get("keep", "keep_dim"))
    for name, index in spec.get("swap", {}).items():
        if attributes.get(name):
            for at in (index, index + count):
                spelt[at] = _swapped(spelt[at])
    broadcast = spec.get("broadcast", range(count))
    sources = [_ones(t, s) if i in broadcast else s for i, (t, s) in enumerate(zip(tensors, spelt, strict=False))]
    both = list(zip(tensors, spelt[count:], strict=False))
    targets = [_ones(t, s) if i in broadcast else s for i, (t, s) in enumerate(both)]
    return sources, targets, [_all_ones(s, sources) for s in spelt[2 * count :]]


def _swapped(spelt: Letters) -> Letters:
    if len(spelt) < 2:
        raise RuleRefusedError("a vector cannot be transposed")
    return (*spelt[:-2], spelt[-1], spelt[-2])


def _ones(tensor: DistTensor, spelt: Letters) -> Letters:
    """A broadcast dim of size 1 reads as not sharded."""
    if tensor.shape is None or not any(letter.startswith(".") for letter in spelt):
        return spelt
    pairs = zip(spelt, tensor.shape, strict=True)
    return tuple(WHOLE if letter.startswith(".") and size == 1 else letter for letter, size in pairs)


def _all_ones(spelt: Letters, sources: Sequence[Letters]) -> Letters:
    """A dim in which every input is broadcast is not sharded in the output either."""
    used = {letter for source in sources for letter in source}
    return tuple(WHOLE if letter.startswith(".") and letter not in used else letter for letter in spelt)


def masked(spelt: Letters, mapping: Mapping2d) -> Mapping2d:
    return tuple(() if letter == DROPPED else axes for letter, axes in zip(spelt, mapping, strict=True))


def _merge(
    spec: Spec, mesh: Sequence[int], tensors: Sequence[DistTensor], notation: Sequence[Letters]
) -> dict[str, Axes]:
    operands = []
    sizes: dict[str, int] = {}
    name = spec.get("merge", "single")
    for index in spec.get("from", range(len(tensors))):
        tensor, spelt = tensors[index], notation[index]
        if tensor.shape is None:
            continue
        operands.append((spelt, masked(spelt, tensor.attr.dims_mapping)))
        for letter, size in zip(spelt, tensor.shape, strict=True):
            known = sizes.setdefault(letter, size)
            unequal = known != size and 1 not in (known, size) and letter != DROPPED
            if unequal and name in ("matmul", "divisible", "follow"):
                raise RuleRefusedError(f"dim {letter} has size {known} in one operand and {size} in another")
            sizes[letter] = max(known, size)
    if name == "matmul":
        return paddle_merge.matmul(operands, sizes, mesh)
    if name in ("divisible", "follow"):
        return (paddle_merge.follow if name == "follow" else paddle_merge.divisible)(operands, sizes, mesh)
    if name in ("copy", "copy_single"):
        return {letter: axes for spelt, mapping in operands for letter, axes in zip(spelt, mapping, strict=True)}
    return paddle_merge.single(operands, strict=name == "strict")


def answered(mapping: Mapping2d, partial: Mapping[int, str] | None = None) -> DistAttr:
    used = {axis for axes in mapping for axis in axes} & set(partial or {})
    if used:
        raise RuleRefusedError(f"mesh axes {sorted(used)} would be sharded and partial at once")
    return DistAttr(dims_mapping=mapping, partial=dict(partial or {}))


def forward(spec: Spec, mesh: Sequence[int], inputs: Sequence[Argument], attributes: Attributes) -> Inference:
    spec, attributes = _prepared(spec, inputs, attributes)
    original = flat(inputs)
    inputs = seen(spec, mesh, inputs)
    tensors = flat(inputs)
    as_list = len(spec["out"]) == 1 and not isinstance(spec["out"][0], str)
    outs = spec["out"][0] if as_list else spec["out"]
    ranks_of: Mapping[int, int] = spec.get("ranks_of", {})
    ranks = [tensors[ranks_of[i]].ndim if i in ranks_of else None for i in range(len(outs))]
    sources, targets, spelt = _notations(spec, inputs, outs, ranks, attributes)
    spelt = [_ones(tensors[ranks_of[i]], x) if i in ranks_of else x for i, x in enumerate(spelt)]
    merged = _merge(spec, mesh, tensors, sources)
    results = [_output(spec, index, letters_, merged, tensors) for index, letters_ in enumerate(spelt)]
    if "repeat" in spec:
        results = results * _count(attributes[spec["repeat"]])
    answers = [_input(spec, i, tensors[i], sources[i], targets[i], merged) for i in range(len(tensors))]
    for index in spec.get("source", ()):
        partial = original[index].attr.partial if index in _passing(spec) else {}
        answers[index] = DistAttr(dims_mapping=original[index].attr.dims_mapping, partial=partial)
    for index, output in spec.get("partial_as", {}).items():
        answers[index] = answered(answers[index].dims_mapping, results[output].partial)
    return Inference(inputs=regroup(answers, inputs), outputs=(tuple(results),) if as_list else tuple(results))


def _passing(spec: Spec) -> set[int]:
    """Inputs that keep their partial status."""
    return {*spec.get("through", {}).values(), *spec.get("keeps_partial", ())}


def _count(value: object) -> int:
    return value if isinstance(value, int) else len(value) if isinstance(value, (list, tuple)) else 1


def _input(
    spec: Spec, index: int, tensor: DistTensor, source: Letters, target: Letters, merged: Mapping[str, Axes]
) -> DistAttr:
    if tensor.shape is None:
        return tensor.attr
    partial = dict(tensor.attr.partial) if index in _passing(spec) else {}
    if index in spec.get("verbatim", ()):
        return DistAttr(dims_mapping=masked(source, tensor.attr.dims_mapping), partial=partial)
    if index in spec.get("ones_whole", ()):
        pairs = zip(target, tensor.shape, strict=True)
        target = tuple(WHOLE if size == 1 else letter for letter, size in pairs)
    return DistAttr(dims_mapping=read(target, merged), partial=partial)


def _output(
    spec: Spec, index: int, spelt: Letters, merged: Mapping[str, Axes], tensors: Sequence[DistTensor]
) -> DistAttr:
    kind = spec.get("partial", {}).get(index)
    partial = {axis: kind for axis in contracted(spelt, merged)} if kind else {}
    through: Mapping[int, int] = spec.get("through", {})
    if index in through:
        return DistAttr(dims_mapping=read(spelt, merged), partial=dict(tensors[through[index]].attr.partial))
    already: Mapping[int, int] = spec.get("adds_to", {})
    if index in already:
        stated = tensors[already[index]].attr.partial
        if set(stated) & set(partial):
            raise RuleRefusedError("a mesh axis on which the output is partial is partial in the input already")
        partial = {**stated, **partial}
    like: Mapping[int, int] = spec.get("out_like", {})
    if index in like:
        return answered(tensors[like[index]].attr.dims_mapping, partial)
    return answered(read(spelt, merged), partial)


def regroup(answers: Sequence[DistAttr], arguments: Sequence[Argument]) -> tuple[Answer, ...]:
    """Answers per tensor as answers per argument."""
    grouped: list[Answer] = []
    remaining = iter(answers)
    for argument in arguments:
        if isinstance(argument, DistTensor):
            grouped.append(next(remaining))
        else:
            grouped.append(tuple(next(remaining) for _ in argument))
    return tuple(grouped)


def reverse(
    spec: Spec, mesh: Sequence[int], inputs: Sequence[Argument], outputs: Sequence[Argument], attributes: Attributes
) -> Inference:
    spec, attributes = _prepared(spec, inputs, attributes)
    tensors, given = flat(inputs), flat(outputs if spec.get("given") == "whole" else seen(spec, mesh, outputs))
    ranks: list[int | None] = [t.ndim for t in given]
    templates = [*_expand(spec["out"], outputs), *_expand(spec.get("out_into", spec["out"]), outputs)]
    _, targets, both = _notations(spec, inputs, templates, [*ranks, *ranks], attributes)
    spelt, read_as = both[: len(given)], both[len(given) :]
    merged = _merge(spec, mesh, flat(seen(spec, mesh, outputs)), spelt)
    plain_spec = {"ones_whole": spec.get("ones_whole", ())}
    answers = [_input(plain_spec, i, t, (), targets[i], merged) for i, t in enumerate(tensors)]
    results = [_given(spec, t, x, y, merged) for t, x, y in zip(given, spelt, read_as, strict=True)]
    flat_lists = spec.get("flat_lists")
    return Inference(
        inputs=tuple(answers) if flat_lists else regroup(answers, inputs),
        outputs=tuple(results) if flat_lists else regroup(results, outputs),
    )


def _given(spec: Spec, tensor: DistTensor, source: Letters, target: Letters, merged: Mapping[str, Axes]) -> DistAttr:
    """An output of a reverse rule: as merged, or as it was given, without or with what is due on it."""
    kind = spec.get("given")
    if kind == "whole":
        return tensor.attr
    mapping = masked(source, tensor.attr.dims_mapping) if kind == "masked" else read(target, merged)
    return DistAttr(dims_mapping=mapping, partial=dict(tensor.attr.partial) if spec.get("outputs_keep_partial") else {})
