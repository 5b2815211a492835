"""The table of collectives of priced strategies: what moves, on which axis, how much, how long, how exposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from distplan.costmodel.layout import join_axes
from distplan.costmodel.local_costs import LocalCosts
from distplan.costmodel.lower import PHASES
from distplan.costmodel.stage_load import recomputed_share
from distplan.costmodel.stages import Run
from distplan.costmodel.state import Movement, StateCosts, gathers, in_root_unit, on_tp, state_costs, tied_gradients
from distplan.costmodel.step_end import weight_content
from distplan.costmodel.step_time import TIME_PARTS, GroupCosts
from distplan.costmodel.strategy import Floats, Strategies, Strategy
from distplan.costmodel.tables import Engine, columns_of
from distplan.hardware.collectives import price
from distplan.hardware.groups import group_span


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One collective of the Program on one device of the critical stage, per step (arrays of rows).

    `payload_bytes` is what is given to the collective, `wire_bytes` what one GPU sends with the
    algorithm chosen; both, and the seconds, are totals over `count` calls. Seconds of what every micro-batch does are
    stretched by the runtime's software factor, as the step is.
    """

    name: str
    """the tensor that moves, dotted"""
    axis: str
    """tp | cp | dp | dp_replicate | dp_shard | pp | ep … (mesh axes joined by '+')"""
    kind: str
    phase: str
    count: Floats
    payload_bytes: Floats
    wire_bytes: Floats
    seconds: Floats
    exposed_seconds: Floats


_FIELDS = ("count", "payload_bytes", "wire_bytes", "seconds", "exposed_seconds")


@dataclass(slots=True)
class _Ledger:
    rows: int
    entries: dict[tuple[str, str, str, str], dict[str, Floats]] = field(default_factory=dict)

    def add(
        self, row: int, key: tuple[str, str, str, str], times: float, each: Mapping[str, float], calls: float = 1.0
    ) -> None:
        """`each` happens `times` times, in `calls` calls (0: together with another)."""
        entry = self.entries.setdefault(key, {name: np.zeros(self.rows) for name in _FIELDS})
        entry["count"][row] += times * calls
        for name, value in each.items():
            entry[name][row] += times * value


def communication(eng: Engine, rows: Strategies, gpus: Floats, costs: GroupCosts) -> tuple[Communication, ...]:
    """Every collective of every row, in the order of the Program; calls of a size of zero are left out."""
    ledger = _Ledger(len(rows))
    for row in range(len(rows)):
        _of_row(eng, ledger, row, rows[row], float(gpus[row]), costs)
    return tuple(
        Communication(name=name, axis=axis, kind=kind, phase=phase, **entry)
        for (name, axis, kind, phase), entry in ledger.entries.items()
        if entry["wire_bytes"].any()
    )


def _of_row(eng: Engine, ledger: _Ledger, row: int, strategy: Strategy, gpus: float, costs: GroupCosts) -> None:
    cut = eng.split(strategy.pp, strategy.vpp, strategy.schedule, strategy.stage_layers)
    critical = int(costs.critical[row])
    run = next(r for r in cut.stages if r.first <= critical < r.first + r.count)
    share = float(recomputed_share(costs.recompute_layers[row : row + 1], run)[0])
    m = float(costs.micro_batches[row])
    columns = columns_of(strategy, gpus)
    lowered = eng.lower(str(strategy.sp).lower(), strategy.cp_kind, strategy.recompute)
    local = eng.local_costs(lowered, columns, strategy.cp_kind)
    _local(ledger, row, local, run, m, share, eng.runtime.factor(eng.cluster.accelerator.generation))
    _state(eng, ledger, row, strategy, columns, run, m, float(costs.time[TIME_PARTS.index("exposed dp"), row]))
    _boundary(eng, ledger, row, strategy, local, critical, m, gpus)


def _local(ledger: _Ledger, row: int, local: LocalCosts, run: Run, m: float, share: float, factor: float) -> None:
    for exchange in local.exchanges:
        work = exchange.work
        calls = run.content[work.segment] * m * (share if PHASES[work.phase] == "recompute" else 1.0)
        calls *= work.times
        if calls:
            name = work.name.split("@")[0]
            key = (name, join_axes(work.axes), work.kind, PHASES[work.phase])
            per_call = {f: float(getattr(exchange, f)[0]) for f in _FIELDS[1:]}
            stretched = {f: factor * per_call[f] for f in ("seconds", "exposed_seconds")}
            ledger.add(row, key, calls, per_call | stretched)


