"""The report and the formats: complete, within 80 columns, the same data everywhere."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml
from rich.console import Console

from distplan.costmodel.balance import BalancedSplit
from distplan.costmodel.strategy import Strategy
from distplan.planner.document import document
from distplan.planner.output import csv_text, json_text, yaml_text
from distplan.planner.plan import NothingFits, NothingLegal, OtherRuntime, Plan, Sensitivity
from distplan.planner.report import draw


def drawn(shown: dict[str, Any]) -> str:
    stream = io.StringIO()
    draw(shown, Console(file=stream, width=80, color_system=None, highlight=False, markup=False))
    return stream.getvalue()


def test_parts_add_up_to_their_totals(invented_plan: Plan) -> None:
    best = document(invented_plan)["best"]
    assert sum(best["time"].values()) == pytest.approx(best["step_seconds"], rel=1e-5)
    assert sum(best["memory"].values()) == pytest.approx(best["device_bytes"], rel=1e-5)


def test_what_simulation_adds_is_a_part_of_its_own(invented_plan: Plan) -> None:
    assert invented_plan.best is not None
    simulated = replace(invented_plan.best, step_seconds=10.0, simulated_seconds=10.0)
    best = document(replace(invented_plan, best=simulated))["best"]
    assert best["time"]["schedule_wait"] == pytest.approx(1.0)
    assert sum(best["time"].values()) == pytest.approx(10.0, rel=1e-5)


def test_communication_is_summed_by_axis_and_collective(invented_plan: Plan) -> None:
    rows = document(invented_plan)["best"]["communication"]
    assert [(row["axis"], row["kind"], row["count"]) for row in rows] == [
        ("tp", "reduce_scatter", 320.0),
        ("dp_shard", "all_gather", 160.0),
    ]


def test_utilization_is_flops_over_step_time_and_the_dense_peak(invented_plan: Plan) -> None:
    best = document(invented_plan)["best"]
    assert best["peak_flops_per_second"] == pytest.approx(989.4e12, rel=1e-3)  # NVIDIA H100 datasheet, dense bf16
    for name, flops in (("mfu", 3.6e15), ("mfu_causal", 3.2e15), ("hfu", 3.9e15)):
        assert best[name] == pytest.approx(flops / 9.0 / best["peak_flops_per_second"], rel=1e-5)


def test_the_report_shows_every_field_of_the_strategy(invented_plan: Plan) -> None:
    text = drawn(document(invented_plan))
    for field in fields(Strategy):
        # only where cp > 1, where it is cut in two, where something is recomputed, and where stages are cut by hand
        if field.name not in ("cp_kind", "cp_inner", "recompute_layers", "stage_layers"):
            assert field.name in text
    for said in ("megatron", "dgx-h100", "8,192 tokens", "adamw", "flash", "MFU", "HFU", "causal", "H100", "DP012"):
        assert said.lower() in text.lower()


def test_the_report_fits_80_columns(invented_plan: Plan) -> None:
    assert max(len(line) for line in drawn(document(invented_plan)).splitlines()) <= 80


def test_a_runner_up_says_why_and_a_tie_says_so(invented_plan: Plan) -> None:
    text = drawn(document(invented_plan))
    assert "tie +0.6 %" in text
    assert "bubble" in text.split("Runners-up")[1]
    assert "order is not known" in text


def test_runners_up_of_other_sizes_are_compared_for_as_many_tokens(invented_plan: Plan) -> None:
    best, (first, *_) = invented_plan.best, invented_plan.runners_up
    assert best is not None
    half = replace(
        first, strategy=best.strategy, estimate=best.estimate, global_batch=256,
        step_seconds=best.step_seconds * 0.6, relative=1.2, tie=False,
    )  # fmt: skip
    text = drawn(document(replace(invented_plan, global_batches=(256, 512), runners_up=(half,))))
    assert "+20.0 %" in text and "-40" not in text
    double = replace(half, gpus=128, global_batch=512, step_seconds=best.step_seconds * 0.55, relative=1.1)
    text = drawn(document(replace(invented_plan, objective="cost", gpus=(64, 128), runners_up=(double,))))
    assert "dearer" in text and "slower" not in text.split("Runners-up")[1]
    assert "+10.0 %" in text and "-45" not in text


@pytest.mark.parametrize(("after", "said"), [(9.95, "gains 0.5 % over the default 2×40"), (9.0, "layers 2×39, 1×2")])
def test_a_small_gain_by_hand_is_one_line(invented_plan: Plan, after: float, said: str) -> None:
    assert invented_plan.best is not None
    split = BalancedSplit(
        layers=(2,) * 39 + (1, 1), default_layers=(2,) * 40, recompute_layers=(0,) * 4, default_recompute_layers=0,
        step_seconds=after, default_step_seconds=10.0, heaviest_seconds=1.0, default_heaviest_seconds=1.0,
        device_bytes=1e9, default_device_bytes=1e9, method="exact", gap=0.0,
    )  # fmt: skip
    best = replace(invented_plan.best, balanced=split)
    assert said in drawn(document(replace(invented_plan, best=best)))


def test_escapes_in_names_do_not_reach_the_terminal(invented_plan: Plan) -> None:
    hostile = replace(invented_plan, model=replace(invented_plan.model, name="x\x1b]0;gone\x07[red]"))
    text = drawn(document(hostile))
    assert "\x1b" not in text
    assert "[red]" in text


def test_nothing_fits_names_stage_phase_bytes_and_the_smallest_count(invented_plan: Plan) -> None:
    best = invented_plan.best
    assert best is not None
    why = NothingFits(
        nearest=replace(best, verdict="out"),
        stage=0,
        phase="forward peak",
        bytes_over=3.5 * 2**30,
        smallest_gpus=128,
        smallest=replace(best, gpus=128),
        searched_up_to=128,
    )
    text = drawn(document(replace(invented_plan, best=None, runners_up=(), why_nothing=why)))
    for said in ("Nothing fits on 64 GPUs", "stage 0 lacks 3.50 GiB at forward peak", "128 GPUs"):
        assert said in text
    # what is lacking is counted from the high end, which stands beside the expected value
    usable = float(best.estimate.usable_bytes[0])
    above = replace(why, bytes_over=float(best.estimate.device_bytes[0]) - usable + 2 * 2**30)
    text = drawn(document(replace(invented_plan, best=None, runners_up=(), why_nothing=above)))
    assert f"up to {float(best.estimate.device_bytes[0]) / 2**30 + 2:.2f} GiB" in " ".join(text.split())


def test_nothing_legal_names_the_neighbours(invented_plan: Plan) -> None:
    why = NothingLegal(gpus=61, below=60, above=64)
    text = drawn(document(replace(invented_plan, best=None, runners_up=(), why_nothing=why)))
    assert "No strategy is legal on 61 GPUs" in text
    assert "60 and 64" in text


def test_the_outlook_is_said_in_sentences(invented_plan: Plan) -> None:
    best = invented_plan.best
    assert best is not None
    plan = replace(
        invented_plan,
        sensitivity=(
            Sensitivity(change="network -20%", winner_changes=False, winner=best, loss=0.0),
            Sensitivity(change="compute -10%", winner_changes=True, winner=best, loss=0.031),
        ),
        other_runtime=OtherRuntime(runtime="torchtitan", best=best, speedup=1.042),
    )
    text = drawn(document(plan))
    assert "network -20%: the same strategy wins" in text
    assert "staying costs 3.1 %" in text
    assert "+4.2 % speed with torchtitan" in text


def test_all_formats_hold_the_same_data(invented_plan: Plan) -> None:
    shown = document(invented_plan)
    assert json.loads(json_text(shown)) == shown
    assert yaml.safe_load(yaml_text(shown)) == shown
    rows = list(csv.DictReader(io.StringIO(csv_text([shown["best"], *shown["runners_up"]]))))
    assert [float(row["step_seconds"]) for row in rows] == [
        shown["best"]["step_seconds"],
        *(runner["step_seconds"] for runner in shown["runners_up"]),
    ]
    assert rows[0]["strategy.tp"] == "8"
    assert rows[0]["strategy.sp"] == "true"


def test_text_that_looks_like_a_number_stays_text_and_a_formula_stays_a_name() -> None:
    assert yaml_text({"name": "1e3"}) == "name: '1e3'\n"
    assert csv_text([{"name": "=cmd()"}]) == "name\n'=cmd()\n"
