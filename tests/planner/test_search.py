"""What a search promises whatever the physics: the best of all that fits, in one order, and a reason otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small import dense, estimate, workload

from distplan.costmodel.estimate import Estimate
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.hardware.cluster import load_cluster
from distplan.hardware.errors import DistplanError
from distplan.planner import api
from distplan.planner.neighbours import smallest_that
from distplan.planner.plan import Choice, NothingFits, NothingLegal, Plan
from distplan.planner.pricing import Job, cost_all
from distplan.planner.ranking import Pool, best, front, in_order, joined, rounded, value
from distplan.planner.search import evaluate, search
from distplan.planner.space import legal_chunks, space

MODEL = dense(layers=24, heads=32, kv_heads=8, hidden=4096, ffn=14336)
CLUSTER = load_cluster("h100-sxm")
MEGATRON = load_runtime("megatron")


def plan(gpus: Any = 16, **options: Any) -> Plan:
    model = options.pop("model", MODEL)
    work = options.pop("workload", workload(64))
    runtime = options.pop("runtime", MEGATRON)
    return search(model, work, CLUSTER, runtime, gpus, **{"estimate": estimate, **options})


def six(number: float) -> float:
    return float(f"{number:.6g}")


def shown(found: Plan) -> list[Choice]:
    return [choice for choice in (found.best, *found.runners_up) if choice]


def job(gpus_bounds: Any = None, **options: Any) -> Job:
    values = {"objective": "step-time", "reserve_bytes": 0.0, "memory_limit_bytes": None, "allow_tight": False}
    return Job(
        model=MODEL, workload=workload(64), cluster=CLUSTER, runtime=MEGATRON, bounds=gpus_bounds or {},
        estimate=estimate, **values | options,
    )  # fmt: skip


def everything(of: Job, gpus: int) -> tuple[Strategies, Estimate]:
    context = of.context(gpus, 64)
    (rows,) = legal_chunks(space(context, of.bounds), context, {}, 1 << 30)
    return rows, of.price(rows, 64)


def test_best_is_the_least_time_of_all_that_fit() -> None:
    rows, costs = everything(job(), 16)
    fits = costs.device_bytes_high <= costs.usable_bytes
    found = plan(16)
    assert found.best is not None
    assert found.best.step_seconds == pytest.approx(costs.step_seconds[fits].min(), rel=2e-6)
    assert found.counts.fits == np.count_nonzero(fits)
    assert found.counts.costed == found.counts.legal == len(rows)


def test_counts_add_up() -> None:
    counts = plan(24).counts
    assert counts.enumerated == counts.legal + sum(rule.rejected for rule in counts.rejected)
    assert counts.costed == counts.fits + counts.tight + counts.out == counts.legal


@pytest.mark.parametrize("objective", ["step-time", "memory", "pareto"])
def test_answer_does_not_depend_on_the_chunk(objective: str) -> None:
    def keys(chunk_rows: int) -> list[tuple[Strategy, float]]:
        tally = cost_all(job(objective=objective, chunk_rows=chunk_rows), [(16, 64)])
        assert tally.admitted is not None
        kept = tally.admitted
        return [(kept.rows[i], float(kept.columns["step_seconds"][i])) for i in range(len(kept))]

    assert keys(97) == keys(5000) == keys(1 << 20)


def test_the_same_search_twice_is_the_same_plan() -> None:
    first, second = plan(16), plan(16)
    assert [c.strategy for c in shown(first)] == [c.strategy for c in shown(second)]


def test_runners_up_follow_in_order_and_near_ones_are_ties() -> None:
    choices = shown(plan(16, top=20))
    times = [choice.step_seconds for choice in choices]
    assert times == sorted(times, key=six)
    band = choices[0].step_seconds * 1.1
    assert [c.tie for c in choices[1:]] == [c.step_seconds <= band for c in choices[1:]]
    assert choices[0].relative == 1.0


def test_equal_times_are_ordered_by_the_fields_of_the_strategy() -> None:
    rows = Strategies.of([Strategy(tp=4, zero=0), Strategy(tp=2, zero=0), Strategy(tp=8, zero=0)])
    times = np.array([1.0000001, 1.0000002, 0.9])
    columns = {name: np.ones(3) for name in ("gpus", "global_batch", "tokens", "device_bytes", "over")}
    pool = Pool(rows, columns | {"step_seconds": times})
    assert list(in_order(pool, "step-time")) == [2, 1, 0]


@pytest.mark.parametrize("number", [1.0, 0.1, 123456.4, 999999.6, 1e-12, 7.0000004e9, 3.0])
def test_six_digits_are_those_of_printing(number: float) -> None:
    assert float(rounded(np.array([number]))[0]) == pytest.approx(float(f"{number:.6g}"), rel=1e-12)


def test_pareto_front_is_what_no_other_beats() -> None:
    _, costs = everything(job(), 16)
    fits = costs.device_bytes_high <= costs.usable_bytes
    both = zip(costs.step_seconds[fits], costs.device_bytes[fits], strict=True)
    points = {(six(seconds), six(memory)) for seconds, memory in both}
    expected = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    found = shown(plan(16, objective="pareto"))
    got = {(six(c.step_seconds), six(c.estimate.device_bytes[0])) for c in found}
    assert got == expected and len(got) > 2


def test_memory_objective_is_the_fewest_bytes() -> None:
    _, costs = everything(job(), 16)
    found = plan(16, objective="memory").best
    assert found is not None
    assert float(found.estimate.device_bytes[0]) == pytest.approx(costs.device_bytes.min(), rel=2e-6)


def test_objective_gpus_takes_the_fewest_and_cost_the_cheapest() -> None:
    fewest = plan([8, 16, 32, 64], objective="gpus").best
    fits = [n for n in (8, 16, 32, 64) if plan(n).best]
    assert fewest is not None and fewest.gpus == min(fits)
    cheapest = plan([8, 16, 32, 64], objective="cost", price_per_gpu_hour=2.0).best
    each = {n: plan(n, price_per_gpu_hour=2.0).best for n in fits}
    costs = {n: choice.cost_per_token for n, choice in each.items() if choice and choice.cost_per_token}
    assert cheapest is not None and cheapest.cost_per_token == pytest.approx(min(costs.values()), rel=2e-6)


@pytest.mark.parametrize("objective", ["gpus", "cost"])
def test_objectives_that_choose_a_count_need_several(objective: str) -> None:
    with pytest.raises(DistplanError, match=r"64\.\.512"):
        plan(64, objective=objective)


def test_several_batches_compare_by_time_per_token() -> None:
    found = plan(16, global_batches=(32, 64, 128))
    each = [plan(16, global_batches=(batch,)).best for batch in (32, 64, 128)]
    rates = [choice.gpu_seconds_per_token for choice in each if choice]
    assert found.best is not None
    assert found.best.gpu_seconds_per_token == pytest.approx(min(rates), rel=2e-6)
    assert found.workload.global_batch == found.best.global_batch


def test_reserve_and_limit_reach_the_verdict() -> None:
    def fits(**options: Any) -> int:
        return plan(16, **options).counts.fits

    assert fits(memory_limit_bytes=20 * 2.0**30) < fits(memory_limit_bytes=40 * 2.0**30) <= fits()
    assert fits(reserve_bytes=30 * 2.0**30) < fits()


def test_a_limit_above_the_device_gives_nothing_more() -> None:
    assert plan(16, memory_limit_bytes=1000 * 2.0**30).counts == plan(16).counts


@pytest.mark.parametrize("limits", [{"reserve_bytes": 90 * 2.0**30}, {"memory_limit_bytes": 0.0}])
def test_limits_that_leave_no_memory_are_refused(limits: Any) -> None:
    with pytest.raises(DistplanError, match=r"reserve|memory limit"):
        plan(16, **limits)


def test_tight_plans_are_kept_only_when_allowed() -> None:
    limit = {"memory_limit_bytes": 20 * 2.0**30, "top": 2000, "bounds": {"micro_batch": (1,)}}
    strict, loose = plan(16, **limit), plan(16, **limit, allow_tight=True)
    assert strict.counts.tight == loose.counts.tight > 0
    assert {c.verdict for c in shown(strict)} == {"fits"}
    assert {c.verdict for c in shown(loose)} == {"fits", "tight"}


def test_simulation_runs_in_bound_order_until_the_bound_exceeds_the_best() -> None:
    seen: list[float] = []

    def simulate(*given: Any) -> float:
        costs: Estimate = given[-1]
        seen.append(float(costs.step_seconds[0]))
        return seen[-1] * (1.05 if given[4].vpp > 1 else 1.0)

    found = plan(16, simulate_plan=simulate, top=3)
    rounded_bounds = [six(t) for t in seen]
    assert rounded_bounds == sorted(rounded_bounds) and found.simulated == len(seen) <= 50
    simulated = [c.simulated_seconds for c in shown(found)]
    assert simulated == sorted(s for s in simulated if s)
    rows, costs = everything(job(), 16)
    fits = costs.device_bytes_high <= costs.usable_bytes
    truth = costs.step_seconds * np.where(rows.degree("vpp") > 1, 1.05, 1.0)
    if not found.simulation_cut:
        assert simulated[0] == pytest.approx(truth[fits].min(), rel=2e-6)


def test_a_shortlist_that_ends_before_the_bound_says_so() -> None:
    assert plan(16, simulate_plan=lambda *given: 1e6).simulation_cut


def test_nothing_fits_names_what_binds_and_the_smallest_count() -> None:
    found = plan(1, workload=workload(64, seq_len=8192))
    why = found.why_nothing
    assert found.best is None and isinstance(why, NothingFits)
    costs = why.nearest.estimate
    assert why.bytes_over == pytest.approx(float(costs.device_bytes_high[0] - costs.usable_bytes[0]))
    assert why.bytes_over > 0 and why.nearest.verdict != "fits"
    assert why.smallest_gpus and why.smallest and why.smallest.verdict == "fits"
    smaller = [n for n in (1, 2, 4, *range(8, why.smallest_gpus, 8)) if n < why.smallest_gpus]
    assert all(plan(n, workload=workload(64, seq_len=8192)).best is None for n in smaller)


@pytest.mark.parametrize("wanted", [1, 2, 3, 4, 8, 9, 24, 56, 72])
def test_smallest_count_is_a_power_of_two_below_a_node_and_whole_nodes_above(wanted: int) -> None:
    count, whole = smallest_that(lambda n: n >= wanted, node=8, limit=1024)
    allowed = [1, 2, 4, *range(8, 1025, 8)]
    assert whole and count == min(n for n in allowed if n >= wanted)


def test_no_count_up_to_the_limit_is_none() -> None:
    assert smallest_that(lambda n: False, node=8, limit=64) == (None, True)


def test_no_legal_factorisation_names_the_neighbours() -> None:
    why = plan(67).why_nothing
    assert isinstance(why, NothingLegal)
    assert why.below and why.above and why.below < 67 < why.above
    assert plan(why.below).counts.legal and plan(why.above).counts.legal
    assert not any(plan(n).counts.legal for n in range(why.below + 1, why.above))


def test_interrupt_keeps_the_best_so_far() -> None:
    calls = []

    def slow(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == 2:
            raise KeyboardInterrupt

    found = plan([16, 32, 64], progress=slow)
    assert found.interrupted and found.best is not None
    assert found.counts.costed == found.counts.legal > 0


def test_interrupt_among_the_simulations_keeps_the_ranking_without_them() -> None:
    def stopped(*given: Any) -> float:
        raise KeyboardInterrupt

    found = plan(16, simulate_plan=stopped)
    assert found.interrupted and found.simulated == 0
    assert [c.strategy for c in shown(found)] == [c.strategy for c in shown(plan(16))]


def test_progress_ends_at_the_whole() -> None:
    calls: list[tuple[int, int]] = []
    plan([8, 16], progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)


def test_sensitivity_searches_again_on_a_worse_machine() -> None:
    found = plan(64, sensitivity=True)
    assert [s.change for s in found.sensitivity] == ["network -20%", "compute -10%"]
    for each in found.sensitivity:
        assert each.winner is not None and found.best is not None
        assert each.winner.step_seconds >= found.best.step_seconds
        assert each.winner_changes == (each.winner.strategy != found.best.strategy)
        assert each.loss >= 0.0


def test_another_runtime_never_has_less_to_offer() -> None:
    found = plan(16, runtime=load_runtime("fsdp1"), other_runtimes=True)
    assert found.other_runtime is not None and found.best is not None
    assert found.other_runtime.speedup >= 1.0
    assert found.other_runtime.best.step_seconds <= found.best.step_seconds


def test_evaluate_prices_one_strategy_and_refuses_with_every_code() -> None:
    row = Strategy(dp_shard=4, tp=4, sp=True, zero=1)
    one = evaluate(MODEL, workload(64), CLUSTER, MEGATRON, row, estimate=estimate)
    alone = estimate(MODEL, workload(64), CLUSTER, MEGATRON, Strategies.of([row]), usable_bytes=None, detail=False)
    assert one.best is not None and one.best.step_seconds == alone.step_seconds[0]
    with pytest.raises(DistplanError, match=r"DP004.*DP005.*tp=2"):
        evaluate(MODEL, workload(64), CLUSTER, MEGATRON, replace(row, tp=3, sp=False), estimate=estimate)


def test_front_and_best_of_joined_pools_are_those_of_the_parts() -> None:
    rows, costs = everything(job(), 16)
    columns = {
        "gpus": np.full(len(rows), 16.0), "global_batch": np.full(len(rows), 64.0), "tokens": costs.tokens,
        "step_seconds": costs.step_seconds, "device_bytes": costs.device_bytes, "over": costs.device_bytes * 0,
    }  # fmt: skip
    whole = Pool(rows, columns)
    half = np.arange(len(rows)) % 2 == 0
    parts = joined([best(whole.take(half), "step-time", 7), best(whole.take(~half), "step-time", 7)])
    again, direct = best(parts, "step-time", 7), best(whole, "step-time", 7)
    assert list(value(again, "step-time")) == list(value(direct, "step-time"))
    fronts = joined([front(whole.take(half)), front(whole.take(~half))])
    assert set(front(fronts).columns["step_seconds"]) == set(front(whole).columns["step_seconds"])


def test_what_any_gains_is_the_best_of_the_union_and_names_who_allows_it() -> None:
    ours = load_runtime("fsdp1")
    found = plan(16, runtime=ours, other_runtimes=True)
    union = load_runtime("any")
    whole = plan(16, runtime=replace(ours, legal=union.legal, rules=union.rules)).best
    other = found.other_runtime
    assert whole is not None and other is not None and found.best is not None
    assert other.best.strategy == whole.strategy
    assert other.speedup == pytest.approx(found.best.step_seconds / whole.step_seconds)
    named = plan(16, runtime=load_runtime(other.runtime), bounds={"tp": (other.best.strategy.tp,)})
    assert other.runtime not in ("any", "fsdp1") and named.counts.legal


def test_interrupt_after_the_search_keeps_the_plan_and_leaves_the_extras_out() -> None:
    whole = plan(16)
    left = [sum(1 for _ in legal_chunks(space(job().context(16, 64), {}), job().context(16, 64), {}))]

    def stopped(*given: Any, **options: Any) -> Estimate:
        if len(given[4]) > 1:  # whole chunks, not the choices one by one
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return estimate(*given, **options)

    found = plan(16, estimate=stopped, sensitivity=True)
    assert found.interrupted and found.sensitivity == ()
    assert found.best is not None and whole.best is not None
    assert found.best.strategy == whole.best.strategy and found.counts == whole.counts


def test_the_api_compares_batches_and_a_price_alone_admits_no_tight_plan() -> None:
    options = {"gpus": 8, "bounds": {"tp": [2], "pp": [1], "cp": [1]}, "workload": {"seq_len": 4096}}
    found = api.search("llama-3.1-8b", global_batches=(64, 128), **options)
    assert found.global_batches == (64, 128) and found.best is not None
    alone = api.estimate("llama-3.1-8b", found.best.strategy, workload={"seq_len": 4096, "global_batch": 128})
    assert alone.allow_tight is False
