"""YAML and JSON text -> plain values and the line of every key, within bounds.

A file is untrusted: nesting, aliases and the number of expanded values are bounded before memory is.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_DEPTH = 32
MAX_ALIASES = 64
MAX_VALUES = 500_000

Keys = tuple[str | int, ...]
Lines = dict[Keys, int]


class ParseProblem(Exception):
    """What is wrong, at which line (from 1) and below which keys; documents.load adds the file."""

    def __init__(self, problem: str, line: int | None = None, keys: Keys = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line
        self.keys = keys


# ---------------------------------------------------------------- YAML

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_CONSTANTS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass(slots=True)
class _Node:
    line: int
    value: Any
    """a scalar, a dict of nodes or a list of nodes"""
    anchor: str | None = None
    pending: tuple[str, int] | None = None
    """in a mapping: the key that waits for its value"""
    lines: dict[str, int] = field(default_factory=dict)


def parse_yaml(text: str) -> tuple[Any, Lines]:
    """Value and lines of the only document in `text`; None for a document without content."""
    try:
        root = _nodes(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.problem, error.context) if part)
        raise ParseProblem(f"is not valid YAML: {said}", mark.line + 1 if mark else None) from None
    except yaml.YAMLError as error:
        raise ParseProblem(f"is not valid YAML: {str(error).splitlines()[0]}") from None
    lines: Lines = {}
    return (None if root is None else _plain(root, (), lines)), lines


def _nodes(text: str) -> _Node | None:
    root: _Node | None = None
    open_nodes: list[_Node] = []
    anchors: dict[str, _Node] = {}
    aliases = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.DocumentStartEvent) and root is not None:
            raise ParseProblem("holds a second document (---); one is expected", line)
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_nodes) >= MAX_DEPTH:
                raise ParseProblem(f"is nested more than {MAX_DEPTH} levels deep", line)
            open_nodes.append(_collection(event, line))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            node = open_nodes.pop()
        elif isinstance(event, yaml.ScalarEvent):
            node = _Node(line, _scalar(event, line), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            node = _aliased(event.anchor, anchors, aliases, line)
        else:
            continue
        if node.anchor is not None:
            anchors[node.anchor] = node
        if open_nodes:
            _attach(open_nodes[-1], node, line)
        else:
            root = node
    return root


def _collection(event: yaml.CollectionStartEvent, line: int) -> _Node:
    if event.tag is not None:
        raise ParseProblem(f"the tag {event.tag} is not allowed", line)
    return _Node(line, {} if isinstance(event, yaml.MappingStartEvent) else [], event.anchor)


def _aliased(anchor: str | None, anchors: dict[str, _Node], aliases: int, line: int) -> _Node:
    if aliases > MAX_ALIASES:
        raise ParseProblem(f"holds more than {MAX_ALIASES} aliases", line)
    if anchor is None or anchor not in anchors:
        raise ParseProblem(f"the alias *{anchor} has no finished anchor before it", line)
    return anchors[anchor]


def _attach(parent: _Node, node: _Node, line: int) -> None:
    if isinstance(parent.value, list):
        parent.value.append(node)
    elif parent.pending is None:
        if isinstance(node.value, dict | list):
            raise ParseProblem("a key must be a word, not a list or mapping", line)
        key = _key_text(node)
        if key == "<<":
            raise ParseProblem("merge keys (<<) are not supported; write the keys out", line)
        if key in parent.value:
            raise ParseProblem(f"duplicate key '{key}', first at line {parent.lines[key]}", line)
        parent.pending = (key, line)
    else:
        key, key_line = parent.pending
        parent.value[key] = node
        parent.lines[key] = key_line
        parent.pending = None


def _key_text(node: _Node) -> str:
    return node.value if isinstance(node.value, str) else json.dumps(node.value)


def _scalar(event: yaml.ScalarEvent, line: int) -> Any:
    if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
        raise ParseProblem(f"the tag {event.tag} is not allowed", line)
    text: str = event.value
    if event.tag is not None or event.style not in (None, ""):
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return number_or_text(text, line)


def number_or_text(text: str, line: int | None) -> int | float | str:
    """A plain scalar by the YAML 1.2 core schema, and 1_000 too; infinite and huge numbers are refused."""
    digits = text.replace("_", "")
    if _INT.fullmatch(text) or _HEX.fullmatch(text):
        if len(digits) > 40:
            raise ParseProblem(f"{digits[:20]}... is an absurdly large number", line)
        return int(digits, 0)
    if _FLOAT.fullmatch(text):
        value = float(digits)
        if not math.isfinite(value):
            raise ParseProblem(f"{text[:20]} is an absurdly large number", line)
        return value
    return text


def _plain(node: _Node, keys: Keys, lines: Lines) -> Any:
    lines.setdefault(keys, node.line)
    if len(lines) > MAX_VALUES:
        raise ParseProblem(f"holds more than {MAX_VALUES:,} values once its aliases are expanded", node.line)
    if isinstance(node.value, dict):
        for key, line in node.lines.items():
            lines[(*keys, key)] = line
        return {key: _plain(child, (*keys, key), lines) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(child, (*keys, index), lines) for index, child in enumerate(node.value)]
    return node.value


# ---------------------------------------------------------------- JSON

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:\n]')


def parse_json(text: str) -> tuple[Any, Lines]:
    """Value and lines of strict JSON: no NaN, no Infinity, no key twice."""
    lines = _json_lines(text)
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_json_float, parse_int=_json_int)
    except json.JSONDecodeError as error:
        raise ParseProblem(f"is not valid JSON: {error.msg}", error.lineno) from None
    return value, lines


def _no_constant(name: str) -> float:
    raise ParseProblem(f"{name} is not allowed")


def _json_float(text: str) -> float:
    value = number_or_text(text, None)
    return float(value)


def _json_int(text: str) -> int:
    return int(number_or_text(text, None))


def _json_lines(text: str) -> Lines:
    """Lines of keys and list elements by a flat scan; json.loads judges everything else afterwards."""
    lines: Lines = {(): 1}
    keys: list[str | int] = []
    """key or index at which each open bracket stands"""
    line = 1
    expects_key = False
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token == "\n":
            line += 1
        elif token in "{[":
            keys.append("" if token == "{" else 0)
            expects_key = token == "{"
            if len(keys) > MAX_DEPTH:
                raise ParseProblem(f"is nested more than {MAX_DEPTH} levels deep", line)
            if token == "[":
                lines[tuple(keys)] = line
        elif token in "}]":
            if keys:
                keys.pop()
            expects_key = False
        elif token == ",":
            if keys and isinstance(keys[-1], int):
                keys[-1] += 1
                lines[tuple(keys)] = line
            else:
                expects_key = True
        elif token != ":" and expects_key and keys:
            expects_key = False
            keys[-1] = _json_key(token)
            if tuple(keys) in lines:
                raise ParseProblem("duplicate key", line, tuple(keys))
            lines[tuple(keys)] = line
    return lines


def _json_key(token: str) -> str:
    try:
        return str(json.loads(token))
    except json.JSONDecodeError:
        return token[1:-1]
