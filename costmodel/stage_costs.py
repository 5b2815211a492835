"""What stages cost: segment tables summed over what each stage holds, and the memory of each stage.

Everything is [run, row]: a run is a set of neighbouring stages with the same content (stages.py). Of
a run the first stage keeps the most micro-batches in flight, so it stands for the run in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np

from distplan.costmodel.casting import NARROW, layouts_of, scaling_of, stored_dtype
from distplan.costmodel.model import DTYPE_BYTES, Precision, Workload
from distplan.costmodel.pipeline import in_flight
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.stages import Run
from distplan.costmodel.strategy import Floats

MEMORY_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits and loss",
    "recompute workspace",
    "temporaries",
    "gathered layers",
    "buckets",
    "fragmentation",
    "context and libraries",
)
INIT, FORWARD = "init and load", "forward peak"
PHASES = (INIT, FORWARD, "loss", "backward", "optimizer step")


def run_sum(content: Sequence[int], table: Floats) -> Floats:
    """Σ count · table[..., segment, row], left to right."""
    total: Floats | None = None
    for segment, count in enumerate(content):
        if count:
            term = table[..., segment, :] if count == 1 else count * table[..., segment, :]
            total = term if total is None else total + term
    return np.zeros((*table.shape[:-2], table.shape[-1])) if total is None else total


def run_max(content: Sequence[int], table: Floats) -> Floats:
    """The largest table[segment] among the segments that the content has."""
    most = np.zeros(table.shape[-1])
    for count, row in zip(content, table, strict=True):
        if count:
            most = np.maximum(most, row)
    return most


def layers_only(content: Sequence[int]) -> tuple[int, ...]:
    """The content without embedding and head."""
    return (0, *content[1:-1], 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one run, per row."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    gathered: Floats
    buckets: Floats
    step_temporary: Floats
    init: Floats | None
    """parameters as they were made, the buffers that they are copied into, and those of gradients (None: no copies)"""
    step_cached: Floats | None
    """blocks of other copies of the update, freed and too small for the largest"""
    host: Floats
    optimizer_traffic: Floats
    """bytes that the optimizer step moves"""
    gradient_elements: Floats


def gathered_bytes(
    content: Sequence[int], elements: Mapping[str, Floats], zero: Floats, workload: Workload, runtime: Runtime
) -> Floats:
    """Parameters that are whole for a while beside what is stored of them.

    ZeRO 3 holds the layer in use and the one fetched ahead, and embedding and head from forward to backward
    where they are not resharded; ZeRO 2 of sharded parameters holds all. Parameters that are not kept in
    the compute dtype are cast when gathered, and where nothing is gathered the cast copy of what is trained is held
    whole.
    """
    recipe, rules = workload.precision, runtime.state
    used = elements["used"] * DTYPE_BYTES[recipe.compute]
    copies = cast_bytes(recipe)
    if copies is not None:
        used = used + elements["cast_used"] * copies.in_use
    layers, largest = layers_only(content), run_max(content, used)
    root = run_sum((content[0], *(0,) * (len(content) - 2), content[-1]), used)
    if not rules.root_resharded:
        largest = np.where(root > 0.0, 0.5 * root + run_max(layers, used), largest)
    trained = np.minimum(run_sum(content, elements["used"]), run_sum(content, elements["produced"]))
    held = trained * DTYPE_BYTES[recipe.compute]
    if recipe.parameters in (recipe.compute, *NARROW):
        held = np.zeros_like(held)
    if rules.parameters_sharded_from == 2:
        held = np.where(zero == 2.0, run_sum(content, used), held)
    return np.where(zero == 3.0, largest * 2.0, held)


@dataclass(frozen=True, slots=True)
class CastBytes:
    """Bytes per element of a narrow product's weight."""

    whole: float
    """beside the parameter where it is whole (below 0: instead of it)"""
    sharded: float
    """the same where it is stored sharded"""
    in_use: float
    """beside the gathered 16-bit copy while a layer is in use (below 0: instead of it)"""
    traffic: float
    """read and written once a step to make the copies"""


