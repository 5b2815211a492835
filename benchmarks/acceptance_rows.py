"""A row of an acceptance file as runs to price: one for each combination of what the row leaves open."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from distplan.costmodel.model import Model
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import Cluster, load_cluster, with_compute_scaled
from distplan.hardware.errors import DistplanError
from distplan.hardware.units import parse_bytes, parse_bytes_per_second
from distplan.planner.api import Setting, setting

Row = Mapping[str, Any]
VERDICTS = ("holds", "fails", "undecided", "cannot answer")
WORDS = Path(__file__).with_name("acceptance_words.yaml")
CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "configs"


class CannotAnswer(DistplanError):
    """The row asks for something that is not among what is planned, or leaves its model or machine open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The verdict on one row. `said`: our numbers; `missing`: facts whose extremes disagree."""

    id: str
    kind: str
    verdict: str
    said: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way to fill a row. `open`: fact -> the extreme taken."""

    job: Setting
    strategy: Strategy
    reading: str
    open: Mapping[str, Any]


@cache
def words() -> Mapping[str, Any]:
    table: Mapping[str, Any] = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    return table


def runtime_of(name: str) -> str:
    return str(words()["runtimes"].get(name, {"runtime": name})["runtime"])


def framework_of(row: Row) -> Mapping[str, Any]:
    """The entry of the framework of a run: by the row's `fw`, its words, or its case's name; Megatron if none says."""
    table = words()["frameworks"]
    named = runtime_of(str(row["fw"])) if "fw" in row else ""
    first = str(row.get("case")).split("-")[0]
    rows = [row, *row.get("rows", ())]
    for name, entry in table.items():
        said = any(word in each for word in entry["words"] for each in rows)
        if named == name or said or (not named and first in entry["cases"]):
            return dict(entry)
    return dict(table["megatron"])


def model_of(row: Row) -> Model:
    """By `model`, or `inline`: NAME with N layers."""
    inline = row.get("inline")
    if inline is not None:
        said = re.fullmatch(r"(\S+) with (\d+) layers", str(inline))
        if not said:
            raise CannotAnswer(f"no architecture is given (inline: {inline})")
        whole = load_named(said[1])
        return replace(whole, pattern=whole.pattern[: int(said[2])])
    if "model" not in row:
        raise CannotAnswer("no model is given")
    return load_named(str(row["model"]))


def load_named(name: str) -> Model:
    """A shipped model, else one of the published configs that the tests carry."""
    config = CONFIGS / f"{name}.json"
    try:
        return load_model(name).model
    except DistplanError as error:
        if not config.exists():
            raise CannotAnswer(str(error)) from None
        return load_model(config).model


@cache
def cluster_of(name: str) -> Cluster:
    entry = words()["gpus"].get(name)
    if entry is None:
        raise CannotAnswer(f"GPU '{name}' is not in acceptance_words.yaml")
    cluster = load_cluster(entry["system"])
    part = cluster.accelerator
    if "memory" in entry:
        part = replace(part, memory_bytes=parse_bytes(entry["memory"]))
    if "bandwidth" in entry:
        part = replace(part, memory_bandwidth=parse_bytes_per_second(entry["bandwidth"]))
    cluster = replace(cluster, accelerator=part)
    return with_compute_scaled(cluster, entry["compute"]) if "compute" in entry else cluster


def runs(row: Row) -> Iterator[Run]:
    """Every combination of the extremes of what the row does not give. Raises CannotAnswer."""
    unknown = sorted(set(row) - set(words()["fields"]) - set(words()["notes"]))
    if unknown:
        raise CannotAnswer(f"'{unknown[0]}' is not in acceptance_words.yaml")
    facts = {words()["fields"][word]: value for word, value in row.items() if word in words()["fields"]}
    if "recompute" in row:
        said = str(row["recompute"])
        if said not in words()["recompute"]:
            raise CannotAnswer(f"recompute '{said}' is not in acceptance_words.yaml")
        facts["recompute"] = words()["recompute"][said]
    given = {*facts, "rounds"} if "global_batch" in facts else set(facts)
    open_facts = {name: entry["values"] for name, entry in words()["extremes"].items() if name not in given}
    if "tokens_per_s_gpu" in row and int(facts.get("ep", 1)) > 1:
        open_facts["expert_recipe"] = words()["expert_recipe"]["values"]
    for values in itertools.product(*open_facts.values()):
        yield _run(row, facts, dict(zip(open_facts, values, strict=True)))


def _run(row: Row, facts: Mapping[str, Any], extremes: Mapping[str, Any]) -> Run:
    framework, model = framework_of(row), model_of(row)
    gpu = words()["gpus"].get(str(row.get("gpu")), {})
    cluster = cluster_of(str(row.get("gpu")))
    filled = {**facts, **extremes}
    strategy = _strategy(row, filled, framework, model)
    batch = filled.get("global_batch") or filled["rounds"] * strategy.pp * strategy.micro_batch * strategy.dp
    precision = str(row.get("precision", gpu.get("precision", "bf16")))
    if precision not in framework["recipe"]:
        raise CannotAnswer(f"{framework['runtime']} has no recipe for {precision} in acceptance_words.yaml")
    overrides = {
        "seq_len": filled["seq_len"],
        "global_batch": batch,
        "precision": framework["recipe"][precision],
        "attention": gpu.get("attention", "flash"),
    }
    changes = words()["expert_recipe"]["changes"][filled["expert_recipe"]] if "expert_recipe" in filled else {}
    runtime = replace(load_runtime(framework["runtime"]), **changes)
    job = setting(model, gpus=strategy.gpus, hardware=cluster, runtime=runtime, overrides=overrides)
    return Run(job=job, strategy=strategy, reading=str(framework["reading"]), open=extremes)


def _strategy(row: Row, facts: Mapping[str, Any], framework: Mapping[str, Any], model: Model) -> Strategy:
    gpus = int(row.get("gpus", 0))
    tp, pp, cp = (int(facts.get(name, 1)) for name in ("tp", "pp", "cp"))
    dp = int(row.get("dp", 0)) or gpus // (tp * pp * cp) or 1
    if gpus and dp * tp * pp * cp != gpus:
        raise CannotAnswer(f"tp {tp} · pp {pp} · cp {cp} do not divide {gpus} GPUs")
    zero = int(facts.get("zero", framework["zero"]))
    shard = int(facts.get("dp_shard", dp if zero else 1))
    vpp = int(facts.get("vpp", 1)) if pp > 1 else 1
    recompute = facts["recompute"]
    return Strategy(
        tp=tp,
        pp=pp,
        cp=cp,
        dp_shard=shard,
        dp_replicate=max(1, dp // shard),
        vpp=vpp,
        ep=int(facts.get("ep", 1)),
        etp=int(facts.get("etp", 1)),
        zero=zero if dp * cp > 1 else 0,
        sp=tp > 1 and bool(facts.get("sp", framework["sp"])),
        micro_batch=int(facts["micro_batch"]),
        cp_kind=framework["cp_kind"] if cp > 1 else "none",
        schedule="interleaved" if vpp > 1 else "1f1b",
        recompute=recompute,
        recompute_layers=model.layers if recompute == "full" else 0,
    )


def missing_facts(names: Mapping[str, Any]) -> tuple[str, ...]:
    known = {**words()["extremes"], "expert_recipe": words()["expert_recipe"]}
    return tuple(known[name]["said"] for name in names)
