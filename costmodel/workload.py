"""What is trained on: recipes of precision, the `workload:` section, and the defaults under both.

Precedence: command line, then the model's file, then what the runtime does, then defaults.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distplan.costmodel.architecture import data_file, read_fact, schema
from distplan.costmodel.casting import scaling_named, scaling_names
from distplan.costmodel.model import DTYPE_BYTES, Attention, Model, Precision, Workload
from distplan.hardware.documents import Document, no_other_keys, take
from distplan.hardware.errors import DistplanError, UnknownNameError, did_you_mean

_DTYPE_FIELDS = ("compute", "parameters", "gradients", "master", "moments", "matmul")
_CAST_FIELDS = ("scaling", "wgrad", "keeps", "sends", "glu_inputs", "first_layers", "last_layers")
_KEPT = ("attention", "embedding", "router", "head")
_WORDS = {"keeps": _KEPT, "sends": ("tp", "ep")}
_MOMENTS = {"adamw": 2, "sgd": 1, "adamw8bit": 2}
"""Adam keeps mean and variance (arXiv 1412.6980); SGD keeps its momentum"""


def default(name: str) -> Any:
    """A value of defaults.yaml: hardware, runtime, seq_len_at_most, …"""
    return data_file("defaults.yaml").value[name]


def precision_names() -> tuple[str, ...]:
    return tuple(data_file("precisions.yaml").value)


def precision(name: str) -> Precision:
    """The recipe `name` for AdamW; UnknownNameError with near misses."""
    recipes = data_file("precisions.yaml").value
    if name not in recipes:
        raise UnknownNameError("precision", name, recipes)
    return _recipe(name, recipes[name])


def precision_source(name: str) -> str:
    return str(data_file("precisions.yaml").value[name]["source"])


def _recipe(name: str, fields: Mapping[str, Any]) -> Precision:
    moment = fields["moments"]
    more: dict[str, Any] = {key: tuple(fields[key]) for key in ("keeps", "sends") if key in fields}
    more |= {key: fields[key] for key in _CAST_FIELDS if key in fields and key not in _WORDS}
    return Precision(
        name=name,
        compute=fields["compute"],
        parameters=fields["parameters"],
        gradients=fields["gradients"],
        master=fields["master"],
        moments=(moment, moment),
        matmul=fields["matmul"],
        **more,
    )


def for_optimizer(recipe: Precision, optimizer: str) -> Precision:
    """The recipe with the moments of `optimizer`: one for SGD, int8 for adamw8bit (arXiv 2110.02861)."""
    dtype = "int8" if optimizer == "adamw8bit" else recipe.moments[0]
    return replace(recipe, moments=(dtype,) * _MOMENTS[optimizer])


def read_workload(section: Document) -> dict[str, Any]:
    """The fields that a `workload:` section (or the command line) states, checked; DocumentError."""
    words = schema("workload")
    no_other_keys(section, words)
    fields = {
        key: read_fact(section, key, words[key])
        for key, value in section.value.items()
        if key not in ("precision", "moe_imbalance") and value is not None
    }
    if section.value.get("moe_imbalance") is not None:
        fields["moe_imbalance"] = _read_imbalance(section)
    if section.value.get("precision") is not None:
        fields["precision"] = _read_precision(section)
    return fields


def _read_imbalance(section: Document) -> tuple[float, float, float]:
    """(least, expected, most) of what a file says as one number, [low, high] or [low, expected, high]."""
    word = schema("workload")["moe_imbalance"]
    raw = section.value["moe_imbalance"]
    listed = raw if isinstance(raw, list) else [raw]
    if not 1 <= len(listed) <= 3:
        raise section.error("expected a number, [low, high] or [low, expected, high]", "moe_imbalance")
    numbers = [read_fact(replace(section, value={"moe_imbalance": each}), "moe_imbalance", word) for each in listed]
    if numbers != sorted(numbers):
        raise section.error(f"{raw} does not rise: [low, high] or [low, expected, high]", "moe_imbalance")
    return imbalance(numbers)


def imbalance(numbers: Sequence[float]) -> tuple[float, float, float]:
    """(least, expected, most); of [low, high] the middle is expected (assumed)."""
    return numbers[0], numbers[1] if len(numbers) == 3 else 0.5 * (numbers[0] + numbers[-1]), numbers[-1]


def _read_precision(section: Document) -> Precision:
    raw = section.value["precision"]
    if not isinstance(raw, dict):
        name = take(section, "precision", str)
        if name not in precision_names():
            raise section.error(f"unknown precision '{name}'{did_you_mean(name, precision_names())}", "precision")
        return precision(name)
    own = section.section("precision")
    no_other_keys(own, ("like", *_DTYPE_FIELDS, *_CAST_FIELDS))
    base = take(own, "like", str, default=default("workload")["precision"], choices=precision_names())
    fields = dict(data_file("precisions.yaml").value[base])
    for field in _DTYPE_FIELDS:
        choices = [*DTYPE_BYTES, ""] if field == "master" else list(DTYPE_BYTES)
        fields[field] = take(own, field, str, default=fields[field], choices=choices)
    fields |= _read_casts(own, fields)
    return _recipe(f"{base}, changed", fields)


def _read_casts(own: Document, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that products in fp8 and fp4 have beside their dtype; DocumentError."""
    made: dict[str, Any] = {}
    names = [name for name in scaling_names() if scaling_named(name).dtype == fields["matmul"]]
    if fields.get("scaling") not in names:
        made["scaling"] = ""
    if "scaling" in own.value:
        made["scaling"] = take(own, "scaling", str, choices=names or ["(none: matmul is neither fp8 nor fp4)"])
    for key in ("wgrad", "glu_inputs"):
        if key in own.value:
            made[key] = take(own, key, str, choices=list(dict.fromkeys((fields["matmul"], fields["compute"]))))
    made |= {key: _words(own, key, known) for key, known in _WORDS.items() if key in own.value}
    for word in ("attention", "embedding"):
        if word not in made.get("keeps", _KEPT):
            raise own.error(f"{word} in {fields['matmul']} is not modelled: keeps must name it", "keeps")
    for key in ("first_layers", "last_layers"):
        if key in own.value:
            made[key] = take(own, key, int, minimum=0, maximum=10000)
    return made


