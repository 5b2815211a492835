"""Our job lists are those that Paddle 3.3.1 and PyTorch 2.13 made, refusals included."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import oracle_schedules as oracle

DATA = Path(__file__).parents[1] / "data" / "oracle"


@pytest.mark.parametrize("name", ["paddle_jobs.jsonl.gz", "torch_schedules.jsonl.gz"])
def test_every_case_agrees(name: str) -> None:
    tallies = oracle.check(DATA / name)
    assert [line for tally in tallies.values() for line in tally.differ] == []
    assert sum(tally.agree for tally in tallies.values()) == len(list(oracle.read_lines(DATA / name)))


def test_a_job_out_of_place_and_a_refusal_not_shared_are_differences() -> None:
    case = next(c for c in oracle.read_lines(DATA / "paddle_jobs.jsonl.gz") if "jobs_per_stage" in c)
    jobs = case["jobs_per_stage"][0]
    jobs[0], jobs[1] = jobs[1], jobs[0]
    assert "stage 0, job 0" in oracle.compare_paddle(case)[1]
    case["error"] = {"type": "AssertionError", "text": "no"}
    assert "Paddle refuses" in oracle.compare_paddle(case)[1]
    action = next(c for c in oracle.read_lines(DATA / "torch_schedules.jsonl.gz") if c.get("with_comms"))
    action["with_comms"]["0"].pop()
    assert "with communication" in oracle.compare_torch(action)[1]


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="neither"):
        oracle.check(DATA / "something.jsonl")
