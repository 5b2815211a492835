"""The longest sequence or the largest micro-batch that fits, of one strategy or of all within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distplan.costmodel.estimate import PHASES
from distplan.costmodel.replay import simulate_plan
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.planner import api
from distplan.planner.choices import Pricer
from distplan.planner.constraints import explain_row
from distplan.planner.document import FORMAT_VERSION, choice
from distplan.planner.plain import plain, rounded
from distplan.planner.plan import VERDICTS, Choice, Counts, Plan
from distplan.planner.pricing import Job, any_fits, verdicts
from distplan.planner.questions import best_of, job_of
from distplan.planner.space import Bounds

Plain = dict[str, Any]
OF = ("seq-len", "micro-batch")
STEP = 1024
"""tokens between lengths that are tried: every power of two that cp and tp need divides them"""
LONGEST = 1 << 24
"""16 Mi tokens: no model of public record is trained on longer sequences"""
MAX_ROWS = 8
Say = Callable[[float, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What may be used: one strategy, or every one that the job's bounds allow."""

    gpus: int
    strategy: Strategy | None = None

    def fits(self, job: Job) -> bool:
        if self.strategy is None:
            return any_fits(job, self.gpus, job.workload.global_batch)
        return self._admitted(job)

    def best(self, job: Job) -> Choice | None:
        """The fastest that fits."""
        if self.strategy is None:
            return best_of(job, self.gpus)[0]
        if not self._admitted(job):
            return None
        pricer = Pricer(job=job, price_per_gpu_hour=None, simulate_plan=simulate_plan)
        return pricer.simulated(pricer.choice(self.strategy, job.workload.global_batch))

    def nearest(self, job: Job) -> Strategy | None:
        """Where nothing fits: the legal strategy that is the fewest bytes over; None if none is legal."""
        if self.strategy is not None:
            return self.strategy if self.legal(job) else None
        tally = best_of(job, self.gpus)[1]
        return None if tally.nearest is None else tally.nearest.rows[0]

    def legal(self, job: Job) -> bool:
        assert self.strategy is not None
        broken = explain_row(self.strategy, job.context(self.gpus, job.workload.global_batch))
        return all(violation.warning for violation in broken)

    def _admitted(self, job: Job) -> bool:
        if self.strategy is None or not self.legal(job):
            return False
        estimate = job.price(Strategies.of([self.strategy]), job.workload.global_batch)
        return int(verdicts(estimate)[0]) <= VERDICTS.index("tight" if job.allow_tight else "fits")


def limits(
    job: api.Setting,
    candidates: Candidates,
    bounds: Bounds,
    *,
    of: str,
    allow_tight: bool = False,
    say: Say | None = None,
) -> Plain:
    """`largest` that fits (None: not even the least), what binds beyond it, and rows up to it, the fastest
    strategy of each. The global batch is held in sequences."""
    search = _sequences if of == "seq-len" else _micro_batches
    values, largest, beyond = search(job_of(job, bounds, allow_tight=allow_tight), candidates, say)
    rows = [_row(value, best) for value, best in values]
    fastest = max((row for row in rows if row["fits"]), key=lambda row: row["tokens_per_second_per_gpu"], default=None)
    made: Plain = rounded({
        "format_version": FORMAT_VERSION,
        "of": of,
        "model": job.model.name,
        "hardware": job.cluster.id,
        "runtime": job.runtime.name,
        "gpus": candidates.gpus,
        "global_batch": job.workload.global_batch,
        "seq_len": job.workload.seq_len,
        "largest": largest,
        "fastest": None if fastest is None else fastest["value"],
        "binds": beyond,
        "rows": rows,
    })  # fmt: skip
    return made


def _row(value: int, best: tuple[Choice, Plan] | None) -> Plain:
    if best is None:
        return {"value": value, "fits": False}
    shown = choice(*best)
    kept = ("step_seconds", "tokens_per_second_per_gpu", "mfu", "device_bytes", "usable_bytes", "worst_phase")
    return {"value": value, "fits": True} | {name: shown[name] for name in kept} | {"strategy": plain(best[0].strategy)}


def _best(job: Job, candidates: Candidates) -> tuple[Choice, Plan] | None:
    found = candidates.best(job)
    return None if found is None else (found, plan_of(job, found))


