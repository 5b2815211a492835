"""A Hugging Face config.json -> Model: one reader over the table hf_families.yaml.

A fact is looked up under the names that its family gives it. A key that is absent means the class
default, and one that is null means "derive it"; both are how transformers reads the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distplan.costmodel.architecture import Word, build, defaults, named, read_fact, schema
from distplan.costmodel.hf_families import Family, family_of, holds, locate, table
from distplan.costmodel.hf_layers import layer_facts
from distplan.costmodel.hf_vision import read_vision
from distplan.costmodel.model import Model
from distplan.hardware.documents import Document, dotted, read_text
from distplan.hardware.errors import DocumentError
from distplan.hardware.parsing import ParseProblem, parse_json

_NOT_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|-?\bInfinity\b|\bNaN\b')
_PLANS = ("full_every", "moe_step")
"""facts whose key may hold a plan of all layers instead, which hf_layers.py reads"""
_PER_LAYER = {*schema("layer"), "shared_experts"} - {"activation"}
_SIZES_TO_MENTION = (
    "layers", "hidden", "vocab", "heads", "kv_heads", "head_dim", "ffn", "experts", "top_k", "expert_ffn", "window",
    "max_seq_len",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A model and what the reader had to assume, one sentence each."""

    model: Model
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Facts of a family with the file's values over them.

    origins: fact -> where it stands in the file. lists: facts that the file gives layer by layer.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, tuple[Document, str]]
    lists: Mapping[str, list[Any]]


def load_json(path: str | os.PathLike[str]) -> Document:
    """As documents.load, but the Infinity and NaN that transformers writes are read as null."""
    file = os.fspath(path)
    text = _NOT_JSON.sub(lambda match: match[0] if match[0][0] == '"' else "null", read_text(path))
    try:
        value, lines = parse_json(text)
    except ParseProblem as problem:
        raise DocumentError(problem.problem, file=file, line=problem.line, key=dotted(problem.keys) or None) from None
    if not isinstance(value, dict):
        raise DocumentError("expected an object of keys and values", file=file)
    return Document(file=file, value=value, lines=lines)


def looks_like_config(document: Document) -> bool:
    """Whether a mapping is somebody's config.json and not our model.yaml, which may be JSON too."""
    marks = ("model_type", "architectures", "transformers_version", "_class_name", "_diffusers_version")
    ours = {"layers", "hidden"} & document.value.keys()
    return any(mark in document.value for mark in marks) or (document.file.endswith(".json") and not ours)


def our_word(key: str) -> str | None:
    """The word of model.yaml for a key of config.json."""
    return next((fact for fact, keys in table("names").items() if key in keys), None)


def read_config(config: Document, name: str) -> Reading:
    """The decoder that a config.json describes; DocumentError where it describes none."""
    if any(key.startswith(("_class_name", "_diffusers")) for key in config.value):
        raise config.error("is a diffusers file: a diffusion model, which cannot be planned")
    section = _language_section(config)
    family = family_of(section, config)
    _refuse_unsupported(section, family)
    found = _facts(section, config, family)
    layers = named(layer_facts(section, family, found.values, found.lists))

    def blame(problem: str, fact: str) -> DocumentError:
        if fact in found.origins:
            place, key = found.origins[fact]
            return place.error(problem, key)
        return section.error(f"{fact}: {problem} (not in the file: {family.name}'s class default)")

    model = build({**_of_part("model", found.values), "name": name}, layers, blame)
    vision, remarks = read_vision(config, model.hidden)
    notes = tuple(_notes(section, config, family, found))
    return Reading(model=replace(model, vision=vision), notes=(*notes, *remarks))


def _language_section(config: Document) -> Document:
    for name in table("wrappers")["sections"]:
        place = locate(config, name)
        if place is not None and isinstance(place[0].value[place[1]], dict) and place[0].value[place[1]]:
            return place[0].section(place[1])
    return config


def _refuse_unsupported(section: Document, family: Family) -> None:
    for entry in family.when:
        if "refuse" in entry and holds(entry, section):
            key = next(key for key in entry if key != "refuse")
            raise section.error(entry["refuse"], key)


