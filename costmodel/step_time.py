"""The time of a step and the memory of its stages, for rows that share (pp, vpp, schedule).

The step is the pipeline section (pipeline.py), what is left of gradient reduction and parameter
gathering after the compute that hides them, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel import fitted
from distplan.costmodel.combine import LocalTables, StateTables
from distplan.costmodel.lower import PHASES
from distplan.costmodel.pipeline import PipelineTime, pipeline_time
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
from distplan.costmodel.stages import Run, Split, split
from distplan.costmodel.state import gathers
from distplan.costmodel.strategy import Floats, Strategies
from distplan.costmodel.tables import Engine, distinct
from distplan.hardware.rates import memory_seconds, pcie_seconds

TIME_PARTS = (
    "matrix products",
    "attention",
    "memory-bound",
    "recompute",
    "exposed tp",
    "exposed cp",
    "exposed ep",
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


ZERO_BUBBLE = ("zb_h1", "zb_v")
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
    cut: Split | None = None,
) -> GroupCosts:
    """Costs of rows of one (pp, vpp, schedule); `cut`: the split of the layers, the runtime's default if None."""
    if cut is None:
        cut = split(eng.pattern, len(eng.segments), pp, vpp, eng.model.mtp_layers, schedule == "zb_v")
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
        share = _share(layers, run)
        is_last = run.first + run.count == pp
        memories += stage_memory(run, _rows_of(held, state.index), acts, flight, share, eng.runtime, is_last)
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


def weight_content(content: tuple[int, ...], pp: int) -> tuple[int, ...]:
    """The content as weights: the head once however often it is used, and the tied copy of the embedding,
    a second weight only where head and embedding part."""
    head = min(content[-1], 1)
    return (*content[:-1], head, head if pp > 1 else 0)


def _rows_of(columns: Any, index: NDArray[np.int64]) -> Any:
    """A dataclass of columns gathered to rows."""
    return type(columns)(**{f.name: getattr(columns, f.name)[..., index] for f in fields(columns)})


def _share(layers: Floats, run: Run) -> Floats:
    held = sum(layers_only(run.content))
    again = layers if run.recompute is None else np.full_like(layers, float(run.recompute))
    return np.minimum(again, float(held)) / max(held, 1)


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
    high = fitted.memory_band(*eng.like).high
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
    """Everything that depends on (local, m, layers, and state under ZeRO 2 and 3) is priced once per combination."""
    zero = state.zero[state.index]
    per_step = np.where(zero >= 2.0, state.index, 0)
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
    last = last_round(m[first], pp, vpp if schedule == "interleaved" else 1)
    ends = _step_end(eng, state, states, cut, pp, index, stage_f, stage_b, p2p, last)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Seconds per micro-batch of stages, and of chunks for the pipeline, per combination."""

    shares: list[Floats]
    """part of each stage run's layers that is recomputed"""
    stage_forward: list[Floats]
    stage_backward: list[Floats]
    chunk_forward: list[Floats]
    chunk_backward: list[Floats]
    chunk_input: list[Floats]
    """the part of chunk_backward that the chunk before waits for, in a schedule that tells it apart"""
    chunk_counts: list[int]
    exposed: tuple[Floats, Floats]
    """what of ZeRO's per-micro-batch traffic is left, forward and backward, [segment, combination]"""
    p2p: Floats
    overlap_p2p: bool

    def pipeline_time(self, schedule: str, m: Floats, pp: int, vpp: int) -> PipelineTime:
        return pipeline_time(
            schedule,
            forward=self.chunk_forward,
            backward=self.chunk_backward,
            count=self.chunk_counts,
            p2p=self.p2p,
            overlap_p2p=self.overlap_p2p,
            m=m,
            pp=pp,
            vpp=vpp,
            follow=False,
            input_gradient=self.chunk_input,
        )


