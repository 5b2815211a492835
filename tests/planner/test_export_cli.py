"""`distplan export` and `distplan import` at the command line: data on stdout, sentences on stderr, whole files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distplan.planner.cli import run
from distplan.planner.export import LAUNCHERS
from distplan.planner.plan_file import load_plan

MODEL = """\
name: small
layers: 8
hidden: 1024
heads: 16
kv_heads: 4
ffn: 4096
gated: true
vocab: 32000
max_seq_len: 4096
"""
STRATEGY = [
    "--gpus", "16", "--global-batch", "64", "--tp", "2", "--pp", "2", "--cp", "2", "--zero", "1",
    "--recompute", "full", "--recompute-layers", "2",
]  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """strategy.yaml of a small model, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.yaml").write_text(MODEL)
    assert run(["estimate", "model.yaml", *STRATEGY, "-o", "strategy.yaml", "-q"]) == 0
    capsys.readouterr()
    return tmp_path / "strategy.yaml"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_export_writes_the_file_and_says_what_it_cannot(
    launcher: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "strategy.yaml", "--to", launcher]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert err.splitlines()
    assert all(line.startswith("distplan: strategy.yaml: ") for line in err.splitlines())
    assert run(["export", "strategy.yaml", "--to", launcher, "-o", "out", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert Path("out").read_text() == out


@pytest.mark.parametrize("launcher", ["megatron", "deepspeed", "torchtitan", "accelerate"])
def test_import_gives_a_strategy_file_that_holds_the_same_strategy(
    launcher: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = {"deepspeed": "json", "accelerate": "yaml"}.get(launcher, "args")
    assert run(["export", "strategy.yaml", "--to", launcher, "-o", f"out.{suffix}"]) == 0
    imported = ["import", f"out.{suffix}", "--model", "model.yaml", "--runtime", "megatron", "-o", "again.yaml"]
    assert run(imported) == 0
    before, after = load_plan("strategy.yaml"), load_plan("again.yaml")
    assert after.strategy == before.strategy
    assert after.workload == before.workload
    assert after.model == before.model


def test_import_without_a_model_prints_the_strategy_and_the_command(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "strategy.yaml", "--to", "megatron", "-o", "out.args", "-q"]) == 0
    assert run(["import", "out.args"]) == 0
    out, _ = capsys.readouterr()
    content = yaml.safe_load(out)
    assert content["strategy"] == {key: value for key, value in yaml.safe_load(plan.read_text())["strategy"].items()}
    command = out.splitlines()[0].removeprefix("# distplan ").replace("MODEL", "model.yaml").split()
    assert run([*command, "-o", "again.yaml", "-q"]) == 0
    assert load_plan("again.yaml").strategy == load_plan(plan).strategy


def test_sizes_that_are_not_the_models_are_said(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "strategy.yaml", "--to", "megatron", "-o", "out.args", "-q"]) == 0
    text = Path("out.args").read_text().replace("--num-layers 8", "--num-layers 6")
    Path("out.args").write_text(text)
    assert run(["import", "out.args", "--model", "model.yaml"]) == 0
    assert "says layers = 6, small has 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "strategy.yaml"], "--to is missing: megatron, "),
        (["export", "strategy.yaml", "--to", "megatrn"], "did you mean megatron"),
        (["export", "model.yaml", "--to", "megatron"], "is not a strategy.yaml"),
        (["export", "nowhere.yaml", "--to", "megatron"], "nowhere.yaml: cannot be read"),
        (["export", "strategy.yaml", "--to", "megatron", "-o", "/dev/full"], "not a regular file"),
        (["export", "strategy.yaml", "--to", "megatron", "-o", "nowhere/out"], "nowhere/out: cannot be written"),
        (["import", "strategy.yaml"], "is a strategy of distplan already"),
        (["import", "strategy.yaml", "--from", "nanotron"], "unknown value"),
        (["import", "model.yaml"], "no launcher's file"),
        (["import", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    arguments: list[str], said: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "-q"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err and len(err.strip().splitlines()) == 1


def test_a_strategy_that_the_runtime_refuses_ends_in_code_3(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.args").write_text("--tensor-model-parallel-size 3 --global-batch-size 64\n")
    assert run(["import", "a.args", "--gpus", "3", "--model", "model.yaml"]) == 3
    assert "cannot run this strategy" in capsys.readouterr().err
