"""Closed forms for the time of a pipeline: a lower bound on the event simulation, exact or near it.

Everything is vectorised over rows (strategies that share pp and vpp). What the stages hold comes run-length
encoded: `forward[r]` and `backward[r]` are float64 columns of seconds per micro-batch, `count[r]` how many
consecutive virtual chunks (stage v·pp + s for interleaved) have that content; Σ count = pp·vpp.

The time is the longest path through the jobs. Model of a message, shared with simulate.py: with overlap it
occupies its link (one per neighbour and direction) for `p2p` seconds and no stage; without, it occupies the
sender. Schedules: GPipe (arXiv 1811.06965), 1F1B (PipeDream-flush, arXiv 2006.09503), interleaved
(arXiv 2104.04473).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.pipeline_1f1b import one_f_one_b
from distplan.costmodel.pipeline_interleaved import interleaved
from distplan.costmodel.stages import chunks_of
from distplan.costmodel.strategy import CHUNKED, STRUCTURE

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTime:
    """Seconds from the first forward to the last backward: `seconds` = `compute` + `bubble`, per row.

    `compute` is what the heaviest stage computes, m·(f+b); `bubble` is the rest of the critical path.
    """

    seconds: Floats
    compute: Floats
    bubble: Floats


def pipeline_time(
    schedule: str,
    *,
    forward: Sequence[Floats] | Floats,
    backward: Sequence[Floats] | Floats,
    count: Sequence[int],
    p2p: Floats,
    overlap_p2p: bool,
    m: Floats,
    pp: int,
    vpp: int = 1,
    follow: bool = True,
    input_gradient: Sequence[Floats] | Floats | None = None,
) -> PipelineTime:
    """Time of the pipeline section of a step, all in seconds, `m` micro-batches per row.

    `follow` looks closer at interleaved rows whose longest path changes stages on the way (uneven chunks, messages
    longer than a chunk's forward): within 3 % of the simulation, at a microsecond or more a row. Without it such
    rows get a looser bound, which is what a search ranks by before it simulates its shortlist.

    `schedule` is f_then_b, 1f1b or interleaved, or zb_h1 or zb_v (bounds; `input_gradient` is the part of backward
    that the stage before waits for, half of it by default); interleaved is a looser bound where pp does not divide m
    > pp, and for m < pp exact where all forwards come first; zb_v needs vpp = 2, the
    others vpp = 1.
    Raises ValueError when the runs do not make pp·vpp chunks or the schedule has no closed form.
    """
    if sum(count) != pp * vpp or len(count) != len(forward) or len(count) != len(backward):
        raise ValueError(f"runs {tuple(count)} do not make {pp}·{vpp} chunks")
    f, b, n = _without_empty(forward, backward, count)
    zero_bubble = schedule in ("zb_h1", "zb_v")
    compute = m * _heaviest(f, b, n, pp, vpp, schedule)
    halves = [0.5 * x for x in backward] if input_gradient is None else [*input_gradient]
    inputs = [x for x, size in zip(halves, count, strict=True) if size]
    link = np.asarray(p2p, dtype=np.float64)
    if not overlap_p2p and pp > 1 and not zero_bubble:
        f, b, n = _blocking(f, b, n, link)
        link = link * 0.0
    if schedule not in STRUCTURE["schedule"] or (vpp > 1 and schedule not in CHUNKED):
        raise ValueError(f"no closed form for schedule {schedule} with {vpp} chunks per stage")
    if pp == 1:
        seconds = compute
    elif zero_bubble:
        seconds = _zb_h1(f, b, inputs, n, link, m) if schedule == "zb_h1" else _zb_v(f, b, inputs, n, link, m, pp)
    elif schedule == "f_then_b":
        seconds = _f_then_b(f, b, n, link, m)
    elif vpp == 1:
        seconds = one_f_one_b(f, b, n, link, m)
    else:
        seconds = interleaved(f, b, n, link, m, pp, vpp, follow)
    return PipelineTime(seconds=seconds, compute=compute, bubble=seconds - compute)


def in_flight(schedule: str, stage: int, pp: int, num_micro_batches: Floats, vpp: int = 1) -> Floats:
    """Chunk activations that `stage` holds at its peak (a chunk is 1/vpp of a stage).

    f_then_b keeps all of them; 1f1b as many as there are stages from here to the end; interleaved its warm-up
    2·(pp−stage−1) + (vpp−1)·round and one more (arXiv 2104.04473, section 2.2), all of them when m = pp; a round has
    pp micro-batches, or m/⌊m/pp⌋ where pp does not divide m (torch.distributed.pipelining.ScheduleInterleaved1F1B).
    The zero bubble schedules keep what their late weight gradients need: as much on every stage as 1f1b on the
    first (arXiv 2401.10241, table 2; arXiv 2405.15362, section 3).
    """
    total = np.asarray(num_micro_batches, dtype=np.float64) * vpp
    if schedule == "f_then_b":
        return total
    if schedule in ("zb_h1", "zb_v"):
        return np.minimum(float(pp * vpp), total)
    if schedule == "1f1b" or (schedule == "interleaved" and vpp == 1):
        return np.minimum(float(pp - stage), total)
    if schedule == "interleaved":
        per_round = (total / vpp) / np.maximum(1.0, np.floor(total / (pp * vpp)))
        warm_up = 2.0 * (pp - stage - 1) + (vpp - 1.0) * per_round
        return np.where(total == pp * vpp, total, np.minimum(warm_up + 1.0, total))
    raise ValueError(f"no closed form for schedule {schedule}")


def _without_empty(
    forward: Sequence[Floats] | Floats, backward: Sequence[Floats] | Floats, count: Sequence[int]
) -> tuple[list[Floats], list[Floats], list[int]]:
    kept = [r for r, n in enumerate(count) if n > 0]
    return [forward[r] for r in kept], [backward[r] for r in kept], [count[r] for r in kept]


def _heaviest(f: list[Floats], b: list[Floats], count: list[int], pp: int, vpp: int, schedule: str) -> Floats:
    """Largest (f+b) of a stage, all its chunks together; stages with the same runs are looked at once."""
    run_of = [r for r, n in enumerate(count) for _ in range(n)]
    best: Floats | None = None
    chunks = [chunks_of(stage, pp, vpp, schedule) for stage in range(pp)]
    for runs in dict.fromkeys(tuple(run_of[k] for k in held) for held in chunks):
        load = f[runs[0]] + b[runs[0]]
        for r in runs[1:]:
            load = load + (f[r] + b[r])
        best = load if best is None else np.maximum(best, load)
    assert best is not None
    return best


def _blocking(
    f: list[Floats], b: list[Floats], count: list[int], p2p: Floats
) -> tuple[list[Floats], list[Floats], list[int]]:
    """A send that occupies its stage lengthens the job before it; the last forward and the last backward of a
    micro-batch send nothing, so the first and the last chunk become runs of their own."""
    runs = list(zip(f, b, count, strict=True))
    x, y, n = runs[0]
    if n > 1:
        runs = [(x, y, 1), (x, y, n - 1), *runs[1:]]
    x, y, n = runs[-1]
    if n > 1:
        runs = [*runs[:-1], (x, y, n - 1), (x, y, 1)]
    last = len(runs) - 1
    return (
        [x + p2p if r < last else x for r, (x, _, _) in enumerate(runs)],
        [y + p2p if r > 0 else y for r, (_, y, _) in enumerate(runs)],
        [n for _, _, n in runs],
    )


def _zb_h1(f: list[Floats], b: list[Floats], inputs: list[Floats], count: list[int], p2p: Floats, m: Floats) -> Floats:
    """A bound (arXiv 2401.10241, section 3): no stage is done before its work, after the first forward has arrived;
    and without its weight gradients the schedule is 1F1B."""
    best = one_f_one_b(f, inputs, count, p2p, m)
    arrival = np.zeros_like(m)
    for r, n in enumerate(count):
        arrival = arrival + (n - 1.0) * (f[r] + p2p)
        best = np.maximum(best, arrival + m * (f[r] + b[r]))
        arrival = arrival + (f[r] + p2p)
    return best


def _zb_v(
    f: list[Floats], b: list[Floats], inputs: list[Floats], count: list[int], p2p: Floats, m: Floats, pp: int
) -> Floats:
    """A bound (arXiv 2405.15362): stage s holds chunks s and 2·pp−1−s. Its work follows the first arrival; its
    last input gradient still has to go down to the first stage; and one micro-batch goes through everything."""
    run_of = [r for r, n in enumerate(count) for _ in range(n)]
    arrival = drain = through = np.zeros_like(m)
    best = np.zeros_like(m)
    for r in run_of:
        through = through + (f[r] + inputs[r])
    best = np.maximum(best, through + (2.0 * (pp - 1.0)) * (2.0 * p2p))
    for s in range(pp):
        near, far = run_of[s], run_of[2 * pp - 1 - s]
        forwards, gradients = f[near] + f[far], inputs[near] + inputs[far]
        best = np.maximum(best, arrival + m * (forwards + (b[near] + b[far])))
        best = np.maximum(best, (arrival + m * (forwards + gradients)) + drain)
        arrival, drain = arrival + (f[near] + p2p), drain + (inputs[near] + p2p)
    return best


def _f_then_b(f: list[Floats], b: list[Floats], count: list[int], p2p: Floats, m: Floats) -> Floats:
    """Exact. One pass over all stages each way; the other m−1 micro-batches queue at the slowest stage or link."""
    stages = sum(count)
    slow_f, slow_b = f[0], b[0]
    once = count[0] * (f[0] + b[0])
    for r in range(1, len(count)):
        slow_f, slow_b = np.maximum(slow_f, f[r]), np.maximum(slow_b, b[r])
        once = once + count[r] * (f[r] + b[r])
    if stages > 1:
        slow_f, slow_b = np.maximum(slow_f, p2p), np.maximum(slow_b, p2p)
    return once + (2.0 * (stages - 1)) * p2p + (m - 1.0) * (slow_f + slow_b)
