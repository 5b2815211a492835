"""The result of `check` as plain data, and the exit code that it means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distplan.hardware.errors import DistplanError
from distplan.planner.check import (
    BROKEN,
    CANNOT_RUN,
    OK,
    WARNING,
    Check,
    Evaluated,
    Question,
    check,
    evaluate,
    line_of,
    status,
)
from distplan.planner.check_budgets import metrics
from distplan.planner.document import FORMAT_VERSION
from distplan.planner.plain import plain, rounded

Plain = dict[str, Any]
UNREADABLE = "unreadable"
EXIT_CODES = {"holds": 0, BROKEN: 4, CANNOT_RUN: 3, UNREADABLE: 2}
_LEVELS = {OK: "notice", WARNING: "warning", BROKEN: "error", CANNOT_RUN: "error"}


def checked(paths: Sequence[str], question: Question, *, warn_only: bool) -> Plain:
    """Every file of `paths`, whatever is wrong with the others."""
    files = [_file(path, question, warn_only) for path in paths]
    worst = min((file["status"] for file in files), key=[UNREADABLE, CANNOT_RUN, BROKEN, "holds"].index)
    code = EXIT_CODES[worst]
    baseline = question.baseline
    return rounded(
        {
            "format_version": FORMAT_VERSION,
            "status": worst,
            "exit_code": 0 if warn_only and code != EXIT_CODES[UNREADABLE] else code,
            "warn_only": warn_only,
            "baseline": None if baseline is None else _summary(baseline),
            "files": files,
        }
    )


def _file(path: str, question: Question, warn_only: bool) -> Plain:
    try:
        found = evaluate(path)
    except DistplanError as error:
        return {
            "file": path,
            "status": UNREADABLE,
            "summary": None,
            "checks": [
                {
                    "name": "file",
                    "result": CANNOT_RUN,
                    "level": "error",
                    "message": str(error),
                    "key": getattr(error, "key", None),
                    "line": getattr(error, "line", None),
                    "value": None,
                    "limit": None,
                }
            ],
        }
    checks = check(found, question)
    return {
        "file": path,
        "status": status(checks),
        "summary": _summary(found),
        "checks": [_check(each, found, warn_only) for each in checks],
    }


def _check(each: Check, found: Evaluated, warn_only: bool) -> Plain:
    level = _LEVELS[each.result]
    return {
        "name": each.name,
        "result": each.result,
        "level": "warning" if warn_only and level == "error" else level,
        "message": each.message,
        "key": ".".join(each.key) or None,
        "line": line_of(found, each.key) if each.key else None,
        "value": each.value,
        "limit": each.limit,
    }


def _summary(found: Evaluated) -> Plain:
    """What a reader wants to see of a file; metrics are None where it cannot be priced."""
    file = found.file
    return {
        "file": found.path,
        "model": file.model.name,
        "hardware": file.cluster.id,
        "runtime": file.runtime.name,
        "strategy": plain(file.strategy),
        "metrics": metrics(found.shown) if found.plan is not None else None,
    }
