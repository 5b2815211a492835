"""`explain DP012`: the rule, its numbers, the nearest legal values, and which runtimes have it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from distplan.costmodel.runtime import RULE_VARIANTS, list_runtimes, load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.hardware.documents import load_mapping
from distplan.hardware.errors import UnknownNameError
from distplan.planner import api
from distplan.planner.check import Evaluated, context_of, setting_of
from distplan.planner.constraints import Code, Context, codes, explain_row, with_runtime
from distplan.planner.document import FORMAT_VERSION
from distplan.planner.plain import plain
from distplan.planner.plan import Violation

Plain = dict[str, Any]


@cache
def _reasons() -> Mapping[str, Mapping[str, Any]]:
    made: Mapping[str, Mapping[str, Any]] = load_mapping(Path(__file__).with_name("explain_rules.yaml")).value
    return made


def is_code(text: str) -> bool:
    return len(text) >= 3 and text[:2].upper() == "DP" and text[2:].isdigit()


def explain(text: str, found: Evaluated | None = None) -> Plain:
    """Plain data about a code; the numbers are those of `found`, or of an example that breaks the rule.

    Raises UnknownNameError.
    """
    name = f"DP{text[2:].zfill(3)}"
    if name not in codes():
        raise UnknownNameError("rule", text.upper(), codes())
    code = codes()[name]
    shown = {
        "format_version": FORMAT_VERSION,
        "code": name,
        "title": code.title,
        "refuses": not code.warn,
        "why": _reasons()[name]["why"],
        "variants": [{"variant": variant, "sentence": sentence} for variant, sentence in code.sentence.items()],
        "vary": list(code.vary),
        "after": code.after,
    }
    context, strategy, where = _example(name) if found is None else _given(found)
    broken = _broken(name, context, strategy)
    shown["example"] = {
        "of": where,
        "runtime": context.runtime.name,
        "gpus": context.gpus,
        "strategy": plain(strategy),
        "broken": broken is not None,
        "sentence": broken.sentence if broken else "",
        "nearest": list(broken.nearest) if broken else [],
    }
    shown["runtimes"] = [_in_runtime(runtime, code, context, strategy) for runtime in list_runtimes()]
    return shown


def _given(found: Evaluated) -> tuple[Context, Strategy, str]:
    return context_of(setting_of(found.file), found.file.strategy.gpus), found.file.strategy, found.path


def _example(name: str) -> tuple[Context, Strategy, str]:
    """A job that breaks the rule."""
    said = _reasons()[name]["example"]
    given = said["strategy"]
    strategy = Strategy(**given | {"stage_layers": tuple(given.get("stage_layers", ()))})
    overrides = {"global_batch": 512, "seq_len": 4096} | said.get("workload", {})
    if said["model"] == "gpt2":
        overrides["seq_len"] = 1024
    job = api.setting(said["model"], gpus=said["gpus"], runtime=said["runtime"], overrides=overrides)
    context = context_of(job, said["gpus"])
    if said.get("offload"):
        context = Context(
            model=context.model, workload=context.workload, runtime=context.runtime, gpus=context.gpus,
            domain=context.domain, offload_activations=True,
        )  # fmt: skip
    return context, strategy, said["model"]


def _broken(name: str, context: Context, strategy: Strategy) -> Violation | None:
    return next((v for v in explain_row(strategy, context) if v.code == name), None)


def _in_runtime(name: str, code: Code, context: Context, strategy: Strategy) -> Plain:
    """What a runtime makes of the example: its variant of the rule, and whether it refuses."""
    runtime = load_runtime(name)
    rule = code.rule or _RULE_OF.get(code.code, "")
    broken = _broken(code.code, with_runtime(context, runtime), strategy)
    source = runtime.provenance.get(f"rules.{rule}" if rule else "legal", "")
    return {
        "runtime": name,
        "variant": runtime.rules[rule] if rule in RULE_VARIANTS else "",
        "breaks": broken is not None,
        "sentence": broken.sentence if broken else "",
        "source": source if rule or code.code in _LEGAL else "",
    }


_RULE_OF: Mapping[str, str] = {
    "DP012": "micro_batches", "DP016": "ep_at_least_tp", "DP031": "sp_without_tp", "DP036": "zero_with_pp",
    "DP037": "hsdp", "DP038": "moe_sp", "DP039": "offload_with_pp",
}  # fmt: skip
"""codes whose sentence does not depend on the variant of a rule that they have all the same"""
_LEGAL = ("DP002", "DP003", "DP030")
