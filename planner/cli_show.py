"""`hardware list|show`, `models list|show`, `--version`: what is shipped, where each number is from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from distplan.planner import catalogue
from distplan.planner.inputs import one_word
from distplan.planner.output import FORMATS, csv_text, json_text, yaml_text
from distplan.planner.report_catalogue import hardware_report, model_report, models_table, systems_table
from distplan.planner.terminal import WIDTH, console, degrade, write_data

Options = dict[str, Any]
Plain = dict[str, Any]


def version_text() -> str:
    known = catalogue.versions()
    runtimes = known.pop("runtimes")
    lines = [f"distplan {known.pop('distplan')}"]
    lines += [f"  {name.replace('_', ' '):<15} {value}" for name, value in known.items()]
    lines.append("  runtimes")
    for name, value in runtimes.items():
        lines += wrap(f"    {name:<13} {value}", WIDTH, subsequent_indent=" " * 18)
    return degrade("\n".join(lines) + "\n", sys.stdout)


def list_hardware(options: Options) -> int:
    rows = catalogue.systems()
    return show({"systems": rows}, rows, options, systems_table(rows))


def show_hardware(name: str, options: Options) -> int:
    found = catalogue.hardware(name)
    return show(found, _fact_rows(found), options, hardware_report(found))


def list_models(options: Options) -> int:
    rows = catalogue.models()
    return show({"models": rows}, rows, options, models_table(rows))


def show_model(name: str, options: Options, *, graph: bool) -> int:
    found = catalogue.model(name, graph=graph)
    return show(found, [found], options, model_report(found))


def _fact_rows(found: Plain) -> list[Plain]:
    return [
        {"of": owner["id"], "field": name, **fact}
        for owner in (found["system"], found["accelerator"])
        if owner is not None
        for name, fact in owner["facts"].items()
    ]


def show(data: Plain, rows: Sequence[Plain], options: Options, table: Sequence[Any]) -> int:
    """`data` in the format asked for; `rows` are what CSV can hold of it, `table` what a person reads."""
    form = one_word("--format", options["output_format"], FORMATS)
    if form == "json":
        write_data(json_text(data))
    elif form == "yaml":
        write_data(yaml_text(data))
    elif form == "csv":
        write_data(csv_text(rows))
    else:
        print_table(table, no_color=options["no_color"])
    return 0


def print_table(parts: Sequence[Any], *, no_color: bool) -> None:
    """Drawn first and written whole, in characters that stdout can show."""
    screen = console(sys.stdout, no_color=no_color)
    with screen.capture() as drawn:
        for part in parts:
            screen.print(part)
    text = "\n".join(line.rstrip() for line in drawn.get().splitlines())
    write_data(degrade(text, sys.stdout) + "\n")
