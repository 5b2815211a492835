"""Runtimes are data: each fact has a source, `any` is the union of all, a wrong file is refused with its line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from distplan.costmodel import runtime
from distplan.costmodel.runtime import RULE_VARIANTS, list_runtimes, load_runtime
from distplan.costmodel.strategy import STRUCTURE
from distplan.hardware.errors import DistplanError

OTHERS = [name for name in list_runtimes() if name != "any"]
PHYSICS = ("mesh_order", "sp_saves", "merged_input_gradients", "overlap", "fused_norm", "loss", "early_stop")
PHYSICS += (*(f"state.{f.name}" for f in fields(runtime.StateRules)), "embedding_gradient")
PHYSICS += ("grad_reduce", "grad_bucket_bytes", "attention_kernel", "fused_rope")
SHIPPED = Path(runtime.__file__).with_name("runtimes")


def test_the_runtimes_of_the_design_are_shipped() -> None:
    assert set(list_runtimes()) == {
        "megatron", "megatron-fsdp", "deepspeed", "torchtitan", "fsdp1", "paddle", "maxtext", "any"
    }  # fmt: skip


@pytest.mark.parametrize("name", list_runtimes())
def test_every_physical_fact_has_a_source_or_is_marked_assumed(name: str) -> None:
    loaded = load_runtime(name)
    assert loaded.name == name and loaded.version and loaded.source
    for field in PHYSICS:
        assert loaded.provenance[field]
    sharded = {"2", "3"} & set(loaded.legal["zero"])
    assert not sharded or loaded.provenance["grad_reduce_sharded"]


@pytest.mark.parametrize("field", STRUCTURE)
def test_legal_values_of_any_are_the_union_of_all(field: str) -> None:
    union = {value for name in OTHERS for value in load_runtime(name).legal[field]}
    assert set(load_runtime("any").legal[field]) == union


@pytest.mark.parametrize("rule", RULE_VARIANTS)
def test_rules_of_any_are_the_loosest_of_all(rule: str) -> None:
    variants = RULE_VARIANTS[rule]
    used = {load_runtime(name).rules[rule] for name in OTHERS}
    loosest = max(used, key=variants.index)
    if used >= {"rounds", "at_least_stages"}:  # not ordered: only `any` covers both
        loosest = "any"
    assert load_runtime("any").rules[rule] == loosest


def test_only_runtimes_with_one_degree_limit_degrees() -> None:
    assert load_runtime("fsdp1").legal["tp"] == ("1",)
    assert "tp" not in load_runtime("any").legal


def test_published_facts() -> None:
    # Korthikanti et al. 2022, section 4.2.2: the shard is saved and gathered again in backward
    assert load_runtime("megatron").sp_saves == "shard"
    # the project's oracle of torch 2.13: the gathered norm output is kept, 5L+1 all-reduces in backward
    assert load_runtime("torchtitan").sp_saves == "gathered"
    assert load_runtime("torchtitan").merged_input_gradients == "gathered"
    # DeepSpeed issue #823
    assert load_runtime("deepspeed").rules["zero_with_pp"] == "1"


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(DistplanError, match="megatron"):
        load_runtime("megatrn")


def test_a_users_file_is_read_like_a_shipped_one(tmp_path: Path) -> None:
    shipped = SHIPPED / "megatron.yaml"
    file = tmp_path / "mine.yaml"
    file.write_text(shipped.read_text().replace("name: megatron", "name: mine"))
    assert load_runtime(str(file)).name == "mine"
    assert load_runtime(str(file)).rules == load_runtime("megatron").rules


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kv_heads: gather", "kv_heads: gahter", "gather"),
        ("kv_heads: gather", "kvheads: gather", "kv_heads"),
        ("sp_saves: shard", "sp_saves: 3", "text"),
        ("loss: vocab_parallel", "loss: vocab_parallel\ncontext_bytes: 1.3 GiX", "GiX"),
        ("loss: vocab_parallel", "loss: vocab_parallel\ncontext_bytes: -1", "-1"),
        ("[pp, dp_replicate, dp_shard, cp, tp]", "[pp, dp, cp, tp]", "dp_replicate"),
        ('zero: ["0", "1"]', 'zero: ["0", "7"]', "'7'"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (SHIPPED / "megatron.yaml").read_text()
    assert old in text
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(DistplanError, match=r"mine\.yaml:\d+: ") as error:
        load_runtime(str(file))
    assert words in str(error.value)
