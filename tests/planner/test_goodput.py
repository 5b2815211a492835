"""Days, money and GPU counts with failures, as typed and as answered."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distplan.costmodel.goodput import Interruptions, goodput
from distplan.hardware.cluster import load_cluster
from distplan.hardware.errors import DistplanError
from distplan.hardware.reliability import reliability_of
from distplan.planner.cli import run
from distplan.planner.inputs import InputError
from distplan.planner.questions import training
from distplan.planner.questions_goodput import goodput_asked, refined

JOB = ["estimate", "llama-3.1-8b", "--gpus", "8", "--tp", "2", "--global-batch", "64", "--seq-len", "4096"]
DOC = (Path(__file__).resolve().parents[2] / "docs" / "goodput.md").read_text(encoding="utf-8")
STOPS = Interruptions(
    checkpoint_bytes=5.68e12,
    mtbf_gpu_seconds=1.3e8,
    restart_seconds=600.0,
    checkpoint_bandwidth=1.2e8,
    copy_bandwidth=6e10,
)
OWN = """
accelerator: h100-sxm
gpus_per_node: 8
scaleup: {technology: nvlink4, bandwidth: 450 GB/s}
fabric: {technology: infiniband, bandwidth: 400 Gbit/s}
reliability:
"""


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, list[dict[str, float]]]:
    assert run([*JOB, *options, "--format", "json"]) == 0
    shown: dict[str, list[dict[str, float]]] = json.loads(capsys.readouterr().out)
    return shown


# ---------------------------------------------------------------- days and money


@given(st.integers(1, 200).map(lambda nodes: 8 * nodes), st.floats(0.1, 50.0), st.floats(0.5, 300.0))
def test_elapsed_is_useful_over_goodput_and_the_count_needed_is_the_least(gpus: int, step: float, days: float) -> None:
    def train(count: int) -> dict[str, float]:
        made: dict[str, float] = training(
            gpus=count, node=8, step_seconds=step * gpus / count, tokens_per_step=4e6, price_per_gpu_hour=2.0,
            tokens=4e10, days=days, stops=STOPS,
        )  # fmt: skip
        return made

    shown = train(gpus)
    assert shown["elapsed_days"] == pytest.approx(shown["days"] / shown["goodput"])
    assert shown["elapsed_days"] > shown["days"] and shown["elapsed_cost"] > shown["cost"]
    assert shown["elapsed_gpu_hours"] == pytest.approx(24.0 * gpus * shown["elapsed_days"])
    assert shown["failures"] == pytest.approx(shown["elapsed_gpu_hours"] * 3600.0 / STOPS.mtbf_gpu_seconds)
    needed = shown["gpus_needed"]
    if needed is not None:
        assert needed % 8 == 0
        assert train(int(needed))["elapsed_days"] <= days * (1.0 + 1e-6)
        if needed > 8:
            assert train(int(needed) - 8)["elapsed_days"] > days * (1.0 - 1e-6)


def test_no_count_of_gpus_is_named_where_more_only_fail_more_often() -> None:
    shown = training(gpus=1024, node=8, step_seconds=1.0, tokens_per_step=4e6, price_per_gpu_hour=None, tokens=4e13,
                     days=0.01, stops=STOPS)  # fmt: skip
    assert shown["in_time"] is False and shown["gpus_needed"] is None
    never = training(gpus=100_000, node=8, step_seconds=1.0, tokens_per_step=4e6, price_per_gpu_hour=None, tokens=4e13,
                     stops=refined(STOPS, goodput_asked({"mtbf": "1 GPU-h"})))  # fmt: skip
    assert never["elapsed_days"] is None and never["goodput"] < 1e-6


def test_days_are_elapsed_days(capsys: pytest.CaptureFixture[str]) -> None:
    row = asked(capsys, "--tokens", "1T", "--mtbf", "2,000 GPU-h")["training"][0]
    between = str(0.5 * (row["days"] + row["elapsed_days"]))
    assert asked(capsys, "--tokens", "1T", "--days", between)["training"][0]["in_time"] is True
    late = asked(capsys, "--tokens", "1T", "--mtbf", "2,000 GPU-h", "--days", between)["training"][0]
    assert late["in_time"] is False and late["gpus_needed"] > 8


# ---------------------------------------------------------------- what is typed


def test_what_is_typed_wins_over_the_system_and_the_system_over_what_is_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(OWN + "  {mtbf: '10,000 GPU-h', restart_time: 30 min}\n")
    cluster = load_cluster(own)
    published = reliability_of(load_cluster("dgx-h100"))
    known = reliability_of(cluster)
    assert (known.mtbf_gpu_seconds, known.restart_seconds) == (3.6e7, 1800.0)
    assert known.checkpoint_bandwidth == published.checkpoint_bandwidth
    row = asked(capsys, "--hardware", str(own), "--goodput", "--restart-time", "1min")["goodput"][0]
    assert (row["mtbf_gpu_seconds"], row["restart_seconds"]) == (3.6e7, 60.0)
    assert row["checkpoint_write_seconds"] == pytest.approx(
        row["checkpoint_bytes"] / (8 * known.checkpoint_bandwidth), rel=1e-5
    )


@pytest.mark.parametrize(
    "wrong", ["{mtbf: 3 h}", "{mtbf: 0 GPU-h}", "{restart_time: soon}", "{checkpoint_bandwidth: 5}", "{mttf: 5 GPU-h}"]
)
def test_a_wrong_reliability_is_refused_with_its_line(wrong: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(OWN + f"  {wrong}\n")
    with pytest.raises(DistplanError, match=r"own\.yaml.*7.*reliability"):
        load_cluster(own)


def test_the_options_change_what_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    plain = asked(capsys, "--goodput")["goodput"][0]
    faster = asked(capsys, "--storage-bandwidth", "112 GB/s")["goodput"][0]
    assert faster["checkpoint_write_seconds"] == pytest.approx(plain["checkpoint_bytes"] / 112e9, rel=1e-5)
    behind = asked(capsys, "--async-checkpoint")["goodput"][0]
    assert behind["checkpoint_write_seconds"] == plain["checkpoint_write_seconds"] > behind["checkpoint_stall_seconds"]
    fixed = asked(capsys, "--checkpoint-interval", "30min")["goodput"][0]
    assert fixed["checkpoint_interval_seconds"] == pytest.approx(1800.0, rel=0.01)
    assert fixed["goodput"] < plain["goodput"]


def test_a_copy_in_the_background_needs_a_known_bandwidth_to_the_host() -> None:
    unknown = Interruptions(
        checkpoint_bytes=1e12, mtbf_gpu_seconds=1e8, restart_seconds=60.0, checkpoint_bandwidth=1e8, copy_bandwidth=None
    )
    with pytest.raises(InputError, match="pcie_bandwidth"):
        refined(unknown, goodput_asked({"async_checkpoint": True}))
    assert goodput(refined(STOPS, goodput_asked({})), 8, 1.0).stall_seconds == pytest.approx(5.68e12 / 8 / 1.2e8)


@pytest.mark.parametrize(
    "wrong",
    [["--mtbf", "3h"], ["--mtbf", "30000"], ["--restart-time", "10"], ["--storage-bandwidth", "2 TB"],
     ["--checkpoint-interval", "0s"]],
    ids=" ".join,
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*JOB, *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


# ---------------------------------------------------------------- what is shown


def test_reports_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    big = [
        "estimate",
        "llama-3.1-405b",
        "--gpus",
        "16384",
        "--tp",
        "8",
        "--pp",
        "16",
        "--vpp",
        "8",
        "--global-batch",
        "2048",
    ]
    big += ["--recompute", "full"]
    for job in (JOB, big):
        for more in ([], ["--async-checkpoint"], ["--mtbf", "1 GPU-h"]):
            assert run([*job, "--tokens", "1T", "--days", "3", "--goodput", *more]) == 0
            out = capsys.readouterr().out
            assert "Goodput" in out and "elapsed" in out
            assert "e+" not in out, "counts have no exponent"
            assert max(len(line) for line in out.splitlines()) <= 80


def test_a_sweep_counts_failures_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["sweep", "llama-3.1-8b", "--gpus", "8,16", "--tp", "2", "--pp", "1", "--cp", "1", "--seq-len", "4096", "-q"]
    line += ["--global-batch", "64", "--jobs", "1", "--results", str(tmp_path / "rows"), "--tokens", "1T", "--goodput"]
    shown = {}
    for name, more in (("known", []), ("worse", ["--mtbf", "2,000 GPU-h"])):
        assert run([*line, *more, "--format", "json"]) == 0
        shown[name] = json.loads(capsys.readouterr().out)["rows"]
    for known, worse in zip(shown["known"], shown["worse"], strict=True):
        assert known["elapsed_days"] == pytest.approx(known["days"] / known["goodput"], rel=1e-4)
        assert worse["goodput"] < known["goodput"] and worse["days"] == known["days"]
        assert "interruptions" not in known
    assert run(line) == 0
    out = capsys.readouterr().out
    assert "goodput" in out and max(len(text) for text in out.splitlines()) <= 80


# ---------------------------------------------------------------- docs/goodput.md

EXAMPLES = re.findall(r"```console\n\$ (distplan [^\n]+)\n(.*?)```", DOC, flags=re.DOTALL)


@pytest.mark.parametrize(("line", "shown"), EXAMPLES, ids=[line for line, _ in EXAMPLES])
def test_the_examples_of_the_docs_run(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split(line)[1:]) == 0
    assert shown.splitlines()[0] == capsys.readouterr().out.splitlines()[0]


def test_the_docs_list_every_published_figure() -> None:
    for fact in (fact for facts in reliability_of(load_cluster("dgx-h100")).facts.values() for fact in facts):
        assert fact.text.replace("_", ",") in DOC, fact.text
