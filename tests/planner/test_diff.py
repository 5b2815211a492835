"""`distplan diff`: what differs between two strategy files, and that nothing differs from itself."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from distplan.planner.check import evaluate
from distplan.planner.cli import run
from distplan.planner.diff import diff

JOB = ["--gpus", "16", "--global-batch", "64", "--seq-len", "2048", "-q"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    a, b = str(folder / "a.yaml"), str(folder / "b.yaml")
    assert run(["estimate", "llama-3.1-8b", *JOB, "--tp", "8", "-o", a]) == 0
    assert run(["estimate", "llama-3.1-8b", *JOB, "--tp", "4", "--pp", "2", "--loss", "fp32_logits", "-o", b]) == 0
    return a, b


def test_a_file_does_not_differ_from_itself(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", plans[0], plans[0], "--exit-code"]) == 0
    assert "no difference" in capsys.readouterr().out


def test_parts_add_up_to_the_difference_of_the_totals(plans: tuple[str, str]) -> None:
    shown = diff(evaluate(plans[0]), evaluate(plans[1]))
    totals = {row["name"]: row for row in shown["totals"]}
    for part, total in (("time", "step_seconds"), ("memory", "device_bytes")):
        parts = sum(row["difference"] for row in shown[part])
        assert parts == pytest.approx(totals[total]["difference"], rel=1e-3)


def test_both_directions_say_the_same(plans: tuple[str, str]) -> None:
    there, back = (diff(evaluate(a), evaluate(b)) for a, b in (plans, plans[::-1]))
    assert [(row["field"], row["a"], row["b"]) for row in there["strategy"]] == [
        (row["field"], row["b"], row["a"]) for row in back["strategy"]
    ]
    assert {row["name"]: row["difference"] for row in there["memory"]} == {
        row["name"]: -row["difference"] for row in back["memory"]
    }


def test_strategy_setting_and_communication_are_named(
    plans: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", *plans, "--format", "json", "--exit-code"]) == 4
    shown = json.loads(capsys.readouterr().out)
    assert {row["field"] for row in shown["strategy"]} == {"tp", "pp"}
    assert [(row["section"], row["field"]) for row in shown["setting"]] == [("workload", "loss")]
    axes = {row["axis"]: row for row in shown["communication"]}
    assert axes["pp"]["wire_bytes_a"] == 0.0 < axes["pp"]["wire_bytes_b"]


@pytest.mark.parametrize("form", ["table", "yaml", "csv", "markdown", "github", "junit"])
def test_every_format_names_the_field(plans: tuple[str, str], capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert run(["diff", *plans, "--format", form]) == 0
    out = capsys.readouterr().out
    assert "fp32" in out
    if form == "table":
        assert max(len(line) for line in out.splitlines()) <= 80
    if form == "junit":
        assert ET.fromstring(out).findall(".//testcase")


def test_what_cannot_run_is_three_and_still_compared(
    plans: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(Path(plans[0]).read_text().replace("  tp: 8", "  tp: 3"))
    assert run(["diff", plans[0], str(broken)]) == 3
    out, err = capsys.readouterr()
    assert "tp" in out
    assert "cannot run" in err
