"""JSON Schemas of the files that people write, generated from the types and tables that read them.

https://json-schema.org/draft/2020-12. An editor that knows them completes and checks the YAML
(`# yaml-language-server: $schema=…`). What the schema accepts the reader may still refuse, where two
fields contradict each other; what the reader accepts the schema accepts.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from distplan.costmodel.architecture import Word
from distplan.costmodel.architecture import schema as words_of
from distplan.costmodel.casting import scaling_names
from distplan.costmodel.model import DTYPE_BYTES, LayerKind, Model, Precision, Workload
from distplan.costmodel.model_file import MESH_AXES
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.strategy import STRUCTURE, Strategy
from distplan.costmodel.workload import precision_names
from distplan.planner.schema_hardware import hardware_schema
from distplan.planner.schema_notes import attribute_notes, notes

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_MOST = 10**12
_TYPES: Mapping[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}


def schema(what: str) -> Schema:
    """The schema of `what` (a key of SCHEMAS) as plain data."""
    return {"$schema": DRAFT, "title": f"distplan {what} file"} | SCHEMAS[what]()


def _mapping(properties: Schema, required: list[str], *, closed: bool = True) -> Schema:
    made: Schema = {"type": "object", "properties": properties}
    if required:
        made["required"] = required
    return made | ({"additionalProperties": False} if closed else {})


# ---------------------------------------------------------------- model.yaml


def _word(word: Word) -> Schema:
    made: Schema = {"type": _TYPES[word.kind], "description": word.meaning}
    if word.least is not None:
        made["minimum"] = word.least
    if word.most is not None:
        made["maximum"] = word.most
    if word.choices:
        made["enum"] = list(word.choices)
    if word.default is not None:
        made["default"] = word.default
    return made


def _words(part: str) -> Schema:
    return {name: _word(word) for name, word in words_of(part).items()}


def _model() -> Schema:
    layer = _words("layer")
    placement = {"type": "string", "pattern": r"^(Shard\([a-z_][a-z0-9_]*\)|Replicate)$"}
    own = {
        "kinds": {
            "description": "kinds of layers: each says in which words it differs from the rest of the file",
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": r"^[A-Za-z_][\w.-]*$"},
            "additionalProperties": {"anyOf": [_mapping(layer, []), {"type": "null"}]},
        },
        "pattern": {
            "description": "the kind of every layer, 'kind' or 'kind*count', repeated to the number of layers",
            "type": "array",
            "minItems": 1,
            "items": {"type": "string", "pattern": r"^[A-Za-z_][\w.-]*(\s*\*\s*[1-9][0-9]{0,4})?$"},
        },
        "placements": {
            "description": "tensor -> mesh axis -> Shard(dim) or Replicate",
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "propertyNames": {"enum": list(MESH_AXES)},
                "additionalProperties": placement,
            },
        },
        "workload": {"description": "what it is trained on"} | _mapping(_workload_words(), []),
        "vision": {"description": "an image tower"}
        | _mapping(_words("vision"), [name for name, word in words_of("vision").items() if word.default is None]),
        "source": {"description": "where the numbers are from", "type": "string"},
    }
    required = [name for name, word in words_of("model").items() if word.default is None]
    return _mapping(_words("model") | layer | own, required)


def _workload_words() -> Schema:
    dtypes = {"enum": list(DTYPE_BYTES)}
    names = ("compute", "parameters", "gradients", "moments", "matmul")
    about = notes()["precision"]
    recipe: Schema = {name: dtypes | {"description": about[name]} for name in names}
    recipe["master"] = {"enum": ["", *DTYPE_BYTES], "description": about["master"]}
    recipe |= {
        "scaling": {"enum": list(scaling_names())},
        "wgrad": dtypes,
        "glu_inputs": dtypes,
        "keeps": {"type": "array", "items": {"enum": ["attention", "embedding", "router", "head"]}},
        "sends": {"type": "array", "items": {"enum": ["tp", "ep"]}},
        "first_layers": {"type": "integer", "minimum": 0},
        "last_layers": {"type": "integer", "minimum": 0},
    }
    casts = ("scaling", "wgrad", "glu_inputs", "keeps", "sends", "first_layers", "last_layers")
    recipe |= {name: recipe[name] | {"description": about[name]} for name in casts}
    recipe["like"] = {"enum": list(precision_names()), "description": "the recipe that is changed"}
    made = _words("workload")
    made["precision"] = {
        "description": made["precision"]["description"],
        "anyOf": [{"enum": list(precision_names())}, _mapping(recipe, [])],
    }
    number = {"type": "number", "minimum": 1, "maximum": made["moe_imbalance"]["maximum"]}
    several = {"type": "array", "minItems": 1, "maxItems": 3, "items": number}
    made["moe_imbalance"] = {"description": made["moe_imbalance"]["description"], "anyOf": [number, several]}
    for word in made.values():
        word.pop("default", None)  # what is not said comes from the runtime and defaults.yaml
    return made


# ---------------------------------------------------------------- strategy.yaml


def _strategy() -> Schema:
    about = notes()
    hardware = hardware_schema(about)
    definitions = hardware.pop("$defs")
    number = {"type": "number", "minimum": 0}
    limits = {
        "reserve_bytes": number,
        "memory_limit_bytes": {"anyOf": [number, {"type": "null"}]},
        "allow_tight": {"type": "boolean"},
        "price_per_gpu_hour": {"anyOf": [number, {"type": "null"}]},
    }
    text = {"type": "string"}
    named = {"digest": {"type": "string", "pattern": "^sha256:[0-9a-f]{16}$"}}
    sections: Schema = {
        "format_version": {"type": "string", "pattern": r"^1(\.[0-9]+)?$", "description": "1.x"},
        "strategy": _dataclass(Strategy, "strategy"),
        "limits": _mapping(_noted(limits, "limits"), []),
        "workload": _dataclass(Workload, "workload"),
        "hardware": _mapping(_noted(named | {"id": text, "content": {"$ref": "#/$defs/system"}}, "hardware"), ["id"])
        | {"anyOf": [{"required": ["digest"]}, {"required": ["content"]}]},
        "runtime": _mapping(
            _noted(named | {"name": text, "version": text, "content": _dataclass(Runtime, "")}, "runtime"), ["name"]
        )
        | {"anyOf": [{"required": ["digest"]}, {"required": ["content"]}]},
        "model": _model_in_plan(),
        "estimate": {"type": "object", "description": "what it was priced at when the file was written; never read"},
    }
    required = [name for name in sections if name != "estimate"]
    return _mapping(sections, required) | {"$defs": definitions | {"system": hardware}}


def _model_in_plan() -> Schema:
    """The model as `plain` writes it, its layers in runs."""
    run = _mapping({"kind": {"type": "string"}, "layers": {"type": "integer", "minimum": 1, "maximum": 10_000}},
                   ["kind", "layers"])  # fmt: skip
    made = _dataclass(Model, "model")
    made["properties"]["pattern"] = {"type": "array", "minItems": 1, "items": run}
    return made


def _noted(properties: Schema, section: str) -> Schema:
    about = notes()[section]
    return {name: about_first(about[name], inner) for name, inner in properties.items()}


def about_first(text: str, inner: Schema) -> Schema:
    return {"description": text} | inner


def _dataclass(cls: Any, section: str) -> Schema:
    """What plain.build reads into `cls`."""
    hints = get_type_hints(cls)
    properties: Schema = {}
    required = []
    about = {**attribute_notes(cls), **notes().get(section, {})}
    for f in fields(cls):
        optional = f.default is not MISSING or f.default_factory is not MISSING
        least = 0 if f.default == 0 or f.name == "zero" else 1
        made = _hinted(hints[f.name], least) | _choices(cls, f.name)
        if f.name in about:
            made = about_first(about[f.name], made)
        properties[f.name] = made
        required += [] if optional else [f.name]
    return _mapping(properties, required)


def _choices(cls: Any, name: str) -> Schema:
    if cls is Strategy and name == "zero":
        return {"maximum": 3}
    if cls is Strategy and name in STRUCTURE and name != "sp":
        return {"enum": list(STRUCTURE[name])}
    if cls is Precision and name in ("compute", "parameters", "gradients", "matmul"):
        return {"enum": list(DTYPE_BYTES)}
    if cls is Precision and name == "master":
        return {"enum": ["", *DTYPE_BYTES]}
    return {}


def _hinted(hint: Any, least: int) -> Schema:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_member(each, least) for each in inner if not _from_code(each)]}
    if is_dataclass(hint):
        return _dataclass(hint, "precision" if hint is Precision else "kind" if hint is LayerKind else "")
    if origin is tuple:
        return {"type": "array", "items": _hinted(inner[0], 0)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _hinted(inner[1], 0)}
    if hint is int:
        return {"type": "integer", "minimum": least, "maximum": _MOST}
    return {"type": _TYPES[hint]}


def _from_code(hint: Any) -> bool:
    """A type that holds a function: no file can say one."""
    held = get_type_hints(hint).values() if is_dataclass(hint) else ()
    return any(get_origin(inner) is Callable for inner in held)


def _member(hint: Any, least: int) -> Schema:
    """One of several: null, or a dataclass that says its name."""
    if hint is type(None):
        return {"type": "null"}
    if not is_dataclass(hint):
        return _hinted(hint, least)
    made = _hinted(hint, least)
    made["properties"] = {"type": {"const": cast(type, hint).__name__}} | made["properties"]
    made["required"] = ["type", *made.get("required", [])]
    return made


def _hardware() -> Schema:
    return hardware_schema(notes())


SCHEMAS: Mapping[str, Callable[[], Schema]] = {"model": _model, "strategy": _strategy, "hardware": _hardware}
