"""Closed forms of pipeline time against the event simulation of the job lists, and the textbook's formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from distplan.costmodel.pipeline import PipelineTime, in_flight, pipeline_time
from distplan.costmodel.pipeline_waves import follow_slots
from distplan.costmodel.schedules import build_schedule
from distplan.costmodel.simulate import StageCosts, simulate
from distplan.costmodel.simulate_repeat import simulate_step

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    schedule: str
    pp: int
    vpp: int
    m: int
    count: list[int]
    forward: Floats
    backward: Floats
    p2p: float
    overlap: bool

    def closed(self) -> PipelineTime:
        return pipeline_time(
            self.schedule, forward=self.forward[:, None], backward=self.backward[:, None], count=self.count,
            p2p=np.array([self.p2p]), overlap_p2p=self.overlap, m=np.array([float(self.m)]), pp=self.pp, vpp=self.vpp,
        )  # fmt: skip

    def simulated(self) -> float:
        schedule = build_schedule(self.schedule, stages=self.pp, micro_batches=self.m, chunks=self.vpp)
        return simulate(schedule, self.costs(), record=False).seconds

    def costs(self) -> StageCosts:
        return StageCosts(
            forward=np.repeat(self.forward, self.count).tolist(),
            backward=np.repeat(self.backward, self.count).tolist(),
            p2p=self.p2p, overlap_p2p=self.overlap,
        )  # fmt: skip


def random_case(rng: np.random.Generator, schedule: str, *, runs: int, p2p: float) -> Case:
    """Up to `runs` runs of stages whose forwards last 0.6 to 1.4, backwards 1.5 to 2.5 times as long."""
    if schedule == "interleaved":
        pp, vpp = int(rng.integers(2, 7)), int(rng.integers(2, 5))
        m = pp * int(rng.integers(1, 7))
    else:
        pp, vpp = int(rng.integers(1, 13)), 1
        m = int(rng.integers(1, 4 * pp + 2))
    chunks = pp * vpp
    cuts = np.sort(rng.choice(np.arange(1, chunks), min(chunks, int(rng.integers(1, runs + 1))) - 1, replace=False))
    count = [int(n) for n in np.diff([0, *cuts, chunks])]
    forward = rng.uniform(0.6, 1.4, len(count))
    return Case(
        schedule=schedule, pp=pp, vpp=vpp, m=m, count=count, forward=forward,
        backward=forward * rng.uniform(1.5, 2.5, len(count)), p2p=float(p2p * rng.random()),
        overlap=bool(rng.random() < 0.7),
    )  # fmt: skip


def differences(schedule: str, cases: int, *, runs: int, p2p: float, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(cases):
        case = random_case(rng, schedule, runs=runs, p2p=p2p)
        seconds = case.simulated()
        out.append((float(case.closed().seconds[0]) - seconds) / seconds)
    return np.array(out)


def test_f_then_b_is_exact_for_uneven_stages_and_messages() -> None:
    assert np.abs(differences("f_then_b", 400, runs=12, p2p=2.0, seed=1)).max() < 1e-12


@pytest.mark.parametrize(("runs", "p2p"), [(5, 0.0), (5, 0.5), (5, 2.0), (12, 0.5)])
def test_1f1b_is_near_the_simulation_and_never_above(runs: int, p2p: float) -> None:
    found = differences("1f1b", 700, runs=runs, p2p=p2p, seed=2)
    assert found.max() < 1e-12
    assert np.median(-found) <= 0.005
    assert found.min() >= -0.03


@pytest.mark.parametrize("p2p", [0.0, 0.3, 0.6])
def test_interleaved_is_near_the_simulation_and_never_above(p2p: float) -> None:
    found = differences("interleaved", 400, runs=5, p2p=p2p, seed=3)
    assert found.max() < 1e-12
    assert np.median(-found) <= 0.005
    assert found.min() >= -0.03


def test_interleaved_is_near_with_a_different_time_for_every_chunk() -> None:
    found = differences("interleaved", 300, runs=24, p2p=0.5, seed=4)
    assert found.max() < 1e-12
    assert np.median(-found) <= 0.005
    assert found.min() >= -0.03


def test_following_the_slots_of_an_interleaved_pipeline_is_exact_up_to_three_groups() -> None:
    rng = np.random.default_rng(6)
    checked = 0
    while checked < 150:
        case = random_case(rng, "interleaved", runs=24, p2p=0.9)
        if case.pp < case.m <= 3 * case.pp and case.overlap:
            chunks = [np.repeat(times, case.count) for times in (case.forward, case.backward)]
            cost = np.stack(chunks).reshape(2, case.vpp, case.pp, 1)
            seconds = follow_slots(cost, np.array([case.p2p]), np.array([float(case.m)]))[0]
            assert seconds == pytest.approx(case.simulated(), rel=1e-12)
            checked += 1


def alike(schedule: str, pp: int, m: Floats, vpp: int = 1, overlap: bool = True) -> PipelineTime:
    """All stages: forward 1, backward 2, messages free."""
    times = np.ones((1, len(m))) / vpp
    return pipeline_time(
        schedule, forward=times, backward=2 * times, count=[pp * vpp], p2p=np.zeros(len(m)), overlap_p2p=overlap,
        m=m, pp=pp, vpp=vpp,
    )  # fmt: skip


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pp", [1, 2, 4, 16])
def test_equal_stages_give_the_textbooks_bubble(pp: int, overlap: bool) -> None:
    m = np.array([1.0, 2.0, 4.0, 16.0, 64.0])
    for schedule in ("f_then_b", "1f1b"):
        time = alike(schedule, pp, m, overlap=overlap)
        assert time.seconds == pytest.approx((m + pp - 1) * 3)
        assert time.bubble / time.compute == pytest.approx((pp - 1) / m)
    groups = pp * np.array([1.0, 2.0, 3.0, 8.0])
    for vpp in (2, 3, 5):
        time = alike("interleaved", pp, groups, vpp, overlap)
        assert time.bubble / time.compute == pytest.approx((pp - 1) / (vpp * groups))


def test_seconds_are_compute_and_bubble() -> None:
    rng = np.random.default_rng(8)
    for schedule in ("f_then_b", "1f1b", "interleaved"):
        for _ in range(50):
            time = random_case(rng, schedule, runs=5, p2p=0.5).closed()
            assert np.all(time.bubble >= -1e-9)
            assert time.seconds == pytest.approx(time.compute + time.bubble)


@pytest.mark.parametrize(("schedule", "vpp"), [("f_then_b", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_row_alone_and_in_a_batch_has_the_same_bits(schedule: str, vpp: int) -> None:
    rng = np.random.default_rng(9)
    rows, count = 5000, [1, 1, 4 * vpp - 3, 1]
    forward = rng.uniform(0.5, 1.5, (4, rows))
    backward = forward * 2.1
    p2p = rng.uniform(0.0, 0.5, rows)
    m = 4.0 * rng.integers(1, 9, rows)

    def run(which: slice) -> Floats:
        return pipeline_time(
            schedule, forward=forward[:, which], backward=backward[:, which], count=count, p2p=p2p[which],
            overlap_p2p=True, m=m[which], pp=4, vpp=vpp,
        ).seconds  # fmt: skip

    together = run(slice(None))
    for k in rng.integers(0, rows, 40):
        assert run(slice(int(k), int(k) + 1))[0] == together[k]


@pytest.mark.parametrize("schedule", ["f_then_b", "1f1b", "interleaved"])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_in_flight_is_what_the_job_lists_keep(schedule: str, pp: int) -> None:
    for groups in (1, 2, 3, 5):
        for vpp in (2, 3) if schedule == "interleaved" else (1,):
            m = groups * pp
            jobs = build_schedule(schedule, stages=pp, micro_batches=m, chunks=vpp).jobs
            for stage, order in enumerate(jobs):
                kept = np.cumsum([{"F": 1, "B": -1}.get(job.kind, 0) for job in order if job])
                assert in_flight(schedule, stage, pp, np.array([float(m)]), vpp)[0] == kept.max()


def torch_rounds(pp: int, most: int) -> list[int]:
    """Micro-batches that PyTorch's interleaved schedule takes and Megatron's does not."""
    return [m for m in range(1, most) if m % pp and m % max(1, m // pp) == 0]


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_in_flight_is_what_pytorch_keeps_where_stages_do_not_divide_micro_batches(pp: int) -> None:
    for vpp in (2, 3):
        for m in torch_rounds(pp, 4 * pp):
            jobs = build_schedule("interleaved", stages=pp, micro_batches=m, chunks=vpp, dialect="torch").jobs
            for stage, order in enumerate(jobs):
                kept = np.cumsum([{"F": 1, "B": -1}.get(job.kind, 0) for job in order if job])
                assert in_flight("interleaved", stage, pp, np.array([float(m)]), vpp)[0] == kept.max()


def test_interleaved_is_finite_and_bounds_the_simulation_where_stages_do_not_divide_micro_batches() -> None:
    rng = np.random.default_rng(5)
    few, many = [], []
    for _ in range(300):
        case = random_case(rng, "interleaved", runs=6, p2p=0.5)
        case = replace(case, m=int(rng.choice(torch_rounds(case.pp, 5 * case.pp))))
        schedule = build_schedule("interleaved", stages=case.pp, micro_batches=case.m, chunks=case.vpp, dialect="torch")
        exact = simulate(schedule, case.costs(), record=False).seconds
        (few if case.m < case.pp else many).append(float(case.closed().seconds[0]) / exact - 1.0)
    assert max(many) <= 1e-9
    assert np.median(np.abs(many)) <= 0.02
    assert np.median(np.abs(few)) <= 1e-9  # PyTorch's last stages begin to alternate before all forwards are done
    assert max(few) <= 0.1


def test_with_as_many_micro_batches_as_four_stages_1f1b_keeps_10_of_16() -> None:
    m = np.array([4.0])
    kept = [in_flight("1f1b", s, 4, m)[0] for s in range(4)]
    everything = [in_flight("f_then_b", s, 4, m)[0] for s in range(4)]
    assert sum(kept) == 10
    assert sum(everything) == 16
    assert kept[0] == everything[0]


def test_what_has_no_closed_form_is_refused() -> None:
    one = np.ones((1, 1))
    args = {"forward": one, "backward": one, "p2p": one[0], "overlap_p2p": True, "m": one[0]}
    with pytest.raises(ValueError, match="do not make 4·1"):
        pipeline_time("1f1b", count=[3], pp=4, **args)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no closed form for schedule dualpipe_v"):
        pipeline_time("dualpipe_v", count=[4], pp=2, vpp=2, **args)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no closed form"):
        in_flight("dualpipe_v", 0, 2, one[0])


ZERO_BUBBLE = [("zb_h1", 1, "paddle"), ("zb_v", 2, "torch")]


@pytest.mark.parametrize("name,chunks,dialect", ZERO_BUBBLE)
def test_zero_bubble_forms_bound_the_simulation_from_below(name: str, chunks: int, dialect: str) -> None:
    rng = np.random.default_rng(7)
    for _ in range(60):
        pp, rounds = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        m, size = pp * rounds, pp * chunks
        f, b = rng.uniform(0.5, 1.5, size), rng.uniform(1.0, 3.0, size)
        inputs, link = b * rng.uniform(0.3, 0.7, size), float(rng.uniform(0.0, 0.5))
        costs = StageCosts(forward=list(f), backward=list(b), input_gradient=list(inputs), p2p=link)
        simulated = simulate_step(name, stages=pp, micro_batches=m, chunks=chunks, costs=costs, dialect=dialect).seconds
        closed = pipeline_time(
            name,
            forward=f[:, None],
            backward=b[:, None],
            input_gradient=inputs[:, None],
            count=[1] * size,
            p2p=np.array([link]),
            overlap_p2p=True,
            m=np.array([float(m)]),
            pp=pp,
            vpp=chunks,
        ).seconds[0]
        assert closed <= simulated * (1 + 1e-12)
        assert closed >= 0.7 * simulated


@pytest.mark.parametrize("name,chunks,dialect", ZERO_BUBBLE)
def test_zero_bubble_schedules_keep_as_much_on_every_stage_as_1f1b_on_the_first(
    name: str, chunks: int, dialect: str
) -> None:
    for pp, m in ((2, 6), (4, 8), (8, 16)):
        size = pp * chunks
        costs = StageCosts(forward=[1.0] * size, backward=[2.0] * size, activation=[1.0] * size)
        peak = simulate_step(name, stages=pp, micro_batches=m, chunks=chunks, costs=costs, dialect=dialect).peak
        closed = [float(in_flight(name, s, pp, np.array([float(m)]), chunks)[0]) for s in range(pp)]
        assert list(peak) == closed == [float(size)] * pp
