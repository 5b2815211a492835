"""Useful time over elapsed time: failures, restarts, work done again, and writing checkpoints.

Failures come at random with a mean time M between them. Of Daly 2006 (A higher order estimate of the optimum
checkpoint interval for restart dumps, FGCS 22(3)) are the interval and the expected time. Every function takes numbers
or arrays. Seconds and bytes throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distplan.costmodel.casting import stored_dtype
from distplan.costmodel.combine import state_tables
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.stage_costs import state_bytes
from distplan.costmodel.step_end import weight_content
from distplan.costmodel.strategy import Floats, Strategies, Strategy
from distplan.costmodel.tables import engine
from distplan.hardware.cluster import Cluster

NEVER = 1e-6
"""a useful share below it is none: the job does not end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """What makes a job's elapsed time longer than its useful time, whatever the number of GPUs."""

    checkpoint_bytes: float
    """of the whole job, each byte once"""
    mtbf_gpu_seconds: float
    """seconds of one GPU between two failures that stop the job"""
    restart_seconds: float
    """from a failure to the next step, reading the checkpoint included"""
    checkpoint_bandwidth: float
    """bytes/s of writing to storage, per GPU"""
    storage_bandwidth: float | None = None
    """bytes/s of the whole job, in place of the above"""
    copy_bandwidth: float | None = None
    """bytes/s per GPU to host memory, after which training goes on while the copy is written; None: training waits"""
    interval_seconds: float | None = None
    """useful time between two checkpoints; None: the optimum"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Columns. The four shares of the elapsed time add up to 1."""

    mtbf_seconds: Floats
    """between two failures of the job"""
    interval_steps: Floats
    """steps from one checkpoint to the next"""
    interval_seconds: Floats
    write_seconds: Floats
    """until a checkpoint is on storage"""
    stall_seconds: Floats
    """of it, what training waits for"""
    useful: Floats
    """the goodput"""
    checkpoints: Floats
    restarts: Floats
    lost: Floats
    """work that is done again"""


def young_interval(stall_seconds: Floats | float, mtbf_seconds: Floats | float) -> Floats:
    """Useful seconds between checkpoints, to first order: sqrt(2·delta·M) (Young 1974, CACM 17(9))."""
    return np.asarray(np.sqrt(2.0 * np.asarray(stall_seconds) * np.asarray(mtbf_seconds)))


def daly_interval(stall_seconds: Floats | float, mtbf_seconds: Floats | float) -> Floats:
    """The same to third order (Daly 2006); the time with it is at most 0.2 % above the least. The restart is no part
    of it."""
    stall, mtbf = np.asarray(stall_seconds, dtype=float), np.asarray(mtbf_seconds, dtype=float)
    ratio = stall / (2.0 * mtbf)
    series = young_interval(stall, mtbf) * (1.0 + np.sqrt(ratio) / 3.0 + ratio / 9.0) - stall
    return np.asarray(np.where(ratio < 1.0, series, mtbf))


def useful_share(
    interval_seconds: Floats | float,
    stall_seconds: Floats | float,
    mtbf_seconds: Floats | float,
    recovery_seconds: Floats | float,
) -> Floats:
    """Useful over elapsed time: tau / (M·exp(R/M)·(exp((tau+delta)/M) - 1)), Daly 2006's complete expression."""
    interval, mtbf = np.asarray(interval_seconds, dtype=float), np.asarray(mtbf_seconds, dtype=float)
    with np.errstate(over="ignore"):
        lengthened = np.expm1((interval + stall_seconds) / mtbf) * np.exp(np.asarray(recovery_seconds) / mtbf)
    return np.asarray(interval / mtbf / lengthened)


def goodput(job: Interruptions, gpus: Floats | float, step_seconds: Floats | float) -> Goodput:
    """Checkpoints are taken after whole steps. One that is written while training goes on protects nothing until it is
    on storage, so a failure costs its writing time too, and the next one waits for it."""
    gpus, step = np.asarray(gpus, dtype=float), np.asarray(step_seconds, dtype=float)
    mtbf = job.mtbf_gpu_seconds / gpus
    storage = job.checkpoint_bandwidth * gpus if job.storage_bandwidth is None else job.storage_bandwidth
    write = job.checkpoint_bytes / storage + 0.0 * gpus
    blocking = job.copy_bandwidth is None
    stall = write if job.copy_bandwidth is None else np.minimum(write, job.checkpoint_bytes / gpus / job.copy_bandwidth)
    wanted = daly_interval(stall, mtbf) if job.interval_seconds is None else job.interval_seconds + 0.0 * gpus
    steps = np.maximum(1.0, np.rint(wanted / step))
    steps = steps if blocking else np.maximum(steps, np.ceil((write - stall) / step))
    interval = steps * step
    late = 0.0 if blocking else write - stall
    useful = useful_share(interval, stall, mtbf, job.restart_seconds + late)
    checkpoints = useful * stall / interval
    # every failure begins a restart, which a further failure may end: M·(1 - exp(-R/M)) on average
    restarts = -np.expm1(-job.restart_seconds / mtbf)
    return Goodput(
        mtbf_seconds=mtbf,
        interval_steps=steps,
        interval_seconds=interval,
        write_seconds=write,
        stall_seconds=stall,
        useful=useful,
        checkpoints=checkpoints,
        restarts=restarts,
        lost=1.0 - useful - checkpoints - restarts,
    )


def checkpoint_bytes(model: Model, workload: Workload, cluster: Cluster, runtime: Runtime) -> float:
    """Parameters, master weights and optimizer states of the whole job: what the state's own prices are on a mesh of
    one device, where nothing has a replica. Gradients and the cast copies of narrow products are made anew."""
    recipe = workload.precision
    kept = stored_dtype(recipe)
    plain = replace(workload, precision=replace(recipe, matmul=recipe.compute, scaling="", parameters=kept))
    eng = engine(model, plain, cluster, runtime)
    whole = eng.split(1, 1, "1f1b").stages[0].content
    state = state_tables(eng, Strategies.of([Strategy()]), np.ones(1))
    held = state_bytes(weight_content(whole, 1), state.tables, state.zero, plain, runtime)
    return float((held.parameters + held.optimizer + held.host)[0])
