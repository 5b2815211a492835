"""`check`, `diff` and `schema`: from what was typed to stdout, the job summary and the exit code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from distplan.hardware.documents import write_atomically
from distplan.hardware.errors import DistplanError
from distplan.planner import check_formats as formats
from distplan.planner.check import Evaluated, Question, evaluate
from distplan.planner.check_budgets import BUDGETS, SHOWN, parse_share
from distplan.planner.check_document import checked
from distplan.planner.cli_show import print_table
from distplan.planner.diff import diff
from distplan.planner.inputs import InputError, one_word, quantity
from distplan.planner.output import FORMATS, csv_text, json_text, yaml_text
from distplan.planner.report import heading, line, table
from distplan.planner.terminal import clean, say, write_data
from distplan.planner.wording import duration, gib, percent, words

Options = dict[str, Any]
Plain = dict[str, Any]
ALL_FORMATS = (*FORMATS, "markdown", "github", "junit")
OK, CANNOT_RUN, DIFFERENT = 0, 3, 4
_STYLES = {"ok": "green", "warning": "yellow", "broken": "red", "cannot_run": "red"}
_RESULTS = {"ok": "ok", "warning": "warning", "broken": "BROKEN", "cannot_run": "CANNOT RUN"}
MAX_FILES = 1000


def run_check(paths: Sequence[str], options: Options) -> int:
    form = one_word("--format", options["output_format"], ALL_FORMATS)
    if len(paths) > MAX_FILES:
        raise InputError(f"{len(paths):,} files are too many, at most {MAX_FILES:,}")
    shown = checked(paths, _question(options), warn_only=options["warn_only"])
    rows = [{"file": file["file"], **each} for file in shown["files"] for each in file["checks"]]
    if form == "table":
        print_table(list(_check_report(shown)), no_color=options["no_color"])
    else:
        write_data(_check_text(form, shown, rows))
    if form == "github":
        _summary(formats.markdown(shown))
    wrong = [each for each in rows if each["result"] in ("broken", "cannot_run")]
    for each in wrong if form != "table" else ():
        say(f"distplan: {_named(each)}", quiet=options["quiet"])
    return int(shown["exit_code"])


def _named(each: Plain) -> str:
    """Messages about an unreadable file name it already."""
    place = each["file"] if each["line"] is None else f"{each['file']}:{each['line']}"
    return clean(each["message"] if each["name"] == "file" else f"{place}: {each['name']}: {each['message']}")


def _question(options: Options) -> Question:
    budgets = {}
    for budget in BUDGETS:
        limit = quantity(f"--{budget.option}", options[budget.option.replace("-", "_")], budget.parse)
        if limit is not None:
            budgets[budget.option] = limit
    slower = quantity("--fail-if-slower", options["fail_if_slower"], parse_share)
    if slower is not None and not options["baseline"]:
        raise InputError("--fail-if-slower needs --baseline FILE to compare with")
    baseline = _priced("--baseline", options["baseline"]) if options["baseline"] else None
    return Question(budgets=budgets, allow_tight=options["allow_tight"], baseline=baseline, fail_if_slower=slower)


def _priced(option: str, path: str) -> Evaluated:
    found = evaluate(path)
    if found.plan is None:
        why = found.problem or found.broken[0].sentence
        raise InputError(f"{option} {path} cannot run, so that there is nothing to compare with: {why}")
    return found


def _check_text(form: str, shown: Plain, rows: Sequence[Plain]) -> str:
    if form == "csv":
        return csv_text(rows)
    made = {
        "json": json_text, "yaml": yaml_text, "markdown": formats.markdown, "github": formats.github,
        "junit": formats.junit,
    }  # fmt: skip
    return made[form](shown)


def _summary(text: str) -> None:
    """The job summary, where GitHub Actions asks for one; several steps may add to the same file."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise DistplanError(f"{path}: the job summary cannot be written: {error.strerror or error}") from None


def _check_report(shown: Plain) -> Iterator[RenderableType]:
    for number, file in enumerate(shown["files"]):
        if number:
            yield Text("")
        style = "bold" if file["status"] == "holds" else "bold red"
        yield Text(clean(f"{file['file']}: {formats.WORDS[file['status']]}"), style=style)
        if file["summary"] is not None:
            yield line(formats.title(file["summary"]))
        for each in file["checks"]:
            place = f", line {each['line']}" if each["line"] and each["result"] != "ok" else ""
            text = f"{_RESULTS[each['result']]:<10} {each['name']}{place}: {each['message']}"
            yield line(text, style=_STYLES[each["result"]])
    if shown["warn_only"] and shown["status"] not in ("holds", "unreadable"):
        yield line("--warn-only: the exit code is 0", style="dim")