def _state(
    eng: Engine,
    ledger: _Ledger,
    row: int,
    strategy: Strategy,
    columns: Mapping[str, Floats],
    run: Run,
    m: float,
    exposed: float,
) -> None:
    lowered = eng.lower_state(str(strategy.sp).lower(), str(strategy.zero))
    at = eng.rows(columns, "none")
    costs = state_costs(lowered, at, eng.cluster)
    exposed = max(0.0, exposed - _tied(eng, ledger, row, at.symbols, costs))
    factor = eng.runtime.factor(eng.cluster.accelerator.generation)
    content = weight_content(run.content, strategy.pp)
    calls = []
    for cost in costs.movements:
        phase, occasions, each = _occasions(eng, cost.movement, strategy)
        times = content[cost.movement.segment] * occasions * (m if each else 1.0)
        seconds = float(cost.seconds[0]) * (factor if each else 1.0)
        calls.append((cost.movement, phase, times, seconds, cost))
    total = sum(times * seconds for _, _, times, seconds, _ in calls)
    for movement, phase, times, seconds, cost in calls:
        if not times:
            continue
        key = (f"{movement.role}s", join_axes(movement.axes), movement.kind, phase)
        joined = in_root_unit(movement, eng.runtime.state, run.content)
        ledger.add(
            row,
            key,
            times,
            {
                "payload_bytes": float(cost.payload_bytes[0]),
                "wire_bytes": float(cost.wire_bytes[0]),
                "seconds": seconds,
                "exposed_seconds": exposed * seconds / total if total else 0.0,
            },
            0.0 if joined else float(movement.calls),
        )


def _tied(eng: Engine, ledger: _Ledger, row: int, symbols: Mapping[str, Floats], costs: StateCosts) -> float:
    """The tied embedding's gradients, once a step: the seconds, which nothing hides."""
    payload, cost = tied_gradients(costs.used_elements[-1], symbols, eng.cluster, eng.workload)
    seconds = float(cost.seconds[0])
    if seconds:
        ledger.add(
            row,
            ("tied embedding gradients", "pp", "all_reduce", "backward"),
            1.0,
            {
                "payload_bytes": float(payload[0]),
                "wire_bytes": float(cost.wire_bytes[0]),
                "seconds": seconds,
                "exposed_seconds": seconds,
            },
        )
    return seconds


def _occasions(eng: Engine, movement: Movement, strategy: Strategy) -> tuple[str, float, bool]:
    """(phases, how often, whether in every micro-batch) a segment's parameters are gathered or gradients reduced."""
    rules, zero = eng.runtime.state, np.array([float(strategy.zero)])
    if movement.role == "gradient":
        within, across = eng.runtime.reduces_each(zero, strategy.pp)
        each = bool((across if movement.over_replicas else within)[0])
        phase = "optimizer" if on_tp(movement.axes) and rules.tp_gradient_times > 1 else "backward"
        return phase, 1.0, each
    segments = len(eng.segments)
    found = gathers(zero, rules, segments)
    forward, backward = (float(times[min(movement.segment, segments - 1), 0]) for times in found)
    if not forward:
        return "optimizer", 1.0, False
    return ("forward, backward", 2.0, True) if backward else ("forward", 1.0, True)


def _boundary(
    eng: Engine, ledger: _Ledger, row: int, strategy: Strategy, local: LocalCosts, critical: int, m: float, gpus: float
) -> None:
    """Activations to the next stage and their gradients to the one before; interleaved stages wrap around."""
    if strategy.pp == 1:
        return
    payload = local.boundary_bytes
    ranks = [(np.array([float(strategy.pp)]), np.array([gpus / strategy.pp]))]
    neighbour = group_span(ranks, eng.cluster, np.array([gpus]))
    cost = price("send_recv", payload, neighbour, eng.cluster)
    hidden = eng.runtime.overlap["pp_interleaved" if strategy.vpp > 1 else "pp"]
    seconds = float(cost.seconds[0]) + float(local.boundary_gather[0])
    per_call = {
        "payload_bytes": float(payload[0]),
        "wire_bytes": float(cost.wire_bytes[0]),
        "seconds": seconds,
        "exposed_seconds": 0.0 if hidden else seconds,
    }
    forwards = strategy.vpp - (critical == strategy.pp - 1)
    backwards = strategy.vpp - (critical == 0)
    for phase, sends in (("forward", forwards), ("backward", backwards)):
        if sends:
            ledger.add(row, ("boundary activation", "pp", "send_recv", phase), sends * m, per_call)
