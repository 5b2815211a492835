"""Sends, receives and parameter gathers written into a schedule of computations.

A receive stands in the receiver's list where the sender's send happens while ranks take turns, one job each, in rank
order: matching orders on both sides, so that blocking sends and receives cannot wait for each other in a circle.
This is the order of PyTorch's pipeline runtime, and so is gathering up to three chunks' parameters ahead of use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distplan.costmodel.schedules_orders import Job, Slots

GATHERED_AHEAD = 3
"""chunks whose parameters a stage holds gathered (PyTorch's max_active_stages)"""


def leaves(job: Job) -> tuple[Job, ...]:
    """The jobs that a job runs: itself, or the parts of an overlapped pair."""
    return job.parts or (job,)


def with_reduces(order: Sequence[Job | None], micro_batches: int) -> Slots:
    """A REDUCE after the last backward (weight gradient) of each chunk."""
    left: dict[int, int] = {}
    out: Slots = []
    for job in order:
        out.append(job)
        for leaf in leaves(job) if job else ():
            if leaf.kind in "BW":
                left[leaf.chunk] = left.get(leaf.chunk, micro_batches) - 1
                if left[leaf.chunk] == 0:
                    out.append(Job("REDUCE", leaf.chunk))
    return out


def with_gathers(order: Sequence[Job]) -> list[Job]:
    """UNSHARD before a chunk is used, RESHARD once it is no longer among the next chunks used."""
    out: list[Job] = []
    active: list[int] = []
    for k, job in enumerate(order):
        coming: list[int] = []
        for later in order[k:]:
            coming += [leaf.chunk for leaf in leaves(later) if leaf.chunk not in coming]
            if len(coming) >= GATHERED_AHEAD:
                break
        coming = coming[:GATHERED_AHEAD]
        out += [Job("RESHARD", chunk) for chunk in active if chunk not in coming]
        out += [Job("UNSHARD", chunk) for chunk in coming if chunk not in active]
        active = [c for c in active if c in coming] + [c for c in coming if c not in active]
        out.append(job)
    return out + [Job("RESHARD", chunk) for chunk in active]


def with_messages(
    orders: Sequence[Sequence[Job]], virtual: Callable[[int, int], int], place: Sequence[tuple[int, int]]
) -> list[list[Job]]:
    """SEND and RECV jobs. `virtual(rank, chunk)` numbers the virtual stages, `place[k]` = (rank, chunk) of number k."""
    last = len(place) - 1
    out: list[list[Job]] = [[] for _ in orders]
    ready: list[set[tuple[str, int, int]]] = [set() for _ in orders]
    at = [0] * len(orders)

    def runnable(rank: int, job: Job) -> bool:
        k = virtual(rank, job.chunk)
        if (job.kind == "F" and k > 0) or (job.kind in "BI" and k < last):
            return (job.kind if job.kind == "F" else "B", k, job.micro_batch) in ready[rank]
        return True

    def finish(rank: int, job: Job) -> None:
        kind, k = ("F", virtual(rank, job.chunk) + 1) if job.kind == "F" else ("B", virtual(rank, job.chunk) - 1)
        if job.kind not in "FBI" or not 0 <= k <= last:
            return
        peer, chunk = place[k]
        ready[peer].add((kind, k, job.micro_batch))
        if peer != rank:
            out[rank].append(Job(f"SEND_{kind}", job.chunk, job.micro_batch))
            out[peer].append(Job(f"RECV_{kind}", chunk, job.micro_batch))

    while any(k < len(order) for k, order in zip(at, orders, strict=True)):
        progress = False
        for rank, order in enumerate(orders):
            if at[rank] == len(order) or not all(runnable(rank, leaf) for leaf in leaves(order[at[rank]])):
                continue
            job = order[at[rank]]
            out[rank].append(job)
            at[rank] += 1
            progress = True
            for leaf in leaves(job):
                finish(rank, leaf)
        if not progress:
            raise ValueError("the jobs wait for each other in a circle")
    return out


def with_receives(order: Sequence[Job]) -> list[Job]:
    """Paddle's explicit communication jobs: the input of a forward is received right before it, or, after a backward,
    before that backward's gradient is sent, so that both messages are under way together."""
    out: list[Job] = []
    for k, job in enumerate(order):
        if job.kind == "F":
            if k == 0 or order[k - 1].kind != "B":
                out.append(Job("RECV_F", job.chunk, job.micro_batch))
            out.append(job)
        elif job.kind == "B":
            out.append(job)
            if k + 1 < len(order) and order[k + 1].kind == "F":
                out.append(Job("RECV_F", order[k + 1].chunk, order[k + 1].micro_batch))
            out.append(Job("SEND_B", job.chunk, job.micro_batch))
        else:
            out.append(job)
    return out
