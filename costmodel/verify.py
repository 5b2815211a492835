"""Proof that a strategy computes what one device computes: the Programs that are priced, executed.

Programs have no sizes, so the real model's are run on small ones: degrees above 1 become 2 (4 where
a lone axis of a group would otherwise be the only one), dims their least multiples, layers one of
each kind and at least one per pipeline chunk, two micro-batches. Dropout keeps everything; gradients
are not clipped. Every collective is then left out once, to show that the result needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from distplan.costmodel.interpret import World, settled
from distplan.costmodel.interpret_kernels import InterpretError
from distplan.costmodel.interpret_mesh import Array, Ints, spread
from distplan.costmodel.interpret_reference import Alone
from distplan.costmodel.interpret_small import Small, shrink
from distplan.costmodel.interpret_step import (
    Outcome,
    Part,
    Sharding,
    is_sharded,
    sharded_step,
    single_step,
    store,
    trained_of,
)
from distplan.costmodel.layout import Axes, Layout, placed
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.operators import TOKENS
from distplan.costmodel.program import COLLECTIVES, SegmentProgram, residual_placement
from distplan.costmodel.rules import SLOT_AXES
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.state_path import state_path
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.tables import engine
from distplan.costmodel.workload import default
from distplan.hardware.cluster import Cluster, load_cluster

TOLERANCE = 1e-9
"""of the largest element: float64 sums in another order differ by some 1e-15 times their length"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One tensor, all ranks and micro-batches: error is max |difference| / max |single-device value|."""

    what: str
    """loss | output | input gradient | gradient | weight"""
    name: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`needed`: the result differs without it; None where its axes have degree 1 here (nothing is sent)."""

    segment: str
    phase: str
    """forward | recompute | backward | gradient | parameter | pipeline"""
    name: str
    kind: str
    axes: Axes
    needed: bool | None
    repeated: bool = False
    """in a recomputation that repeats the whole layer, where its last results are read by nobody"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    degrees: Mapping[str, int]
    """small degrees of the mesh axes, pp included"""
    ranks: int
    sizes: Mapping[str, int]
    layers: int
    tensors: tuple[Compared, ...]
    collectives: tuple[Collective, ...]

    @property
    def equal(self) -> bool:
        return all(tensor.error <= TOLERANCE for tensor in self.tensors)

    @property
    def needless(self) -> tuple[Collective, ...]:
        """Collectives that change nothing, save those that a runtime without early stop repeats in vain."""
        return tuple(each for each in self.collectives if each.needed is False and not each.repeated)

    @property
    def passed(self) -> bool:
        return self.equal and not self.needless


def verify(
    model: Model, workload: Workload, runtime: Runtime, strategy: Strategy, *, seed: int = 0,
    cluster: Cluster | None = None, removals: bool = True,
) -> Verification:  # fmt: skip
    """Execute `strategy` on at most 64 simulated ranks and compare it with one device.

    `cluster` decides nothing but which cached engine gives the Programs. Raises DistplanError for a
    model or strategy that has no Program, InterpretError for a Program that cannot be executed.
    """
    eng = engine(model, workload, cluster or load_cluster(default("hardware")), runtime)
    if any("images" in segment.inputs for segment in eng.segments):
        raise InterpretError(f"{model.name} has layers that attend to images, which cannot be executed yet")
    small = shrink(eng, strategy, seed)
    world = small.world
    alone = Alone(causal=world.causal, window=world.window, scale=world.scale, sizes=world.sizes)
    right = single_step(small.parts, small.start, alone)
    tensors = compare(small, right, sharded_step(small.parts, small.start, small.world, small.how))
    found = _collectives(small)
    if removals:
        one = replace(small, start=replace(small.start, batches=small.start.batches[:1]))
        right = single_step(one.parts, one.start, alone)
        found = [replace(each, needed=_needed(one, right, each)) for each in found]
    degrees = dict(small.world.mesh.axes) | dict(small.world.mesh.expert) | {"pp": small.pp}
    return Verification(
        degrees=degrees,
        ranks=small.world.mesh.ranks * small.pp,
        sizes=dict(small.world.sizes),
        layers=len(small.parts) - 2,
        tensors=tensors,
        collectives=tuple(found),
    )


FLOOR = 1e-6
"""Elements below it count as it: some gradients are 0 but for rounding (a key's bias without rotary
positions shifts all scores of a query alike), and everything else here is larger by far."""


def error(got: Array, right: Array) -> float:
    """max |got − right| / max |right|; infinite where something is not a number."""
    largest = max(float(np.abs(right).max(initial=0.0)), FLOOR)
    difference = float(np.abs(got - right).max(initial=0.0)) / largest
    return difference if np.isfinite(difference) else float("inf")


Pair = tuple[str, str, Array, Array]
"""(what, name, what the ranks have, what they should have)"""


