"""The plan of the layers in a config.json: which have a window, a linear mixer, experts.

Ten conventions say it (lists of words, of 0 and 1, of indices, a string, a period, a first layer and a
step); all end as one mapping of layer facts per layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distplan.costmodel.architecture import Facts, schema
from distplan.costmodel.hf_families import Family, table
from distplan.hardware.documents import Document

LINEAR = ("mamba2", "gated_delta_net", "lightning")


def layer_facts(
    config: Document, family: Family, values: Facts, lists: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """Facts of every layer, first to last; DocumentError where a list does not have one entry per layer."""
    stated = _stated_plan(config)
    layers = values.get("layers") or (len(stated[1]) if stated else 0)
    if not layers:
        raise config.error(f"none of {', '.join(family.names['layers'])} is given, and no plan of the layers")
    if layers > (schema("model")["layers"].most or layers):
        raise config.error(f"{layers} layers make no sense", stated[0] if stated else None)
    if stated and len(stated[1]) != layers:
        raise config.error(f"plans {len(stated[1])} layers, but there are {layers}", stated[0])
    for fact, entries in lists.items():
        if len(entries) != layers:
            raise config.error(f"has {len(entries)} entries for {layers} layers", _key(config, family, fact))
    words = stated[1] if stated else _default_plan(config, family, values, layers)
    sparse = _sparse(config, values, layers)
    result = []
    for index, word in enumerate(words):
        own = {**values, **{fact: entries[index] for fact, entries in lists.items()}}
        result.append(_one(config, own, word, sparse[index] and own["experts"] > 1))
    return result


def _one(config: Document, own: Facts, word: str, sparse: bool) -> dict[str, Any]:
    """Facts of one layer from its word; what a layer lacks is zero, so that equal layers have equal facts."""
    facts = {name: own[name] for name in schema("layer")}
    one = own["one_sublayer"]
    if word in ("moe", "mlp"):
        facts["mixer"], sparse = "none", word == "moe"
    elif word == "linear":
        if own["other"] not in LINEAR:
            raise config.error("plans a linear mixer, of which this family has none", "layer_types")
        facts["mixer"] = own["other"]
        if own["other"] == "lightning":
            width = own["head_dim"] or own["hidden"] // own["heads"]
            facts.update(linear_heads=own["heads"], linear_head_dim=width, linear_state=width)
    if word == "cross":
        facts.update(cross_attention=True, qk_norm="head")
    facts["window"] = own["window"] if word == "local" else 0
    facts["chunk"] = own["chunk"] if word == "chunked" else 0
    has_ffn = not one or word in ("moe", "mlp")
    if has_ffn and sparse:
        facts["ffn"] = 0
        facts["shared_ffn"] = own["shared_ffn"] or own["shared_experts"] * own["expert_ffn"]
    else:
        facts.update(experts=0, top_k=0, expert_ffn=0, shared_ffn=0, router_groups=1, top_groups=1)
        facts["ffn"] = (own["ffn"] or own["expert_ffn"]) if has_ffn else 0
    if sparse and has_ffn:
        # a shared expert's gate without a shared expert is nothing
        facts["shared_gate"] = facts["shared_gate"] and facts["shared_ffn"] > 0
    for fact in ("router_groups", "top_groups"):
        facts[fact] = facts[fact] or 1
    return facts


def _stated_plan(config: Document) -> tuple[str, list[str]] | None:
    """(key, word per layer) where the file lists its layers."""
    for key in ("hybrid_override_pattern", "layers_block_type", "layer_types", "attention_layers"):
        raw = config.value.get(key)
        if isinstance(raw, list | str) and raw:
            return key, _words(config, key, raw)
    raw = config.value.get("attention_types")
    if isinstance(raw, list) and raw and all(_is_run(entry) for entry in raw):
        # GPT-Neo: [[words, repeats], ...]
        return "attention_types", _words(
            config, "attention_types", [word for words, count in raw for word in words * count]
        )
    raw = config.value.get("attn_type_list")
    if isinstance(raw, list) and raw:
        return "attn_type_list", ["full" if entry else "linear" for entry in raw]
    return None


def _words(config: Document, key: str, raw: Sequence[object]) -> list[str]:
    known = table("plan_words")
    unknown = [word for word in raw if not isinstance(word, str) or word not in known]
    if unknown:
        raise config.error(f"the layer type {str(unknown[0])[:40]!r} is not described by this schema", key)
    return [known[word] for word in raw]


def _is_run(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], list)
        and type(entry[1]) is int
        and 0 <= entry[1] * len(entry[0]) <= 10_000
    )


def _default_plan(config: Document, family: Family, values: Facts, layers: int) -> list[str]:
    other = "linear" if values["other"] in LINEAR else values["other"]
    for key, inside, outside in (("cross_attention_layers", "cross", "full"), ("attn_layer_indices", "full", other)):
        indices = config.value.get(key)
        if isinstance(indices, list):
            return [inside if index in indices else outside for index in range(layers)]
    rope = config.value.get("no_rope_layers")
    if values["chunk"] and isinstance(rope, list) and len(rope) == layers:
        return [other if flag else "full" for flag in rope]
    letters = config.value.get("sliding_window_pattern")
    if isinstance(letters, str) and letters:
        # EXAONE 4: one letter per layer of a period, L (local) or G (global)
        cycle = ["full" if letter == "G" else "local" for letter in letters]
        return [cycle[index % len(cycle)] for index in range(layers)]
    if family.cycle:
        return [family.cycle[index % len(family.cycle)] for index in range(layers)]
    period = values["full_every"]
    if period:
        return [other if (index + 1) % period else "full" for index in range(layers)]
    if values["one_sublayer"]:
        raise config.error("a hybrid needs its plan of layers: hybrid_override_pattern or layers_block_type")
    if values["window"]:
        return ["full" if index < values["window_from"] else "local" for index in range(layers)]
    return ["full"] * layers


def _sparse(config: Document, values: Facts, layers: int) -> list[bool]:
    """Which layers have experts, where the model has any."""
    listed = config.value.get("mlp_layer_types")
    if isinstance(listed, list) and listed:
        if len(listed) != layers:
            raise config.error(f"has {len(listed)} entries for {layers} layers", "mlp_layer_types")
        return [word == "sparse" for word in listed]
    flags = config.value.get("moe_layer_freq")
    if isinstance(flags, list):
        if len(flags) != layers:
            raise config.error(f"has {len(flags)} entries for {layers} layers", "moe_layer_freq")
        return [bool(flag) for flag in flags]
    indices = config.value.get("moe_layers")
    if isinstance(indices, list) and indices:
        return [index in indices for index in range(layers)]
    dense = config.value.get("mlp_only_layers")
    excluded = dense if isinstance(dense, list) else []
    last = layers - 1 if values["moe_last"] < 0 else values["moe_last"]
    return [
        values["moe_first"] <= index <= last
        and (index + values["moe_phase"]) % values["moe_step"] == 0
        and index not in excluded
        for index in range(layers)
    ]


def _key(config: Document, family: Family, fact: str) -> str | None:
    return next((key for key in family.names[fact] if key in config.value), None)
