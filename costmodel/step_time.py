"""The time of a step and the memory of its stages, for rows that share (pp, vpp, schedule).

The step is the pipeline section (stage_load.py, pipeline.py), what is left of gradient reduction and parameter
gathering after the compute that hides them, and the optimizer (step_end.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.combine import LocalTables, StateTables
from distplan.costmodel.stage_costs import (
    MEMORY_PARTS,
    Activations,
    StateBytes,
    WorstMemory,
    activations,
    chunks_in_flight,
    layers_only,
    layers_to_recompute,
    run_sum,
    stage_memory,
    state_bytes,
)
from distplan.costmodel.stage_load import recomputed_share, stage_load
from distplan.costmodel.stages import Split
from distplan.costmodel.step_end import last_round, step_end, weight_content
from distplan.costmodel.strategy import Floats, Strategies
from distplan.costmodel.tables import Engine, distinct

TIME_PARTS = (
    "matrix products",
    "attention",
    "memory-bound",
    "recompute",
    "exposed tp",
    "exposed cp",
    "exposed ep",
    "host",
    "exposed dp",
    "bubble",
    "optimizer",
)


@dataclass(slots=True, kw_only=True)
class GroupCosts:
    """Columns of the rows of a group. `time` [part, row] and `memory` [part, row]."""

    time: Floats
    memory: Floats
    allocated: Floats
    reserved: Floats
    fragmentation: Floats
    device: Floats
    stage: Floats
    phase: Floats
    host: Floats
    micro_batches: Floats
    recompute_layers: Floats
    recompute_flops: Floats
    kernel_flops: Floats
    critical: Floats
    """the critical stage"""
    p2p: Floats
    """seconds of one boundary message"""

    @staticmethod
    def empty(rows: int, detail: bool) -> GroupCosts:
        shapes = {"time": (len(TIME_PARTS), rows), "memory": (len(MEMORY_PARTS) if detail else 0, rows)}
        return GroupCosts(**{f.name: np.empty(shapes.get(f.name, (rows,))) for f in fields(GroupCosts)})

    def put(self, rows: NDArray[np.intp], other: GroupCosts) -> None:
        for f in fields(GroupCosts):
            getattr(self, f.name)[..., rows] = getattr(other, f.name)


KEPT = ("saved", "remade", "transient")
"""local tables that memory is made of"""


def group_costs(
    eng: Engine,
    rows: Strategies,
    gpus: Floats,
    local: LocalTables,
    state: StateTables,
    *,
    pp: int,
    vpp: int,
    schedule: str,
    usable: float,
    global_batch: float,
    detail: bool,
    cut: Split,
) -> GroupCosts:
    """Costs of rows of one (pp, vpp, schedule) and `cut` of the layers."""
    dp = rows.degree("dp_replicate") * rows.degree("dp_shard")
    m = global_batch / (dp * rows.degree("micro_batch"))
    states = [
        state_bytes(weight_content(run.content, pp), state.tables, state.zero, eng.workload, eng.runtime)
        for run in cut.stages
    ]
    plain, chosen = {"saved": local.plain["saved"]}, {name: local.chosen[name] for name in KEPT}
    kept = [activations(run.content, plain, chosen) for run in cut.stages]
    layers = _recomputed(eng, rows, local, state, states, kept, cut, m, pp, vpp, schedule, usable)
    memories = []
    for run, held, of_run in zip(cut.stages, states, kept, strict=True):
        acts = _rows_of(of_run, local.index)
        flight = chunks_in_flight(schedule, run, pp, vpp, m)
        share = recomputed_share(layers, run)
        is_last = run.first + run.count == pp
        memories += stage_memory(run, _rows_of(held, state.index), acts, flight, share, eng.runtime, is_last, usable)
    worst = WorstMemory.of(memories, eng.runtime)
    timing = _timing(eng, rows, gpus, local, state, states, cut, m, layers, pp, vpp, schedule)
    host = states[0].host
    for held in states[1:]:
        host = np.maximum(host, held.host)
    return GroupCosts(
        time=timing.time,
        memory=worst.parts(memories, eng.runtime) if detail else np.zeros((0, len(rows))),
        allocated=worst.allocated,
        reserved=worst.reserved,
        fragmentation=worst.fragmentation,
        device=worst.device,
        stage=worst.stage,
        phase=worst.phase,
        host=host[state.index],
        micro_batches=m,
        recompute_layers=layers,
        recompute_flops=timing.recompute_flops,
        kernel_flops=timing.kernel_flops,
        critical=timing.critical,
        p2p=timing.p2p,
    )


def _rows_of(columns: Any, index: NDArray[np.int64]) -> Any:
    """A dataclass of columns gathered to rows."""
    held = {f.name: getattr(columns, f.name) for f in fields(columns)}
    return type(columns)(**{name: None if values is None else values[..., index] for name, values in held.items()})


def _recomputed(
    eng: Engine,
    rows: Strategies,
    local: LocalTables,
    state: StateTables,
    states: list[StateBytes],
    kept: list[Activations],
    cut: Split,
    m: Floats,
    pp: int,
    vpp: int,
    schedule: str,
    usable: float,
) -> Floats:
    """Layers per stage that are recomputed: none, all (selective), as said, or the least that fits (full)."""
    most = float(max(sum(layers_only(run.content)) for run in cut.stages))
    code = rows.columns["recompute"]
    said = np.minimum(rows.recompute_layers, most)
    solve = (code == 2) & (said == 0.0)
    layers = np.where(code == 1, most, np.where(code == 2, said, 0.0))
    if not solve.any():
        return layers
    at = np.flatnonzero(solve)
    needed = np.ones(len(at))
    high = eng.memory_band.high
    for run, held, of_run in zip(cut.stages, states, kept, strict=True):
        acts = _rows_of(of_run, local.index[at])
        flight = chunks_in_flight(schedule, run, pp, vpp, m[at])
        number = sum(layers_only(run.content))
        stored = _rows_of(held, state.index[at])
        needed = np.maximum(needed, layers_to_recompute(stored, acts, flight, number, usable, eng.runtime, high))
    layers[at] = needed
    return layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    time: Floats
    recompute_flops: Floats
    kernel_flops: Floats
    critical: Floats
    p2p: Floats


def _timing(
    eng: Engine,
    rows: Strategies,
    gpus: Floats,
    local: LocalTables,
    state: StateTables,
    states: list[StateBytes],
    cut: Split,
    m: Floats,
    layers: Floats,
    pp: int,
    vpp: int,
    schedule: str,
) -> _Timing:
    """Everything that depends on (local, m, layers, and state that every micro-batch moves) is priced once per
    combination."""
    zero = state.zero[state.index]
    moves_each = (zero >= 2.0) | (eng.runtime.reduces_each(zero, pp)[0] > 0.0)
    per_step = np.where(moves_each, state.index, 0)
    first, index = distinct(local.index, m, layers, per_step, gpus)
    lid, sid = local.index[first], state.index[first]
    load = stage_load(eng, local, state, lid, sid, gpus[first], layers[first], cut, pp, vpp, schedule)
    times = load.pipeline_time(schedule, m[first], pp, vpp)
    shares, exposed, p2p = load.shares, load.exposed, load.p2p
    stage_f, stage_b = load.stage_forward, load.stage_backward
    critical, parts = _critical_parts(local, lid, cut, shares, stage_f, stage_b, exposed)
    factor = eng.runtime.factor(eng.cluster.accelerator.generation)
    busy = [part * m[first] for part in parts]
    bubble = np.maximum(times.bubble, 0.0)
    last = last_round(m[first], pp, vpp, schedule)
    ends = step_end(eng, state, states, cut, pp, index, stage_f, stage_b, p2p, last)
    time = [part[index] * factor for part in busy]
    time[TIME_PARTS.index("exposed dp")] = time[TIME_PARTS.index("exposed dp")] + ends[0]
    time += [bubble[index] * factor, ends[1]]
    recompute_flops, kernel_flops = _flops(local, lid, cut, shares, m[first], pp)
    return _Timing(
        time=np.array(time),
        recompute_flops=recompute_flops[index],
        kernel_flops=kernel_flops[index],
        critical=critical[index],
        p2p=p2p[index],
    )


def _critical_parts(
    local: LocalTables,
    lid: NDArray[np.int64],
    cut: Split,
    shares: list[Floats],
    stage_f: list[Floats],
    stage_b: list[Floats],
    exposed: tuple[Floats, Floats],
) -> tuple[Floats, list[Floats]]:
    """(critical stage, its seconds per micro-batch by TIME_PARTS up to exposed dp) of the heaviest stage."""
    passes, recompute = local.chosen["passes"], local.chosen["recompute"]
    exposed_both = exposed[0] + exposed[1]
    critical = np.full(len(lid), float(cut.stages[0].first))
    load = stage_f[0] + stage_b[0]
    chosen: list[Floats] = []
    for number, (run, share) in enumerate(zip(cut.stages, shares, strict=True)):
        both = run_sum(run.content, passes)[:, lid]
        again = share * run_sum(run.content, recompute)[lid]
        parts = [*both[:3], again, *both[3:], run_sum(run.content, exposed_both)]
        if number == 0:
            chosen = parts
            continue
        here = stage_f[number] + stage_b[number]
        heavier = here > load
        load = np.where(heavier, here, load)
        critical = np.where(heavier, float(run.first), critical)
        chosen = [np.where(heavier, new, old) for new, old in zip(parts, chosen, strict=True)]
    return critical, chosen


def _flops(
    local: LocalTables, lid: NDArray[np.int64], cut: Split, shares: list[Floats], m: Floats, pp: int
) -> tuple[Floats, Floats]:
    """(recomputed, executed by kernels) FLOPs per GPU and step, the mean over stages."""
    full, kernel = local.chosen["full_flops"], local.chosen["kernel_flops"]
    again, executed = np.zeros(len(lid)), np.zeros(len(lid))
    for run, share in zip(cut.stages, shares, strict=True):
        weight = run.count / pp
        again = again + weight * share * run_sum(run.content, full[1])[lid]
        passes = run_sum(run.content, kernel[0]) + run_sum(run.content, kernel[2])
        executed = executed + weight * (passes[lid] + share * run_sum(run.content, kernel[1])[lid])
    return again * m, executed * m
