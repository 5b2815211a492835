"""What stages cost: segment tables summed over what each stage holds, and the memory of each stage.

Everything is [run, row]: a run is a set of neighbouring stages with the same content (stages.py). Of
a run the first stage keeps the most micro-batches in flight, so it stands for the run in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distplan.costmodel.model import DTYPE_BYTES, Workload
from distplan.costmodel.pipeline import in_flight
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.stages import Run
from distplan.costmodel.strategy import Floats

MEMORY_PARTS = (
    "parameters", "gradients", "optimizer", "activations", "logits and loss", "recompute workspace",
    "temporaries", "gathered layers", "buckets", "fragmentation", "context and libraries",
)
PHASES = ("init", "forward peak", "loss", "backward", "optimizer step")


def run_sum(content: Sequence[int], table: Floats) -> Floats:
    """Σ count · table[segment], left to right; table is [segment, row]."""
    total = np.zeros(table.shape[-1])
    for count, row in zip(content, table, strict=True):
        if count:
            total = total + count * row
    return total


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
    host: Floats
    optimizer_traffic: Floats
    """bytes that the optimizer step moves"""
    gradient_elements: Floats


def gathered_bytes(content: Sequence[int], used: Floats, zero: Floats, workload: Workload, runtime: Runtime) -> Floats:
    """Parameters that are whole for a while beside what is stored of them.

    ZeRO 3 holds the layer in use and the one fetched ahead, and embedding and head from forward to backward
    where they are not resharded; ZeRO 2 of sharded parameters holds all. Parameters that are not kept in
    the compute dtype are cast when gathered, and where nothing is gathered the cast copy is held whole.
    """
    compute = DTYPE_BYTES[workload.precision.compute]
    rules = runtime.state
    layers, largest = layers_only(content), run_max(content, used)
    root, whole = run_sum((content[0], *(0,) * (len(content) - 2), content[-1]), used), run_sum(content, used)
    if not rules.root_resharded:
        largest = np.where(root > 0.0, 0.5 * root + run_max(layers, used), largest)
    held = whole if workload.precision.parameters != workload.precision.compute else np.zeros_like(whole)
    if rules.zero2_parameters == "sharded":
        held = np.where(zero == 2.0, whole, held)
    return np.where(zero == 3.0, largest * 2.0, held) * compute


def state_bytes(
    content: Sequence[int], used: Floats, produced: Floats, stored: Floats, zero: Floats, workload: Workload,
    runtime: Runtime,
) -> StateBytes:
    """Elements are [segment, row]; the last segment is the tied copy of the embedding.

    ZeRO 1 stores the optimizer state sharded, 2 the gradients too, 3 the parameters too (Rajbhandari et
    al. 2020, section 5). A step with gradients of two bytes makes an fp32 copy of its own shard of them.
    """
    recipe = workload.precision
    master = DTYPE_BYTES[recipe.master] if recipe.master else 0.0
    moments = sum(DTYPE_BYTES[dtype] for dtype in recipe.moments)
    gradient = DTYPE_BYTES[recipe.gradients]
    parameter = DTYPE_BYTES[recipe.parameters]
    whole, shard = run_sum(content, used), run_sum(content, stored)
    states = shard * (master + moments)
    on_host = 1.0 if workload.offload_optimizer else 0.0
    gathered = gathered_bytes(content, used, zero, workload, runtime)
    bucket = run_max(content, used) * gradient
    if runtime.grad_bucket_bytes:
        bucket = np.minimum(whole * gradient, runtime.grad_bucket_bytes)
    bucket = np.where(zero >= 2.0, bucket, 0.0)
    copies = 4.0 if recipe.master and gradient < 4.0 else 0.0
    return StateBytes(
        parameters=np.where(zero >= (2.0 if runtime.state.zero2_parameters == "sharded" else 3.0), shard, whole) * parameter,
        gradients=np.where(zero >= 2.0, shard, run_sum(content, produced)) * gradient,
        optimizer=states * (1.0 - on_host), gathered=gathered, buckets=bucket, step_temporary=shard * copies,
        host=states * on_host, optimizer_traffic=shard * (gradient + 2.0 * (master + moments) + parameter),
        gradient_elements=shard,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of one run and micro-batch, per row: nothing recomputed, everything recomputed, and while it runs."""

    kept: Floats
    least: Floats
    remade: Floats
    temporaries: Floats
    head: Floats


