"""What a strategy costs: the one function `estimate`, and the columns that it returns.

A batch is worked off in two steps: distinct combinations of the few columns that a cost depends on
are priced once (tables.py), then every (pp, vpp, schedule) gathers them per stage (stage_costs.py,
step_time.py). A single strategy is a batch of one row and goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.combine import LOCAL_FIELDS, STATE_FIELDS, LocalTables, StateTables, local_tables, state_tables
from distplan.costmodel.detail import Communication, communication
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.stage_costs import MEMORY_PARTS, PHASES
from distplan.costmodel.step_time import TIME_PARTS, GroupCosts, group_costs
from distplan.costmodel.strategy import Floats, Strategies, Strategy
from distplan.costmodel.tables import Engine, distinct, engine
from distplan.hardware.cluster import Cluster

__all__ = ["MEMORY_PARTS", "PHASES", "TIME_PARTS", "Communication", "Estimate", "estimate", "tabulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Columns, one entry per strategy. Parts add up exactly, in their order, to their total.

    `time` are the parts of `step_seconds` on the critical stage, `memory` the parts of
    `device_bytes` on the worst stage in its worst phase. Low and high hold 80 % of the runs
    most like it (fitted.yaml).
    """

    step_seconds: Floats
    step_seconds_low: Floats
    step_seconds_high: Floats
    time: Mapping[str, Floats]
    allocated_bytes: Floats
    reserved_bytes: Floats
    device_bytes: Floats
    device_bytes_low: Floats
    device_bytes_high: Floats
    usable_bytes: Floats
    memory: Mapping[str, Floats]
    """empty unless asked for with detail=True"""
    worst_stage: NDArray[np.int64]
    worst_phase: NDArray[np.int64]
    """index into PHASES"""
    num_micro_batches: Floats
    recompute_layers: Floats
    """layers per stage that are recomputed (solved: the least that fits)"""
    model_flops: Floats
    model_flops_causal: Floats
    hardware_flops: Floats
    kernel_flops: Floats
    """FLOPs per GPU and step: forward×3 with full s²; with half of it; + recompute; what kernels execute"""
    tokens: Floats
    """tokens per step of the whole job"""
    communication: tuple[Communication, ...]
    """empty unless asked for with detail=True"""
    host_bytes: Floats


def tabulate(
    model: Model,
    workload: Workload,
    cluster: Cluster,
    runtime: Runtime,
    distinct_in: Callable[[Sequence[str]], Strategies],
) -> None:
    """Fill the tables of a space before its rows are priced chunk by chunk: hundreds of small batches become one.

    `distinct_in` gives a row of each combination that some fields have in the space.
    """
    eng = engine(model, workload, cluster, runtime)
    for tables, fields in ((local_tables, LOCAL_FIELDS), (state_tables, STATE_FIELDS)):
        rows = distinct_in(fields)
        tables(eng, rows, rows.gpus)


def estimate(
    model: Model,
    workload: Workload,
    cluster: Cluster,
    runtime: Runtime,
    strategies: Strategies | Strategy,
    *,
    usable_bytes: float | None = None,
    detail: bool = False,
) -> Estimate:
    """Price strategies. `usable_bytes` of device memory (default: all that the driver gives) is what
    recomputation is solved for; `detail` adds the parts of memory and the table of collectives.

    Raises GraphError for an architecture without operators, DistplanError for a dtype that the
    accelerator does not have.
    """
    rows = Strategies.of([strategies]) if isinstance(strategies, Strategy) else strategies
    usable = cluster.accelerator.memory_bytes if usable_bytes is None else usable_bytes
    eng = engine(model, workload, cluster, runtime)
    gpus = rows.gpus
    local = local_tables(eng, rows, gpus)
    state = state_tables(eng, rows, gpus)
    _, group = distinct(rows.columns["pp"], rows.columns["vpp"], rows.columns["schedule"], rows.cut)
    out = GroupCosts.empty(len(rows), detail)
    for number in range(int(group.max(initial=-1)) + 1):
        members = np.flatnonzero(group == number)
        costs = _of_group(
            eng, rows.take(members), gpus[members], local, state, members, usable, float(workload.global_batch), detail
        )
        out.put(members, costs)
    return _columns(eng, workload, rows, gpus, out, usable, communication(eng, rows, gpus, out) if detail else ())


def _of_group(
    eng: Engine,
    rows: Strategies,
    gpus: Floats,
    local: LocalTables,
    state: StateTables,
    members: NDArray[np.intp],
    usable: float,
    global_batch: float,
    detail: bool,
) -> GroupCosts:
    first = rows[0]
    return group_costs(
        eng,
        rows,
        gpus,
        local.of(members),
        state.of(members),
        pp=first.pp,
        vpp=first.vpp,
        schedule=first.schedule,
        usable=usable,
        global_batch=global_batch,
        detail=detail,
        cut=eng.split(first.pp, first.vpp, first.schedule, first.stage_layers),
    )


def _columns(
    eng: Engine,
    workload: Workload,
    rows: Strategies,
    gpus: Floats,
    out: GroupCosts,
    usable: float,
    exchanges: tuple[Communication, ...],
) -> Estimate:
    batch = float(workload.global_batch)
    per_sequence, attention = eng.flops_per_sequence()
    model_flops = (3.0 * per_sequence) * batch / gpus
    causal = (3.0 * (per_sequence - (0.5 * attention if workload.causal else 0.0))) * batch / gpus
    step = out.time[0]
    for part in out.time[1:]:
        step = step + part
    time_band, memory_band = eng.time_band, eng.memory_band
    return Estimate(
        step_seconds=step,
        step_seconds_low=step * time_band.low,
        step_seconds_high=step * time_band.high,
        time=dict(zip(TIME_PARTS, out.time, strict=True)),
        allocated_bytes=out.allocated,
        reserved_bytes=out.reserved,
        device_bytes=out.device,
        device_bytes_low=out.device * memory_band.low,
        device_bytes_high=out.device * memory_band.high,
        usable_bytes=np.full(len(rows), float(usable)),
        memory=dict(zip(MEMORY_PARTS, out.memory, strict=False)),
        worst_stage=out.stage.astype(np.int64),
        worst_phase=out.phase.astype(np.int64),
        num_micro_batches=out.micro_batches,
        recompute_layers=out.recompute_layers,
        model_flops=model_flops,
        model_flops_causal=causal,
        hardware_flops=model_flops + out.recompute_flops,
        kernel_flops=out.kernel_flops,
        tokens=np.full(len(rows), batch * workload.seq_len),
        communication=exchanges,
        host_bytes=out.host,
    )
