"""Single facts of single exports, each with where it comes from."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import job, jobs

from distplan.costmodel.stages import chunk_layers
from distplan.costmodel.strategy import Strategy
from distplan.hardware.errors import UnknownNameError
from distplan.planner.export import LAUNCHERS, export
from distplan.planner.export_megatron import counted, layout
from distplan.planner.export_torchtitan import stage_cut
from distplan.planner.launcher import Job

BIG = Strategy(dp_replicate=2, dp_shard=2, tp=4, pp=2, cp=2, cp_kind="ring", sp=True, zero=1, micro_batch=1)


def arguments(of: Job) -> dict[str, str]:
    """Option -> its value, '' for a flag."""
    lines = [line for line in export(of, "megatron").text.splitlines() if line.startswith("--")]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


def test_an_unknown_launcher_gets_the_near_miss() -> None:
    with pytest.raises(UnknownNameError, match="did you mean torchtitan"):
        export(job(BIG), "torchtitn")


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_same_plan_is_the_same_bytes_whatever_the_hash_seed(seed: str) -> None:
    program = (
        "import json, sys; from launching import job; from distplan.costmodel.strategy import Strategy;"
        "from distplan.planner.export import LAUNCHERS, export;"
        f"print(json.dumps({{name: export(job({BIG!r}), name).text for name in LAUNCHERS}}))"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert json.loads(done.stdout) == {name: export(job(BIG), name).text for name in LAUNCHERS}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_name_with_a_line_break_stays_in_its_comment(launcher: str) -> None:
    of = job(Strategy(dp_shard=8))
    hostile = replace(of, model=replace(of.model, name='x\n--eval-me\nimport os; """\x1b[31m'))
    text = export(hostile, launcher).text
    assert not any(line.startswith(("--eval-me", "import os")) for line in text.splitlines())
    assert "\x1b" not in text


@settings(max_examples=50, deadline=None)
@given(of=jobs(), launcher=st.sampled_from(("paddle-fleet", "paddle-auto")))
def test_paddle_modules_are_python_of_literals_and_functions_only(of: Job, launcher: str) -> None:
    for node in ast.parse(export(of, launcher).text).body:
        if isinstance(node, ast.Assign):
            ast.literal_eval(node.value)
        else:
            assert isinstance(node, ast.FunctionDef)


def test_megatron_counts_replicas_of_the_distributed_optimizer() -> None:
    # DistributedDataParallelConfig.num_distributed_optimizer_instances
    assert arguments(job(BIG))["--num-distributed-optimizer-instances"] == "2"
    assert "--num-distributed-optimizer-instances" not in arguments(job(replace(BIG, dp_replicate=1)))


def test_megatron_dropout_is_written_because_its_default_is_not_zero() -> None:
    # transformer_config.py: hidden_dropout 0.1, attention_dropout 0.1
    written = arguments(job(BIG))
    assert float(written["--hidden-dropout"]) == float(written["--attention-dropout"]) == 0.0


def test_megatron_recomputes_as_many_layers_per_virtual_stage() -> None:
    s = replace(BIG, pp=2, vpp=4, schedule="interleaved", recompute="full")
    assert arguments(job(s, layers=8))["--recompute-num-layers"] == "2"
    assert [item.fact for item in export(job(s, layers=8), "megatron").unsaid] == ["gpus"]
    assert "recompute_layers" in [item.fact for item in export(job(s, layers=3), "megatron").unsaid]


def test_megatron_fsdp_has_the_strategies_of_zero_2_and_3() -> None:
    for zero, name in ((2, "optim_grads"), (3, "optim_grads_params")):
        written = arguments(job(replace(BIG, zero=zero), runtime="megatron-fsdp"))
        assert written["--data-parallel-sharding-strategy"] == name
        assert "--use-megatron-fsdp" in written


@given(layers=st.integers(1, 130), chunks=st.integers(1, 32))
def test_megatron_counts_embedding_and_loss_as_the_estimate_does(layers: int, chunks: int) -> None:
    first, last = counted(layers, chunks)
    if (layers + first + last) % chunks == 0 and layers >= chunks:
        each = (layers + first + last) // chunks
        sizes = [each] * chunks
        sizes[0] -= first
        sizes[-1] -= last
        if min(sizes) >= 0:
            assert tuple(sizes) == chunk_layers(layers, chunks)


@given(layers=st.integers(1, 130), chunks=st.integers(1, 40))
def test_torchtitan_layers_per_stage_give_exactly_the_chunks(layers: int, chunks: int) -> None:
    cut = stage_cut(layers, chunks)
    if cut is not None:
        first, last, each = cut
        # pipeline_parallel.py: stages = ceil((layers + first + last) / layers_per_stage)
        assert -(-(layers + first + last) // each) == chunks


def test_deepspeed_batch_sizes_agree() -> None:
    content = json.loads(export(job(BIG), "deepspeed").text)
    micro, steps = content["train_micro_batch_size_per_gpu"], content["gradient_accumulation_steps"]
    assert content["train_batch_size"] == micro * steps * BIG.dp


def test_torchtitan_passes_a_step_through_its_pipeline_and_a_micro_batch_without_one() -> None:
    # training.local_batch_size over parallelism.pipeline_parallel_microbatch_size is the number of micro-batches
    piped = export(job(BIG), "torchtitan").text
    assert "--training.local_batch_size 16\n" in piped and "pipeline_parallel_microbatch_size 1\n" in piped
    flat = export(job(replace(BIG, pp=1)), "torchtitan").text
    assert "--training.local_batch_size 1\n" in flat


def test_accelerate_says_that_it_has_no_pipeline() -> None:
    made = export(job(BIG), "accelerate")
    assert "cannot say pp = 2 (takes 1)" in made.text
    content: dict[str, Any] = yaml.safe_load(made.text)
    assert content["parallelism_config"]["parallelism_config_cp_comm_strategy"] == "alltoall"


def test_paddle_places_row_parallel_weights_on_their_input_dim() -> None:
    names: dict[str, Any] = {}
    exec(export(job(BIG, runtime="paddle"), "paddle-auto").text, names)
    tp = [axis for axis in names["AXES"] if axis != "pp"].index("tp")
    places = {name: placed[tp] for name, placed in names["PLACEMENTS"].items()}
    assert places["layer.attention.q.weight"] == places["layer.mlp.up.weight"] == "Shard(1)"
    assert places["layer.attention.out.weight"] == places["layer.mlp.down.weight"] == "Shard(0)"
    assert places["layer.attention.norm.weight"] == "Replicate"


def test_paddle_keeps_keys_whole_where_tp_exceeds_their_heads() -> None:
    made = export(job(replace(BIG, tp=8, dp_shard=1), runtime="paddle"), "paddle-auto")
    assert any("layer.attention.k.weight" in remark for remark in made.remarks)


def test_ranks_in_another_order_are_said() -> None:
    of = job(BIG, runtime="paddle")
    assert any("outermost first" in sentence for sentence in export(of, "nanotron").sentences)
    assert not any("outermost first" in sentence for sentence in export(job(BIG), "nanotron").sentences)


def test_megatron_lays_out_what_counts_multi_token_prediction_as_a_layer() -> None:
    # Megatron Core's own example lays 61 layers and one module over 32 chunks: the ends hold less than 2 layers
    whole = layout(chunk_layers(61, 16, 1), 1)
    assert whole == "Ettt|" + "tttt|" * 14 + "ttmL"
    for chunks in (4, 8, 16, 32):
        parts = layout(chunk_layers(61, chunks, 1), 1).split("|")
        assert len(parts) == chunks
        assert parts[0].startswith("E") and parts[-1].endswith("mL")
        assert tuple(part.count("t") for part in parts) == chunk_layers(61, chunks, 1)
        assert sum(part.count("t") for part in parts) == 61


def test_a_layout_of_megatron_stands_in_place_of_the_virtual_stages() -> None:
    # megatron/training/arguments.py asserts that no more than one of the two is given
    base = job(replace(BIG, vpp=4, schedule="interleaved"))
    many = replace(base.model, pattern=base.model.pattern[:1] * 13, mtp_layers=1)
    given = arguments(replace(base, model=many))
    assert given["--pipeline-model-parallel-layout"].count("|") == 2 * 4 - 1
    assert "--num-virtual-stages-per-pipeline-rank" not in given
    assert arguments(base)["--num-virtual-stages-per-pipeline-rank"] == "4"


def test_a_choice_operator_by_operator_becomes_megatrons_modules_and_is_said() -> None:
    of = job(replace(BIG, zero=2, recompute="selective"), runtime="torchtitan")
    assert of.runtime.selective == ("operators",)
    made = export(of, "megatron")
    assert "--recompute-modules layernorm mlp\n" in made.text
    assert any("operator by operator" in remark for remark in made.remarks)
