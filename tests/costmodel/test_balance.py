"""Pipeline stages cut by hand: exact against every cut there is, never worse than the runtime's default split."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from small import dense

from distplan.costmodel.balance import METHODS, BalancedSplit, balance
from distplan.costmodel.balance_climb import climbed
from distplan.costmodel.balance_cuts import lightest
from distplan.costmodel.balance_milp import solve
from distplan.costmodel.balance_problem import Problem, problem_of
from distplan.costmodel.estimate import Estimate, estimate
from distplan.costmodel.model import Model, Moe, Workload
from distplan.costmodel.runtime import Runtime, load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster

CLUSTER = load_cluster("dgx-h100")
MEGATRON = load_runtime("megatron")
ANY = load_runtime("any")
GIB = 2.0**30


def heavy_head(layers: int = 7) -> Model:
    """The head weighs several layers."""
    return dense(layers=layers, heads=8, kv_heads=8, hidden=1024, ffn=2816, vocab=64000)


def dense_first(layers: int = 7) -> Model:
    """Two dense layers, then experts, and a multi-token-prediction module."""
    plain = heavy_head(layers)
    ((name, kind),) = plain.kinds.items()
    experts = Moe(experts=8, top_k=2, ffn=2816, shared_ffn=2816)
    kinds = {name: kind, "moe": replace(kind, name="moe", ffn=experts)}
    return replace(plain, kinds=kinds, pattern=(name,) * 2 + ("moe",) * (layers - 2), mtp_layers=1, mtp_kind="moe")


def job(model: Model, batch: int = 32, seq_len: int = 4096) -> Workload:
    return workload(model, {"seq_len": seq_len, "global_batch": batch}, gpus=8)


def priced(
    model: Model, s: Strategy, runtime: Runtime, usable: float | None, **given: int
) -> tuple[Workload, Estimate]:
    work = job(model, **given)
    return work, estimate(model, work, CLUSTER, runtime, s, usable_bytes=usable)


def balanced(
    model: Model, s: Strategy, runtime: Runtime = MEGATRON, usable: float | None = None, **given: int
) -> BalancedSplit:
    work, found = priced(model, s, runtime, usable, **given)
    made = balance(model, work, CLUSTER, runtime, s, found)
    assert made is not None
    return made


def problem(
    model: Model, s: Strategy, runtime: Runtime = MEGATRON, usable: float | None = None, **given: int
) -> Problem:
    work, found = priced(model, s, runtime, usable, **given)
    return problem_of(model, work, CLUSTER, runtime, s, found)


def every_cut(problem: Problem) -> list[tuple[int, ...]]:
    """All sizes with a layer in every chunk but the first and the last."""
    layers, chunks = len(problem.pattern), problem.chunks
    least = [0, *[1] * (chunks - 2), 0]
    return [
        sizes
        for sizes in itertools.product(range(layers + 1), repeat=chunks)
        if sum(sizes) == layers and all(n >= low for n, low in zip(sizes, least, strict=True))
    ]


def heaviest(problem: Problem, sizes: tuple[int, ...], again: int | None) -> float | None:
    """Of a cut; None where a stage does not fit. `again`: layers recomputed in every stage, None: as few as fit."""
    loads = []
    for stage in range(problem.strategy.pp):
        content = problem.stage_content(sizes, stage)
        number = problem.least_again(content, stage) if again is None else again
        if number is None or not problem.fits(content, stage, number):
            return None
        loads.append(problem.load(content, number))
    return max(loads)


def best_of_all(problem: Problem, again: int | None) -> float:
    found = [heaviest(problem, sizes, again) for sizes in every_cut(problem)]
    return min(seconds for seconds in found if seconds is not None)


PP4 = Strategy(pp=4, dp_shard=2)


@pytest.mark.parametrize("make", [heavy_head, dense_first])
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("slack", [1.0, 1.05, 100.0])
def test_dynamic_programming_finds_the_best_of_all_cuts(make: object, pp: int, slack: float) -> None:
    model = make()  # type: ignore[operator]
    s = replace(PP4, pp=pp)
    _, found = priced(model, s, MEGATRON, None)
    asked = problem(model, s, usable=float(found.device_bytes[0]) * slack)
    made = lightest(asked, 0)
    assert made is not None
    assert made.heaviest == pytest.approx(best_of_all(asked, 0), rel=1e-12)
    for sizes, again in made.cuts:
        assert heaviest(asked, sizes, 0) == pytest.approx(made.heaviest, rel=1e-12)
        assert again == (0,) * pp


def taken(problem: Problem, sizes: tuple[int, ...]) -> float:
    """Bytes of the worst stage."""
    stages = range(problem.strategy.pp)
    return max(max(problem.phases(problem.stage_content(sizes, stage), stage, 0)) for stage in stages)


def test_memory_binds_where_it_is_short() -> None:
    asked = problem(dense(layers=8, heads=8, kv_heads=8, hidden=1024, ffn=2816, vocab=16000), PP4, seq_len=16384)
    bytes_ = sorted(taken(asked, sizes) for sizes in every_cut(asked))
    found = []
    for limit in (bytes_[0], bytes_[1], bytes_[len(bytes_) // 4], bytes_[-1]):
        asked.limit = limit * (1.0 + 1e-12)
        made = lightest(asked, 0)
        assert made is not None
        assert made.heaviest == pytest.approx(best_of_all(asked, 0), rel=1e-12)
        assert all(taken(asked, sizes) <= asked.limit for sizes, _ in made.cuts)
        found.append(made.heaviest)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
    asked.limit = bytes_[0] * 0.999
    assert lightest(asked, 0) is None


def test_several_chunks_of_one_kind_are_cut_exactly() -> None:
    asked = problem(heavy_head(8), Strategy(pp=2, vpp=2, dp_shard=2, schedule="interleaved"))
    made = lightest(asked, 0)
    assert made is not None
    assert made.heaviest == pytest.approx(best_of_all(asked, 0), rel=1e-12)
    assert all(sum(sizes) == 8 and len(sizes) == 4 for sizes, _ in made.cuts)


@pytest.mark.parametrize("make", [heavy_head, dense_first])
@pytest.mark.parametrize(
    "strategy", [Strategy(pp=3, dp_shard=2), Strategy(pp=2, vpp=2, dp_shard=2, schedule="interleaved")]
)
def test_the_program_finds_the_best_of_all_cuts(make: object, strategy: Strategy) -> None:
    asked = problem(make(8), strategy)  # type: ignore[operator]
    solved, bound = solve(asked, recompute=False, time_limit=20.0)
    assert solved is not None
    assert bound <= best_of_all(asked, 0) * (1.0 + 1e-6)
    # rows of chunks have a thousandth of the weight of the heaviest stage
    assert heaviest(asked, solved.sizes, 0) == pytest.approx(best_of_all(asked, 0), rel=3e-3)


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("share", [0.55, 0.7, 0.85])
def test_the_program_chooses_recomputation_stage_by_stage_as_well_as_any(pp: int, share: float) -> None:
    s = Strategy(pp=pp, dp_shard=2, recompute="full")
    _, without = priced(heavy_head(), replace(s, recompute="none"), ANY, None, seq_len=16384)
    usable = float(without.device_bytes[0]) * share
    asked = problem(heavy_head(), s, ANY, usable, seq_len=16384)
    solved, _ = solve(asked, recompute=True, time_limit=20.0)
    assert solved is not None
    loads = [asked.load(asked.stage_content(solved.sizes, stage), again) for stage, again in enumerate(solved.again)]
    assert all(
        asked.fits(asked.stage_content(solved.sizes, stage), stage, again) for stage, again in enumerate(solved.again)
    )
    assert max(loads) == pytest.approx(best_of_all(asked, None), rel=3e-3)


STRATEGIES = [
    PP4,
    replace(PP4, recompute="full"),
    replace(PP4, recompute="selective"),
    replace(PP4, recompute="full", recompute_layers=1),
    Strategy(pp=2, vpp=2, dp_shard=2, schedule="interleaved"),
    Strategy(pp=2, vpp=3, dp_shard=2, schedule="interleaved", recompute="full"),
]


@pytest.mark.parametrize("make", [heavy_head, dense_first])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("runtime", [MEGATRON, ANY], ids=["megatron", "any"])
@pytest.mark.parametrize("usable", [80.0 * GIB, 6.0 * GIB])
def test_never_slower_than_the_default_split_and_never_beyond_what_fits(
    make: object, strategy: Strategy, runtime: Runtime, usable: float
) -> None:
    made = balanced(make(), strategy, runtime, usable)  # type: ignore[operator]
    assert made.step_seconds <= made.default_step_seconds
    assert made.gain >= 0.0
    assert made.device_bytes <= max(usable, made.default_device_bytes * (1.0 + 1e-9))
    assert sum(made.layers) == sum(made.default_layers) == 7
    assert made.method in METHODS and made.gap >= 0.0
    assert len(made.recompute_layers) == strategy.pp


def test_a_heavy_head_takes_layers_from_its_stage() -> None:
    made = balanced(heavy_head(8), PP4)
    assert made.default_layers == (2, 2, 2, 2)
    assert made.layers[-1] < 2
    assert made.heaviest_seconds < made.default_heaviest_seconds
    assert made.gain > 0.05


def test_the_default_split_is_priced_as_the_estimate_prices_it() -> None:
    for strategy in STRATEGIES:
        _, found = priced(heavy_head(), strategy, MEGATRON, None)
        asked = problem(heavy_head(), strategy)
        again = [min(asked.default_again, n) for n in asked.stage_layers(asked.default)]
        cut = asked.priced(asked.default, again if strategy.recompute != "none" else ())
        assert cut.device_bytes == pytest.approx(float(found.device_bytes[0]), rel=1e-12)
        stages = [asked.stage_content(asked.default, stage) for stage in range(strategy.pp)]
        worst = max(max(asked.phases(content, stage, asked.default_again)) for stage, content in enumerate(stages))
        assert worst == pytest.approx(float(found.device_bytes[0]), rel=1e-12)
        assert cut.heaviest == pytest.approx(asked.default_heaviest, rel=1e-9)


def test_where_the_runtime_cuts_the_layers_itself_there_is_nothing_to_choose() -> None:
    for name, chosen in (("deepspeed", False), ("maxtext", False), ("megatron", True), ("torchtitan", True)):
        runtime = load_runtime(name)
        work, found = priced(heavy_head(8), PP4, runtime, None)
        assert (balance(heavy_head(8), work, CLUSTER, runtime, PP4, found) is not None) == chosen
    work, found = priced(heavy_head(), Strategy(dp_shard=8), MEGATRON, None)
    assert balance(heavy_head(), work, CLUSTER, MEGATRON, Strategy(dp_shard=8), found) is None


def test_moves_of_single_layers_better_a_default_that_a_program_does_not_in_time() -> None:
    strategy = Strategy(pp=4, vpp=2, dp_shard=2, schedule="interleaved")
    for model in (dense_first(16), dense_first(23)):
        asked = problem(model, strategy)
        sizes, seconds = climbed(asked, 0, asked.default)
        assert sum(sizes) == model.layers and len(sizes) == 8
        assert seconds == heaviest(asked, sizes, 0)
        assert asked.bound(recompute=False) <= seconds < asked.default_heaviest
        made = balanced(model, strategy)
        assert made.heaviest_seconds <= made.default_heaviest_seconds and made.gain > 0.0
