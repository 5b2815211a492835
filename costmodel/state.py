"""Weights, gradients and optimizer state: where they are kept, and how gradients get there.

A weight's gradient leaves backward Partial on what its einsum contracted. ZeRO says only where each
of the three is stored; the collectives are the transitions between those placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distplan.costmodel.casting import NARROW, narrow_weights, scaling_of
from distplan.costmodel.exchanges import Rows, evaluate_terms, span
from distplan.costmodel.graph import Segment, Weight
from distplan.costmodel.layout import TP, Axes, Dims, Layout
from distplan.costmodel.model import DTYPE_BYTES, Workload
from distplan.costmodel.program import SegmentProgram
from distplan.costmodel.runtime import StateRules
from distplan.costmodel.sizes import PaddedSize, Size, SizeTable, layout_size, size_of
from distplan.costmodel.state_path import StatePath, state_path
from distplan.costmodel.strategy import Floats
from distplan.hardware.cluster import Cluster
from distplan.hardware.collectives import CollectiveCost, price
from distplan.hardware.groups import group_span

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
    """bytes given to the collective, all calls together"""
    calls: int

    @property
    def over_replicas(self) -> bool:
        """The all-reduce over dp_replicate that follows a reduce-scatter (HSDP)."""
        return self.kind == "all_reduce" and self.axes == ("dp_replicate",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredState:
    """`used` and `stored` are elements per segment where weights are used, and where ZeRO stores them;
    `produced` are the gradients' elements where they are not sharded."""

    sizes: SizeTable
    used: tuple[Terms, ...]
    produced: tuple[Terms, ...]
    largest: tuple[tuple[int, ...], ...]
    """sizes of the gradients of each segment's weights, one by one"""
    stored: tuple[Terms, ...]
    trained: tuple[Terms, ...]
    """of `stored`, what has an optimizer state"""
    cast_used: tuple[Terms, ...]
    """of `used`, the weights of narrow products"""
    cast_stored: tuple[Terms, ...]
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
    produced_elements: Floats
    largest_elements: Floats
    """of the largest single gradient"""
    stored_elements: Floats
    trained_elements: Floats
    cast_used_elements: Floats
    cast_stored_elements: Floats
    reduce_seconds: Floats
    """Partial to where the gradient is stored or updated, within the sharding group and on tp"""
    replicate_seconds: Floats
    """the all-reduce over dp_replicate that follows a reduce-scatter (HSDP)"""
    gather_seconds: Floats
    movements: tuple[MovementCost, ...]


def lower_state(programs: Sequence[SegmentProgram], zero: int, workload: Workload, rules: StateRules) -> LoweredState:
    """Lower the weights of all segments. ZeRO 1 and above shard the optimizer state; a frozen weight has none
    and is sharded where parameters are.

    A tied weight comes last, as a segment of its own: with one stage it is the embedding's.
    """
    table = SizeTable()
    used, produced, largest, stored, trained, movements = [], [], [], [], [], []
    cast_used, cast_stored = [], []
    parts = [((program, *program.beside), False) for program in programs] + [((programs[-1],), True)]
    for index, (together, tied) in enumerate(parts):
        sums = _Sums()
        for program in together:
            _lower_weights(sums, program, tied, zero, workload, rules, table)
        used.append(tuple(sums.used.items()))
        produced.append(tuple(sums.produced.items()))
        largest.append(tuple(sums.produced))
        stored.append(tuple(sums.stored.items()))
        trained.append(tuple(sums.trained.items()))
        cast_used.append(tuple(sums.cast_used.items()))
        cast_stored.append(tuple(sums.cast_stored.items()))
        movements += [
            Movement(
                segment=index, role=key[0], kind=key[1], axes=key[2], terms=tuple(t.items()), calls=sums.calls[key]
            )
            for key, t in sums.moved.items()
        ]
    return LoweredState(
        sizes=table,
        used=tuple(used),
        produced=tuple(produced),
        largest=tuple(largest),
        stored=tuple(stored),
        trained=tuple(trained),
        cast_used=tuple(cast_used),
        cast_stored=tuple(cast_stored),
        movements=tuple(movements),
    )


Key = tuple[str, str, Axes]


@dataclass(slots=True)
class _Sums:
    """Elements of a segment's weights by size, and of what moves."""

    used: dict[int, float] = field(default_factory=dict)
    produced: dict[int, float] = field(default_factory=dict)
    stored: dict[int, float] = field(default_factory=dict)
    trained: dict[int, float] = field(default_factory=dict)
    cast_used: dict[int, float] = field(default_factory=dict)
    cast_stored: dict[int, float] = field(default_factory=dict)
    moved: dict[Key, dict[int, float]] = field(default_factory=dict)
    calls: dict[Key, int] = field(default_factory=dict)


