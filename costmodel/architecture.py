"""Facts about layers -> Model: the one place where the words of model_schema.yaml become dataclasses.

Facts are a plain mapping from a word of the schema to its value. Both readers (model.yaml and
config.json) end here, so that what a file may say and what is refused do not depend on its dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from distplan.costmodel.model import Attention, LayerKind, LinearAttention, Mlp, Model, Moe
from distplan.hardware.documents import Document, load_mapping, take
from distplan.hardware.errors import DocumentError

Facts = Mapping[str, Any]
Blame = Callable[[str, str], DocumentError]
"""(problem, fact) -> an error that points at where the fact was written"""

_KINDS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool, "text": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of the schema: its kind, default (None = required), bounds and meaning."""

    kind: Callable[[Any], Any]
    default: Any
    least: float | None
    most: float | None
    choices: tuple[str, ...]
    meaning: str


@cache
def schema(part: str) -> Mapping[str, Word]:
    """The words of `part` ("model" | "layer") in the order of the file."""
    words: dict[str, Word] = {}
    for name, entry in data_file("model_schema.yaml").value[part].items():
        words[name] = Word(
            kind=_KINDS[entry["kind"]],
            default=entry.get("default"),
            least=entry.get("least"),
            most=entry.get("most"),
            choices=tuple(entry.get("choices", ())),
            meaning=entry["meaning"],
        )
    return words


@cache
def data_file(name: str) -> Document:
    """A YAML file that ships with this package."""
    return load_mapping(Path(str(files("distplan.costmodel"))) / name)


def defaults(part: str) -> dict[str, Any]:
    return {name: word.default for name, word in schema(part).items() if word.default is not None}


def read_fact(section: Document, key: str, word: Word) -> Any:
    """The checked value of `key` in a user's file; DocumentError."""
    return take(section, key, word.kind, minimum=word.least, maximum=word.most, choices=word.choices)


def build(
    model: Facts,
    layers: Sequence[tuple[str, Facts]],
    blame: Blame,
    placements: Mapping[str, Mapping[str, str]] | None = None,
) -> Model:
    """The Model of `layers`, (kind name, its facts) first to last; a name always has the same facts.

    Raises what `blame` makes where sizes contradict each other.
    """
    model = {**defaults("model"), **model}
    hidden = model["hidden"]
    kinds: dict[str, LayerKind] = {}
    for name, facts in layers:
        if name not in kinds:
            kinds[name] = layer_kind(name, {**defaults("layer"), **facts}, hidden, blame)
    if model["positions"] == "learned" and not model["max_seq_len"]:
        raise blame("a learned position table needs its number of rows", "max_seq_len")
    learned_rows = model["max_seq_len"] + model["position_offset"]
    same = {name: value for name, value in model.items() if name not in ("layers", "position_offset")}
    return Model(
        **same,
        kinds=kinds,
        pattern=tuple(name for name, _ in layers),
        max_positions=learned_rows if model["positions"] == "learned" else 0,
        embedding_norm_bias=model["embedding_norm"] and kinds[layers[0][0]].norm_bias,
        mtp_kind=layers[-1][0] if model["mtp_layers"] else "",
        placements=placements or {},
    )


def layer_kind(name: str, facts: Facts, hidden: int, blame: Blame) -> LayerKind:
    mixer: Attention | LinearAttention | None = None
    if facts["mixer"] == "attention":
        mixer = _attention(facts, hidden, blame)
    elif facts["mixer"] != "none":
        mixer = _linear(facts, blame)
    ffn = _moe(facts, blame) if facts["experts"] else _mlp(facts)
    if mixer is None and ffn is None:
        raise blame("a layer with neither a mixer nor a feed-forward does nothing", "ffn")
    if facts["shared_norm"] and not facts["parallel"]:
        raise blame("one shared norm needs parallel: true", "shared_norm")
    if facts["norm_bias"] and facts["norm"] == "rmsnorm":
        raise blame("an RMSNorm has no bias", "norm_bias")
    return LayerKind(
        name=name,
        mixer=mixer,
        ffn=ffn,
        norm=facts["norm"],
        norm_bias=facts["norm_bias"],
        norm_weight=facts["norm_weight"],
        norm_position=facts["norm_position"],
        parallel=facts["parallel"],
        shared_norm=facts["shared_norm"],
    )


