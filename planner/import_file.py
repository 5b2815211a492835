"""A launcher's own file, read back into a strategy: which launcher's it is shows in its content."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import precision_names
from distplan.hardware.documents import Document, load_mapping, read_text
from distplan.hardware.errors import DistplanError, DocumentError, UnknownNameError
from distplan.planner.import_accelerate import read_accelerate
from distplan.planner.import_arguments import read_arguments, read_toml
from distplan.planner.import_deepspeed import read_deepspeed
from distplan.planner.import_megatron import read_megatron
from distplan.planner.import_torchtitan import read_torchtitan
from distplan.planner.imported import Reading
from distplan.planner.launcher import JOB_FACTS, Unsaid, read_unsaid

READERS: Mapping[str, Callable[[Document, int | None], Reading]] = {
    "megatron": read_megatron,
    "deepspeed": read_deepspeed,
    "torchtitan": read_torchtitan,
    "accelerate": read_accelerate,
}
RUNTIMES = {"megatron": "megatron", "deepspeed": "deepspeed", "torchtitan": "torchtitan", "accelerate": "torchtitan"}
"""launcher -> the runtime whose rules and habits are those of its programs (accelerate: FSDP2)"""
_ACCELERATE = ("distributed_type", "fsdp_config", "parallelism_config", "compute_environment")
_DEEPSPEED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_accumulation_steps", "bf16",
    "fp16",
)  # fmt: skip
_WORKLOAD = tuple(name for name in JOB_FACTS if name != "gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A strategy, and what the file says of the workload. `model`: sizes that a Megatron file states."""

    launcher: str
    runtime: str
    strategy: Strategy
    workload: Mapping[str, Any]
    model: Mapping[str, Any]
    notes: tuple[str, ...]


def import_file(
    path: str | os.PathLike[str], *, launcher: str | None = None, gpus: int | None = None, layers: int | None = None
) -> Imported:
    """Read a file of `launcher` (told by its content unless given). Raises DistplanError with file, line and key.

    gpus: the number of processes, where the file leaves it to whoever starts them. layers: of the model, where
    a file cuts its pipeline by layers per stage.
    """
    if launcher is not None and launcher not in READERS:
        raise UnknownNameError("launcher to import from", launcher, READERS)
    file, text = os.fspath(path), read_text(path)
    document, found = _document(file, text, launcher)
    reading = READERS[found](document, layers)
    unsaid, unknown = _restorable(read_unsaid(_comments(document, text)))
    facts = _meant({"cp_inner": 1, "stage_layers": "", **reading.facts}, unsaid)
    if gpus is not None:
        facts["gpus"] = gpus
    strategy = _strategy(facts, document, unsaid)
    if facts.get("global_batch") is None and facts.get("local_batch") is not None:
        facts["global_batch"] = facts["local_batch"] * strategy.dp
    return Imported(
        launcher=found,
        runtime=RUNTIMES[found],
        strategy=strategy,
        workload={name: facts[name] for name in _WORKLOAD if facts.get(name) is not None},
        model=reading.model,
        notes=(*reading.notes, *unknown),
    )


def _document(file: str, text: str, launcher: str | None) -> tuple[Document, str]:
    """The file's settings, and whose they are."""
    if re.search(r"^\s*\[\s*parallelism\s*\]", text, re.MULTILINE):
        return read_toml(file, text), launcher or "torchtitan"
    # a dash or a brace may open either form; words of arguments are what only one of them has
    if launcher in ("megatron", "torchtitan") or (launcher is None and re.search(r"(^|\s)--[a-z]", _bare(text))):
        document = read_arguments(file, text)
        if launcher is None:
            dotted = any(key.startswith(("parallelism.", "training.")) for key in document.value)
            launcher = "torchtitan" if dotted else "megatron"
        return document, launcher
    document = load_mapping(file)
    if launcher is not None:
        return document, launcher
    if "strategy" in document.value and "format_version" in document.value:
        raise DistplanError(f"{file}: is a strategy of distplan already; `distplan estimate {file}` prices it")
    if any(key in document.value for key in _ACCELERATE):
        return document, "accelerate"
    if any(key in document.value for key in _DEEPSPEED):
        return document, "deepspeed"
    raise DocumentError(
        f"is no launcher's file that is known here ({', '.join(READERS)}); say which one with --from", file=file
    )


def _bare(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _comments(document: Document, text: str) -> list[str]:
    """Where a file can say what the launcher cannot: its comments, or DeepSpeed's key `distplan`."""
    own = document.value.get("distplan")
    if isinstance(own, dict) and isinstance(own.get("not_expressed"), list):
        return [str(line) for line in own["not_expressed"]]
    return [line for line in text.splitlines() if line.startswith("#")]


def _restorable(unsaid: tuple[Unsaid, ...]) -> tuple[tuple[Unsaid, ...], tuple[str, ...]]:
    """Those whose value still has a meaning here, and a sentence for a recipe of one's own, which has none."""
    known = precision_names()
    own = [item for item in unsaid if item.fact == "precision" and item.meant not in known]
    notes = tuple(f"the precision '{item.meant}' is not a recipe known here; {item.taken} is taken" for item in own)
    return tuple(item for item in unsaid if item not in own), notes


def _meant(facts: dict[str, Any], unsaid: tuple[Unsaid, ...]) -> dict[str, Any]:
    """What was meant, where the file still says what it took in its place."""
    return facts | {item.fact: item.meant for item in unsaid if facts.get(item.fact) == item.taken}


def _strategy(facts: Mapping[str, Any], document: Document, unsaid: tuple[Unsaid, ...]) -> Strategy:
    values = {f.name: facts[f.name] for f in fields(Strategy) if facts.get(f.name) is not None}
    by_hand = str(values.pop("stage_layers", ""))
    if by_hand:
        values["stage_layers"] = tuple(int(number) for number in by_hand.split(",") if number.isdigit())
    model_parallel = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1)
    gpus = facts.get("gpus")
    if "dp_shard" not in values:
        dp = facts.get("dp")
        if dp is None:
            if gpus is None:
                raise DistplanError(f"{document.file}: does not say on how many GPUs it runs; give --gpus")
            if gpus % model_parallel:
                raise DistplanError(
                    f"{document.file}: {gpus} GPUs are not a multiple of tp x pp x cp = {model_parallel} in the file"
                )
            dp = gpus // model_parallel
        replicas = values.setdefault("dp_replicate", 1)
        if dp % replicas:
            raise DistplanError(f"{document.file}: dp = {dp} is not a multiple of its {replicas} replicas")
        values["dp_shard"] = dp // replicas
        values = _meant(values, tuple(item for item in unsaid if item.fact in ("dp_shard", "dp_replicate")))
    strategy = Strategy(**values)
    if gpus is not None and strategy.gpus != gpus:
        raise DistplanError(f"{document.file}: the degrees in it multiply to {strategy.gpus} GPUs, not {gpus}")
    return strategy