def _lower_weights(
    sums: _Sums, program: SegmentProgram, tied: bool, zero: int, workload: Workload, rules: StateRules, table: SizeTable
) -> None:
    """Add the weights of one Program, `times` over where it stands for several alike."""
    alike, sizes = program.segment.times, program.segment.sizes
    narrow = narrow_weights(program.segment, workload.precision)
    for weight in program.segment.weights:
        if (weight.name in program.segment.shares) != tied:
            continue
        path = state_path(program, weight, zero >= (1 if weight.trained else rules.parameters_sharded_from))
        made = path.gradient if rules.whole_gradients == "as_produced" else path.used
        whole = table.number(layout_size(path.used, sizes))
        _count(sums.used, whole, alike)
        if weight.trained:
            _count(sums.produced, table.number(layout_size(made, sizes)), alike)
        shard = table.number(_size(path.stored, path, weight, program, rules))
        _count(sums.stored, shard, alike)
        if weight.trained:
            _count(sums.trained, shard, alike)
        if weight.name in narrow:
            _count(sums.cast_used, whole, alike)
            _count(sums.cast_stored, shard, alike)
        for key, size, element in _steps(path, weight, program, rules, workload, weight.name in narrow):
            within_tp = on_tp(key[2])
            times = rules.tp_gradient_times if within_tp else 1
            _count(sums.moved.setdefault(key, {}), table.number(size), times * element * alike)
            per_weight = within_tp and rules.tp_gradients == "per_weight"
            sums.calls[key] = sums.calls.get(key, 0) + times if per_weight else times


def _steps(
    path: StatePath, weight: Weight, program: SegmentProgram, rules: StateRules, workload: Workload, narrow: bool
) -> Iterator[tuple[tuple[str, str, Axes], Size | PaddedSize, float]]:
    """((role, kind, axes), elements given, bytes of one) of every collective of a weight."""
    scaling = scaling_of(workload.precision)
    cast = 0.0
    if narrow and scaling is not None and scaling.gathers == "cast" and workload.precision.parameters in NARROW:
        cast = scaling.weight_bytes
    for source, steps, role in ((path.gradient, path.reduce, "gradient"), (path.stored, path.gather, "parameter")):
        now = source
        for step in steps:
            if step.kind != "slice":
                sizes = program.segment.sizes
                size = layout_size(now, sizes) if on_tp(step.axes) else _size(now, path, weight, program, rules)
                element = DTYPE_BYTES[movement_dtype(role, step.axes, rules, workload)]
                yield (role, step.kind, step.axes), size, cast if cast and role == "parameter" else element
            now = step.result


def movement_dtype(role: str, axes: Axes, rules: StateRules, workload: Workload) -> str:
    """Parameters are gathered in the compute dtype, gradients reduced in their own (on tp: as the runtime says)."""
    if role == "parameter" or (on_tp(axes) and rules.tp_gradient_dtype == "compute"):
        return workload.precision.compute
    return workload.precision.gradients


def _size(
    layout: Layout, path: StatePath, weight: Weight, program: SegmentProgram, rules: StateRules
) -> Size | PaddedSize:
    """Elements of a weight in `layout`, whose rows are padded where the runtime shards by whole rows."""
    shards = tuple(a for a in path.stored.sharded if a not in path.used.sharded)
    sizes = program.segment.sizes
    if not shards or not rules.pads_rows:
        return layout_size(layout, sizes)
    dims = list(zip(layout.dims, path.used.shards, strict=True))
    rows = row_dims(program.segment, weight)
    return PaddedSize(
        rows=size_of([pair for pair in dims if pair[0] in rows], sizes),
        axes=shards,
        rest=size_of([pair for pair in dims if pair[0] not in rows], sizes),
        times=tuple(a for a in shards if a not in layout.sharded),
    )


def row_dims(segment: Segment, weight: Weight) -> Dims:
    """The dims that are the first dim of the tensor as torch.nn stores it: a linear's outputs, all of a vector."""
    reader = next(op for op in segment.operators if weight.name in op.inputs)
    if reader.kind == "einsum":
        outputs = tuple(dim for dim in weight.dims if dim in reader.result)
        return outputs or weight.dims[:1]
    return weight.dims if reader.kind in ("norm", "bias", "mul") else weight.dims[:1]


