"""`check` and `diff` for machines and pull requests: GitHub annotations, JUnit XML, Markdown. Pure text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from distplan.planner.check_budgets import SHOWN
from distplan.planner.terminal import clean
from distplan.planner.wording import percent, strategy_label

Plain = dict[str, Any]
_MARKS = {"ok": "✅", "warning": "⚠️", "broken": "❌", "cannot_run": "❌"}
WORDS = {"holds": "holds", "broken": "a limit is broken", "cannot_run": "cannot run", "unreadable": "cannot be read"}


# ---------------------------------------------------------------- GitHub


def annotation(level: str, message: str, *, file: str, line: int | None = None, title: str = "") -> str:
    """One workflow command (docs.github.com, "Workflow commands for GitHub Actions")."""
    properties = {"file": file, "line": "" if line is None else str(line), "title": title}
    said = ",".join(f"{name}={_property(clean(value))}" for name, value in properties.items() if value)
    return f"::{level} {said}::{_data(clean(message))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def github(shown: Plain) -> str:
    """Annotations of all that is not in order, one a line; a notice per file that is."""
    lines = []
    for file in shown["files"]:
        wrong = [each for each in file["checks"] if each["result"] != "ok"]
        for each in wrong:
            title = f"distplan {each['name']}"
            lines.append(
                annotation(each["level"], each["message"], file=file["file"], line=each["line"] or 1, title=title)
            )
        if not wrong:
            lines.append(annotation("notice", "holds", file=file["file"], line=1, title="distplan check"))
    return "\n".join(lines) + "\n"


def github_diff(shown: Plain) -> str:
    lines = [annotation("notice", text, file=shown["b"], line=1, title="distplan diff") for text in sentences(shown)]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- JUnit


def junit(shown: Plain) -> str:
    """One suite per file and one case per check; what cannot run is an error, what is broken a failure."""
    suites = [_suite(file, shown["warn_only"]) for file in shown["files"]]
    cases = [each for file in shown["files"] for each in file["checks"]]
    return _junit_text(suites, len(cases))


def _suite(file: Plain, warn_only: bool) -> str:
    cases = [_case(file["file"], each, warn_only) for each in file["checks"]]
    failures = 0 if warn_only else sum(each["result"] == "broken" for each in file["checks"])
    errors = 0 if warn_only else sum(each["result"] == "cannot_run" for each in file["checks"])
    name = quoteattr(_xml(file["file"]))
    return (
        f'  <testsuite name={name} tests="{len(cases)}" failures="{failures}" errors="{errors}">\n'
        + "\n".join(cases)
        + "\n  </testsuite>"
    )


def _case(file: str, each: Plain, warn_only: bool) -> str:
    kind = {"broken": "failure", "cannot_run": "error"}.get(each["result"])
    line = f' line="{each["line"]}"' if each["line"] else ""
    path, name = quoteattr(_xml(file)), quoteattr(_xml(each["name"]))
    head = f"    <testcase classname={path} name={name} file={path}{line}"
    text = _xml(each["message"])
    if kind is None or warn_only:
        return f"{head}>\n      <system-out>{escape(text)}</system-out>\n    </testcase>"
    return f"{head}>\n      <{kind} message={quoteattr(text)}>{escape(text)}</{kind}>\n    </testcase>"


def junit_diff(shown: Plain) -> str:
    text = _xml("\n".join(sentences(shown)))
    name = quoteattr(_xml(f"{shown['a']} {shown['b']}"))
    case = f'    <testcase classname={name} name="diff">\n      <system-out>{escape(text)}</system-out>\n'
    case += "    </testcase>"
    suite = f'  <testsuite name={name} tests="1" failures="0" errors="0">\n{case}\n  </testsuite>'
    return _junit_text([suite], 1)


def _junit_text(suites: Sequence[str], tests: int) -> str:
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return f'{head}<testsuites name="distplan" tests="{tests}">\n' + "\n".join(suites) + "\n</testsuites>\n"


def _xml(text: str) -> str:
    """Without what XML 1.0 cannot hold."""
    return "".join(c if c in "\n\t" or (c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff") else "?"
                   for c in text)  # fmt: skip


# ---------------------------------------------------------------- Markdown


def markdown(shown: Plain) -> str:
    return "\n".join(_markdown(shown)) + "\n"


def _markdown(shown: Plain) -> Iterator[str]:
    for file in shown["files"]:
        yield f"### {_cell(file['file'])}: {WORDS[file['status']]}"
        yield ""
        if file["summary"] is not None:
            yield f"{_cell(title(file['summary']))}"
            yield ""
            if file["summary"]["metrics"] is not None:
                yield from _before_after(shown["baseline"], file)
                yield ""
        yield from _md_table(
            ("", "check", "result"), [(_MARKS[each["result"]], each["name"], _located(each)) for each in file["checks"]]
        )
        yield ""


def _located(each: Plain) -> str:
    place = f" (line {each['line']})" if each["line"] and each["result"] != "ok" else ""
    return f"{each['message']}{place}"


def title(summary: Plain) -> str:
    gpus = "" if summary["metrics"] is None else f" on {summary['metrics']['gpus']:,.0f} GPUs"
    where = f"{gpus} of {summary['hardware']}, {summary['runtime']}"
    return f"{summary['model']}{where}: {strategy_label(summary['strategy'])}"


def _before_after(baseline: Plain | None, file: Plain) -> Iterator[str]:
    now = file["summary"]["metrics"]
    if baseline is None or baseline["metrics"] is None:
        yield from _md_table(("", "value"), [(SHOWN[n][0], _shown(n, now[n])) for n in SHOWN if now[n] is not None])
        return
    before = baseline["metrics"]
    rows = [
        (SHOWN[name][0], _shown(name, before[name]), _shown(name, now[name]), _change(before[name], now[name]))
        for name in SHOWN
        if now[name] is not None
    ]
    yield from _md_table(("", "before", "after", "change"), rows)


def _shown(name: str, value: float | None) -> str:
    return "" if value is None else SHOWN[name][1](value)


def _change(before: float | None, after: float | None) -> str:
    if not before or after is None or before == after:
        return ""
    return percent(after / before - 1.0, signed=True)


def markdown_diff(shown: Plain) -> str:
    parts = [f"### {_cell(shown['a'])} → {_cell(shown['b'])}", ""]
    rows = [(f"{row['section']}.{row['field']}", text_of(row["a"]), text_of(row["b"]), "")
            for row in (*shown["strategy"], *shown["setting"])]  # fmt: skip
    for row in shown["totals"]:
        name, before, after = row["name"], row["a"], row["b"]
        if name in SHOWN and after is not None:
            rows.append((SHOWN[name][0], _shown(name, before), _shown(name, after), _change(before, after)))
    parts += list(_md_table(("", "before", "after", "change"), rows)) if rows else ["no difference"]
    return "\n".join(parts) + "\n"


def sentences(shown: Plain) -> list[str]:
    """What differs, a sentence each; 'no difference' alone where nothing does."""
    said = [f"{row['section']}.{row['field']}: {text_of(row['a'])} -> {text_of(row['b'])}"
            for row in (*shown["strategy"], *shown["setting"])]  # fmt: skip
    for row in shown["totals"]:
        if row["name"] in SHOWN and row["change"]:
            words, show = SHOWN[row["name"]]
            said.append(f"{words}: {show(row['a'])} -> {show(row['b'])} ({percent(row['change'], signed=True)})")
    said += [f"{path} cannot run" for path in shown["cannot_run"]]
    return said or ["no difference"]


def text_of(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _md_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(_cell(cell) for cell in row) + " |"


def _cell(text: str) -> str:
    """What Markdown or HTML would take for markup is shown as it is; `@name` notifies nobody."""
    safe = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    for mark in "\\`*_|[]#":
        safe = safe.replace(mark, f"\\{mark}") if mark != "#" else safe
    return safe
