"""Exports are loaded by Paddle 3.3.1 on CPU, in its three paradigms, and every value is read back.

Paddle takes unknown sections, keys and schedules without a word; so each section is compared with what
was meant, and with the sections' own names. Not part of the core tests: .ci/frameworks runs them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from launching import named, sample
from paddle.distributed import fleet

from distplan.costmodel.graph import segments
from distplan.planner.export import export
from distplan.planner.launcher import Job

SAMPLES = 16
SCHEDULES = {"f_then_b": "FThenB", "1f1b": "1F1B", "interleaved": "VPP", "zb_h1": "ZBH1"}


JOBS = sample("paddle", SAMPLES)


def load(of: Job, launcher: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(export(of, launcher).text, launcher, "exec"), names)  # the file that was just made
    return names


@pytest.mark.parametrize("of", JOBS, ids=named)
def test_fleet_takes_the_hybrid_configs_and_makes_the_groups(of: Job) -> None:
    module = load(of, "paddle-fleet")
    strategy, s = module["strategy"](), of.strategy
    configs = strategy.hybrid_configs
    replicate, shard = (s.dp_replicate, s.dp_shard) if s.zero else (s.dp, 1)
    degrees = {"dp": replicate, "mp": s.tp, "pp": s.pp, "sharding": shard, "sep": s.cp}
    assert {name: configs[f"{name}_degree"] for name in degrees} == degrees
    assert strategy.pipeline_configs["accumulate_steps"] == of.micro_batches
    assert strategy.pipeline_configs["micro_batch_size"] == s.micro_batch
    order = strategy.hybrid_parallel_order
    assert sorted(order) == sorted(degrees)
    names = {"dp": "data", "mp": "model", "pp": "pipe", "sharding": "sharding", "sep": "sep"}
    topology = fleet.base.topology.CommunicateTopology(
        [names[axis] for axis in order], [degrees[axis] for axis in order]
    )
    assert topology.world_size() == s.gpus
    assert topology.get_comm_list("model")[0] == list(range(s.tp))


@pytest.mark.parametrize("of", JOBS, ids=named)
def test_the_engine_strategy_reads_back_as_meant(of: Job) -> None:
    strategy, s = load(of, "paddle-auto")["strategy"](), of.strategy
    assert (strategy.sharding.enable, strategy.pipeline.enable) == (s.zero > 0, s.pp > 1)
    if s.zero:
        assert (strategy.sharding.stage, strategy.sharding.degree) == (s.zero, s.dp_shard)
    if s.pp > 1:
        p = strategy.pipeline
        assert (p.schedule_mode, p.pp_degree, p.vpp_degree) == (SCHEDULES[s.schedule], s.pp, s.vpp)
        assert (p.micro_batch_size, p.accumulate_steps) == (s.micro_batch, of.micro_batches)
    elif of.micro_batches > 1:
        assert (strategy.gradient_merge.enable, strategy.gradient_merge.k_steps) == (True, of.micro_batches)
    assert strategy._recompute.enable == (s.recompute == "full")
    assert (strategy.amp.enable, strategy.amp.dtype, strategy.amp.level) == (True, "bfloat16", "o2")


@pytest.mark.parametrize("of", JOBS, ids=named)
def test_every_key_of_the_engine_strategy_is_one_that_paddle_knows(of: Job) -> None:
    written = load(of, "paddle-auto")["STRATEGY"]
    default = dist.Strategy()
    for section, values in written.items():
        known = getattr(default, section if hasattr(default, section) else f"_{section}").to_dict()
        assert set(values) <= set(known), section


def stored_shape(groups: list[tuple[str, ...]], sizes: dict[str, float]) -> list[int]:
    return [int(np.prod([sizes[dim] for dim in dims])) for dims in groups]


@pytest.mark.parametrize("of", JOBS, ids=named)
def test_shard_tensor_places_every_weight_of_the_model(of: Job) -> None:
    from distplan.planner.paddle_placements import _groups

    module, s = load(of, "paddle-auto"), of.strategy
    mesh = module["mesh"]()
    assert mesh.shape == module["SHAPE"]
    assert sorted(mesh.process_ids) == list(range(s.gpus))
    split = s.tp
    for segment in segments(of.model, of.workload, True):
        for weight in segment.weights:
            shape = stored_shape(_groups(segment, weight), dict(segment.sizes))
            placed = module["shard_weight"](weight.name, paddle.zeros(shape, dtype="float32"), 0)
            assert placed.shape == shape
            local = placed._local_value().shape
            parts = np.prod(shape) / np.prod(local)
            if "experts" in weight.dims:
                assert parts == s.ep * (s.etp if "expert_ffn" in weight.dims else 1), weight.name
            elif {"ffn", "vocab", "kv_heads"} & set(weight.dims):
                assert parts == (split if weight.name not in _whole(of) else 1), weight.name
            else:
                assert parts == 1, weight.name


def _whole(of: Job) -> set[str]:
    from distplan.planner.paddle_placements import weight_places

    return set(weight_places(of, ("dp_replicate", "dp_shard", "cp", "tp")).whole)


@pytest.mark.parametrize("of", JOBS, ids=named)
def test_tokens_and_hidden_states_are_sharded_on_the_axes_of_the_plan(of: Job) -> None:
    module, s = load(of, "paddle-auto"), of.strategy
    tokens = module["shard_input"](paddle.zeros([s.dp, 8 * s.cp], dtype="int64"))
    assert list(tokens._local_value().shape) == [1, 8]
    mesh = module["stage_mesh"](0)
    hidden = dist.shard_tensor(paddle.zeros([s.dp, 16 * s.cp * s.tp, 4]), mesh, module["placements"](module["HIDDEN"]))
    assert list(hidden._local_value().shape) == [1, 16 if s.sp else 16 * s.tp, 4]