def on_tp(axes: Axes) -> bool:
    return set(axes) <= set(TP)


def in_root_unit(movement: Movement, rules: StateRules, content: Sequence[int]) -> bool:
    """Whether the head's share travels in the embedding's calls, on a stage that has both."""
    both = bool(content[0] and content[-1]) and movement.segment == len(content) - 1
    return rules.root_unit and both and not on_tp(movement.axes)


def gathers(zero: Floats, rules: StateRules, segments: int) -> tuple[Floats, Floats]:
    """How often a micro-batch's forward and its backward gather a segment's parameters: [segment, row], 0 or 1.

    Where both are 0 a sharded parameter is gathered once a step.
    """
    sharded = zero >= float(rules.parameters_sharded_from)
    again = np.ones((segments, 1))
    if not rules.root_resharded:
        again[[0, -1]] = 0.0
    return np.ones((segments, 1)) * sharded, again * (zero == 3.0)


def _count(into: dict[int, float], number: int, factor: float) -> None:
    into[number] = into.get(number, 0.0) + factor


def largest_elements(lowered: LoweredState, table: Floats) -> Floats:
    """Of the largest single gradient, per [segment, row]."""
    return np.array([table[list(sizes)].max(axis=0, initial=0.0) for sizes in lowered.largest])


def state_costs(lowered: LoweredState, rows: Rows, cluster: Cluster) -> StateCosts:
    """Elements and seconds per segment, for rows of degrees."""
    table = lowered.sizes.evaluate(rows.symbols)
    segments, size = len(lowered.used), table.shape[1]
    seconds = {name: np.zeros((segments, size)) for name in ("reduce", "replicate", "gather")}
    spans: dict[Axes, object] = {}
    costs = []
    for movement in lowered.movements:
        if movement.axes not in spans:
            spans[movement.axes] = span(movement.axes, rows, cluster)
        payload = evaluate_terms(movement.terms, table)
        calls = float(movement.calls)
        cost = price(movement.kind, payload / calls, spans[movement.axes], cluster)  # type: ignore[arg-type]
        name = "gather" if movement.role == "parameter" else "reduce"
        if movement.over_replicas:
            name = "replicate"
        taken = calls * cost.seconds
        seconds[name][movement.segment] += taken
        costs.append(
            MovementCost(movement=movement, payload_bytes=payload, wire_bytes=calls * cost.wire_bytes, seconds=taken)
        )
    return StateCosts(
        used_elements=np.array([evaluate_terms(terms, table) for terms in lowered.used]),
        produced_elements=np.array([evaluate_terms(terms, table) for terms in lowered.produced]),
        largest_elements=largest_elements(lowered, table),
        stored_elements=np.array([evaluate_terms(terms, table) for terms in lowered.stored]),
        trained_elements=np.array([evaluate_terms(terms, table) for terms in lowered.trained]),
        cast_used_elements=np.array([evaluate_terms(terms, table) for terms in lowered.cast_used]),
        cast_stored_elements=np.array([evaluate_terms(terms, table) for terms in lowered.cast_stored]),
        reduce_seconds=seconds["reduce"],
        replicate_seconds=seconds["replicate"],
        gather_seconds=seconds["gather"],
        movements=tuple(costs),
    )


def tied_gradients(
    used_elements: Floats, symbols: Mapping[str, Floats], cluster: Cluster, workload: Workload
) -> tuple[Floats, CollectiveCost]:
    """(bytes given, cost) of the all-reduce that keeps the two copies of a tied embedding equal, between first and
    last stage; `used_elements` are those of the copy."""
    gpus, pp = symbols["gpus"], symbols["pp"]
    payload = np.where(pp > 1.0, used_elements * DTYPE_BYTES[workload.precision.gradients], 0.0)
    pair = group_span([(np.full_like(gpus, 2.0), np.maximum(1.0, (pp - 1.0) * (gpus / pp)))], cluster, gpus)
    return payload, price("all_reduce", payload, pair, cluster)


def clip_seconds(gpus: Floats, cluster: Cluster, workload: Workload) -> Floats:
    """The all-reduce of the squared norm of all gradients, one fp32 number over all ranks."""
    if not workload.clip_grad:
        return np.zeros_like(gpus)
    everyone = group_span([(gpus, np.ones_like(gpus))], cluster, gpus)
    return price("all_reduce", np.full_like(gpus, 4.0), everyone, cluster).seconds
