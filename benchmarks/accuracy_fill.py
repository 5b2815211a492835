"""A row of a truth file as the model, workload, machine, runtime and strategy that it describes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.accuracy_rows import Row, first_match, measured_memory, measured_seconds, number
from distplan.costmodel.fitted import software_factors
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.model_file import read_model
from distplan.costmodel.runtime import Runtime, load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import precision, read_workload
from distplan.hardware.cluster import Cluster, load_cluster, with_compute_scaled
from distplan.hardware.documents import Document
from distplan.hardware.errors import DistplanError
from distplan.hardware.units import parse_bytes, parse_bytes_per_second


class LeftOut(DistplanError):
    """A due row that is not predicted, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured run, ready to be predicted."""

    row: Row
    framework: str
    """the table's name for it"""
    model: Model
    workload: Workload
    """global_batch is the row's"""
    cluster: Cluster
    runtime: Runtime
    strategy: Strategy
    recompute: str
    """none | selective | full | least"""
    filled: tuple[str, ...]
    """what the row did not say"""
    seconds: float
    memory: float
    reading: str
    oom: bool | None
    offloads: bool
    """a share of the activations goes to the host: priced as if its copies were hidden; no memory is scored"""


def case_of(row: Row) -> Case:
    """The row filled from truth_defaults.yaml. Raises LeftOut with the reason."""
    framework = first_match("frameworks", row, keys=("framework", "source"))
    if framework is None:
        raise LeftOut(f"framework '{row['framework']}' is not in the table")
    filled: list[str] = []
    keys = ("pattern", "framework", "gpu", "arch_from")
    said = first_match("attention", {**row, "pattern": row["attention_impl"]}, keys=keys)
    attention = said["is"] if said else framework.get("attention", "flash")
    changes = _changes(row, framework.get("changes", {}), (said or {}).get("changes", {}))
    runtime = _runtime(framework["runtime"], json.dumps(changes))
    strategy, recompute = _strategy(row, framework, runtime, filled)
    model = _model(row, framework, filled)
    workload = _workload(row, framework, runtime, attention, filled)
    seconds = measured_seconds(row)
    memory, reading = measured_memory(row)
    oom = {"1": True, "0": False}.get(row["oom"])
    if row["derived_complete_time"] != "1" and not memory and oom is None:
        raise LeftOut("neither a time nor memory is printed")
    return Case(
        row=row,
        framework=framework["name"],
        model=model,
        workload=workload,
        cluster=_cluster(row, filled),
        runtime=runtime,
        strategy=strategy,
        recompute=recompute,
        filled=tuple(filled),
        seconds=seconds,
        memory=memory,
        reading=reading,
        oom=oom,
        offloads=bool(re.search(r"ratio (0\.[0-9]*[1-9]|1)", row["offload"])),
    )


