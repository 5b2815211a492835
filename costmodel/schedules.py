"""Pipeline schedules: for each name and dialect, the job list of every stage, and what it refuses.

A dialect is a framework's way with a name, where frameworks differ: `megatron` (Megatron-LM; also Paddle's lists
without communication jobs, but for the last job, OPT), `paddle` (Paddle 3.3 with explicit receives and sends),
`torch` (PyTorch 2.13 torch.distributed.pipelining, computations with idle slots). `build_schedule` gives the first
dialect of a name unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from distplan.costmodel import schedules_comms as comms
from distplan.costmodel import schedules_orders as orders
from distplan.costmodel.schedules_greedy_v import greedy_v
from distplan.costmodel.schedules_orders import Job, Slots
from distplan.costmodel.stages import virtual_stage
from distplan.costmodel.strategy import V_SHAPED
from distplan.hardware.errors import DistplanError, UnknownNameError

UNIT_TIMES: Mapping[str, float] = {"F": 100.0, "I": 100.0, "W": 100.0, "loss": 0.0, "comm": 0.0}
"""What the greedy zb_v assumes unless told otherwise: F = I = W, free messages (arXiv 2401.10241, section 6)."""


class ScheduleError(DistplanError):
    """A schedule that cannot run with so many stages, chunks or micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Jobs of every stage (rank), in order; `None` is a slot in which a lock-step runner idles.

    Virtual stages are laid out in loops (number chunk·stages + rank) or, with `v`, forth and back.
    """

    name: str
    dialect: str
    stages: int
    micro_batches: int
    chunks: int
    jobs: tuple[tuple[Job | None, ...], ...]
    v: bool = False

    def virtual(self, rank: int, chunk: int) -> int:
        """Number of the virtual stage that `rank` holds as its `chunk`, 0 being the first of the model."""
        return virtual_stage(rank, chunk, self.stages, self.v)

    def places(self) -> list[tuple[int, int]]:
        """(rank, chunk) of every virtual stage, in the order of the model."""
        found = {self.virtual(r, c): (r, c) for r in range(self.stages) for c in range(self.chunks)}
        return [found[k] for k in range(self.stages * self.chunks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a builder is asked for."""

    stages: int
    micro_batches: int
    chunks: int
    split_backward: bool
    times: Mapping[str, float]


def build_schedule(
    name: str,
    *,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    dialect: str = "",
    split_backward: bool = False,
    times: Mapping[str, float] = UNIT_TIMES,
) -> Schedule:
    """The job lists of schedule `name` for so many stages (ranks), micro-batches and model chunks per stage.

    `split_backward`: Paddle's option for interleaved; `times` (F, I, W, loss, comm):
    what the greedy zb_v lays its jobs by. Raises UnknownNameError (name, dialect) and ScheduleError (a refusal,
    with the numbers).
    """
    if name not in SCHEDULES:
        raise UnknownNameError("schedule", name, SCHEDULES)
    dialects = SCHEDULES[name]
    if dialect and dialect not in dialects:
        raise UnknownNameError(f"dialect of {name}", dialect, dialects)
    chosen = dialect or next(iter(dialects))
    if min(stages, micro_batches, chunks) < 1:
        raise ScheduleError(f"{name} needs at least one stage, micro-batch and chunk per stage")
    wanted = TWO_CHUNKS if name in V_SHAPED else ONE_CHUNK if name in SINGLE else chunks
    if chunks != wanted:
        raise ScheduleError(f"{name} has {wanted} model chunk(s) per stage, not {chunks}")
    request = Request(
        stages=stages, micro_batches=micro_batches, chunks=chunks, split_backward=split_backward, times=times
    )
    jobs = dialects[chosen](request)
    return Schedule(
        name=name,
        dialect=chosen,
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        jobs=tuple(tuple(rank) for rank in jobs),
        v=name in V_SHAPED,
    )


def with_communication(schedule: Schedule) -> Schedule:
    """The schedule as PyTorch's runtime executes it: parameter gathers, sends and receives among the jobs."""
    reduced = [comms.with_reduces(rank, schedule.micro_batches) for rank in schedule.jobs]
    gathered = [comms.with_gathers([job for job in rank if job]) for rank in reduced]
    jobs = comms.with_messages(gathered, schedule.virtual, schedule.places())
    return replace(schedule, jobs=tuple(tuple(rank) for rank in jobs))


def _at_least(r: Request, least: int, what: str) -> None:
    if r.micro_batches < least:
        raise ScheduleError(
            f"{what} with {r.stages} stages needs at least {least} micro-batches, not {r.micro_batches}"
        )


