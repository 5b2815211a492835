"""SPMD rules of Paddle 3.3.1: `infer` runs one rule of paddle_rules.yaml on concrete placements.

A rule is a notation (paddle_notation.py), the name of a merge (paddle_merge.py) and a few quirks:

    in, out      one template per input and output; a list argument is a list of one template
    into         the templates by which inputs are read, where they differ from `in`
    from         the inputs that take part in the merge, in order of precedence (default all)
    merge        single | strict | divisible | matmul | none (no conflict is looked for)
    verbatim     inputs that keep their own sharding (dropped dims aside)
    partial      output index -> kind: the output is partial on the axes of contracted letters
    through      output index -> input index whose partial status passes to it; the input keeps it
    swap         attribute -> input index: the last two dims of that input change places if it is true
    keep         name of the attribute that keeps reduced dims
    repeat       attribute that says how many outputs a list output has
    given        (reverse) outputs are answered as they were given, not as merged
    function     a function of paddle_shapes.py or paddle_special.py, where no notation says it

Reverse rules merge the outputs and read the inputs; gradient rules are forward rules of the
gradient operator. Source of the behaviour: the answers of PaddlePaddle 3.3.1 (shared/oracle, A1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from distplan.costmodel import paddle_merge
from distplan.costmodel.merge import contracted, read
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
    last_axis,
)
from distplan.costmodel.paddle_notation import DROPPED, Attributes, Letters, letters
from distplan.costmodel.paddle_shapes import FUNCTIONS as SHAPE_FUNCTIONS
from distplan.costmodel.paddle_special import FUNCTIONS as SPECIAL_FUNCTIONS
from distplan.hardware.errors import UnknownNameError

Spec = Mapping[str, Any]
FUNCTIONS = {**SHAPE_FUNCTIONS, **SPECIAL_FUNCTIONS}


@lru_cache(maxsize=1)
def _document() -> Mapping[str, Any]:
    text = resources.files("distplan.costmodel").joinpath("paddle_rules.yaml").read_text(encoding="utf-8")
    document: Mapping[str, Any] = yaml.safe_load(text)
    return document


@lru_cache(maxsize=None)
def spec_of(rule: str, direction: str) -> Spec:
    """The data of a rule. Raises UnknownNameError where there is none."""
    rules: Mapping[str, Any] = _document()["rules"]
    name = _document()["same_as"].get(rule, rule)
    if name not in rules or direction not in rules[name]:
        raise UnknownNameError(f"{direction} SPMD rule", rule, sorted({*rules, *_document()["same_as"]}))
    spec: Spec = rules[name][direction]
    if direction == "reverse":
        spec = {**{key: rules[name]["forward"][key] for key in ("in", "out", "keep", "swap", "ones_whole") if key in rules[name]["forward"]}, **spec}
    return spec


def rule_names() -> list[str]:
    return sorted({*_document()["rules"], *_document()["same_as"]})


def rule_of_function(function: str) -> str:
    """The rule behind one of the library's C++ functions (`MatmulGradInferSpmd` -> `matmul_grad`)."""
    rule: str = _document()["functions"][function]
    return rule


def infer(
    rule: str,
    direction: str,
    mesh: Sequence[int],
    inputs: Sequence[Argument],
    *,
    outputs: Sequence[Argument] = (),
    attributes: Attributes | None = None,
) -> Inference:
    """What `inputs` must be resharded to and what the outputs are, on a mesh of that shape.

    `outputs` are the given outputs (direction reverse). Raises RuleRefusedError where Paddle refuses.
    """
    spec = spec_of(rule, direction)
    attributes = attributes or {}
    if "function" in spec:
        return FUNCTIONS[spec["function"]](spec, mesh, inputs, outputs, attributes)
    if direction == "reverse":
        return _reverse(spec, mesh, inputs, outputs, attributes)
    return _forward(spec, mesh, inputs, attributes)


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
    ins = _expand(spec["in"], inputs)
    into = _expand(spec.get("into", spec["in"]), inputs)
    ranks: list[int | None] = [None if t.shape is None else t.ndim for t in tensors]
    spelt = letters(
        [*ins, *into, *outs], [*ranks, *ranks, *out_ranks], attributes, spec.get("keep", "keep_dim")
    )
    count = len(tensors)
    for name, index in spec.get("swap", {}).items():
        if attributes.get(name):
            for at in (index, index + count):
                spelt[at] = (*spelt[at][:-2], *spelt[at][-2:][::-1])
    sources = [_broadcast(t, s) for t, s in zip(tensors, spelt[:count], strict=True)]
    targets = [_broadcast(t, s) for t, s in zip(tensors, spelt[count : 2 * count], strict=True)]
    return sources, targets, [_all_broadcast(s, sources) for s in spelt[2 * count :]]


def _broadcast(tensor: DistTensor, spelt: Letters) -> Letters:
    if tensor.shape is None or not any(letter.startswith(".") for letter in spelt):
        return spelt
    return tuple("1" if x.startswith(".") and size == 1 else x for x, size in zip(spelt, tensor.shape, strict=True))


def _all_broadcast(spelt: Letters, sources: Sequence[Letters]) -> Letters:
    """A dim in which every input is broadcast is not sharded in the output either."""
    used = {letter for source in sources for letter in source}
    return tuple("1" if x.startswith(".") and x not in used else x for x in spelt)


def _masked(spelt: Letters, mapping: Mapping2d) -> Mapping2d:
    return tuple(() if letter == DROPPED else axes for letter, axes in zip(spelt, mapping, strict=True))


