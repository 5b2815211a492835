"""Argument lists as people keep them: one per line, or in a shell script with variables; and TOML.

Nothing is executed. A variable is replaced where the file itself assigns it a plain value.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from distplan.hardware.documents import Document, Keys
from distplan.hardware.errors import DocumentError
from distplan.hardware.parsing import ParseProblem, number_or_text

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^{}$]*))?\})")
_SUBCOMMAND = re.compile(r"activation[-_]checkpoint:[\w-]+")
"""a word that no option takes, although it stands behind one"""
MAX_WORDS = 20_000
LOOSE = "words"
"""key of the words that belong to no option, such as torchtitan's subcommands"""


def read_arguments(file: str, text: str) -> Document:
    """Options (without dashes, in the spelling of the file) -> value: a number, text, a list of them, or True.

    A later option replaces an earlier one, as argparse has it. Raises DocumentError with the line.
    """
    values: dict[str, Any] = {}
    lines: dict[Keys, int] = {}
    variables: dict[str, str] = {}
    option: str | None = None
    loose: list[str] = []
    for word, line in _words(file, text):
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned and not word.startswith("-"):
            variables[assigned[1]] = _replaced(assigned[2], variables)
            option = None
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            values[name], lines[name,] = True, line
            option = name
            if equals:
                _append(values, name, _value(_replaced(value, variables), file, line, name))
        elif word in ("(", ")", "\n"):
            option = None
        elif option is None or _SUBCOMMAND.fullmatch(word):
            loose.append(_replaced(word, variables))
        else:
            _append(values, option, _value(_replaced(word, variables), file, line, option))
    if not values:
        raise DocumentError("holds no arguments (--name value)", file=file)
    return Document(file=file, value=values | {LOOSE: loose}, lines=lines)


def _words(file: str, text: str) -> Iterator[tuple[str, int]]:
    """Words of a shell, and the line that each begins in; brackets of an array are words of their own."""
    for count, (word, line) in enumerate(_split(file, text)):
        if count >= MAX_WORDS:
            raise DocumentError(f"holds more than {MAX_WORDS:,} words", file=file, line=line)
        if re.fullmatch(r"[A-Za-z_]\w*\+?=\(", word):
            yield "(", line
        elif word.endswith(")") and word.startswith("--"):
            yield from ((word.rstrip(")"), line), (")", line))
        else:
            yield word, line


_TOKEN = re.compile(
    r"(?P<space>\s+|\\\r?\n)|(?P<comment>\#[^\n]*)|(?P<double>\"(?:[^\"\\]|\\.)*\")|(?P<single>'[^']*')"
    r"|(?P<open>[\"'])|(?P<escaped>\\.?)|(?P<plain>[^\s\"'\\]+)",
    re.DOTALL,
)


def _split(file: str, text: str) -> Iterator[tuple[str, int]]:
    """Words by the quoting rules of POSIX shells; # begins a comment only where a word would begin."""
    word: str | None = None
    line = start = 1
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None, "every character is in one of the classes"
        kind, token = match.lastgroup, match[0]
        if kind == "comment" and word is not None:
            kind, token = "plain", re.match(r"[^\s\"'\\]+", token)[0]  # type: ignore[index]
        if kind == "open":
            raise DocumentError("cannot be split into words: a quotation is never closed", file=file, line=line)
        if kind == "space" and word is not None:
            yield word, start
            word = None
        elif kind not in ("space", "comment"):
            start = line if word is None else start
            inside = re.sub(r"\\([\"\\$`\n])", r"\1", token[1:-1]) if kind == "double" else token
            word = (word or "") + (token[1:-1] if kind == "single" else token[1:] if kind == "escaped" else inside)
        line += token.count("\n")
        at += len(token)
    if word is not None:
        yield word, start


def _replaced(word: str, variables: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[3] if m[3] is not None else m[0]), word)


def _value(text: str, file: str, line: int, key: str) -> Any:
    try:
        return number_or_text(text, line)
    except ParseProblem as problem:
        raise DocumentError(problem.problem, file=file, line=line, key=key) from None


def _append(values: dict[str, Any], name: str, value: Any) -> None:
    before = values[name]
    values[name] = value if before is True else [*before, value] if isinstance(before, list) else [before, value]


def read_toml(file: str, text: str) -> Document:
    """torchtitan's files before 0.3: sections and keys as dotted names. Raises DocumentError."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        raise DocumentError(f"is not valid TOML: {error}", file=file, line=int(found[1]) if found else None) from None
    except RecursionError:
        raise DocumentError("is nested too deeply", file=file) from None
    values: dict[str, Any] = {LOOSE: []}
    for section, keys in content.items():
        if isinstance(keys, dict):
            values |= {f"{section}.{key}": value for key, value in keys.items()}
    return Document(file=file, value=values, lines=_toml_lines(text))


def _toml_lines(text: str) -> dict[Keys, int]:
    lines: dict[Keys, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        head = re.fullmatch(r"\s*\[\s*([\w.-]+)\s*\]\s*(?:#.*)?", line)
        key = re.match(r"\s*([\w-]+)\s*=", line)
        if head:
            section = head[1]
        elif key:
            lines[f"{section}.{key[1]}",] = number
    return lines
