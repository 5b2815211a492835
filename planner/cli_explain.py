"""`explain`: a rule's code, a strategy file, or a field of a file."""

from __future__ import annotations

from typing import Any

from distplan.hardware.errors import DistplanError
from distplan.planner import explain_fields, explain_rules
from distplan.planner.check import Evaluated, evaluate
from distplan.planner.cli_show import print_table
from distplan.planner.explain_plan import PARTS
from distplan.planner.explain_plan import explain as explain_plan
from distplan.planner.inputs import InputError, one_word
from distplan.planner.output import FORMATS, csv_text, json_text, yaml_text
from distplan.planner.report_explain import field_report, plan_report, rule_report
from distplan.planner.terminal import clean, say, write_data

Options = dict[str, Any]
Plain = dict[str, Any]
OK, CANNOT_RUN = 0, 3


def run_explain(what: str, plan: str | None, options: Options) -> int:
    form = one_word("--format", options["output_format"], FORMATS)
    wanted = tuple(part for part in PARTS if options[part]) or PARTS
    if explain_rules.is_code(what):
        shown = explain_rules.explain(what, None if plan is None else evaluate(plan))
        return _show(shown, shown["runtimes"], form, list(rule_report(shown)), options)
    if plan is not None:
        raise InputError(f"{plan}: a second file goes with a rule's code, as in: explain DP012 strategy.yaml")
    field = explain_fields.split_field(what)
    if field is not None:
        shown = explain_fields.explain(*field)
        return _show(shown, [shown], form, list(field_report(shown)), options)
    if not what.lower().endswith((".yaml", ".yml", ".json")):
        raise InputError(f"'{what}' is no rule's code (DP012), strategy file, or field (model.yaml:top_k)")
    return _plan(what, wanted, form, options)


def _plan(path: str, wanted: tuple[str, ...], form: str, options: Options) -> int:
    try:
        found = evaluate(path)
    except DistplanError as error:
        if "is not a strategy file" in str(error):
            raise InputError(f"{error}; a field of it is explained by {path}:FIELD") from None
        raise
    for sentence in found.file.changed:
        say(f"distplan: {clean(path)}: {clean(sentence)}", quiet=options["quiet"])
    if found.plan is None:
        say(f"distplan: {clean(path)} cannot run: {clean(_why(found))}")
        return CANNOT_RUN
    shown = explain_plan(found, wanted)
    return _show(shown, _rows(shown), form, list(plan_report(shown)), options)


def _why(found: Evaluated) -> str:
    said = "; ".join(f"{v.code} {v.sentence}" for v in found.broken)
    return found.problem or f"{said} (distplan explain {found.broken[0].code} {found.path})"


def _rows(shown: Plain) -> list[Plain]:
    """One row per term."""
    rows: list[Plain] = []
    for what in ("memory", "time"):
        for part in shown.get(what, {}).get("parts", []):
            value = part["bytes" if what == "memory" else "seconds"]
            rows += [{"of": what, "part": part["part"], **term} for term in part["terms"]] or [
                {"of": what, "part": part["part"], "name": "all", "bytes" if what == "memory" else "seconds": value}
            ]
    rows += [{"of": "communication", **row} for row in shown.get("communication", [])]
    return rows + [{"of": "constant", **row} for row in shown["constants"]]


def _show(shown: Plain, rows: list[Plain], form: str, table: list[Any], options: Options) -> int:
    if form == "table":
        print_table(table, no_color=options["no_color"])
    elif form == "csv":
        write_data(csv_text(rows))
    else:
        write_data(json_text(shown) if form == "json" else yaml_text(shown))
    return OK