def _changes(row: Row, *given: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the runtime as given, and of the tables that say more of rows with experts; overlaps add up."""
    found = list(given)
    if row["model_kind"] != "dense":
        for table in ("dispatch", "cuda_graphs", "expert_overlap", "data_overlap"):
            entry = first_match(table, row, keys=("notes", "framework", "gpu", "vpp"))
            found.append((entry or {}).get("changes", {}))
    changes: dict[str, Any] = {}
    for more in found:
        overlap = {**changes.get("overlap", {}), **more.get("overlap", {})}
        changes |= {**more, "overlap": overlap} if overlap else more
    return changes


@cache
def _runtime(name: str, changes: str) -> Runtime:
    runtime = load_runtime(name)
    facts = json.loads(changes)
    if "overlap" in facts:
        facts["overlap"] = {**runtime.overlap, **facts["overlap"]}
    if "state" in facts:
        facts["state"] = replace(runtime.state, **facts["state"])
    facts |= {name: tuple(value) for name, value in facts.items() if isinstance(value, list)}
    if "name" in facts:
        facts["software_factors"] = software_factors(facts["name"])
    return replace(runtime, **facts) if facts else runtime


# ---------------------------------------------------------------- strategy


def _integer(row: Row, name: str, default: int = 1) -> int:
    return int(number(row, name)) or default


def _strategy(row: Row, framework: Mapping[str, Any], runtime: Runtime, filled: list[str]) -> tuple[Strategy, str]:
    tp, pp, cp, ep = (_integer(row, name) for name in ("tp", "pp", "cp", "ep"))
    gpus = _integer(row, "n_gpus", 0)
    dp = gpus // (tp * pp * cp)
    if not dp or dp * tp * pp * cp != gpus:
        raise LeftOut("the degrees do not multiply to the number of GPUs")
    zero, group = _zero(row, framework, dp * cp, filled)
    shard = dp if zero else 1
    if group and zero and dp % group == 0:
        shard = group
    sp = _said(row, "sp", framework, filled, matters=tp > 1)
    vpp = _vpp(row, framework, pp, filled)
    recompute = row["recompute"]
    if recompute == "unknown":
        filled.append("recompute")
        recompute = framework.get("recompute", "least")
    ulysses = "ulysses" in row["framework"].lower() or "ulysses" in row["notes"].lower()
    etp = _integer(row, "etp")
    if not row["etp"] and ep > 1 and tp > 1:
        filled.append("etp")
        etp = tp if framework.get("etp") == "tp" and gpus // pp % (ep * tp) == 0 else 1
    kind = "none" if cp == 1 else "ulysses" if ulysses and "ulysses" in runtime.legal["cp_kind"] else _ring(runtime)
    strategy = Strategy(
        dp_replicate=dp // shard,
        dp_shard=shard,
        tp=tp,
        pp=pp,
        vpp=vpp if pp > 1 else 1,
        cp=cp,
        cp_kind=kind,
        ep=ep,
        etp=etp,
        sp=bool(sp) and tp > 1,
        zero=zero,
        micro_batch=_micro_batch(row, dp),
        schedule=_schedule(row, framework, vpp if pp > 1 else 1),
        recompute="none" if recompute in ("least", "none") else recompute,
        recompute_layers=1_000_000 if recompute == "full" else 0,
    )
    return strategy, recompute


def _vpp(row: Row, framework: Mapping[str, Any], pp: int, filled: list[str]) -> int:
    """Chunks per stage; unsaid: one, or (`layers`) one for every layer of a stage where that divides."""
    if pp == 1 or row["vpp"]:
        return _integer(row, "vpp")
    filled.append("vpp")
    layers = _integer(row, "num_layers")
    return layers // pp if framework.get("vpp") == "layers" and layers % pp == 0 else 1


def _schedule(row: Row, framework: Mapping[str, Any], vpp: int) -> str:
    """A schedule that the notes name, else 1F1B or its interleaved form."""
    named = re.search(r"schedule (ZB-\w+)", row["notes"])
    if named is None:
        return "interleaved" if vpp > 1 else "1f1b"
    if named[1] not in framework.get("schedules", {}):
        raise LeftOut(f"schedule {named[1]}: not among those that are priced")
    return str(framework["schedules"][named[1]])


def _ring(runtime: Runtime) -> str:
    legal = runtime.legal["cp_kind"]
    return next(kind for kind in ("ring", "all_gather", "ulysses", "none") if kind in legal)


def _micro_batch(row: Row, dp: int) -> int:
    micro = _integer(row, "micro_batch", 0)
    batch = int(number(row, "global_batch", "derived_global_batch"))
    if not micro or not batch:
        raise LeftOut("no micro batch or global batch")
    if batch % (dp * micro):
        raise LeftOut("the global batch is not a multiple of dp x micro batch")
    return micro


def _said(row: Row, name: str, framework: Mapping[str, Any], filled: list[str], *, matters: bool) -> bool:
    if row[name] in ("0", "1"):
        return row[name] == "1"
    if matters:
        filled.append(name)
    return bool(framework[name])


def _zero(row: Row, framework: Mapping[str, Any], shards: int, filled: list[str]) -> tuple[int, int]:
    """(stage, size of the sharding group or 0 for all)."""
    said = re.match(r"[0-3]", row["derived_zero_class"])
    group = re.search(r"(?:shard group|hpZ=|zero1=) ?(\d+)", row["zero_stage_or_fsdp"])
    if not said and shards > 1:
        filled.append("zero")
    stage = int(said[0]) if said else int(framework["zero"])
    mesh = re.search(r"dcn_FSDP=(\d+) .*ici_FSDP=(\d+)", row["notes"])
    size = int(mesh[1]) * int(mesh[2]) if mesh else int(group[1]) if group else 0
    return (stage if shards > 1 else 0), size


# ---------------------------------------------------------------- model


def _model(row: Row, framework: Mapping[str, Any], filled: list[str]) -> Model:
    family = first_match("families", {**row, "name": row["model_name"]}, keys=("name",))
    assert family is not None
    facts = dict(family["facts"]) | framework.get("model", {})
    layers, hidden = _integer(row, "num_layers", 0), _integer(row, "hidden", 0)
    vocab = _integer(row, "vocab", 0)
    if not vocab:
        filled.append("vocab")
        vocab = int(framework.get("vocab", 50257))
    facts |= {"layers": layers, "hidden": hidden, "vocab": vocab, "heads": _integer(row, "heads", 0)}
    facts["kv_heads"] = _integer(row, "kv_heads", facts["heads"])
    if facts.get("positions") == "learned":
        facts["max_seq_len"] = int(number(row, "seq_len", "derived_seq_len"))
    ffn, experts = _integer(row, "ffn", 0), _integer(row, "experts", 0)
    if row["model_kind"].startswith("hybrid"):
        raise LeftOut("hybrid model: the row does not say which layers are which")
    if not experts:
        if not ffn:
            filled.append("ffn")
        facts["ffn"] = ffn or 4 * hidden
        return _read(json.dumps({key: value for key, value in facts.items() if key != "shared_ffn"}, sort_keys=True))
    facts |= {"experts": experts, "top_k": _integer(row, "topk", 0), "expert_ffn": _integer(row, "moe_ffn", 0)}
    return _read(json.dumps(_with_pattern(facts, family, layers, ffn), sort_keys=True))


def _with_pattern(facts: dict[str, Any], family: Mapping[str, Any], layers: int, ffn: int) -> dict[str, Any]:
    """The facts with the layer kinds of a family that mixes them."""
    dense = min(int(family.get("dense_first", 0)), layers)
    words = ("experts", "top_k", "expert_ffn", "shared_ffn", "router_groups", "top_groups")
    moe = {key: facts.pop(key) for key in words if key in facts}
    if dense and ffn:
        return facts | {
            "kinds": {"dense": {"ffn": ffn}, "moe": moe},
            "pattern": [f"dense*{dense}", f"moe*{layers - dense}"],
        }
    other = family.get("alternate")
    if other and layers >= family.get("when_layers_at_least", 2):
        first = other if "ffn" in other else moe | other
        return facts | {"kinds": {"first": first, "second": moe}, "pattern": ["first", "second"]}
    return facts | moe


@cache
def _read(facts: str) -> Model:
    return read_model(Document(file="truth row", value=json.loads(facts), lines={}), "row")


# ---------------------------------------------------------------- workload and machine


def _workload(row: Row, framework: Mapping[str, Any], runtime: Runtime, attention: str, filled: list[str]) -> Workload:
    kind = row["derived_precision_class"]
    if not kind:
        filled.append("precision")
    recipe = framework["recipe"].get(kind)
    if recipe is None:
        raise LeftOut(f"no recipe for {kind or 'unsaid precision'}")
    return Workload(
        seq_len=int(number(row, "seq_len", "derived_seq_len")),
        global_batch=int(number(row, "global_batch", "derived_global_batch")),
        precision=_precision(json.dumps(recipe)),
        attention=attention,
        loss=framework.get("loss", runtime.loss),
    )


@cache
def _precision(recipe: str) -> Any:
    value = json.loads(recipe)
    if isinstance(value, str):
        return precision(value)
    return read_workload(Document(file="truth_defaults.yaml", value={"precision": value}, lines={}))["precision"]


def _cluster(row: Row, filled: list[str]) -> Cluster:
    entry = first_match("systems", row, keys=("gpu", "framework", "gpu_mem_gb"))
    if entry is None:
        raise LeftOut(f"GPU '{row['gpu'] or 'unsaid'}' is not in the table")
    said = number(row, "inter_bw_Gbps_per_gpu")
    if not said and number(row, "n_gpus") > 8:
        filled.append("network")
    node = int(entry.get("node") or 0)
    return _machine(json.dumps(entry), said, node or _integer(row, "gpus_per_node", 0))


@cache
def _machine(entry: str, gigabits: float, node: int) -> Cluster:
    """The system of the table with the network and node size that the row states."""
    facts = json.loads(entry)
    cluster = load_cluster(facts["system"])
    fabric = gigabits * 1e9 / 8.0 or (parse_bytes_per_second(facts["fabric"]) if "fabric" in facts else 0.0)
    tiers = cluster.tiers
    if fabric:
        tiers = tuple(replace(t, bandwidth=fabric) if t.name in ("pod", "fabric") else t for t in tiers)
    if node and tiers[0].size == cluster.gpus_per_node != node:
        tiers = (replace(tiers[0], size=float(node)), *tiers[1:])
        cluster = replace(cluster, gpus_per_node=node)
    cluster = replace(cluster, tiers=tiers)
    accelerator = cluster.accelerator
    if "memory" in facts:
        accelerator = replace(accelerator, memory_bytes=parse_bytes(facts["memory"]))
    if "bandwidth" in facts:
        accelerator = replace(accelerator, memory_bandwidth=parse_bytes_per_second(facts["bandwidth"]))
    cluster = replace(cluster, accelerator=accelerator)
    return with_compute_scaled(cluster, facts["compute"]) if "compute" in facts else cluster
