"""What published papers state about FLOPs, activations, communication and states, read off the Program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distplan.costmodel.combine import local_tables
from distplan.costmodel.estimate import MEMORY_PARTS, Estimate, estimate
from distplan.costmodel.exchanges import evaluate_terms
from distplan.costmodel.graph import parameters
from distplan.costmodel.local_costs import UNFUSED
from distplan.costmodel.lower import PHASES, lower
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Precision, Workload
from distplan.costmodel.runtime import Runtime, load_runtime
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.tables import LOCAL_KEY, engine
from distplan.hardware.cluster import load_cluster

PAPER = Precision(
    name="2+2+12",
    compute="fp16",
    parameters="fp16",
    gradients="fp16",
    master="fp32",
    moments=("fp32", "fp32"),
    matmul="fp16",
)
CLUSTER = load_cluster("dgx-a100")
MEGATRON = load_runtime("megatron")


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, dropout: float = 0.1) -> Model:
    head_dim = hidden // heads
    attention = Attention(
        heads=heads, kv_heads=heads, head_dim=head_dim, v_head_dim=head_dim, qkv_bias=True, out_bias=True
    )
    kind = LayerKind(
        name="layer",
        mixer=attention,
        ffn=Mlp(ffn=4 * hidden, gated=False, bias=True, activation="gelu"),
        norm="layernorm",
        norm_bias=True,
    )
    return Model(
        name="gpt",
        hidden=hidden,
        vocab=vocab,
        kinds={"layer": kind},
        pattern=("layer",) * layers,
        tied_embedding=True,
        positions="learned",
        max_positions=2048,
        dropout=dropout,
        attention_dropout=dropout,
    )


def unfused(seq_len: int = 2048, global_batch: int = 64) -> Workload:
    return Workload(seq_len=seq_len, global_batch=global_batch, precision=PAPER, attention="unfused", causal=False)


GPT3 = gpt(96, 12288, 96)


def priced(model: Model, workload: Workload, strategy: Strategy, runtime: Runtime = MEGATRON) -> Estimate:
    return estimate(model, workload, CLUSTER, runtime, strategy, detail=True)


def saved_per_layer(strategy: Strategy, workload: Workload, runtime: Runtime = MEGATRON, model: Model = GPT3) -> float:
    """Bytes that one layer keeps per micro-batch."""
    eng = engine(model, workload, CLUSTER, runtime)
    local = local_tables(eng, Strategies.of([strategy]), np.array([float(strategy.gpus)]))
    return float(local.chosen["saved"][1, 0])


# ---------------------------------------------------------------- Narayanan et al. 2021, section 5.1 and appendix


@pytest.mark.parametrize("tp,pp", [(1, 1), (8, 1), (8, 12)])
def test_gpt3_flops_are_narayanans_formulas(tp: int, pp: int) -> None:
    b, s, layers, h, v = 64, 2048, 96, 12288, 51200
    plain = 72.0 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    full = 96.0 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    each = Strategy(tp=tp, pp=pp, sp=tp > 1, recompute="full", recompute_layers=layers // pp)
    priced_ = priced(GPT3, unfused(), each)
    assert float(priced_.model_flops[0]) * each.gpus == pytest.approx(plain, rel=1e-9)
    assert float(priced_.hardware_flops[0]) * each.gpus == pytest.approx(full, rel=1e-9)


# ---------------------------------------------------------------- Korthikanti et al. 2022, equations 1 to 4

S, B, H, A = 2048, 2, 12288, 96
SCALARS = 2e-4
"""the statistics of a norm and the like, which the paper leaves out, over what it counts"""


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_activations_of_a_layer_under_tp(t: int) -> None:
    formula = S * B * H * (10 + 24 / t + 5 * A * S / (H * t))
    strategy = Strategy(tp=t, micro_batch=B)
    assert saved_per_layer(strategy, unfused()) == pytest.approx(formula, rel=SCALARS)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_activations_of_a_layer_under_sp_where_the_shard_is_saved(t: int) -> None:
    formula = S * B * H / t * (34 + 5 * A * S / H)
    strategy = Strategy(tp=t, sp=True, micro_batch=B)
    assert saved_per_layer(strategy, unfused()) == pytest.approx(formula, rel=SCALARS)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_activations_of_a_layer_under_sp_where_the_gathered_tensor_is_saved(t: int) -> None:
    formula = S * B * H * (4 + 30 / t + 5 * A * S / (H * t))
    strategy = Strategy(tp=t, sp=True, micro_batch=B)
    assert saved_per_layer(strategy, unfused(), replace(MEGATRON, sp_saves="gathered")) == pytest.approx(
        formula, rel=SCALARS
    )


def test_full_recompute_keeps_the_layers_input_alone() -> None:
    strategy = Strategy(tp=8, sp=True, micro_batch=B, recompute="full")
    assert saved_per_layer(strategy, unfused()) == pytest.approx(2 * S * B * H / 8, rel=SCALARS)


def test_selective_recompute_drops_the_attention_scores() -> None:
    strategy = Strategy(tp=8, sp=True, micro_batch=B, recompute="selective")
    assert saved_per_layer(strategy, unfused()) == pytest.approx(34 * S * B * H / 8, rel=SCALARS)


# ---------------------------------------------------------------- communication


def wire(found: Estimate, axis: str, kinds: tuple[str, ...], phase: str, name: str = "layer") -> float:
    return sum(
        float(c.wire_bytes[0])
        for c in found.communication
        if c.axis == axis and c.kind in kinds and phase in c.phase and c.name.startswith(name)
    )


TP_KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tp_makes_two_all_reduces_a_layer_forward_and_two_backward(t: int) -> None:
    found = priced(GPT3, unfused(global_batch=8), Strategy(tp=t))
    micro_batches = 8
    for phase in ("forward", "backward"):
        rows = [c for c in found.communication if c.axis == "tp" and c.phase == phase and c.name.startswith("layer")]
        assert sum(float(c.count[0]) for c in rows) == 2 * 96 * micro_batches
        for c in rows:
            payload = 96 * micro_batches * 2.0 * S * H
            assert float(c.payload_bytes[0]) == payload
            assert float(c.wire_bytes[0]) == pytest.approx(2 * (t - 1) / t * payload, rel=1e-12)


@pytest.mark.parametrize("saves,ratio", [("shard", 5 / 4), ("gathered", 1.0)])
def test_sp_moves_the_bytes_of_tp_forward_and_a_quarter_more_in_all_where_the_shard_is_saved(
    saves: str, ratio: float
) -> None:
    runtime = replace(MEGATRON, sp_saves=saves)
    tp = priced(GPT3, unfused(global_batch=8), Strategy(tp=8), runtime)
    sp = priced(GPT3, unfused(global_batch=8), Strategy(tp=8, sp=True), runtime)
    forward = wire(sp, "tp", TP_KINDS, "forward")
    assert forward == pytest.approx(wire(tp, "tp", TP_KINDS, "forward"), rel=1e-12)
    both = {
        name: sum(wire(e, "tp", TP_KINDS, p) for p in ("forward", "backward")) for name, e in (("tp", tp), ("sp", sp))
    }
    assert both["sp"] == pytest.approx(ratio * both["tp"], rel=1e-12)


def dp_wire(runtime: Runtime, zero: int, micro_batches: int) -> float:
    one_dtype = replace(unfused(global_batch=8 * micro_batches), precision=PAPER)
    found = priced(GPT3, one_dtype, Strategy(dp_shard=8, zero=zero), runtime)
    return sum(float(c.wire_bytes[0]) for c in found.communication if c.axis.startswith(("dp", "cp")))


@pytest.mark.parametrize(
    "timing,volume", [("micro_batch", lambda m: 1.5 * m), ("last_micro_batch", lambda m: (2 * m + 1) / 2)]
)
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_zero_3_moves_one_and_a_half_times_dp_per_micro_batch(timing: str, volume: object, micro_batches: int) -> None:
    runtime = replace(MEGATRON, grad_reduce_sharded=timing)
    ratio = dp_wire(runtime, 3, micro_batches) / dp_wire(runtime, 0, micro_batches)
    assert ratio == pytest.approx(volume(micro_batches), rel=1e-9)  # type: ignore[operator]


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_move_the_bytes_of_dp(zero: int) -> None:
    runtime = replace(MEGATRON, grad_reduce_sharded="last_micro_batch")
    assert dp_wire(runtime, zero, 4) == pytest.approx(dp_wire(runtime, 0, 4), rel=1e-9)


# ---------------------------------------------------------------- Rajbhandari et al. 2020, figure 1


@pytest.mark.parametrize("zero,gigabytes", [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_memory_of_7_5_b_parameters_on_64_devices(zero: int, gigabytes: float) -> None:
    model = gpt(36, 4096, 32, vocab=64000)
    scale = 7.5e9 / parameters(model, unfused())[0]
    found = priced(model, unfused(global_batch=64), Strategy(dp_shard=64, zero=zero))
    states = sum(float(found.memory[name][0]) for name in ("parameters", "gradients", "optimizer"))
    assert states * scale / 1e9 == pytest.approx(gigabytes, abs=0.06)


# ---------------------------------------------------------------- laws


def test_parts_add_up_to_their_totals_exactly() -> None:
    rows = [
        Strategy(tp=tp, pp=pp, dp_shard=8, sp=tp > 1, zero=zero, recompute=recompute, micro_batch=mb)
        for tp in (1, 4)
        for pp in (1, 4)
        for zero in (0, 1)
        for recompute in ("none", "full")
        for mb in (1, 2)
    ]
    found = estimate(GPT3, unfused(global_batch=512), CLUSTER, MEGATRON, Strategies.of(rows), detail=True)
    for total, parts in ((found.step_seconds, found.time), (found.device_bytes, found.memory)):
        running = np.zeros(len(rows))
        for part in parts.values():
            running = running + part
        assert np.array_equal(running, total) or np.allclose(running, total, rtol=4e-16)
    assert tuple(found.memory) == MEMORY_PARTS


# ---------------------------------------------------------------- pipeline messages, dropout and norms of eager torch


@pytest.mark.parametrize("t", [2, 8])
def test_a_scattered_boundary_is_a_tpth_on_the_network_and_gathered_after_it(t: int) -> None:
    """Narayanan et al. 2021, section 4.1: bsh/t between nodes instead of bsh, then an all-gather over NVLink."""
    strategy = Strategy(tp=t, pp=4, dp_shard=8, micro_batch=B)  # stages on other nodes
    whole, parts = (priced(GPT3, unfused(), strategy, replace(MEGATRON, boundary=b)) for b in ("whole", "scattered"))
    sent = [
        sum(float(c.payload_bytes[0]) for c in found.communication if c.kind == "send_recv") for found in (whole, parts)
    ]
    assert sent[0] == t * sent[1] and sent[1] > 0.0
    assert parts.step_seconds[0] < whole.step_seconds[0]


def test_under_sp_a_boundary_is_a_part_already() -> None:
    strategy = Strategy(tp=8, pp=4, sp=True, micro_batch=B)
    whole, parts = (priced(GPT3, unfused(), strategy, replace(MEGATRON, boundary=b)) for b in ("whole", "scattered"))
    assert whole.step_seconds[0] == parts.step_seconds[0]


def moved(kind: str, phase: str, model: Model = GPT3, workload: Workload | None = None) -> float:
    """Bytes that a layer's memory-bound kernels of a kind move, tp = 1."""
    eng = engine(model, workload or unfused(), CLUSTER, MEGATRON)
    lowered = lower(eng.program(eng.structure("false", "none", "none")), eng.workload)
    columns = {name: np.ones(1) for name in (*LOCAL_KEY, "gpus")}
    table = lowered.sizes.evaluate(eng.rows(columns, "none").symbols)
    works = [w for w in lowered.works if w.segment == 1 and w.kind == kind and PHASES[w.phase] == phase]
    return sum(float(evaluate_terms(work.terms, table)[0]) for work in works)