def _facts(section: Document, wrapper: Document, family: Family) -> _Found:
    words = {**schema("model"), **schema("layer"), **schema("plan")}
    values = {**defaults("model"), **defaults("layer"), **defaults("plan"), **family.sizes, **family.facts}
    origins: dict[str, tuple[Document, str]] = {}
    lists: dict[str, list[Any]] = {}
    for fact, keys in family.names.items():
        place = _place(section, wrapper, fact, keys)
        if place is None:
            continue
        origins[fact] = place
        raw = place[0].value[place[1]]
        if raw is None:
            values[fact] = words[fact].default
        elif isinstance(raw, list | str) and fact in _PLANS:
            continue
        elif isinstance(raw, list) and fact in _PER_LAYER:
            lists[fact] = [_checked(place, fact, item, words[fact]) for item in raw]
        else:
            values[fact] = _checked(place, fact, raw, words[fact])
    for entry in family.when:
        if "set" in entry and holds(entry, section):
            values.update(entry["set"])
    values["activation"] = _activation(values["activation"], section, origins.get("activation"))
    _derive(section, family, values, lists)
    if values["embedding_dim"] not in (0, values["hidden"]):
        where, key = origins["embedding_dim"]
        raise where.error(f"an embedding narrower than hidden_size = {values['hidden']} is not described", key)
    return _Found(values=values, origins=origins, lists=lists)


def _place(section: Document, wrapper: Document, fact: str, keys: tuple[str, ...]) -> tuple[Document, str] | None:
    """Where the file states a fact; a value before a null, and the wrapper only for tied embeddings."""
    places = [place for key in keys if (place := locate(section, key)) is not None]
    if not places and fact == "tied_embedding":
        places = [place for key in keys if (place := locate(wrapper, key)) is not None]
    stated = [place for place in places if place[0].value[place[1]] is not None]
    return next(iter(stated or places), None)


def _checked(place: tuple[Document, str], fact: str, raw: Any, word: Word) -> Any:
    section, key = place
    if fact == "activation":
        word = replace(word, choices=())
    return read_fact(replace(section, value={key: raw}), key, word)


def _activation(written: str, section: Document, place: tuple[Document, str] | None) -> str:
    for name, spellings in table("activations").items():
        if written.lower() in spellings:
            return str(name)
    known = ", ".join(spelling for spellings in table("activations").values() for spelling in spellings)
    where, key = place or (section, "hidden_act")
    raise where.error(f"the activation '{written}' is not known; known: {known}", key)


def _derive(section: Document, family: Family, values: dict[str, Any], lists: Mapping[str, Any]) -> None:
    """Widths that follow from others, once everything stated is in `values`."""
    for fact in ("hidden", "vocab", "heads"):
        if not values.get(fact) and fact not in lists:
            names = ", ".join(family.names[fact])
            raise section.error(f"none of {names} is given, and {family.name} has no default for it")
    if not values["ffn"] and values["ffn_ratio"]:
        values["ffn"] = int(values["ffn_ratio"] * values["hidden"])
    values["ffn"] //= values["ffn_divisor"]
    if values["kv_lora_rank"]:
        values["head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        values["kv_heads"] = 0  # every head has keys and values of its own, whatever num_key_value_heads says
    else:
        values["v_head_dim"] = 0
    if not values["ffn"] and not values["experts"] and not {"ffn", "experts"} & lists.keys():
        raise section.error(f"none of {', '.join(family.names['ffn'])} is given")


def _of_part(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in schema(part) if name in values}


def _notes(section: Document, wrapper: Document, family: Family, found: _Found) -> list[str]:
    notes = []
    if section is not wrapper or "vision_config" in wrapper.value:
        notes.append("only the language model counts as parameters; image and audio towers are not counted")
    absent = [
        f"{family.names[fact][0]} {found.values[fact]}"
        for fact in _SIZES_TO_MENTION
        if fact in family.sizes and fact not in found.origins and family.names[fact] and found.values[fact]
    ]
    if absent:
        notes.append(f"not in the file, so {family.name}'s class defaults: {', '.join(absent)}")
    if not found.values["max_seq_len"]:
        notes.append("the file states no longest sequence")
    return notes
