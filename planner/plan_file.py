"""strategy.yaml: a strategy with all that it was priced for, so that it can be priced again anywhere.

The model and the workload are in the file. Shipped hardware and runtimes are named with a digest of
their content; a user's own are in the file as well. The same plan gives the same bytes on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from distplan.costmodel.model import DTYPE_BYTES, Model, Precision, Workload
from distplan.costmodel.runtime import Runtime, load_runtime
from distplan.costmodel.strategy import STRUCTURE, Strategy
from distplan.hardware.cluster import Cluster, load_cluster, read_cluster
from distplan.hardware.documents import Document, load_mapping, no_other_keys, take, write_atomically
from distplan.hardware.errors import DistplanError, UnknownNameError
from distplan.planner.document import FORMAT_VERSION, choice
from distplan.planner.output import yaml_text
from distplan.planner.plain import build, digest, plain, rounded
from distplan.planner.plan import Choice, Plan

MAX_LAYERS = 10_000
_HEAD = "# yaml-language-server: $schema=strategy.schema.json\n"
_HEAD += "# A strategy of distplan; `distplan estimate FILE` prices it again.\n"
_KEYS = ("format_version", "strategy", "limits", "workload", "hardware", "runtime", "model", "estimate")
_LIMITS = ("reserve_bytes", "memory_limit_bytes", "allow_tight", "price_per_gpu_hour")
_SUMMARY: tuple[str, ...] = (
    "gpus",
    "verdict",
    "num_micro_batches",
    "recompute_layers",
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "tokens_per_second_per_gpu",
)
_SUMMARY += ("mfu", "hfu", "device_bytes", "usable_bytes", "worst_stage", "worst_phase", "time", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """What a strategy.yaml holds, ready to be priced."""

    strategy: Strategy
    model: Model
    workload: Workload
    cluster: Cluster
    runtime: Runtime
    reserve_bytes: float
    memory_limit_bytes: float | None
    allow_tight: bool
    price_per_gpu_hour: float | None
    hardware_document: Any
    """the user's own hardware, as it stands in the file; None where a shipped system is named"""
    changed: tuple[str, ...]
    """sentences: what the file refers to and is no longer the same"""


def plan_text(plan: Plan, chosen: Choice, *, hardware: Any = None) -> str:
    """The file for one choice of `plan`. `hardware`: content of the user's hardware file, if it was one."""
    shown = choice(chosen, plan)
    content = {
        "format_version": FORMAT_VERSION,
        "strategy": plain(chosen.strategy),
        "limits": {key: _whole(getattr(plan, key)) for key in _LIMITS},
        "workload": plain(plan.workload) | {"global_batch": chosen.global_batch},
        "hardware": _hardware(plan.cluster, hardware),
        "runtime": _runtime(plan.runtime),
        "model": plain(plan.model) | {"pattern": _runs(plan.model.pattern)},
        "estimate": rounded({key: shown[key] for key in _SUMMARY}),
    }
    return _HEAD + yaml_text(content)


def write_plan(path: str | os.PathLike[str], plan: Plan, *, hardware: Any = None) -> None:
    """Write the best choice beside `path` and rename; DistplanError, and the old file whole, if that fails."""
    if plan.best is None:
        raise DistplanError("there is no strategy to write")
    write_atomically(path, plan_text(plan, plan.best, hardware=hardware))


def is_plan(document: Document) -> bool:
    return isinstance(document.value.get("strategy"), dict)


def read_plan(document: Document) -> PlanFile:
    """A strategy.yaml; DocumentError with the line of what is wrong."""
    no_other_keys(document, _KEYS)
    version = take(document, "format_version", str)
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise document.error(f"version {version} cannot be read, this is {FORMAT_VERSION}", "format_version")
    limits = take(document, "limits", Document)
    no_other_keys(limits, _LIMITS)
    workload = build(Workload, take(document, "workload", Document))
    _check_precision(document.section("workload"), workload.precision)
    hardware = take(document, "hardware", Document)
    cluster, changed_hardware = _read_hardware(hardware)
    runtime, changed_runtime = _read_runtime(take(document, "runtime", Document))
    return PlanFile(
        strategy=_read_strategy(take(document, "strategy", Document)),
        model=_read_model(take(document, "model", Document)),
        workload=workload,
        cluster=cluster,
        runtime=runtime,
        reserve_bytes=take(limits, "reserve_bytes", float, default=0.0, minimum=0.0),
        memory_limit_bytes=take(limits, "memory_limit_bytes", float, default=None, minimum=0.0),
        allow_tight=take(limits, "allow_tight", bool, default=False),
        price_per_gpu_hour=take(limits, "price_per_gpu_hour", float, default=None, minimum=0.0),
        hardware_document=hardware.value.get("content"),
        changed=(*changed_hardware, *changed_runtime),
    )


