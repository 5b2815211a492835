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
    from distplan.costmodel.model import Model, Precision, Workload
    from distplan.costmodel.model_file import load_model, shipped_models
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
    "Choice": "planner.plan",
    "Cluster": "hardware.cluster",
    "DistplanError": "hardware.errors",
    "Estimate": "costmodel.estimate",
    "Limits": "planner.api",
    "Model": "costmodel.model",
    "Plan": "planner.plan",
    "Precision": "costmodel.model",
    "Runtime": "costmodel.runtime",
    "Strategies": "costmodel.strategy",
    "Strategy": "costmodel.strategy",
    "Workload": "costmodel.model",
    "document": "planner.document",
    "estimate": "planner.api",
    "list_clusters": "hardware.cluster",
    "list_runtimes": "costmodel.runtime",
    "load_cluster": "hardware.cluster",
    "load_model": "costmodel.model_file",
    "load_plan": "planner.plan_file",
    "load_runtime": "costmodel.runtime",
    "search": "planner.api",
    "shipped_models": "costmodel.model_file",
    "write_plan": "planner.plan_file",
}

__all__ = [
    "Choice",
    "Cluster",
    "DistplanError",
    "Estimate",
    "Limits",
    "Model",
    "Plan",
    "Precision",
    "Runtime",
    "Strategies",
    "Strategy",
    "Workload",
    "document",
    "estimate",
    "list_clusters",
    "list_runtimes",
    "load_cluster",
    "load_model",
    "load_plan",
    "load_runtime",
    "search",
    "shipped_models",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distplan' has no attribute '{name}'")
    return getattr(import_module(f"distplan.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
