"""A mixture of experts at the least and the most that its fullest rank may hold: time and memory as a range."""

from __future__ import annotations

from dataclasses import replace

from distplan.costmodel.model import Moe
from distplan.planner.choices import Pricer
from distplan.planner.plan import VERDICTS, Choice, Imbalance


def with_imbalance(pricer: Pricer, choice: Choice) -> Choice:
    """With its step time and memory at both ends of workload.moe_imbalance; as it is where nothing varies.

    A capacity factor bounds what an expert takes, so that buffers and products have one size whatever the router
    does, and a rank with all experts (ep 1) has its own tokens, no more. As many layers are recomputed as at the
    expected imbalance: a run does not change its plan.
    """
    workload = pricer.job.workload
    low, high = workload.moe_imbalance_low, workload.moe_imbalance_high
    experts = [kind.ffn for kind in pricer.job.model.kinds.values() if isinstance(kind.ffn, Moe)]
    strategy = choice.strategy
    if low == high or strategy.ep == 1 or not any(block.capacity_factor == 0.0 for block in experts):
        return choice
    if strategy.recompute == "full":
        strategy = replace(strategy, recompute_layers=int(choice.estimate.recompute_layers[0]))

    def at(factor: float) -> Choice:
        if factor == workload.moe_imbalance:
            return choice
        job = replace(pricer.job, workload=replace(workload, moe_imbalance=factor))
        there = replace(pricer, job=job)
        return there.simulated(there.choice(strategy, choice.global_batch))

    least, most = at(low), at(high)
    found = Imbalance(
        low=low,
        expected=workload.moe_imbalance,
        high=high,
        step_seconds_low=least.step_seconds,
        step_seconds_high=most.step_seconds,
        device_bytes_low=float(least.estimate.device_bytes[0]),
        device_bytes_high=float(most.estimate.device_bytes[0]),
        verdict_high=VERDICTS[max(VERDICTS.index(most.verdict), VERDICTS.index(choice.verdict))],
    )
    return replace(choice, imbalance=found)
