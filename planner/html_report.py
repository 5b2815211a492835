"""What the page of `distplan report` shows of one strategy, as plain data: figures, tables, key numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from distplan.costmodel.by_stage import MemoryOfStage, memory_by_stage
from distplan.costmodel.case import case_of
from distplan.costmodel.step_timeline import StepTimeline, step_timeline
from distplan.costmodel.strategy import Strategy
from distplan.planner.api import Setting, estimate_setting, search_setting
from distplan.planner.document import Plain, document
from distplan.planner.inputs import MAX_GPUS
from distplan.planner.plain import plain, rounded
from distplan.planner.plan import Choice, Plan
from distplan.planner.search import RuleError
from distplan.planner.wording import strategy_label

GIB = float(1 << 30)
JOBS_PER_STAGE = 160
"""forwards and backwards in a row of the timeline; of longer steps fewer micro-batches are drawn"""
MOST_BOXES = 8_000
KINDS = ("forward", "backward or input gradient", "weight gradient", "gradient reduction", "optimizer")
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""GPU counts of the scaling curve over the strategy's own"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything that the page is drawn from."""

    plan: Plan
    chosen: Choice
    stages: tuple[MemoryOfStage, ...]
    step: StepTimeline
    front: tuple[Choice, ...]
    same: tuple[tuple[int, Choice | None], ...]
    """this strategy with more or fewer data-parallel ranks, per GPU count; None where no rule allows it"""
    best: tuple[tuple[int, Choice | None], ...]
    """the fastest that fits, per GPU count"""


def find(job: Setting, strategy: Strategy, counts: Sequence[int] = ()) -> Found:
    """Estimate, look around and scale. `counts`: GPUs of the scaling curve; () = around the strategy's own.
    Raises RuleError where the runtime cannot run the strategy; an interrupt goes through."""
    plan = estimate_setting(job, strategy)
    chosen = plan.best
    assert chosen is not None
    whole = (plan.model, plan.workload, plan.cluster, plan.runtime, strategy, chosen.estimate)
    front = _searched(job, strategy.gpus, "pareto")
    every = (
        tuple(sorted({*counts, strategy.gpus})) if counts else scaled_counts(strategy.gpus, plan.cluster.gpus_per_node)
    )
    best: list[tuple[int, Choice | None]] = []
    for count in every:
        found = front if count == strategy.gpus else _searched(job, count, "step-time")
        best.append((count, found[0] if found else None))
    return Found(
        plan=plan,
        chosen=chosen,
        stages=memory_by_stage(case_of(*whole)),
        step=step_timeline(*whole, max_jobs=min(JOBS_PER_STAGE * strategy.pp, MOST_BOXES)),
        front=front,
        same=tuple((count, at_count(job, strategy, count)) for count in every),
        best=tuple(best),
    )


def scaled_counts(gpus: int, per_node: int) -> tuple[int, ...]:
    """The strategy's own count times FACTORS, where that is a whole number of nodes or a part of one."""
    counts = {int(gpus * factor) for factor in FACTORS if (gpus * factor).is_integer() and gpus * factor >= 1}
    whole = {count for count in counts if count % per_node == 0 or per_node % count == 0}
    return tuple(sorted(count for count in whole | {gpus} if count <= MAX_GPUS))


def at_count(job: Setting, strategy: Strategy, gpus: int) -> Choice | None:
    """The same strategy on another number of GPUs: only its sharded data-parallel degree differs."""
    others = strategy.gpus // strategy.dp_shard
    if gpus % others:
        return None
    try:
        return estimate_setting(job, replace(strategy, dp_shard=gpus // others)).best
    except RuleError:
        return None


def _searched(job: Setting, gpus: int, objective: str) -> tuple[Choice, ...]:
    plan = search_setting(job, gpus, objective=objective, top=1)
    if plan.interrupted:
        raise KeyboardInterrupt
    return () if plan.best is None else (plan.best, *plan.runners_up)


def figures(found: Found) -> Plain:
    """Numbers of the charts, in the units of their axes."""
    return rounded(
        {
            "memory": _memory(found),
            "communication": _communication(document(found.plan)["best"]["communication"]),
            "timeline": _timeline(found.step),
            "front": {"points": [_point(choice) for choice in found.front], "plan": _point(found.chosen)},
            "scaling": _scaling(found),
        }
    )


def _memory(found: Found) -> Plain:
    names = [name for name in found.stages[0].parts if any(stage.parts[name] for stage in found.stages)]
    parts = [{"name": name, "gib": [stage.parts[name] / GIB for stage in found.stages]} for name in names]
    usable = float(found.chosen.estimate.usable_bytes[0]) / GIB
    return {"stages": [str(stage.stage) for stage in found.stages], "parts": parts, "usable": usable}


def _communication(rows: Iterable[Plain]) -> Plain:
    sums: dict[str, list[float]] = {}
    for row in rows:
        both = sums.setdefault(row["axis"], [0.0, 0.0])
        both[0] += row["exposed_seconds"]
        both[1] += max(row["seconds"] - row["exposed_seconds"], 0.0)
    exposed, hidden = ([both[at] for both in sums.values()] for at in (0, 1))
    return {"axes": list(sums), "exposed": exposed, "hidden": hidden}


def _timeline(step: StepTimeline) -> Plain:
    scale, unit = (1.0, "s") if step.seconds >= 1.0 else (1e3, "ms")
    boxes = []
    for box in step.boxes:
        kind = _kind(box.name, box.lane)
        if kind is not None:
            number = f"{box.name.replace(' ', '')}{chr(39) * box.chunk}" if box.micro_batch >= 0 else box.name
            boxes.append([box.stage, kind, box.start * scale, box.end * scale, number])
    stages = [f"stage {stage}" for stage in range(len(step.memory))]
    return {"stages": stages, "kinds": list(KINDS), "boxes": boxes, "unit": unit, "end": step.seconds * scale}


def _kind(name: str, lane: str) -> int | None:
    if lane == "compute":
        return {"F": 0, "B": 1, "I": 1, "W": 2}.get(name.split(maxsplit=1)[0], KINDS.index("optimizer"))
    return KINDS.index("gradient reduction") if name == "gradient reduction" else None


def _point(choice: Choice) -> Plain:
    gib = float(choice.estimate.device_bytes[0]) / GIB
    return {"x": choice.step_seconds, "y": gib, "label": strategy_label(plain(choice.strategy))}


def _scaling(found: Found) -> Plain:
    own = found.chosen.tokens_per_second_per_gpu
    return {
        "counts": [count for count, _ in found.same],
        "same": [_rate(choice) for _, choice in found.same],
        "best": [_rate(choice) for _, choice in found.best],
        "ideal": [own * count / 1e3 for count, _ in found.same],
    }


def _rate(choice: Choice | None) -> float | None:
    """Thousand tokens per second of the whole job; None for what does not fit."""
    if choice is None or choice.verdict == "out":
        return None
    return choice.tokens_per_second_per_gpu * choice.gpus / 1e3
