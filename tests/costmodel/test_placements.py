"""A strategy said by marks: what the user places, inference completes."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

import distplan
from distplan.costmodel.estimate import estimate
from distplan.costmodel.layout import Layout
from distplan.costmodel.model_file import load_model
from distplan.costmodel.placements import (
    Partial,
    PlacementError,
    ProcessMesh,
    Replicate,
    Shard,
    check_marks,
    dims_mapping,
    layout_of,
    placements_of,
    reshard,
    shard_tensor,
)
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster

FILE = load_model("llama-3.1-8b")
WORK = workload(FILE.model, FILE.workload, gpus=8, overrides={"seq_len": 4096, "global_batch": 64})
TP4 = ProcessMesh((4,), ("tp",))
MLP = ("layer.mlp.up.weight", "layer.mlp.gate.weight", "layer.mlp.down.weight")


def tp_collectives(model: distplan.Model) -> list[str]:
    found = estimate(
        model, WORK, load_cluster("dgx-h100"), load_runtime("megatron"), Strategy(dp_shard=2, tp=4), detail=True
    )
    return [c.name for c in found.communication if c.axis == "tp" and c.name.startswith("layer.mlp")]


def test_dims_mapping_and_placements_say_the_same() -> None:
    placements = (Shard(1), Replicate(), Partial("avg"), Shard(1))
    assert dims_mapping(placements, 2) == ((), (0, 3))
    assert placements_of(((), (0, 3)), {2: "avg"}, 4) == placements


def test_partial_to_shard_is_a_reduce_scatter_and_shard_to_replicate_an_all_gather() -> None:
    mesh = ProcessMesh((2, 4), ("x", "y"))
    (step,) = reshard(("m", "n"), mesh, (Partial(), Replicate()), (Shard("m"), Replicate()))
    assert (step.kind, step.axes, step.dim) == ("reduce_scatter", ("x",), "m")
    (step,) = reshard(("m", "n"), mesh, (Replicate(), Shard("n")), (Replicate(), Replicate()))
    assert (step.kind, step.axes, step.result) == ("all_gather", ("y",), Layout(("m", "n"), ((), ())))


def test_marking_the_default_placement_changes_nothing() -> None:
    marked = shard_tensor(FILE.model, "layer.mlp.up.weight", TP4, (Shard("ffn"),), WORK)
    assert tp_collectives(marked) == tp_collectives(FILE.model) != []


def test_an_mlp_that_is_marked_replicated_needs_no_tp_communication() -> None:
    model = FILE.model
    for tensor in MLP:
        model = shard_tensor(model, tensor, TP4, (Replicate(),), WORK)
    assert tp_collectives(model) == []


def test_a_mark_on_one_weight_alone_makes_inference_insert_the_gather() -> None:
    """up sharded, down whole: the product's input is gathered on ffn instead of its output reduced."""
    model = shard_tensor(FILE.model, "layer.mlp.down.weight", TP4, (Shard("hidden"),), WORK)
    assert tp_collectives(model) != tp_collectives(FILE.model)


@pytest.mark.parametrize(
    "tensor,marks,word",
    [
        ("layer.mlp.upp.weight", {"tp": "Shard(ffn)"}, "layer.mlp.up.weight"),
        ("layer.mlp.up.weight", {"tp": "Shard(fnn)"}, "ffn"),
        ("layer.mlp.up.weight", {"tpp": "Shard(ffn)"}, "tp"),
        ("layer.mlp.up.weight", {"tp": "Split(ffn)"}, "Shard(dim)"),
    ],
)
def test_a_wrong_mark_is_refused_with_what_would_be_right(tensor: str, marks: dict[str, str], word: str) -> None:
    with pytest.raises(PlacementError, match=word.replace("(", r"\(").replace(")", r"\)")):
        check_marks(replace(FILE.model, placements={tensor: marks}), WORK)


def test_a_mesh_names_every_axis_once() -> None:
    with pytest.raises(PlacementError):
        ProcessMesh((2, 2), ("x", "x"))
    with pytest.raises(PlacementError):
        layout_of(("m",), TP4, (Shard("n"),))


def test_the_custom_block_of_the_examples_is_priced_like_any_other() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "custom_block.py"))
    model = example["with_bottleneck"]("llama-3.1-8b", narrow=1024, ffn=16384)
    found = estimate(
        model,
        WORK,
        load_cluster("dgx-h100"),
        load_runtime("megatron"),
        Strategy(dp_shard=2, tp=4, sp=True),
        detail=True,
    )
    reduced = [c.name for c in found.communication if c.kind == "reduce_scatter" and c.phase == "forward"]
    assert "layer.down" in reduced
    plan = distplan.search(model, gpus=8, hardware="dgx-h100")
    assert plan.best is not None
