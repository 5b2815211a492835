"""Our job lists are those that Paddle 3.3.1 and PyTorch 2.13 made, refusals included."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "oracle"


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oracle_schedules", ROOT / "benchmarks" / "oracle_schedules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["paddle_jobs.jsonl.gz", "torch_schedules.jsonl.gz"])
def test_every_case_agrees(oracle: ModuleType, name: str) -> None:
    tallies = oracle.check(DATA / name)
    assert [line for tally in tallies.values() for line in tally.differ] == []
    assert sum(tally.agree for tally in tallies.values()) == len(list(oracle.read_lines(DATA / name)))


def test_a_job_out_of_place_and_a_refusal_not_shared_are_differences(oracle: ModuleType) -> None:
    case = next(c for c in oracle.read_lines(DATA / "paddle_jobs.jsonl.gz") if "jobs_per_stage" in c)
    jobs = case["jobs_per_stage"][0]
    jobs[0], jobs[1] = jobs[1], jobs[0]
    assert "stage 0, job 0" in oracle.compare_paddle(case)[1]
    case["error"] = {"type": "AssertionError", "text": "no"}
    assert "Paddle refuses" in oracle.compare_paddle(case)[1]
    action = next(c for c in oracle.read_lines(DATA / "torch_schedules.jsonl.gz") if c.get("with_comms"))
    action["with_comms"]["0"].pop()
    assert "with communication" in oracle.compare_torch(action)[1]


def test_a_file_of_another_kind_is_refused(oracle: ModuleType) -> None:
    with pytest.raises(ValueError, match="neither"):
        oracle.check(DATA / "something.jsonl")