def plan_of(job: Job, found: Choice) -> Plan:
    """What document.choice needs to know around a choice."""
    counts = Counts(enumerated=1, rejected=(), legal=1, costed=1, fits=1, tight=0, out=0)
    return Plan(
        model=job.model, workload=job.workload, cluster=job.cluster, runtime=job.runtime, gpus=(found.gpus,),
        global_batches=(found.global_batch,), objective=job.objective, reserve_bytes=job.reserve_bytes,
        memory_limit_bytes=job.memory_limit_bytes, allow_tight=job.allow_tight, price_per_gpu_hour=None, best=found,
        runners_up=(), counts=counts,
    )  # fmt: skip


Found = tuple[list[tuple[int, tuple[Choice, Plan] | None]], int | None, Plain | None]


# ---------------------------------------------------------------- sequences


def _with_length(job: Job, seq_len: int) -> Job:
    return replace(job, workload=replace(job.workload, seq_len=seq_len))


def _sequences(job: Job, candidates: Candidates, say: Say | None) -> Found:
    most = LONGEST
    if job.model.positions == "learned":
        most = max(1, min(LONGEST, job.model.max_positions))
    unit = STEP if most >= STEP else 1
    largest = _largest(lambda units: candidates.fits(_with_length(job, units * unit)), most // unit, say)
    if largest == 0:
        return [], None, _binding(_with_length(job, unit), candidates)
    longest = largest * unit
    lengths = _powers_below(longest, unit)
    rows = [(length, _best(_with_length(job, length), candidates)) for length in lengths]
    beyond = None if longest + unit > most else _binding(_with_length(job, longest + unit), candidates)
    return rows, longest, beyond


def _largest(fits: Callable[[int], bool], most: int, say: Say | None) -> int:
    """The largest n up to `most` that fits, taking fitting as monotone; 0 = none."""
    done = 0

    def tried(n: int) -> bool:
        nonlocal done
        done += 1
        if say is not None:
            say(done, 2 * most.bit_length())
        return fits(n)

    if most < 1 or not tried(1):
        return 0
    low = 1
    while low * 2 <= most and tried(low * 2):
        low *= 2
    high = min(low * 2, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle) else (low, middle)
    return low


def _powers_below(longest: int, unit: int) -> Sequence[int]:
    """unit, 2 unit, 4 unit … below the longest, and the longest; at most MAX_ROWS."""
    lengths = [longest]
    power = unit
    while power < longest:
        lengths.append(power)
        power *= 2
    return sorted(lengths)[-MAX_ROWS:]


# ---------------------------------------------------------------- micro-batches


def _micro_batches(job: Job, candidates: Candidates, say: Say | None) -> Found:
    """Divisors of the global batch, smallest first, until none fits."""
    wanted = job.bounds.get("micro_batch")
    values = [n for n in _divisors(job.workload.global_batch) if wanted is None or n in wanted]
    rows: list[tuple[int, tuple[Choice, Plan] | None]] = []
    largest, beyond = None, None
    for done, value in enumerate(values):
        if say is not None:
            say(done, len(values))
        there = replace(job, bounds={**job.bounds, "micro_batch": (value,)})
        named = candidates.strategy and replace(candidates.strategy, micro_batch=value)
        with_value = replace(candidates, strategy=named)
        best = _best(there, with_value)
        if best is None:
            beyond = _binding(there, with_value)
            if beyond is None:
                continue  # no legal strategy has this micro-batch
            break
        rows.append((value, best))
        largest = value
    return rows[-MAX_ROWS:], largest, beyond


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, min(number, 4096) + 1) if number % n == 0)


def _binding(job: Job, candidates: Candidates) -> Plain | None:
    """What is in the way: the strategy that is nearest to fitting, its worst phase, and its largest part."""
    strategy = candidates.nearest(job)
    if strategy is None:
        return None
    estimate = job.price(Strategies.of([strategy]), job.workload.global_batch, detail=True)
    reading = estimate.device_bytes if job.allow_tight else estimate.device_bytes_high
    part = max(estimate.memory, key=lambda name: float(estimate.memory[name][0]))
    return {
        "seq_len": job.workload.seq_len,
        "strategy": plain(strategy),
        "bytes_over": float(reading[0] - estimate.usable_bytes[0]),
        "phase": PHASES[int(estimate.worst_phase[0])],
        "stage": int(estimate.worst_stage[0]),
        "part": part,
        "part_bytes": float(estimate.memory[part][0]),
    }
