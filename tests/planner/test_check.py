"""`distplan check`: exit codes, budgets, baselines, formats, and the command lines of examples/ci."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distplan.planner import cli_check_options
from distplan.planner.check_budgets import BUDGETS
from distplan.planner.check_formats import annotation, junit, markdown
from distplan.planner.cli import run

ROOT = Path(__file__).resolve().parents[2]
MODEL = """\
name: small
layers: 8
hidden: 1024
heads: 16
kv_heads: 4
ffn: 4096
vocab: 32000
max_seq_len: 4096
"""
JOB = ["--gpus", "8", "--global-batch", "64", "--seq-len", "2048", "-q"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.yaml and two strategies of it: strategy.yaml, and old.yaml, which recomputes all."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "model.yaml").write_text(MODEL)
    assert run(["search", str(folder / "model.yaml"), *JOB, "-o", str(folder / "strategy.yaml")]) == 0
    slower = ["--tp", "2", "--pp", "2", "--recompute", "full", "--price", "2 USD/h", "-o", str(folder / "old.yaml")]
    assert run(["estimate", str(folder / "model.yaml"), *JOB, *slower]) == 0
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same files, to be changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    for name in ("strategy.yaml", "old.yaml"):
        (tmp_path / name).write_text((written / name).read_text())
    return tmp_path


def change(name: str, pattern: str, new: str) -> None:
    text = Path(name).read_text()
    changed = re.sub(pattern, new, text, count=1, flags=re.MULTILINE)
    assert changed != text
    Path(name).write_text(changed)


def checks(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> list[dict[str, object]]:
    capsys.readouterr()
    assert run(["check", *arguments, "--format", "json"]) == code
    files = json.loads(capsys.readouterr().out)["files"]
    return [each for file in files for each in file["checks"]]


def result_of(found: list[dict[str, object]], name: str) -> object:
    return next(each["result"] for each in found if each["name"] == name)


# ---------------------------------------------------------------- exit codes


def test_what_search_wrote_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "strategy.yaml", "old.yaml"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "strategy.yaml: holds" in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("option", "kept", "broken"),
    [
        ("--max-memory", "79GiB", "1GiB"),
        ("--min-headroom", "1%", "99.9%"),
        ("--max-step-time", "1h", "1ms"),
        ("--min-mfu", "0.01", "99%"),
        ("--min-tokens-per-second", "1", "1e9"),
        ("--max-gpus", "8", "7"),
        ("--max-bubble", "99%", "0%"),
        ("--max-exposed", "99%", "0%"),
        ("--max-cost", "1000 USD", "0 USD"),
    ],
)
def test_every_budget_can_be_kept_and_broken(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, kept: str, broken: str
) -> None:
    name = option.removeprefix("--")
    assert result_of(checks(capsys, "old.yaml", option, kept, code=0), name) == "ok"
    assert result_of(checks(capsys, "old.yaml", option, broken, code=4), name) == "broken"
    assert result_of(checks(capsys, "old.yaml", option, broken, "--warn-only", code=0), name) == "broken"


def test_the_cases_above_are_all_budgets() -> None:
    mark = test_every_budget_can_be_kept_and_broken.pytestmark[0]
    assert [row[0] for row in mark.args[1]] == [f"--{budget.option}" for budget in BUDGETS]


def test_options_are_those_of_the_budgets() -> None:
    assert [name for name, _, _ in cli_check_options._BUDGETS] == [b.option.replace("-", "_") for b in BUDGETS]
    assert [takes for _, takes, _ in cli_check_options._BUDGETS] == [b.takes for b in BUDGETS]


def test_a_cost_without_a_price_is_no_pass(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change("old.yaml", "price_per_gpu_hour: .*", "price_per_gpu_hour: null")
    change("old.yaml", r"hardware:\n  id: dgx-h100\n  digest: .*", "hardware:\n  id: own\n  content:\n"
           "    accelerator: h100-sxm\n    gpus_per_node: 8\n"
           "    scaleup: {technology: nvlink4, bandwidth: 450 GB/s}\n"
           "    fabric: {technology: infiniband, bandwidth: 50 GB/s}")  # fmt: skip
    assert result_of(checks(capsys, "old.yaml", "--max-cost", "1000 USD", code=4), "max-cost") == "broken"


def test_a_rule_that_is_broken_cannot_run_and_names_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change("old.yaml", "  tp: 2", "  tp: 3")
    found = checks(capsys, "old.yaml", code=3)
    broken = next(each for each in found if each["name"] == "DP004")
    line = Path("old.yaml").read_text().splitlines()[int(str(broken["line"])) - 1]
    assert line == "  tp: 3"
    assert "legal: tp=1, tp=2, tp=4" in str(broken["message"])
    assert checks(capsys, "old.yaml", "--warn-only", code=0)


def test_what_does_not_fit_cannot_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change("old.yaml", "memory_limit_bytes: null", "memory_limit_bytes: 1000000000")
    assert result_of(checks(capsys, "old.yaml", code=3), "fits") == "cannot_run"


def test_tight_is_broken_unless_allowed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = yaml.safe_load(Path("old.yaml").read_text())["estimate"]["device_bytes"]
    change("old.yaml", "memory_limit_bytes: null", f"memory_limit_bytes: {device * 1.0001:.0f}")
    assert result_of(checks(capsys, "old.yaml", code=4), "fits") == "broken"
    assert result_of(checks(capsys, "old.yaml", "--allow-tight", code=0), "fits") == "ok"


def test_a_changed_reference_is_reported_and_no_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change("strategy.yaml", r"(id: dgx-h100\n  digest: sha256:).*", r"\g<1>0123456789abcdef")
    assert result_of(checks(capsys, "strategy.yaml", code=0), "references") == "warning"


def test_a_recorded_estimate_of_another_version_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change("strategy.yaml", r"^  step_seconds: .*", "  step_seconds: 1000.0")
    assert result_of(checks(capsys, "strategy.yaml", code=0), "recorded") == "warning"


@pytest.mark.parametrize("content", ["", "a: [", "layers: 3", "format_version: '9'\nstrategy: {}"])
def test_a_bad_file_is_two_and_the_others_are_still_checked(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    Path("bad.yaml").write_text(content)
    assert result_of(checks(capsys, "bad.yaml", "strategy.yaml", "--warn-only", code=2), "rules") == "ok"
    assert run(["check", "bad.yaml"]) == 2
    assert run(["check", "absent.yaml"]) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ["--max-memory", "76"], ["--min-mfu", "40"], ["--min-mfu", "much"], ["--max-step-time", "5"],
        ["--fail-if-slower", "3%"], ["--baseline", "absent.yaml"], ["--format", "sarif"], ["--max-gpus", "-1"],
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_two(folder: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    assert run(["check", "strategy.yaml", *wrong]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1


# ---------------------------------------------------------------- baselines


def test_slower_than_the_baseline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert result_of(checks(capsys, "old.yaml", "--baseline", "strategy.yaml", code=0), "baseline") == "ok"
    slower = ["--baseline", "strategy.yaml", "--fail-if-slower", "3%"]
    assert result_of(checks(capsys, "old.yaml", *slower, code=4), "baseline") == "broken"
    faster = ["--baseline", "old.yaml", "--fail-if-slower", "0%"]
    assert result_of(checks(capsys, "strategy.yaml", *faster, code=0), "baseline") == "ok"
    assert checks(capsys, "strategy.yaml", "--baseline", "strategy.yaml", "--fail-if-slower", "0%", code=0)


def test_a_baseline_that_cannot_run_compares_nothing(folder: Path) -> None:
    change("old.yaml", "  tp: 2", "  tp: 3")
    assert run(["check", "strategy.yaml", "--baseline", "old.yaml", "--fail-if-slower", "3%"]) == 2


# ---------------------------------------------------------------- formats


def test_annotations_point_at_the_line_and_the_summary_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    change("old.yaml", "  tp: 2", "  tp: 3")
    assert run(["check", "old.yaml", "strategy.yaml", "--format", "github"]) == 3
    out = capsys.readouterr().out
    assert re.search(r"^::error file=old\.yaml,line=\d+,title=distplan DP004::16 heads do not divide", out, re.M)
    assert "::notice file=strategy.yaml" in out
    assert "old.yaml: cannot run" in Path("summary.md").read_text()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder))
    assert run(["check", "strategy.yaml", "--format", "github"]) == 2


@given(st.text(), st.text(), st.text())
def test_no_text_breaks_out_of_an_annotation(message: str, file: str, title: str) -> None:
    line = annotation("error", message, file=file, line=3, title=title)
    assert len(line.splitlines()) == 1
    head = line.split("::")[1]
    assert head.count(",") == len([value for value in (file, "3", title) if value]) - 1


@given(st.text(min_size=1), st.text())
def test_junit_is_xml_and_markdown_keeps_its_cells_whatever_is_in_a_name(name: str, message: str) -> None:
    one = {"name": name, "result": "broken", "level": "error", "message": message, "key": None, "line": None}
    ok = one | {"result": "ok"}
    shown = {"files": [{"file": name, "status": "broken", "summary": None, "checks": [one, ok]}],
             "warn_only": False, "baseline": None}  # fmt: skip
    root = ET.fromstring(junit(shown))
    assert [len(root.findall(f".//{kind}")) for kind in ("testcase", "failure")] == [2, 1]
    rows = [line for line in markdown(shown).split("\n") if line.startswith("| ")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)
    assert not any(mark in "".join(rows) for mark in ("<", "@"))


def test_every_format_says_what_is_broken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for form in ("table", "json", "yaml", "csv", "markdown", "github", "junit"):
        assert run(["check", "strategy.yaml", "--max-gpus", "4", "--format", form]) == 4
        texts[form] = capsys.readouterr().out
        assert "max-gpus" in texts[form]
    assert yaml.safe_load(texts["yaml"]) == json.loads(texts["json"])
    rows = list(csv.DictReader(io.StringIO(texts["csv"])))
    assert [row["result"] for row in rows if row["name"] == "max-gpus"] == ["broken"]
    suite = ET.fromstring(texts["junit"])[0]
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")


def test_markdown_has_before_and_after(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "strategy.yaml", "--baseline", "old.yaml", "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert "|  | before | after | change |" in out
    assert re.search(r"^\| step time \| [\d.]+ s \| [\d.]+ s \| -[\d.]+ % \|$", out, re.M)


def test_the_same_check_prints_the_same_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        assert run(["check", "strategy.yaml", "old.yaml", "--format", "json"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


# ---------------------------------------------------------------- examples/ci


def commands_of(name: str) -> list[str]:
    """Command lines of distplan in an example."""
    text = (ROOT / "examples" / "ci" / name).read_text()
    return re.findall(r"(?:run:|-|entry:) (distplan .*)", text)


@pytest.mark.parametrize("name", ["github-workflow.yaml", "gitlab-ci.yaml", "pre-commit-config.yaml"])
def test_the_command_lines_of_the_examples_run(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert yaml.safe_load((ROOT / "examples" / "ci" / name).read_text())
    (folder / "plans").mkdir()
    Path("strategy.yaml").rename("plans/strategy.yaml")
    found = commands_of(name)
    assert found
    for line in found:
        words = shlex.split(line)
        if ">" in words:
            words = words[: words.index(">")]
        if name.startswith("pre-commit"):
            words.append("plans/strategy.yaml")
        words = ["1%" if word == "30%" else word for word in words]  # the small model of this test has a low MFU
        assert run(words[1:]) == 0, line
