"""Orders of jobs on one stage, schedule by schedule: forwards, backwards and their halves.

A job is FORWARD (F), BACKWARD (B), or its halves: the input's gradient (I) and the weights' (W). `chunk` counts the
model chunks of a stage, `None` is a slot in which a lock-step runner idles. Sources are named at each schedule;
where two frameworks differ for one name both orders are here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple


class Job(NamedTuple):
    """What a stage does next. An OVERLAP job runs its `parts` (a forward and a backward) together."""

    kind: str
    """F B I W · SEND_F RECV_F SEND_B RECV_B · UNSHARD RESHARD REDUCE OPT LR · OVERLAP"""
    chunk: int = 0
    micro_batch: int = 0
    parts: tuple[Job, ...] = ()


Slots = list[Job | None]


def slots(kind: str, micro_batches: int, per_round: int, chunks: int) -> list[Job]:
    """All forwards (kind F) or backwards of a looped stage in order: rounds of `per_round` micro-batches, which take
    the chunks one after the other, backwards the last chunk first (arXiv 2104.04473, section 2.2)."""
    jobs = []
    for k in range(micro_batches * chunks):
        turn, place = divmod(k, per_round * chunks)
        chunk = place // per_round
        jobs.append(Job(kind, chunk if kind == "F" else chunks - 1 - chunk, turn * per_round + place % per_round))
    return jobs


def alternate(forwards: list[Job], backwards: list[Job], warm_up: int) -> list[Job]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def f_then_b(micro_batches: int) -> list[Job]:
    """GPipe (arXiv 1811.06965)."""
    return slots("F", micro_batches, micro_batches, 1) + slots("B", micro_batches, micro_batches, 1)


def one_f_one_b(stages: int, stage: int, micro_batches: int, hop: int = 1) -> list[Job]:
    """PipeDream-flush (arXiv 2006.09503). `hop` = warm-up forwards per stage further from the end: 2 is eager 1F1B,
    which sends each forward one job before the neighbour needs it (Paddle's Eager1F1B, OneFlow)."""
    warm_up = min(hop * (stages - 1 - stage), micro_batches)
    m = micro_batches
    return alternate(slots("F", m, m, 1), slots("B", m, m, 1), warm_up)


def interleaved_warm_up(stages: int, stage: int, micro_batches: int, chunks: int, per_round: int, hop: int = 2) -> int:
    """Forwards before the first forward-backward pair (arXiv 2104.04473; Megatron-LM's schedules)."""
    return min((chunks - 1) * per_round + hop * (stages - 1 - stage), micro_batches * chunks)


def interleaved(stages: int, stage: int, micro_batches: int, chunks: int) -> list[Job]:
    """Interleaved 1F1B of Megatron-LM and Paddle: with as many micro-batches as stages all forwards come first."""
    warm_up = interleaved_warm_up(stages, stage, micro_batches, chunks, stages)
    if micro_batches == stages:
        warm_up = micro_batches * chunks
    m = micro_batches
    return alternate(slots("F", m, stages, chunks), slots("B", m, stages, chunks), warm_up)


def interleaved_lock_step(stages: int, stage: int, micro_batches: int, chunks: int, per_round: int) -> Slots:
    """PyTorch's Interleaved1F1B: rounds need not be as many micro-batches as there are stages; idle slots align the
    ranks: one per stage before, until the first backward comes back, and one before each backward at the end."""
    warm_up = interleaved_warm_up(stages, stage, micro_batches, chunks, per_round)
    total = micro_batches * chunks
    pairs = alternate(
        slots("F", micro_batches, per_round, chunks), slots("B", micro_batches, per_round, chunks), warm_up
    )
    wait = chunks * stages + 2 * (stages - 1 - stage) - warm_up - stage if warm_up else 0
    order: Slots = [None] * stage + pairs[:warm_up] + [None] * wait
    order += pairs[warm_up : 2 * total - warm_up]
    for job in pairs[2 * total - warm_up :]:
        order += [None, job]
    return order


def looped_bfs(stages: int, stage: int, micro_batches: int, chunks: int) -> Slots:
    """Breadth-first (arXiv 2211.05953): every micro-batch through a chunk before the next chunk; backwards from the
    last micro-batch."""
    order: Slots = [None] * stage
    order += [Job("F", c, i) for c in range(chunks) for i in range(micro_batches)]
    order += [None] * (2 * (stages - 1 - stage))
    order += [Job("B", c, i) for c in reversed(range(chunks)) for i in reversed(range(micro_batches))]
    return order


def zb_h1(stages: int, stage: int, micro_batches: int) -> list[Job]:
    """ZB-H1 (arXiv 2401.10241, section 2.3) as Paddle's ZBH1 lists it: stage s puts off the weight gradients of its
    first s micro-batches to the end, and splits the last backward, so that its input gradient leaves first."""
    order: list[Job] = []
    late: list[Job] = []
    for job in one_f_one_b(stages, stage, micro_batches):
        last = job.micro_batch == micro_batches - 1 and stage > 0
        if job.kind == "F" or not (job.micro_batch < stage or last):
            order.append(job)
            continue
        order.append(job._replace(kind="I"))
        weight = job._replace(kind="W")
        late = [weight, *late] if last else [*late, weight]
    return order + late


def interleaved_zero_bubble(stages: int, stage: int, micro_batches: int, chunks: int, per_round: int) -> Slots:
    """ZB1P of arXiv 2401.10241 over looped stages (PyTorch's InterleavedZeroBubble): one warm-up forward per stage
    further from the end, and weight gradients `stage` micro-batches behind the input gradients."""
    warm_up = interleaved_warm_up(stages, stage, micro_batches, chunks, per_round, hop=1)
    inputs = slots("I", micro_batches, per_round, chunks)
    pairs = alternate(slots("F", micro_batches, per_round, chunks), inputs, warm_up)
    order: Slots = [None] * stage + pairs[:warm_up] + ([None] * (stages - 1 - stage) if warm_up else [])
    done = 0
    for job in pairs[warm_up:]:
        order.append(job)
        if job.kind == "I":
            done += 1
            if done > stage:
                order.append(inputs[done - 1 - stage]._replace(kind="W"))
    return order + [job._replace(kind="W") for job in inputs[max(done - stage, 0) :]]


def zb_v(stages: int, stage: int, micro_batches: int) -> Slots:
    """ZB-V (arXiv 2401.10241, section 6) laid out for equal F, I and W times, as PyTorch's ZBVZeroBubble: drawn for
    at least 2·stages−1 micro-batches, those that do not exist are idle slots."""
    drawn = max(micro_batches, 2 * stages - 1)
    next_of = _counter()
    order: Slots = [None] * stage

    def add(*what: tuple[str, int]) -> None:
        for kind, chunk in what:
            i = next_of(kind, chunk)
            order.append(Job(kind, chunk, i) if i < micro_batches else None)

    first = 2 * (stages - stage) - 1
    add(*[("F", 0)] * first)
    add(*[("F", 1), ("F", 0)] * stage)
    add(*[("F", 1), ("I", 1), ("W", 1)] * (stages - stage))
    ahead, behind = first + stage, stages
    while behind < drawn:
        if ahead < drawn:
            add(("F", 0))
            ahead += 1
        add(("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
        behind += 1
    add(*[("I", 0), ("I", 1)] * stage)
    add(*[("I", 0), ("W", 0)] * (stages - stage))
    add(*[("W", 1)] * stage)
    add(*[("W", 0)] * stage)
    return order


def dualpipe_v(stages: int, stage: int, micro_batches: int) -> Slots:
    """DualPipeV (DeepSeek's DualPipe cut in half; arXiv 2412.19437, section 3.2.1), as PyTorch lists it: forwards of
    one chunk overlap backwards of the other; near the end backwards are split and the weight gradients put off."""
    ahead, upto = stages - 1 - stage, stage + 1
    next_of = _counter()
    weights: deque[Job] = deque()
    order: Slots = []

    def job(kind: str, chunk: int) -> Job:
        made = Job(kind, chunk, next_of("F" if kind == "F" else "B", chunk))
        if kind == "I":
            weights.append(made._replace(kind="W"))
        return made

    def overlap(forward: int, backward: int) -> Job:
        parts = (job("F", forward), job("B", backward))
        return Job("OVERLAP", parts=parts)

    order += [job("F", 0) for _ in range(2 * ahead)]
    order += [job("F", chunk) for _ in range(upto) for chunk in (0, 1)]
    for _ in range(ahead):
        order += [job("I", 1), weights.popleft(), job("F", 1)]
    for k in range(micro_batches - 2 * stages + upto):
        apart = k == 0 and ahead == 0
        order += [job("F", 0), job("B", 1)] if apart else [overlap(0, 1)]
        order.append(overlap(1, 0))
    for _ in range(ahead):
        order += [job("B", 1), overlap(1, 0)]
    split_from = 2 * (upto // 2) + (stage + 1) % 2
    order += [job("I" if k >= split_from else "B", (k + 1) % 2) for k in range(2 * upto)]
    for _ in range(ahead):
        order += [weights.popleft()] if weights else []
        order.append(job("I", 0))
    return order + list(weights)


def in_lock_step(ranks: list[Slots]) -> list[Slots]:
    """Idle slots so that, all ranks taking one slot at a time, no forward comes before the one it needs."""
    stages = len(ranks)
    seen: set[tuple[int, int]] = set()
    waiting: list[Iterator[Job | None]] = [iter(r) for r in ranks]
    head = [next(w, ()) for w in waiting]
    laid: list[Slots] = [[] for _ in ranks]
    while any(h != () for h in head):
        now: set[tuple[int, int]] = set()
        for rank, job in enumerate(head):
            if job == ():
                continue
            assert job is None or isinstance(job, Job)
            if job is not None and job.kind == "F":
                virtual = job.chunk * stages + rank
                if virtual and (virtual - 1, job.micro_batch) not in seen:
                    laid[rank].append(None)
                    continue
                now.add((virtual, job.micro_batch))
            laid[rank].append(job)
            head[rank] = next(waiting[rank], ())
        seen |= now
    return laid


class _counter:
    """Next micro-batch of each (kind, chunk)."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = {}

    def __call__(self, kind: str, chunk: int) -> int:
        i = self._next.get((kind, chunk), 0)
        self._next[kind, chunk] = i + 1
        return i
