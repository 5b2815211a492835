"""`explain model.yaml:moe.top_k`: what a field of a file means, takes, and is in that file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distplan.costmodel.hf_config import our_word
from distplan.hardware.documents import Document, dotted, load
from distplan.hardware.errors import DistplanError, did_you_mean
from distplan.planner.document import FORMAT_VERSION
from distplan.planner.plan_file import is_plan
from distplan.planner.schema import SCHEMAS, schema

Plain = dict[str, Any]
Path_ = tuple[str, ...]
_GROUPS = ("model", "layer", "kinds", "moe", "attention", "mlp", "mla", "linear", "embedding", "head", "norm")
"""what people write before a word of model.yaml, whose words are flat"""


def split_field(text: str) -> tuple[str, str] | None:
    """('model.yaml', 'moe.top_k'); None where the text names no field."""
    file, colon, field = text.rpartition(":")
    return (file, field) if colon and file and field and not field.startswith(("/", "\\")) else None


def explain(file: str, field: str) -> Plain:
    """Plain data about a field; `value` and `line` are those of the file, where there is one.

    Raises DistplanError for a kind of file or a field that nobody knows.
    """
    document = load(file) if Path(file).is_file() else None
    kind = _kind(file, document)
    places = dict(_places(schema(kind)))
    path = _find(field, places, kind)
    made = places[path]
    shown = {
        "format_version": FORMAT_VERSION,
        "file": file,
        "kind": kind,
        "field": ".".join(path),
        "meaning": made.get("description", ""),
        "takes": _takes(made),
        "least": made.get("minimum"),
        "most": made.get("maximum"),
        "choices": made.get("enum", []),
        "default": made.get("default"),
        "required": made.get("required_here", False),
        "value": None,
        "line": None,
        "fields": [name[-1] for name in places if name[:-1] == path],
    }
    if document is not None:
        shown |= _in_file(document, path)
    return shown


def _kind(file: str, document: Document | None) -> str:
    if document is not None and isinstance(document.value, dict):
        if is_plan(document):
            return "strategy"
        if "gpus_per_node" in document.value or "accelerator" in document.value:
            return "hardware"
        return "model"
    stem = Path(file).stem.lower()
    known = {"system": "hardware", "config": "model"} | {kind: kind for kind in SCHEMAS}
    near = next((kind for word, kind in known.items() if word in stem), None)
    if near is None:
        hint = "write model.yaml:FIELD, strategy.yaml:FIELD or hardware.yaml:FIELD"
        raise DistplanError(f"{file}: no such file, and not a kind of file; {hint}")
    return near


def _places(
    node: Mapping[str, Any], where: Path_ = (), root: Mapping[str, Any] | None = None
) -> Iterator[tuple[Path_, Plain]]:
    """Every property of the schema, by its path; the members of a choice side by side."""
    root = node if root is None else root
    reference = node.get("$ref")
    if reference:
        name = str(reference).rpartition("/")[2]
        yield from _places(root["$defs"][name], where, root)
    required = node.get("required", [])
    for name, inner in node.get("properties", {}).items():
        place = (*where, name)
        yield place, dict(inner) | {"required_here": name in required}
        yield from _places(inner, place, root)
    for inner in node.get("anyOf", []):
        yield from _places(inner, where, root)
    for key in ("additionalProperties", "items"):
        if isinstance(node.get(key), dict):
            yield from _places(node[key], where, root)


def _find(field: str, places: Mapping[Path_, Plain], kind: str) -> Path_:
    asked = tuple(part for part in field.split(".") if part)
    if kind == "model" and asked:
        asked = (*(part for part in asked[:-1] if part not in _GROUPS), our_word(asked[-1]) or asked[-1])
    whole = [path for path in places if asked and path[-len(asked) :] == asked]
    loose = [path for path in places if asked and path[-1] == asked[-1]]
    found = whole or loose
    if found:
        return min(found, key=len)
    names = {".".join(path) for path in places} | {path[-1] for path in places}
    near = did_you_mean(asked[-1] if asked else field, names)
    raise DistplanError(f"{kind} files have no field '{field}'{near if 'did you mean' in near else ''}")


def _takes(made: Mapping[str, Any]) -> str:
    """Type and units in words."""
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text",
             "array": "a list", "object": "keys and values", "null": "null"}  # fmt: skip
    if "anyOf" in made:
        return " or ".join(dict.fromkeys(_takes(inner) for inner in made["anyOf"]))
    if "enum" in made:
        return "one of " + ", ".join(str(value) or "''" for value in made["enum"])
    units = str(made.get("pattern", "")).rpartition(r"\s*(")[2].partition(")")[0].replace("\\", "")
    if units and "|" in units:
        known = units.split("|")
        return "a quantity with a unit: " + ", ".join(known if len(known) <= 8 else [*known[:8], "…"])
    if "$ref" in made:
        return words["object"]
    return words.get(str(made.get("type", "")), "anything")


def _in_file(document: Document, path: Path_) -> Plain:
    """Value and line; a word of a model may stand at the top or in one of its kinds."""
    for where, line in sorted(document.lines.items(), key=lambda item: item[1]):
        keys = tuple(key for key in where if isinstance(key, str))
        if keys and keys[-1] == path[-1] and (len(path) == 1 or keys[-len(path) :] == path):
            value: Any = document.value
            for key in where:
                value = value[key]
            shown = value if isinstance(value, str | int | float | bool) or value is None else f"{len(value)} entries"
            return {"value": shown, "line": line, "place": dotted(where)}
    return {}
