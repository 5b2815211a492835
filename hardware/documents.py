"""Files that people write: read without trust, and point at the line when something is wrong.

`load` bounds size, depth and alias expansion, refuses duplicate keys, tags, NaN and Infinity, and
remembers the line of every key. `take` and `no_other_keys` read a mapping. `write_atomically` writes
beside and renames. YAML is read from the parser's events and resolved by the YAML 1.2 core schema,
so that nothing in a file is ever constructed as an object, and `no` stays a word.
"""

from __future__ import annotations

import difflib
import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from distplan.hardware.errors import DistplanError, DocumentError, UnitError, did_you_mean
from distplan.hardware.parsing import ParseProblem, parse_json, parse_yaml
from distplan.hardware.units import format_bytes

MAX_FILE_BYTES = 4 * 1024 * 1024

T = TypeVar("T")
D = TypeVar("D")
Keys = tuple[str | int, ...]


class _Required:
    pass


_REQUIRED = _Required()


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A mapping, list or scalar of a file, with the place where it stands.

    value: plain dicts, lists, str, int, float, bool and None.
    lines: keys from the root -> line, shared by all sections of the file.
    where: the keys from the root to `value`.
    """

    file: str
    value: Any
    lines: Mapping[Keys, int]
    where: Keys = ()

    def section(self, key: str | int) -> Document:
        """The part below `key`, which must exist."""
        return Document(file=self.file, value=self.value[key], lines=self.lines, where=(*self.where, key))

    def items(self) -> list[Document]:
        """Sections of a list, or of a mapping's values, in order."""
        keys: Iterable[str | int] = self.value if isinstance(self.value, dict) else range(len(self.value))
        return [self.section(key) for key in keys]

    def error(self, problem: str, key: str | None = None) -> DocumentError:
        """An error at `key` of this section, or at the section itself."""
        where = self.where if key is None else (*self.where, key)
        places = (where[:length] for length in range(len(where), -1, -1))
        line = next((self.lines[place] for place in places if place in self.lines), None)
        return DocumentError(problem, file=self.file, line=line, key=dotted(where) or None)


def dotted(keys: Keys) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")


def load(path: str | os.PathLike[str]) -> Document:
    """Read a .json file as JSON and any other as YAML; DocumentError with file, line and key."""
    file = os.fspath(path)
    text = read_text(path)
    parse = parse_json if file.lower().endswith(".json") else parse_yaml
    try:
        value, lines = parse(text)
    except ParseProblem as problem:
        raise DocumentError(problem.problem, file=file, line=problem.line, key=dotted(problem.keys) or None) from None
    if value is None:
        raise DocumentError("the file is empty", file=file)
    return Document(file=file, value=value, lines=lines)


def load_mapping(path: str | os.PathLike[str]) -> Document:
    """As `load`, and the top of the file must be a mapping."""
    document = load(path)
    if not isinstance(document.value, dict):
        raise document.error(f"expected keys and values, got {_kind_of(document.value)}")
    return document


def read_text(path: str | os.PathLike[str]) -> str:
    """UTF-8 text of a regular file of at most MAX_FILE_BYTES; size is checked before anything is read."""
    file = os.fspath(path)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise DocumentError("is a folder, expected a file", file=file)
        if not stat.S_ISREG(status.st_mode):
            raise DocumentError("is not a regular file", file=file)
        if status.st_size > MAX_FILE_BYTES:
            size = format_bytes(status.st_size)
            raise DocumentError(f"is too large: {size}, at most {format_bytes(MAX_FILE_BYTES)}", file=file)
        with open(path, "rb") as stream:
            raw = stream.read(MAX_FILE_BYTES)
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror or error}", file=file) from None
    except ValueError as error:
        if isinstance(error, DistplanError):
            raise
        raise DocumentError("is not a path", file=repr(file)) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DocumentError("is not a text file in UTF-8", file=file) from None
    if not text.strip():
        raise DocumentError("the file is empty", file=file)
    return text


