"""What a search answers: the shapes that report.py, plan_file.py and cli.py read. No logic here."""

from __future__ import annotations

from dataclasses import dataclass

from distplan.costmodel.balance import BalancedSplit
from distplan.costmodel.estimate import Estimate
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import Cluster

OBJECTIVES = ("step-time", "memory", "gpus", "cost", "pareto")
VERDICTS = ("fits", "tight", "out")
"""fits: device_bytes_high <= usable; tight: device_bytes <= usable < device_bytes_high; out: the rest"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One rule that one strategy breaks."""

    code: str
    """DP0xx, a key of codes.yaml, never reused"""
    sentence: str
    """one sentence with the numbers in it"""
    nearest: tuple[str, ...] = ()
    """nearest legal values, ready to print: 'tp=1', 'global_batch=128'"""
    warning: bool = False
    """True: said, not refused"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCount:
    """Rows whose first broken rule, in the order of codes.yaml, is `code`."""

    code: str
    title: str
    rejected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """enumerated = sum of rejected + legal; costed = fits + tight + out (= legal unless interrupted)."""

    enumerated: int
    rejected: tuple[RuleCount, ...]
    """only rules that rejected something, in the order of the codes"""
    legal: int
    costed: int
    fits: int
    tight: int
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """A strategy where the fullest rank of experts has `low` and `high` times the mean's tokens, not `expected`."""

    low: float
    expected: float
    high: float
    step_seconds_low: float
    step_seconds_high: float
    device_bytes_low: float
    device_bytes_high: float
    """of the worst stage's fullest rank"""
    verdict_high: str
    """one of VERDICTS, at `high`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One strategy of a plan, with what it costs."""

    strategy: Strategy
    gpus: int
    global_batch: int
    """sequences per step"""
    verdict: str
    """one of VERDICTS"""
    estimate: Estimate
    """columns of length 1"""
    step_seconds: float
    """the simulated time where there is one, else the estimate's closed form"""
    simulated_seconds: float | None
    """None: not simulated (no pipeline, or past the bound at which simulation stops)"""
    tokens_per_second_per_gpu: float
    cost_per_token: float | None
    """currency of the price per token; None without a price. In GPU·seconds per token see gpu_seconds_per_token"""
    gpu_seconds_per_token: float
    relative: float
    """objective value / the best's objective value; 1.0 for the best, and for all of a pareto front"""
    tie: bool
    """its value is within the error band of the best's: the order between the two is not known"""
    warnings: tuple[Violation, ...] = ()
    balanced: BalancedSplit | None = None
    """the best cut of the layers by hand; None without a pipeline, or where the runtime cuts them itself"""
    imbalance: Imbalance | None = None
    """the range over workload.moe_imbalance; of the best only, and None where nothing varies"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingFits:
    """Legal strategies exist and none fits: what binds in the one that is nearest to fitting."""

    nearest: Choice
    stage: int
    phase: str
    """one of costmodel.estimate.PHASES"""
    bytes_over: float
    """of the reading that the verdict uses (device_bytes_high; device_bytes with allow_tight)"""
    smallest_gpus: int | None
    """the smallest count at which something fits, same global batch; None: none up to `searched_up_to`"""
    smallest: Choice | None
    searched_up_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingLegal:
    """No factorisation of the GPU count is legal: the neighbours that have one."""

    gpus: int
    below: int | None
    above: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The search again on a worse cluster."""

    change: str
    """'network -20%', 'compute -10%'"""
    winner_changes: bool
    winner: Choice | None
    """the winner there; None when nothing fits"""
    loss: float
    """the old winner's step time there / the new winner's, minus 1: what staying costs; 0.0 unless it changes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRuntime:
    """What the best strategy that any runtime allows would gain."""

    runtime: str
    """the runtime (not 'any') that allows it, ours where nothing is gained; 'any' if only a mixture does"""
    best: Choice
    speedup: float
    """time per token of our best / of that one, which the objective prefers; 1.0 = nothing to gain"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of `search`, and of `estimate` (one choice, no runners-up)."""

    model: Model
    workload: Workload
    """with the global batch of `best` (or the first asked for)"""
    cluster: Cluster
    runtime: Runtime
    gpus: tuple[int, ...]
    """every count searched"""
    global_batches: tuple[int, ...]
    objective: str
    reserve_bytes: float
    memory_limit_bytes: float | None
    allow_tight: bool
    price_per_gpu_hour: float | None
    best: Choice | None
    runners_up: tuple[Choice, ...]
    """at most top - 1; for pareto the rest of the front, by step time"""
    counts: Counts
    why_nothing: NothingFits | NothingLegal | None = None
    """set exactly when best is None and the search was not interrupted"""
    sensitivity: tuple[Sensitivity, ...] = ()
    other_runtime: OtherRuntime | None = None
    simulated: int = 0
    """plans priced by event simulation"""
    simulation_cut: bool = False
    """True: the shortlist ended at its maximum before the bound did"""
    interrupted: bool = False
    """True: the best of what had been costed when the user stopped it"""
    notes: tuple[str, ...] = ()
    """sentences for the reader: what was assumed or cut"""
