"""A model from a file or by name: our model.yaml, a Hugging Face config.json, or a shipped model."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from distplan.costmodel.architecture import Facts, build, read_fact, schema
from distplan.costmodel.hf_config import load_json, looks_like_config, our_word, read_config
from distplan.costmodel.model import Model, Vision
from distplan.costmodel.workload import read_workload
from distplan.hardware.documents import Document, load_mapping, no_other_keys, read_text, take
from distplan.hardware.errors import DocumentError, did_you_mean

_SECTIONS = ("kinds", "pattern", "workload", "vision", "placements", "source")
_RUN = re.compile(r"([A-Za-z_][\w.-]*?)(?:\s*\*\s*([1-9][0-9]{0,4}))?")
_PLACEMENT = re.compile(r"Shard\([a-z_][a-z0-9_]*\)|Replicate")
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "edp", "ep", "etp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model, what its file says about the workload, and where both came from.

    workload: only the fields that the file states (workload.workload puts the rest under them).
    kind: model.yaml | config.json | shipped. notes: what the reader assumed, a sentence each.
    digest: SHA-256 of the file.
    """

    model: Model
    workload: Mapping[str, Any]
    kind: str
    path: str
    source: str
    digest: str
    notes: tuple[str, ...]


@cache
def shipped_models() -> tuple[str, ...]:
    """Names of the models in models/, sorted."""
    return tuple(sorted(path.stem for path in _shipped_folder().glob("*.yaml")))


def load_model(name_or_path: str | os.PathLike[str]) -> ModelFile:
    """The model of a file, of a folder that holds a config.json or model.yaml, or shipped under a name.

    A file wins over a shipped model of the same name. Raises DocumentError with file, line and key.
    """
    given = os.fspath(name_or_path)
    path = Path(given)
    if not given:
        raise DocumentError("is no name: a file, a folder or a shipped model is expected", file="''")
    if "\0" in given:
        raise DocumentError("is not a path", file=repr(given))
    shipped = {name.lower(): name for name in shipped_models()}
    try:
        inside = [path / name for name in ("config.json", "model.yaml") if (path / name).is_file()]
        exists = path.exists()
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror or error}", file=given) from None
    if inside:
        return _load(inside[0], path.resolve().name)
    if given.lower() in shipped and not path.is_file():
        name = shipped[given.lower()]
        return _load(_shipped_folder() / f"{name}.yaml", name, shipped=True)
    if path.is_dir():
        raise DocumentError("is a folder without a config.json or model.yaml", file=given)
    if not exists:
        raise DocumentError(_missing(given, path), file=given)
    name = path.resolve().parent.name if path.name in ("config.json", "model.yaml") else path.stem
    return _load(path, name or path.stem)


def _shipped_folder() -> Path:
    return Path(str(files("distplan.costmodel"))) / "models"


def _missing(given: str, path: Path) -> str:
    named = path.suffix not in (".yaml", ".yml", ".json") and os.sep not in given
    if named:
        return f"no such file, and no shipped model of that name{did_you_mean(given, shipped_models())}"
    folder = path.parent
    beside = os.listdir(folder)[:1000] if folder.is_dir() and os.access(folder, os.R_OK) else []
    near = did_you_mean(path.name, beside)
    if "did you mean" in near:
        return f"no such file{near}"
    near = did_you_mean(path.stem, shipped_models())
    return f"no such file{near if 'did you mean' in near else ''}"


def _load(path: Path, name: str, shipped: bool = False) -> ModelFile:
    is_json = path.suffix.lower() == ".json"
    document = load_json(path) if is_json else load_mapping(path)
    digest = hashlib.sha256(read_text(path).encode()).hexdigest()
    if looks_like_config(document):
        reading = read_config(document, name)
        return ModelFile(
            model=reading.model,
            workload={},
            kind="config.json",
            path=os.fspath(path),
            source="",
            digest=digest,
            notes=reading.notes,
        )
    return ModelFile(
        model=read_model(document, name),
        workload=read_workload(document.section("workload")) if _has(document, "workload") else {},
        kind="shipped" if shipped else "model.yaml",
        path=os.fspath(path),
        source=take(document, "source", str, default=""),
        digest=digest,
        notes=(),
    )


def _has(document: Document, key: str) -> bool:
    if document.value.get(key) is None:
        return False
    take(document, key, dict)
    return True


