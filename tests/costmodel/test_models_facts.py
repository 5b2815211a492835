"""What is published of models that people train: sizes, FLOPs, activations, time, long context, the experts' mesh."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from distplan.costmodel.combine import local_tables
from distplan.costmodel.estimate import Estimate, estimate
from distplan.costmodel.exchanges import reached
from distplan.costmodel.graph import parameters
from distplan.costmodel.hf_config import load_json, read_config
from distplan.costmodel.model import Attention, Mlp, Model, Moe, Workload
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import Runtime, load_runtime
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.tables import Engine, engine
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster
from distplan.hardware.collectives import price
from distplan.hardware.groups import group_span
from distplan.planner.constraints import Context, explain_row

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
ROWS = {row["name"]: row for row in csv.DictReader((CONFIGS / "params.csv").read_text().splitlines())}
MEGATRON = load_runtime("megatron")
H800 = load_cluster("h800-deepseek")
H100 = load_cluster("dgx-h100")


def config(name: str) -> Model:
    return read_config(load_json(CONFIGS / f"{name}.json"), name).model


def counts(name: str) -> tuple[float, float]:
    model = config(name)
    return parameters(model, workload(model, {}, gpus=1))


# ---------------------------------------------------------------- parameters, read off the graph


@pytest.mark.parametrize("name", sorted(ROWS))
def test_total_and_active_parameters_of_every_config(name: str) -> None:
    total, active = counts(name)
    assert total == pytest.approx(int(ROWS[name]["computed_total"]), rel=1e-3)
    assert active == pytest.approx(int(ROWS[name]["computed_active"]), rel=1e-3)


def test_all_56_configs_are_there() -> None:
    assert len(ROWS) == 56
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(ROWS)


@pytest.mark.parametrize(
    "name,total,active",
    [
        ("deepseek-v3", 671.0, 37.0),
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("kimi-k2", 1026.0, 32.0),
        ("glm-4.5-air", 106.0, 12.0),
        ("gpt-oss-120b", 116.8, 5.1),
        ("ernie-4.5-300b-a47b", 300.0, 47.0),
        ("llama-4-maverick", 400.0, 17.0),
        ("llama-4-scout", 109.0, 17.0),
        ("hunyuan-a13b", 80.0, 13.0),
        ("nemotron-3-nano-30b-a3b", 31.6, 3.6),
    ],
)
def test_published_sizes_in_billions(name: str, total: float, active: float) -> None:
    # as printed on the cards, which round and differ in whether the embedding is active: within 15 %
    found_total, found_active = counts(name)
    assert found_total / 1e9 == pytest.approx(total, rel=0.02)
    assert found_active / 1e9 == pytest.approx(active, rel=0.15)


# ---------------------------------------------------------------- FLOPs


def test_deepseek_v3_takes_250_gflop_per_token_at_4096_causal() -> None:
    # arXiv 2505.09343, table 2: training cost per token of DeepSeek-V3, 250 GFLOPS, sequence 4096
    model = config("deepseek-v3")
    eng = engine(model, workload(model, {"seq_len": 4096}, gpus=1), H800, MEGATRON)
    forward, attention = eng.flops_per_sequence()
    per_token = 3.0 * (forward - 0.5 * attention) / 4096
    assert per_token == pytest.approx(250e9, rel=0.01)


# ---------------------------------------------------------------- activations of latent attention


def saved(eng: Engine, strategy: Strategy) -> float:
    """Bytes that a layer of the first kind keeps of one sequence."""
    local = local_tables(eng, Strategies.of([strategy]), np.array([float(strategy.gpus)]))
    return float(local.chosen["saved"][1, local.index[0]])


def latent_elements(a: Attention, hidden: int, tp: int) -> float:
    """Elements per token that backward of latent attention needs, from its definition (DeepSeek-V2, arXiv 2405.04434,
    section 2.1): the input of every norm and projection, and what the attention kernel reads and writes. What is
    computed per head is sharded on tp, the latents are whole."""
    heads = a.heads / tp
    elements = 2.0 * hidden  # the layer's input, and its norm: the input of the down-projections
    if a.q_lora_rank:
        elements += 2.0 * a.q_lora_rank  # into its norm, and into the up-projection
    elements += 2.0 * a.kv_lora_rank  # the same; rotating the shared key is linear and needs nothing of it
    elements += heads * 2.0 * a.head_dim + heads * a.v_head_dim  # q and k with rope, v
    return elements + heads * a.v_head_dim  # the output: the kernel's backward and the output projection


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_with_latent_attention_keeps_what_its_definition_implies(name: str, tp: int) -> None:
    model = config(name)
    kind = model.kinds[model.pattern[0]]
    assert isinstance(kind.mixer, Attention) and isinstance(kind.ffn, Mlp) and kind.mixer.kv_lora_rank
    seq = 4096
    eng = engine(model, workload(model, {"seq_len": seq}, gpus=8), H800, MEGATRON)
    mlp = 2.0 * model.hidden + 3.0 * kind.ffn.ffn / tp  # residual, its norm; gate, up and their product
    statistics = 4.0 * kind.mixer.heads / tp  # log-sum-exp of the scores in fp32
    expected = seq * (2.0 * (latent_elements(kind.mixer, model.hidden, tp) + mlp) + statistics)
    assert saved(eng, Strategy(tp=tp)) == pytest.approx(expected, rel=1e-9)


def test_latent_attention_is_not_cheaper_in_activations_than_its_heads() -> None:
    # the cache at inference is small; in training the up-projected keys and values are kept
    model = config("deepseek-v3")
    attention = next(k.mixer for k in model.kinds.values())
    assert isinstance(attention, Attention)
    per_head = attention.heads * (2 * attention.head_dim + 2 * attention.v_head_dim)
    assert latent_elements(attention, model.hidden, 1) > per_head


# ---------------------------------------------------------------- DeepSeek-V3's training time

TOKENS = 15360 * 4096
GPUS = 2048
MEASURED = 180e3
"""H800 hours per 10^12 tokens (arXiv 2412.19437, section 1)"""
LAYOUT = Strategy(pp=16, dp_shard=128, ep=64, zero=1)
"""16-way PP, 64-way EP over 8 nodes, ZeRO-1 (section 3.2); 2048 GPUs"""
ANY = load_runtime("any")
THEIRS = replace(
    ANY, overlap={**ANY.overlap, "ep": True}, expert_dispatch="once_per_domain", expert_overlap="micro_batches"
)
"""every token crosses to a node once, behind the computation of another micro-batch (sections 3.2.1 and 3.2.2)"""


def deepseek(runtime: Runtime, schedule: str = "1f1b") -> Estimate:
    model = load_model("deepseek-v3").model
    job = workload(model, {"seq_len": 4096, "global_batch": 15360, "precision": "deepseek-v3"}, gpus=GPUS)
    return estimate(model, job, H800, runtime, replace(LAYOUT, schedule=schedule), detail=True)


def hours(seconds: float) -> float:
    """GPU hours per 10^12 tokens."""
    return seconds * GPUS / 3600.0 / TOKENS * 1e12


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_deepseek_v3_trains_at_180_k_hours(schedule: str) -> None:
    # DualPipe's bubble lies between the two (table 2)
    found = deepseek(THEIRS, schedule)
    assert hours(float(found.step_seconds_low[0])) <= MEASURED <= hours(float(found.step_seconds_high[0]))
    assert hours(float(found.step_seconds[0])) == pytest.approx(MEASURED, rel=0.2)


def test_deepseek_v3_reaches_about_39_percent_of_the_bf16_peak() -> None:
    found = deepseek(THEIRS, "zb_h1")
    mfu = float(found.model_flops_causal[0] / found.step_seconds[0]) / H800.accelerator.peak_flops["bf16"]
    assert mfu == pytest.approx(0.39, abs=0.08)


def test_without_its_own_dispatch_and_overlap_it_would_wait_for_the_network() -> None:
    waits = [deepseek(r).time["exposed ep"][0] for r in (ANY, replace(ANY, expert_dispatch="once_per_domain"), THEIRS)]
    assert waits[0] > 1.5 * waits[1] > 3.0 * waits[2] > 0.0
    assert hours(float(deepseek(ANY).step_seconds[0])) > 1.3 * MEASURED


def domains_of(moe: Moe, domains: int, draws: int = 20000) -> float:
    """Domains that the experts of a token are in, drawn as the router draws them: groups first, then experts."""
    rng = np.random.default_rng(0)
    total = 0
    for _ in range(draws):
        groups = rng.choice(moe.groups, moe.top_groups, replace=False)
        size = moe.experts // moe.groups
        chosen = rng.choice(moe.top_groups * size, moe.top_k, replace=False)
        experts = groups[chosen // size] * size + chosen % size
        total += len(np.unique(experts * domains // moe.experts))
    return total / draws


@pytest.mark.parametrize("groups,top_groups", [(8, 4), (8, 2), (1, 1)])
@pytest.mark.parametrize("domains", [1, 2, 4, 8])
def test_a_token_goes_once_to_every_domain_that_its_experts_are_in(groups: int, top_groups: int, domains: int) -> None:
    moe = Moe(experts=256, top_k=8, ffn=2048, groups=groups, top_groups=top_groups)
    ranks = np.array([8.0 * domains])
    group = group_span([(ranks, np.ones(1))], H800, ranks)
    drawn = domains_of(moe, domains) / moe.top_k
    # experts drawn without replacement spread a little more
    assert float(reached(moe, group.size / group.inside[0])[0]) == pytest.approx(drawn, rel=0.06)


def test_sending_once_moves_no_more_and_inside_one_domain_nothing_changes() -> None:
    moe = Moe(experts=256, top_k=8, ffn=2048, groups=8, top_groups=4)
    for ranks in (8.0, 16.0, 64.0):
        size = np.array([ranks])
        group = group_span([(size, np.ones(1))], H800, size)
        payload = np.array([4096.0 * 8 * 7168 * 2])
        plain = price("all_to_all", payload, group, H800)
        once = price("all_to_all", payload, group, H800, leaving=reached(moe, group.size / group.inside[0]))
        assert float(once.seconds[0]) <= float(plain.seconds[0])
        if ranks == 8.0:
            assert float(once.seconds[0]) == float(plain.seconds[0])
            assert float(once.wire_bytes[0]) == float(plain.wire_bytes[0])
        if ranks == 64.0:
            assert float(once.seconds[0]) < 0.6 * float(plain.seconds[0])


# ---------------------------------------------------------------- long context

PER_RANK = 16384


def long_context(seq: int, kind: str) -> Estimate:
    model = load_model("llama-3.1-8b").model
    job = workload(model, {"seq_len": seq, "global_batch": 8}, gpus=1024)
    # zero 0: what else is kept must not follow from how many ranks there are to shard it over
    strategy = Strategy(tp=8, sp=True, cp=seq // PER_RANK, cp_kind=kind, zero=0)
    return estimate(model, job, H100, MEGATRON, strategy, detail=True)


LENGTHS = (131072, 262144, 524288, 1048576)


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_memory_is_flat_at_a_constant_sequence_per_rank(kind: str) -> None:
    found = [long_context(seq, kind) for seq in LENGTHS]
    kept = [float(e.memory["activations"][0] + e.memory["logits and loss"][0]) for e in found]
    assert kept == pytest.approx([kept[0]] * len(kept), rel=1e-9)
    if kind == "ring":
        device = [float(e.device_bytes[0]) for e in found]
        assert device == pytest.approx([device[0]] * len(device), rel=1e-9)


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_time_rises_with_the_square_of_the_sequence(kind: str) -> None:
    found = [long_context(seq, kind) for seq in LENGTHS]
    # GPU seconds of attention: s² for the whole job, so s for each rank of cp in proportion to s
    attention = [float(e.time["attention"][0]) * seq / PER_RANK for e, seq in zip(found, LENGTHS, strict=True)]
    for (shorter, longer), (few, many) in zip(pairwise(attention), pairwise(LENGTHS), strict=True):
        assert longer / shorter == pytest.approx((many / few) ** 2, rel=0.02)
    gpus = [8 * seq // PER_RANK for seq in LENGTHS]
    rates = [float(e.tokens[0] / e.step_seconds[0]) / many for e, many in zip(found, gpus, strict=True)]
    assert rates == sorted(rates, reverse=True)


def test_a_million_tokens_neither_overflow_nor_fail() -> None:
    for kind in ("ring", "all_gather"):
        found = long_context(1048576, kind)
        parts = (*found.time.values(), *found.memory.values())
        numbers = (found.step_seconds, found.device_bytes, found.model_flops, *parts)
        assert all(np.isfinite(number).all() and (number >= 0.0).all() for number in numbers)


def test_flops_of_a_million_tokens_are_the_formula() -> None:
    model = load_model("llama-3.1-8b").model
    seq, hidden, layers = 1048576, 4096, 32
    eng = engine(model, workload(model, {"seq_len": seq}, gpus=1), H100, MEGATRON)
    _, attention = eng.flops_per_sequence()
    assert attention == pytest.approx(4.0 * layers * float(seq) ** 2 * hidden, rel=1e-12)


# ---------------------------------------------------------------- the experts' mesh


def least(tp: int, cp: int, pp: int, ep: int, etp: int, experts: Model, job: Workload) -> int:
    """The smallest count of GPUs that no rule refuses."""
    block = tp * cp * pp
    for gpus in range(block, 4097, block):
        s = Strategy(
            tp=tp,
            cp=cp,
            pp=pp,
            ep=ep,
            etp=etp,
            dp_shard=gpus // block,
            zero=0,
            sp=tp > 1,
            cp_kind="ring" if cp > 1 else "none",
        )
        batch = replace(job, global_batch=64 * s.dp)
        context = Context(model=experts, workload=batch, runtime=MEGATRON, gpus=gpus)
        if all(violation.warning for violation in explain_row(s, context)):
            return gpus
    raise AssertionError("no count is legal")


@pytest.mark.parametrize(
    "tp,cp,pp,ep,etp",
    [
        (1, 1, 1, 8, 1),
        (2, 1, 1, 8, 1),
        (4, 1, 1, 8, 1),
        (2, 2, 1, 8, 1),
        (2, 1, 2, 8, 1),
        (2, 1, 1, 4, 2),
        (8, 1, 1, 4, 1),
        (4, 1, 1, 6, 1),
        (2, 1, 2, 3, 1),
        (6, 1, 1, 4, 1),
        (2, 3, 1, 4, 1),
        (4, 1, 1, 3, 2),
    ],
)
def test_experts_fold_over_data_context_and_tensor_ranks(tp: int, cp: int, pp: int, ep: int, etp: int) -> None:
    # pp · lcm(tp·cp, ep·etp): both meshes divide the ranks of a stage
    plain = load_model("mixtral-8x7b").model
    ((name, kind),) = plain.kinds.items()
    assert isinstance(kind.ffn, Moe) and isinstance(kind.mixer, Attention)
    mixer = replace(kind.mixer, heads=48, kv_heads=48)
    model = replace(plain, kinds={name: replace(kind, mixer=mixer, ffn=replace(kind.ffn, experts=24 * ep))})
    job = workload(model, {"seq_len": 4608, "global_batch": 64}, gpus=1)
    assert least(tp, cp, pp, ep, etp, model, job) == pp * math.lcm(tp * cp, ep * etp)


# ---------------------------------------------------------------- stages that count multi-token prediction


@pytest.mark.parametrize("pp,legal", [(4, True), (8, True), (16, True), (5, False), (12, False)])
def test_deepseek_v3s_61_layers_one_module_and_both_ends_are_64(pp: int, legal: bool) -> None:
    # Megatron Core, custom pipeline layouts: 61 decoder layers and one MTP layer on PP16
    model = load_model("deepseek-v3").model
    job = workload(model, {"seq_len": 4096, "global_batch": 960}, gpus=pp)
    context = Context(model=model, workload=job, runtime=MEGATRON, gpus=pp)
    refused = [broken.code for broken in explain_row(Strategy(pp=pp, zero=0), context) if not broken.warning]
    assert refused == ([] if legal else ["DP009"])
    without = replace(context.model, mtp_layers=0, mtp_kind="")
    plain = Context(model=without, workload=job, runtime=MEGATRON, gpus=pp)
    assert "DP009" in [broken.code for broken in explain_row(Strategy(pp=pp, zero=0), plain)]
