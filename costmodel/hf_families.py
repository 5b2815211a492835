"""hf_families.yaml as data: which family a config.json belongs to, and what kind of model is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from distplan.costmodel.architecture import data_file
from distplan.hardware.documents import Document
from distplan.hardware.errors import did_you_mean

_REGISTRY_SUFFIXES = ("forcausallm", "lmheadmodel", "forconditionalgeneration", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model_type: names of its facts in the file, values that are not in the file, conditions."""

    name: str
    names: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, Any]
    facts: Mapping[str, Any]
    cycle: tuple[str, ...]
    when: tuple[Mapping[str, Any], ...]


def table(part: str) -> Any:
    return data_file("hf_families.yaml").value[part]


@cache
def family(name: str) -> Family:
    entry = table("families")[name]
    parent = family(entry["like"]) if "like" in entry else None
    names = dict(parent.names) if parent else {fact: tuple(keys) for fact, keys in table("names").items()}
    names.update({fact: tuple(keys) for fact, keys in entry.get("names", {}).items()})
    return Family(
        name=name,
        names=names,
        sizes={**(parent.sizes if parent else {}), **entry.get("sizes", {})},
        facts={**(parent.facts if parent else {}), **entry.get("facts", {})},
        cycle=tuple(entry.get("cycle", parent.cycle if parent else ())),
        when=(parent.when if parent else ()) + tuple(entry.get("when", ())),
    )


@cache
def spellings() -> Mapping[str, str]:
    """model_type in any spelling (lower case, without _ and -) -> family."""
    result = {}
    for name, entry in table("families").items():
        for spelling in (name, *entry.get("also", ())):
            result[_plain(spelling)] = name
    for wrapper, inner in table("wrappers")["families"].items():
        result.setdefault(_plain(wrapper), inner)
    return result


def family_of(config: Document, wrapper: Document) -> Family:
    """The family of a config, from model_type or the architecture's class; DocumentError naming the kind.

    `config` is the language model's section and `wrapper` the whole file (the same where it is flat).
    """
    _refuse_other_kinds(wrapper, str(wrapper.value.get("model_type")))
    for section, key in ((config, "model_type"), (wrapper, "model_type")):
        stated = section.value.get(key)
        if isinstance(stated, str) and stated:
            _refuse_other_kinds(section, stated)
            if _plain(stated) in spellings():
                return family(spellings()[_plain(stated)])
            if section is config:
                known = [*table("families"), *table("wrappers")["families"]]
                raise section.error(
                    f"the model_type '{stated}' is not among the known decoder families"
                    f"{did_you_mean(stated, known)}; any decoder can be described in a model.yaml",
                    key,
                )
    for architecture in _architectures(wrapper):
        for suffix in _REGISTRY_SUFFIXES:
            plain = _plain(architecture).removesuffix(suffix)
            if plain in spellings():
                return family(spellings()[plain])
    raise wrapper.error("is no language model's config.json: it has no model_type")


def _architectures(config: Document) -> Iterator[str]:
    stated = config.value.get("architectures")
    yield from (name for name in stated if isinstance(name, str)) if isinstance(stated, list) else ()


def _refuse_other_kinds(config: Document, model_type: str) -> None:
    for kind, members in table("refused").items():
        if model_type in members:
            raise config.error(f"'{model_type}' is {kind}, which cannot be planned", "model_type")
    if config.value.get("is_encoder_decoder") is True:
        raise config.error("is an encoder-decoder model, which cannot be planned", "is_encoder_decoder")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(".", "")


def holds(condition: Mapping[str, Any], config: Document) -> bool:
    """Whether every key of a `when` entry has (one of) the values it names; null: absent or null."""
    for key, wanted in condition.items():
        if key in ("set", "refuse"):
            continue
        found = locate(config, key)
        value = None if found is None else found[0].value[found[1]]
        if not any(value is option or (value == option and type(value) is type(option)) for option in _options(wanted)):
            return False
    return True


def _options(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def locate(config: Document, name: str) -> tuple[Document, str] | None:
    """Section and key where the dotted `name` stands in a config, or None."""
    *path, key = name.split(".")
    for step in path:
        if not isinstance(config.value.get(step), dict):
            return None
        config = config.section(step)
    return (config, key) if key in config.value else None