def _words(own: Document, key: str, known: tuple[str, ...]) -> list[str]:
    words = [str(word) for word in take(own, key, list)]
    for word in words:
        if word not in known:
            raise own.error(f"'{word}' is not one of {', '.join(known)}", key)
    return words


def _attends_to_images(model: Model) -> bool:
    mixers = [model.kinds[name].mixer for name in dict.fromkeys(model.pattern)]
    return any(isinstance(mixer, Attention) and mixer.cross for mixer in mixers)


def _check_images(model: Model, images: float, seq_len: int) -> None:
    if not images or (model.vision is not None and _attends_to_images(model)):
        return
    if model.vision is None:
        raise DistplanError(f"{model.name} has no image tower (vision), so images_per_sequence must be 0")
    if images * model.vision.tokens > seq_len:
        most = seq_len // model.vision.tokens
        raise DistplanError(
            f"{images:g} images of {model.vision.tokens} tokens are more than a sequence of {seq_len}: "
            f"at most {most} fit"
        )


def workload(
    model: Model,
    stated: Mapping[str, Any],
    *,
    gpus: int,
    overrides: Mapping[str, Any] | None = None,
    fallbacks: Mapping[str, Any] | None = None,
) -> Workload:
    """The Workload of `model`: `overrides` (plain values, as typed) over `stated` (ModelFile.workload)
    over `fallbacks` (what a runtime does) over defaults.yaml.

    gpus: the largest count of the search; the default batch follows it, the same for all candidates.
    Raises DistplanError.
    """
    typed = {key: value for key, value in (overrides or {}).items() if value is not None}
    own = read_workload(Document(file="command line", value=typed, lines={}))
    fields = {**default("workload"), **(fallbacks or {}), **stated, **own}
    seq_len = fields.get("seq_len") or min(model.max_seq_len or default("seq_len_at_most"), default("seq_len_at_most"))
    if model.positions == "learned" and seq_len > model.max_positions:
        raise DistplanError(
            f"seq_len {seq_len} is longer than {model.name}'s table of learned positions ({model.max_seq_len}); "
            f"at most {model.max_seq_len} tokens fit, or raise max_seq_len in a model.yaml"
        )
    if _attends_to_images(model):
        # a layer whose keys are an image's has nothing to do without one
        fields["images_per_sequence"] = fields["images_per_sequence"] or 1.0
    _check_images(model, fields["images_per_sequence"], seq_len)
    tokens = max(default("batch_tokens"), default("batch_tokens_per_gpu") * gpus)
    recipe = fields["precision"]
    optimizer = fields["optimizer"]
    least, expected, most = fields["moe_imbalance"]
    return Workload(
        seq_len=seq_len,
        global_batch=fields.get("global_batch") or max(1, tokens // seq_len),
        precision=for_optimizer(precision(recipe) if isinstance(recipe, str) else recipe, optimizer),
        optimizer=optimizer,
        attention=fields["attention"],
        loss=fields["loss"],
        causal=fields["causal"],
        clip_grad=fields["clip_grad"],
        offload_optimizer=fields["offload_optimizer"],
        document_len=fields["document_len"],
        lora_rank=fields["lora_rank"],
        moe_imbalance=expected,
        moe_imbalance_low=least,
        moe_imbalance_high=most,
        images_per_sequence=fields["images_per_sequence"],
        train_vision=fields["train_vision"],
    )
