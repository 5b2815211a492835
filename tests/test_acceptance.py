"""Rows that users' threads boil down to: what `python -m benchmarks.acceptance` says of each, and how it says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.acceptance import answers, document, lines, main, read
from benchmarks.acceptance_measured import fits, memory, rate
from benchmarks.acceptance_rows import Answer, CannotAnswer, runs, words
from benchmarks.acceptance_rules import rule

DATA = Path(__file__).parent / "data"
FILE = DATA / "acceptance.yaml"
ROWS = {row["id"]: (section, row) for section, rows in yaml.safe_load(FILE.read_text()).items() for row in rows}
OPEN = {
    **dict.fromkeys(("f02", "f20", "m05", "m07", "m08", "m10", "k03", "s02", "s03", "s05", "s06"), "undecided"),
    **dict.fromkeys(("f13", "k06", "k08"), "cannot answer"),
}
"""rows that rest on what they do not say, and rows without an architecture or an order of strategies"""


def answer(name: str) -> Answer:
    section, row = ROWS[name]
    (found,) = answers({section: [row]})
    return found


@pytest.mark.parametrize("name", sorted(ROWS))
def test_no_row_fails_and_every_one_that_can_be_decided_holds(name: str) -> None:
    found = answer(name)
    assert found.verdict == OPEN.get(name, "holds"), found.said
    assert bool(found.missing) == (found.verdict == "undecided")
    assert found.said


def test_every_rule_and_every_least_number_of_gpus_is_decided() -> None:
    decided = [name for name, (section, _) in ROWS.items() if section in ("rules", "min_gpus")]
    assert {answer(name).verdict for name in decided} == {"holds"}


def test_the_same_rows_as_the_rules_of_the_constraints() -> None:
    rules = yaml.safe_load((DATA / "acceptance_rules.yaml").read_text())["rules"]
    assert rules == [row for section, row in ROWS.values() if section == "rules"]


# ---------------------------------------------------------------- rows turned round must fail


@pytest.mark.parametrize("name", [name for name, (section, _) in ROWS.items() if section == "rules"])
def test_a_rule_turned_round_fails(name: str) -> None:
    row = ROWS[name][1]
    assert rule({**row, "accept": not row["accept"]}).verdict == "fails"


@pytest.mark.parametrize(
    "name,change",
    [
        ("r01", {"valid_vp_layers": [1, 4]}),
        ("r08", {"suggest_gbs": [100]}),
        ("r28", {"suggest_vocab": 50260}),
        ("r29", {"padded_vocab": 128256}),
        ("r18", {"warn": "anything"}),
    ],
)
def test_a_suggestion_that_is_not_made_fails(name: str, change: dict[str, Any]) -> None:
    assert rule(ROWS[name][1] | change).verdict == "fails"


@pytest.mark.parametrize("name", ["f01", "f03", "f04", "f09"])
def test_a_fit_turned_round_fails(name: str) -> None:
    row = ROWS[name][1]
    assert fits({**row, "fits": not row["fits"]}).verdict == "fails"


def test_a_memory_or_a_rate_on_one_side_of_all_extremes_fails() -> None:
    assert memory(ROWS["m02"][1] | {"gib": 20.0}).verdict == "fails"
    assert memory(ROWS["m07"][1] | {"gb": 200.0}).verdict == "fails"
    assert rate(ROWS["s02"][1] | {"tokens_per_s_gpu": 3000}).verdict == "fails"


def test_a_number_between_the_extremes_is_undecided_with_the_fact() -> None:
    found = memory(ROWS["m07"][1] | {"tol_pct": 0.001})
    assert found.verdict == "undecided"
    assert "recomputation" in found.missing


# ---------------------------------------------------------------- facts that a row leaves open


def test_what_a_row_gives_is_not_varied() -> None:
    given = {
        "id": "x",
        "case": "mlm-1",
        "model": "llama-2-7b",
        "gpu": "A100-80G",
        "gpus": 8,
        "mbs": 1,
        "seq": 1024,
        "recompute": "none",
        "gbs": 64,
    }
    (only,) = runs(given)
    assert only.open == {}
    assert only.job.workload.seq_len == 1024
    without = {key: value for key, value in given.items() if key not in ("seq", "recompute")}
    found = [run.open for run in runs(without)]
    assert len(found) == 4
    assert {facts["seq_len"] for facts in found} == {512, 8192}
    assert {facts["recompute"] for facts in found} == {"none", "full"}


@pytest.mark.parametrize(
    "row,says",
    [
        ({"model": "no-such-model", "gpu": "A100-80G", "gpus": 8}, "no-such-model"),
        ({"inline": {"params_b": 16}, "gpu": "A100-80G", "gpus": 8}, "architecture"),
        ({"model": "llama-2-7b", "gpu": "Z9000", "gpus": 8}, "Z9000"),
        ({"model": "llama-2-7b", "gpu": "A100-80G", "gpus": 8, "colour": "red"}, "colour"),
        ({"model": "llama-2-7b", "gpu": "A100-80G", "gpus": 8, "tp": 3}, "8 GPUs"),
    ],
)
def test_what_cannot_be_answered_says_why(row: dict[str, Any], says: str) -> None:
    with pytest.raises(CannotAnswer, match=says):
        list(runs({"id": "x", **row}))
    (found,) = answers({"fits": [{"id": "x", "fits": True, "zero": 1, **row}]})
    assert found.verdict == "cannot answer" and says in found.said


def test_every_mapped_word_has_a_system_or_runtime_that_is_shipped() -> None:
    from distplan.costmodel.runtime import list_runtimes
    from distplan.hardware.cluster import load_cluster

    table = words()
    assert {entry["runtime"] for entry in table["runtimes"].values()} <= set(list_runtimes())
    assert {entry["runtime"] for entry in table["frameworks"].values()} <= set(list_runtimes())
    for entry in table["gpus"].values():
        load_cluster(entry["system"])


# ---------------------------------------------------------------- the command


def written(tmp_path: Path, **sections: list[dict[str, Any]]) -> str:
    path = tmp_path / "rows.yaml"
    path.write_text(yaml.safe_dump(sections))
    return str(path)


def test_the_command_ends_with_1_where_a_row_fails_and_with_0_else(tmp_path: Path, capsys: Any) -> None:
    good = ROWS["r08"][1]
    assert main([written(tmp_path, rules=[good])]) == 0
    assert main([written(tmp_path, rules=[good, good | {"accept": True}])]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("1 holds  1 fails")
    assert "r08" in shown[0] and "DP011" in shown[0]


def test_json_has_every_row_and_the_counts(tmp_path: Path, capsys: Any) -> None:
    assert main([written(tmp_path, rules=[ROWS["r08"][1]], fits=[ROWS["f13"][1]]), "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in shown["rows"]] == ["r08", "f13"]
    assert shown["counts"] == {"holds": 1, "fails": 0, "undecided": 0, "cannot answer": 1}
    found = list(answers(read(str(FILE)), only="c01"))
    assert document(found)["rows"][0]["verdict"] == "holds"
    assert len(list(lines(found))) == 2


@pytest.mark.parametrize("text", ["[1, 2]", "colours: []", "rules: [{when: {}}]", "rules: 3", ": ["])
def test_a_file_of_another_form_ends_with_2_and_no_traceback(tmp_path: Path, text: str, capsys: Any) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert "wrong.yaml" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.yaml")]) == 2
