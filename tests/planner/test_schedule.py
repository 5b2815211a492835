"""`distplan schedule`: the facts of every course on pipelines, what a terminal shows, and refusals."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distplan.costmodel.schedules import SCHEDULES
from distplan.hardware.errors import DistplanError
from distplan.planner.cli import run
from distplan.planner.cli_schedule import stage_times
from distplan.planner.schedule_view import Question, StageTimes, drawn, run_schedule

OPTIONS = ("--stages", "--micro-batches", "--chunks", "--times", "--p2p", "--latency", "--dialect", "--compare")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(["schedule", *arguments, "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 16)])
def test_f_then_b_and_1f1b_have_equal_bubbles(p: int, m: int, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--stages", str(p), "--micro-batches", str(m)]
    gpipe, one = (asked(capsys, name, *sizes) for name in ("f_then_b", "1f1b"))
    assert gpipe["bubble_share"] == one["bubble_share"] == pytest.approx((p - 1) / (m + p - 1), rel=1e-5)
    assert gpipe["step_time"] == one["step_time"]


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 32), (8, 16)])
def test_1f1b_keeps_at_most_p_micro_batches_f_then_b_all(p: int, m: int, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--stages", str(p), "--micro-batches", str(m)]
    assert [s["peak_memory"] for s in asked(capsys, "1f1b", *sizes)["per_stage"]] == [min(p - k, m) for k in range(p)]
    assert {s["peak_memory"] for s in asked(capsys, "f_then_b", *sizes)["per_stage"]} == {m}


def test_at_four_stages_and_micro_batches_1f1b_keeps_37_5_percent_less(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--stages", "4", "--micro-batches", "4"]
    less, all_kept = (
        sum(s["peak_memory"] for s in asked(capsys, name, *sizes)["per_stage"]) for name in ("1f1b", "f_then_b")
    )
    assert 1 - less / all_kept == 0.375


@pytest.mark.parametrize("p", [2, 4, 8])
def test_naive_pipelining_uses_one_pth_of_the_devices(p: int, capsys: pytest.CaptureFixture[str]) -> None:
    shown = asked(capsys, "f_then_b", "--stages", str(p), "--micro-batches", "1")
    assert 1 - shown["bubble_share"] == pytest.approx(1 / p, rel=1e-5)


def test_chunks_divide_the_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--stages", "4", "--micro-batches", "8"]
    plain = asked(capsys, "1f1b", *sizes)["per_stage"][0]["bubble"]
    for chunks in (2, 4):
        looped = asked(capsys, "interleaved", *sizes, "--chunks", str(chunks))
        assert looped["per_stage"][0]["bubble"] == pytest.approx(plain / chunks)


def test_several_side_by_side_share_the_work_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    names = "f_then_b,1f1b,interleaved,zb_h1,zb_v,dualpipe_v"
    shown = asked(capsys, "--compare", names, "--stages", "4", "--micro-batches", "8")["schedules"]
    assert [row["schedule"] for row in shown] == names.split(",")
    busy = {round(row["step_time"] * (1 - row["bubble_share"]), 3) for row in shown}
    assert busy == {24.0}  # 8 micro-batches x (1 + 2), whatever the order
    by_name = {row["schedule"]: row for row in shown}
    assert by_name["interleaved"]["step_time"] < by_name["1f1b"]["step_time"]
    assert by_name["zb_v"]["step_time"] < by_name["zb_h1"]["step_time"] < by_name["1f1b"]["step_time"]


def test_one_that_cannot_run_is_said_among_those_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "--compare", "1f1b,interleaved", "--micro-batches", "5"]) == 0
    out = capsys.readouterr().out
    assert "cannot run" in out
    assert "rounds of 4" in out
    assert run(["schedule", "--compare", "interleaved,dualpipe_v", "--micro-batches", "5"]) == 2


def test_a_slow_stage_and_slow_messages_cost_time(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["1f1b", "--stages", "3", "--micro-batches", "6"]
    even = asked(capsys, *sizes)["step_time"]
    uneven = asked(capsys, *sizes, "--times", "1,2;1.5,3;1,2")
    assert uneven["step_time"] > even
    assert [s["busy"] for s in uneven["per_stage"]] == [18.0, 27.0, 18.0]
    free, blocking = (asked(capsys, *sizes, "--p2p", "0.1", *more)["step_time"] for more in ([], ["--blocking"]))
    assert even < free < blocking


def test_the_dialect_is_the_one_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = asked(capsys, "1f1b", "--dialect", "paddle", "--stages", "2", "--micro-batches", "2")["jobs"]
    assert "RECV_F0" in jobs[1].split()
    plain = asked(capsys, "1f1b", "--stages", "2", "--micro-batches", "2")["jobs"]
    assert plain == ["F0 F1 B0 B1 OPT", "F0 B0 F1 B1 OPT"]


@pytest.mark.parametrize(
    "arguments",
    [["1f1b", "--stages", "4", "--micro-batches", "8"], ["zb_v", "--stages", "16", "--micro-batches", "64"],
     ["1f1b", "--stages", "128", "--micro-batches", "256"], ["dualpipe_v"], ["interleaved", "--chunks", "5"],
     ["--compare", ",".join(SCHEDULES)]],
)  # fmt: skip
def test_what_a_pipe_gets_fits_80_columns_without_colour(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["schedule", *arguments]) == 0
    out = capsys.readouterr().out
    assert max(len(row) for row in out.splitlines()) <= 80
    assert len(out.splitlines()) < 130
    assert "\x1b" not in out
    assert out.isascii()


def test_the_timeline_shows_every_job_of_a_small_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "1f1b", "--stages", "2", "--micro-batches", "3"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("stage ")]
    assert len(rows) == 2
    assert sorted(re.findall(r"[FB]\d", rows[0])) == ["B0", "B1", "B2", "F0", "F1", "F2"]
    assert re.findall(r"[FB]\d", rows[1]) == ["F0", "B0", "F1", "B1", "F2", "B2"]


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 40), st.integers(1, 40), st.integers(30, 200))
def test_rows_have_the_width_asked_for(name: str, stages: int, micro_batches: int, width: int) -> None:
    try:
        simulated = run_schedule(name, Question(stages=stages, micro_batches=micro_batches))
    except DistplanError:
        return
    for label, pieces in drawn(simulated, width):
        row = label + "".join(text for _, text in pieces)
        assert len(row) == width or not label.startswith("stage")
        assert {kind for kind, _ in pieces} <= {"F", "B", "I", "W", "O", ".", ""}


def test_csv_has_a_row_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "1f1b", "--stages", "3", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["stage"] for row in rows] == ["0", "1", "2"]
    assert {row["schedule"] for row in rows} == {"1f1b"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stages", "4"], "which schedule"),
        (["1f1c"], "did you mean 1f1b"),
        (["1f1b", "--chunks", "2"], "1 model chunk"),
        (["zb_v", "--chunks", "3"], "2 model chunk"),
        (["interleaved", "--micro-batches", "5"], "rounds of 4"),
        (["1f1b", "--dialect", "torch", "--micro-batches", "2"], "at least 4"),
        (["1f1b", "--dialect", "padle"], "did you mean paddle"),
        (["--compare", "1f1b,zb_h2"], "zb_h2"),
        (["--compare", "1f1b,zb_h1", "--dialect", "jax"], "jax"),
        (["1f1b", "--times", "1"], "F,B"),
        (["1f1b", "--times", "1,0"], "above 0"),
        (["1f1b", "--times", "1,2;1,2"], "4 are needed"),
        (["1f1b", "--times", "1,nan"], "nan"),
        (["1f1b", "--times", ""], "number is expected"),
        (["1f1b", "--p2p", "-1"], "--p2p"),
        (["1f1b", "--stages", "0"], "at least 1"),
        (["1f1b", "--stages", "100000"], "stages"),
        (["1f1b", "--micro-batches", "1000000"], "jobs"),
        (["zb_v", "--dialect", "paddle", "--stages", "32", "--micro-batches", "512"], "at most 32,768"),
        (["1f1b", "--format", "xml"], "--format xml"),
        (["1f1b", "--trace", "absent/folder/x.json"], "absent"),
    ],
)
def test_refusals_are_one_line_and_exit_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["schedule", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_times_of_stages() -> None:
    assert stage_times("1,2") == (StageTimes(forward=1.0, backward=2.0, input_gradient=1.0),)
    assert stage_times("1,1.5,0.5;2,4") == (
        StageTimes(forward=1.0, backward=2.0, input_gradient=1.5),
        StageTimes(forward=2.0, backward=4.0, input_gradient=2.0),
    )


def test_a_very_narrow_terminal_still_gets_rows() -> None:
    simulated = run_schedule("1f1b", Question(stages=4, micro_batches=8))
    assert all(label for label, pieces in drawn(simulated, 5) if len(pieces) > 1)


VALUES = st.one_of(st.text(max_size=12), st.integers(-3, 40).map(str), st.floats().map(str))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*SCHEDULES, "", "--", "1f1b,"]),
    options=st.lists(st.tuples(st.sampled_from(OPTIONS), VALUES), max_size=4, unique_by=lambda pair: pair[0]),
)
def test_whatever_is_typed_ends_with_a_result_or_one_sentence(
    name: str, options: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"{option}={value}" for option, value in options]
    assert run(["schedule", *given, name]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
