"""What users ask of a priced plan: how long and how much to train N tokens, and is a measured time reasonable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distplan.costmodel.estimate import estimate, tabulate
from distplan.costmodel.goodput import Interruptions
from distplan.costmodel.replay import simulate_plan
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import Cluster, with_compute_scaled, with_network_scaled
from distplan.hardware.errors import DistplanError, UnitError
from distplan.hardware.units import parse_seconds
from distplan.planner import api
from distplan.planner.choices import Pricer, shortlisted
from distplan.planner.inputs import InputError, quantity
from distplan.planner.plain import rounded
from distplan.planner.plan import Choice, Plan
from distplan.planner.pricing import Job, Progress, Tally, cost_all
from distplan.planner.questions_goodput import (
    SECONDS_PER_DAY,
    GivenGoodput,
    elapsed,
    goodput_asked,
    goodput_row,
    gpus_needed,
    interruptions,
    refined,
)
from distplan.planner.space import Bounds, check_bounds

Plain = dict[str, Any]
SECONDS_PER_HOUR = 3600.0
_SLOWEST = 1e-4
"""of a nominal rate: a machine that slow is broken in another way"""
_MOST_STEPS = 40
_NEAR = 1e-4
"""of a time: nearer than anybody measures"""
_TOKENS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def parse_tokens(value: object) -> float:
    """'15T', '300B', '1.4e12' or '2,000,000'; UnitError."""
    text = str(value).strip().replace(",", "").replace("_", "").removesuffix("tokens").strip()
    scale = _TOKENS.get(text[-1:], 0.0) if text[-1:].isalpha() else 1.0
    number = text[:-1].strip() if text[-1:].isalpha() else text
    try:
        tokens = float(number) * scale
    except ValueError:
        tokens = math.nan
    if not 1.0 <= tokens <= 1e18:
        raise UnitError(f"'{value}' is not a number of tokens; write it like 15T or 300B")
    return tokens


def parse_days(value: object) -> float:
    """'30' or '30d'; UnitError."""
    text = str(value).strip().removesuffix("days").removesuffix("d").strip()
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 1e-6 <= days <= 1e6:
        raise UnitError(f"'{value}' is not a number of days; write it like 30")
    return days


# ---------------------------------------------------------------- the best of a bounded search


def job_of(job: api.Setting, bounds: Bounds, *, allow_tight: bool = False) -> Job:
    return Job(
        model=job.model, workload=job.workload, cluster=job.cluster, runtime=job.runtime,
        bounds=check_bounds(bounds), objective="step-time", reserve_bytes=job.limits.reserve_bytes,
        memory_limit_bytes=job.limits.memory_limit_bytes, allow_tight=allow_tight, estimate=estimate, tabulate=tabulate,
    )  # fmt: skip


def best_of(
    job: Job, gpus: int, *, price_per_gpu_hour: float | None = None, progress: Progress | None = None
) -> tuple[Choice | None, Tally]:
    """The fastest strategy that fits, at the workload's global batch. KeyboardInterrupt goes up."""
    tally = cost_all(job, [(gpus, job.workload.global_batch)], progress)
    if tally.interrupted:
        raise KeyboardInterrupt
    price = price_per_gpu_hour if price_per_gpu_hour is not None else job.cluster.price_per_gpu_hour or None
    pricer = Pricer(job=job, price_per_gpu_hour=price, simulate_plan=simulate_plan)
    return shortlisted(pricer, tally.admitted, 1)[0], tally


# ---------------------------------------------------------------- to train N tokens


