"""The accuracy report: which rows are due, what they measured, how they are filled and scored. On a stored sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import accuracy
from benchmarks.accuracy_choice import choices, summary
from benchmarks.accuracy_fill import LeftOut, case_of
from benchmarks.accuracy_predict import Prediction, predict
from benchmarks.accuracy_print import document, text
from benchmarks.accuracy_rows import Row, measured_memory, measured_seconds, read_rows, select
from benchmarks.accuracy_score import errors, fully_stated, naive_errors, timed

SAMPLE = Path(__file__).parent / "data" / "truth_sample.csv"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row["id"]: row for row in read_rows(str(SAMPLE))}


@pytest.fixture(scope="module")
def predictions(rows: dict[str, Row]) -> Sequence[Prediction]:
    return predict(select(list(rows.values())).due).predictions


def test_of_a_workload_measured_three_times_the_median_run_is_due(rows: dict[str, Row]) -> None:
    repeats = [row for row in rows.values() if row["same_workload_group"].startswith("dgxc|Llama 3.1 8B|bf16|H100|8|")]
    assert sorted(measured_seconds(row) for row in repeats) == [12.27, 12.78, 12.91]
    due = [row["id"] for row in select(list(rows.values())).due if row in repeats]
    assert [measured_seconds(rows[id]) for id in due] == [12.78]


def test_flagged_and_fine_tuning_rows_stand_apart_and_incomplete_ones_are_not_due(rows: dict[str, Row]) -> None:
    selection = select(list(rows.values()))
    assert [row["id"] for row in selection.apart["flagged"]] == ["dgxc-0101"]
    assert [row["id"] for row in selection.apart["fine-tuning"]] == ["mbr-0070"]
    assert selection.not_due["configuration or result incomplete"] == 1
    counted = len(selection.due) + sum(map(len, selection.apart.values())) + sum(selection.not_due.values())
    assert counted == selection.given == len(rows)


def test_a_step_time_behind_printed_flops_is_that_of_the_papers_formula(rows: dict[str, Row]) -> None:
    """Narayanan et al. 2021: F = 96 B s l h² (1 + s/6h + V/16lh), 153 TFLOP/s per GPU, recompute counted."""
    batch, seq, layers, hidden, vocab = 1536, 2048, 96, 12288, 51200
    flops = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert measured_seconds(rows["pap-0035"]) == pytest.approx(flops / (384 * 153e12), rel=0.01)


def test_memory_is_read_in_bytes_with_the_reading_that_the_row_names(rows: dict[str, Row]) -> None:
    assert measured_memory(rows["titan-0003"]) == (76.8 * 2**30, "reserved")
    assert measured_memory(rows["smx-0037"]) == (68.43 * 2**30, "allocated")
    assert measured_memory(rows["pap-0066"])[1] == "unsaid"
    assert measured_memory(rows["dgxc-0001"]) == (0.0, "")


def test_a_row_that_says_everything_is_not_filled_and_one_that_does_not_says_what_was(rows: dict[str, Row]) -> None:
    assert set(case_of(rows["mpt-0001"]).filled) <= {"network"}
    assert {"recompute", "zero"} <= set(case_of(rows["mbr-0001"]).filled)
    assert "vocab" in case_of(rows["more-0999"]).filled


def test_the_rows_cells_become_the_strategy(rows: dict[str, Row]) -> None:
    case = case_of(rows["vt-0044"])
    s = case.strategy
    assert (s.tp, s.pp, s.dp, s.micro_batch, s.zero) == (2, 16, 16, 2, 0)
    assert s.recompute == "full" and s.gpus == 512
    assert not case.runtime.overlap["dp_grad"]  # its validation configs have no gradient bucketing
    assert case.cluster.tiers[-1].bandwidth == 100e9 / 8  # stated: 100 Gbit/s per GPU


def test_experts_heads_and_dense_layers_are_the_familys(rows: dict[str, Row]) -> None:
    model = case_of(rows["mbr-0001"]).model
    assert model.pattern[:4] == ("dense", "dense", "dense", "moe") and model.layers == 61
    attention = model.kinds["moe"].mixer
    assert attention is not None and getattr(attention, "kv_lora_rank", 0) == 512


def test_a_hybrid_model_is_left_out_with_its_reason(rows: dict[str, Row]) -> None:
    with pytest.raises(LeftOut, match="hybrid"):
        case_of(rows["dgxc-0331"])


def test_a_row_alone_is_predicted_as_among_others(rows: dict[str, Row], predictions: Sequence[Prediction]) -> None:
    for prediction in predictions[::5]:
        alone = predict([rows[prediction.case.row["id"]]]).predictions[0]
        assert (alone.seconds, alone.bytes, alone.recompute) == (
            prediction.seconds, prediction.bytes, prediction.recompute
        )  # fmt: skip


def test_errors_of_known_numbers() -> None:
    found = errors([0.04, -0.08, 0.12, -0.5])
    assert found.median == pytest.approx(0.10) and found.mean == pytest.approx(0.185)
    assert found.within == (0.25, 0.5, 0.75) and found.signed == pytest.approx(-0.02)


def test_regret_and_rank_correlation_of_a_known_choice(predictions: Sequence[Prediction]) -> None:
    group = [p for p in predictions if p.case.row["id"] in {f"more-{n}" for n in ("0999", "1000", "1001", "1002")}]
    measured = [p.case.seconds for p in group]
    right = summary(choices(group, measured))
    assert (right.groups, right.median_regret, right.kendall_tau) == (1, 0.0, 1.0)
    wrong = summary(choices(group, [-seconds for seconds in measured]))
    assert wrong.kendall_tau == -1.0
    assert wrong.median_regret == pytest.approx(max(measured) / min(measured) - 1.0)


def test_the_naive_planner_is_exact_where_it_has_one_run(predictions: Sequence[Prediction]) -> None:
    one = [p for p in timed(predictions) if p.case.row["id"] == "vt-0044"]
    assert naive_errors(one) == pytest.approx([0.0])


def test_the_document_has_the_stated_shape(rows: dict[str, Row], capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main([str(SAMPLE), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found["rows"]["given"] == len(rows)
    assert found["rows"]["predicted"] + sum(found["rows"]["left_out"].values()) == found["rows"]["due"]
    for group in ("all", "dense", "moe", "H100", "vTrain", "bf16"):
        assert set(found["step_time"][group]) == {"n", "median", "mean", "p90"}
    assert set(found["oom"]) == {"recall", "feasible"}
    assert set(found["choice"]) == {"groups", "median_regret", "mean_regret", "kendall_tau"}


def test_the_text_prints_every_figure_for_all_and_for_fully_stated_rows(rows: dict[str, Row]) -> None:
    selection = select(list(rows.values()))
    predicted = predict(selection.due)
    report = text(selection, predicted, {name: predict(members) for name, members in selection.apart.items()})
    assert fully_stated(predicted.predictions)
    for words in ("step time", "peak memory", "choosing among", "the band covers"):
        assert report.count(words) >= 2
    assert "hybrid model" in report and "the twenty worst" in report
    assert document(selection, predicted)["rows"]["due"] == len(selection.due)


def test_another_file_is_refused_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    assert accuracy.main([str(file)]) == 2
    assert "is no truth file" in capsys.readouterr().err
    assert accuracy.main([str(tmp_path / "none.csv")]) == 2