def cast_bytes(recipe: Precision) -> CastBytes | None:
    """Cast copies are made once a step and kept along both directions (Transformer Engine's weight cache), or are
    all that is kept (fp8-param-gather); a scaling that casts before every product keeps none."""
    scaling = scaling_of(recipe)
    if scaling is None or scaling.weights == "each":
        return None
    compute, copies = DTYPE_BYTES[recipe.compute], layouts_of(recipe) * scaling.weight_bytes
    if recipe.parameters in NARROW:
        turned = 2.0 * (copies - scaling.weight_bytes) if scaling.gathers == "cast" else compute + copies
        return CastBytes(copies - compute, scaling.weight_bytes - compute, copies - compute, turned)
    return CastBytes(copies, 0.0, copies, scaling.reads * compute + copies)


ELEMENTS = ("used", "produced", "stored", "trained")


def state_bytes(
    content: Sequence[int], elements: Mapping[str, Floats], zero: Floats, workload: Workload, runtime: Runtime
) -> StateBytes:
    """Elements are [segment, row]; the last segment is the tied copy of the embedding.

    ZeRO 1 stores the optimizer state sharded, 2 the gradients too, 3 the parameters too (Rajbhandari et
    al. 2020, section 5). A step with gradients of two bytes copies its own shard of them, to fp32 at least.
    Frozen weights are in the compute dtype. Weights of narrow products have their cast copies beside them,
    or instead.
    """
    recipe = workload.precision
    master = DTYPE_BYTES[recipe.master] if recipe.master else 0.0
    moments = sum(DTYPE_BYTES[dtype] for dtype in recipe.moments)
    gradient = DTYPE_BYTES[recipe.gradients]
    parameter = DTYPE_BYTES[stored_dtype(recipe)]
    whole, produced, stored, trained = run_sum(content, np.stack([elements[name] for name in ELEMENTS]))
    states = trained * (master + moments)
    on_host = 1.0 if workload.offload_optimizer else 0.0
    bucket = run_max(content, elements["produced"]) * gradient
    if runtime.grad_bucket_bytes:
        bucket = np.minimum(produced * gradient, runtime.grad_bucket_bytes)
    sharded = zero >= float(runtime.state.parameters_sharded_from)
    parameters = np.where(sharded, stored, whole) * parameter
    traffic = trained * (gradient + 2.0 * (master + moments) + parameter)
    frozen = np.where(sharded, stored - trained, np.maximum(0.0, whole - produced))
    parameters = parameters - frozen * (parameter - DTYPE_BYTES[recipe.compute])
    cast = cast_bytes(recipe)
    if cast is not None:
        cast_used, cast_stored = run_sum(content, elements["cast_used"]), run_sum(content, elements["cast_stored"])
        parameters = parameters + np.where(sharded, cast_stored * cast.sharded, cast_used * cast.whole)
        traffic = traffic + cast_used * cast.traffic
    rules = runtime.state
    kept = DTYPE_BYTES[recipe.compute] if rules.kept_gradients and recipe.gradients != recipe.compute else 0.0
    gradients = np.where(zero >= 2.0, trained, produced) * (gradient + kept)
    step, step_cached = step_copies(run_max(content, elements["largest"]), produced, trained, zero, recipe, runtime)
    return StateBytes(
        parameters=parameters,
        gradients=gradients,
        optimizer=states * (1.0 - on_host),
        gathered=gathered_bytes(content, elements, zero, workload, runtime),
        buckets=np.where(zero >= float(runtime.state.buckets_from), bucket, 0.0),
        step_temporary=step,
        step_cached=step_cached if rules.step_contiguous else None,
        init=(parameters + gradients) + parameters * (zero >= 1.0) if rules.init == "beside" else None,
        host=states * on_host,
        optimizer_traffic=traffic,
        gradient_elements=trained,
    )


