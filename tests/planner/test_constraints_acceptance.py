"""Every rule row that users' threads boil down to: accepted or refused, for the reason given."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from small import dense, mixture, workload

from distplan.costmodel.model import Model, Moe
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import DEGREES, Strategy
from distplan.planner.constraints import Context, explain_row
from distplan.planner.plan import Violation

DATA = Path(__file__).parents[1] / "data" / "acceptance_rules.yaml"
ROWS = {row["id"]: row for row in yaml.safe_load(DATA.read_text())["rules"]}
RUNTIMES = {"megatron-bridge": "megatron", "colossalai": "megatron", "ulysses": "any"}
"""frameworks of the rows that are not shipped as runtimes -> the nearest that is"""
CODES = {
    "r01": "DP010", "r07": "DP004", "r08": "DP011", "r09": "DP011", "r10": "DP012", "r12": "DP013", "r13": "DP011",
    "r14": "DP036", "r19": "DP014", "r20": "DP016", "r22": "DP001", "r25": "DP017", "r26": "DP039", "r28": "DP007",
}  # fmt: skip
"""row -> the code that must be among its violations"""


def model_of(when: dict[str, Any]) -> Model:
    if when.get("config") == "falcon-7b":
        return dense(layers=32, heads=71, kv_heads=1, hidden=4544, ffn=18176)
    if when.get("moe") or "experts" in when or "ep" in when:
        return mixture(when.get("experts", 8), layers=12)
    if "kv_heads" in when:
        return dense(heads=32, kv_heads=when["kv_heads"], hidden=4096)
    if "hidden" in when:
        return dense(heads=96, kv_heads=96, hidden=when["hidden"], ffn=4 * when["hidden"])
    model = dense(layers=when.get("layers", 24), vocab=when.get("vocab", 32000))
    return replace(model, vocab_pad_multiple=when.get("pad_multiple", when.get("per_rank_multiple", 128)))


def strategy_of(when: dict[str, Any], model: Model) -> Strategy:
    degrees = {name: when[name] for name in DEGREES if name in when}
    pp = degrees.get("pp", 1)
    vpp = when.get("vp", 1)
    if "vp_layers" in when:
        vpp = model.layers // (pp * when["vp_layers"])  # as the framework of the thread floored it
    if "local_batch" in when:
        degrees["micro_batch"] = -(-when["local_batch"] // when["microbatches"])
    experts = any(isinstance(kind.ffn, Moe) for kind in model.kinds.values())
    return Strategy(
        **degrees | {"micro_batch": when.get("mbs", degrees.get("micro_batch", 1)), "vpp": vpp},
        dp_replicate=when.get("distopt_instances", 1),
        dp_shard=when.get("dp", when["ep"] if "ep" in when and "distopt_instances" not in when else 1),
        zero=when.get("zero", 0),
        sp=when.get("sp", experts) and degrees.get("tp", 1) > 1,
        cp_kind="ulysses" if degrees.get("cp", 1) > 1 else "none",
        schedule="interleaved" if vpp > 1 else "1f1b",
    )


def violations(row: dict[str, Any]) -> list[Violation]:
    when = row["when"]
    model = model_of(when)
    strategy = strategy_of(when, model)
    share = when.get("local_batch") or strategy.micro_batch * when.get("microbatches", 8 * strategy.pp)
    batch = when.get("gbs", share * strategy.dp)
    context = Context(
        model=model,
        workload=workload(batch),
        runtime=load_runtime(RUNTIMES.get(row["fw"], row["fw"])),
        gpus=when.get("gpus", strategy.gpus),
        offload_activations=when.get("cpu_offloading", False),
    )
    return explain_row(strategy, context)


def refused(row: dict[str, Any]) -> dict[str, Violation]:
    return {broken.code: broken for broken in violations(row) if not broken.warning}


@pytest.mark.parametrize("name", ROWS)
def test_row_is_accepted_or_refused_for_its_reason(name: str) -> None:
    codes = refused(ROWS[name])
    if ROWS[name]["accept"]:
        assert not codes
    else:
        assert CODES[name] in codes


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
