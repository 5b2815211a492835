"""Stages that the user cuts by hand: priced, checked, written, exported and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from launching import job

from distplan.costmodel.balance import balance
from distplan.costmodel.by_stage import memory_by_stage
from distplan.costmodel.case import case_of
from distplan.costmodel.estimate import estimate
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster
from distplan.hardware.documents import load_mapping
from distplan.hardware.errors import DistplanError
from distplan.planner import api
from distplan.planner.cli import run
from distplan.planner.export import LAUNCHERS, export
from distplan.planner.import_file import import_file
from distplan.planner.plan_file import load_plan
from distplan.planner.search import RuleError

MODEL = load_model("llama-3.1-8b").model
WORK = workload(MODEL, {}, gpus=8, overrides={"global_batch": 64, "seq_len": 4096})
CLUSTER, MEGATRON = load_cluster("dgx-h100"), load_runtime("megatron")
EVEN = Strategy(pp=4, dp_shard=2)


def cut(*layers: int, **more: int | str) -> Strategy:
    return replace(EVEN, stage_layers=layers, **more)  # type: ignore[arg-type]


def test_the_default_cut_by_hand_costs_what_the_default_costs() -> None:
    plain = estimate(MODEL, WORK, CLUSTER, MEGATRON, EVEN, detail=True)
    by_hand = estimate(MODEL, WORK, CLUSTER, MEGATRON, cut(8, 8, 8, 8), detail=True)
    assert by_hand.step_seconds == plain.step_seconds
    assert by_hand.device_bytes == plain.device_bytes
    assert by_hand.kernel_flops == plain.kernel_flops


def test_a_heavier_stage_makes_the_step_longer_by_its_layers() -> None:
    """Every micro-batch waits for the heaviest stage: with many of them the step is as long as its layers."""
    many = replace(WORK, global_batch=1024)
    light = estimate(MODEL, many, CLUSTER, MEGATRON, cut(8, 12, 8, 4)).step_seconds[0]
    heavy = estimate(MODEL, many, CLUSTER, MEGATRON, cut(6, 15, 7, 4)).step_seconds[0]
    assert heavy / light == pytest.approx(15 / 12, rel=0.01)


def test_the_balanced_cut_by_hand_costs_what_balancing_said() -> None:
    uneven = estimate(MODEL, WORK, CLUSTER, MEGATRON, EVEN)
    best = balance(MODEL, WORK, CLUSTER, MEGATRON, EVEN, uneven)
    assert best is not None and best.layers != best.default_layers
    plan = api.estimate("llama-3.1-8b", cut(*best.layers), workload={"global_batch": 64, "seq_len": 4096})
    assert plan.best is not None and plan.best.balanced is None
    assert plan.best.step_seconds == pytest.approx(best.step_seconds, rel=1e-6)
    assert plan.best.estimate.device_bytes[0] == pytest.approx(best.device_bytes, rel=1e-6)


def test_every_stage_holds_the_layers_that_it_was_given() -> None:
    strategy = cut(2, 10, 12, 8)
    case = case_of(MODEL, WORK, CLUSTER, MEGATRON, strategy, estimate(MODEL, WORK, CLUSTER, MEGATRON, strategy))
    assert [run.content[1] for run in case.stages()] == [2, 10, 12, 8]
    parameters = [stage.parts["parameters"] for stage in memory_by_stage(case)]
    assert parameters[2] / parameters[1] == pytest.approx(12 / 10, rel=1e-6)


def test_rows_cut_differently_are_priced_apart_in_one_batch() -> None:
    rows = [EVEN, cut(8, 12, 8, 4), cut(8, 8, 8, 8), cut(4, 8, 8, 12)]
    together = estimate(MODEL, WORK, CLUSTER, MEGATRON, Strategies.of(rows)).step_seconds
    alone = [estimate(MODEL, WORK, CLUSTER, MEGATRON, row).step_seconds[0] for row in rows]
    assert np.array_equal(together, alone)
    assert [Strategies.of(rows)[i] for i in range(4)] == rows


@pytest.mark.parametrize(
    ("strategy", "runtime", "code"),
    [
        (cut(8, 8, 8, 7), "megatron", "DP019"),
        (cut(16, 16), "megatron", "DP019"),
        (cut(16, 0, 8, 8), "megatron", "DP019"),
        (cut(7, 9, 9, 7), "deepspeed", "DP020"),
        (cut(7, 9, 9, 7), "maxtext", "DP020"),
    ],
)
def test_what_does_not_hold_the_model_is_refused(strategy: Strategy, runtime: str, code: str) -> None:
    with pytest.raises(RuleError, match=code):
        api.estimate("llama-3.1-8b", strategy, runtime=runtime, workload={"global_batch": 64})


def test_numbers_that_do_not_divide_are_legal_by_hand() -> None:
    """61 layers on 7 stages: what the default refuses a layout may say."""
    plan = api.estimate(
        "deepseek-v3",
        Strategy(pp=7, ep=8, dp_shard=8, stage_layers=(8, 9, 9, 9, 9, 9, 8)),
        workload={"global_batch": 64},
    )
    assert plan.best is not None


def test_the_first_and_the_last_chunk_may_hold_the_embedding_and_the_head_alone() -> None:
    assert api.estimate("llama-3.1-8b", cut(0, 16, 16, 0), workload={"global_batch": 64}).best is not None


def test_the_command_line_takes_it_and_the_file_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    words = ["--pp", "4", "--dp-shard", "2", "--global-batch", "64", "--recompute", "full", "-q", "-o", str(file)]
    assert run(["estimate", "llama-3.1-8b", "--stage-layers", "7,9*2,7", *words]) == 0
    assert "layers 7, 9×2, 7" in capsys.readouterr().out
    assert load_plan(file).strategy.stage_layers == (7, 9, 9, 7)
    assert load_mapping(file).value["strategy"]["stage_layers"] == [7, 9, 9, 7]
    assert run(["estimate", "llama-3.1-8b", "--stage-layers", "7,x", *words]) == 2


def test_megatron_is_told_by_a_layout_and_it_is_read_back(tmp_path: Path) -> None:
    of = job(Strategy(pp=4, vpp=2, dp_shard=2, schedule="interleaved", stage_layers=(1, 2, 2, 2, 3, 2, 3, 1)))
    made = export(of, "megatron")
    assert "--pipeline-model-parallel-layout Et|tt|tt|tt|ttt|tt|ttt|tL" in made.text.replace('"', "").replace("'", "")
    file = tmp_path / "run.args"
    file.write_text(made.text)
    assert import_file(file).strategy == of.strategy
    file.write_text(made.text.replace("Et|", "E|"))
    with pytest.raises(Exception, match="15 layers"):
        import_file(file)


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if not name.startswith("megatron")])
def test_who_cannot_say_it_says_so(launcher: str) -> None:
    of = job(Strategy(pp=4, dp_shard=2, stage_layers=(3, 5, 5, 3)))
    assert "stage_layers" in {item.fact for item in export(of, launcher).unsaid}


def test_a_list_from_python_is_the_same_cut() -> None:
    given = Strategy(pp=2, stage_layers=[15, 17])  # type: ignore[arg-type]
    assert {given} == {Strategy(pp=2, stage_layers=(15, 17))}


@pytest.mark.parametrize("field", ["schedule", "cp_kind", "recompute"])
def test_an_unknown_word_of_a_strategy_is_refused_with_those_that_are_known(field: str) -> None:
    with pytest.raises(DistplanError, match=f"unknown {field} 'x'"):
        api.estimate("llama-3.1-8b", Strategy(dp_shard=8, **{field: "x"}))  # type: ignore[arg-type]
