"""Proof of equivalence: the Programs that are priced, executed on simulated ranks, give what one device gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from distplan.costmodel import interpret_small, tables
from distplan.costmodel import verify as proof
from distplan.costmodel.estimate import estimate
from distplan.costmodel.interpret_kernels import InterpretError
from distplan.costmodel.interpret_small import programs_of
from distplan.costmodel.interpret_step import Part
from distplan.costmodel.lower import Lowered
from distplan.costmodel.model import LayerKind, LinearAttention, Mlp, Model, Workload
from distplan.costmodel.model_file import load_model
from distplan.costmodel.program import SegmentProgram
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.verify import Verification, verify
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster

PLAIN: dict[str, Any] = {}
UNFUSED = {"attention": "unfused", "loss": "fp32_logits", "optimizer": "sgd"}
FUSED_LOSS = {"loss": "fused"}
ADAPTERS = {"lora_rank": 8}

CASES: dict[str, tuple[str, str, dict[str, Any], Strategy]] = {
    "one device": ("llama-3.1-8b", "megatron", PLAIN, Strategy()),
    "ddp": ("gpt2", "torchtitan", PLAIN, Strategy(dp_shard=2, zero=0)),
    "zero 1": ("llama-3.1-8b", "megatron", PLAIN, Strategy(dp_shard=8, zero=1, micro_batch=2)),
    "zero 2, reduced each micro-batch": ("llama-3.1-8b", "deepspeed", PLAIN, Strategy(dp_shard=4, zero=2)),
    "zero 3": ("gemma-2-9b", "torchtitan", PLAIN, Strategy(dp_shard=4, zero=3)),
    "hsdp": ("llama-3.1-8b", "torchtitan", PLAIN, Strategy(dp_replicate=2, dp_shard=4, zero=3)),
    "hsdp, zero 2": ("llama-3.1-8b", "deepspeed", PLAIN, Strategy(dp_replicate=2, dp_shard=2, zero=2)),
    "tp": ("gpt2", "megatron", PLAIN, Strategy(tp=4)),
    "tp, sp": ("llama-3.1-8b", "megatron", PLAIN, Strategy(tp=8, sp=True)),
    "tp, sp, gathered tensors kept": ("llama-3.1-8b", "torchtitan", PLAIN, Strategy(tp=8, sp=True)),
    "tp, separate input gradients": ("llama-3.1-8b", "torchtitan", PLAIN, Strategy(tp=2)),
    "fewer heads than tp": ("qwen2.5-7b", "megatron", PLAIN, Strategy(tp=8, sp=True)),
    "fewer heads than tp, no sp": ("qwen2.5-7b", "any", PLAIN, Strategy(tp=8)),
    "fewer heads than tp, qk norm": ("qwen3-8b", "any", PLAIN, Strategy(tp=16, sp=True)),
    "ring": ("llama-3.1-8b", "megatron", PLAIN, Strategy(cp=4, cp_kind="ring", dp_shard=2)),
    "ring, fewer heads than tp": ("qwen2.5-7b", "megatron", PLAIN, Strategy(tp=8, sp=True, cp=2, cp_kind="ring")),
    "all-gather": ("llama-3.1-8b", "torchtitan", PLAIN, Strategy(cp=2, cp_kind="all_gather", tp=2, sp=True)),
    "ulysses": ("llama-3.1-8b", "deepspeed", PLAIN, Strategy(cp=4, cp_kind="ulysses", dp_shard=2, zero=3)),
    "ulysses, fewer heads than cp": ("llama-3.1-8b", "any", PLAIN, Strategy(cp=32, cp_kind="ulysses", dp_shard=2)),
    "ulysses, tp, sp": ("llama-3.1-8b", "any", PLAIN, Strategy(cp=8, tp=4, sp=True, cp_kind="ulysses", zero=3)),
    "ulysses, qk norm over all heads": ("olmo-2-7b", "any", PLAIN, Strategy(cp=2, tp=2, cp_kind="ulysses")),
    "two-level": ("llama-3.1-8b", "megatron", PLAIN, Strategy(cp=4, cp_inner=2, cp_kind="two_level", dp_shard=2)),
    "two-level, tp, sp, recomputed": (
        "qwen2.5-7b", "megatron", PLAIN,
        Strategy(cp=8, cp_inner=2, tp=2, sp=True, cp_kind="two_level", recompute="full")),
    "two-level, experts, zero 3": (
        "mixtral-8x7b", "any", PLAIN, Strategy(dp_shard=2, cp=4, cp_inner=2, cp_kind="two_level", ep=4, zero=3)),
    "pipeline, tied": ("gpt2", "megatron", PLAIN, Strategy(pp=2, tp=2, dp_shard=2)),
    "interleaved": ("llama-3.1-8b", "megatron", PLAIN, Strategy(pp=2, vpp=2, schedule="interleaved")),
    "selective": ("llama-3.1-8b", "megatron", PLAIN, Strategy(tp=2, sp=True, recompute="selective")),
    "full": ("llama-3.1-8b", "megatron", PLAIN, Strategy(tp=2, sp=True, recompute="full", pp=2)),
    "full, early stop, ring": (
        "gpt-neox-20b", "torchtitan", PLAIN, Strategy(tp=2, cp=2, cp_kind="ring", recompute="full")),
    "unfused": ("gpt2", "megatron", UNFUSED, Strategy(tp=2, sp=True, cp=2, cp_kind="all_gather")),
    "unfused, core recomputed": ("llama-3.1-8b", "megatron", UNFUSED, Strategy(tp=2, recompute="selective")),
    "eager attention": ("llama-3.1-8b", "megatron", {"attention": "eager"}, Strategy(tp=2, sp=True)),
    "eager attention, core recomputed": (
        "llama-3.1-8b", "megatron", {"attention": "eager"}, Strategy(tp=2, recompute="selective")),
    "log-softmax": ("llama-3.1-8b", "torchtitan", {"loss": "log_softmax"}, Strategy(tp=2, sp=True)),
    "gathered logits": ("gpt2", "megatron", {"loss": "gathered"}, Strategy(tp=2, dp_shard=2)),
    "compiled loss": ("llama-3.1-8b", "torchtitan", {"loss": "compiled"}, Strategy(tp=2, sp=True)),
    "every other operator recomputed": (
        "llama-3.1-8b", "torchtitan", PLAIN, Strategy(tp=2, sp=True, dp_shard=2, zero=3, recompute="selective")),
    "fused loss": ("llama-3.1-8b", "megatron", FUSED_LOSS, Strategy(tp=2, dp_shard=2)),
    "sgd": ("gpt2", "megatron", {"optimizer": "sgd"}, Strategy(tp=2, dp_shard=2, pp=2)),
    "parallel branches": ("gpt-neox-20b", "megatron", PLAIN, Strategy(tp=2, sp=True, dp_shard=2)),
    "one norm for both branches": ("falcon-40b", "megatron", PLAIN, Strategy(tp=2, dp_shard=2)),
    "sandwich norms": ("gemma-2-9b", "megatron", PLAIN, Strategy(tp=4, sp=True, dp_shard=2)),
    "capped logits in chunks": ("gemma-2-9b", "megatron", FUSED_LOSS, Strategy(tp=2, sp=True, dp_shard=2)),
    "two kinds of layer": ("gemma-3-27b", "megatron", PLAIN, Strategy(tp=2, sp=True, pp=2)),
    "post norms": ("olmo-2-7b", "torchtitan", PLAIN, Strategy(tp=2, sp=True, dp_shard=2)),
    "embedding norm": ("bloom-176b", "megatron", PLAIN, Strategy(tp=2, sp=True, pp=2)),
    "learned positions with offset": ("opt-13b", "megatron", PLAIN, Strategy(tp=2, sp=True, cp=2, cp_kind="ring")),
    "experts": ("mixtral-8x7b", "megatron", PLAIN, Strategy(dp_shard=4, ep=4)),
    "experts, tp, sp": ("mixtral-8x7b", "megatron", PLAIN, Strategy(dp_shard=4, tp=2, sp=True, ep=4, zero=2)),
    "experts, tp without sp": ("mixtral-8x7b", "any", PLAIN, Strategy(dp_shard=4, tp=2, ep=8, zero=3)),
    "experts, expert tp": ("mixtral-8x7b", "megatron", PLAIN, Strategy(dp_shard=2, tp=2, sp=True, ep=2, etp=2)),
    "experts, ring": ("mixtral-8x7b", "any", PLAIN, Strategy(dp_shard=2, cp=2, cp_kind="ring", ep=4)),
    "experts, recomputed": ("mixtral-8x7b", "megatron", PLAIN, Strategy(tp=2, sp=True, ep=2, recompute="full", pp=2)),
    "latent attention, shared experts": ("deepseek-v3", "megatron", PLAIN, Strategy(dp_shard=2, tp=2, sp=True, ep=4)),
    "sinks, biased experts, ulysses": (
        "gpt-oss-20b", "any", PLAIN, Strategy(dp_shard=2, cp=2, tp=2, sp=True, cp_kind="ulysses", ep=4, zero=3)),
    "chunked attention": ("llama-4-scout", "megatron", PLAIN, Strategy(dp_shard=2, tp=2, sp=True, ep=2)),
    "adapters": ("llama-3.1-8b", "megatron", ADAPTERS, Strategy(tp=2, sp=True, dp_shard=2)),
    "adapters, zero 3": ("llama-3.1-8b", "torchtitan", ADAPTERS, Strategy(tp=2, dp_shard=2, zero=3, recompute="full")),
    "parameters sharded from zero 2": ("llama-3.1-8b", "fsdp1", PLAIN, Strategy(dp_shard=4, zero=2)),
    "64 ranks": (
        "llama-3.1-8b", "any", PLAIN,
        Strategy(dp_replicate=2, dp_shard=2, tp=4, sp=True, cp=2, cp_kind="ring", pp=2, zero=3),
    ),
}  # fmt: skip


def run(name: str, runtime: str, overrides: dict[str, Any], strategy: Strategy, **more: Any) -> Verification:
    file = load_model(name)
    job = workload(file.model, file.workload, gpus=64, overrides=overrides)
    return verify(file.model, job, load_runtime(runtime), strategy, **more)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_strategy_gives_what_one_device_gives_and_needs_all_of_its_collectives(
    case: tuple[str, str, dict[str, Any], Strategy],
) -> None:
    found = run(*case)
    assert [t for t in found.tensors if t.error > proof.TOLERANCE] == []
    assert found.needless == ()
    assert found.ranks <= interpret_small.MAX_RANKS
    assert {t.what for t in found.tensors} == {"loss", "output", "input gradient", "gradient", "weight"}


def test_all_collectives_on_axes_above_one_are_tried() -> None:
    found = run(*CASES["64 ranks"])
    assert {each.needed for each in found.collectives} == {True, None}
    for each in found.collectives:
        sent = any(found.degrees.get(axis, 1) > 1 for axis in each.axes)
        assert (each.needed is not None) == sent, each


@pytest.mark.parametrize("kind", ["mamba2", "gated_delta_net", "lightning"])
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(tp=2, sp=True, dp_shard=2, pp=2),
        Strategy(tp=2, cp=2, cp_kind="ring", dp_shard=2, zero=3),
        Strategy(tp=2, sp=True, cp=2, cp_kind="all_gather", dp_shard=2, recompute="full"),
    ],
    ids=["tp, sp, pp", "cp", "recomputed"],
)  # fmt: skip
def test_recurrent_mixers_are_equivalent_too(kind: str, strategy: Strategy) -> None:
    """cp turns from tokens to heads before the convolution, which looks back, and returns after the scan."""
    conv = 0 if kind == "lightning" else 3
    mixer = LinearAttention(kind=kind, heads=8, head_dim=4, state=2, groups=8, conv_kernel=conv, conv_bias=True)
    layer = LayerKind(name="layer", mixer=mixer, ffn=Mlp(ffn=8, gated=True))
    model = Model(name=kind, hidden=8, vocab=64, kinds={"layer": layer}, pattern=("layer",) * 4, tied_embedding=False)
    found = verify(model, workload(model, {}, gpus=8), load_runtime("megatron"), strategy)
    assert [t for t in found.tensors if t.error > proof.TOLERANCE] == []
    assert found.needless == ()


@pytest.mark.parametrize(
    "placements",
    [
        {"layer.mlp.up.weight": {"tp": "Shard(hidden)"}},
        {"layer.mlp.up.weight": {"tp": "Replicate"}, "layer.mlp.gate.weight": {"tp": "Replicate"}},
        {"layer.mlp.down.weight": {"tp": "Shard(hidden)"}},
        {"layer.attention.out.weight": {"tp": "Shard(hidden)"}},
        {"embedding.word.weight": {"tp": "Shard(hidden)"}, "head.output.weight": {"tp": "Shard(hidden)"}},
        {"layer.attention.core": {"tp": "Replicate"}},
        {"layer.mlp.act": {"dp": "Shard(batch)"}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("sp", [False, True])
def test_marks_of_the_user_are_completed_to_an_equivalent_program(placements: Any, sp: bool) -> None:
    file = load_model("llama-3.1-8b")
    job = workload(file.model, file.workload, gpus=64)
    model = replace(file.model, placements=placements)
    strategy = Strategy(tp=2, sp=sp, cp=2, cp_kind="ring", dp_shard=2)
    assert verify(model, job, load_runtime("megatron"), strategy, removals=False).equal


def test_a_mark_on_one_axis_leaves_the_others_where_they_are() -> None:
    file = load_model("llama-3.1-8b")
    job = workload(file.model, file.workload, gpus=64)
    model = replace(file.model, placements={"layer.attention.core": {"tp": "Replicate"}})
    eng = tables.engine(model, job, load_cluster("dgx-h100"), load_runtime("megatron"))
    layer = programs_of(eng, Strategy(tp=2, dp_shard=2))[1]
    moved = [n for n in layer.nodes if n.phase == "forward" and n.name.startswith("layer.attention.core@")]
    assert {axis for n in moved for axis in n.axes} == {"tp_kv", "tp_rep"}


@pytest.mark.parametrize("seed", [1, 2])
def test_other_numbers_give_the_same_verdict(seed: int) -> None:
    assert run(*CASES["pipeline, tied"], seed=seed, removals=False).equal


def test_what_is_executed_is_the_object_that_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    file, cluster, runtime = load_model("llama-3.1-8b"), load_cluster("dgx-h100"), load_runtime("megatron")
    job = workload(file.model, file.workload, gpus=16)
    priced: list[Sequence[SegmentProgram]] = []
    executed: list[Sequence[SegmentProgram]] = []
    lower, parts = tables.lower, interpret_small._parts

    def watch_lower(programs: Sequence[SegmentProgram], workload: Workload) -> Lowered:
        priced.append(programs)
        return lower(programs, workload)

    def watch_parts(eng: tables.Engine, programs: Sequence[SegmentProgram], chunks: int) -> tuple[Part, ...]:
        executed.append(programs)
        return parts(eng, programs, chunks)

    monkeypatch.setattr(tables, "lower", watch_lower)
    monkeypatch.setattr(interpret_small, "_parts", watch_parts)
    strategy = Strategy(tp=4, sp=True, dp_shard=4, recompute="full")
    tables._engine.cache_clear()
    estimate(file.model, job, cluster, runtime, Strategies.of([strategy]), usable_bytes=None, detail=False)
    verify(file.model, job, runtime, strategy, cluster=cluster, removals=False)
    assert any(all(a is b for a, b in zip(executed[0], each, strict=True)) for each in priced)


def tampered(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    original = programs_of

    def changed(eng: tables.Engine, strategy: Strategy) -> tuple[SegmentProgram, ...]:
        return tuple(change(program) for program in original(eng, strategy))

    monkeypatch.setattr(interpret_small, "programs_of", changed)


def test_a_program_that_forgets_a_reduction_is_not_equivalent(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(program: SegmentProgram) -> SegmentProgram:
        nodes = [replace(n, kind="slice") if n.kind == "reduce_scatter" else n for n in program.nodes]
        return replace(program, nodes=tuple(nodes))

    tampered(monkeypatch, forget)
    assert not run(*CASES["tp, sp"], removals=False).equal


def test_a_collective_that_changes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce whose result nobody reads."""

    def pad(program: SegmentProgram) -> SegmentProgram:
        twice = [n for n in program.nodes if n.kind == "all_reduce" and n.phase == "forward"][:1]
        nodes = list(program.nodes)
        values = dict(program.values)
        for node in twice:
            values["idle"] = values[node.outputs[0]]
            nodes.insert(nodes.index(node) + 1, replace(node, name="idle", outputs=("idle",)))
        return replace(program, nodes=tuple(nodes), values=values)

    tampered(monkeypatch, pad)
    found = run(*CASES["tp"])
    assert found.equal
    assert {each.name for each in found.needless} == {"idle"}
    assert not found.passed