def training(
    *,
    gpus: int,
    node: int,
    step_seconds: float,
    tokens_per_step: float,
    price_per_gpu_hour: float | None,
    tokens: float,
    days: float | None = None,
    stops: Interruptions | None = None,
) -> Plain:
    """Time and money for `tokens`, without evaluation: useful alone, and elapsed, which `stops` lengthen (without them
    both are the same). `in_time` and `gpus_needed` are of the elapsed time; `gpus_needed` is for the days asked at the
    same rate per GPU, in whole nodes: distplan sweep finds what scaling really costs."""
    steps = math.ceil(tokens / tokens_per_step)
    seconds = steps * step_seconds
    share, taken = (1.0, seconds) if stops is None else elapsed(stops, gpus, step_seconds, seconds)
    hours = gpus * seconds / SECONDS_PER_HOUR
    taken_hours = None if taken is None else gpus * taken / SECONDS_PER_HOUR
    price = price_per_gpu_hour
    needed = None
    if days is not None:
        needed = gpus_needed(
            stops, gpu_seconds=gpus * seconds, step_gpu_seconds=gpus * step_seconds,
            seconds=days * SECONDS_PER_DAY, node=node,
        )  # fmt: skip
    return {
        "tokens": tokens,
        "steps": steps,
        "days": seconds / SECONDS_PER_DAY,
        "gpu_hours": hours,
        "cost": None if price is None else hours * price,
        "goodput": share,
        "failures": None if stops is None or taken is None else taken * gpus / stops.mtbf_gpu_seconds,
        "elapsed_days": None if taken is None else taken / SECONDS_PER_DAY,
        "elapsed_gpu_hours": taken_hours,
        "elapsed_cost": None if price is None or taken_hours is None else taken_hours * price,
        "price_per_gpu_hour": price,
        "days_asked": days,
        "in_time": None if days is None else taken is not None and taken <= days * SECONDS_PER_DAY,
        "gpus_needed": needed,
    }


def training_of(choice: Choice, plan: Plan, tokens: float, days: float | None, stops: Interruptions) -> Plain:
    return training(
        gpus=choice.gpus, node=plan.cluster.gpus_per_node, step_seconds=choice.step_seconds,
        tokens_per_step=float(choice.estimate.tokens[0]), price_per_gpu_hour=plan.price_per_gpu_hour,
        tokens=tokens, days=days, stops=stops,
    )  # fmt: skip


# ---------------------------------------------------------------- is a measured step reasonable


def measured(plan: Plan, seconds: float) -> Plain:
    """A measured step time against the estimate of `plan.best`: the gap, and what alone would explain it."""
    assert plan.best is not None
    best = plan.best
    scale = best.step_seconds / float(best.estimate.step_seconds[0])
    low, high = (float(bound[0]) * scale for bound in (best.estimate.step_seconds_low, best.estimate.step_seconds_high))
    verdict = "reasonable" if low <= seconds <= high else "slow" if seconds > high else "fast"
    peak = plan.cluster.accelerator.peak_flops[plan.workload.precision.matmul]
    causes = list(_causes(plan, seconds, high / best.step_seconds)) if verdict == "slow" else []
    made: Plain = rounded({
        "seconds": seconds,
        "expected_seconds": best.step_seconds,
        "low_seconds": low,
        "high_seconds": high,
        "ratio": seconds / best.step_seconds,
        "verdict": verdict,
        "mfu": float(best.estimate.model_flops[0]) / (seconds * peak),
        "expected_mfu": float(best.estimate.model_flops[0]) / (best.step_seconds * peak),
        "tokens_per_second_per_gpu": float(best.estimate.tokens[0]) / (seconds * best.gpus),
        "causes": causes,
    })  # fmt: skip
    return made


def _causes(plan: Plan, seconds: float, band: float) -> Iterator[Plain]:
    """One change at a time: the step time with it; `explains` where the measured time is within the band of it."""
    assert plan.best is not None
    best = plan.best
    hidden = sum(float(item.seconds[0] - item.exposed_seconds[0]) for item in best.estimate.communication)
    yield _cause("no communication is overlapped", best.step_seconds + hidden, seconds, band)
    strategy = best.strategy
    recomputed = replace(strategy, recompute="full", recompute_layers=plan.model.layers)
    changes = [("all layers are recomputed", recomputed, plan)]
    if plan.workload.attention == "flash":
        unfused = replace(plan, workload=replace(plan.workload, attention="unfused"))
        changes.append(("attention is not a fused kernel", strategy, unfused))
    for what, changed, there in changes:
        time = _seconds(there, changed, there.cluster)
        if time is not None and time > best.step_seconds:
            yield _cause(what, time, seconds, band)
    for what, scaled in (("network", with_network_scaled), ("compute", with_compute_scaled)):
        share = _share(_time_at(plan, strategy, scaled), seconds)
        if share is not None:
            yield {"what": f"the {what} reaches {100.0 * share:.3g} % of what is assumed", "seconds": seconds,
                   "explains": True, "share": share}  # fmt: skip