def stage_load(
    eng: Engine,
    local: LocalTables,
    state: StateTables,
    lid: NDArray[np.int64],
    sid: NDArray[np.int64],
    gpus: Floats,
    layers: Floats,
    cut: Split,
    pp: int,
    vpp: int,
    schedule: str,
) -> StageLoad:
    """What every stage and chunk does with one micro-batch, for combinations of local and state tables."""
    forward, backward, recompute, exposed = segment_seconds(eng, local, state, lid, sid, pp)
    shares = [_share(layers, run) for run in cut.stages]
    passes = np.stack([forward, backward, recompute])
    stage_f, stage_b = _both_ways(cut.stages, shares, passes)
    if vpp == 1:
        chunk_f, chunk_b, chunks = stage_f, stage_b, cut.stages
    else:
        chunks = cut.chunks
        turned = schedule == "zb_v"
        holders = [2 * pp - 1 - run.first if turned and run.first >= pp else run.first % pp for run in chunks]
        chunk_f, chunk_b = _both_ways(chunks, [shares[_stage_run(cut, stage)] for stage in holders], passes)
    chunk_i = chunk_b
    if schedule in ZERO_BUBBLE:
        later = local.chosen.at("weight_gradient", lid)
        chunk_i = [b - run_sum(run.content, later) for b, run in zip(chunk_b, chunks, strict=True)]
    return StageLoad(
        shares=shares,
        stage_forward=stage_f,
        stage_backward=stage_b,
        chunk_forward=chunk_f,
        chunk_backward=chunk_b,
        chunk_input=chunk_i,
        chunk_counts=[run.count for run in chunks],
        exposed=exposed,
        p2p=_boundary_seconds(eng, local.chosen.at("boundary", lid), gpus, pp),
        overlap_p2p=eng.runtime.overlap["pp_interleaved" if vpp > 1 else "pp"],
    )


def _both_ways(runs: Sequence[Run], shares: Sequence[Floats], passes: Floats) -> tuple[list[Floats], list[Floats]]:
    """(forward, backward with its share of recomputation) of each run; `passes` are forward, backward, recompute."""
    sums = [run_sum(run.content, passes) for run in runs]
    return [each[0] for each in sums], [each[1] + share * each[2] for each, share in zip(sums, shares, strict=True)]


def _stage_run(cut: Split, stage: int) -> int:
    return next(i for i, run in enumerate(cut.stages) if run.first <= stage < run.first + run.count)


def segment_seconds(
    eng: Engine, local: LocalTables, state: StateTables, lid: NDArray[np.int64], sid: NDArray[np.int64], pp: int
) -> tuple[Floats, Floats, Floats, tuple[Floats, Floats]]:
    """(forward, backward, recompute, (exposed forward, exposed backward)) per [segment, combination].

    ZeRO 3 gathers a segment's parameters before its forward and its backward, each behind the segment
    computed meanwhile; where gradients are reduced every micro-batch they hide behind backward too.
    """
    forward, backward = local.chosen.at("forward", lid), local.chosen.at("backward", lid)
    recompute = local.chosen.at("recompute", lid)
    zero = state.zero[sid]
    if not (zero >= 2.0).any():
        nothing = np.zeros_like(forward)
        return forward, backward, recompute, (nothing, nothing)
    gather = state.tables["gather"][:-1, sid]
    in_forward, in_backward = gathers(zero, eng.runtime.state, len(gather))
    timing = eng.runtime.grad_reduce_pipeline if pp > 1 else eng.runtime.grad_reduce_sharded
    reduce = np.where(zero >= 2.0, state.tables["reduce"][:-1, sid], 0.0)
    if timing != "micro_batch":
        reduce = np.zeros_like(reduce)
    of_param, of_grad = eng.runtime.hidden("fsdp_param"), eng.runtime.hidden("fsdp_grad")
    first, again = gather * in_forward, gather * in_backward
    exposed_f = first - of_param * np.minimum(first, forward)
    both = again + reduce
    covered = np.minimum(both, backward) / np.maximum(both, np.finfo(np.float64).tiny)
    exposed_b = again * (1.0 - of_param * covered) + reduce * (1.0 - of_grad * covered)
    return forward + exposed_f, backward + exposed_b, recompute, (exposed_f, exposed_b)


def _boundary_seconds(eng: Engine, payload: Floats, gpus: Floats, pp: int) -> Floats:
    """One boundary activation to the next stage, gpus/pp ranks away."""
    if pp == 1:
        return np.zeros_like(payload)
    first, index = distinct(payload, gpus)
    columns = {"bytes": payload[first], "gpus": gpus[first], "pp": np.full(len(first), float(pp))}
    places = eng.boundaries.find(columns)
    return eng.boundaries.arrays["seconds"][places][index]


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
    seconds = local.chosen.at("seconds", lid)
    recompute = local.chosen.at("recompute", lid)
    exposed_both = exposed[0] + exposed[1]
    critical = np.full(len(lid), float(cut.stages[0].first))
    load = stage_f[0] + stage_b[0]
    chosen: list[Floats] = []
    for number, (run, share) in enumerate(zip(cut.stages, shares, strict=True)):
        sums = run_sum(run.content, seconds)
        both = sums[PHASES.index("forward")] + sums[PHASES.index("backward")]
        again = share * run_sum(run.content, recompute)
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


