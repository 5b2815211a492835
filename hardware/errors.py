"""Every error that is meant for the person at the terminal.

    DistplanError(ValueError)
    ├── UnitError            a quantity without, or with the wrong, unit; negative or absurd
    ├── UnknownNameError     a name that is not in a catalogue; near misses suggested
    └── DocumentError        a file that cannot be read, or a key in it that is wrong

The command line catches DistplanError alone and prints it as one line. Anything else is a bug of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DistplanError(ValueError):
    """What is wrong, where, and what would be right."""


class UnitError(DistplanError):
    """A quantity that cannot be read as the dimension asked for."""


class UnknownNameError(DistplanError):
    """A name that no catalogue holds."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} '{name}'{did_you_mean(name, known)}")


class DocumentError(DistplanError):
    """A problem in a user's file; `line` counts from 1 and `key` is dotted."""

    def __init__(self, problem: str, *, file: str, line: int | None = None, key: str | None = None) -> None:
        place = file if line is None else f"{file}:{line}"
        super().__init__(f"{place}: {f'{key}: ' if key else ''}{problem}")
        self.problem = problem
        self.file = file
        self.line = line
        self.key = key


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: the nearest known names, or all of them where they are few, or nothing."""
    names = sorted(set(known))
    by_case = {candidate.lower(): candidate for candidate in names}
    near = [by_case[match] for match in difflib.get_close_matches(name.lower(), by_case, n=3, cutoff=0.6)]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 12 else ""
