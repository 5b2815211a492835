"""Expert layers: what the dispatchers of a framework move, and what it adds in kernels of its own."""

from dataclasses import replace

import numpy as np
import pytest

from distplan.costmodel.estimate import estimate
from distplan.costmodel.exchanges import reached
from distplan.costmodel.model import Model, Moe, Workload
from distplan.costmodel.model_file import load_model, read_model
from distplan.costmodel.runtime import Runtime, load_runtime
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.workload import precision
from distplan.hardware.cluster import load_cluster
from distplan.hardware.documents import Document
from distplan.hardware.rates import rates_for

MEGATRON = replace(load_runtime("megatron"), software_factors={"default": 1.0})
ONCE = replace(MEGATRON, expert_dispatch="once_per_domain")
H100 = load_cluster("dgx-h100")
LAYER = {"layers": 1, "kv_heads": 8, "vocab": 32000}
DEEPSEEK = LAYER | {"hidden": 7168, "heads": 56, "experts": 32, "top_k": 8, "expert_ffn": 2048, "shared_ffn": 2048}
DEEPSEEK |= {"router_groups": 8, "top_groups": 4}
MIXTRAL = LAYER | {"hidden": 4096, "heads": 32, "experts": 8, "top_k": 2, "expert_ffn": 14336}


def parts(model: Model, runtime: Runtime, *names: str) -> float:
    """Seconds per micro-batch of 4,096 tokens on each of 8 ranks of experts."""
    load = Workload(seq_len=4096, global_batch=8, precision=precision("bf16"), attention="flash")
    found = estimate(model, load, H100, runtime, Strategies.of([Strategy(dp_shard=8, ep=8)]))
    return sum(float(found.time[name][0]) for name in names)


def of(facts: dict[str, int]) -> Model:
    return read_model(Document(file="layer", value=facts, lines={}), "layer")


def test_deepep_saves_what_megatron_measured_over_all_to_all() -> None:
    # Megatron-LM d98e8a64, moe_perf/baseline.json, bf16, one layer forward and backward on 8 H100: alltoall less DeepEP
    # is 1.44 + 1.43 ms where a rank has a group of four experts, and less than nothing where it has one expert
    saved = [parts(of(m), MEGATRON, "exposed ep", "memory-bound") for m in (DEEPSEEK, MIXTRAL)]
    saved = [
        s - parts(of(m), ONCE, "exposed ep", "memory-bound") for s, m in zip(saved, (DEEPSEEK, MIXTRAL), strict=True)
    ]
    assert saved[0] == pytest.approx(2.87e-3, rel=0.5)
    assert abs(saved[1]) < 0.2e-3


def test_a_rank_gets_once_a_token_that_several_of_its_experts_want() -> None:
    moe = Moe(experts=32, top_k=8, ffn=2048, groups=8, top_groups=4)
    ranks = np.array([1.0, 2.0, 4.0, 8.0, 32.0])
    share = reached(moe, ranks)
    assert share[0] == pytest.approx(1.0 / moe.top_k)
    assert np.all(share * moe.top_k <= np.minimum(ranks, moe.top_k))
    assert share[3] * moe.top_k <= moe.top_groups  # a group per rank: no more ranks than groups
    assert np.all(np.diff(share) > 0.0)


def test_the_bias_behind_megatrons_experts_moves_68_bytes_for_each_value_of_a_slot() -> None:
    model = load_model("gpt-oss-20b").model
    more = parts(model, MEGATRON, "memory-bound") - parts(
        model, replace(MEGATRON, fused_expert_bias=True), "memory-bound"
    )
    slots, layers = 4096 * 4, len(model.pattern)
    moved = 68.0 * slots * model.hidden * layers
    fused = 2.0 * slots * model.hidden * layers  # its gradient's sum reads them once
    assert more == pytest.approx((moved - fused) / rates_for(H100.accelerator).memory_bandwidth, rel=0.1)