def load_plan(path: str | os.PathLike[str]) -> PlanFile:
    return read_plan(load_mapping(path))


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _hardware(cluster: Cluster, content: Any) -> dict[str, Any]:
    if content is not None:
        return {"id": cluster.id, "content": content}
    try:
        shipped = load_cluster(cluster.id)
    except UnknownNameError:
        shipped = None
    if shipped != cluster:
        raise DistplanError(f"hardware '{cluster.id}' is not a shipped system; give the content of its file")
    return {"id": cluster.id, "digest": digest(cluster)}


def _read_hardware(section: Document) -> tuple[Cluster, tuple[str, ...]]:
    no_other_keys(section, ("id", "digest", "content"))
    name = take(section, "id", str)
    if "content" in section.value:
        return read_cluster(take(section, "content", Document), name, {}), ()
    try:
        cluster = load_cluster(name)
    except UnknownNameError as error:
        raise section.error(str(error), "id") from None
    return cluster, _changed(f"hardware {name}", take(section, "digest", str), cluster)


def _runtime(runtime: Runtime) -> dict[str, Any]:
    named = {"name": runtime.name, "version": runtime.version}
    try:
        shipped = load_runtime(runtime.name)
    except DistplanError:
        shipped = None
    return named | ({"digest": digest(runtime)} if shipped == runtime else {"content": plain(runtime)})


def _read_runtime(section: Document) -> tuple[Runtime, tuple[str, ...]]:
    no_other_keys(section, ("name", "version", "digest", "content"))
    name = take(section, "name", str)
    if "content" in section.value:
        return build(Runtime, take(section, "content", Document)), ()
    try:
        runtime = load_runtime(name)
    except UnknownNameError as error:
        raise section.error(str(error), "name") from None
    return runtime, _changed(f"runtime {name}", take(section, "digest", str), runtime)


def _changed(what: str, expected: str, value: object) -> tuple[str, ...]:
    return () if digest(value) == expected else (f"{what} is not what it was when this file was written",)


def _read_strategy(section: Document) -> Strategy:
    for field, legal in STRUCTURE.items():
        if field in section.value:
            take(section, field, lambda raw: str(raw).lower(), choices=legal)
    return build(Strategy, section)


def _check_precision(workload: Document, precision: Precision) -> None:
    section = workload.section("precision")
    for field in ("compute", "parameters", "gradients", "matmul"):
        take(section, field, str, choices=list(DTYPE_BYTES))
    take(section, "master", str, choices=["", *DTYPE_BYTES])
    for moment in precision.moments:
        if moment not in DTYPE_BYTES:
            raise section.error(f"'{moment}' is not one of {', '.join(DTYPE_BYTES)}", "moments")


def _runs(pattern: tuple[str, ...]) -> list[dict[str, Any]]:
    """80 equal layers in one line: [{kind: dense, layers: 80}]."""
    return [{"kind": kind, "layers": len(list(run))} for kind, run in groupby(pattern)]


def _read_model(section: Document) -> Model:
    """The model with its runs of layers spelled out; every kind must be known, and the sum small."""
    take(section, "pattern", list)
    kinds = take(section, "kinds", Document)
    layers: list[str] = []
    for run in section.section("pattern").items():
        if not isinstance(run.value, Mapping):
            raise run.error("expected kind and layers")
        no_other_keys(run, ("kind", "layers"))
        kind = take(run, "kind", str, choices=list(kinds.value))
        layers += [kind] * take(run, "layers", int, minimum=1, maximum=MAX_LAYERS - len(layers))
    if not layers:
        raise section.error("at least one layer is needed", "pattern")
    spelled = Document(
        file=section.file, value=section.value | {"pattern": layers}, lines=section.lines, where=section.where
    )
    return build(Model, spelled)
