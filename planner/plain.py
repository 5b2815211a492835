"""Dataclasses <-> plain values (dict, list, str, int, float, bool, None), and digests of them.

`plain` and `build` are each other's inverse for the types of the model and the workload; a field that
may hold one of several dataclasses carries the class's name as `type`.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from distplan.hardware.documents import Document, no_other_keys, take

T = TypeVar("T")
SIGNIFICANT_DIGITS = 6
_MOST = 10**12
"""no size, count or degree is larger"""
_FROM_ZERO = {"zero"}
"""a stage, not a count"""


def plain(value: Any) -> Any:
    """`value` as YAML and JSON know it; fields in the order in which they are declared."""
    if is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        return {f.name: _tagged(getattr(value, f.name), hints[f.name]) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no plain form")


def rounded(value: T) -> T:
    """Every float with 6 significant digits, so that files are the same on any machine; inf and nan are null."""
    made: Any = value
    if isinstance(value, float):
        made = float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    elif isinstance(value, dict):
        made = {key: rounded(item) for key, item in value.items()}
    elif isinstance(value, list):
        made = [rounded(item) for item in value]
    return cast(T, made)


def digest(value: Any) -> str:
    """SHA-256 of the content, whatever the order of its keys; the first 16 hex digits."""
    text = json.dumps(rounded(plain(value)), sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def build(cls: type[T], document: Document) -> T:
    """The dataclass that `plain` turned into the section `document`. DocumentError with line and key.

    Whole numbers are at least 1, except where 0 is the field's default (it means off).
    """
    hints = _hints(cast(Any, cls))
    no_other_keys(document, [*hints, "type"])
    values = {}
    for f in fields(cast(Any, cls)):
        optional = f.default is not MISSING or f.default_factory is not MISSING
        if not optional or f.name in document.value:
            least = 0 if f.default == 0 or f.name in _FROM_ZERO else 1
            values[f.name] = _field(document, f.name, hints[f.name], least=least)
    return cls(**values)


def _field(document: Document, key: str, hint: Any, *, least: int = 0) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _one_of(document, key, inner)
    if is_dataclass(hint):
        return build(cast(Any, hint), take(document, key, Document))
    if origin is tuple:
        take(document, key, list)
        return tuple(_item(item, inner[0]) for item in document.section(key).items())
    if origin is not None and issubclass(origin, Mapping):
        section = take(document, key, Document)
        return {name: _field(section, name, inner[1]) for name in section.value}
    return take(document, key, hint, minimum=least, maximum=_MOST) if hint is int else take(document, key, hint)


def _one_of(document: Document, key: str, hints: tuple[Any, ...]) -> Any:
    if type(None) in hints and document.value.get(key, MISSING) is None:
        return None
    classes: dict[str, Any] = {c.__name__: c for c in hints if isinstance(c, type) and is_dataclass(c)}
    if not classes:
        return _field(document, key, next(hint for hint in hints if hint is not type(None)))
    section = take(document, key, Document)
    return build(classes[take(section, "type", str, choices=list(classes))], section)


def _item(document: Document, hint: Any) -> Any:
    """An element of a list, read as if it were the value of a key."""
    holder = Document(
        file=document.file, value={"item": document.value}, lines={("item",): document.lines.get(document.where, 1)}
    )
    return _field(holder, "item", hint)


def _tagged(value: Any, hint: Any) -> Any:
    several = get_origin(hint) in (Union, types.UnionType) and any(is_dataclass(c) for c in get_args(hint))
    made = plain(value)
    return {"type": type(value).__name__} | made if several and value is not None else made


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)
