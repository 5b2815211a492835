"""`distplan sweep`: every row is a search's own result, in order, whatever the number of processes; resumable."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from distplan.hardware.errors import DistplanError
from distplan.planner import api, sweep
from distplan.planner.cli import run
from distplan.planner.sweep import Scenario
from distplan.planner.sweep_store import open_store

BOUNDS = {"tp": (1, 2), "pp": (1,), "cp": (1,), "micro_batch": (1, 2)}
SCENARIO = Scenario(
    model="llama-3.2-1b", hardware="dgx-h100", gpus=8, seq_len=2048, global_batch=64, most_gpus=32, bounds=BOUNDS
)
SCENARIOS = [replace(SCENARIO, gpus=gpus) for gpus in (8, 16, 32)]
JOB = ["--seq-len", "2048", "--global-batch", "64", "--tp", "1,2", "--pp", "1", "--cp", "1", "--jobs", "1", "-q"]


def test_a_row_is_what_search_finds() -> None:
    row = sweep.solve(SCENARIO)
    job = api.setting("llama-3.2-1b", gpus=8, overrides={"seq_len": 2048, "global_batch": 64})
    best = api.search_setting(job, 8, bounds=BOUNDS).best
    assert best is not None
    assert row["step_seconds"] == pytest.approx(best.step_seconds, rel=1e-5)
    assert row["strategy"]["tp"] == best.strategy.tp
    assert row["tokens_per_second"] == pytest.approx(8 * row["tokens_per_second_per_gpu"], rel=1e-5)


def test_processes_change_neither_the_rows_nor_their_order() -> None:
    alone, _ = sweep.run(SCENARIOS, jobs=1)
    together, progress = sweep.run(SCENARIOS, jobs=2)
    assert alone == together
    assert (progress.done, progress.interrupted) == (3, False)
    assert [row["gpus"] for row in alone if row] == [8, 16, 32]


def test_what_does_not_fit_and_what_is_wrong_are_rows() -> None:
    small = replace(SCENARIO, limits=api.Limits(memory_limit_bytes=2.0 * 2**30))
    assert sweep.solve(small)["status"] == "nothing_fits"
    assert sweep.solve(replace(SCENARIO, gpus=7, bounds={"tp": (2,)}))["status"] == "nothing_legal"
    assert "unknown hardware" in sweep.solve(replace(SCENARIO, hardware="dgx-h1000"))["problem"]


def test_a_scaled_batch_grows_with_the_gpus() -> None:
    rows = [sweep.setting_of(replace(scenario, batch_over=8)).workload.global_batch for scenario in SCENARIOS]
    assert rows == [64, 128, 256]


def test_scaling_is_against_the_smallest_count(tmp_path: Path) -> None:
    rows, _ = sweep.run(SCENARIOS, jobs=1)
    shown = sweep.document(rows, tokens=1e12, days=30.0)["rows"]
    assert shown[0]["scaling"] == shown[0]["speedup"] == 1.0
    for row in shown:
        ratio = row["tokens_per_second_per_gpu"] / shown[0]["tokens_per_second_per_gpu"]
        assert row["scaling"] == pytest.approx(ratio, rel=1e-5)
        assert row["gpu_hours"] == pytest.approx(row["days"] * 24 * row["gpus"], rel=1e-4)


# ---------------------------------------------------------------- results on disk


def test_a_second_run_takes_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "r.jsonl")
    first, _ = sweep.run(SCENARIOS[:2], jobs=1, store=open_store(path))
    solved: list[int] = []
    honest = sweep.solve
    monkeypatch.setattr(sweep, "solve", lambda scenario: solved.append(scenario.gpus) or honest(scenario))
    rows, progress = sweep.run(SCENARIOS, jobs=1, store=open_store(path))
    assert solved == [32]
    assert progress.resumed == 2
    assert rows[:2] == first
    assert rows == sweep.run(SCENARIOS, jobs=1)[0]


def test_another_question_or_other_data_is_another_key() -> None:
    job = sweep.setting_of(SCENARIO)
    key = sweep.key_of(SCENARIO, job)
    assert key == sweep.key_of(SCENARIO, sweep.setting_of(SCENARIO))
    others = [replace(SCENARIO, gpus=16), replace(SCENARIO, allow_tight=True), replace(SCENARIO, bounds={})]
    assert len({key, *(sweep.key_of(other, sweep.setting_of(other)) for other in others)}) == 4
    changed = replace(job, model=replace(job.model, vocab=job.model.vocab + 128))
    assert sweep.key_of(SCENARIO, changed) != key


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_line_that_was_cut_short_is_done_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r.jsonl"
    rows, _ = sweep.run(SCENARIOS, jobs=1, store=open_store(str(path)))
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:cut])
    store = open_store(str(path))
    assert len(store.rows) == (3 if cut == -1 else 2)
    again, _ = sweep.run(SCENARIOS, jobs=1, store=store)
    assert again == rows
    assert path.read_text() == whole


@pytest.mark.parametrize("content", ["model: 1\nlayers: 2\n", '{"key": 1, "row": {}}\n', "[]\n[]\n", "a\nb\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(DistplanError):
        open_store(str(path))
    assert path.read_text() == content
    assert run(["sweep", "llama-3.2-1b", "--gpus", "8", *JOB, "--results", str(path)]) == 2
    assert path.read_text() == content


def test_results_that_cannot_be_written_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "no" / "r.jsonl", tmp_path, Path("/dev/full")):
        assert run(["sweep", "llama-3.2-1b", "--gpus", "8", *JOB, "--results", str(path)]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


# ---------------------------------------------------------------- the command


def test_an_interrupt_shows_what_is_done_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = sweep.solve
    calls: Iterator[int] = iter(range(10))

    def interrupted(scenario: Scenario) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return honest(scenario)

    monkeypatch.setattr(sweep, "solve", interrupted)
    path = tmp_path / "r.jsonl"
    assert run(["sweep", "llama-3.2-1b", "--gpus", "8,16", *JOB, "--results", str(path), "--format", "json"]) == 130
    out, err = capsys.readouterr()
    assert [row["gpus"] for row in json.loads(out)["rows"]] == [8]
    assert "the same command goes on from there" in err
    assert len(path.read_text().splitlines()) == 1


def test_every_format_and_the_plot(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["sweep", "llama-3.2-1b", "--gpus", "8,16", "--hardware", "dgx-h100,dgx-a100", *JOB, "--tokens", "1T"]
    assert run(line) == 0
    out = capsys.readouterr().out
    assert max(len(text) for text in out.splitlines()) <= 80
    assert out.count("█") > 10
    for said in ("scaling", "GPU-hours", "llama-3.2-1b on dgx-a100"):
        assert said in out
    assert run([*line, "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert run([*line, "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4


def test_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ([], ["--gpus", "8", "--hardware", "dgx-h1000"], ["--gpus", "x"], ["--gpus", "8", "--days", "2"]):
        assert run(["sweep", "llama-3.2-1b", *wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert run(["sweep", "llama-9", "--gpus", "8"]) == 2


def test_ctrl_c_ends_a_sweep_of_several_processes_at_once(tmp_path: Path) -> None:
    """A real signal to a real command: what is done is shown and kept, and no process stays behind."""
    results = tmp_path / "r.jsonl"
    counts = ",".join(str(8 * n) for n in range(1, 40))
    line = ["sweep", "llama-3.1-8b", "--gpus", counts, "--global-batch", "64", "--jobs", "2", "--results", str(results)]
    with subprocess.Popen([sys.executable, "-m", "distplan", *line], stdout=PIPE, stderr=PIPE, text=True) as started:
        deadline = time.monotonic() + 90.0
        while not results.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=30)
    assert started.returncode == 130, err
    assert "Traceback" not in err
    assert "llama-3.1-8b on dgx-h100" in out
    assert "the same command goes on from there" in err


def test_an_executor_of_someone_elses_is_used_and_left_open() -> None:
    with ThreadPoolExecutor(1) as executor:
        rows, _ = sweep.run(SCENARIOS[:2], executor=executor)
        assert executor.submit(int, 3).result() == 3
    assert rows == sweep.run(SCENARIOS[:2], jobs=1)[0]
