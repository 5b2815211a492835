"""A number with its origin, read from YAML: either `80 GiB` or {value: 80 GiB, status, source, note}."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from distplan.hardware.documents import Document, no_other_keys, take

STATUSES = ("measured", "nominal", "unverified")
D = TypeVar("D")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A number and where it comes from.

    status: measured (someone read it off a device) | nominal (a vendor's or a table's figure) |
    unverified (general knowledge or low confidence: check before relying on it).
    """

    value: float
    """in base units: bytes, seconds, FLOP/s, bytes/s, watts, dollars per hour, or a plain count"""
    text: str
    """as the file writes it: 3.35 TB/s"""
    status: str
    sources: tuple[str, ...]
    note: str = ""


def count(value: Any) -> float:
    """A plain number without a unit, for `take_fact`."""
    if type(value) not in (int, float):
        raise ValueError("expected a number")
    return float(value)


@overload
def take_fact(
    doc: Document,
    key: str,
    parse: Callable[[Any], float],
    sources: Mapping[str, str],
    *,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Fact: ...


@overload
def take_fact(
    doc: Document,
    key: str,
    parse: Callable[[Any], float],
    sources: Mapping[str, str],
    *,
    default: D,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Fact | D: ...


def take_fact(
    doc: Document, key: str, parse: Callable[[Any], float], sources: Mapping[str, str], **options: Any
) -> Any:
    """The Fact at `key`. `sources`: the file's keys -> full citations. Raises DocumentError.

    A bare value, as in a user's own file, is nominal and its source is that file and line.
    """
    if not isinstance(doc.value, dict) or not isinstance(doc.value.get(key), dict):
        value = take(doc, key, parse, **options)
        if doc.value.get(key) is None:
            return value
        line = doc.lines.get((*doc.where, key), 0)
        text = str(doc.value[key])
        return Fact(value=value, text=text, status="nominal", sources=(f"{doc.file}:{line}",))
    entry = doc.section(key)
    no_other_keys(entry, ("value", "status", "source", "note", "date", "kind"))
    bounds = {name: bound for name, bound in options.items() if name != "default"}
    notes = [take(entry, name, str, default="") for name in ("note", "date", "kind")]
    return Fact(
        value=take(entry, "value", parse, **bounds),
        text=str(entry.value["value"]),
        status=take(entry, "status", str, default="nominal", choices=STATUSES),
        sources=_citations(entry, sources),
        note="; ".join(note for note in notes if note),
    )


def _citations(entry: Document, sources: Mapping[str, str]) -> tuple[str, ...]:
    named = entry.value.get("source")
    if named is None:
        return (f"{entry.file}:{entry.lines.get(entry.where, 0)}",)
    names = [named] if isinstance(named, str) else take(entry, "source", list)
    return tuple(sources.get(str(name), str(name)) for name in names)


def read_sources(doc: Document) -> dict[str, str]:
    """The `sources` mapping at the top of a file; empty where there is none."""
    section = take(doc, "sources", Document, default=None)
    return {} if section is None else {key: take(section, key, str) for key in section.value}
