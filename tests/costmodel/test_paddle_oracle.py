"""The paddle dialect gives PaddlePaddle 3.3.1's own answers: rules, refusals and resharding, no deviation."""

from __future__ import annotations

import copy
import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import oracle_reshard, oracle_spmd, oracles
from benchmarks.oracle_schedules import read_lines

DATA = Path(__file__).parents[1] / "data" / "oracle"
SPMD = ("paddle_spmd_cases.jsonl.gz", "paddle_spmd_asked.jsonl.gz", "paddle_tests_cases.jsonl.gz")
"""The reference cases, more answers that we asked of the wheel (random placements and sizes), Paddle's own tests."""


check = lru_cache(maxsize=None)(oracle_spmd.check)


@pytest.mark.parametrize("name", SPMD)
def test_every_rule_answers_as_the_real_system(name: str) -> None:
    tallies = check(DATA / name)
    assert [line for tally in tallies.values() for line in tally.differ] == []
    assert sum(tally.agree for tally in tallies.values()) == len(list(read_lines(DATA / name)))


def test_all_three_directions_and_refusals_are_among_the_cases() -> None:
    tallies = check(DATA / SPMD[0])
    for direction in ("forward", "reverse", "grad"):
        assert sum(tally.agree for rule, tally in tallies.items() if rule.endswith(direction)) > 800
    assert sum(tally.refused for tally in tallies.values()) > 500


def test_every_resharding_inserts_the_real_operators_and_bytes() -> None:
    tallies = oracle_reshard.check(DATA / "paddle_reshard.jsonl.gz")
    assert [line for tally in tallies.values() for line in tally.differ] == []
    assert set(tallies) == {"reshard, 1-d mesh", "reshard, 2-d mesh", "reshard, 3-d mesh", "reshard, across meshes"}


@pytest.fixture(scope="module")
def matmul() -> dict[str, Any]:
    return next(
        case
        for case in read_lines(DATA / SPMD[0])
        if case["api"] == "registry:matmul" and case.get("result", {}).get("outputs", [{}])[0].get("partial")
    )


@pytest.mark.parametrize("change", ["output", "input", "partial axis", "partial kind", "refusal"])
def test_a_wrong_answer_is_a_difference(matmul: dict[str, Any], change: str) -> None:
    case = copy.deepcopy(matmul)
    assert oracle_spmd.agrees(case)
    output = case["result"]["outputs"][0]
    if change == "output":
        output["dims_mapping"] = [*output["dims_mapping"][::-1], -1]
    elif change == "input":
        case["result"]["inputs"][0]["dims_mapping"][0] = 7
    elif change == "partial axis":
        output["partial"] = {}
    elif change == "partial kind":
        output["partial"] = dict.fromkeys(output["partial"], "AVG")
    else:
        case["error"] = {"type": "ValueError", "text": "no"}
    assert not oracle_spmd.agrees(case)


def test_a_collective_of_other_bytes_or_ranks_is_a_difference() -> None:
    case = next(c for c in read_lines(DATA / "paddle_reshard.jsonl.gz") if c.get("comm"))
    assert oracle_reshard.agrees(case)
    for key, value in (("bytes_in_local", 1), ("ranks", [9]), ("op", "broadcast")):
        broken = copy.deepcopy(case)
        broken["comm"][0][key] = value
        assert not oracle_reshard.agrees(broken)


def test_the_front_end_tells_files_apart_and_exits_1_at_a_difference(
    tmp_path: Path, matmul: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "paddle_spmd_a.jsonl", tmp_path / "paddle_spmd_b.jsonl.gz"
    good.write_text(json.dumps(matmul) + "\n", encoding="utf-8")
    broken = copy.deepcopy(matmul)
    broken["result"]["outputs"][0]["partial"] = {}
    bad.write_bytes(gzip.compress(json.dumps(broken).encode()))
    assert oracles.main([str(good)]) == 0
    assert oracles.main([str(good), str(bad)]) == 1
    assert matmul["id"] in capsys.readouterr().out
    assert oracles.main([str(tmp_path / "other.jsonl")]) == 2
    assert "no known format" in capsys.readouterr().err
