"""Traces for the Chrome and Perfetto viewers."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from distplan.planner.cli import run


def checked(path: Path) -> list[dict[str, Any]]:
    """Events of a valid trace: known phases, numbers where numbers belong, boxes of a thread apart or nested."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = trace["traceEvents"]
    lanes = defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "M", "C")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] > 0.0
            assert event["ts"] >= 0.0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(lane)):
            assert start >= end - 1e-6 * max(1.0, end)
    return events


def named(events: list[dict[str, Any]], what: str) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == what]


def test_a_schedule_as_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    sizes = ["--stages", "3", "--micro-batches", "5", "--p2p", "0.1"]
    assert run(["schedule", "1f1b", *sizes, "--trace", str(path), "-q"]) == 0
    events = checked(path)
    assert named(events, "process_name") == ["stage 0", "stage 1", "stage 2"]
    computed = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert len(computed) == 3 * 5 * 2
    assert sum(event["dur"] for event in computed) == pytest.approx(3 * 5 * 3 * 1e6)
    sent = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert len(sent) == 2 * 2 * 5  # two boundaries, both ways


def test_schedules_compared_stand_below_each_other(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert run(["schedule", "--compare", "1f1b,zb_h1", "--stages", "2", "--trace", str(path), "-q"]) == 0
    assert named(checked(path), "process_name") == ["1f1b stage 0", "1f1b stage 1", "zb_h1 stage 0", "zb_h1 stage 1"]


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (tmp_path / "old.json").write_text("mine")
    assert run(["schedule", "1f1b", "--trace", str(target)]) == 2
    assert run(["schedule", "1f1b", "--micro-batches", "0", "--trace", str(tmp_path / "old.json")]) == 2
    assert (tmp_path / "old.json").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "old.json"]


MODEL = "name: small\nlayers: 8\nhidden: 1024\nheads: 16\nkv_heads: 4\nffn: 4096\ngated: true\nvocab: 32000\n"
JOB = ["--gpus", "8", "--global-batch", "32", "--seq-len", "2048", "--pp", "2", "--tp", "2", "--sp"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text(MODEL)
    return "model.yaml"


def test_a_strategys_step_as_a_trace(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", model, *JOB, "--trace", "out.json", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert "wrote out.json" in err
    best = json.loads(out)["best"]
    events = checked(Path("out.json"))
    assert named(events, "process_name") == ["stage 0", "stage 1"]
    assert set(named(events, "thread_name")) == {"compute", "p2p", "tp communication", "dp communication"}
    boxes = [event for event in events if event["ph"] == "X"]
    assert max(box["ts"] + box["dur"] for box in boxes) == pytest.approx(best["step_seconds"] * 1e6, rel=1e-5)
    names = {box["name"] for box in boxes}
    assert {"F 0", "B 15", "gradient reduction", "optimizer", "tp reduce scatter"} <= names
    held = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert 0 < max(held) <= best["device_bytes"]


def test_the_timeline_below_the_report(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", model, *JOB]) == 0
    plain = capsys.readouterr().out
    for option in ("--timeline", "-v"):
        assert run(["estimate", model, *JOB, option]) == 0
        longer = capsys.readouterr().out
        assert longer.startswith(plain)
        added = longer[len(plain) :]
        assert "Pipeline: 1f1b, 16 of 16 micro-batches" in added
        assert "stage 1 |" in added
        assert max(len(row) for row in longer.splitlines()) <= 80


def test_a_trace_that_cannot_be_written_is_exit_2(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", model, *JOB, "--trace", "absent/out.json"]) == 2
    assert "absent/out.json" in capsys.readouterr().err