def compare(small: Small, right: Outcome, done: Outcome) -> tuple[Compared, ...]:
    """Every rank's block of every operator's output, gradient and weight against the single device's."""
    worst: dict[tuple[str, str], float] = {}
    for what, name, got, expected in _pairs(small, right, done):
        worst[what, name] = max(worst.get((what, name), 0.0), error(got, expected))
    return tuple(Compared(what=what, name=name, error=value) for (what, name), value in worst.items())


def _pairs(small: Small, right: Outcome, done: Outcome) -> Iterator[Pair]:
    mesh = small.world.mesh
    for (number, name), values in done.values.items():
        part = next(p for p in small.parts if p.name == name)
        yield from _outputs(small, part, values, right.values[number, name])
        if part.program.input_gradient:
            layout = part.program.values[part.program.input_gradient].layout
            got = done.input_gradients[number, name]
            yield "input gradient", f"{name}: x", got, spread(right.input_gradients[number, name], layout, mesh)
    for part in small.parts:
        for key, weight in trained_of(part).items():
            title = f"{part.name}: {weight.name}"
            stored = store(part, weight, right.gradients[key], small.world, small.how)
            yield "gradient", title, done.gradients[key], stored
            used = state_path(part.program, weight, is_sharded(weight, small.how)).used
            yield "weight", title, done.weights[key], spread(right.weights[key], used, mesh)


def _outputs(small: Small, part: Part, values: Mapping[str, Array], right: Mapping[str, Array]) -> Iterator[Pair]:
    mesh = small.world.mesh
    for node in part.program.nodes:
        if node.phase != "forward" or node.kind in COLLECTIVES:
            continue
        name = node.outputs[0]
        layout: Layout = part.program.values[name].layout
        got = settled(values[name], layout, mesh, "max" if node.function == "max" else "sum")
        what = "loss" if node.kind == "cross_entropy" else "output"
        whole = right[name]
        if "capacity" in layout.dims:
            whole = whole.take(slot_order(small.world), axis=layout.dims.index("capacity"))
        yield what, f"{part.name}: {name}", got, spread(whole, layout, mesh)


def slot_order(world: World) -> Ints:
    """Token of every slot: slots lie where their tokens are, rank by rank in the order of the expert axes."""
    ids = np.arange(world.sizes["capacity"]).reshape(world.sizes["batch"], world.sizes["seq"])
    held = spread(ids, placed(TOKENS, residual_placement(True)), world.mesh).reshape(world.mesh.ranks, -1)
    return held[np.argsort(world.mesh.position(SLOT_AXES["capacity"]))].reshape(-1).astype(np.int64)


def _collectives(small: Small) -> list[Collective]:
    """Of the nodes, of the state, and between stages; `slice` sends nothing and is none."""
    found: list[Collective] = []
    for program in dict.fromkeys(id(p.program) for p in small.parts):
        one = next(p.program for p in small.parts if id(p.program) == program)
        found += [
            Collective(
                segment=one.segment.name, phase=n.phase, name=n.name, kind=n.kind, axes=n.axes, needed=None,
                repeated=n.phase == "recompute" and not one.structure.early_stop,
            )
            for n in one.nodes if n.kind in COLLECTIVES and n.kind != "slice"
        ]  # fmt: skip
        found += _state_collectives(one, small.how)
    if small.pp > 1:
        found.append(Collective(segment="", phase="pipeline", name="boundary", kind="send", axes=("pp",), needed=None))
    if small.start.tied:
        found.append(
            Collective(segment="", phase="gradient", name="tied embedding", kind="tied", axes=("pp",), needed=None)
        )
    return found


def _state_collectives(program: SegmentProgram, how: Sharding) -> list[Collective]:
    groups: dict[tuple[str, str, Axes], int] = {}
    for weight in program.segment.weights:
        path = state_path(program, weight, is_sharded(weight, how))
        for role, steps in (("gradient", path.reduce), ("parameter", path.gather)):
            for step in steps:
                if step.kind != "slice":
                    group = (role, step.kind, step.axes)
                    groups[group] = groups.get(group, 0) + 1
    return [
        Collective(segment=program.segment.name, phase=role, name=f"{count} weights", kind=kind, axes=axes, needed=None)
        for (role, kind, axes), count in groups.items()
    ]


def _needed(small: Small, right: Outcome, each: Collective) -> bool | None:
    """Does any compared tensor differ where this collective is left out?"""
    if each.segment and small.world.mesh.degree(each.axes) == 1:
        return None
    world, how = small.world, small.how
    if each.phase in ("forward", "recompute", "backward"):
        world = replace(world, cut=(each.segment, each.phase, each.name))
    elif each.segment:
        how = replace(how, cut_state=(each.segment, each.phase, each.kind, each.axes))
    else:
        how = replace(how, cut_state=("", each.kind, "", ()))
    try:
        with np.errstate(all="ignore"):
            done = sharded_step(small.parts, small.start, world, how)
    except InterpretError:
        return True
    return any(error(got, expected) > TOLERANCE for _, _, got, expected in _pairs(small, right, done))
