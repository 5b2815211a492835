"""What stages and chunks do with one micro-batch: their seconds, those of ZeRO's traffic, those of a boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.combine import LocalTables, StateTables
from distplan.costmodel.pipeline import PipelineTime, pipeline_time
from distplan.costmodel.stage_costs import layers_only, run_sum
from distplan.costmodel.stages import Run, Split, stage_of
from distplan.costmodel.state import gathers
from distplan.costmodel.strategy import Floats
from distplan.costmodel.tables import Engine, distinct

ZERO_BUBBLE = ("zb_h1", "zb_v")


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
    shares = [recomputed_share(layers, run) for run in cut.stages]
    passes = np.stack([forward, backward, recompute])
    stage_f, stage_b = _both_ways(cut.stages, shares, passes)
    if vpp == 1:
        chunk_f, chunk_b, chunks = stage_f, stage_b, cut.stages
    else:
        chunks = cut.chunks
        holders = [stage_of(run.first, pp, schedule) for run in chunks]
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
        p2p=_boundary_seconds(eng, local, lid, gpus, pp),
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
    within, across = eng.runtime.reduces_each(zero, pp)
    if not ((zero >= 2.0) | (within > 0.0)).any():
        nothing = np.zeros_like(forward)
        return forward, backward, recompute, (nothing, nothing)
    gather, reduction, replication = (by_segment(state, name, pp)[:, sid] for name in ("gather", "reduce", "replicate"))
    in_forward, in_backward = gathers(zero, eng.runtime.state, len(gather))
    reduce = within * reduction + across * replication
    of_param, of_grad = eng.runtime.hidden("fsdp_param"), eng.runtime.hidden("fsdp_grad")
    first, again = gather * in_forward, gather * in_backward
    exposed_f = first - of_param * np.minimum(first, forward)
    both = again + reduce
    covered = np.minimum(both, backward) / np.maximum(both, np.finfo(np.float64).tiny)
    exposed_b = again * (1.0 - of_param * covered) + reduce * (1.0 - of_grad * covered)
    return forward + exposed_f, backward + exposed_b, recompute, (exposed_f, exposed_b)


def by_segment(state: StateTables, name: str, pp: int) -> Floats:
    """Seconds per [segment, combination], those of the embedding's tied copy with the head where the two part."""
    table = state.tables[name]
    return table[:-1] if pp == 1 else np.concatenate([table[:-2], table[-2:-1] + table[-1:]])


def _boundary_seconds(eng: Engine, local: LocalTables, lid: NDArray[np.int64], gpus: Floats, pp: int) -> Floats:
    """One boundary activation to the next stage, gpus/pp ranks away, and its gather where ranks send parts of it."""
    payload = local.chosen.at("boundary", lid)
    if pp == 1:
        return np.zeros_like(payload)
    first, index = distinct(payload, gpus)
    columns = {"bytes": payload[first], "gpus": gpus[first], "pp": np.full(len(first), float(pp))}
    places = eng.boundaries.find(columns)
    seconds: Floats = eng.boundaries.arrays["seconds"][places][index] + local.chosen.at("boundary_gather", lid)
    return seconds


def recomputed_share(layers: Floats, run: Run) -> Floats:
    """The part of a stage's layers that is recomputed where `layers` of them are, or as many as a hand cut says."""
    held = sum(layers_only(run.content))
    again = layers if run.recompute is None else np.full_like(layers, float(run.recompute))
    return np.minimum(again, float(held)) / max(held, 1)
