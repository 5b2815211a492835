"""The questions users bring: each answer is checked by asking the estimate itself."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import with_compute_scaled, with_network_scaled
from distplan.hardware.errors import UnitError
from distplan.planner import api
from distplan.planner.cli import run
from distplan.planner.questions import measured, parse_days, parse_tokens, training
from distplan.planner.questions_crossover import crossover, parse_family, with_fabric
from distplan.planner.questions_limits import STEP, Candidates, limits

ROOT = Path(__file__).resolve().parents[2]
STRATEGY = Strategy(tp=2, pp=2, dp_shard=2, sp=True)


def setting(model: str = "llama-3.1-8b", gpus: int = 8, **overrides: Any) -> api.Setting:
    return api.setting(model, gpus=gpus, overrides={"global_batch": 64, "seq_len": 4096} | overrides)


def verdict(job: api.Setting, strategy: Strategy) -> str:
    best = api.estimate_setting(job, strategy).best
    assert best is not None
    return best.verdict


# ---------------------------------------------------------------- limits


def test_the_longest_sequence_fits_and_the_next_does_not() -> None:
    job = setting()
    shown = limits(job, Candidates(gpus=8, strategy=STRATEGY), {}, of="seq-len")
    longest = shown["largest"]
    assert verdict(setting(seq_len=longest), STRATEGY) == "fits"
    assert verdict(setting(seq_len=longest + STEP), STRATEGY) != "fits"
    assert shown["rows"][-1]["value"] == longest
    assert shown["binds"]["bytes_over"] > 0.0
    tight = limits(job, Candidates(gpus=8, strategy=STRATEGY), {}, of="seq-len", allow_tight=True)
    assert tight["largest"] >= longest


def test_within_bounds_the_best_strategy_may_change_with_the_length() -> None:
    bounds = {"tp": (1, 2, 4), "pp": (1,), "cp": (1,), "micro_batch": (1,)}
    free = limits(setting(), Candidates(gpus=8), bounds, of="seq-len")
    one = limits(setting(), Candidates(gpus=8), bounds | {"tp": (1,)}, of="seq-len")
    assert free["largest"] > (one["largest"] or 0)
    assert {row["strategy"]["tp"] for row in free["rows"]} <= {1, 2, 4}


def test_the_largest_micro_batch_fits_and_is_a_divisor_of_the_batch() -> None:
    job = setting()
    shown = limits(job, Candidates(gpus=8, strategy=STRATEGY), {}, of="micro-batch")
    largest = shown["largest"]
    assert verdict(job, replace(STRATEGY, micro_batch=largest)) == "fits"
    assert all(64 % (row["value"] * STRATEGY.dp) == 0 for row in shown["rows"])
    fastest = max(shown["rows"], key=lambda row: row["tokens_per_second_per_gpu"])
    assert shown["fastest"] == fastest["value"]


def test_a_table_of_positions_ends_the_sequence() -> None:
    bounds = {"tp": (1,), "pp": (1,), "cp": (1,)}
    shown = limits(setting("gpt2", seq_len=1024), Candidates(gpus=8), bounds, of="seq-len")
    assert shown["largest"] == 1024
    assert shown["binds"] is None


def test_limits_at_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.yaml"
    job = ["--gpus", "8", "--tp", "2", "--global-batch", "64", "--seq-len", "4096", "-q"]
    assert run(["estimate", "llama-3.1-8b", *job, "-o", str(path)]) == 0
    capsys.readouterr()
    assert run(["limits", str(path), "--of", "micro-batch"]) == 0
    out = capsys.readouterr().out
    assert "largest micro-batch that fits" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    none = ["--gpus", "1", "--tp", "1", "--global-batch", "8", "--memory-limit", "10GiB"]
    assert run(["limits", "llama-3.1-70b", *none]) == 3
    assert "none fits" in capsys.readouterr().out
    for wrong in (["--of", "layers"], ["--seq-len", "4096"], [], ["--gpus", "8,16"]):
        assert run(["limits", "llama-3.1-8b", "--gpus", "8", *wrong] if wrong else ["limits", "llama-3.1-8b"]) == 2
    assert run(["limits", str(path), "--gpus", "8"]) == 2


# ---------------------------------------------------------------- crossover

FIRST = parse_family("--a", "zero=3 tp=1 pp=1 cp=1 micro_batch=1 dp_replicate=1")
SECOND = parse_family("--b", "zero=0,1 tp=8 pp=2 cp=1 micro_batch=1 schedule=1f1b")


def test_the_order_changes_at_the_crossing() -> None:
    job = api.setting("llama-3.1-8b", gpus=16, runtime="any", overrides={"global_batch": 64, "seq_len": 4096})
    shown = crossover(job, 16, FIRST, SECOND)
    assert len(shown["crossings"]) == 1
    crossing = shown["crossings"][0]
    factor = crossing["bandwidth"] / shown["bandwidth"]
    order = []
    for scale in (0.95, 1.05):
        there = replace(job, cluster=with_fabric(job.cluster, factor * scale, 16))
        plans = [api.search_setting(there, 16, bounds=bounds, top=1).best for bounds in (FIRST, SECOND)]
        assert plans[0] is not None
        assert plans[1] is not None
        order.append(plans[0].step_seconds < plans[1].step_seconds)
    assert order == [False, True]
    assert crossing["above"] == "first"


def test_only_links_that_the_job_uses_are_scaled() -> None:
    cluster = setting().cluster
    inside, outside = (with_fabric(cluster, 0.5, gpus) for gpus in (8, 16))
    assert [tier.bandwidth for tier in inside.tiers] == [cluster.tiers[0].bandwidth / 2, cluster.tiers[1].bandwidth]
    assert [tier.bandwidth for tier in outside.tiers] == [cluster.tiers[0].bandwidth, cluster.tiers[1].bandwidth / 2]


@pytest.mark.parametrize("wrong", ["", "zero", "zero=4", "dp_split=2", "tp=0", "cp_kind=rings"])
def test_a_family_that_is_none_is_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["crossover", "llama-3.1-8b", "--gpus", "16", "--a", wrong]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


# ---------------------------------------------------------------- a measured step


def test_a_measured_time_within_the_band_is_reasonable_and_outside_is_not() -> None:
    plan = api.estimate_setting(setting(), STRATEGY)
    assert plan.best is not None
    expected = plan.best.step_seconds
    found = measured(plan, expected)
    assert (found["verdict"], found["ratio"]) == ("reasonable", 1.0)
    assert found["mfu"] == found["expected_mfu"]
    assert measured(plan, expected * 3)["verdict"] == "slow"
    assert measured(plan, expected / 3)["verdict"] == "fast"


def test_a_share_of_the_network_or_compute_gives_the_measured_time() -> None:
    job = setting()
    plan = api.estimate_setting(job, STRATEGY)
    assert plan.best is not None
    seconds = 2.0 * plan.best.step_seconds
    causes = {cause["what"].split()[1]: cause for cause in measured(plan, seconds)["causes"] if cause["share"]}
    for name, scaled in (("network", with_network_scaled), ("compute", with_compute_scaled)):
        slow = replace(job, cluster=scaled(job.cluster, causes[name]["share"]))
        again = api.estimate_setting(slow, STRATEGY).best
        assert again is not None
        assert again.step_seconds == pytest.approx(seconds, rel=1e-3)


def test_what_alone_explains_a_time_is_named() -> None:
    job = setting()
    unfused = api.estimate_setting(replace(job, workload=replace(job.workload, attention="unfused")), STRATEGY).best
    assert unfused is not None
    causes = measured(api.estimate_setting(job, STRATEGY), unfused.step_seconds)["causes"]
    assert next(cause for cause in causes if "fused" in cause["what"])["explains"]


# ---------------------------------------------------------------- training


@given(st.floats(1e6, 1e14), st.integers(1, 4096), st.floats(0.01, 100.0))
def test_training_is_arithmetic(tokens: float, gpus: int, step: float) -> None:
    shown = training(gpus=gpus, node=8, step_seconds=step, tokens_per_step=4e6, price_per_gpu_hour=2.0, tokens=tokens,
                     days=30.0)  # fmt: skip
    assert shown["steps"] == math.ceil(tokens / 4e6)
    assert shown["gpu_hours"] == pytest.approx(shown["days"] * 24.0 * gpus)
    assert shown["cost"] == pytest.approx(2.0 * shown["gpu_hours"])
    assert shown["in_time"] == (shown["days"] <= 30.0)
    days_with_needed = shown["days"] * gpus / shown["gpus_needed"]
    assert days_with_needed <= 30.0 * (1.0 + 1e-6)
    fewer = shown["gpus_needed"] - 8
    assert fewer == 0 or shown["days"] * gpus / fewer > 30.0 * (1.0 - 1e-6)


@pytest.mark.parametrize(("text", "tokens"), [("15T", 15e12), ("300B", 3e11), ("1.4e12", 1.4e12), ("2,000,000", 2e6)])
def test_tokens_are_read(text: str, tokens: float) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "15X", "nan", "-1", "1e30", "0", "infT"])
def test_what_is_no_number_of_tokens_or_days_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_tokens(text)
    with pytest.raises(UnitError):
        parse_days(text)


def test_answers_stand_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["estimate", "llama-3.1-8b", "--gpus", "8", "--tp", "2", "--global-batch", "64", "--seq-len", "4096"]
    asked = ["--tokens", "1T", "--days", "30", "--measured", "60s"]
    assert run([*job, *asked, "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["measured"]["verdict"] == "slow"
    assert shown["training"][0]["gpus"] == 8
    assert run([*job, *asked]) == 0
    out = capsys.readouterr().out
    assert "To train 1 T tokens" in out
    assert "Measured 60.000 s" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    for wrong in (["--days", "3"], ["--tokens", "many"], ["--measured", "12"], ["--measured", "0s"]):
        assert run([*job, *wrong]) == 2


# ---------------------------------------------------------------- docs/questions.md

DOC = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ (distplan [^\n]+)\n([^\n]*)\n", DOC)


def test_the_document_has_an_example_for_every_question() -> None:
    assert len(EXAMPLES) == len(re.findall(r"^## ", DOC, re.MULTILINE)) >= 8


@pytest.mark.parametrize(("line", "first"), EXAMPLES, ids=[line for line, _ in EXAMPLES])
def test_the_examples_run(
    line: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = ["--tp", "2", "--pp", "2", "--global-batch", "64", "--seq-len", "4096", "-q", "-o", "strategy.yaml"]
    assert run(["estimate", "llama-3.1-8b", "--gpus", "8", *made]) == 0
    capsys.readouterr()
    assert run(shlex.split(line)[1:]) in (0, 3)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == first
    assert max(len(text) for text in out.splitlines()) <= 80
