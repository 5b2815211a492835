"""Job lists: complete, runnable, refused with the numbers; and the facts that papers state of the schedules."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from distplan.costmodel.schedules import SCHEDULES, Schedule, ScheduleError, build_schedule, with_communication
from distplan.costmodel.schedules_comms import leaves
from distplan.costmodel.simulate import StageCosts, simulate
from distplan.costmodel.strategy import V_SHAPED
from distplan.hardware.errors import UnknownNameError

LOOPED = {"interleaved", "looped_bfs", "interleaved_zero_bubble"}


def all_schedules() -> list[Schedule]:
    made = []
    for name, dialects in SCHEDULES.items():
        for dialect, p, m in itertools.product(dialects, (1, 2, 3, 4), (3, 4, 8, 12)):
            for chunks in (2,) if name in V_SHAPED else (1, 2, 3) if name in LOOPED else (1,):
                try:
                    schedule = build_schedule(name, stages=p, micro_batches=m, chunks=chunks, dialect=dialect)
                except ScheduleError:
                    continue
                made.append(schedule)
    return made


def test_every_chunk_sees_every_micro_batch_once_forward_and_once_backward() -> None:
    for schedule in all_schedules():
        for rank in schedule.jobs:
            done = Counter((leaf.kind, leaf.chunk, leaf.micro_batch) for job in rank if job for leaf in leaves(job))
            for chunk, i in itertools.product(range(schedule.chunks), range(schedule.micro_batches)):
                assert done["F", chunk, i] == 1
                assert done["B", chunk, i] + done["I", chunk, i] == 1
                assert done["I", chunk, i] == done["W", chunk, i]
            kinds = sum(done[key] for key in done if key[0] in "FBIW")
            assert kinds == sum(done[key] for key in done if key[0] == "W") + (
                2 * schedule.chunks * schedule.micro_batches
            )


def test_every_schedule_runs_to_its_end_with_and_without_its_messages_written_out() -> None:
    for schedule in all_schedules():
        k = schedule.stages * schedule.chunks
        costs = StageCosts(forward=[1.0] * k, backward=[2.0] * k, p2p=0.1)
        plain = simulate(schedule, costs)
        total = schedule.micro_batches * schedule.chunks * 3.0
        assert plain.busy == pytest.approx((total,) * schedule.stages)
        if not any(job and job.kind.startswith("RECV") for job in schedule.jobs[0]):
            written = simulate(with_communication(schedule), costs)
            assert written.seconds == pytest.approx(plain.seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("1f1b", {"stages": 8, "micro_batches": 4, "dialect": "paddle"}, "8 micro-batches, not 4"),
        ("eager_1f1b", {"stages": 4, "micro_batches": 4}, "7 micro-batches, not 4"),
        ("interleaved", {"stages": 4, "micro_batches": 10, "chunks": 2}, "10 is no multiple"),
        ("interleaved", {"stages": 4, "micro_batches": 13, "chunks": 2, "dialect": "torch"}, "multiple of 3"),
        ("zb_h1", {"stages": 8, "micro_batches": 4}, "at least 8"),
        ("zb_v", {"stages": 2, "micro_batches": 4, "chunks": 3}, "2 model chunk"),
        ("zb_v", {"stages": 4, "micro_batches": 4, "chunks": 2, "dialect": "paddle_pass"}, "removed"),
        ("dualpipe_v", {"stages": 4, "micro_batches": 7, "chunks": 2}, "8 micro-batches, not 7"),
        ("1f1b", {"stages": 0, "micro_batches": 4}, "at least one"),
    ],
)
def test_what_cannot_run_is_refused_with_the_numbers(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        build_schedule(name, **options)  # type: ignore[arg-type]


def test_a_wrong_name_or_dialect_suggests_the_right_one() -> None:
    with pytest.raises(UnknownNameError, match="interleaved"):
        build_schedule("interleavd", stages=2, micro_batches=2)
    with pytest.raises(UnknownNameError, match="megatron"):
        build_schedule("1f1b", stages=2, micro_batches=2, dialect="megatorn")


def test_few_micro_batches_are_all_warm_up_in_megatrons_1f1b() -> None:
    jobs = build_schedule("1f1b", stages=8, micro_batches=2).jobs
    assert [job.kind for job in jobs[0] if job] == ["F", "F", "B", "B", "OPT"]
    assert [job.kind for job in jobs[7] if job] == ["F", "B", "F", "B", "OPT"]


def test_the_greedy_v_never_ends_later_for_cheaper_messages() -> None:
    times = {"F": 10.0, "I": 12.0, "W": 9.0, "loss": 3.0}
    ends = []
    for comm in (0.0, 1.0, 4.0):
        schedule = build_schedule(
            "zb_v", stages=4, micro_batches=8, chunks=2, dialect="paddle", times={**times, "comm": comm}
        )
        costs = StageCosts(forward=[10.0] * 8, backward=[21.0] * 8, input_gradient=[12.0] * 8, latency=comm)
        ends.append(simulate(schedule, costs).seconds)
    assert ends == sorted(ends)
