"""Two-level context parallelism: an all-to-all among neighbours inside a ring (USP, arXiv 2405.07719)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distplan.costmodel.estimate import Estimate, estimate
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import list_runtimes, load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster
from distplan.planner.api import search
from distplan.planner.constraints import Context, explain_row

MODEL = load_model("llama-3.1-8b").model
CLUSTER = load_cluster("dgx-h100")
LONG = workload(MODEL, {}, gpus=32, overrides={"seq_len": 131072, "global_batch": 8})
KIND = {"ring": 1, "two_level": 4}


def priced(cp_kind: str, cp: int = 16, inner: int = 1) -> Estimate:
    strategy = Strategy(cp=cp, cp_kind=cp_kind, cp_inner=inner, recompute="full")
    return estimate(MODEL, LONG, CLUSTER, load_runtime("any"), strategy, detail=True)


def wire(found: Estimate, kind: str) -> float:
    """Bytes on the wire of attention's own exchanges in forward."""
    rows = [c for c in found.communication if c.kind == kind and "cp" in c.axis and c.phase == "forward"]
    return float(sum(c.wire_bytes[0] for c in rows))


def test_the_ring_carries_the_heads_of_one_rank_of_the_inner_level() -> None:
    """Keys and values of s tokens go round (n − 1)/n of the ring, each rank with 1/inner of the heads."""
    flat = wire(priced("ring"), "ring_exchange")
    for inner in (2, 4, 8):
        outer = 16 // inner
        share = (outer - 1) / outer / (15 / 16) / inner
        assert wire(priced("two_level", inner=inner), "ring_exchange") == pytest.approx(flat * share, rel=1e-9)


def test_the_all_to_all_is_that_of_ulysses_over_the_inner_level() -> None:
    """Each rank keeps 1/inner of q, k, v and the output and sends the rest, of s/cp tokens."""
    for inner in (2, 4, 8):
        heads = MODEL.kinds[MODEL.pattern[0]].mixer
        widths = (2 * heads.heads + 2 * heads.kv_heads) * heads.head_dim  # type: ignore[union-attr]
        each = 2.0 * LONG.seq_len / 16 * widths * (inner - 1) / inner
        sent = wire(priced("two_level", inner=inner), "all_to_all")
        assert sent == pytest.approx(each * MODEL.layers * LONG.global_batch / 1, rel=1e-9)


def test_what_crosses_nodes_falls_with_the_inner_degree() -> None:
    """Beyond a node a flat ring crosses the network with all heads; two levels leave it an eighth (LoongTrain 2.3)."""
    times = [priced("ring").time["exposed cp"][0]]
    times += [priced("two_level", inner=inner).time["exposed cp"][0] for inner in (2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0] / 2


def test_memory_is_the_same_at_every_inner_degree() -> None:
    """The saved tensors are of s/cp tokens and all heads, or of s/outer tokens and heads/inner: as many elements."""
    saved = {inner: priced("two_level", inner=inner).memory["activations"][0] for inner in (2, 4, 8)}
    assert max(saved.values()) == pytest.approx(min(saved.values()), rel=0.02)


def broken(**changed: object) -> set[str]:
    strategy = replace(Strategy(cp=16, cp_kind="two_level", cp_inner=4), **changed)  # type: ignore[arg-type]
    context = Context(model=MODEL, workload=LONG, runtime=load_runtime("megatron"), gpus=strategy.gpus)
    return {violation.code for violation in explain_row(strategy, context) if not violation.warning}


def test_the_inner_level_divides_cp_and_the_heads() -> None:
    assert not broken()
    assert not broken(cp_inner=8)
    assert broken(cp_inner=3) == {"DP040", "DP041"}
    assert broken(cp_inner=1) == broken(cp_inner=16) - {"DP041"} == {"DP040"}
    assert broken(cp_kind="ring") == {"DP040"}
    assert broken(cp_inner=8, tp=2, sp=True) == {"DP041"}  # 8 key/value heads over 16 ranks


def test_runtimes_that_have_it_say_where_from() -> None:
    having = {name for name in list_runtimes() if "two_level" in load_runtime(name).legal["cp_kind"]}
    assert having == {"megatron", "megatron-fsdp", "any"}
    assert "hierarchical-context-parallel-sizes" in load_runtime("megatron").provenance["legal"]


def test_a_search_finds_it_where_it_is_asked_for() -> None:
    plan = search(
        "llama-3.1-8b", gpus=16, workload={"seq_len": 32768, "global_batch": 8},
        bounds={"cp": [16], "cp_kind": ["two_level"], "tp": [1]},
    )  # fmt: skip
    assert plan.best is not None
    assert plan.best.strategy.cp_kind == "two_level"
    assert {row.strategy.cp_inner for row in (plan.best, *plan.runners_up)} <= {2, 4, 8}
