"""Every rule row that users' threads boil down to: accepted or refused, for the reason given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from small import dense, workload

from benchmarks.acceptance_rules import rule, violations
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.planner.constraints import Context, explain_row
from distplan.planner.plan import Violation

DATA = Path(__file__).parents[1] / "data" / "acceptance_rules.yaml"
ROWS = {row["id"]: row for row in yaml.safe_load(DATA.read_text())["rules"]}
CODES = {
    "r01": "DP010", "r07": "DP004", "r08": "DP011", "r09": "DP011", "r10": "DP012", "r12": "DP013", "r13": "DP011",
    "r14": "DP036", "r19": "DP014", "r20": "DP016", "r22": "DP001", "r25": "DP017", "r26": "DP039", "r28": "DP007",
}  # fmt: skip
"""row -> the code that must be among its violations"""


def refused(row: dict[str, Any]) -> dict[str, Violation]:
    return {broken.code: broken for broken in violations(row) if not broken.warning}


@pytest.mark.parametrize("name", ROWS)
def test_row_is_accepted_or_refused_for_its_reason(name: str) -> None:
    answer = rule(ROWS[name])
    assert answer.verdict == "holds", answer.said
    assert ROWS[name]["accept"] or CODES[name] in refused(ROWS[name])


def test_other_codes_than_the_reason_stay_silent() -> None:
    for name, code in CODES.items():
        assert set(refused(ROWS[name])) == {code}


def test_layers_lost_by_flooring_name_the_legal_chunks() -> None:
    nearest = refused(ROWS["r01"])["DP010"].nearest
    chunks = [80 // 16 // int(value.removeprefix("vpp=")) for value in nearest]
    assert sorted(chunks) == ROWS["r01"]["valid_vp_layers"]


def test_a_batch_that_does_not_divide_names_the_batches_around_it() -> None:
    suggested = [f"global_batch={batch}" for batch in ROWS["r08"]["suggest_gbs"]]
    assert list(refused(ROWS["r08"])["DP011"].nearest) == suggested


def test_a_vocabulary_that_is_not_padded_names_the_next_that_divides() -> None:
    assert f"vocab={ROWS['r28']['suggest_vocab']}" in refused(ROWS["r28"])["DP007"].nearest


def test_a_width_of_1800_per_rank_is_a_warning_with_the_number() -> None:
    (warning,) = [broken for broken in violations(ROWS["r32"]) if broken.warning]
    assert "1800" in warning.sentence


def test_heads_that_do_not_divide_list_every_legal_tp() -> None:
    # user case adaptthink-1: 28 heads on tp 8
    model = dense(layers=28, heads=28, kv_heads=4, hidden=3584, ffn=18944)
    context = Context(model=model, workload=workload(8), runtime=load_runtime("any"), gpus=8)
    (heads,) = [v for v in explain_row(Strategy(tp=8), context) if v.code == "DP004"]
    assert heads.nearest == ("tp=1", "tp=2", "tp=4", "tp=7", "tp=14")
    assert re.search(r"\b28\b.*\b8\b", heads.sentence)


def test_a_small_dense_model_with_tp_and_no_sp_is_not_refused() -> None:
    # ROCm/Megatron-LM PR #85: the rule for experts fired on a dense model
    assert not refused(ROWS["r18"])
