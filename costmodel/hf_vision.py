"""The image tower in a Hugging Face config.json, by the table `vision` of hf_families.yaml."""

from __future__ import annotations

from typing import Any

from distplan.costmodel.hf_families import locate, table
from distplan.costmodel.model import Vision
from distplan.hardware.documents import Document

_LARGEST = 10_000_000
"""ten times any size that a published tower has, so that a slip is caught"""
_FRACTIONS = ("ffn_ratio", "shuffle")


def read_vision(config: Document, text_hidden: int) -> tuple[Vision | None, tuple[str, ...]]:
    """(the tower, remarks); None where the file has none, or one of a family that the table does not know.

    text_hidden: width of the language model. Raises DocumentError for sizes that cannot be.
    """
    words = table("vision")
    found = next((place for name in words["sections"] if (place := locate(config, name)) is not None), None)
    if found is None or not isinstance(found[0].value[found[1]], dict):
        return None, ()
    section = found[0].section(found[1])
    kind = str(config.value.get("model_type"))
    if kind not in words["families"]:
        return None, (f"the image tower of {kind} is not known, so it can only be left out",)
    facts = {**words["defaults"], **words["families"][kind]["facts"]}
    stated = _stated(config, section)
    sizes = facts | stated | {key: value for key, value in facts.items() if isinstance(value, str)}
    missing = [key for key in ("hidden", "layers", "heads", "patch", "image") if not sizes.get(key)]
    if missing:
        names = ", ".join(words["names"][missing[0]])
        return None, (f"vision_config has none of {names}, so the image tower can only be left out",)
    remarks: tuple[str, ...] = ()
    if "image" not in stated and sizes["image"]:
        side = sizes["image"]
        remarks = (f"{words['unsized']}: {side} x {side} is assumed",)
    return _vision(section, sizes, text_hidden), remarks


def _stated(config: Document, section: Document) -> dict[str, Any]:
    """Facts that the file gives: those of the tower's section win over the whole file's."""
    words = table("vision")
    stated: dict[str, Any] = {}
    for names, place in ((words["wrapper"], config), (words["names"], section)):
        for fact, keys in names.items():
            key = next((key for key in keys if place.value.get(key) is not None), None)
            if key is not None:
                stated[fact] = _number(place, key, fact in _FRACTIONS)
    return stated


def _number(place: Document, key: str, fraction: bool) -> float | int:
    """A positive number; of a height and a width the first."""
    raw = place.value[key]
    raw = raw[0] if isinstance(raw, list) and raw else raw
    kinds = (int, float) if fraction else (int,)
    if not isinstance(raw, kinds) or isinstance(raw, bool) or not 0 < raw <= _LARGEST:
        words = "number" if fraction else "whole number"
        raise place.error(f"expected a positive {words}, not {str(raw)[:40]!r}", key)
    return float(raw) if fraction else int(raw)


def _vision(section: Document, sizes: dict[str, Any], text_hidden: int) -> Vision:
    hidden, patch = sizes["hidden"], sizes["patch"]
    if hidden % sizes["heads"]:
        raise section.error(f"{sizes['heads']} heads do not divide the tower's width {hidden}")
    side = sizes["image"] // patch
    if side < 1:
        raise section.error(f"an image of {sizes['image']} holds no patch of {patch}")
    patches = (side * side + sizes.get("class_token", 0)) * sizes.get("tiles", 1)
    tokens = sizes["tokens"] or int(patches * sizes["shuffle"] ** 2) // sizes["merge"] ** 2
    if not 1 <= tokens <= patches:
        raise section.error(f"{patches} patches of an image cannot become {tokens} tokens")
    merged = hidden * patches // tokens
    inner = {"text": text_hidden, "merged": merged}.get(sizes["projector"], sizes["projector"])
    return Vision(
        hidden=hidden,
        layers=sizes["layers"] + sizes.get("more_layers", 0),
        heads=sizes["heads"],
        ffn=sizes["ffn"] or int(hidden * sizes["ffn_ratio"]),
        patches=patches,
        pixels=sizes["channels"] * patch * patch * sizes["frames"],
        tokens=tokens,
        gated=sizes.get("gated", False),
        norm=sizes.get("norm", "layernorm"),
        position_table=sizes.get("position_table", True),
        concatenated=sizes.get("concatenated", True),
        projector=int(inner),
        outputs=sizes.get("outputs", 1),
    )
