"""Results of a sweep on disk: one JSON object a line, appended whole, so that an interrupt loses nothing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distplan.hardware.documents import read_text
from distplan.hardware.errors import DistplanError, DocumentError

Plain = dict[str, Any]
_KEY_LENGTH = len("sha256:") + 16


@dataclass(slots=True)
class Store:
    """Key -> row. Two sweeps may append to the same file: a line is written by one call."""

    path: str
    rows: dict[str, Plain] = field(default_factory=dict)

    def get(self, key: str) -> Plain | None:
        return self.rows.get(key)

    def put(self, key: str, row: Plain) -> None:
        """Append; DistplanError where that fails."""
        line = json.dumps({"key": key, "row": row}, separators=(",", ":"), allow_nan=False) + "\n"
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                written = os.write(handle, line.encode())
                if written < len(line.encode()):
                    raise OSError(28, "the disk is full")
            finally:
                os.close(handle)
        except OSError as error:
            raise DistplanError(f"{self.path}: cannot be written: {error.strerror or error}") from None
        self.rows[key] = row


def open_store(path: str) -> Store:
    """The results that a file holds; an absent file is empty.

    A last line that an interrupt cut short is left out, and ended so that the next one starts a line. Raises
    DistplanError where the file holds something else: it is not ours to write to.
    """
    store = Store(path=path)
    target = Path(path)
    if not target.exists():
        return store
    if target.is_file() and target.stat().st_size == 0:
        return store
    text = read_text(path)
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        entry = _entry(line)
        if entry is not None:
            store.rows[entry[0]] = entry[1]
        elif line.strip() and number < len(lines):
            raise DocumentError("is no result of a sweep; choose another file", file=path, line=number)
    if lines[-1]:
        _end_line(path)
    return store


def _entry(line: str) -> tuple[str, Plain] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or set(value) != {"key", "row"} or not isinstance(value["row"], dict):
        return None
    key, row = value["key"], value["row"]
    whole = isinstance(key, str) and len(key) == _KEY_LENGTH and {"model", "gpus", "status"} <= set(row)
    return (key, row) if whole else None


def _end_line(path: str) -> None:
    """Drop the line that was cut short, unless it is whole but for its end."""
    try:
        with open(path, "r+b") as stream:
            content = stream.read()
            start = content.rfind(b"\n") + 1
            if _entry(content[start:].decode("utf-8", "replace")) is not None:
                stream.write(b"\n")
            else:
                stream.truncate(start)
    except OSError as error:
        raise DistplanError(f"{path}: cannot be written: {error.strerror or error}") from None
