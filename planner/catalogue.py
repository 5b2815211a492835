"""What is shipped, as plain data: systems, accelerators, models, and the versions of it all."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import distplan
from distplan.costmodel.graph import GraphError, Segment, parameters, segments
from distplan.costmodel.model import Model
from distplan.costmodel.model_file import ModelFile, load_model, shipped_models
from distplan.costmodel.runtime import list_runtimes, load_runtime
from distplan.costmodel.workload import workload
from distplan.hardware.accelerator import Accelerator, list_accelerators, load_accelerator
from distplan.hardware.calibration import content_of
from distplan.hardware.cluster import Cluster, cluster_names, list_clusters, load_cluster
from distplan.hardware.errors import UnknownNameError
from distplan.hardware.facts import Fact
from distplan.hardware.reliability import reliability_of
from distplan.planner.document import FORMAT_VERSION
from distplan.planner.plain import digest, plain, rounded

Plain = dict[str, Any]


def versions() -> Plain:
    """The program, the formats that it writes, and a digest of all data that it ships."""
    return {
        "distplan": distplan.__version__,
        "format_version": FORMAT_VERSION,
        "hardware_data": digest([plain(load_cluster(name)) for name in list_clusters()]),
        "model_data": digest({name: load_model(name).digest for name in shipped_models()}),
        "runtimes": {name: load_runtime(name).version for name in list_runtimes()},
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }


def systems() -> list[Plain]:
    """One row per shipped system."""
    names = cluster_names()
    return [_system_row(load_cluster(id), [name for name, of in names.items() if of == id]) for id in list_clusters()]


def _system_row(cluster: Cluster, names: list[str]) -> Plain:
    accelerator = cluster.accelerator
    return rounded(
        {
            "id": cluster.id,
            "name": cluster.name,
            "aliases": sorted(set(names) - {cluster.id}),
            "accelerator": accelerator.id,
            "gpus_per_node": cluster.gpus_per_node,
            "scaleup_domain": int(cluster.tiers[0].size),
            "memory_bytes": accelerator.memory_bytes,
            "bf16_flops_per_second": accelerator.peak_flops.get("bf16"),
            "scaleup_bytes_per_second": cluster.tiers[0].bandwidth,
            "fabric_bytes_per_second": cluster.tiers[-1].bandwidth,
            "unverified": sorted(_unverified(cluster.facts) + _unverified(accelerator.facts)),
        }
    )


def _unverified(facts: Mapping[str, Fact]) -> list[str]:
    return [name for name, fact in facts.items() if fact.status == "unverified"]


def hardware(name: str) -> Plain:
    """A system with its accelerator, or an accelerator that no shipped system has; every fact."""
    try:
        cluster = load_cluster(name)
    except UnknownNameError:
        if name.strip().lower() not in list_accelerators():
            raise
        return {"system": None, "accelerator": _accelerator(load_accelerator(name.strip().lower()))}
    system = {
        "id": cluster.id,
        "name": cluster.name,
        "gpus_per_node": cluster.gpus_per_node,
        "host_memory_bytes": cluster.host_memory_bytes,
        "price_per_gpu_hour": cluster.price_per_gpu_hour,
        "tiers": [plain(tier) for tier in cluster.tiers],
        "facts": _facts(cluster.facts),
        "prices": [plain(price) for price in cluster.prices],
        "reliability": {key: [plain(fact) for fact in facts] for key, facts in reliability_of(cluster).facts.items()},
    }
    measured = content_of(cluster.calibration)
    system |= {"calibration": measured} if measured else {}
    return rounded({"system": system, "accelerator": _accelerator(cluster.accelerator)})


def _accelerator(accelerator: Accelerator) -> Plain:
    return rounded(plain(accelerator) | {"facts": _facts(accelerator.facts)})


def _facts(facts: Mapping[str, Fact]) -> Plain:
    return {name: plain(facts[name]) for name in sorted(facts)}


def models() -> list[Plain]:
    """One row per shipped model."""
    return [_model_row(load_model(name)) for name in shipped_models()]


def _model_row(file: ModelFile) -> Plain:
    """parameters is null where the kind of layer cannot be priced yet; `problem` then says why."""
    model = file.model
    total, active, problem = None, None, None
    try:
        total, active = counts(model)
    except GraphError as error:
        problem = str(error)
    return {
        "name": model.name,
        "parameters": total,
        "active_parameters": active,
        "problem": problem,
        "layers": model.layers,
        "hidden": model.hidden,
        "vocab": model.vocab,
    }


def counts(model: Model) -> tuple[int, int]:
    """(all, active) parameters, with the true vocabulary."""
    total, active = parameters(model, workload(model, {}, gpus=1))
    return round(total), round(active)


def model(name: str, *, graph: bool) -> Plain:
    """What a model file says and what follows from it; with `graph` also its operators and weights.

    Raises GraphError for a kind of layer that cannot be priced yet.
    """
    file = load_model(name)
    counts(file.model)
    pattern = file.model.pattern
    shown = _model_row(file) | {
        "kind": file.kind,
        "path": file.path,
        "source": file.source,
        "digest": file.digest,
        "notes": list(file.notes),
        "workload": plain(file.workload),
        "layers_of_kind": {kind: pattern.count(kind) for kind in file.model.kinds},
        "architecture": {key: value for key, value in plain(file.model).items() if key != "pattern"},
    }
    if graph:
        given = workload(file.model, file.workload, gpus=1)
        shown["graph"] = [_segment(segment) for segment in segments(file.model, given, True)]
    return shown


def _segment(segment: Segment) -> Plain:
    return {
        "name": segment.name,
        "weights": [
            {"name": weight.name, "dims": list(weight.dims), "sizes": [int(segment.sizes[dim]) for dim in weight.dims]}
            for weight in segment.weights
        ],
        "operators": [
            {
                "name": operator.name,
                "kind": operator.kind,
                "inputs": [
                    f"{name}[{' '.join(dims)}]" for name, dims in zip(operator.inputs, operator.operands, strict=True)
                ],
                "output": f"{operator.output}[{' '.join(operator.result)}]",
            }
            for operator in segment.operators
        ],
    }