def _per_round(r: Request, what: str) -> int:
    """Micro-batches per round of PyTorch's looped schedules."""
    rounds = max(1, r.micro_batches // r.stages)
    if r.micro_batches % rounds:
        raise ScheduleError(
            f"{what} takes {r.micro_batches} micro-batches over {r.stages} stages in {rounds} rounds: "
            f"their number must be a multiple of {rounds}"
        )
    return r.micro_batches // rounds


def _stages(r: Request, order: Callable[[int], list[Job]]) -> list[list[Job]]:
    return [order(stage) for stage in range(r.stages)]


def _optimized(ranks: list[list[Job]]) -> list[Slots]:
    return [[*rank, Job("OPT")] for rank in ranks]


def _reduced(r: Request, ranks: list[Slots]) -> list[Slots]:
    return [comms.with_reduces(rank, r.micro_batches) for rank in ranks]


def _f_then_b(r: Request) -> list[Slots]:
    return _optimized(_stages(r, lambda _: orders.f_then_b(r.micro_batches)))


def _f_then_b_torch(r: Request) -> list[Slots]:
    return _reduced(r, [[*orders.f_then_b(r.micro_batches)] for _ in range(r.stages)])


def _one_f_one_b(r: Request) -> list[Slots]:
    return _optimized(_stages(r, lambda s: orders.one_f_one_b(r.stages, s, r.micro_batches)))


def _one_f_one_b_paddle(r: Request) -> list[Slots]:
    _at_least(r, r.stages, "Paddle's 1F1B")
    return _receiving(_one_f_one_b(r))


def _receiving(ranks: list[Slots]) -> list[Slots]:
    return [[*comms.with_receives([job for job in rank if job])] for rank in ranks]


def _one_f_one_b_torch(r: Request) -> list[Slots]:
    _at_least(r, r.stages, "PyTorch's 1F1B")
    ranks = _stages(r, lambda s: orders.one_f_one_b(r.stages, s, r.micro_batches))
    return _reduced(r, [[*rank] for rank in ranks])


def _eager(r: Request) -> list[Slots]:
    _at_least(r, 2 * r.stages - 1, "eager 1F1B")
    return _optimized(_stages(r, lambda s: orders.one_f_one_b(r.stages, s, r.micro_batches, hop=2)))


def _interleaved(r: Request) -> list[Slots]:
    _whole_rounds(r)
    ranks = _stages(r, lambda s: orders.interleaved(r.stages, s, r.micro_batches, r.chunks))
    if r.split_backward and r.micro_batches == r.stages:
        halves = [[j._replace(kind="I") if j.kind == "B" else j for j in rank] for rank in ranks]
        ranks = [rank + [j._replace(kind="W") for j in rank if j.kind == "I"] for rank in halves]
    return _optimized(ranks)


def _interleaved_paddle(r: Request) -> list[Slots]:
    """With a split backward and as many micro-batches as stages Paddle lists no communication jobs."""
    if r.split_backward and r.micro_batches == r.stages:
        return _interleaved(r)
    return _receiving(_interleaved(r))


def _whole_rounds(r: Request) -> None:
    _at_least(r, r.stages, "the interleaved schedule")
    if r.micro_batches % r.stages:
        raise ScheduleError(
            f"the interleaved schedule takes micro-batches in rounds of {r.stages} (one per stage): "
            f"{r.micro_batches} is no multiple"
        )


def _interleaved_torch(r: Request) -> list[Slots]:
    rounds = _per_round(r, "Interleaved1F1B")
    ranks = [orders.interleaved_lock_step(r.stages, s, r.micro_batches, r.chunks, rounds) for s in range(r.stages)]
    return ranks


def _looped_bfs(r: Request) -> list[Slots]:
    return [orders.looped_bfs(r.stages, s, r.micro_batches, r.chunks) for s in range(r.stages)]


def _zb_h1(r: Request) -> list[Slots]:
    _at_least(r, r.stages, "ZB-H1")
    return _optimized(_stages(r, lambda s: orders.zb_h1(r.stages, s, r.micro_batches)))


def _interleaved_zero_bubble(r: Request) -> list[Slots]:
    rounds = _per_round(r, "the interleaved zero-bubble schedule")
    return orders.in_lock_step(
        [orders.interleaved_zero_bubble(r.stages, s, r.micro_batches, r.chunks, rounds) for s in range(r.stages)]
    )


def _zb_v_torch(r: Request) -> list[Slots]:
    return [orders.zb_v(r.stages, s, r.micro_batches) for s in range(r.stages)]


def _zb_v_paddle(r: Request) -> list[Slots]:
    return [[*rank] for rank in greedy_v(r.stages, r.micro_batches, r.times)]


def _zb_v_paddle_pass(r: Request) -> list[Slots]:
    """Paddle 3.3.1's ZBVPP pass takes no more micro-batches than stages, and then calls a method that is gone."""
    if r.micro_batches > r.stages:
        raise ScheduleError(f"Paddle's ZBVPP pass takes at most {r.stages} micro-batches, not {r.micro_batches}")
    raise ScheduleError("Paddle 3.3.1's ZBVPP pass cannot run: its memory limit (_get_max_memory) was removed")


def _dualpipe_v(r: Request) -> list[Slots]:
    _at_least(r, 2 * r.stages, "DualPipeV")
    return [orders.dualpipe_v(r.stages, s, r.micro_batches) for s in range(r.stages)]


ONE_CHUNK, TWO_CHUNKS = 1, 2
SINGLE = frozenset({"f_then_b", "1f1b", "eager_1f1b", "zb_h1"})

SCHEDULES: Mapping[str, Mapping[str, Callable[[Request], list[Slots]]]] = {
    "f_then_b": {"paddle": _f_then_b, "torch": _f_then_b_torch},
    "1f1b": {"megatron": _one_f_one_b, "paddle": _one_f_one_b_paddle, "torch": _one_f_one_b_torch},
    "eager_1f1b": {"paddle": _eager},
    "interleaved": {"megatron": _interleaved, "paddle": _interleaved_paddle, "torch": _interleaved_torch},
    "looped_bfs": {"torch": _looped_bfs},
    "zb_h1": {"paddle": _zb_h1},
    "zb_v": {"torch": _zb_v_torch, "paddle": _zb_v_paddle, "paddle_pass": _zb_v_paddle_pass},
    "interleaved_zero_bubble": {"torch": _interleaved_zero_bubble},
    "dualpipe_v": {"torch": _dualpipe_v},
}
"""name -> dialect -> builder of the jobs per stage; the first dialect is the default."""