# ---------------------------------------------------------------- diff


def run_diff(a: str, b: str, options: Options) -> int:
    form = one_word("--format", options["output_format"], ALL_FORMATS)
    left, right = evaluate(a), evaluate(b)
    for found in (left, right):
        for sentence in found.file.changed:
            say(f"distplan: {clean(found.path)}: {clean(sentence)}")
    shown = diff(left, right)
    if form == "table":
        print_table(list(_diff_report(shown)), no_color=options["no_color"])
    else:
        write_data(_diff_text(form, shown))
    if form == "github":
        _summary(formats.markdown_diff(shown))
    for found in (left, right):
        if found.plan is None:
            why = found.problem or "; ".join(f"{v.code} {v.sentence}" for v in found.broken)
            say(f"distplan: {clean(found.path)} cannot run: {clean(why)}")
    if shown["cannot_run"]:
        return CANNOT_RUN
    return DIFFERENT if options["exit_code"] and not shown["same"] else OK


def _diff_text(form: str, shown: Plain) -> str:
    if form == "csv":
        rows = [{"part": part, **row} for part in ("strategy", "setting", "totals", "time", "memory", "communication")
                for row in shown[part]]  # fmt: skip
        return csv_text(rows)
    made = {
        "json": json_text, "yaml": yaml_text, "markdown": formats.markdown_diff, "github": formats.github_diff,
        "junit": formats.junit_diff,
    }  # fmt: skip
    return made[form](shown)


def _diff_report(shown: Plain) -> Iterator[RenderableType]:
    yield Text(clean(f"{shown['a']} -> {shown['b']}"), style="bold")
    if shown["same"]:
        yield line("no difference")
        return
    for part, title in (("strategy", "Strategy"), ("setting", "Setting")):
        if shown[part]:
            yield heading(title)
            fields = [(_field(row), formats.text_of(row["a"]), formats.text_of(row["b"])) for row in shown[part]]
            yield table(("field", "before", "after"), fields, left=(0, 1, 2))
    if shown["totals"]:
        yield heading("Totals")
        yield table(("", "before", "after", "change"), list(_totals(shown["totals"])))
    for part, show in (("time", duration), ("memory", gib)):
        if shown[part]:
            yield heading(part.capitalize())
            rows = [_moved(row, show) for row in shown[part]]
            yield table(("part", "before", "after", "difference"), rows)
    if shown["communication"]:
        yield heading("Communication per GPU and step")
        yield table(("axis", "collective", "before", "after", "exposed", "after"), list(_exchanges(shown)), left=(0, 1))


def _field(row: Plain) -> str:
    return row["field"] if row["section"] == "strategy" else f"{row['section']}.{row['field']}"


def _totals(rows: Sequence[Plain]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        if row["name"] in SHOWN and row["a"] is not None and row["b"] is not None:
            name, show = SHOWN[row["name"]]
            change = percent(row["change"], signed=True) if row["change"] else ""
            yield name, show(row["a"]), show(row["b"]), change


def _moved(row: Plain, show: Any) -> tuple[str, ...]:
    sign = "+" if row["difference"] >= 0.0 else "-"
    return words(row["name"]), show(row["a"]), show(row["b"]), f"{sign}{show(abs(row['difference']))}"


def _exchanges(shown: Plain) -> Iterator[tuple[str, ...]]:
    for row in shown["communication"]:
        times = [duration(row[f"{name}_{side}"]) for name in ("seconds", "exposed_seconds") for side in "ab"]
        yield row["axis"], words(row["kind"]), *times


# ---------------------------------------------------------------- schema


def run_schema(what: str, options: Options) -> int:
    from distplan.planner.schema import SCHEMAS, schema

    text = json_text(schema(one_word("WHAT", what, SCHEMAS)))
    if options["output"]:
        write_atomically(options["output"], text)
        say(f"wrote {options['output']}", quiet=options["quiet"])
    else:
        write_data(text)
    return OK