def _merge(
    spec: Spec, mesh: Sequence[int], tensors: Sequence[DistTensor], notation: Sequence[Letters], chosen: Sequence[int]
) -> dict[str, Axes]:
    operands = []
    sizes: dict[str, int] = {}
    for index in chosen:
        tensor, spelt = tensors[index], notation[index]
        if tensor.shape is None:
            continue
        operands.append((spelt, _masked(spelt, tensor.attr.dims_mapping)))
        for letter, size in zip(spelt, tensor.shape, strict=True):
            known = sizes.setdefault(letter, size)
            if known != size and 1 not in (known, size) and letter not in (DROPPED, "1"):
                if spec.get("merge") in ("matmul", "divisible"):
                    raise RuleRefusedError(f"dim {letter} has size {known} in one operand and {size} in another")
            sizes[letter] = max(known, size)
    return _policy(spec.get("merge", "single"), operands, sizes, mesh)


def _policy(
    name: str, operands: Sequence[paddle_merge.Operand], sizes: Mapping[str, int], mesh: Sequence[int]
) -> dict[str, Axes]:
    if name == "matmul":
        return paddle_merge.matmul(operands, sizes, mesh)
    if name == "divisible":
        return paddle_merge.divisible(operands, sizes, mesh)
    if name == "none":
        return {x: axes for spelt, mapping in operands for x, axes in zip(spelt, last_axis(mapping), strict=True)}
    return paddle_merge.single(operands, strict=name == "strict")


def _answer(spelt: Letters, merged: Mapping[str, Axes], partial: Mapping[int, str] | None = None) -> DistAttr:
    mapping = read(spelt, merged)
    used = {axis for axes in mapping for axis in axes}
    if partial and used & set(partial):
        raise RuleRefusedError(f"mesh axes {sorted(used & set(partial))} would be sharded and partial at once")
    return DistAttr(dims_mapping=mapping, partial=dict(partial or {}))


def _forward(spec: Spec, mesh: Sequence[int], inputs: Sequence[Argument], attributes: Attributes) -> Inference:
    tensors = flat(inputs)
    outs, lists = _outputs(spec, attributes)
    sources, targets, out_letters = _notations(spec, inputs, outs, [None] * len(outs), attributes)
    chosen = [i for i in spec.get("from", range(len(tensors))) if i < len(tensors)]
    merged = _merge(spec, mesh, tensors, sources, chosen)
    through: Mapping[int, int] = spec.get("through", {})
    answers = []
    for index, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        kept = tensor.attr.partial if index in spec.get("keeps_partial", through.values()) else None
        if tensor.shape is None:
            answers.append(tensor.attr)
        elif index in spec.get("verbatim", ()):
            mapping = last_axis(_masked(sources[index], tensor.attr.dims_mapping))
            answers.append(DistAttr(dims_mapping=mapping, partial=dict(kept or {})))
        else:
            whole = {i for i, size in enumerate(tensor.shape) if size == 1 and spec.get("ones_whole")}
            spelt = tuple("1" if i in whole else x for i, x in enumerate(target))
            answers.append(_answer(spelt, merged, kept))
    results: list[DistAttr] = []
    for index, spelt in enumerate(out_letters):
        kind = spec.get("partial", {}).get(index)
        partial = {axis: kind for axis in contracted(spelt, merged)} if kind else {}
        if index in through:
            partial = dict(tensors[through[index]].attr.partial)
        results.append(_answer(spelt, merged, partial))
    return Inference(inputs=_regroup(answers, inputs), outputs=_listed(results, lists))


def _outputs(spec: Spec, attributes: Attributes) -> tuple[list[str], bool]:
    """Templates of the outputs, and whether they make one list argument."""
    outs: Sequence[str | Sequence[str]] = spec["out"]
    if len(outs) == 1 and not isinstance(outs[0], str):
        return list(outs[0]), True
    return [str(out) for out in outs], False


def _listed(results: Sequence[DistAttr], as_list: bool) -> tuple[Answer, ...]:
    return (tuple(results),) if as_list else tuple(results)


def _regroup(answers: Sequence[DistAttr], arguments: Sequence[Argument]) -> tuple[Answer, ...]:
    grouped: list[Answer] = []
    remaining = iter(answers)
    for argument in arguments:
        if isinstance(argument, DistTensor):
            grouped.append(next(remaining))
        else:
            grouped.append(tuple(next(remaining) for _ in argument))
    return tuple(grouped)


def _reverse(
    spec: Spec, mesh: Sequence[int], inputs: Sequence[Argument], outputs: Sequence[Argument], attributes: Attributes
) -> Inference:
    tensors, given = flat(inputs), flat(outputs)
    outs = _expand(spec["out"], outputs)
    ranks: list[int | None] = [t.ndim for t in given]
    _, targets, out_letters = _notations(spec, inputs, outs, ranks, attributes)
    chosen = [i for i in spec.get("from", range(len(given))) if i < len(given)]
    merged = _merge(spec, mesh, given, out_letters, chosen)
    answers = [_answer(target, merged) if t.shape is not None else t.attr for t, target in zip(tensors, targets, strict=True)]
    if spec.get("given"):
        results = [replace(t.attr, dims_mapping=t.attr.dims_mapping) for t in given]
    else:
        results = [_answer(spelt, merged) for spelt in out_letters]
    return Inference(inputs=_regroup(answers, inputs), outputs=_regroup(results, outputs))
