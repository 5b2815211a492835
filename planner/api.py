"""`search` and `estimate` as functions of names or objects: what the command line and Python share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distplan.costmodel.balance import balance
from distplan.costmodel.estimate import estimate as price
from distplan.costmodel.estimate import tabulate
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.model_file import ModelFile, load_model
from distplan.costmodel.replay import simulate_plan
from distplan.costmodel.runtime import Runtime, load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import default, workload
from distplan.hardware.cluster import Cluster, load_cluster
from distplan.planner import search as engine
from distplan.planner.plan import Plan
from distplan.planner.pricing import Progress
from distplan.planner.space import Bounds

Named = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds memory and what a GPU-hour costs (US dollars; None = what the hardware's file says)."""

    reserve_bytes: float = 0.0
    memory_limit_bytes: float | None = None
    price_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything about a job but the strategy."""

    model: Model
    workload: Workload
    cluster: Cluster
    runtime: Runtime
    limits: Limits = field(default_factory=Limits)
    notes: tuple[str, ...] = ()


def setting(
    model: Model | ModelFile | Named,
    *,
    gpus: int,
    hardware: Cluster | Named | None = None,
    runtime: Runtime | Named | None = None,
    mesh_order: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
) -> Setting:
    """Names -> objects, and the workload: `overrides` (seq_len, global_batch, precision, optimizer,
    attention, loss, …) over the model's file over defaults.yaml. gpus: the largest count of the job.
    Raises DistplanError.
    """
    file = model if isinstance(model, Model | ModelFile) else load_model(model)
    architecture, stated = (file.model, file.workload) if isinstance(file, ModelFile) else (file, {})
    hardware = default("hardware") if hardware is None else hardware
    runtime = default("runtime") if runtime is None else runtime
    framework = runtime if isinstance(runtime, Runtime) else load_runtime(os.fspath(runtime))
    return Setting(
        model=architecture,
        workload=workload(architecture, stated, gpus=gpus, overrides=overrides, fallbacks={"loss": framework.loss}),
        cluster=hardware if isinstance(hardware, Cluster) else load_cluster(hardware),
        runtime=replace(framework, mesh_order=tuple(mesh_order)) if mesh_order else framework,
        limits=limits or Limits(),
        notes=file.notes if isinstance(file, ModelFile) else (),
    )


def search(
    model: Model | Named,
    *,
    gpus: int | Sequence[int],
    hardware: Cluster | Named | None = None,
    runtime: Runtime | Named | None = None,
    workload: Mapping[str, Any] | None = None,
    bounds: Bounds | None = None,
    limits: Limits | None = None,
    global_batches: Sequence[int] = (),
    objective: str = "step-time",
    top: int = 5,
    allow_tight: bool = False,
    sensitivity: bool = False,
) -> Plan:
    """The best strategies of a model (a name, a file or a Model) on so many GPUs.

    search("llama-3.1-70b", gpus=64, workload={"seq_len": 4096}, bounds={"tp": [4, 8]})
    workload: fields to override. bounds: a strategy's field, or dp, -> its allowed values. global_batches: several to
    compare, in place of the workload's. allow_tight, sensitivity: as the options of that name.
    Nothing that fits is an answer (plan.best is None, plan.why_nothing). Raises DistplanError.
    """
    most = gpus if isinstance(gpus, int) else max(gpus)
    job = setting(model, gpus=most, hardware=hardware, runtime=runtime, overrides=workload, limits=limits)
    return search_setting(
        job, gpus, bounds=bounds, global_batches=global_batches, objective=objective, top=top,
        allow_tight=allow_tight, sensitivity=sensitivity,
    )  # fmt: skip


def search_setting(
    job: Setting,
    gpus: int | Sequence[int],
    *,
    bounds: Bounds | None = None,
    global_batches: Sequence[int] = (),
    objective: str = "step-time",
    top: int = 5,
    allow_tight: bool = False,
    sensitivity: bool = False,
    other_runtimes: bool = False,
    progress: Progress | None = None,
) -> Plan:
    plan = engine.search(
        job.model,
        job.workload,
        job.cluster,
        job.runtime,
        gpus,
        estimate=price,
        tabulate=tabulate,
        simulate_plan=simulate_plan,
        balance=balance,
        bounds=bounds,
        global_batches=global_batches,
        objective=objective,
        top=top,
        reserve_bytes=job.limits.reserve_bytes,
        memory_limit_bytes=job.limits.memory_limit_bytes,
        price_per_gpu_hour=job.limits.price_per_gpu_hour,
        allow_tight=allow_tight,
        sensitivity=sensitivity,
        other_runtimes=other_runtimes,
        progress=progress,
    )
    return replace(plan, notes=(*job.notes, *plan.notes))


def estimate(
    model: Model | Named,
    strategy: Strategy,
    *,
    hardware: Cluster | Named | None = None,
    runtime: Runtime | Named | None = None,
    workload: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
) -> Plan:
    """One strategy priced: plan.best, whether or not it fits. Raises DistplanError where a rule forbids it.

    estimate("llama-3.1-70b", Strategy(tp=8, pp=4, dp_shard=2, sp=True))
    """
    job = setting(model, gpus=strategy.gpus, hardware=hardware, runtime=runtime, overrides=workload, limits=limits)
    return estimate_setting(job, strategy)


def estimate_setting(job: Setting, strategy: Strategy) -> Plan:
    plan = engine.evaluate(
        job.model,
        job.workload,
        job.cluster,
        job.runtime,
        strategy,
        estimate=price,
        simulate_plan=simulate_plan,
        balance=balance,
        reserve_bytes=job.limits.reserve_bytes,
        memory_limit_bytes=job.limits.memory_limit_bytes,
        price_per_gpu_hour=job.limits.price_per_gpu_hour,
    )
    # what is priced alone is shown whether or not it fits; its file does not admit more than one that was searched
    return replace(plan, allow_tight=False, notes=(*job.notes, *plan.notes))
