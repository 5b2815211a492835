"""The time of a step with many micro-batches: simulate until the pipeline repeats itself, then multiply.

Schedules are made of a warm-up, rounds that only count up micro-batches, and a cool-down. Two lists of the same
schedule, for m and m + one round, show where the rounds end. If over the last rounds every stage did the same
jobs and every end moved by the same time, the state before the cool-down repeats and each further round adds that
time. If no number of rounds repeats, twice as many micro-batches are tried, and then all of them simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from distplan.costmodel.schedules import Schedule, build_schedule
from distplan.costmodel.schedules_orders import Job
from distplan.costmodel.simulate import Simulation, StageCosts, simulate
from distplan.costmodel.strategy import V_SHAPED

ROUNDING = 1e-11
"""relative difference of two times that counts as none: float64 sums over some thousand jobs"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """As Simulation, without events; `simulated` micro-batches were run one by one."""

    seconds: float
    busy: tuple[float, ...]
    bubble: tuple[float, ...]
    peak: tuple[float, ...]
    simulated: int


def simulate_step(
    name: str, *, stages: int, micro_batches: int, chunks: int, costs: StageCosts, dialect: str = ""
) -> StepTime:
    """Seconds, busy time, bubble and peak memory of a step. Raises what build_schedule and simulate raise."""

    def build(m: int) -> Schedule:
        return build_schedule(name, stages=stages, micro_batches=m, chunks=chunks, dialect=dialect)

    step = stages if chunks > 1 and name not in V_SHAPED else 1
    some = (3 if step == 1 else 6) * stages
    for tried in (some, 2 * some):
        fewer = tried + (micro_batches - tried) % step
        if 2 * fewer > micro_batches:
            break
        shorter = build(fewer)
        run = simulate(shorter, costs, record=False)
        found = _repeats(shorter, build(fewer + step), run, step)
        if found is not None:
            rounds, period = found
            left = (micro_batches - fewer) // step
            if left % rounds:
                run = simulate(build(fewer + left % rounds * step), costs, record=False)
            return _stretched(run, micro_batches, left // rounds * period, costs)
    run = simulate(build(micro_batches), costs, record=False)
    return _stretched(run, micro_batches, 0.0, costs)


def _stretched(run: Simulation, micro_batches: int, more: float, costs: StageCosts) -> StepTime:
    simulated = run.schedule.micro_batches
    seconds = run.seconds + more
    once = costs.optimizer if any(job and job.kind == "OPT" for job in run.schedule.jobs[0]) else 0.0
    busy = tuple((b - once) * (micro_batches / simulated) + once for b in run.busy)
    return StepTime(
        seconds=seconds, busy=busy, bubble=tuple(seconds - b for b in busy), peak=run.peak, simulated=simulated
    )


def _repeats(short: Schedule, longer: Schedule, run: Simulation, step: int) -> tuple[int, float] | None:
    """(rounds, seconds): the least number of rounds after which all ends have moved by the same seconds."""
    ranks = []
    for jobs, more in zip(short.jobs, longer.jobs, strict=True):
        a, b = [j for j in jobs if j], [j for j in more if j]
        cut = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        tail = b[cut + len(b) - len(a) :]
        if not all(x == _later(y, step) or x.kind == y.kind == "W" for x, y in zip(tail, a[cut:], strict=True)):
            return None
        ranks.append((a, cut, len(b) - len(a)))
    for rounds in range(1, short.stages + 1):
        period = _moved(run, ranks, rounds, step)
        if period is not None:
            return rounds, period
    return None


def _moved(run: Simulation, ranks: list[tuple[list[Job], int, int]], rounds: int, step: int) -> float | None:
    """By how much the ends of the last rounds lie after those `rounds` before, if all by the same."""
    period: float | None = None
    for ends, (jobs, cut, per_round) in zip(run.ends, ranks, strict=True):
        back = rounds * per_round
        looked_at = back + (per_round if step > 1 else 2 * per_round)
        if cut < looked_at + back:
            return None
        for k in range(cut - looked_at, cut):
            moved = ends[k] - ends[k - back]
            period = moved if period is None else period
            if abs(moved - period) > ROUNDING * ends[k] or jobs[k] != _later(jobs[k - back], rounds * step):
                return None
    return period


def _later(job: Job, by: int) -> Job:
    if job.kind in ("OPT", "LR", "REDUCE", "UNSHARD", "RESHARD"):
        return job
    parts = tuple(_later(part, by) for part in job.parts)
    return Job(job.kind, job.chunk, job.micro_batch + (0 if parts else by), parts)
