"""A strategy file unfolded: memory term by term, communication collective by collective, time by operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from distplan.costmodel.case import Case, case_of
from distplan.costmodel.estimate import PHASES
from distplan.costmodel.exchanges import span
from distplan.costmodel.layout import CP, DATA, TP
from distplan.costmodel.memory_phases import host_memory, memory_phases
from distplan.costmodel.unfold import Move, Operator, moves, operators
from distplan.costmodel.unfold_memory import Held, held
from distplan.hardware.collectives import ALGORITHMS, price
from distplan.hardware.documents import load_mapping
from distplan.planner.check import Evaluated, setting_of
from distplan.planner.document import FORMAT_VERSION, time_parts
from distplan.planner.explain_constants import constants
from distplan.planner.plain import plain, rounded

Plain = dict[str, Any]
PARTS = ("memory", "communication", "time")
_UNSEEN = 1e-6
"""of a total: a smaller rest is rounding"""


@cache
def _words(part: str) -> Mapping[str, Mapping[str, Any]]:
    made: Mapping[str, Mapping[str, Any]] = load_mapping(Path(__file__).with_name("explain_parts.yaml")).value[part]
    return made


def explain(found: Evaluated, wanted: Sequence[str] = PARTS) -> Plain:
    """Plain data; `found` must have a plan. Terms of a part add up to it; what does not is the row `rest`."""
    assert found.plan is not None and found.plan.best is not None
    best, file, job = found.plan.best, found.file, setting_of(found.file)
    case = case_of(file.model, file.workload, file.cluster, file.runtime, file.strategy, best.estimate)
    made: Plain = {
        "format_version": FORMAT_VERSION,
        "file": found.path,
        "model": file.model.name,
        "hardware": file.cluster.id,
        "runtime": file.runtime.name,
        "gpus": best.gpus,
        "strategy": plain(file.strategy),
    }
    if "memory" in wanted:
        made["memory"] = _memory(case)
    if "communication" in wanted:
        made["communication"] = list(_communication(case))
    if "time" in wanted:
        made["time"] = _time(case, found)
    made["constants"] = _used(constants(job), wanted)
    rounded_all: Plain = rounded(made)
    return rounded_all


def _used(rows: list[Plain], wanted: Sequence[str]) -> list[Plain]:
    """The constants of the parts that were asked for; all where time is among them."""
    if "time" in wanted:
        return rows
    starts = {
        "memory": ("runtime.", "memory_bytes", "precision."),
        "communication": ("link.", "overlap.", "scaleup", "fabric"),
    }
    return [row for row in rows if any(row["name"].startswith(starts[part]) for part in wanted)]


# ---------------------------------------------------------------- memory


def _memory(case: Case) -> Plain:
    estimate = case.estimate
    terms: dict[str, list[Held]] = {}
    for each in held(case):
        terms.setdefault(each.part, []).append(each)
    total = float(estimate.device_bytes[0])
    parts = [_part(name, float(column[0]), terms.get(name, []), total) for name, column in estimate.memory.items()]
    return {
        "stage": int(estimate.worst_stage[0]),
        "phase": PHASES[int(estimate.worst_phase[0])],
        "device_bytes": total,
        "usable_bytes": float(estimate.usable_bytes[0]),
        "parts": [part for part in parts if part["bytes"]],
        "phases": plain(memory_phases(case, int(estimate.worst_stage[0]))),
        "host": plain(host_memory(case, int(estimate.worst_stage[0]))),
    }


def _part(name: str, value: float, terms: Sequence[Held], total: float) -> Plain:
    rows = [
        {"segment": each.segment, "name": each.name, "placement": each.placement, "dtype": each.dtype,
         "elements": each.elements, "copies": each.copies, "bytes": each.num_bytes}
        for each in terms
        if value
    ]  # fmt: skip
    rest = value - sum(each.num_bytes for each in terms) if rows else 0.0
    return {
        "part": name,
        "bytes": value,
        "share": value / total,
        "how": _words("memory").get(name, {}).get("how", ""),
        "terms": rows,
        "rest": rest if abs(rest) > _UNSEEN * value else 0.0,
    }


# ---------------------------------------------------------------- communication


def _communication(case: Case) -> Iterator[Plain]:
    """Every collective of the estimate, with the placements between which it goes."""
    known: dict[tuple[str, str, str, str], list[Move]] = {}
    for move in moves(case):
        known.setdefault((move.name, move.axis, move.kind, move.phase), []).append(move)
    for item in case.estimate.communication:
        kind = (item.name, item.axis, item.kind)
        found = known.get((*kind, item.phase)) or known.get((*kind, ""))
        count, payload = float(item.count[0]), float(item.payload_bytes[0])
        yield {
            "name": item.name,
            "axis": item.axis,
            "kind": item.kind,
            "phase": item.phase,
            "placements": _placements(found or []),
            "behind": sorted({name for move in found or [] for name in move.behind}),
            "count": count,
            "payload_bytes": payload,
            "wire_bytes": float(item.wire_bytes[0]),
            "seconds": float(item.seconds[0]),
            "exposed_seconds": float(item.exposed_seconds[0]),
            **_where(case, item.axis, item.kind, payload / max(count, 1.0)),
        }


def _placements(found: Sequence[Move]) -> list[Plain]:
    """Each pair of placements once; of a weight's, the first weight that has it is named."""
    pairs: dict[tuple[str, str], Plain] = {}
    for move in found:
        weight, space, layout = move.before.rpartition(" [") if not move.before.startswith("[") else ("", "", "")
        before = f"[{layout}" if space else move.before
        pairs.setdefault((before, move.after), {"of": weight, "before": before, "after": move.after})
    return list(pairs.values())


