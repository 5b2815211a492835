"""distplan: plan the parallel training of large models on clusters.

>>> import distplan
>>> distplan.Strategy(tp=8, pp=4, dp_shard=2).gpus
64

`search` and `estimate` answer with a Plan, `document` turns it into plain data, `write_plan` into a
strategy.yaml. Names are imported when they are first used, so that the command starts quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distplan.costmodel.estimate import Estimate
    from distplan.costmodel.model import Custom, Model, Precision, Workload
    from distplan.costmodel.model_file import load_model, shipped_models
    from distplan.costmodel.operators import Builder
    from distplan.costmodel.placements import (
        Partial,
        ProcessMesh,
        Replicate,
        Shard,
        dims_mapping,
        reshard,
        shard_tensor,
    )
    from distplan.costmodel.runtime import Runtime, list_runtimes, load_runtime
    from distplan.costmodel.strategy import Strategies, Strategy
    from distplan.hardware.cluster import Cluster, list_clusters, load_cluster
    from distplan.hardware.errors import DistplanError
    from distplan.planner.api import Limits, estimate, search
    from distplan.planner.document import document
    from distplan.planner.plan import Choice, Plan
    from distplan.planner.plan_file import load_plan, write_plan

__version__ = "0.1.0"

_HOMES = {
    "Builder": "costmodel.operators",
    "Choice": "planner.plan",
    "Cluster": "hardware.cluster",
    "Custom": "costmodel.model",
    "DistplanError": "hardware.errors",
    "Estimate": "costmodel.estimate",
    "Limits": "planner.api",
    "Model": "costmodel.model",
    "Partial": "costmodel.placements",
    "Plan": "planner.plan",
    "Precision": "costmodel.model",
    "ProcessMesh": "costmodel.placements",
    "Replicate": "costmodel.placements",
    "Runtime": "costmodel.runtime",
    "Shard": "costmodel.placements",
    "Strategies": "costmodel.strategy",
    "Strategy": "costmodel.strategy",
    "Workload": "costmodel.model",
    "dims_mapping": "costmodel.placements",
    "document": "planner.document",
    "estimate": "planner.api",
    "list_clusters": "hardware.cluster",
    "list_runtimes": "costmodel.runtime",
    "load_cluster": "hardware.cluster",
    "load_model": "costmodel.model_file",
    "load_plan": "planner.plan_file",
    "load_runtime": "costmodel.runtime",
    "reshard": "costmodel.placements",
    "search": "planner.api",
    "shard_tensor": "costmodel.placements",
    "shipped_models": "costmodel.model_file",
    "write_plan": "planner.plan_file",
}

__all__ = [
    "Builder",
    "Choice",
    "Cluster",
    "Custom",
    "DistplanError",
    "Estimate",
    "Limits",
    "Model",
    "Partial",
    "Plan",
    "Precision",
    "ProcessMesh",
    "Replicate",
    "Runtime",
    "Shard",
    "Strategies",
    "Strategy",
    "Workload",
    "dims_mapping",
    "document",
    "estimate",
    "list_clusters",
    "list_runtimes",
    "load_cluster",
    "load_model",
    "load_plan",
    "load_runtime",
    "reshard",
    "search",
    "shard_tensor",
    "shipped_models",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distplan' has no attribute '{name}'")
    return getattr(import_module(f"distplan.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
