"""What the readers of launchers' files share: what they return, and how a wrong name is told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from distplan.hardware.documents import Document, load_mapping

_SIMILAR = 0.84
"""of two names: transposed or missing letters, not another word"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """facts: fields of a strategy and of the job that the file states, under their names; `dp`, the product of
    dp_replicate and dp_shard, where only that is known; `local_batch`, the sequences of a step over dp.
    model: sizes of the model it states.
    notes: sentences on what was assumed or passed over."""

    facts: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@cache
def option_names(launcher: str) -> Document:
    """launcher_options/<launcher>.yaml: the names that a launcher knows, by section, and their source."""
    return load_mapping(Path(__file__).with_name("launcher_options") / f"{launcher}.yaml")


def check_names(document: Document, known: Iterable[str], *, strict: bool) -> tuple[str, ...]:
    """Unknown keys of a section: an error where one is close to a known name, or where the launcher itself
    refuses it (`strict`); a note otherwise. Raises DocumentError."""
    names = set(known)
    notes = []
    for key in document.value:
        if key in names:
            continue
        near = difflib.get_close_matches(key, names, n=1, cutoff=_SIMILAR)
        if near:
            raise document.error(f"unknown name; did you mean {near[0]}?", key)
        if strict:
            raise document.error("unknown name, which the launcher refuses", key)
        notes.append(f"'{key}' is not known and passed over")
    return tuple(notes)


def one_of(document: Document, key: str, words: Mapping[str, str], default: str) -> str:
    """The value that our vocabulary has for the launcher's word at `key`. Raises DocumentError."""
    raw = document.value.get(key)
    if raw is None:
        return default
    if str(raw) not in words:
        near = difflib.get_close_matches(str(raw), words, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(words)}"
        raise document.error(f"'{str(raw)[:40]}' cannot be read{hint}", key)
    return words[str(raw)]
