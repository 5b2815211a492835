"""What is exported is imported as the same strategy, in every format that is read back."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import job, jobs

from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import precision_names
from distplan.hardware.errors import DistplanError
from distplan.planner.export import LAUNCHERS, export
from distplan.planner.import_file import READERS, Imported, import_file
from distplan.planner.launcher import Exported, Job, read_unsaid
from distplan.planner.plain import plain

SUFFIX = {"megatron": "args", "deepspeed": "json", "torchtitan": "args", "accelerate": "yaml"}


def read(text: str, launcher: str, **how: int) -> Imported:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"file.{SUFFIX[launcher]}"
        path.write_text(text, encoding="utf-8")
        return import_file(path, **how)  # type: ignore[arg-type]


def meant(of: Job) -> Strategy:
    return replace(of.strategy, recompute_layers=of.recompute_layers)


def bare(made: Exported, launcher: str) -> str:
    """The file as somebody else's: without what only we read."""
    if launcher == "deepspeed":
        import json

        content = json.loads(made.text)
        del content["distplan"]
        return json.dumps(content)
    return "\n".join(line for line in made.text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("launcher", READERS)
@settings(max_examples=150, deadline=None)
@given(of=jobs())
def test_export_then_import_is_the_same_strategy_and_workload(launcher: str, of: Job) -> None:
    found = read(export(of, launcher).text, launcher)
    assert found.launcher == launcher
    assert found.strategy == meant(of)
    assert dict(found.workload) == {name: of.facts[name] for name in found.workload}
    assert set(found.workload) >= {"global_batch", "seq_len", "precision", "optimizer", "clip_grad"}


@pytest.mark.parametrize("launcher", READERS)
@settings(max_examples=100, deadline=None)
@given(of=jobs())
def test_what_the_file_alone_says_differs_only_where_that_is_said(launcher: str, of: Job) -> None:
    made = export(of, launcher)
    taken = {item.fact: item.taken for item in made.unsaid}
    facts = {**of.facts, **taken}
    product = prod(int(facts[name]) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp"))
    if launcher == "accelerate" and product != of.strategy.gpus:
        with pytest.raises(DistplanError, match=f"multiply to {product} GPUs, not {of.strategy.gpus}"):
            read(bare(made, launcher), launcher)
        return
    given_count = {"gpus": of.strategy.gpus} if launcher == "megatron" else {}
    found = read(bare(made, launcher), launcher, **given_count)
    said = plain(found.strategy)
    said["stage_layers"] = ",".join(str(layers) for layers in said["stage_layers"])
    assert said == {name: facts[name] for name in said}
    assert dict(found.workload) == {name: facts[name] for name in found.workload}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@settings(max_examples=40, deadline=None)
@given(of=jobs())
def test_every_sentence_about_a_fact_is_in_the_file_and_can_be_read(launcher: str, of: Job) -> None:
    made = export(of, launcher)
    lines = made.text.replace('\\"', '"').splitlines()
    assert {item.fact: (item.meant, item.taken) for item in read_unsaid(lines)} == {
        item.fact: (item.meant, item.taken) for item in made.unsaid
    }
    for sentence in made.sentences:
        assert any(sentence in line for line in lines), sentence


def test_a_change_by_hand_wins_over_what_was_meant() -> None:
    of = job(Strategy(dp_shard=8, zero=1))
    text = export(of, "accelerate").text
    assert "cannot say zero = 1 (takes 2)" in text
    assert read(text, "accelerate").strategy.zero == 1
    changed = text.replace("fsdp_reshard_after_forward: false", "fsdp_reshard_after_forward: true")
    assert read(changed, "accelerate").strategy.zero == 3


def test_a_recipe_of_ones_own_is_not_taken_for_one_of_ours() -> None:
    of = job(Strategy(dp_shard=8))
    own = replace(of.workload, precision=replace(of.workload.precision, name="bf16, changed"))
    found = read(export(replace(of, workload=own), "megatron").text, "megatron")
    assert found.workload["precision"] == "bf16"
    assert any("bf16,_changed" in note for note in found.notes)


@given(st.text(max_size=60))
def test_no_line_of_a_file_is_mistaken_for_a_fact(line: str) -> None:
    for item in read_unsaid([line]):
        assert item.sentence in line


def test_precisions_are_one_word() -> None:
    assert all(name.split() == [name] for name in precision_names())
