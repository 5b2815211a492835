"""Exports are loaded by megatron-core 0.16.1, deepspeed 0.19.8, torchtitan 0.3.0 and accelerate 1.15.0 on CPU.

Not part of the core tests: .ci/frameworks makes the environment. Where a loader accepts anything, the
values are read back from it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
import yaml
from launching import job, named, sample

from distplan.costmodel.strategy import Strategy
from distplan.planner.export import export
from distplan.planner.launcher import Job

SAMPLES = 16


MEGATRON = sample("megatron", SAMPLES)
DEEPSPEED = sample("deepspeed", SAMPLES)
TORCHTITAN = sample("torchtitan", SAMPLES)


# ---------------------------------------------------------------- megatron-core


def fields_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("of", MEGATRON, ids=named)
def test_megatron_core_accepts_the_settings_of_both_megatron_exports(of: Job) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    content = yaml.safe_load(export(of, "megatron-bridge").text)
    beside = {"position_embedding_type", "share_embeddings_and_output_weights", "make_vocab_size_divisible_by"}
    beside |= {"vocab_size", "seq_length"}
    model = {key: value for key, value in content["model"].items() if key not in beside}
    assert set(model) <= fields_of(TransformerConfig)
    config = TransformerConfig(**model, pipeline_dtype=torch.bfloat16, bf16=True)
    s = of.strategy
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (s.tp, s.pp)
    assert (config.context_parallel_size, config.sequence_parallel) == (s.cp, s.sp)
    assert (config.virtual_pipeline_model_parallel_size or 1) == s.vpp
    assert config.expert_model_parallel_size == s.ep
    assert config.recompute_granularity == (None if s.recompute == "none" else s.recompute)
    buffers = DistributedDataParallelConfig(**content["ddp"])
    assert buffers.use_distributed_optimizer == (s.zero > 0)
    assert buffers.num_distributed_optimizer_instances == (s.dp_replicate if s.zero else 1)
    OptimizerConfig(**content["optimizer"], bf16=True, params_dtype=torch.bfloat16)


@pytest.mark.parametrize("of", MEGATRON, ids=named)
def test_megatron_core_makes_the_groups_of_the_plan(of: Job) -> None:
    from megatron.core.parallel_state import RankGenerator

    s = of.strategy
    ranks = RankGenerator(tp=s.tp, ep=1, dp=s.dp, pp=s.pp, cp=s.cp, order="tp-cp-ep-dp-pp")
    assert ranks.get_ranks("tp")[0] == list(range(s.tp))
    assert [len(group) for group in ranks.get_ranks("dp")] == [s.dp] * (s.gpus // s.dp)
    assert ranks.get_ranks("pp")[0] == [stage * s.gpus // s.pp for stage in range(s.pp)]


# ---------------------------------------------------------------- deepspeed


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    """16 ranks in one process."""
    import deepspeed
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, auto_mpi_discovery=False)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("of", DEEPSPEED, ids=named)
def test_deepspeed_reads_what_was_meant(of: Job) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    class Mesh:
        """What the program that builds the model tells DeepSpeed."""

        def get_data_parallel_world_size(self) -> int:
            return of.strategy.dp

    content = json.loads(export(of, "deepspeed").text)
    s, w = of.strategy, of.workload
    alone = s.tp == s.pp == 1 and (s.cp == 1 or "sequence_parallel_size" in content)
    config: Any = DeepSpeedConfig(content, mpu=None if alone else Mesh())
    assert config.world_size == s.dp
    assert config.train_batch_size == w.global_batch
    assert config.train_micro_batch_size_per_gpu == s.micro_batch
    assert config.gradient_accumulation_steps == of.micro_batches
    assert config.zero_optimization_stage == s.zero
    assert config.bfloat16_config.enabled
    assert config.grad_accum_dtype == "fp32"
    assert config.gradient_clipping == 1.0
    assert config.pipeline["stages"] == (s.pp if s.pp > 1 else "auto")
    if "tensor_parallel" in content:
        assert config.tensor_parallel_config.autotp_size == s.tp
    if "expert_parallel" in content:
        assert config.expert_parallel_config.autoep_size == s.ep


@pytest.mark.usefixtures("processes")
def test_deepspeed_refuses_what_the_import_refuses() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    content = json.loads(export(job(Strategy(dp_shard=16, zero=2)), "deepspeed").text)
    content["zero_optimization"]["overlap_com"] = True
    with pytest.raises(Exception, match="overlap_com"):
        DeepSpeedConfig(content)


# ---------------------------------------------------------------- torchtitan


def words(text: str) -> list[str]:
    return [word for line in text.splitlines() if not line.startswith("#") for word in line.split()]


@pytest.mark.parametrize("of", TORCHTITAN, ids=named)
def test_torchtitan_parses_what_was_meant(of: Job) -> None:
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    s, w = of.strategy, of.workload
    arguments = words(export(of, "torchtitan").text)
    config: Any = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *arguments])
    p, t = config.parallelism, config.training
    assert (p.tensor_parallel_degree, p.pipeline_parallel_degree) == (s.tp, s.pp)
    assert (p.context_parallel_degree, p.expert_parallel_degree) == (s.cp, s.ep)
    assert (p.data_parallel_replicate_degree, p.data_parallel_shard_degree) == (
        (s.dp_replicate, s.dp_shard) if s.zero else (s.dp, 1)
    )
    assert p.fsdp_reshard_after_forward == ("always" if s.zero == 3 else "never")
    assert p.enable_sequence_parallel == s.sp
    assert (t.global_batch_size, t.seq_len, t.max_norm) == (w.global_batch, w.seq_len, 1.0)
    kinds = {"none": type(None), "full": FullAC.Config, "selective": SelectiveAC.Config}
    assert isinstance(config.activation_checkpoint, kinds[s.recompute])
    if s.pp > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(p.pipeline_parallel_schedule)
        assert t.local_batch_size // p.pipeline_parallel_microbatch_size == of.micro_batches
    dims = ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree, dp_shard=p.data_parallel_shard_degree, cp=s.cp, tp=s.tp,
        pp=s.pp, ep=s.ep, world_size=s.gpus,
    )  # fmt: skip
    assert dims.dp_shard * dims.dp_replicate == s.dp


@pytest.mark.parametrize("of", [of for of in TORCHTITAN if of.strategy.pp > 1], ids=named)
def test_torchtitan_cuts_the_model_into_the_chunks_of_the_plan(of: Job) -> None:
    from types import SimpleNamespace

    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _get_pipeline_metadata

    s = of.strategy
    arguments = words(export(of, "torchtitan").text)
    config: Any = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *arguments])
    model = SimpleNamespace(layers=range(of.model.layers))
    stages, *split = _get_pipeline_metadata(SimpleNamespace(pp=s.pp), config.parallelism, model)
    assert stages == s.pp * s.vpp
    assert len(_generate_llm_fqn_per_model_part(stages, *split)) == stages


# ---------------------------------------------------------------- accelerate


@pytest.mark.parametrize("of", [of for of in TORCHTITAN if of.strategy.pp == of.strategy.ep == 1], ids=named)
def test_accelerate_launches_what_was_meant(of: Job, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = tmp_path / "fsdp.yaml"
    file.write_text(export(of, "accelerate").text)
    config: Any = load_config_from_file(str(file))
    s = of.strategy
    assert config.num_processes == s.gpus
    parser = launch_command_parser()
    arguments, *_ = _validate_launch_command(parser.parse_args(["--config_file", str(file), "train.py"]))
    environment = prepare_multi_gpu_env(arguments)
    if not (s.zero or s.tp > 1 or s.cp > 1):
        assert config.distributed_type == "MULTI_GPU"
        return
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == str(s.zero == 3).lower()
    assert environment["FSDP_ACTIVATION_CHECKPOINTING"] == str(s.recompute == "full").lower()
    sizes = {
        axis: int(environment[f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"])
        for axis in ("dp_replicate", "dp_shard", "tp", "cp")
    }
    assert sizes == {"dp_replicate": s.dp_replicate, "dp_shard": s.dp_shard, "tp": s.tp, "cp": s.cp}
    if s.cp > 1:
        rotation = {"ring": "alltoall", "all_gather": "allgather"}[s.cp_kind]
        assert environment["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == rotation
    if s.dp_replicate > 1 and s.dp_shard == 1:
        return  # accelerate refuses this one: replicas without shards are its MULTI_GPU
    made = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
    assert made.total_size == s.gpus
