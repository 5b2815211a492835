"""Costing the legal space: chunk by chunk through the estimate, keeping only what can still matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from distplan.costmodel.balance import BalancedSplit
from distplan.costmodel.estimate import Estimate
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.hardware.cluster import Cluster
from distplan.hardware.errors import DistplanError
from distplan.planner.constraints import Context, apply, codes, with_runtime
from distplan.planner.plan import VERDICTS, Counts, RuleCount
from distplan.planner.ranking import Pool, best, joined, pool_of
from distplan.planner.space import CHUNK_ROWS, Bounds, Space, legal_chunks, space
from distplan.planner.wording import gib

MAX_SHORTLIST = 50

Progress = Callable[[int, int], None]
"""called with (rows done, rows in all) after every chunk"""


class EstimateFunction(Protocol):
    """distplan.costmodel.estimate.estimate."""

    def __call__(
        self,
        model: Model,
        workload: Workload,
        cluster: Cluster,
        runtime: Runtime,
        strategies: Strategies,
        *,
        usable_bytes: float | None,
        detail: bool,
    ) -> Estimate: ...


class TabulateFunction(Protocol):
    """distplan.costmodel.estimate.tabulate."""

    def __call__(
        self,
        model: Model,
        workload: Workload,
        cluster: Cluster,
        runtime: Runtime,
        distinct_in: Callable[[Sequence[str]], Strategies],
    ) -> None: ...


class SimulateFunction(Protocol):
    """Seconds of a step by event simulation of the schedule's jobs; None where it has nothing to add."""

    def __call__(
        self,
        model: Model,
        workload: Workload,
        cluster: Cluster,
        runtime: Runtime,
        strategy: Strategy,
        estimate: Estimate,
    ) -> float | None: ...


class BalanceFunction(Protocol):
    """The best cut of the layers by hand; None where there is none to make."""

    def __call__(
        self,
        model: Model,
        workload: Workload,
        cluster: Cluster,
        runtime: Runtime,
        strategy: Strategy,
        estimate: Estimate,
        *,
        simulated_seconds: float | None,
    ) -> BalancedSplit | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is searched, apart from the GPU counts and batches."""

    model: Model
    workload: Workload
    cluster: Cluster
    runtime: Runtime
    bounds: Bounds
    objective: str
    reserve_bytes: float
    memory_limit_bytes: float | None
    allow_tight: bool
    estimate: EstimateFunction
    tabulate: TabulateFunction | None = None
    """for spaces of more than one chunk"""
    without: Runtime | None = None
    """rows that this runtime allows are left out: priced already"""
    shortlist: int = MAX_SHORTLIST
    chunk_rows: int = CHUNK_ROWS

    def __post_init__(self) -> None:
        """Raises DistplanError where limit and reserve leave no memory to plan for."""
        given = self.cluster.accelerator.memory_bytes
        if self.memory_limit_bytes is not None and not self.memory_limit_bytes > 0.0:
            raise DistplanError(f"memory limit {gib(self.memory_limit_bytes)}: more than 0 is needed")
        if self.usable_bytes <= 0.0:
            raise DistplanError(
                f"reserve {gib(self.reserve_bytes)} leaves nothing of the {gib(self.usable_bytes + self.reserve_bytes)}"
                f" to plan for ({self.cluster.accelerator.name} gives {gib(given)})"
            )

    def context(self, gpus: int, global_batch: int) -> Context:
        workload = replace(self.workload, global_batch=global_batch)
        domain = int(self.cluster.tiers[0].size) if np.isfinite(self.cluster.tiers[0].size) else gpus
        return Context(model=self.model, workload=workload, runtime=self.runtime, gpus=gpus, domain=domain)

    @property
    def usable_bytes(self) -> float:
        """What the driver gives, or the limit where that is less, without the reserve."""
        given = self.cluster.accelerator.memory_bytes
        return min(given, given if self.memory_limit_bytes is None else self.memory_limit_bytes) - self.reserve_bytes

    def price(self, rows: Strategies, global_batch: int, *, detail: bool = False) -> Estimate:
        workload = replace(self.workload, global_batch=global_batch)
        return self.estimate(
            self.model, workload, self.cluster, self.runtime, rows, usable_bytes=self.usable_bytes, detail=detail
        )


@dataclass(slots=True)
class Tally:
    """What a search has seen so far; grows chunk by chunk, so that an interrupt loses nothing."""

    enumerated: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    unseen: int = 0
    verdicts: list[int] = field(default_factory=lambda: [0, 0, 0])
    admitted: Pool | None = None
    nearest: Pool | None = None
    """the one row that is the fewest bytes over, among those that do not fit"""
    interrupted: bool = False

    def counts(self) -> Counts:
        rules = tuple(
            RuleCount(code=code, title=words.title, rejected=self.rejected[code])
            for code, words in codes().items()
            if self.rejected.get(code)
        )
        fits, tight, out = self.verdicts
        legal = self.enumerated - sum(rule.rejected for rule in rules) - self.unseen
        return Counts(
            enumerated=self.enumerated - self.unseen, rejected=rules, legal=legal,
            costed=fits + tight + out, fits=fits, tight=tight, out=out,
        )  # fmt: skip


def verdicts(estimate: Estimate) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Index into VERDICTS of every row."""
    fits = estimate.device_bytes_high <= estimate.usable_bytes
    tight = estimate.device_bytes <= estimate.usable_bytes
    codes = np.where(fits, VERDICTS.index("fits"), np.where(tight, VERDICTS.index("tight"), VERDICTS.index("out")))
    return np.asarray(codes, dtype=np.intp)


