"""Pipeline stages balanced by hand: the layers of every stage that make the step shortest, against the default split.

Embedding, head, multi-token prediction and dense-first layers make stages uneven, and the first stages hold the most
micro-batches. What a framework lets a user set is its rule `uneven_stages` (runtimes/*.yaml).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distplan.costmodel.balance_climb import climbed
from distplan.costmodel.balance_cuts import dynamic, lightest
from distplan.costmodel.balance_milp import TIME_LIMIT, solve
from distplan.costmodel.balance_problem import Cut, Problem, Sizes, problem_of
from distplan.costmodel.estimate import Estimate
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import Cluster

NEAR = 1.001
"""of the bound: what is left is not worth a program"""
METHODS = ("dynamic programming", "mixed-integer program")


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedSplit:
    """The best cut found, beside the default's; never slower and, where the default fits, fitting as well."""

    layers: tuple[int, ...]
    """of every chunk, in the order of the model: chunk v·pp + s is the v-th of stage s"""
    default_layers: tuple[int, ...]
    recompute_layers: tuple[int, ...]
    """of every stage, recomputed"""
    default_recompute_layers: int
    step_seconds: float
    """simulated, as the default's"""
    default_step_seconds: float
    heaviest_seconds: float
    """of the heaviest stage, forward and backward of one micro-batch"""
    default_heaviest_seconds: float
    device_bytes: float
    """of the worst stage"""
    default_device_bytes: float
    method: str
    """one of METHODS"""
    gap: float
    """what the heaviest stage may be above the best possible, relative: 0 = proved"""

    @property
    def gain(self) -> float:
        """Of the step's time, relative to the default."""
        return 1.0 - self.step_seconds / self.default_step_seconds


def balance(
    model: Model,
    workload: Workload,
    cluster: Cluster,
    runtime: Runtime,
    strategy: Strategy,
    estimate: Estimate,
    *,
    simulated_seconds: float | None = None,
    time_limit: float = TIME_LIMIT,
) -> BalancedSplit | None:
    """The best cut of one strategy, of which `estimate` (columns of length 1) is the default's price, and
    `simulated_seconds` its step where that is known.

    None without a pipeline, or where the runtime or the user cuts the layers. One chunk a stage, or layers all
    of one kind: dynamic programming,
    exact in the heaviest stage; of equally good cuts the shortest simulated one (at most 8 are tried). Several
    chunks of several kinds of layers, or recomputation chosen stage by stage: a mixed-integer program with at most
    `time_limit` seconds.
    """
    rule = runtime.rules["uneven_stages"]
    if strategy.pp == 1 or rule == "none" or strategy.stage_layers:
        return None
    problem = problem_of(model, workload, cluster, runtime, strategy, estimate)
    uniform = tuple(min(problem.default_again, n) for n in problem.stage_layers(problem.default))
    default = problem.priced(problem.default, uniform if strategy.recompute != "none" else (), simulated_seconds)
    each = rule == "layers_and_recompute" and strategy.recompute == "full" and not strategy.recompute_layers
    bound = problem.bound(recompute=each)
    if problem.default_heaviest <= bound * (1.0 + 1e-9):
        cuts, gap, method = [], 0.0, METHODS[0]
    elif each or not dynamic(problem):
        cuts, gap, method = *_programmed(problem, each, time_limit, bound), METHODS[1]
    else:
        cuts, gap, method = _cut(problem), 0.0, METHODS[0]
    admitted = [cut for cut in cuts if cut.device_bytes <= problem.limit]
    best = min([default, *admitted], key=lambda cut: (cut.seconds, cut.heaviest, cut.device_bytes))
    return BalancedSplit(
        layers=best.sizes,
        default_layers=default.sizes,
        recompute_layers=best.again or (0,) * strategy.pp,
        default_recompute_layers=problem.default_again,
        step_seconds=best.seconds,
        default_step_seconds=default.seconds,
        heaviest_seconds=best.heaviest,
        default_heaviest_seconds=default.heaviest,
        device_bytes=best.device_bytes,
        default_device_bytes=default.device_bytes,
        method=method,
        gap=gap,
    )


def _cut(problem: Problem) -> list[Cut]:
    """All that are best for some number of recomputed layers a stage, the same for all."""
    strategy = problem.strategy
    solved = strategy.recompute == "full" and not strategy.recompute_layers
    numbers = range(1, problem.default_again + 1) if solved else (problem.default_again,)
    if strategy.recompute == "none":
        numbers = (0,)
    most = problem.default_heaviest * (1.0 + 1e-9)
    found = [each for each in (lightest(problem, number, most) for number in numbers) if each is not None]
    least = min((each.heaviest for each in found), default=0.0)
    return _priced(problem, (cut for each in found if each.heaviest == least for cut in each.cuts))


def _programmed(problem: Problem, each: bool, time_limit: float, bound: float) -> tuple[list[Cut], float]:
    """What layer-by-layer moves find, the program's cut where it is better, and how far from the best they may be."""
    strategy = problem.strategy
    repeats = strategy.recompute != "none"
    again = problem.default_again if repeats else 0
    if each:
        solved, proved = solve(problem, recompute=True, time_limit=time_limit)
        if solved is None:
            return [], problem.default_heaviest / max(bound, proved) - 1.0
        least = _least(problem, solved.sizes)
        cuts = _priced(problem, [(solved.sizes, numbers) for numbers in (solved.again, least) if numbers is not None])
        return cuts, max(0.0, min(cut.heaviest for cut in cuts) / max(bound, proved) - 1.0)
    sizes, heaviest = climbed(problem, again, problem.default)
    found = [sizes]
    if heaviest > bound * NEAR:
        solved, proved = solve(problem, recompute=False, most=heaviest, time_limit=time_limit)
        bound = max(bound, proved)
        found += [solved.sizes] if solved is not None else []
    cuts = _priced(
        problem,
        [(each_, tuple(min(again, n) for n in problem.stage_layers(each_)) if repeats else ()) for each_ in found],
    )
    return cuts, max(0.0, min(cut.heaviest for cut in cuts) / bound - 1.0)


def _least(problem: Problem, sizes: Sizes) -> tuple[int, ...] | None:
    found = []
    for stage in range(problem.strategy.pp):
        again = problem.least_again(problem.stage_content(sizes, stage), stage)
        if again is None:
            return None
        found.append(again)
    return tuple(found)


def _priced(problem: Problem, cuts: Iterable[tuple[Sizes, tuple[int, ...]]]) -> list[Cut]:
    repeats = problem.strategy.recompute != "none"
    return [problem.priced(sizes, again if repeats else ()) for sizes, again in dict.fromkeys(cuts)]
