"""Failures, checkpoints and restarts beside a plan: the goodput, and how many GPUs finish in time with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distplan.costmodel.goodput import NEVER, Interruptions, checkpoint_bytes, goodput
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime
from distplan.hardware.cluster import Cluster
from distplan.hardware.reliability import reliability_of
from distplan.hardware.units import parse_bytes_per_second, parse_gpu_seconds, parse_seconds
from distplan.planner.inputs import InputError, quantity

Plain = dict[str, Any]
SECONDS_PER_DAY = 86400.0
_MOST_GPUS = 10_000_000
_MOST_TRIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenGoodput:
    """What was typed; None where nothing was."""

    mtbf_gpu_seconds: float | None = None
    restart_seconds: float | None = None
    storage_bandwidth: float | None = None
    interval_seconds: float | None = None
    asynchronous: bool = False
    shown: bool = False
    """the parts of the goodput were asked for"""


def goodput_asked(options: Mapping[str, Any]) -> GivenGoodput:
    """--goodput and what refines it; InputError."""
    given = {
        "mtbf_gpu_seconds": quantity("--mtbf", options.get("mtbf"), parse_gpu_seconds),
        "restart_seconds": quantity("--restart-time", options.get("restart_time"), parse_seconds),
        "storage_bandwidth": quantity("--storage-bandwidth", options.get("storage_bandwidth"), parse_bytes_per_second),
        "interval_seconds": quantity("--checkpoint-interval", options.get("checkpoint_interval"), parse_seconds),
    }
    if given["interval_seconds"] == 0.0:
        raise InputError("--checkpoint-interval 0 s: there is no time to train between two checkpoints")
    asynchronous = bool(options.get("async_checkpoint"))
    shown = bool(options.get("goodput")) or asynchronous or any(value is not None for value in given.values())
    return GivenGoodput(**given, asynchronous=asynchronous, shown=shown)


def interruptions(model: Model, workload: Workload, cluster: Cluster, runtime: Runtime) -> Interruptions:
    """By the system's file and what is published, with the bandwidth that --async-checkpoint would copy at."""
    known = reliability_of(cluster)
    return Interruptions(
        checkpoint_bytes=checkpoint_bytes(model, workload, cluster, runtime),
        mtbf_gpu_seconds=known.mtbf_gpu_seconds,
        restart_seconds=known.restart_seconds,
        checkpoint_bandwidth=known.checkpoint_bandwidth,
        copy_bandwidth=cluster.accelerator.pcie_bandwidth or None,
    )


def refined(job: Interruptions, given: GivenGoodput) -> Interruptions:
    """What was typed in place of what is known; InputError."""
    if given.asynchronous and job.copy_bandwidth is None:
        raise InputError("--async-checkpoint: the accelerator's file says no pcie_bandwidth to copy to the host with")
    typed = {name: getattr(given, name) for name in ("mtbf_gpu_seconds", "restart_seconds")}
    return replace(
        job,
        **{name: value for name, value in typed.items() if value is not None},
        storage_bandwidth=given.storage_bandwidth,
        interval_seconds=given.interval_seconds,
        copy_bandwidth=job.copy_bandwidth if given.asynchronous else None,
    )


def goodput_row(job: Interruptions, gpus: int, step_seconds: float) -> Plain:
    """The goodput on so many GPUs, its parts, and what they rest on."""
    found = goodput(job, gpus, step_seconds)
    mtbf = float(found.mtbf_seconds)
    return {
        "gpus": gpus,
        "goodput": float(found.useful),
        "checkpoint_share": float(found.checkpoints),
        "lost_share": float(found.lost),
        "restart_share": float(found.restarts),
        "failures_per_day": SECONDS_PER_DAY / mtbf,
        "mtbf_seconds": mtbf,
        "mtbf_gpu_seconds": job.mtbf_gpu_seconds,
        "lost_seconds_per_failure": float(found.lost) * mtbf,
        "restart_seconds": job.restart_seconds,
        "checkpoint_bytes": job.checkpoint_bytes,
        "checkpoint_write_seconds": float(found.write_seconds),
        "checkpoint_stall_seconds": float(found.stall_seconds),
        "checkpoint_interval_seconds": float(found.interval_seconds),
        "checkpoint_interval_steps": float(found.interval_steps),
    }


def elapsed(job: Interruptions, gpus: int, step_seconds: float, useful_seconds: float) -> tuple[float, float | None]:
    """(goodput, elapsed seconds); None where failures come too often for the job to end."""
    share = float(goodput(job, gpus, step_seconds).useful)
    return share, useful_seconds / share if share > NEVER else None


def gpus_needed(
    job: Interruptions | None, *, gpu_seconds: float, step_gpu_seconds: float, seconds: float, node: int
) -> int | None:
    """The fewest whole nodes that do `gpu_seconds` of useful work in `seconds` at the same rate per GPU; None where
    more GPUs only fail more often. Without `job` nothing fails."""
    ideal = gpu_seconds / seconds / node * (1.0 - 1e-9)
    nodes = max(1, math.ceil(ideal))
    for _ in range(_MOST_TRIES):
        gpus = nodes * node
        share = 1.0 if job is None else float(goodput(job, gpus, step_gpu_seconds / gpus).useful)
        if share < NEVER or gpus > _MOST_GPUS:
            return None
        # more nodes have less goodput, so that the count grows to the fewest that do
        wanted = math.ceil(ideal / share)
        if wanted <= nodes:
            return gpus
        nodes = wanted
    return None
