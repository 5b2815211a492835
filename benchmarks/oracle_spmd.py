"""Our rules against the stored answers of PaddlePaddle 3.3.1 (paddle_spmd*, paddle_tests*).

`check(path)` returns one tally per (api, direction). A refusal agrees if ours refuses too; where the
real system crashed ours has to refuse as well. There are no deviations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.oracle_schedules import Tally, read_lines
from distplan.costmodel.paddle_attr import (
    ABSENT,
    Answer,
    Argument,
    DistAttr,
    DistTensor,
    Inference,
    RuleRefusedError,
    attr,
)
from distplan.costmodel.paddle_rules import attribute_names, infer, rule_of_function

AXIS_ONLY = ("registry:max", "registry:min", "registry:prod", "registry:all", "registry:any")
"""One shared function without the kind in Paddle: the partial axis is compared, not the kind."""


@dataclass(slots=True)
class SpmdTally(Tally):
    refused: int = 0
    """of `agree`, the cases in which both refuse"""


def _tensor(stated: Any) -> Argument:
    if isinstance(stated, list):
        return tuple(_one(item) for item in stated)
    return _one(stated)


def _one(stated: Mapping[str, Any]) -> DistTensor:
    if stated.get("none"):
        return ABSENT
    if stated.get("empty0"):
        return DistTensor(shape=(0,), attr=attr([-1]))
    partial = {int(axis): kind for axis, kind in stated.get("partial", {}).items()}
    return DistTensor(shape=tuple(stated["shape"]), attr=attr(stated["dims_mapping"], partial))


def _value(stated: Any) -> Any:
    if isinstance(stated, dict):
        return stated.get("__scalar__", stated.get("__ints__"))
    return stated


def _attributes(rule: str, stated: Any) -> dict[str, Any]:
    """By name; the cases of Paddle's own tests number them (a0, a1, …) in the rule's order."""
    numbered = {f"a{i}": name for i, name in enumerate(attribute_names(rule))}
    return {numbered.get(name, name): _value(value) for name, value in stated}


def rule_of(api: str) -> str:
    door, _, name = api.partition(":")
    return rule_of_function(name) if door == "cpp" else name


def answer(case: Mapping[str, Any]) -> Inference:
    """Our inference for one stored case."""
    rule = rule_of(case["api"])
    return infer(
        rule,
        case["direction"],
        case["mesh"],
        [_tensor(stated) for stated in case["inputs"]],
        outputs=[_tensor(stated) for stated in case.get("outputs_in") or []],
        attributes=_attributes(rule, case["attrs"]),
    )


def _equal(ours: Answer, stated: Any, kinds: bool) -> bool:
    if isinstance(stated, list):
        return (
            isinstance(ours, tuple)
            and len(ours) == len(stated)
            and all(_equal(a, b, kinds) for a, b in zip(ours, stated, strict=True))
        )
    real = attr(stated["dims_mapping"], {int(a): k for a, k in stated["partial"].items()})
    if not isinstance(ours, DistAttr) or ours.dims_mapping != real.dims_mapping:
        return False
    return ours.partial == real.partial if kinds else set(ours.partial) == set(real.partial)


def agrees(case: Mapping[str, Any]) -> bool:
    refused = bool(case.get("error"))
    try:
        ours = answer(case)
    except RuleRefusedError:
        return refused
    if refused:
        return False
    kinds = case["api"] not in AXIS_ONLY
    return all(
        len(mine) == len(case["result"][side])
        and all(_equal(a, b, kinds) for a, b in zip(mine, case["result"][side], strict=True))
        for side, mine in (("inputs", ours.inputs), ("outputs", ours.outputs))
    )


def check(path: Path) -> dict[str, SpmdTally]:
    """Tally per "api direction", in order of appearance."""
    tallies: dict[str, SpmdTally] = {}
    for case in read_lines(path):
        rule = f"{case['api']} {case['direction']}"
        tally = tallies.setdefault(rule, SpmdTally())
        tally.total += 1
        if agrees(case):
            tally.agree += 1
            tally.refused += bool(case.get("error"))
        else:
            tally.differ.append(f"{case['id']} {rule}")
    return tallies