def read_model(document: Document, name: str) -> Model:
    """The Model of our model.yaml; `name` where the file gives none. DocumentError."""
    known = [*schema("model"), *schema("layer"), *_SECTIONS]
    for key in document.value:
        if key not in known and (word := our_word(key)) in known:
            raise document.error(f"is config.json's word; in a model.yaml it is '{word}'", key)
    no_other_keys(document, known)
    facts = {
        key: read_fact(document, key, word)
        for key, word in schema("model").items()
        if document.value.get(key) is not None or word.default is None
    }
    facts["name"] = facts.get("name") or name
    common = _layer_words(document)
    kinds = _kinds(document, common)
    _need(document, kinds)
    pattern = _pattern(document, kinds, facts["layers"])

    def blame(problem: str, fact: str) -> DocumentError:
        if _has(document, "kinds"):
            for section in document.section("kinds").items():
                if isinstance(section.value, dict) and fact in section.value:
                    return section.error(problem, fact)
        if fact in document.value:
            return document.error(problem, fact)
        return document.error(f"{fact}: {problem}")

    model = build(facts, [(kind, kinds[kind]) for kind in pattern], blame, _placements(document))
    return replace(model, vision=_vision(document)) if _has(document, "vision") else model


def _vision(document: Document) -> Vision:
    """The section `vision:`, an image tower; DocumentError."""
    section, words = document.section("vision"), schema("vision")
    no_other_keys(section, words)
    found = Vision(
        **{
            key: read_fact(section, key, word)
            if section.value.get(key) is not None or word.default is None
            else word.default
            for key, word in words.items()
        }
    )
    if found.hidden % found.heads:
        raise section.error(f"{found.heads} heads do not divide hidden = {found.hidden}", "heads")
    if found.tokens > found.patches:
        raise section.error(f"{found.patches} patches cannot become {found.tokens} tokens", "tokens")
    return found


def _layer_words(section: Document) -> dict[str, Any]:
    words = schema("layer")
    return {
        key: read_fact(section, key, words[key])
        for key, value in section.value.items()
        if key in words and value is not None
    }


def _kinds(document: Document, common: Facts) -> dict[str, Facts]:
    """Kind -> its facts: what the file says of all layers, and what `kinds` says of this one over it."""
    if not _has(document, "kinds"):
        return {"layer": common}
    kinds: dict[str, Facts] = {}
    for section in document.section("kinds").items():
        name = str(section.where[-1])
        if _RUN.fullmatch(name) is None:
            raise section.error("a kind's name is a word of letters, digits, - and _")
        own: dict[str, Any] = {}
        if section.value is not None:
            if not isinstance(section.value, dict):
                raise section.error("expected the facts in which this kind differs")
            no_other_keys(section, schema("layer"))
            own = _layer_words(section)
        kinds[name] = {**common, **own}
    if not kinds:
        raise document.error("is empty", "kinds")
    return kinds


def _need(document: Document, kinds: Mapping[str, Facts]) -> None:
    """Attention needs its heads, and a layer of a plain model its feed-forward."""
    for facts in kinds.values():
        if facts.get("mixer", "attention") == "attention" and "heads" not in facts:
            take(document, "heads", int)
    if not _has(document, "kinds") and not {"ffn", "experts"} & set(kinds["layer"]):
        take(document, "ffn", int)


def _pattern(document: Document, kinds: Mapping[str, Facts], layers: int) -> list[str]:
    """The kind of every layer: the entries of `pattern` ("name" or "name*count"), repeated to `layers`."""
    if document.value.get("pattern") is None:
        if len(kinds) > 1:
            raise document.error(f"{len(kinds)} kinds need a pattern that says which layers are which", "kinds")
        return [next(iter(kinds))] * layers
    entries = take(document, "pattern", list)
    period: list[str] = []
    for entry in entries:
        match = _RUN.fullmatch(entry) if isinstance(entry, str) else None
        if match is None:
            raise document.error(f"{entry!r} is not 'kind' or 'kind*count'", "pattern")
        if match[1] not in kinds:
            raise document.error(f"unknown kind '{match[1]}'{did_you_mean(match[1], kinds)}", "pattern")
        period += [match[1]] * min(int(match[2] or 1), layers + 1)
        if len(period) > layers:
            raise document.error(f"names more layers than {layers}", "pattern")
    if not period:
        raise document.error("is empty", "pattern")
    for kind in kinds:
        if kind not in period:
            raise document.error(f"never names the kind '{kind}'", "pattern")
    return [period[index % len(period)] for index in range(layers)]


def _placements(document: Document) -> dict[str, dict[str, str]]:
    """Tensor -> mesh axis -> "Shard(dim)" or "Replicate"; the graph knows which tensors and dims exist."""
    if not _has(document, "placements"):
        return {}
    placements: dict[str, dict[str, str]] = {}
    for section in document.section("placements").items():
        if not isinstance(section.value, dict):
            raise section.error("expected mesh axes and placements, as in {tp: Shard(ffn)}")
        no_other_keys(section, MESH_AXES)
        chosen = {axis: take(section, axis, str) for axis in section.value}
        for axis, placement in chosen.items():
            if _PLACEMENT.fullmatch(placement) is None:
                raise section.error(f"'{placement}' is not Shard(dim) or Replicate", axis)
        placements[str(section.where[-1])] = chosen
    return placements
