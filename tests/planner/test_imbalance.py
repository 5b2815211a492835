"""Experts that are not evenly loaded: a range of step time and memory beside what is expected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distplan.costmodel.model import Model, Moe
from distplan.costmodel.model_file import load_model
from distplan.costmodel.strategy import Strategy
from distplan.hardware.errors import DistplanError
from distplan.planner.api import estimate
from distplan.planner.cli import run
from distplan.planner.document import document
from distplan.planner.plan import Choice, Imbalance

STRATEGY = Strategy(ep=8, dp_shard=8, recompute="full", recompute_layers=16)


def priced(model: Model | str = "mixtral-8x7b", strategy: Strategy = STRATEGY, **workload: Any) -> Choice:
    best = estimate(model, strategy, workload={"global_batch": 64, "seq_len": 4096, **workload}).best
    assert best is not None
    return best


def with_capacity(factor: float) -> Model:
    model = load_model("mixtral-8x7b").model
    kinds = {}
    for name, kind in model.kinds.items():
        assert isinstance(kind.ffn, Moe)
        kinds[name] = replace(kind, ffn=replace(kind.ffn, capacity_factor=factor))
    return replace(model, kinds=kinds)


def found(choice: Choice) -> Imbalance:
    assert choice.imbalance is not None
    return choice.imbalance


def test_the_ends_of_the_range_are_what_those_loads_cost_alone() -> None:
    both = priced(moe_imbalance=[1.0, 1.2, 1.5])
    low, high = priced(moe_imbalance=1.0), priced(moe_imbalance=1.5)
    assert low.imbalance is None and high.imbalance is None
    assert (found(both).step_seconds_low, found(both).step_seconds_high) == (low.step_seconds, high.step_seconds)
    assert found(both).device_bytes_low == low.estimate.device_bytes[0]
    assert found(both).device_bytes_high == high.estimate.device_bytes[0]
    assert both.step_seconds == priced(moe_imbalance=1.2).step_seconds
    assert low.step_seconds < both.step_seconds < high.step_seconds


def test_of_two_numbers_the_middle_is_expected() -> None:
    assert found(priced(moe_imbalance=[1.0, 1.5])).expected == 1.25


def test_a_range_is_shown_unless_told_and_is_none_for_dense_models() -> None:
    assert found(priced()).high == pytest.approx(1.72)  # arXiv 2408.15664, table 2: 1 + MaxVio
    assert priced("llama-3.2-1b", Strategy(dp_shard=8)).imbalance is None


def test_a_rank_with_all_experts_has_no_more_than_its_tokens() -> None:
    alone = Strategy(dp_shard=8, zero=1)
    assert priced(strategy=alone, moe_imbalance=[1.0, 2.0]).imbalance is None
    assert (
        priced(strategy=alone, moe_imbalance=2.0).step_seconds == priced(strategy=alone, moe_imbalance=1.0).step_seconds
    )


def test_a_capacity_factor_bounds_what_an_expert_takes() -> None:
    bounded = with_capacity(1.25)
    assert priced(bounded, moe_imbalance=[1.0, 3.0]).imbalance is None
    assert priced(bounded, moe_imbalance=3.0).step_seconds == priced(bounded, moe_imbalance=1.0).step_seconds
    assert priced(bounded).step_seconds == priced(moe_imbalance=1.25).step_seconds


def test_model_flops_are_those_of_the_tokens_whatever_the_load() -> None:
    even = priced(moe_imbalance=1.0).estimate
    for other in (priced(moe_imbalance=2.0).estimate, priced(with_capacity(1.5)).estimate):
        assert other.model_flops == even.model_flops
        assert other.kernel_flops > even.kernel_flops


def test_memory_grows_by_the_slots_of_the_fullest_rank() -> None:
    """Dropless buffers are as long as the tokens that come: the same bytes for every further tenth."""
    at = [priced(moe_imbalance=1.0 + 0.1 * i).estimate.allocated_bytes[0] for i in range(3)]
    assert at[1] - at[0] > 0
    assert at[1] - at[0] == pytest.approx(at[2] - at[1], rel=1e-6)


@pytest.mark.parametrize("wrong", [[1.5, 1.0], [1.0, 1.1, 1.2, 1.3], 0.5, "x", []])
def test_what_is_no_range_is_refused(wrong: Any) -> None:
    with pytest.raises(DistplanError, match="moe_imbalance"):
        priced(moe_imbalance=wrong)


def test_the_command_line_says_it_and_the_file_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "s.yaml")
    words = ["mixtral-8x7b", "--ep", "8", "--dp-shard", "8", "--seq-len", "4096", "--global-batch", "64"]
    words += ["--recompute", "full", "--recompute-layers", "32", "--moe-imbalance", "1,1.1,1.6"]
    run(["estimate", *words, "-o", file, "-q"])
    first = " ".join(capsys.readouterr().out.split())
    assert "1 to 1.6 times the mean (expected 1.1)" in first
    run(["estimate", file, "-q"])
    assert "1 to 1.6 times the mean (expected 1.1)" in " ".join(capsys.readouterr().out.split())
    assert run(["estimate", *words[:-1], "a,b"]) == 2
    assert "--moe-imbalance a,b" in capsys.readouterr().err


def test_the_document_has_the_range() -> None:
    plan = estimate("mixtral-8x7b", STRATEGY, workload={"global_batch": 64, "moe_imbalance": [1.0, 1.5]})
    shown = document(plan)["best"]["imbalance"]
    assert (shown["low"], shown["expected"], shown["high"]) == (1.0, 1.25, 1.5)
    assert shown["step_seconds_low"] < shown["step_seconds_high"]


@pytest.mark.parametrize("text", ["nan", "1,nan", "nan,2,3", "inf", "0.5", "2,1", ",", "1,2,3,4"])
def test_an_imbalance_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN is neither below nor above a bound."""
    assert run(["estimate", "mixtral-8x7b", "--gpus", "8", "--ep", "8", "--moe-imbalance", text]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_python_refuses_a_number_that_is_none_too() -> None:
    with pytest.raises(DistplanError, match="nan"):
        priced(moe_imbalance=float("nan"))
