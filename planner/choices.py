"""From ranked rows to the choices of a plan: priced one by one, simulated, marked against the best."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distplan.costmodel.strategy import Strategies, Strategy
from distplan.planner.constraints import warnings
from distplan.planner.plan import VERDICTS, Choice
from distplan.planner.pricing import BalanceFunction, Job, SimulateFunction, verdicts
from distplan.planner.ranking import ORDER, Pool, best, rounded

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricer:
    """What turns a strategy into a Choice."""

    job: Job
    price_per_gpu_hour: float | None
    simulate_plan: SimulateFunction | None
    balance: BalanceFunction | None = None

    def choice(self, strategy: Strategy, global_batch: int) -> Choice:
        """Priced alone: the same bits as in its batch."""
        estimate = self.job.price(Strategies.of([strategy]), global_batch, detail=True)
        context = self.job.context(strategy.gpus, global_batch)
        bare = Choice(
            strategy=strategy, gpus=strategy.gpus, global_batch=global_batch,
            verdict=VERDICTS[int(verdicts(estimate)[0])], estimate=estimate, step_seconds=0.0,
            simulated_seconds=None, tokens_per_second_per_gpu=0.0, cost_per_token=None,
            gpu_seconds_per_token=0.0, relative=1.0, tie=False, warnings=warnings(strategy, context),
        )  # fmt: skip
        return self._timed(bare, float(estimate.step_seconds[0]))

    def simulated(self, choice: Choice) -> Choice:
        """With the time of the event simulation, where there is one."""
        if self.simulate_plan is None:
            return choice
        workload = replace(self.job.workload, global_batch=choice.global_batch)
        seconds = self.simulate_plan(
            self.job.model, workload, self.job.cluster, self.job.runtime, choice.strategy, choice.estimate
        )
        return choice if seconds is None else replace(self._timed(choice, seconds), simulated_seconds=seconds)

    def balanced(self, choice: Choice) -> Choice:
        """With the best cut of its layers by hand; its own time and memory are those of the default split."""
        if self.balance is None:
            return choice
        job = self.job
        workload = replace(job.workload, global_batch=choice.global_batch)
        found = self.balance(
            job.model,
            workload,
            job.cluster,
            job.runtime,
            choice.strategy,
            choice.estimate,
            simulated_seconds=choice.simulated_seconds,
        )
        return replace(choice, balanced=found)

    def _timed(self, choice: Choice, seconds: float) -> Choice:
        tokens = float(choice.estimate.tokens[0])
        gpu_seconds = choice.gpus * seconds / tokens
        price = self.price_per_gpu_hour
        return replace(
            choice,
            step_seconds=seconds,
            tokens_per_second_per_gpu=1.0 / gpu_seconds,
            gpu_seconds_per_token=gpu_seconds,
            cost_per_token=None if price is None else gpu_seconds * price / SECONDS_PER_HOUR,
        )


def shortlisted(pricer: Pricer, admitted: Pool | None, top: int) -> tuple[Choice | None, tuple[Choice, ...], int, bool]:
    """(best, runners-up, plans simulated, was the shortlist cut before the bound stopped it).

    The closed form never exceeds the simulated time, so that candidates are simulated in its order until
    the next bound exceeds what the last shown has; at most job.shortlist.
    """
    if admitted is None or not len(admitted):
        return None, (), 0, False
    job = pricer.job
    pareto = job.objective == "pareto"
    ranked = best(admitted, job.objective, job.shortlist + 1)
    done: list[Choice] = []
    simulated, cut = 0, False
    for i in range(len(ranked)):
        choice = pricer.choice(ranked.rows[i], int(ranked.columns["global_batch"][i]))
        if not pareto and len(done) >= top and _key(choice, job) > sorted(_key(c, job) for c in done)[top - 1]:
            break
        if len(done) == job.shortlist:
            cut = pricer.simulate_plan is not None or pareto
            break
        done.append(pricer.simulated(choice))
        simulated += done[-1].simulated_seconds is not None
    done.sort(key=lambda c: (_key(c, job), _fields(c)))
    chosen = marked(_front(done) if pareto else done[:top], job.objective)
    return chosen[0], tuple(chosen[1:]), simulated, cut


def _rounded(number: float) -> float:
    return float(rounded(np.array([number]))[0])


def value_of(choice: Choice, objective: str) -> float:
    """As ranking.value, of one choice and with its simulated time."""
    per_token = choice.step_seconds / float(choice.estimate.tokens[0])
    values = {
        "memory": float(choice.estimate.device_bytes[0]),
        "gpus": float(choice.gpus),
        "cost": choice.gpu_seconds_per_token,
    }
    return values.get(objective, per_token)


def _key(choice: Choice, job: Job) -> tuple[float, float]:
    return _rounded(value_of(choice, job.objective)), _rounded(value_of(choice, "step-time"))


def _fields(choice: Choice) -> tuple[object, ...]:
    columns = Strategies.of([choice.strategy]).columns
    return choice.gpus, choice.global_batch, *(float(columns[name][0]) for name in ORDER)


def _front(choices: list[Choice]) -> list[Choice]:
    """Without those that simulation shows to be beaten."""

    def point(choice: Choice) -> tuple[float, float, int]:
        time, memory = value_of(choice, "step-time"), value_of(choice, "memory")
        return _rounded(time), _rounded(memory), choice.gpus

    points = [point(choice) for choice in choices]
    return [
        choice
        for choice, mine in zip(choices, points, strict=True)
        if not any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in points)
    ]


def marked(choices: list[Choice], objective: str) -> list[Choice]:
    """With `relative` and `tie` against the first."""
    first = choices[0]
    if objective == "pareto":
        return choices
    return [
        first,
        *(
            replace(
                choice,
                relative=value_of(choice, objective) / value_of(first, objective),
                tie=_tied(choice, first, objective),
            )
            for choice in choices[1:]
        ),
    ]


def _tied(choice: Choice, first: Choice, objective: str) -> bool:
    """Not above the high end of the best's own error band."""
    if objective == "memory":
        return float(choice.estimate.device_bytes[0]) <= float(first.estimate.device_bytes_high[0])
    if objective == "gpus" and choice.gpus != first.gpus:
        return False
    compared = "cost" if objective == "cost" else "step-time"
    band = float(first.estimate.step_seconds_high[0]) / float(first.estimate.step_seconds[0])
    return value_of(choice, compared) <= value_of(first, compared) * band