def _attention(facts: Facts, hidden: int, blame: Blame) -> Attention:
    heads, kv_heads, head_dim = facts["heads"], facts["kv_heads"] or facts["heads"], facts["head_dim"]
    if heads < 1:
        raise blame("attention needs at least 1 head", "heads")
    if heads % kv_heads:
        raise blame(f"{heads} query heads cannot share {kv_heads} key/value heads evenly", "kv_heads")
    if not head_dim:
        if hidden % heads:
            raise blame(f"{heads} heads do not divide hidden = {hidden}, and head_dim is not given", "heads")
        head_dim = hidden // heads
    latent = facts["kv_lora_rank"] > 0
    if facts["v_head_dim"] not in (0, head_dim) and not latent:
        raise blame("a v_head_dim of its own needs kv_lora_rank (multi-head latent attention)", "v_head_dim")
    if latent and not 0 < facts["qk_rope_head_dim"] < head_dim:
        raise blame(f"must lie between 0 and head_dim = {head_dim}", "qk_rope_head_dim")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=facts["v_head_dim"] or head_dim,
        qkv_bias=facts["qkv_bias"],
        out_bias=facts["out_bias"],
        qk_norm=facts["qk_norm"],
        window=facts["window"],
        chunk=facts["chunk"],
        softcap=facts["softcap"],
        sinks=facts["sinks"],
        gated=facts["gated_attention"],
        cross=facts["cross_attention"],
        q_lora_rank=facts["q_lora_rank"],
        kv_lora_rank=facts["kv_lora_rank"],
        qk_rope_head_dim=facts["qk_rope_head_dim"],
    )


def _linear(facts: Facts, blame: Blame) -> LinearAttention:
    for fact in ("linear_heads", "linear_head_dim", "linear_state"):
        if facts[fact] < 1:
            raise blame(f"a {facts['mixer']} layer needs it", fact)
    if facts["mixer"] == "gated_delta_net" and facts["linear_key_heads"] < 1:
        raise blame("a gated_delta_net layer needs it", "linear_key_heads")
    return LinearAttention(
        kind=facts["mixer"],
        heads=facts["linear_heads"],
        head_dim=facts["linear_head_dim"],
        state=facts["linear_state"],
        groups=facts["linear_groups"],
        conv_kernel=facts["conv_kernel"],
        chunk=facts["scan_chunk"],
        key_heads=facts["linear_key_heads"],
        bias=facts["linear_bias"],
        conv_bias=facts["conv_bias"],
    )


def _mlp(facts: Facts) -> Mlp | None:
    if not facts["ffn"]:
        return None
    return Mlp(ffn=facts["ffn"], gated=facts["gated"], bias=facts["mlp_bias"], activation=facts["activation"])


def _moe(facts: Facts, blame: Blame) -> Moe:
    experts, top_k = facts["experts"], facts["top_k"]
    if not 1 <= top_k <= experts:
        raise blame(f"a token uses between 1 and all {experts} experts, not {top_k}", "top_k")
    if facts["expert_ffn"] < 1:
        raise blame("experts need a width", "expert_ffn")
    if experts % facts["router_groups"] or facts["top_groups"] > facts["router_groups"]:
        raise blame(
            f"{experts} experts in {facts['router_groups']} groups, {facts['top_groups']} of them per token, "
            "do not fit together",
            "router_groups",
        )
    return Moe(
        experts=experts,
        top_k=top_k,
        ffn=facts["expert_ffn"],
        gated=facts["gated"],
        bias=facts["mlp_bias"],
        shared_ffn=facts["shared_ffn"],
        shared_gate=facts["shared_gate"],
        router_bias=facts["router_bias"],
        capacity_factor=facts["capacity_factor"],
        groups=facts["router_groups"],
        top_groups=facts["top_groups"],
        latent=facts["expert_latent"],
        activation=facts["activation"],
    )


def named(layers: Iterable[Facts]) -> list[tuple[str, Facts]]:
    """Names for layers that are known only by their facts: equal facts, equal name."""
    names: dict[tuple[tuple[str, Any], ...], str] = {}
    result = []
    for facts in layers:
        key = tuple(sorted(facts.items()))
        if key not in names:
            word = _describe(facts)
            taken = sum(1 for name in names.values() if name == word or name.startswith(f"{word}_v"))
            names[key] = word if not taken else f"{word}_v{taken + 1}"
        result.append((names[key], facts))
    return result


def _describe(facts: Facts) -> str:
    mixer = facts.get("mixer", "attention")
    if mixer == "attention":
        mixer = "local" if facts.get("window") else "chunked" if facts.get("chunk") else "attention"
    ffn = "moe" if facts.get("experts") else "mlp" if facts.get("ffn") else "none"
    return "_".join(part for part in (mixer, ffn) if part != "none") or "empty"
