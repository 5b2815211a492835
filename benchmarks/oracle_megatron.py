"""Megatron-LM's own theoretical memory report, and why our estimate differs (megatron_memory*).

Its formulas stand here and nowhere else (Megatron-LM d98e8a64, training/theoretical_memory_usage.py; the
activations are Korthikanti et al. 2022, equations 2 and 4). `check` compares our reading of them with what
it printed, and the weights, gradients and optimizer states of our engine with its figure, within 1 %.
`explain` goes from the activations of its layers to those of ours, one difference at a time;
`python -m benchmarks.oracle_megatron FILE…` prints that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.oracle_schedules import Tally, read_lines
from distplan.costmodel.combine import local_tables
from distplan.costmodel.estimate import estimate
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Moe, Workload
from distplan.costmodel.pipeline import in_flight
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.tables import Engine, engine
from distplan.costmodel.workload import precision
from distplan.hardware.cluster import load_cluster

MIB = float(2**20)
EXACT = 1e-12
STATES_WITHIN = LAYERS_WITHIN = 0.01
NO_SP_FACTOR = 1.05
"""what the report adds for fragmentation, in the formula without sequence parallelism only"""
GPT_DROPOUT = 0.1
"""Megatron-LM's default of --hidden-dropout and --attention-dropout"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The arguments that the report reads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro_batch: int
    micro_batches: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    layers_per_chunk: int
    gated: bool
    norm_values: int
    """vectors per norm: weight, and bias for LayerNorm"""
    untied: bool
    bias: bool
    rope: bool
    sp: bool
    recompute: str
    distributed_optimizer: bool
    experts: int
    top_k: int
    expert_ffn: int
    gpus: int


