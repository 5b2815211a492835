"""What fields mean: the words of fields.yaml, and the sentences that stand below a dataclass's fields."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from distplan.hardware.documents import load_mapping


@cache
def notes() -> Mapping[str, Mapping[str, str]]:
    """Section -> field -> what it means (fields.yaml)."""
    made: Mapping[str, Mapping[str, str]] = load_mapping(Path(__file__).with_name("fields.yaml")).value
    return made


@cache
def attribute_notes(cls: type) -> Mapping[str, str]:
    """Field -> the docstring below it, on one line; empty where the source is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    name = ""
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and name:
            found[name] = " ".join(str(statement.value.value).split())
            name = ""
        else:
            name = ""
    return found