def test_dropout_of_whole_scores_is_a_kernel_and_that_before_the_residual_is_not() -> None:
    """Korthikanti et al. 2022, section 4.1: an element of the scores is 2 bytes, its mask 1 byte. The kernel reads 2
    and writes 2 + 1; of the two dropouts of hidden elements only the masks are traffic of their own."""
    scores, hidden = A * S * S, S * H
    assert moved("dropout", "forward") == 5 * scores + 2 * hidden
    assert moved("dropout", "forward", gpt(96, 12288, 96, dropout=0.0)) == 0.0


def test_an_eager_norm_moves_what_its_kernels_read_and_write() -> None:
    """torch, FunctionsManual.cpp: bytes of an fp32 element in each kernel of x · rsqrt(mean(x²)) and its gradient."""
    forward = [8, 4, 8]  # pow, mean, mul
    by_factor, by_value = [8], [12, 4]  # mul of the gradient with rsqrt; with x, summed
    mean, power, add = [4], [8, 8, 12], [12]  # mean_backward's whole gradient; pow(x, 1), · 2, · grad; both gradients
    backward = by_factor + by_value + mean + power + add
    passes = UNFUSED["norm"]
    assert passes["norm"][0] * 8 == sum(forward)  # a fused one reads and writes an element
    assert passes["norm_grad"][0] * 12 == pytest.approx(sum(backward), rel=0.01)  # reads two, writes one
    assert passes["norm_grad"][1] == len(backward)