def job_of(case: Mapping[str, Any]) -> Job:
    argv: Sequence[str] = case["argv"]

    def number(flag: str, default: int) -> int:
        return int(argv[argv.index(flag) + 1]) if flag in argv else default

    def word(flag: str, default: str) -> str:
        return argv[argv.index(flag) + 1] if flag in argv else default

    heads = number("--num-attention-heads", 0)
    return Job(
        layers=number("--num-layers", 0),
        hidden=number("--hidden-size", 0),
        heads=heads,
        kv_heads=number("--num-query-groups", heads),
        ffn=number("--ffn-hidden-size", 0),
        vocab=case["padded_vocab_size"],
        seq=number("--seq-length", 0),
        micro_batch=number("--micro-batch-size", 1),
        micro_batches=case["num_microbatches"],
        dp=case["data_parallel_size"],
        tp=number("--tensor-model-parallel-size", 1),
        pp=number("--pipeline-model-parallel-size", 1),
        cp=number("--context-parallel-size", 1),
        ep=number("--expert-model-parallel-size", 1),
        layers_per_chunk=number("--num-layers-per-virtual-pipeline-stage", 0),
        gated="--swiglu" in argv,
        norm_values=1 if word("--normalization", "LayerNorm") == "RMSNorm" else 2,
        untied="--untie-embeddings-and-output-weights" in argv,
        bias="--disable-bias-linear" not in argv,
        rope=word("--position-embedding-type", "learned_absolute") == "rope",
        sp="--sequence-parallel" in argv,
        recompute=word("--recompute-granularity", "none"),
        distributed_optimizer="--use-distributed-optimizer" in argv,
        experts=number("--num-experts", 0),
        top_k=number("--moe-router-topk", 0),
        expert_ffn=number("--moe-ffn-hidden-size", 0),
        gpus=case["world"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Bytes on the most loaded rank."""

    states: float
    activations_sp: float
    activations_no_sp: float
    activations: float


def report(job: Job) -> Report:
    """Megatron's formulas."""
    with_sp, without = _activations_sp(job), _activations_no_sp(job)
    chosen = with_sp if _uses_sp_formula(job) else without
    return Report(states=_states(job), activations_sp=with_sp, activations_no_sp=without, activations=chosen)


def _uses_sp_formula(job: Job) -> bool:
    return job.sp and job.recompute == "selective"


def _states(job: Job) -> float:
    """18 bytes per parameter of the first stage, 6 + 12/dp with the distributed optimizer (dp without cp).

    Norms and router are whole on every tp rank; biases and learned positions are left out. Experts are
    sharded on ep and etp (= tp), their optimizer states on the expert data group.
    """
    h, matrices = job.hidden, 3 if job.gated else 2
    attention = 2 * h * h * (1 + job.kv_heads / job.heads)
    norms = job.norm_values * h * (2 * job.layers + 1)
    mlp = 0 if job.experts else matrices * h * job.ffn
    embedding = job.vocab * h * (2 if job.untied and job.pp == 1 else 1)
    router = job.layers * h * job.experts
    dense = ((attention + mlp) * job.layers / job.pp + embedding) / job.tp + (norms + router) / job.pp
    experts = job.layers * job.experts * matrices * h * job.expert_ffn / (job.pp * job.tp * job.ep)
    expert_dp = job.gpus / (job.pp * job.tp * job.ep)
    return dense * _per_parameter(job, job.dp) + experts * _per_parameter(job, expert_dp)


def _per_parameter(job: Job, ranks: float) -> float:
    return 6 + 12 / ranks if job.distributed_optimizer else 18.0


def _layers(job: Job, with_sp: bool) -> float:
    """Of all layers, one micro-batch: 34 s·b·h/tp of a GPT layer with SP, s·b·h·(10 + 24/tp) without (ffn = 4h)."""
    unit = job.layers * job.seq * job.micro_batch * job.hidden
    return unit * (18 + 4 * job.ffn / job.hidden) / job.tp if with_sp else unit * (10 + 24 / job.tp)


def _activations_sp(job: Job) -> float:
    """Layers, tokens and the embedding's dropout mask of what is in flight, head and fp32 logits, all over tp."""
    unit = job.seq * job.micro_batch * job.hidden
    tokens = 8 * job.seq * job.micro_batch * job.pp
    total = (_layers(job, True) * job.tp + tokens + unit * job.pp) * _in_flight(job)
    if job.pp == 1:
        total += 4 * unit * (1 + job.vocab / job.hidden)
    return total / job.tp


def _activations_no_sp(job: Job) -> float:
    unit = job.seq * job.micro_batch * job.hidden
    total = _layers(job, False) + 8 * job.seq * job.micro_batch * job.pp + unit * job.pp
    total *= _in_flight(job)
    if job.pp == 1:
        total += 2 * unit * (1 + job.vocab / (job.hidden * job.tp))
    return total * NO_SP_FACTOR


def _in_flight(job: Job) -> float:
    """Over pp micro-batches of L/pp layers: fewer where there are fewer, more when interleaved."""
    if job.layers_per_chunk:
        chunks = job.layers / (job.pp * job.layers_per_chunk)
        return 1 + (job.pp - 1) / (job.pp * chunks)
    return min(1.0, job.micro_batches / job.pp)


def model_of(job: Job) -> Model:
    head_dim = job.hidden // job.heads
    mixer = Attention(
        heads=job.heads, kv_heads=job.kv_heads, head_dim=head_dim, v_head_dim=head_dim, qkv_bias=job.bias,
        out_bias=job.bias,
    )  # fmt: skip
    ffn: Mlp | Moe = Mlp(ffn=job.ffn, gated=job.gated, bias=job.bias, activation="silu" if job.gated else "gelu")
    if job.experts:
        ffn = Moe(experts=job.experts, top_k=job.top_k, ffn=job.expert_ffn, gated=job.gated)
    layer_norm = job.norm_values == 2
    kind = LayerKind(
        name="layer", mixer=mixer, ffn=ffn, norm="layernorm" if layer_norm else "rmsnorm", norm_bias=layer_norm
    )
    return Model(
        name="megatron", hidden=job.hidden, vocab=job.vocab, kinds={"layer": kind}, pattern=("layer",) * job.layers,
        tied_embedding=not job.untied, positions="rope" if job.rope else "learned",
        max_positions=0 if job.rope else job.seq, dropout=GPT_DROPOUT, attention_dropout=GPT_DROPOUT,
        vocab_pad_multiple=1,
    )  # fmt: skip


def strategy_of(job: Job) -> Strategy:
    """Its selective recompute repeats core attention, of which flash attention keeps nothing (README, users, 17)."""
    vpp = job.layers // (job.pp * job.layers_per_chunk) if job.layers_per_chunk else 1
    return Strategy(
        dp_shard=job.dp, tp=job.tp, pp=job.pp, vpp=vpp, cp=job.cp, cp_kind="ring" if job.cp > 1 else "none", ep=job.ep,
        etp=job.tp if job.experts else 1, sp=job.sp, zero=1 if job.distributed_optimizer else 0,
        micro_batch=job.micro_batch, schedule="interleaved" if vpp > 1 else "1f1b",
        recompute="full" if job.recompute == "full" else "none",
        recompute_layers=job.layers // job.pp if job.recompute == "full" else 0,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _cluster() -> Any:
    return load_cluster("dgx-h100")


def _engine(job: Job) -> Engine:
    workload = Workload(
        seq_len=job.seq, global_batch=job.micro_batch * job.micro_batches * job.dp, precision=precision("bf16"),
        loss="vocab_parallel",
    )  # fmt: skip
    return engine(model_of(job), workload, _cluster(), load_runtime("megatron"))


def states(job: Job) -> float:
    """Bytes of our parameters, gradients and optimizer states on the most loaded stage."""
    eng = _engine(job)
    strategy = strategy_of(job)
    found = estimate(
        eng.model, replace(eng.workload, global_batch=job.micro_batch * job.micro_batches * job.dp), eng.cluster,
        eng.runtime, strategy, detail=True,
    )  # fmt: skip
    return sum(float(found.memory[name][0]) for name in ("parameters", "gradients", "optimizer"))


def as_it_counts(job: Job) -> Job:
    """The job without what its formula for parameters leaves out: biases and learned positions."""
    return replace(job, bias=False, rope=True)


def layer_activations(job: Job) -> float:
    """Bytes that our first stage keeps of its layers, all micro-batches in flight."""
    eng, strategy = _engine(job), strategy_of(job)
    local = local_tables(eng, Strategies.of([strategy]), np.array([float(strategy.gpus)]))
    flight = in_flight(strategy.schedule, 0, job.pp, np.array([float(job.micro_batches)]), strategy.vpp)
    return float(local.chosen["saved"][1, 0]) * job.layers / job.pp * float(flight[0]) / strategy.vpp


def explain(job: Job) -> list[tuple[str, float]]:
    """(reason, bytes) from the activations of its layers to those of ours; they add up to ours.

    The first step is a GPT as its formula sees it, in our engine: what is left there is unexplained.
    """
    with_sp = _uses_sp_formula(job)
    theirs = _layers(job, with_sp) * _in_flight(job)
    now = replace(
        job, gated=False, kv_heads=job.heads, experts=0, ep=1, cp=1, recompute="none", sp=with_sp,
        ffn=job.ffn if with_sp else 4 * job.hidden,
    )  # fmt: skip
    steps = [("its layers", theirs), ("unexplained", layer_activations(now) - theirs)]
    last = layer_activations(now)
    changed: tuple[tuple[str, dict[str, Any]], ...] = (
        ("MLP is not 4h wide", {"ffn": job.ffn}),
        ("gate beside up", {"gated": job.gated}),
        ("fewer key and value heads", {"kv_heads": job.kv_heads}),
        ("sequence parallelism without selective recompute", {"sp": job.sp}),
        ("routed experts", {"experts": job.experts, "ep": job.ep}),
        ("context parallelism", {"cp": job.cp}),
        ("full recompute", {"recompute": job.recompute}),
    )
    for reason, changes in changed:
        now = replace(now, **changes)
        after = layer_activations(now)
        steps.append((reason, after - last))
        last = after
    return steps


def differences(case: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, difference or '')."""
    job = job_of(case)
    its = report(job)
    for name, value, key in (
        ("weights and optimizer", its.states, "weight_and_optimizer_MiB"),
        ("activations, SP formula", its.activations_sp, "activation_SP_formula_MiB"),
        ("activations, other formula", its.activations_no_sp, "activation_no_SP_formula_MiB"),
        ("activations", its.activations, "activation_MiB"),
        ("total", its.states + its.activations, "total_MiB"),
    ):
        error = value / MIB / case[key] - 1.0
        yield f"its report, {name}", "" if abs(error) <= EXACT else f"{value / MIB}, not {case[key]}"
    counted = _states(replace(job, dp=job.dp * job.cp))
    error = states(as_it_counts(job)) / counted - 1.0
    what = "our states within 1 % of its, same parameters counted"
    yield what, "" if abs(error) <= STATES_WITHIN else f"{error:+.2%}"
    steps = dict(explain(job))
    error = steps["unexplained"] / steps["its layers"]
    yield "our layers of its GPT within 1 %", "" if abs(error) <= LAYERS_WITHIN else f"{error:+.2%}"


def check(path: Path) -> dict[str, Tally]:
    """Per figure the tally of a file whose name begins with megatron_memory."""
    tallies: dict[str, Tally] = {}
    for case in read_lines(path):
        for what, difference in differences(case):
            tally = tallies.setdefault(f"megatron {what}", Tally())
            tally.total += 1
            if difference:
                tally.differ.append(f"{case['id']} {what}: {difference}")
            else:
                tally.agree += 1
    return tallies


def main(arguments: Sequence[str]) -> int:
    """Prints the walk from its figures to ours."""
    for argument in arguments:
        for case in read_lines(Path(argument)):
            job = job_of(case)
            its, here = report(job).states, states(job)
            bare = states(as_it_counts(job)) / its - 1
            print(f"{case['id']} {case['model']}: weights and optimizer {its / MIB:,.0f} MiB")
            print(f"    ours {here / its - 1:+.2%} ({bare:+.2%} without biases and learned positions)")
            for reason, value in explain(job):
                if value:
                    print(f"    {value / MIB:+12,.0f} MiB {reason}")
            print(f"    {layer_activations(job) / MIB:12,.0f} MiB ours")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
