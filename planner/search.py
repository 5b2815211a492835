"""Search: enumerate, refuse, price, rank, simulate the best, explain what is missing -> Plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distplan.costmodel.estimate import PHASES
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime, list_runtimes, load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import Cluster, with_compute_scaled, with_network_scaled
from distplan.hardware.errors import DistplanError, did_you_mean
from distplan.planner.choices import Pricer, shortlisted, value_of
from distplan.planner.constraints import explain_row, with_runtime
from distplan.planner.imbalance import with_imbalance
from distplan.planner.neighbours import legal_neighbours, smallest_gpus
from distplan.planner.plan import OBJECTIVES, Choice, Counts, NothingFits, NothingLegal, OtherRuntime, Plan, Sensitivity
from distplan.planner.pricing import (
    MAX_SHORTLIST,
    BalanceFunction,
    EstimateFunction,
    Job,
    Progress,
    SimulateFunction,
    TabulateFunction,
    Tally,
    cost_all,
)
from distplan.planner.space import Bounds, check_bounds

MOST_ROWS_WITH_OTHERS = 200_000
"""legal rows beyond which the union of all runtimes, some four times as many, is left to those who ask for it"""
CHANGES = (("network -20%", with_network_scaled, 0.8), ("compute -10%", with_compute_scaled, 0.9))


class RuleError(DistplanError):
    """A strategy that its runtime cannot run: every rule that it breaks, with its code."""


def search(
    model: Model,
    workload: Workload,
    cluster: Cluster,
    runtime: Runtime,
    gpus: int | Sequence[int],
    *,
    estimate: EstimateFunction,
    tabulate: TabulateFunction | None = None,
    simulate_plan: SimulateFunction | None = None,
    balance: BalanceFunction | None = None,
    bounds: Bounds | None = None,
    global_batches: Sequence[int] = (),
    objective: str = "step-time",
    top: int = 5,
    reserve_bytes: float = 0.0,
    memory_limit_bytes: float | None = None,
    allow_tight: bool = False,
    price_per_gpu_hour: float | None = None,
    sensitivity: bool = False,
    other_runtimes: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """The best strategies for a job, and what was excluded.

    gpus: one count, or several (which the objectives gpus and cost need). global_batches: sequences per
    step, all searched; () = the workload's. Several are compared by time per token. price_per_gpu_hour:
    None = the cluster's, which may know none. Raises DistplanError for a wrong bound or objective; an
    interrupt (Ctrl-C) gives the best so far, marked.
    """
    counts = (gpus,) if isinstance(gpus, int) else tuple(dict.fromkeys(gpus))
    batches = tuple(dict.fromkeys(global_batches)) or (workload.global_batch,)
    _check(objective, counts, batches, top)
    job = Job(
        model=model, workload=workload, cluster=cluster, runtime=runtime, bounds=check_bounds(bounds or {}),
        objective=objective, reserve_bytes=reserve_bytes, memory_limit_bytes=memory_limit_bytes,
        allow_tight=allow_tight, estimate=estimate, tabulate=tabulate, shortlist=max(MAX_SHORTLIST, top),
    )  # fmt: skip
    price = price_per_gpu_hour if price_per_gpu_hour is not None else cluster.price_per_gpu_hour or None
    pricer = Pricer(job=job, price_per_gpu_hour=price, simulate_plan=simulate_plan, balance=balance)
    tally = cost_all(job, [(n, batch) for n in counts for batch in batches], progress)
    best, runners_up, simulated, cut = _shortlist(pricer, tally, top)
    plan = _plan(pricer, counts, batches, tally.counts(), best, runners_up)
    plan = replace(plan, simulated=simulated, simulation_cut=cut, interrupted=tally.interrupted)
    try:
        plan = _balanced(plan, pricer)
        return _with_extras(plan, pricer, tally, sensitivity=sensitivity, other_runtimes=other_runtimes)
    except KeyboardInterrupt:
        return replace(plan, interrupted=True)


def evaluate(
    model: Model,
    workload: Workload,
    cluster: Cluster,
    runtime: Runtime,
    strategy: Strategy,
    *,
    estimate: EstimateFunction,
    simulate_plan: SimulateFunction | None = None,
    balance: BalanceFunction | None = None,
    reserve_bytes: float = 0.0,
    memory_limit_bytes: float | None = None,
    price_per_gpu_hour: float | None = None,
) -> Plan:
    """The plan of one given strategy, whether or not it fits: its verdict is in best.verdict.

    Raises RuleError with every rule that it breaks.
    """
    job = Job(
        model=model, workload=workload, cluster=cluster, runtime=runtime, bounds={}, objective="step-time",
        reserve_bytes=reserve_bytes, memory_limit_bytes=memory_limit_bytes, allow_tight=True, estimate=estimate,
    )  # fmt: skip
    broken = [v for v in explain_row(strategy, job.context(strategy.gpus, workload.global_batch)) if not v.warning]
    if broken:
        raise RuleError("; ".join(f"{v.code} {v.sentence}{_hint(v.nearest)}" for v in broken))
    price = price_per_gpu_hour if price_per_gpu_hour is not None else cluster.price_per_gpu_hour or None
    pricer = Pricer(job=job, price_per_gpu_hour=price, simulate_plan=simulate_plan, balance=balance)
    choice = pricer.balanced(pricer.simulated(pricer.choice(strategy, workload.global_batch)))
    choice = with_imbalance(pricer, choice)
    one = {"fits": 0, "tight": 0, "out": 0} | {choice.verdict: 1}
    counts = Counts(enumerated=1, rejected=(), legal=1, costed=1, **one)
    plan = _plan(pricer, (strategy.gpus,), (workload.global_batch,), counts, choice, ())
    return replace(plan, simulated=int(choice.simulated_seconds is not None))


def _shortlist(pricer: Pricer, tally: Tally, top: int) -> tuple[Choice | None, tuple[Choice, ...], int, bool]:
    """As shortlisted; an interrupt among the simulations leaves the order of the closed form."""
    try:
        return shortlisted(pricer, tally.admitted, top)
    except KeyboardInterrupt:
        tally.interrupted = True
        return shortlisted(replace(pricer, simulate_plan=None), tally.admitted, top)


def _hint(nearest: tuple[str, ...]) -> str:
    return f" (legal: {', '.join(nearest)})" if nearest else ""


def _check(objective: str, gpus: tuple[int, ...], batches: tuple[int, ...], top: int) -> None:
    if objective not in OBJECTIVES:
        raise DistplanError(f"objective '{objective}' is not known{did_you_mean(objective, OBJECTIVES)}")
    if not gpus or min(gpus) < 1:
        raise DistplanError("gpus: at least 1 is needed")
    if min(batches) < 1:
        raise DistplanError("global_batch: at least 1 is needed")
    if top < 1:
        raise DistplanError("top: at least 1 is needed")
    if objective in ("gpus", "cost") and len(gpus) == 1:
        raise DistplanError(f"objective {objective} chooses among GPU counts: give several, as in 64..512 or 64,128")


def _plan(
    pricer: Pricer,
    gpus: tuple[int, ...],
    batches: tuple[int, ...],
    counts: Counts,
    best: Choice | None,
    runners_up: tuple[Choice, ...],
) -> Plan:
    job = pricer.job
    batch = best.global_batch if best else batches[0]
    return Plan(
        model=job.model, workload=replace(job.workload, global_batch=batch), cluster=job.cluster,
        runtime=job.runtime, gpus=gpus, global_batches=batches, objective=job.objective,
        reserve_bytes=job.reserve_bytes, memory_limit_bytes=job.memory_limit_bytes,
        allow_tight=job.allow_tight, price_per_gpu_hour=pricer.price_per_gpu_hour,
        best=best, runners_up=runners_up, counts=counts,
    )  # fmt: skip


def _with_extras(plan: Plan, pricer: Pricer, tally: Tally, *, sensitivity: bool, other_runtimes: bool) -> Plan:
    if plan.interrupted:
        return plan
    if plan.best is None:
        return _without_plan(plan, pricer, tally)
    if sensitivity:
        changes = tuple(_changed(plan, pricer, name, scale(plan.cluster, factor)) for name, scale, factor in CHANGES)
        plan = replace(plan, sensitivity=changes)
    if other_runtimes and plan.runtime.name != "any":
        if plan.counts.legal > MOST_ROWS_WITH_OTHERS:
            rows = f"{plan.counts.legal:,}"
            note = f"what other runtimes would gain is not searched in a space of {rows}: --runtime any does"
            return replace(plan, notes=(*plan.notes, note))
        plan = replace(plan, other_runtime=_other_runtime(plan, pricer))
    return plan


def _balanced(plan: Plan, pricer: Pricer) -> Plan:
    """With a cut of the stages by hand for the best (an integer program may take a second), and its range."""
    if plan.interrupted or plan.best is None:
        return plan
    return replace(plan, best=with_imbalance(pricer, pricer.balanced(plan.best)))


def _without_plan(plan: Plan, pricer: Pricer, tally: Tally) -> Plan:
    job = pricer.job
    if tally.nearest is None:
        below, above = legal_neighbours(job, plan.gpus[0], plan.global_batches[0])
        if len(plan.gpus) > 1:
            above = legal_neighbours(job, plan.gpus[-1], plan.global_batches[0])[1]
        return replace(plan, why_nothing=NothingLegal(gpus=plan.gpus[0], below=below, above=above))
    nearest = pricer.choice(tally.nearest.rows[0], int(tally.nearest.columns["global_batch"][0]))
    count, limit, whole = smallest_gpus(job, max(plan.gpus), nearest.global_batch)
    why = NothingFits(
        nearest=nearest,
        stage=int(nearest.estimate.worst_stage[0]),
        phase=PHASES[int(nearest.estimate.worst_phase[0])],
        bytes_over=float(tally.nearest.columns["over"][0]),
        smallest_gpus=count,
        smallest=_best_at(pricer, count, nearest.global_batch) if count else None,
        searched_up_to=limit,
    )
    notes = () if whole else ("the smallest GPU count was found by bisection: a smaller one may fit by chance",)
    return replace(plan, why_nothing=why, notes=plan.notes + notes)


def _again(job: Job, cases: list[tuple[int, int]]) -> Tally:
    """A search within the search: half of one would answer wrongly, so an interrupt goes on up."""
    tally = cost_all(job, cases)
    if tally.interrupted:
        raise KeyboardInterrupt
    return tally


def _best_at(pricer: Pricer, gpus: int, global_batch: int) -> Choice | None:
    tally = _again(pricer.job, [(gpus, global_batch)])
    return shortlisted(pricer, tally.admitted, 1)[0]


def _changed(plan: Plan, pricer: Pricer, name: str, cluster: Cluster) -> Sensitivity:
    """The same search on a worse cluster."""
    assert plan.best is not None
    there = replace(pricer, job=replace(pricer.job, cluster=cluster))
    tally = _again(there.job, [(n, batch) for n in plan.gpus for batch in plan.global_batches])
    winner = shortlisted(there, tally.admitted, 1)[0]
    if winner is None:
        return Sensitivity(change=name, winner_changes=True, winner=None, loss=0.0)
    ours = there.simulated(there.choice(plan.best.strategy, plan.best.global_batch))
    same = (winner.strategy, winner.global_batch) == (ours.strategy, ours.global_batch)
    loss = _per_token(ours) / _per_token(winner) - 1.0
    # the winner by memory or GPUs may be slower: what is lost then is no time
    return Sensitivity(change=name, winner_changes=not same, winner=winner, loss=0.0 if same else max(0.0, loss))


def _other_runtime(plan: Plan, pricer: Pricer) -> OtherRuntime:
    """The best with all runtimes' legal values and rules, priced as in ours: what the rules alone cost."""
    assert plan.best is not None
    union, ours = load_runtime("any"), pricer.job.runtime
    looser = replace(ours, legal=union.legal, rules=union.rules)
    there = replace(pricer, job=replace(pricer.job, runtime=looser, without=ours))
    tally = _again(there.job, [(n, batch) for n in plan.gpus for batch in plan.global_batches])
    best = shortlisted(there, tally.admitted, 1)[0]
    if best is None or value_of(best, plan.objective) >= value_of(plan.best, plan.objective):
        return OtherRuntime(runtime=ours.name, best=plan.best, speedup=1.0)
    speedup = _per_token(plan.best) / _per_token(best)
    return OtherRuntime(runtime=_allowing(best, pricer), best=best, speedup=speedup)


def _allowing(choice: Choice, pricer: Pricer) -> str:
    """The first runtime that allows it."""
    context = pricer.job.context(choice.gpus, choice.global_batch)
    for name in list_runtimes():
        allowed = explain_row(choice.strategy, with_runtime(context, load_runtime(name)))
        if name != "any" and all(v.warning for v in allowed):
            return name
    return "any"


def _per_token(choice: Choice) -> float:
    return choice.step_seconds / float(choice.estimate.tokens[0])
