"""Files as people have them: shell scripts, "auto", FSDP1, TOML; and what is wrong in them, with its line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distplan.costmodel.strategy import Strategy
from distplan.hardware.errors import DistplanError
from distplan.planner.import_arguments import _split
from distplan.planner.import_file import READERS, import_file

SCRIPT = """\
#!/bin/bash
# Trains on two nodes
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=2
TP=4
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr ${MASTER:-localhost}
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP}
    --pipeline-model-parallel-size 2 --num-layers 32
    --num-layers-per-virtual-pipeline-stage 4
    --sequence-parallel
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_PARALLEL_ARGS[@]} \\
    --micro-batch-size 2 --global-batch-size=256 --seq-length 4096 \\
    --bf16 --use-distributed-optimizer --recompute-activations
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_training_script_of_megatron(tmp_path: Path) -> None:
    found = import_file(written(tmp_path, "train.sh", SCRIPT))
    assert (found.launcher, found.runtime) == ("megatron", "megatron")
    assert found.strategy == Strategy(
        dp_shard=2, tp=4, pp=2, vpp=4, sp=True, zero=1, micro_batch=2, schedule="interleaved", recompute="selective"
    )
    assert found.workload["global_batch"] == 256
    assert found.workload["seq_len"] == 4096
    assert found.workload["precision"] == "bf16"
    assert found.model == {"layers": 32}


@pytest.mark.parametrize(("written_as", "chunks"), [("Ettt|(tt|)*29,m|L", 32), ("Et|tt|tt|tL", 4), ("Et*3|t*4|*3L", 5)])
def test_a_layout_of_megatron_says_the_chunks(written_as: str, chunks: int, tmp_path: Path) -> None:
    # the first is the example of Megatron Core's parser: [E t t t], 29 of [t t], [m], [L]
    def script(stages: int) -> Path:
        sizes = f"--nproc-per-node {stages} --pipeline-model-parallel-size {stages} --global-batch-size 64"
        text = f"torchrun pretrain_gpt.py {sizes} --pipeline-model-parallel-layout '{written_as}'\n"
        return written(tmp_path, f"{stages}.sh", text)

    assert import_file(script(1)).strategy.vpp == chunks
    assert import_file(script(chunks)).strategy.vpp == 1
    with pytest.raises(DistplanError, match="do not go round 3 stages"):
        import_file(script(3))


def test_megatron_without_a_number_of_gpus_asks_for_it(tmp_path: Path) -> None:
    path = written(tmp_path, "a.args", "--tensor-model-parallel-size 8\n")
    with pytest.raises(DistplanError, match="give --gpus"):
        import_file(path)
    assert import_file(path, gpus=16).strategy == Strategy(tp=8, dp_shard=2, zero=0)
    with pytest.raises(DistplanError, match="not a multiple"):
        import_file(path, gpus=12)


def test_deepspeed_with_auto_for_the_trainer_to_fill(tmp_path: Path) -> None:
    content = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
        "stage3_prefetch_bucket_size": "auto"}, "gradient_clipping": "auto",
    }  # fmt: skip
    found = import_file(written(tmp_path, "ds.json", json.dumps(content)), gpus=8)
    assert found.strategy == Strategy(dp_shard=8, zero=3)
    assert found.workload["offload_optimizer"] is True
    assert any("batch size open" in note for note in found.notes)


def test_torchtitan_from_before_0_3_is_toml(tmp_path: Path) -> None:
    text = """\
[job]
description = "a run"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
context_parallel_degree = 2
context_parallel_rotate_method = "alltoall"
[activation_checkpoint]
mode = "full"
"""
    found = import_file(written(tmp_path, "run.toml", text), gpus=64)
    assert found.strategy == Strategy(
        dp_shard=4, tp=8, cp=2, cp_kind="ring", sp=True, zero=3, micro_batch=2, recompute="full"
    )
    assert found.workload["seq_len"] == 8192


def test_layers_per_stage_need_the_layers_of_the_model(tmp_path: Path) -> None:
    text = """\
--parallelism.pipeline_parallel_degree 4
--parallelism.pipeline_parallel_schedule Interleaved1F1B
--parallelism.pipeline_parallel_layers_per_stage 3
--training.local_batch_size 4
"""
    path = written(tmp_path, "a.args", text)
    # (34 + embedding + head) / 3 = 12 stages on 4 ranks
    assert import_file(path, gpus=16, layers=34).strategy.vpp == 3
    blind = import_file(path, gpus=16)
    assert blind.strategy.vpp == 2
    assert any("--model" in note for note in blind.notes)
    with pytest.raises(DistplanError, match="make 11 stages, no multiple of 4"):
        import_file(path, gpus=16, layers=31)


def test_torchtitan_without_a_global_batch_does_not_accumulate(tmp_path: Path) -> None:
    text = "--training.local_batch_size 4 --parallelism.tensor_parallel_degree 2\n"
    found = import_file(written(tmp_path, "a.args", text), gpus=16)
    assert found.strategy.micro_batch == 4
    assert found.workload["global_batch"] == 4 * 8