def _time_at(
    plan: Plan, strategy: Strategy, scaled: Callable[[Cluster, float], Cluster]
) -> Callable[[float], float | None]:
    return lambda factor: _seconds(plan, strategy, scaled(plan.cluster, factor))


def _cause(what: str, time: float, seconds: float, band: float) -> Plain:
    return {"what": what, "seconds": time, "explains": time / band <= seconds <= time * band, "share": None}


def _seconds(plan: Plan, strategy: Strategy, cluster: Cluster) -> float | None:
    """The step of one strategy, simulated where it has a pipeline; None where it cannot run."""
    limits = api.Limits(reserve_bytes=plan.reserve_bytes, memory_limit_bytes=plan.memory_limit_bytes)
    job = api.Setting(model=plan.model, workload=plan.workload, cluster=cluster, runtime=plan.runtime, limits=limits)
    try:
        best = api.estimate_setting(job, strategy).best
    except DistplanError:
        return None
    return None if best is None else best.step_seconds


def _share(seconds_at: Callable[[float], float | None], seconds: float) -> float | None:
    """The share of a rate at which the step takes `seconds`; None where no share does.

    False position in logarithms (the Illinois variant, which moves both ends): a time is nearly a power of a rate.
    """
    ends = []
    for share in (_SLOWEST, 1.0):
        time = seconds_at(share)
        if time is None:
            return None
        ends.append((math.log(share), math.log(time / seconds)))
    (low, above), (high, below) = ends
    if above < 0.0 or below > 0.0:
        return None
    for _ in range(_MOST_STEPS):
        middle = low + (high - low) * above / (above - below) if above > below else high
        now = seconds_at(math.exp(middle))
        if now is None:
            return None
        gap = math.log(now / seconds)
        if abs(gap) < _NEAR:
            return math.exp(middle)
        if gap > 0.0:
            low, above, below = middle, gap, 0.5 * below
        else:
            high, below, above = middle, gap, 0.5 * above
    return math.exp(0.5 * (low + high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked beside a plan; None where it is not."""

    tokens: float | None = None
    days: float | None = None
    seconds: float | None = None
    """a measured step"""
    goodput: GivenGoodput = field(default_factory=GivenGoodput)


def answers(plan: Plan, asked: Asked) -> Plain:
    """{training, goodput, measured}, each only where it was asked; InputError."""
    made: Plain = {}
    if plan.best is None:
        return made
    choices = _by_count(plan)
    if asked.tokens is not None or asked.goodput.shown:
        stops = refined(interruptions(plan.model, plan.workload, plan.cluster, plan.runtime), asked.goodput)
        if asked.tokens is not None:
            made["training"] = [
                {"gpus": each.gpus, **training_of(each, plan, asked.tokens, asked.days, stops)} for each in choices
            ]
        if asked.goodput.shown:
            made["goodput"] = [goodput_row(stops, each.gpus, each.step_seconds) for each in choices]
    if asked.seconds is not None:
        made["measured"] = measured(plan, asked.seconds)
    rounded_all: Plain = rounded(made)
    return rounded_all


def answered(plan: Plan, options: Mapping[str, Any]) -> Plain:
    """Answers to --tokens, --days, --goodput and --measured; InputError."""
    return answers(plan, parse_asked(options))


def parse_asked(options: Mapping[str, Any]) -> Asked:
    """--tokens, --days, --measured, --goodput and its kin; InputError."""
    tokens, days = training_asked(options)
    seconds = quantity("--measured", options.get("measured"), parse_seconds)
    if seconds is not None and seconds <= 0.0:
        raise InputError("--measured 0 s: a step takes longer")
    return Asked(tokens=tokens, days=days, seconds=seconds, goodput=goodput_asked(options))


def training_asked(options: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """--tokens and --days."""
    tokens = quantity("--tokens", options.get("tokens"), parse_tokens)
    days = quantity("--days", options.get("days"), parse_days)
    if days is not None and tokens is None:
        raise InputError("--days needs --tokens: how many are to be trained in that time?")
    return tokens, days


def _by_count(plan: Plan) -> Sequence[Choice]:
    """The best choice of every GPU count that the plan holds."""
    assert plan.best is not None
    first: dict[int, Choice] = {}
    for choice in (plan.best, *plan.runners_up):
        first.setdefault(choice.gpus, choice)
    return list(first.values())