def activations(content: Sequence[int], plain: dict[str, Floats], chosen: dict[str, Floats]) -> Activations:
    """`plain` are local tables without recomputation, `chosen` those of the row's own recompute."""
    layers = layers_only(content)
    body = (content[0], *layers[1:])
    has_head = 1.0 if content[-1] else 0.0
    head = (chosen["saved"][-1] + chosen["transient"][-1]) * has_head
    return Activations(
        kept=run_sum(body, plain["saved"]), least=run_sum(body, chosen["saved"]),
        remade=run_max(layers, chosen["remade"]), temporaries=run_max((content[0], *layers[1:]), chosen["transient"]),
        head=head,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Device bytes of the first stage of a run in its worst phase; `parts` add up left to right."""

    parts: tuple[Floats, ...]
    phase: Floats
    allocated: Floats
    reserved: Floats
    device: Floats


def chunks_in_flight(schedule: str, run: Run, pp: int, vpp: int, m: Floats) -> Floats:
    """Micro-batches' worth of the stage's activations: chunks in flight over chunks per stage."""
    return in_flight(schedule, run.first, pp, m, vpp) / vpp


def stage_memory(
    state: StateBytes, acts: Activations, flight: Floats, share: Floats, runtime: Runtime, is_last: bool
) -> StageMemory:
    """`share` is the part of the layers that is recomputed (0 … 1), `flight` micro-batches in flight."""
    zero = np.zeros_like(flight)
    held = flight * (acts.kept - share * (acts.kept - acts.least))
    workspace = np.where(share > 0.0, acts.remade, 0.0)
    backward = (held, zero, workspace, acts.temporaries, state.gathered, state.buckets)
    loss = (held, acts.head, zero, zero, state.gathered, zero)
    step = (zero, zero, zero, state.step_temporary, zero, state.buckets)
    best: StageMemory | None = None
    for phase, moving in ((3, backward), (2, loss), (4, step)):
        if phase == 2 and not is_last:
            continue
        found = _in_phase(state, moving, phase, runtime)
        best = found if best is None else _worse(best, found)
    assert best is not None
    return best


def _in_phase(state: StateBytes, moving: Sequence[Floats], phase: int, runtime: Runtime) -> StageMemory:
    allocated = (state.parameters + state.gradients) + state.optimizer
    dynamic = moving[0]
    for part in moving[1:]:
        dynamic = dynamic + part
    for part in moving:
        allocated = allocated + part
    fragmentation = dynamic * runtime.fragmentation
    reserved = allocated + fragmentation
    context = np.full_like(allocated, runtime.context_bytes)
    return StageMemory(
        parts=(state.parameters, state.gradients, state.optimizer, *moving, fragmentation, context),
        phase=np.full_like(allocated, float(phase)), allocated=allocated, reserved=reserved,
        device=reserved + context,
    )


def _worse(a: StageMemory, b: StageMemory) -> StageMemory:
    """Row by row the one with more device bytes; the first where they are equal."""
    second = b.device > a.device
    return StageMemory(
        parts=tuple(np.where(second, y, x) for x, y in zip(a.parts, b.parts, strict=True)),
        phase=np.where(second, b.phase, a.phase), allocated=np.where(second, b.allocated, a.allocated),
        reserved=np.where(second, b.reserved, a.reserved), device=np.where(second, b.device, a.device),
    )


def worst_stage(memories: Sequence[StageMemory], runs: Sequence[Run]) -> tuple[StageMemory, Floats]:
    """(the worst stage's memory, its number) row by row; the first of equals."""
    worst, stage = memories[0], np.full_like(memories[0].device, float(runs[0].first))
    for memory, run in zip(memories[1:], runs[1:], strict=True):
        stage = np.where(memory.device > worst.device, float(run.first), stage)
        worst = _worse(worst, memory)
    return worst, stage


def layers_to_recompute(
    state: StateBytes, acts: Activations, flight: Floats, layers: int, usable: Floats, runtime: Runtime
) -> Floats:
    """The least number of a stage's layers whose recomputation makes its high end fit; all of them if none does.

    Memory falls linearly with the number; the high end carries fragmentation twice (see Estimate).
    """
    still = acts.remade + acts.temporaries + state.gathered + state.buckets
    room = usable - runtime.context_bytes - ((state.parameters + state.gradients) + state.optimizer)
    dynamic = room / (1.0 + 2.0 * runtime.fragmentation)
    over = (still + flight * acts.kept) - dynamic
    each = flight * (acts.kept - acts.least) / max(layers, 1)
    needed = np.ceil(over / np.maximum(each, 1.0))
    return np.minimum(np.maximum(needed, 1.0), float(max(layers, 1)))