def _step_end(
    eng: Engine,
    state: StateTables,
    states: list[StateBytes],
    cut: Split,
    pp: int,
    index: NDArray[np.int64],
    stage_f: list[Floats],
    stage_b: list[Floats],
    p2p: Floats,
    last: Floats,
) -> tuple[Floats, Floats]:
    """(exposed gradient reduction and parameter gathering, optimizer) in seconds per row.

    Reduction hides behind the backwards of its stage that follow (`last` micro-batches), gathering behind the
    first forwards; the last and the first layer's share never hides. A later stage is done earlier by the
    backwards that follow it, and starts later by the forwards before it.
    """
    of_param, of_grad = eng.runtime.hidden("dp_param"), eng.runtime.hidden("dp_grad")
    exposed_reduce = np.zeros(len(index))
    exposed_gather = np.zeros(len(index))
    optimizer = np.zeros(len(index))
    before_f, before_b = np.zeros_like(p2p), np.zeros_like(p2p)
    for number, run in enumerate(cut.stages):
        content = weight_content(run.content, pp)
        reduce, gather = (seconds[state.index] for seconds in moved_once(eng, state, content, pp))
        parts = max(1, sum(content))
        most = (parts - 1.0) / parts
        left = reduce - of_grad * np.minimum((last * stage_b[number])[index], reduce * most) - before_b[index]
        late = gather - of_param * np.minimum((last * stage_f[number])[index], gather * most) - before_f[index]
        exposed_reduce = np.maximum(exposed_reduce, left)
        exposed_gather = np.maximum(exposed_gather, late)
        optimizer = np.maximum(optimizer, optimizer_seconds(eng, states[number])[state.index])
        before_f = before_f + run.count * (stage_f[number] + p2p)
        before_b = before_b + run.count * (stage_b[number] + p2p)
    exposed = (exposed_reduce + exposed_gather) + state.tables["tied"][state.index]
    return exposed, optimizer + state.tables["clip"][state.index]


def last_round(m: Floats, pp: int, vpp: int) -> Floats:
    """Micro-batches' worth of a stage's work that is left when the first of its gradients are whole.

    Interleaved, the backwards of the last pp micro-batches run chunk by chunk (Narayanan et al. 2021, section 2.2),
    so that a chunk is reduced while the vpp - 1 others work (Megatron Core, schedules.py: enable_grad_sync at a
    chunk's last micro-batch); gathered parameters are read chunk by chunk in the same way.
    """
    return np.maximum(1.0, np.minimum(m, float(pp)) * ((vpp - 1.0) / vpp))


def moved_once(eng: Engine, state: StateTables, content: tuple[int, ...], pp: int) -> tuple[Floats, Floats]:
    """Seconds per step, per combination, of reducing a stage's gradients after its last backward and of gathering
    its parameters before the next forward; what is done every micro-batch is not in them."""
    reduce = run_sum(content, state.tables["reduce"]) + run_sum(content, state.tables["replicate"])
    timing = eng.runtime.grad_reduce_pipeline if pp > 1 else eng.runtime.grad_reduce_sharded
    if timing == "micro_batch":
        reduce = np.where(state.zero >= 2.0, run_sum(content, state.tables["replicate"]), reduce)
    gather = run_sum(content, state.tables["gather"])
    return reduce, np.where(gathers(state.zero, eng.runtime.state, 2)[0][0] > 0.0, 0.0, gather)


def optimizer_seconds(eng: Engine, held: StateBytes) -> Floats:
    """The update reads and writes every byte of its state once; clipping reads the gradients once more.

    Offloaded, gradients go to the host and parameters come back over PCIe.
    """
    recipe_bytes = 4.0
    seconds = memory_seconds(eng.rates, held.optimizer_traffic)
    if eng.workload.clip_grad:
        seconds = seconds + memory_seconds(eng.rates, held.gradient_elements * recipe_bytes)
    if eng.workload.offload_optimizer:
        seconds = seconds + pcie_seconds(eng.rates, held.gradient_elements * (2.0 * recipe_bytes))
    return seconds


def _flops(
    local: LocalTables, lid: NDArray[np.int64], cut: Split, shares: list[Floats], m: Floats, pp: int
) -> tuple[Floats, Floats]:
    """(recomputed, executed by kernels) FLOPs per GPU and step, the mean over stages."""
    full, kernel = local.chosen.at("full_flops", lid), local.chosen.at("kernel_flops", lid)
    again, executed = np.zeros(len(lid)), np.zeros(len(lid))
    for run, share in zip(cut.stages, shares, strict=True):
        weight = run.count / pp
        again = again + weight * share * run_sum(run.content, full[1])
        passes = run_sum(run.content, kernel[0]) + run_sum(run.content, kernel[2])
        executed = executed + weight * (passes + share * run_sum(run.content, kernel[1]))
    return again * m, executed * m