def cost_all(job: Job, cases: list[tuple[int, int]], progress: Progress | None = None) -> Tally:
    """Enumerate, refuse and price every (gpus, global_batch); stop early and say so on Ctrl-C."""
    tally = Tally()
    found = [(case, space(job.context(*case), job.bounds)) for case in cases]
    total = sum(int(each.weights.sum()) for _, each in found)
    tally.enumerated = sum(each.enumerated for _, each in found)
    for _, each in found:
        for code, count in each.rejected.items():
            tally.rejected[code] = tally.rejected.get(code, 0) + count
    done = 0
    try:
        for case, each in found:
            if job.tabulate and int(each.weights.sum()) > job.chunk_rows:
                workload = replace(job.workload, global_batch=case[1])
                job.tabulate(job.model, workload, job.cluster, job.runtime, each.distinct)
            for rows, seen in _chunks(job, each, case, tally):
                if len(rows):
                    _keep(job, rows, case, tally)
                done += seen
                if progress:
                    progress(done, total)
    except KeyboardInterrupt:
        tally.interrupted = True
        costed, refused = sum(tally.verdicts), sum(tally.rejected.values())
        tally.unseen = tally.enumerated - costed - refused
    return tally


def _chunks(job: Job, found: Space, case: tuple[int, int], tally: Tally) -> Iterator[tuple[Strategies, int]]:
    """Legal rows, and how many rows of the space they and the refused ones were."""
    context = job.context(*case)
    before = sum(tally.rejected.values())
    for rows in legal_chunks(found, context, tally.rejected, job.chunk_rows):
        refused = sum(tally.rejected.values())
        seen = len(rows) + refused - before
        if job.without is None:
            yield rows, seen
        else:
            known, _ = apply(rows, with_runtime(context, job.without))
            yield rows.take(~known), seen
        before = refused


def _keep(job: Job, rows: Strategies, case: tuple[int, int], tally: Tally) -> None:
    gpus, global_batch = case
    estimate = job.price(rows, global_batch)
    verdict = verdicts(estimate)
    admitted = verdict <= VERDICTS.index("tight" if job.allow_tight else "fits")
    pool = pool_of(rows, estimate, gpus=gpus, global_batch=global_batch, allow_tight=job.allow_tight)
    tally.admitted = _merged(tally.admitted, pool.take(admitted), job)
    if tally.admitted is None:
        tally.nearest = _nearest(tally.nearest, pool)
    for index in range(len(VERDICTS)):
        tally.verdicts[index] += int(np.count_nonzero(verdict == index))


def _merged(kept: Pool | None, more: Pool, job: Job) -> Pool | None:
    if not len(more):
        return kept
    # first of the chunk alone: joining whole chunks would copy every row once more
    more = best(more, job.objective, job.shortlist + 1)
    return more if kept is None else best(joined([kept, more]), job.objective, job.shortlist + 1)


def _nearest(kept: Pool | None, pool: Pool) -> Pool:
    closest = pool.take(pool.columns["over"] == pool.columns["over"].min())
    both = closest if kept is None else joined([kept, closest])
    both = both.take(both.columns["over"] == both.columns["over"].min())
    return best(both, "step-time", 1)


def any_legal(job: Job, gpus: int, global_batch: int) -> bool:
    """Is there a legal strategy at all."""
    context = job.context(gpus, global_batch)
    return any(len(rows) for rows in legal_chunks(space(context, job.bounds), context, {}, job.chunk_rows))


def any_fits(job: Job, gpus: int, global_batch: int) -> bool:
    """Does any strategy fit (tight counts with allow_tight); stops at the first chunk where one does."""
    context = job.context(gpus, global_batch)
    limit = VERDICTS.index("tight" if job.allow_tight else "fits")
    for rows in legal_chunks(space(context, job.bounds), context, {}, job.chunk_rows):
        if len(rows) and bool(np.any(verdicts(job.price(rows, global_batch)) <= limit)):
            return True
    return False