def test_accelerate_with_fsdp1(tmp_path: Path) -> None:
    text = """\
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_offload_params: false
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
    found = import_file(written(tmp_path, "a.yaml", text))
    assert found.strategy == Strategy(dp_shard=8, zero=2)
    assert found.workload["precision"] == "bf16-sharded"


WRONG = {
    "a.args": [
        (
            "--bf16\n--tensor-model-paralel-size 8\n",
            ":2: tensor-model-paralel-size: .*did you mean tensor-model-parallel",
        ),
        ("--bf16\n\n--tensor-model-parallel-size eight\n", ":3: tensor-model-parallel-size: .*whole number"),
        ("--tensor-model-parallel-size 0\n", ":1: tensor-model-parallel-size: 0 is too small"),
        ("--tensor-model-parallel-size $TP\n", ":1: tensor-model-parallel-size: .*whole number"),
        ("--cp-comm-type ring --context-parallel-size 2\n", ":1: cp-comm-type: 'ring' cannot be read"),
        ("--num-layers 10 --num-layers-per-virtual-pipeline-stage 4\n", "do not make whole chunks"),
        ("--num-layers-per-virtual-pipeline-stage 4\n", "needs --num-layers"),
        ("--bf16 'open\n", "cannot be split into words"),
        ("--parallelism.tensor_parallel_degre 8\n", ":1: parallelism.tensor_parallel_degre: .*did you mean"),
        ("--parallelism.data_parallel_shard_degree 0\n", "0 is no degree"),
        ("--parallelism.nonsense_entirely 8\n", ":1: .*refuses"),
    ],
    "a.json": [
        (
            '{"train_batch_size": 64,\n "zero_optimizaton": {"stage": 2}}',
            ":2: zero_optimizaton: .*did you mean zero_opt",
        ),
        (
            '{"bf16": {},\n "zero_optimization": {\n"overlap_com": true}}',
            ":3: zero_optimization.overlap_com: .*overlap_comm",
        ),
        ('{"zero_optimization":\n {"stage": 7}}', ":2: zero_optimization.stage: 7 is too large"),
        (
            '{"train_batch_size": 60, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}',
            "60 is not a multiple of 8",
        ),
        ('{"train_batch_size": 8, "optimizer": {"type": "Lamb"}}', "Lamb"),
        ('{"hello": 1}', "no launcher's file"),
    ],
    "a.yaml": [
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_vershion: 2\n", ":3: fsdp_config.fsdp_vershion: .*fsdp_version"),
        ("distributed_type: FSDP\nnum_proceses: 8\n", ":2: num_proceses: .*num_processes"),
        ("distributed_type: TPU\n", ":1: distributed_type: 'TPU' cannot be read"),
        ("strategy: {}\nformat_version: '1.0'\n", "is a strategy of distplan already"),
    ],
    "a.toml": [
        ("[parallelism]\ntensor_parallel_degree = 'x'\n", ":2: parallelism.tensor_parallel_degree: .*whole number")
    ],
}


@pytest.mark.parametrize(("name", "text", "said"), [(name, *case) for name, cases in WRONG.items() for case in cases])
def test_what_is_wrong_is_said_with_its_place(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(DistplanError, match=said) as caught:
        import_file(path, gpus=8)
    assert str(caught.value).startswith(str(path))


def test_an_unknown_option_that_is_like_no_other_is_passed_over_and_said(tmp_path: Path) -> None:
    found = import_file(written(tmp_path, "a.args", "--bf16 --my-own-thing 3\n"), gpus=8)
    assert found.notes == ("'my-own-thing' is not known and passed over",)


WORDS = st.sampled_from(
    (
        "--tensor-model-parallel-size", "--bf16", "8", "-1", "$X", "X=", "X=3", "(", ")", "=", "--", "'", '"', "\\",
        "#", "\n", "--recompute-granularity", "full", "--parallelism.tensor_parallel_degree", "{", "[", "parallelism]",
        "activation-checkpoint:full", "zero_optimization:", "stage:", "distributed_type:", "FSDP", "1e999", "\0", "80",
        "--num-layers",
    )
)  # fmt: skip


@given(st.text(alphabet="ab \n'\"\\#$=-", max_size=30))
def test_words_are_those_of_a_posix_shell(text: str) -> None:
    # a continued line ends a word here, so that a list without blanks before its backslashes is read as well
    # (and shlex keeps the backslash of "\\$", which POSIX takes away)
    if "#" in text or "\\\n" in text or "\\$" in text:
        return
    try:
        expected = shlex.split(text)
    except ValueError as error:
        if "quotation" in str(error):
            with pytest.raises(DistplanError, match="never closed"):
                list(_split("x", text))
    else:
        assert [word for word, _ in _split("x", text)] == expected


@settings(max_examples=200, deadline=None)
@given(words=st.lists(WORDS, max_size=12), launcher=st.sampled_from((None, *READERS)))
def test_nonsense_ends_in_a_strategy_or_one_message(
    words: list[str], launcher: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.getbasetemp(), "nonsense.txt", " ".join(words))
    try:
        found = import_file(path, launcher=launcher, gpus=64)
    except DistplanError:
        return
    assert found.strategy.gpus == 64