def step_copies(
    largest: Floats, produced: Floats, trained: Floats, zero: Floats, recipe: Precision, runtime: Runtime
) -> tuple[Floats, Floats]:
    """(bytes of the largest copies of gradients between backward and update, bytes of freed blocks beside them).

    The shard's copy and, before it, that of one gradient for its norm; or the cast of all of wider gradients.
    """
    rules = runtime.state
    narrow = bool(recipe.master) and DTYPE_BYTES[recipe.gradients] < 4.0
    shard = trained * (rules.step_copies if narrow else 0.0)
    norm = np.minimum(largest, trained) * (rules.norm_copy if narrow else 0.0)
    cast = np.zeros_like(shard)
    if rules.wide_gradients_cast and recipe.gradients != recipe.compute:
        cast = np.where(zero < 2.0, produced, 0.0) * DTYPE_BYTES[recipe.compute]
    fits = norm <= trained * 4.0
    cached = np.where(fits, 0.0, np.minimum(norm, shard)) * rules.step_contiguous
    return np.maximum(np.maximum(shard, norm), cast), cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of one run and micro-batch, per row: nothing recomputed, everything recomputed, and while it runs."""

    kept: Floats
    least: Floats
    remade: Floats
    temporaries: Floats
    head: Floats


def activations(content: Sequence[int], plain: Mapping[str, Floats], chosen: Mapping[str, Floats]) -> Activations:
    """`plain` are local tables without recomputation, `chosen` those of the row's own recompute."""
    layers = layers_only(content)
    body = (content[0], *layers[1:])
    has_head = 1.0 if content[-1] else 0.0
    head = (chosen["saved"][-1] + chosen["transient"][-1]) * has_head
    return Activations(
        kept=run_sum(body, plain["saved"]),
        least=run_sum(body, chosen["saved"]),
        remade=run_max(layers, chosen["remade"]),
        temporaries=run_max((content[0], *layers[1:]), chosen["transient"]),
        head=head,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Device bytes of the first stage of a run in one phase. `moving` are the parts that are not states, in the
    order of MEMORY_PARTS from "activations" to "buckets"; None is nothing."""

    states: tuple[Floats | None, ...]
    """parameters, gradients, optimizer"""
    moving: tuple[Floats | None, ...]
    stage: int
    phase: int
    allocated: Floats
    fragmentation: Floats


def chunks_in_flight(schedule: str, run: Run, pp: int, vpp: int, m: Floats) -> Floats:
    """Micro-batches' worth of the stage's activations: chunks in flight over chunks per stage."""
    return in_flight(schedule, run.first, pp, m, vpp) / vpp


def stage_memory(
    run: Run,
    state: StateBytes,
    acts: Activations,
    flight: Floats,
    share: Floats,
    runtime: Runtime,
    is_last: bool,
    usable: float,
) -> list[StageMemory]:
    """One entry per phase that can be the worst (of the others: memory_phases.py). `share` is the part of the layers
    that is recomputed (0 … 1), `flight` micro-batches in flight; gradients of the last micro-batch, the logits and the
    update are never there at the same time.

    Blocks that backward has left in torch's cache stay reserved beside copies that are larger than each of them,
    up to `usable` bytes of the device: an allocation that fails gives the cache back and is tried again
    (c10/cuda/CUDACachingAllocator.cpp, malloc: free_block, alloc_block, release_cached_blocks).
    """
    held = flight * (acts.kept - share * (acts.kept - acts.least))
    workspace = np.where(share > 0.0, acts.remade, 0.0)
    phases: list[tuple[str, tuple[Floats | None, ...]]] = [
        ("backward", (held, None, workspace, acts.temporaries, state.gathered, state.buckets)),
        ("optimizer step", (None, None, None, state.step_temporary, None, state.buckets)),
    ]
    if is_last:
        phases.insert(1, ("loss", (held, acts.head, None, None, state.gathered, None)))
    states = (state.parameters, state.gradients, state.optimizer)
    found = [in_phase(run, states, moving, name, runtime) for name, moving in phases]
    if state.step_cached is not None:
        step = found[-1]
        room = usable - runtime.context_bytes - (step.allocated + step.fragmentation)
        cached = np.minimum(held + workspace + acts.temporaries + state.step_cached, np.maximum(room, 0.0))
        found[-1] = replace(step, fragmentation=step.fragmentation + cached)
    if state.init is not None:
        found.append(
            StageMemory(
                states=(state.parameters, state.gradients, None),
                moving=(None, None, None, state.parameters, None, None),
                stage=run.first,
                phase=PHASES.index(INIT),
                allocated=state.init,
                fragmentation=np.zeros(()),
            )
        )
    return found


def in_phase(
    run: Run, states: tuple[Floats | None, ...], moving: tuple[Floats | None, ...], name: str, runtime: Runtime
) -> StageMemory:
    """Bytes of a phase (of PHASES), summed from left to right."""
    assert states[0] is not None
    allocated = states[0]
    for part in (*states[1:], *moving):
        if part is not None:
            allocated = allocated + part
    dynamic = reduce(add, (part for part in moving if part is not None))
    return StageMemory(
        states=states,
        moving=moving,
        stage=run.first,
        phase=PHASES.index(name),
        allocated=allocated,
        fragmentation=dynamic * runtime.fragmentation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstMemory:
    """Row by row the stage and phase with the most reserved bytes; `parts` [MEMORY_PARTS, row] add up to device."""

    stage: Floats
    phase: Floats
    allocated: Floats
    fragmentation: Floats
    reserved: Floats
    device: Floats
    which: Floats

    @staticmethod
    def of(memories: Sequence[StageMemory], runtime: Runtime) -> WorstMemory:
        """The first of equals."""
        first, size = memories[0], len(memories[0].allocated)
        reserved = first.allocated + first.fragmentation
        which, stage, phase = np.zeros(size), np.full(size, float(first.stage)), np.full(size, float(first.phase))
        allocated, fragmentation = first.allocated.copy(), first.fragmentation.copy()
        for number, memory in enumerate(memories[1:], start=1):
            other = memory.allocated + memory.fragmentation
            more = other > reserved
            if not more.any():
                continue
            which[more], stage[more], phase[more] = float(number), float(memory.stage), float(memory.phase)
            np.copyto(allocated, memory.allocated, where=more)
            np.copyto(fragmentation, memory.fragmentation, where=more)
            reserved = np.maximum(reserved, other)
        return WorstMemory(
            stage=stage,
            phase=phase,
            allocated=allocated,
            fragmentation=fragmentation,
            reserved=reserved,
            device=reserved + runtime.context_bytes,
            which=which,
        )

    def parts(self, memories: Sequence[StageMemory], runtime: Runtime) -> Floats:
        """[MEMORY_PARTS, row]: from left to right they add up to `device`."""
        found = np.zeros((len(MEMORY_PARTS), len(self.which)))
        for number, memory in enumerate(memories):
            at = np.flatnonzero(self.which == number)
            rows = (*memory.states, *memory.moving, memory.fragmentation)
            for part, values in enumerate(rows):
                if values is not None:
                    found[part, at] = np.broadcast_to(values, self.which.shape)[at]
        found[-1] = runtime.context_bytes
        return found


def layers_to_recompute(
    state: StateBytes, acts: Activations, flight: Floats, layers: int, usable: float, runtime: Runtime, high: float
) -> Floats:
    """The least number of a stage's layers whose recomputation makes its high end fit; all of them if none does.

    Memory falls linearly with the number; the high end is `high` times the expected bytes (see Estimate).
    """
    still = acts.remade + acts.temporaries + state.gathered + state.buckets
    room = usable / high - runtime.context_bytes - ((state.parameters + state.gradients) + state.optimizer)
    dynamic = room / (1.0 + runtime.fragmentation)
    over = (still + flight * acts.kept) - dynamic
    each = flight * (acts.kept - acts.least) / max(layers, 1)
    needed = np.ceil(over / np.maximum(each, 1.0))
    return np.minimum(np.maximum(needed, 1.0), float(max(layers, 1)))