_AXES: Mapping[str, tuple[str, ...]] = {"dp": DATA, "cp": CP, "tp": TP}


def _where(case: Case, axis: str, kind: str, payload: float) -> Plain:
    """Ranks of the group, the outermost tier that it crosses, and the algorithm chosen there."""
    axes = tuple(part for name in axis.split("+") for part in _AXES.get(name, (name,)))
    rows = case.eng.rows(case.columns, case.strategy.cp_kind)
    if not set(axes) <= set(rows.strides):
        return {"ranks": None, "tier": None, "algorithm": None}
    group = span(axes, rows, case.eng.cluster)
    cost = price(kind, np.array([payload]), group, case.eng.cluster)
    tiers = case.eng.cluster.tiers
    tier = next((tier.name for tier, spans in zip(tiers, group.spans, strict=True) if spans[0] == 1.0), tiers[-1].name)
    return {"ranks": float(group.size[0]), "tier": tier, "algorithm": ALGORITHMS[int(cost.algorithm[0])]}


# ---------------------------------------------------------------- time


def _time(case: Case, found: Evaluated) -> Plain:
    by_part: dict[str, list[Operator]] = {}
    for each in operators(case):
        by_part.setdefault(each.part, []).append(each)
    assert found.plan is not None and found.plan.best is not None
    best = found.plan.best
    total = best.step_seconds
    parts = [_time_part(name, value, by_part.get(name, []), total) for name, value in time_parts(best).items()]
    return {
        "step_seconds": total,
        "num_micro_batches": int(best.estimate.num_micro_batches[0]),
        "parts": [part for part in parts if part["seconds"]],
    }


def _time_part(name: str, value: float, terms: Sequence[Operator], total: float) -> Plain:
    raw = sum(each.seconds for each in terms)
    factor = value / raw if raw and name != "exposed dp" else 1.0
    words = _words("time").get(name, {"how": "", "constants": []})
    return {
        "part": name,
        "seconds": value,
        "share": value / total,
        "how": words["how"],
        "constants": list(words["constants"]),
        "factor": factor,
        "terms": [_operator(each, factor) for each in terms if each.seconds > 0.0] if value else [],
    }


def _operator(each: Operator, factor: float) -> Plain:
    """`factor`: the runtime's software factor, which is in the part's total."""
    seconds = each.seconds * factor
    return {
        "segment": each.segment,
        "name": each.name,
        "kind": each.kind,
        "phase": each.phase,
        "dtype": each.dtype,
        "sizes": dict(each.sizes),
        "calls": each.calls,
        "seconds": seconds,
        "flops": each.flops,
        "flops_per_second": each.flops / seconds,
        "moved_bytes": each.moved_bytes,
        "bytes_per_second": each.moved_bytes / seconds,
    }
