"""Weights, gradients and optimizer state: where they are kept, and how gradients get there.

A weight's gradient leaves backward Partial on what its einsum contracted. ZeRO says only where each
of the three is stored; the collectives are the transitions between those placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distplan.costmodel.layout import Axes
from distplan.costmodel.local_costs import evaluate_terms, span
from distplan.costmodel.model import DTYPE_BYTES, Workload
from distplan.costmodel.program import SegmentProgram
from distplan.costmodel.sizes import SizeTable, layout_size
from distplan.costmodel.state_path import state_path
from distplan.costmodel.strategy import Floats
from distplan.hardware.cluster import Cluster
from distplan.hardware.collectives import price

Terms = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """One collective of a segment's state, all weights that take the same step together."""

    segment: int
    role: str
    """gradient (reduced once its last contribution is there) | parameter (gathered before use)"""
    kind: str
    axes: Axes
    terms: Terms
    """bytes given to the collective"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredState:
    """`used` and `stored` are elements per segment where weights are used, and where ZeRO stores them."""

    sizes: SizeTable
    used: tuple[Terms, ...]
    stored: tuple[Terms, ...]
    movements: tuple[Movement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovementCost:
    movement: Movement
    payload_bytes: Floats
    wire_bytes: Floats
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCosts:
    """Arrays [segment, row]; seconds are of one occurrence of each movement."""

    used_elements: Floats
    stored_elements: Floats
    reduce_seconds: Floats
    """Partial to where the gradient is stored or updated, within the sharding group and on tp"""
    replicate_seconds: Floats
    """the all-reduce over dp_replicate that follows a reduce-scatter (HSDP)"""
    gather_seconds: Floats
    movements: tuple[MovementCost, ...]


def lower_state(programs: Sequence[SegmentProgram], sharded: bool, workload: Workload) -> LoweredState:
    """Lower the weights of all segments. `sharded`: the optimizer state is (ZeRO 1 and above).

    A tied weight comes last, as a segment of its own: with one stage it is the embedding's.
    """
    table = SizeTable()
    used, stored, movements = [], [], []
    parts = [(program, False) for program in programs] + [(programs[-1], True)]
    for index, (program, tied) in enumerate(parts):
        moved: dict[tuple[str, str, Axes], dict[int, float]] = {}
        uses: dict[int, float] = {}
        stores: dict[int, float] = {}
        for weight in program.segment.weights:
            if (weight.name in program.segment.shares) != tied:
                continue
            path = state_path(program, weight, sharded)
            sizes = program.segment.sizes
            _count(uses, table.number(layout_size(path.used, sizes)), 1.0)
            _count(stores, table.number(layout_size(path.stored, sizes)), 1.0)
            for source, steps, role, dtype in (
                (path.gradient, path.reduce, "gradient", workload.precision.gradients),
                (path.stored, path.gather, "parameter", workload.precision.compute),
            ):
                now = source
                for step in steps:
                    if step.kind == "slice":
                        now = step.result
                        continue
                    number = table.number(layout_size(now, sizes))
                    _count(moved.setdefault((role, step.kind, step.axes), {}), number, DTYPE_BYTES[dtype])
                    now = step.result
        used.append(tuple(uses.items()))
        stored.append(tuple(stores.items()))
        movements += [
            Movement(segment=index, role=role, kind=kind, axes=axes, terms=tuple(terms.items()))
            for (role, kind, axes), terms in moved.items()
        ]
    return LoweredState(sizes=table, used=tuple(used), stored=tuple(stored), movements=tuple(movements))


def _count(into: dict[int, float], number: int, factor: float) -> None:
    into[number] = into.get(number, 0.0) + factor


def state_costs(
    lowered: LoweredState, symbols: Mapping[str, Floats], strides: Mapping[str, Floats], cluster: Cluster
) -> StateCosts:
    """Elements and seconds per segment, for rows of degrees."""
    table = lowered.sizes.evaluate(symbols)
    segments, rows = len(lowered.used), table.shape[1]
    seconds = {name: np.zeros((segments, rows)) for name in ("reduce", "replicate", "gather")}
    spans: dict[Axes, object] = {}
    costs = []
    for movement in lowered.movements:
        if movement.axes not in spans:
            spans[movement.axes] = span(movement.axes, symbols, strides, cluster)
        payload = evaluate_terms(movement.terms, table)
        cost = price(movement.kind, payload, spans[movement.axes], cluster)  # type: ignore[arg-type]
        name = "gather" if movement.role == "parameter" else "reduce"
        if movement.kind == "all_reduce" and movement.axes == ("dp_replicate",):
            name = "replicate"
        seconds[name][movement.segment] += cost.seconds
        costs.append(
            MovementCost(movement=movement, payload_bytes=payload, wire_bytes=cost.wire_bytes, seconds=cost.seconds)
        )
    return StateCosts(
        used_elements=np.array([evaluate_terms(terms, table) for terms in lowered.used]),
        stored_elements=np.array([evaluate_terms(terms, table) for terms in lowered.stored]),
        reduce_seconds=seconds["reduce"], replicate_seconds=seconds["replicate"], gather_seconds=seconds["gather"],
        movements=tuple(costs),
    )

