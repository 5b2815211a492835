"""SPMD rules of Paddle 3.3.1: `infer` runs one rule of paddle_rules.yaml on concrete placements.

A rule is a notation (paddle_notation.py), the name of a merge (paddle_merge.py) and a few quirks:

    in, out      one template per input and output; a list argument is a list of one template
    into         the templates by which inputs are read, where they differ from `in`
    from         the inputs that take part in the merge, in order of precedence (default all)
    merge        single (default) | strict | divisible | follow | matmul, or copy | copy_single: no
                 conflict is looked for
    co_shards    the rule sees every axis of a co-sharded dim (as do divisible, follow, matmul, copy)
    when, unless attribute -> what changes in the rule if it is true, or is not
    derive       attributes that follow from shapes (paddle_derived.py)
    broadcast    inputs whose `...` dims of size 1 are broadcast (default all)
    ranks_of     output index -> input index whose rank it has
    ones_whole   inputs whose dims of size 1 are read as not sharded
    verbatim     inputs that keep their own sharding (dropped dims aside)
    source       inputs that keep their own sharding untouched
    keeps_partial  inputs that keep their partial status
    partial      output index -> kind: the output is partial on the axes of contracted letters
    through      output index -> input index whose partial status passes to it; the input keeps it
    swap         attribute -> input index: the last two dims of that input change places if it is true
    adds_to      output index -> input index whose partial status the output's is added to
    out_like     output index -> input index whose sharding the output has
    keep         name of the attribute that keeps reduced dims
    partial_as   input index -> output index whose partial status it takes
    repeat       attribute that says how many outputs there are
    flat_lists   (reverse) list arguments are answered one by one
    given        (reverse) outputs are answered as given, not as merged: masked (dropped dims aside,
                 nothing partial) or whole
    out_into     (reverse) the templates by which outputs are read, where they differ from `out`
    outputs_keep_partial  (reverse)
    as_gradient  (reverse) the gradient rule that the registry holds in its place
    function     a function of paddle_shapes.py or paddle_special.py, where no notation says it

Reverse rules merge the outputs and read the inputs; gradient rules are forward rules of the
gradient operator. Source of the behaviour: the answers of PaddlePaddle 3.3.1 (shared/oracle, A1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib import resources
from typing import Any

import yaml

from distplan.costmodel.paddle_align import FUNCTIONS as ALIGN_FUNCTIONS
from distplan.costmodel.paddle_attention import FUNCTIONS as ATTENTION_FUNCTIONS
from distplan.costmodel.paddle_attr import Argument, Inference
from distplan.costmodel.paddle_engine import Spec, forward, reverse, seen
from distplan.costmodel.paddle_notation import Attributes
from distplan.costmodel.paddle_products import FUNCTIONS as PRODUCT_FUNCTIONS
from distplan.costmodel.paddle_shapes import FUNCTIONS as SHAPE_FUNCTIONS
from distplan.costmodel.paddle_special import FUNCTIONS as SPECIAL_FUNCTIONS
from distplan.hardware.errors import UnknownNameError

SHARED = ("in", "out", "keep", "swap", "ones_whole", "broadcast")
"""What a reverse rule has from its forward rule unless it says otherwise."""
FUNCTIONS = {**ALIGN_FUNCTIONS, **ATTENTION_FUNCTIONS, **PRODUCT_FUNCTIONS, **SHAPE_FUNCTIONS, **SPECIAL_FUNCTIONS}


@lru_cache(maxsize=1)
def _document() -> Mapping[str, Any]:
    text = resources.files("distplan.costmodel").joinpath("paddle_rules.yaml").read_text(encoding="utf-8")
    document: Mapping[str, Any] = yaml.safe_load(text)
    return document


@cache
def spec_of(rule: str, direction: str) -> Spec:
    """The data of a rule. Raises UnknownNameError where there is none."""
    rules: Mapping[str, Any] = _document()["rules"]
    name = _same_as().get(rule, rule)
    if name not in rules or direction not in rules[name]:
        raise UnknownNameError(f"{direction} SPMD rule", rule, rule_names())
    spec: Spec = rules[name][direction]
    if direction == "reverse":
        forward_spec = rules[name]["forward"]
        spec = {**{key: forward_spec[key] for key in SHARED if key in forward_spec}, **spec}
    return spec


@lru_cache(maxsize=1)
def _same_as() -> Mapping[str, str]:
    """Another name -> the rule's own."""
    return {other: name for name, others in _document()["same_as"].items() for other in others}


def rule_names() -> list[str]:
    return sorted({*_document()["rules"], *_same_as()})


def attribute_names(rule: str) -> list[str]:
    """The rule's attributes in the order of the real function's arguments."""
    names: list[str] = _document()["attributes"].get(_same_as().get(rule, rule), [])
    return names


def rule_of_function(function: str) -> str:
    """The rule behind one of the library's C++ functions (`MatmulGradInferSpmd` -> `matmul_grad`)."""
    functions: Mapping[str, str] = _document()["functions"]
    if function not in functions:
        raise UnknownNameError("SPMD function", function, functions)
    return functions[function]


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
    if "as_gradient" in spec:
        return infer(spec["as_gradient"], "grad", mesh, [*inputs, *outputs], attributes=attributes)
    if "function" in spec:
        inputs, outputs = seen(spec, mesh, inputs), seen(spec, mesh, outputs)
        return FUNCTIONS[spec["function"]](spec, mesh, inputs, outputs, attributes)
    if direction == "reverse":
        return reverse(spec, mesh, inputs, outputs, attributes)
    return forward(spec, mesh, inputs, attributes)
