"""Costs of distinct combinations: computed once per combination, gathered by every row that has it.

A store keeps what it has computed, so that the next batch (or the next single estimate) of the same
model, workload, cluster and runtime pays only for combinations that are new. Every entry is computed
elementwise, so it has the same bits whenever and with whatever neighbours it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel import fitted
from distplan.costmodel.casting import for_accelerator, with_high_ends
from distplan.costmodel.decompose import decompose_norms
from distplan.costmodel.derive import derive
from distplan.costmodel.exchanges import Rows, TwoRows
from distplan.costmodel.feed_forward import evenly_routed
from distplan.costmodel.fitted import Band, measured_band
from distplan.costmodel.graph import Segment, segments
from distplan.costmodel.host import host_wait
from distplan.costmodel.layout import EXPERT
from distplan.costmodel.local_costs import LocalCosts, local_costs
from distplan.costmodel.lower import PHASES, Lowered, lower
from distplan.costmodel.model import Attention, Model, Moe, Workload
from distplan.costmodel.placements import check_marks, marks_of
from distplan.costmodel.program import SegmentProgram, Structure
from distplan.costmodel.runtime import Runtime, on_cluster
from distplan.costmodel.sizes import mesh_strides, mesh_symbols, padded_vocab
from distplan.costmodel.stages import Split, split, split_of
from distplan.costmodel.state import LoweredState, StateCosts, clip_seconds, lower_state, state_costs, tied_gradients
from distplan.costmodel.strategy import STRUCTURE, Floats, Strategy
from distplan.hardware.calibrated import rates_of
from distplan.hardware.cluster import Cluster
from distplan.hardware.collectives import price
from distplan.hardware.groups import group_span
from distplan.hardware.rates import Rates

Ints = NDArray[np.int64]
LOCAL_KEY = ("tp", "cp", "cp_inner", "micro_batch", "ep", "etp", "dp_replicate", "dp_shard", "pp")


def columns_of(strategy: Strategy, gpus: float) -> dict[str, Floats]:
    """One strategy's degrees as columns of length 1."""
    return {name: np.array([float(getattr(strategy, name))]) for name in LOCAL_KEY} | {"gpus": np.array([gpus])}


