"""The event simulation: by hand on small cases, laws, and the facts every course on pipelines teaches."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time

import numpy as np
import pytest

from distplan.costmodel.schedules import Schedule, ScheduleError, build_schedule
from distplan.costmodel.schedules_orders import Job
from distplan.costmodel.simulate import Simulation, StageCosts, simulate
from distplan.costmodel.simulate_repeat import simulate_step
from distplan.costmodel.simulate_views import LEGEND, chrome_trace, timeline


def even(name: str, p: int, m: int, chunks: int = 1, dialect: str = "") -> Simulation:
    """Forward 1 and backward 2 per stage, messages free."""
    k = p * chunks
    costs = StageCosts(forward=[1.0 / chunks] * k, backward=[2.0 / chunks] * k, activation=[1.0 / chunks] * k)
    return simulate(build_schedule(name, stages=p, micro_batches=m, chunks=chunks, dialect=dialect), costs)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16), (8, 12)])
def test_f_then_b_and_1f1b_have_the_same_bubble(p: int, m: int) -> None:
    for name in ("f_then_b", "1f1b"):
        run = even(name, p, m)
        assert run.seconds == pytest.approx(3.0 * (m + p - 1))
        assert run.bubble == pytest.approx((3.0 * (p - 1),) * p)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 6, 4)])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(p: int, m: int, v: int) -> None:
    assert even("interleaved", p, m, v).bubble == pytest.approx((3.0 * (p - 1) / v,) * p)


def test_a_pipeline_with_one_micro_batch_keeps_one_device_in_p_busy() -> None:
    run = even("f_then_b", 8, 1)
    assert [busy / run.seconds for busy in run.busy] == pytest.approx([1 / 8] * 8)


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 16), (8, 64)])
def test_1f1b_keeps_no_more_micro_batches_than_stages_f_then_b_all(p: int, m: int) -> None:
    assert even("1f1b", p, m).peak == tuple(float(min(p - s, m)) for s in range(p))
    assert even("f_then_b", p, m).peak == (float(m),) * p


def test_with_four_stages_and_micro_batches_1f1b_keeps_three_eighths_less_but_nothing_less_on_the_first() -> None:
    saved, all_kept = even("1f1b", 4, 4).peak, even("f_then_b", 4, 4).peak
    assert 1 - sum(saved) / sum(all_kept) == 0.375
    assert saved[0] == all_kept[0]


def test_zero_bubble_schedules_wait_less_than_1f1b_and_zb_h1_keeps_no_more() -> None:
    plain, h1 = even("1f1b", 4, 8), even("zb_h1", 4, 8)
    assert max(h1.bubble) < max(plain.bubble)
    assert max(h1.peak) == max(plain.peak)
    assert max(even("zb_v", 4, 8, 2).bubble) < max(h1.bubble)
    assert max(even("dualpipe_v", 4, 8, 2).bubble) < max(plain.bubble)


def test_messages_by_hand_on_two_stages() -> None:
    """m = 2, F 1, B 2, message 0.5. Overlapped: stage 1 runs F0 1.5-2.5, B0 -4.5, F1 -5.5, B1 -7.5; stage 0 has
    B0 5-7 and B1 8-10. Blocking: the sender of F0 is free at 1.5, of F1 at 3; stage 1 F0 1.5-2.5, B0 -4.5 (-5),
    F1 5-6, B1 -8 (-8.5); stage 0 B0 5-7, B1 8.5-10.5."""
    schedule = build_schedule("1f1b", stages=2, micro_batches=2)
    costs = StageCosts(forward=[1.0, 1.0], backward=[2.0, 2.0], p2p=0.5)
    assert simulate(schedule, costs).seconds == 10.0
    assert simulate(schedule, dataclasses.replace(costs, overlap_p2p=False)).seconds == 10.5
    assert simulate(schedule, dataclasses.replace(costs, p2p=0.0, latency=0.5)).seconds == 10.0


def test_a_link_carries_one_message_at_a_time_but_latencies_overlap() -> None:
    schedule = build_schedule("f_then_b", stages=2, micro_batches=4)
    costs = StageCosts(forward=[1.0, 1.0], backward=[1.0, 1.0], p2p=3.0)
    # 1 + 4 messages of 3 + F 1, then B: 1 + 4 messages of 3 + B 1, the first gradient leaving before the fourth
    assert simulate(schedule, costs).seconds == 1 + 12 + 1 + 1 + 12 + 1
    late = dataclasses.replace(costs, p2p=0.0, latency=3.0)
    assert simulate(schedule, late).seconds == 1 + 3 + 4 + 4 + 3 + 1


def test_jobs_of_a_stage_never_overlap_and_fill_its_busy_time() -> None:
    rng = np.random.default_rng(5)
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb_v", 2), ("dualpipe_v", 2)):
        times = rng.uniform(0.5, 1.5, 4 * chunks)
        for overlap in (True, False):
            costs = StageCosts(forward=list(times), backward=list(2 * times), p2p=0.2, overlap_p2p=overlap)
            run = simulate(build_schedule(name, stages=4, micro_batches=8, chunks=chunks), costs)
            for rank in range(4):
                mine = [e for e in run.events if e.rank == rank and e.stream == "compute"]
                assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(mine))
                assert sum(e.end - e.start for e in mine) == pytest.approx(run.busy[rank])
                assert run.busy[rank] + run.bubble[rank] == pytest.approx(run.seconds)


def test_memory_begins_and_ends_at_nothing_and_weight_gradients_hold_their_share() -> None:
    schedule = build_schedule("zb_h1", stages=4, micro_batches=8)
    costs = StageCosts(forward=[1.0] * 4, backward=[2.0] * 4, activation=[10.0] * 4)
    run = simulate(schedule, costs)
    for course, peak in zip(run.memory, run.peak, strict=True):
        held = [amount for _, amount in course]
        assert min(held) >= 0.0
        assert held[-1] == pytest.approx(0.0, abs=1e-9)
        assert max(held) == peak
        assert [when for when, _ in course] == sorted(when for when, _ in course)
    lighter = simulate(schedule, dataclasses.replace(costs, kept_after_input=0.25))
    assert lighter.peak[3] < run.peak[3]
    assert lighter.seconds == run.seconds


def test_lists_that_wait_for_each_other_are_reported_not_hung() -> None:
    jobs = (
        (Job("F", 0, 0), Job("B", 0, 0), Job("F", 0, 1), Job("B", 0, 1)),
        (Job("F", 0, 0), Job("F", 0, 1), Job("B", 0, 0), Job("B", 0, 1)),
    )
    schedule = Schedule(name="crossed", dialect="", stages=2, micro_batches=2, chunks=1, jobs=jobs)
    with pytest.raises(ScheduleError, match="stage 0 cannot run B of chunk 0, micro-batch 0"):
        simulate(schedule, StageCosts(forward=[1.0] * 2, backward=[1.0] * 2))
    with pytest.raises(ScheduleError, match="3 costs for 2"):
        simulate(schedule, StageCosts(forward=[1.0] * 3, backward=[1.0] * 2))


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)]
)
def test_running_until_it_repeats_gives_the_whole_run(name: str, chunks: int) -> None:
    rng = np.random.default_rng(7)
    shortened = 0
    for case in range(12):
        p = int(rng.integers(2, 5))
        m = p * int(rng.integers(16, 24))
        times = rng.uniform(0.5, 1.5, p * chunks) if case % 2 else np.ones(p * chunks)
        costs = StageCosts(
            forward=list(times), backward=list(2 * times), p2p=0.3 * rng.random(), overlap_p2p=case % 3 > 0
        )
        schedule = build_schedule(name, stages=p, micro_batches=m, chunks=chunks)
        whole = simulate(schedule, costs, record=False)
        short = simulate_step(name, stages=p, micro_batches=m, chunks=chunks, costs=costs)
        assert short.seconds == pytest.approx(whole.seconds, rel=1e-10)
        assert short.busy == pytest.approx(whole.busy)
        assert short.peak == pytest.approx(whole.peak)
        shortened += short.simulated < m
    assert shortened >= 6


def test_64_stages_and_1024_micro_batches_take_less_than_a_second() -> None:
    rng = np.random.default_rng(11)
    times = list(rng.uniform(0.5, 1.5, 64))
    begin = time.process_time()
    simulate_step(
        "1f1b", stages=64, micro_batches=1024, chunks=1, costs=StageCosts(forward=times, backward=times, p2p=0.1)
    )
    assert time.process_time() - begin < 1.0


def test_the_timeline_has_a_row_per_stage_and_shows_every_stage_idle_until_its_first_forward() -> None:
    run = even("1f1b", 4, 4)
    rows = timeline(run, 84)
    assert rows[-1].strip() == LEGEND
    assert len(rows) == 5
    for stage, row in enumerate(rows[:4]):
        cells = row.split("|")[1]
        assert len(cells) == 84
        assert cells.startswith("." * (4 * stage) + "F0")


def test_the_trace_holds_every_event_and_is_json() -> None:
    k = 8
    costs = StageCosts(forward=[1.0] * k, backward=[2.0] * k, p2p=0.1, optimizer=0.5)
    run = simulate(build_schedule("interleaved", stages=4, micro_batches=4, chunks=2), costs)
    trace = json.loads(json.dumps(chrome_trace(run)))["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert len(spans) == len(run.events)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(run.seconds * 1e6)
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    assert any(event["ph"] == "C" for event in trace)
