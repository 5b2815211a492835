"""At which network bandwidth one family of strategies overtakes another: ZeRO 3 against TP and PP, say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from distplan.costmodel.strategy import DEGREES, STRUCTURE
from distplan.hardware.cluster import Cluster
from distplan.planner import api
from distplan.planner.document import FORMAT_VERSION
from distplan.planner.inputs import InputError, dimension
from distplan.planner.plain import plain, rounded
from distplan.planner.plan import Choice
from distplan.planner.questions import best_of, job_of
from distplan.planner.space import Bounds

Plain = dict[str, Any]
FIRST, SECOND = "zero=3 tp=1 pp=1", "zero=0,1"
FACTORS = tuple(2.0**n for n in range(-5, 4))
"""of the fabric's own bandwidth: 1/32 to 8"""
_STEPS = 5
"""halvings of a factor of two: the crossing is known to two percent"""


def parse_family(option: str, text: str) -> Bounds:
    """'zero=3 tp=1 pp=1,2' as bounds of a search; InputError."""
    bounds: dict[str, tuple[Any, ...]] = {}
    for item in text.split():
        name, equals, values = item.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in (*DEGREES, *STRUCTURE, "dp"):
            raise InputError(f"{option} '{text}': write it like '{FIRST}'; {name} is no dimension of a strategy")
        bounds[name] = dimension(name, option, values)
    if not bounds:
        raise InputError(f"{option} '': write it like '{FIRST}'")
    return bounds


def with_fabric(cluster: Cluster, factor: float, gpus: int) -> Cluster:
    """The links that leave a scale-up domain, times `factor`; inside it where the job fits into one."""
    inner = cluster.tiers[0]
    alone = gpus <= inner.size
    tiers = [
        replace(tier, bandwidth=tier.bandwidth * factor) if alone == (tier is inner) else tier for tier in cluster.tiers
    ]
    return replace(cluster, tiers=tuple(tiers))


def crossover(
    job: api.Setting,
    gpus: int,
    first: Bounds,
    second: Bounds,
    *,
    allow_tight: bool = False,
    say: Callable[[float, float], None] | None = None,
) -> Plain:
    """Rows of both families' best step over bandwidths, and where their order changes, in bytes/s per GPU."""
    tier = job.cluster.tiers[0] if gpus <= job.cluster.tiers[0].size else job.cluster.tiers[-1]
    done = 0

    def best(factor: float) -> tuple[Choice | None, Choice | None]:
        nonlocal done
        done += 1
        if say is not None:
            say(done, len(FACTORS) + _STEPS)
        there = replace(job, cluster=with_fabric(job.cluster, factor, gpus))
        found = [best_of(job_of(there, bounds, allow_tight=allow_tight), gpus)[0] for bounds in (first, second)]
        return found[0], found[1]

    pairs = {factor: best(factor) for factor in FACTORS}
    crossings = [
        _crossing(best, low, high) for low, high in pairwise(FACTORS) if _sign(pairs[low]) * _sign(pairs[high]) < 0
    ]
    made: Plain = rounded({
        "format_version": FORMAT_VERSION,
        "model": job.model.name,
        "hardware": job.cluster.id,
        "runtime": job.runtime.name,
        "gpus": gpus,
        "tier": tier.name,
        "bandwidth": tier.bandwidth,
        "first": _named(first),
        "second": _named(second),
        "crossings": [{"bandwidth": tier.bandwidth * factor, "above": above} for factor, above in crossings],
        "rows": [_row(tier.bandwidth * factor, *pair) for factor, pair in pairs.items()],
    })  # fmt: skip
    return made


def _named(bounds: Bounds) -> str:
    return " ".join(f"{name}={','.join(str(value).lower() for value in values)}" for name, values in bounds.items())


def _sign(pair: tuple[Choice | None, Choice | None]) -> float:
    """Negative where the first is faster; 0 where one of them does not fit."""
    if pair[0] is None or pair[1] is None:
        return 0.0
    return math.copysign(1.0, pair[0].step_seconds - pair[1].step_seconds)


def _crossing(
    best: Callable[[float], tuple[Choice | None, Choice | None]], low: float, high: float
) -> tuple[float, str]:
    """(factor of the bandwidth, which is faster above it)."""
    above = "first" if _sign(best(high)) < 0 else "second"
    start = _sign(best(low))
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _sign(best(middle)) == start else (low, middle)
    return math.sqrt(low * high), above


def _row(bandwidth: float, first: Choice | None, second: Choice | None) -> Plain:
    row: Plain = {"bandwidth": bandwidth}
    for name, found in (("first", first), ("second", second)):
        row[f"{name}_seconds"] = None if found is None else found.step_seconds
        row[f"{name}_strategy"] = None if found is None else plain(found.strategy)
    row["first_over_second"] = None
    if first is not None and second is not None:
        row["first_over_second"] = first.step_seconds / second.step_seconds
    return row