def distinct(*columns: NDArray[np.generic]) -> tuple[Ints, Ints]:
    """(row of each distinct combination's first occurrence, combination of every row).

    Columns that vary least come first: sorting finds long runs then.
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    if len(code) == 1:
        return code, code
    room = 1
    for column in columns:
        if (column == column[:1]).all():
            continue
        values = column.astype(np.int64)
        width = int(values.max()) + 1
        if room > 2**62 // width:
            code = np.unique(code, return_inverse=True)[1].astype(np.int64)
            room = int(code.max()) + 1
        code = code * width + values
        room *= width
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)


def renumbered(index: Ints, count: int) -> tuple[Ints, Ints]:
    """(the numbers below `count` that occur, each entry's place among them): np.unique without sorting."""
    if len(index) == 1:
        return index, np.zeros(1, dtype=np.int64)
    occurs = np.zeros(count, dtype=np.bool_)
    occurs[index] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[index]


@dataclass(slots=True)
class Store:
    """Rows of arrays by key; `compute` fills the keys that are missing, all at once."""

    compute: Callable[[Mapping[str, Floats]], Mapping[str, Floats]]
    places: dict[bytes, int] = field(default_factory=dict)
    arrays: dict[str, Floats] = field(default_factory=dict)

    def find(self, columns: Mapping[str, Floats]) -> Ints:
        """Places of the rows of `columns`; arrays are [..., place]."""
        packed = np.stack([*columns.values()], axis=1)
        keys = packed.view(f"V{packed.shape[1] * packed.itemsize}")[:, 0].tolist()
        places = list(map(self.places.get, keys))
        if None in places:
            fresh = {key: at for at, (key, place) in enumerate(zip(keys, places, strict=True)) if place is None}
            rows = list(fresh.values())
            held = len(self.places)
            for name, values in self.compute({name: column[rows] for name, column in columns.items()}).items():
                old = self.arrays.get(name)
                self.arrays[name] = values if old is None else np.concatenate([old, values], axis=-1)
            for offset, key in enumerate(fresh):
                self.places[key] = held + offset
            places = [self.places[key] for key in keys]
        return np.array(places, dtype=np.int64)


@dataclass(slots=True)
class Engine:
    """One model, workload (without its batch), cluster and runtime, with what has been computed for them."""

    model: Model
    workload: Workload
    cluster: Cluster
    runtime: Runtime
    rates: Rates
    segments: tuple[Segment, ...]
    pattern: tuple[int, ...]
    kv_heads: float
    programs: dict[Structure, tuple[SegmentProgram, ...]] = field(default_factory=dict)
    lowered: dict[tuple[str, ...], Lowered] = field(default_factory=dict)
    lowered_state: dict[tuple[str, ...], LoweredState] = field(default_factory=dict)
    local: Store = field(init=False)
    state: Store = field(init=False)
    boundaries: Store = field(init=False)
    """seconds to send (bytes) to the next of pp stages of a job of so many gpus"""
    flops: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        def compute(columns: Mapping[str, Floats]) -> Mapping[str, Floats]:
            gpus, pp = columns["gpus"], columns["pp"]
            stages = group_span([(pp, gpus / pp)], self.cluster, gpus)
            return {"seconds": price("send_recv", columns["bytes"], stages, self.cluster).seconds}

        self.boundaries = Store(compute)
        self.local = Store(self._price_local)
        self.state = Store(self._price_state)

    @property
    def like(self) -> tuple[str, str, str]:
        """(generation, runtime, model kind): whose runs' residuals are its bands."""
        kind = "moe" if any(isinstance(k.ffn, Moe) for k in self.model.kinds.values()) else "dense"
        return self.cluster.accelerator.generation, self.runtime.name, kind

    @property
    def time_band(self) -> Band:
        """Of the step time: that of the cluster's own runs, or of the runs most like it."""
        return measured_band(self.cluster, f"time_band_{self.like[2]}") or fitted.time_band(*self.like)

    @property
    def memory_band(self) -> Band:
        """Of the device's bytes, likewise."""
        return measured_band(self.cluster, f"memory_band_{self.like[2]}") or fitted.memory_band(*self.like)

    def split(self, pp: int, vpp: int, schedule: str, by_hand: tuple[int, ...] = ()) -> Split:
        """The layers of every chunk as the user says, else the runtime's default split."""
        if by_hand:
            mtp = self.model.mtp_layers
            return split_of(self.pattern, len(self.segments), by_hand, pp, vpp, schedule, mtp)
        return split(self.pattern, len(self.segments), pp, vpp, schedule, self.model.mtp_layers)

    def structure(self, sp: str, cp_kind: str, recompute: str) -> Structure:
        tags = {"none": (), "full": ("layer",), "selective": self.runtime.selective}[recompute]
        if recompute == "selective" and self.workload.attention != "flash":
            tags = ("core_attention",)
        return Structure(
            sp=sp == "true",
            cp_kind=cp_kind,
            recompute=tags,
            early_stop=self.runtime.early_stop,
            sp_saves=self.runtime.sp_saves,
            merged_input_gradients=self.runtime.merged_input_gradients,
            embedding_gradient=self.runtime.embedding_gradient,
            placements=marks_of(self.model),
        )

    def program(self, structure: Structure) -> tuple[SegmentProgram, ...]:
        """The Programs of all segments: the very ones that are priced."""
        if structure not in self.programs:
            inner = replace(structure, recompute=())
            self.programs[structure] = tuple(
                derive(segment, structure if segment.name.startswith("layer") else inner) for segment in self.segments
            )
        return self.programs[structure]

    def lower(self, sp: str, cp_kind: str, recompute: str) -> Lowered:
        """The Program of a structure, lowered once."""
        key = (sp, cp_kind, recompute)
        if key not in self.lowered:
            self.lowered[key] = lower(self.program(self.structure(*key)), self.workload)
        return self.lowered[key]

    def lower_state(self, sp: str, zero: str) -> LoweredState:
        """Weights and their movements under a ZeRO stage, lowered once."""
        if (sp, zero) not in self.lowered_state:
            programs = self.program(self.structure(sp, "all_gather", "none"))
            self.lowered_state[(sp, zero)] = lower_state(programs, int(zero), self.workload, self.runtime.state)
        return self.lowered_state[(sp, zero)]

    def rows(self, columns: Mapping[str, Floats], cp_kind: str) -> Rows:
        """What sizes and groups are evaluated for."""
        degrees = mesh_symbols(columns, self.kv_heads, cp_kind)
        symbols = degrees | {
            "vocab": padded_vocab(self.model.vocab, self.model.vocab_pad_multiple, columns["tp"]),
            "gpus": columns["gpus"],
            # a rank with all experts has its own tokens, no more
            "load": np.where(columns["ep"] > 1.0, self.workload.moe_imbalance, 1.0),
        }
        if "micro_batch" in columns:
            symbols["micro_batch"] = columns["micro_batch"]
        return Rows(symbols, mesh_strides(degrees, self.runtime.mesh_order))

    def flops_per_sequence(self) -> tuple[float, float]:
        """(forward FLOPs of one sequence over the whole model, of which attention over the square of scores).

        Every token has its top_k experts: slots that imbalance or a capacity factor add are no work of the model's.
        """
        if not self.flops:
            one = {name: np.ones(1) for name in (*LOCAL_KEY, "gpus")}
            structure = self.structure("false", "all_gather", "none")
            programs = tuple(derive(evenly_routed(segment), structure) for segment in self.segments)
            costs = self.local_costs(lower(programs, self.workload), one, "all_gather")
            counts = [1.0] + [float(self.pattern.count(i)) for i in range(1, len(self.segments) - 1)] + [1.0]
            full = [float(value[0]) for value in costs.full_flops[0]]
            attention = [float(value[0]) for value in costs.attention_flops]
            self.flops.append(sum(c * f for c, f in zip(counts, full, strict=True)))
            self.flops.append(sum(c * f for c, f in zip(counts, attention, strict=True)))
        return self.flops[0], self.flops[1]

    def _price_local(self, columns: Mapping[str, Floats]) -> Mapping[str, Floats]:
        """Costs per micro-batch for (tp, cp, micro_batch, …) of each row's structure."""

        def price_structure(sp: str, cp_kind: str, recompute: str, rows: Mapping[str, Floats]) -> Mapping[str, Floats]:
            return self._with_host(self.local_costs(self.lower(sp, cp_kind, recompute), rows, cp_kind))

        return _by_structure(columns, ("sp", "cp_kind", "recompute"), price_structure)

    def _with_host(self, costs: LocalCosts) -> Mapping[str, Floats]:
        each = self.rates.host_operator if self.runtime.issue == "eager" else self.rates.launch_latency
        return _local_arrays(costs, costs.host_operators * each)

    def local_costs(self, lowered: Lowered, columns: Mapping[str, Floats], cp_kind: str) -> LocalCosts:
        first, index = distinct(*(column for name, column in columns.items() if name not in EXPERT))
        every, dense = (
            self.rows(each, cp_kind) for each in (columns, {name: column[first] for name, column in columns.items()})
        )
        return local_costs(
            lowered,
            len(self.segments),
            TwoRows(every, dense, index),
            self.cluster,
            self.rates,
            causal=self.workload.causal,
            hides={kind: self.runtime.hidden(kind) for kind in self.runtime.overlap},
            kernel_time=self.rates.attention_kernels.get(self.runtime.attention_kernel, 1.0),
            unfused=self._unfused(),
            routings=self._routings() if self.runtime.expert_dispatch == "once_per_domain" else {},
            experts_behind_all=self.runtime.expert_overlap == "micro_batches",
            scattered=self.runtime.boundary == "scattered",
            captured=self.runtime.cuda_graph_modules,
        )

    def _unfused(self) -> list[str]:
        """What takes kernels of its own; tokens that are sent to each of their experts come ordered by rank."""
        parts = [name for name in ("rope", "norm", "expert_bias") if not getattr(self.runtime, f"fused_{name}")]
        return [*parts, "sort"] if self.runtime.expert_dispatch == "each" else parts

    def _routings(self) -> Mapping[int, Moe]:
        """Segment -> its experts."""
        names = [*dict.fromkeys(self.model.pattern), *([self.model.mtp_kind] if self.model.mtp_layers else [])]
        blocks = {number: self.model.kinds[name].ffn for number, name in enumerate(names, start=1)}
        return {number: block for number, block in blocks.items() if isinstance(block, Moe)}

    def _price_state(self, columns: Mapping[str, Floats]) -> Mapping[str, Floats]:
        """Elements and movements of weights for (tp, cp, dp_replicate, dp_shard, …) of each row's sp and zero."""

        def price_structure(sp: str, zero: str, rows: Mapping[str, Floats]) -> Mapping[str, Floats]:
            at = self.rows(rows, "none")
            costs = state_costs(self.lower_state(sp, zero), at, self.cluster)
            tied = tied_gradients(costs.used_elements[-1], at.symbols, self.cluster, self.workload)[1].seconds
            clip = clip_seconds(at.symbols["gpus"], self.cluster, self.workload)
            return {**_state_arrays(costs), "tied": tied, "clip": clip}

        return _by_structure(columns, ("sp", "zero"), price_structure)


def _by_structure(
    columns: Mapping[str, Floats], names: Sequence[str], price_structure: Callable[..., Mapping[str, Floats]]
) -> dict[str, Floats]:
    """Arrays [..., row] of rows that have different structures, which are priced one after the other."""
    total = len(columns[names[0]])
    rest = {name: column for name, column in columns.items() if name not in names}
    _, group = distinct(*(columns[name] for name in names))
    arrays: dict[str, Floats] = {}
    for number in range(int(group.max(initial=-1)) + 1):
        members = np.flatnonzero(group == number)
        key = [STRUCTURE[name][int(columns[name][members[0]])] for name in names]
        together = members[-1] - members[0] + 1 == len(members)
        into = slice(members[0], members[-1] + 1) if together else members
        found = price_structure(*key, {name: column[members] for name, column in rest.items()})
        for name, values in found.items():
            if name not in arrays:
                arrays[name] = np.empty((*values.shape[:-1], total))
            arrays[name][..., into] = values
    return arrays


def _local_arrays(costs: LocalCosts, host: Floats) -> Mapping[str, Floats]:
    """`passes` is [category or host, segment, row]."""
    wait = host_wait(costs.seconds, host)
    forward, backward = PHASES.index("forward"), PHASES.index("backward")
    return {
        "passes": np.concatenate([costs.passes, (wait[forward] + wait[backward])[np.newaxis]]),
        **dict(zip(PHASES, costs.seconds + wait, strict=True)),
        "full_flops": costs.full_flops,
        "kernel_flops": costs.kernel_flops,
        "saved": costs.saved_bytes,
        "remade": costs.remade_bytes,
        "transient": costs.transient_bytes,
        "boundary": costs.boundary_bytes,
        "boundary_gather": costs.boundary_gather,
        "weight_gradient": costs.weight_gradient,
    }


def _state_arrays(costs: StateCosts) -> Mapping[str, Floats]:
    return {
        "used": costs.used_elements,
        "produced": costs.produced_elements,
        "largest": costs.largest_elements,
        "stored": costs.stored_elements,
        "trained": costs.trained_elements,
        "cast_used": costs.cast_used_elements,
        "cast_stored": costs.cast_stored_elements,
        "reduce": costs.reduce_seconds,
        "replicate": costs.replicate_seconds,
        "gather": costs.gather_seconds,
    }


@dataclass(frozen=True, slots=True)
class _Same:
    """Arguments that hold mappings are compared by identity (they are never changed), the workload by value."""

    model: Model
    workload: Workload
    cluster: Cluster
    runtime: Runtime

    def __hash__(self) -> int:
        return hash((id(self.model), self.workload, id(self.cluster), id(self.runtime)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and self.model is other.model
            and self.cluster is other.cluster
            and self.runtime is other.runtime
            and self.workload == other.workload
        )


@lru_cache(maxsize=16)
def _engine(same: _Same) -> Engine:
    cluster, runtime = same.cluster, on_cluster(same.runtime, same.cluster)
    workload = replace(same.workload, precision=for_accelerator(same.workload.precision, cluster.accelerator))
    model = with_high_ends(same.model, workload.precision)
    check_marks(model, workload)
    parts = segments(model, workload, runtime.fused_glu)
    if not runtime.fused_norm:
        parts = tuple(decompose_norms(part) for part in parts)
    used = list(dict.fromkeys(model.pattern))
    kv_heads = [k.mixer.kv_heads for k in model.kinds.values() if isinstance(k.mixer, Attention)]
    return Engine(
        model=model,
        workload=workload,
        cluster=cluster,
        runtime=runtime,
        rates=rates_of(cluster),
        segments=parts,
        pattern=tuple(1 + used.index(name) for name in model.pattern),
        kv_heads=float(min(kv_heads, default=math.inf)),
    )


def engine(model: Model, workload: Workload, cluster: Cluster, runtime: Runtime) -> Engine:
    """The engine of these four, whatever the global batch; the last 16 are kept."""
    plain = replace(workload, global_batch=1, moe_imbalance_low=1.0, moe_imbalance_high=1.0)
    return _engine(_Same(model, plain, cluster, runtime))