@overload
def take(
    doc: Document,
    key: str,
    kind: type[T] | Callable[[Any], T],
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[T] = (),
) -> T: ...


@overload
def take(
    doc: Document,
    key: str,
    kind: type[T] | Callable[[Any], T],
    *,
    default: D,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[T] = (),
) -> T | D: ...


def take(
    doc: Document,
    key: str,
    kind: Callable[[Any], Any],
    *,
    default: Any = _REQUIRED,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] = (),
) -> Any:
    """The value of `key`, checked; `default` where the key is absent or null.

    kind: int, float (takes integers), str, bool, list, dict, Document (a mapping, as a section), or a
    function of the raw value that raises UnitError or ValueError (units.parse_bytes, say).
    Bounds are inclusive. Raises DocumentError.
    """
    if not isinstance(doc.value, dict):
        raise doc.error(f"expected keys and values, got {_kind_of(doc.value)}")
    raw = doc.value.get(key)
    if raw is None:
        if isinstance(default, _Required):
            problem = "is null, a value is required" if key in doc.value else _missing(doc, key)
            raise doc.error(problem, key if key in doc.value else None)
        return default
    value = _read(doc, key, kind, raw)
    if choices and value not in choices:
        known = [str(choice) for choice in choices]
        raise doc.error(f"{_shown(raw)} is not one of {', '.join(known)}{_near(str(raw), known)}", key)
    if minimum is not None and value < minimum:
        raise doc.error(f"{_shown(raw)} is too small, at least {minimum:g} is needed", key)
    if maximum is not None and value > maximum:
        raise doc.error(f"{_shown(raw)} is too large, at most {maximum:g} makes sense", key)
    return value


def no_other_keys(doc: Document, known: Iterable[str]) -> None:
    """Raise DocumentError at the first key of the mapping that is not `known`."""
    names = list(known)
    for key in doc.value:
        if key not in names:
            raise doc.error(f"unknown key{did_you_mean(key, names)}", key)


def _read(doc: Document, key: str, kind: Any, raw: Any) -> Any:
    if kind is Document:
        if isinstance(raw, dict):
            return doc.section(key)
        raise doc.error(f"expected keys and values, got {_kind_of(raw)}", key)
    if kind in _PLAIN:
        if kind is float and type(raw) is int:
            return float(raw)
        if type(raw) is float and math.isnan(raw):
            raise doc.error(f"expected {_PLAIN[kind]}, got {raw}", key)  # no bound would catch it
        if type(raw) is kind:
            return raw
        raise doc.error(f"expected {_PLAIN[kind]}, got {_kind_of(raw)} {_shown(raw)}", key)
    try:
        return kind(raw)
    except UnitError as error:
        raise doc.error(str(error), key) from None
    except ValueError as error:
        raise doc.error(f"{_shown(raw)} is not valid: {error}", key) from None


_PLAIN: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "keys and values",
}


def _kind_of(value: object) -> str:
    return "nothing" if value is None else _PLAIN.get(type(value), type(value).__name__)


def _missing(doc: Document, key: str) -> str:
    similar = difflib.get_close_matches(key, doc.value, n=1)
    return f"'{key}' is missing" + (f"; is '{similar[0]}' meant to be it?" if similar else "")


def _near(name: str, known: list[str]) -> str:
    near = did_you_mean(name, known)
    return near if "did you mean" in near else ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` whole or not at all: beside the target, then renamed over it. Raises DistplanError."""
    target = Path(os.path.realpath(path))
    temporary: str | None = None
    try:
        if target.is_dir():
            raise DistplanError(f"{os.fspath(path)}: is a folder, expected a file to write")
        if target.exists() and not target.is_file():
            # renaming over a device would replace the device itself
            raise DistplanError(f"{os.fspath(path)}: is not a regular file, so it is not replaced")
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode_of(target))
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise DistplanError(f"{os.fspath(path)}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _mode_of(target: Path) -> int:
    """What the file had, or what the process's umask would give a new one."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
