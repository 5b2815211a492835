"""A sweep on a real Dask scheduler with real workers, started by the test."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distplan.planner import sweep
from distplan.planner.cli import run
from distplan.planner.sweep import Scenario

pytest.importorskip("distributed")
BOUNDS = {"tp": (1, 2), "pp": (1,), "cp": (1,)}
SCENARIOS = [
    Scenario(model="llama-3.2-1b", hardware="dgx-h100", gpus=gpus, seq_len=2048, global_batch=64, bounds=BOUNDS)
    for gpus in (8, 16, 32)
]
JOB = ["--seq-len", "2048", "--global-batch", "64", "--tp", "1,2", "--pp", "1", "--cp", "1", "-q"]


def spawn(arguments: list[str], log: Path) -> subprocess.Popen[str]:
    with log.open("w") as stream:
        return subprocess.Popen([sys.executable, "-m", "distributed.cli.dask_" + arguments[0], *arguments[1:]],
                                stdout=stream, stderr=stream, text=True)  # fmt: skip


def stop(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:  # distributed's worker at times waits for a scheduler that is gone
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a scheduler with two workers."""
    folder = tmp_path_factory.mktemp("dask")
    log = folder / "scheduler.log"
    started = [spawn(["scheduler", "--port", "0", "--no-dashboard", "--host", "127.0.0.1"], log)]
    try:
        deadline = time.monotonic() + 60.0
        found = None
        while found is None and time.monotonic() < deadline:
            time.sleep(0.2)
            found = re.search(r"(tcp://127\.0\.0\.1:\d+)", log.read_text())
        assert found, log.read_text()
        for number in range(2):
            worker = ["worker", found[1], "--nthreads", "1", "--no-dashboard", "--no-nanny",
                      "--local-directory", str(folder), "--host", "127.0.0.1"]  # fmt: skip
            started.append(spawn(worker, folder / f"worker{number}.log"))
        while log.read_text().count("Register worker") < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        yield found[1]
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            stop(process)


@pytest.mark.filterwarnings("ignore")
def test_a_cluster_gives_the_rows_that_one_process_gives(
    cluster: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from distplan.planner.sweep_cluster import cluster_executor

    with cluster_executor(cluster) as executor:
        rows, progress = sweep.run(SCENARIOS, executor=executor)
    assert rows == sweep.run(SCENARIOS, jobs=1)[0]
    assert progress.done == len(SCENARIOS)
    line = ["sweep", "llama-3.2-1b", "--gpus", "8,16", *JOB, "--format", "csv"]
    assert run([*line, "--cluster", cluster]) == 0
    there = capsys.readouterr().out
    assert run([*line, "--jobs", "1"]) == 0
    assert capsys.readouterr().out == there
    assert run([*line, "--cluster", cluster, "--jobs", "2"]) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense", "tcp://", "https://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distplan.planner.sweep_cluster.PATIENCE_SECONDS", 1)
    assert run(["sweep", "llama-3.2-1b", "--gpus", "8", *JOB, "--cluster", address]) == 2
    assert "--cluster" in capsys.readouterr().err