def test_a_value_that_backward_reads_and_nobody_saved_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, lambda program: replace(program, saved=program.saved[1:]))
    with pytest.raises(InterpretError, match="is not there"):
        run(*CASES["tp"], removals=False)


def programs() -> Iterator[tuple[str, SegmentProgram]]:
    for title, (name, runtime, overrides, strategy) in CASES.items():
        file = load_model(name)
        job = workload(file.model, file.workload, gpus=64, overrides=overrides)
        eng = tables.engine(file.model, job, load_cluster("dgx-h100"), load_runtime(runtime))
        for program in programs_of(eng, strategy):
            yield title, program


def test_nothing_is_saved_that_backward_does_not_read() -> None:
    for title, program in programs():
        read = {name for node in program.nodes if node.phase != "forward" for name in node.inputs}
        if "operators" not in program.structure.recompute:
            assert set(program.saved) <= read, f"{title}: {program.segment.name}"


def test_a_policy_keeps_what_it_names_whether_or_not_backward_reads_it() -> None:
    """torch/utils/checkpoint.py, CheckpointPolicy: to save every op "would save additional tensors not limited to ones
    that are actually needed"; torchtitan saves attention, reduce-scatters and every second product, from the first."""
    ours = [p for _, p in programs() if "operators" in p.structure.recompute and p.segment.name == "layer"]
    assert ours
    for program in ours:
        forward = [node for node in program.nodes if node.phase == "forward"]
        named = {node.outputs[0] for node in forward if node.kind in ("attention", "reduce_scatter")}
        # of seven products the first, third, fifth (which of up and gate comes first is our graph's) and seventh
        named |= {f"layer.{name}" for name in ("attention.q", "attention.v", "mlp.up", "mlp.down")}
        read = {name for node in program.nodes if node.phase != "forward" for name in node.inputs}
        assert named <= set(program.saved)
        assert set(program.saved) - read <= named


def test_gradients_lie_alike_whatever_the_attention_and_recomputation() -> None:
    """State is priced once for all structures with the same sp (Engine.state_store)."""
    for name in ("llama-3.1-8b", "olmo-2-7b", "gpt2"):
        file = load_model(name)
        job = workload(file.model, file.workload, gpus=64)
        eng = tables.engine(file.model, job, load_cluster("dgx-h100"), load_runtime("any"))
        for sp in ("true", "false"):
            first = eng.program(eng.structure(sp, "all_gather", "none"))
            for kind, recompute in (("ring", "none"), ("ulysses", "none"), ("ulysses", "full")):
                for one, other in zip(first, eng.program(eng.structure(sp, kind, recompute)), strict=True):
                    for weight, gradient in one.gradients.items():
                        there = other.values[other.gradients[weight]].layout
                        here = one.values[gradient].layout
                        assert (here.shards, set(here.partial)) == (there.shards, set(there.partial)), weight
