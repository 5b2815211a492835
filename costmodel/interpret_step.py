"""One training step: stages, micro-batches, gradients to where ZeRO stores them, the optimizer.

The same step is taken on one device (`single_step`) and on simulated ranks (`sharded_step`); both
start from the same weights, moments and tokens. Activations and their gradients go from one chunk of
layers to the next by send/recv, which needs both ends to have one placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distplan.costmodel.graph import Weight
from distplan.costmodel.interpret import Values, World, output_gradient, run_backward, run_forward, saved_values
from distplan.costmodel.interpret_kernels import InterpretError
from distplan.costmodel.interpret_mesh import Array, spread, transit
from distplan.costmodel.interpret_reference import Alone, reference_backward, reference_forward
from distplan.costmodel.layout import Layout
from distplan.costmodel.program import SegmentProgram, weight_layout
from distplan.costmodel.spmd import Transition
from distplan.costmodel.state_path import StatePath, Steps, state_path

Key = tuple[str, str]
"""(part of the model, weight): ("layer 1", "layer.mlp.up.weight")"""

LEARNING_RATE, DECAY, BETAS, EPSILON, MOMENTUM, STEP = 0.1, 0.1, (0.9, 0.95), 1e-8, 0.9, 4
"""Any values do; the step is not the first, so that moments and their correction take part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One segment of the small model at its place: embedding, layer 0, layer 1, …, head."""

    name: str
    program: SegmentProgram
    chunk: int
    """pipeline chunk that holds it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What both executions begin with; arrays without ranks."""

    weights: Mapping[Key, Array]
    moments: Mapping[Key, tuple[Array, Array]]
    batches: Sequence[Mapping[str, Array]]
    """per micro-batch: tokens and labels"""
    optimizer: str
    tied: Mapping[Key, Key]
    """a copy -> what it is a copy of"""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """`values` and `inputs` by (micro-batch, part); `gradients` are summed over micro-batches."""

    values: dict[tuple[int, str], Values] = field(default_factory=dict)
    input_gradients: dict[tuple[int, str], Array] = field(default_factory=dict)
    gradients: dict[Key, Array] = field(default_factory=dict)
    weights: dict[Key, Array] = field(default_factory=dict)


def update(optimizer: str, weight: Array, grad: Array, moments: tuple[Array, Array], decay: bool) -> Array:
    """AdamW (arXiv 1711.05101, algorithm 2) or SGD with momentum; elementwise, so any shard will do."""
    rate = DECAY if decay else 0.0
    if optimizer == "sgd":
        return weight - LEARNING_RATE * (MOMENTUM * moments[0] + grad + rate * weight)
    first = BETAS[0] * moments[0] + (1.0 - BETAS[0]) * grad
    second = BETAS[1] * moments[1] + (1.0 - BETAS[1]) * grad * grad
    first, second = first / (1.0 - BETAS[0] ** STEP), second / (1.0 - BETAS[1] ** STEP)
    return weight - LEARNING_RATE * (first / (np.sqrt(second) + EPSILON) + rate * weight)


def weights_of(part: Part) -> dict[Key, Weight]:
    return {(part.name, weight.name): weight for weight in part.program.segment.weights}


def trained_of(part: Part) -> dict[Key, Weight]:
    """Weights that backward gives a gradient."""
    return {key: weight for key, weight in weights_of(part).items() if weight.name in part.program.gradients}


def single_step(parts: Sequence[Part], start: Start, alone: Alone) -> Outcome:
    """The step on one device, from the graph alone. A tied weight is one weight."""
    done = Outcome()
    for number, batch in enumerate(start.batches):
        x = np.zeros(0)
        for part in parts:
            segment = part.program.segment
            held = {weight: start.weights[(owner, weight)] for owner, weight in weights_of(part)}
            given = {name: x if name == "x" else batch[name] for name in segment.inputs}
            done.values[number, part.name] = reference_forward(segment, held | given, alone)
            x = done.values[number, part.name][segment.output]
        dy: Array | None = None
        for part in reversed(parts):
            grads = reference_backward(part.program.segment, done.values[number, part.name], dy, alone)
            dy = grads.get("x")
            if dy is not None:
                done.input_gradients[number, part.name] = dy
            for key in trained_of(part):
                to = start.tied.get(key, key)
                done.gradients[to] = done.gradients.get(to, np.zeros(())) + grads[key[1]]
    for part in parts:
        for key, weight in trained_of(part).items():
            owner = start.tied.get(key, key)
            grad, held_moments = done.gradients[owner], start.moments[owner]
            done.weights[key] = update(start.optimizer, start.weights[owner], grad, held_moments, weight.decay)
    for copy, owner in start.tied.items():
        done.gradients[copy] = done.gradients[owner]
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What of the strategy decides about state. `cut_state`: (segment, role, kind, axes), or ('', 'tied' | 'send')."""

    zero: int
    frozen_from: int
    """the ZeRO stage from which weights that are not trained are stored sharded"""
    reduce_each: bool
    """gradients are reduced every micro-batch, not only after the last"""
    replicate_each: bool = False
    """the sum over dp_replicate that follows is too"""
    cut_state: tuple[str, str, str, tuple[str, ...]] | None = None


def is_sharded(weight: Weight, how: Sharding) -> bool:
    """Whether a weight is stored sharded; state.py prices the same."""
    return how.zero >= (1 if weight.trained else how.frozen_from)


def _each(path: StatePath, how: Sharding) -> Steps:
    """The part of a gradient's way that it goes in every micro-batch."""
    return path.reduce if how.replicate_each else path.each if how.reduce_each else ()


def _travel(
    stack: Array, layout: Layout, steps: Sequence[Transition], part: Part, role: str, world: World, how: Sharding
) -> Array:
    for step in steps:
        cut = how.cut_state == (part.program.segment.name, role, step.kind, step.axes)
        stack = transit(stack, layout, step, world.mesh, cut=cut)
        layout = step.result
    return stack


class _Ranks:
    """The state of all ranks during one step."""

    def __init__(self, parts: Sequence[Part], start: Start, world: World, how: Sharding) -> None:
        self.parts, self.start, self.world, self.how = parts, start, world, how
        self.stored: dict[Key, Array] = {}
        self.used: dict[Key, Array] = {}
        self.sums: dict[Key, Array] = {}
        for part in parts:
            for key, weight in weights_of(part).items():
                self.used[key] = spread(start.weights[key], weight_layout(weight, part.program.structure), world.mesh)
                self.stored[key] = self.store(part, weight, start.weights[key])

    def store(self, part: Part, weight: Weight, whole: Array) -> Array:
        """A whole tensor as ZeRO stores it."""
        return store(part, weight, whole, self.world, self.how)

    def weights(self, part: Part) -> Values:
        """Weights where they are used: kept there, or (ZeRO 3, SHARD_GRAD_OP) gathered from their shards."""
        if self.how.zero < self.how.frozen_from:
            return {key[1]: self.used[key] for key in weights_of(part)}
        return {key[1]: self.gathered(part, weight, self.stored[key]) for key, weight in weights_of(part).items()}

    def gathered(self, part: Part, weight: Weight, stored: Array) -> Array:
        path = state_path(part.program, weight, is_sharded(weight, self.how))
        whole = _travel(stored, path.stored, path.gather, part, "parameter", self.world, self.how)
        size = self.world.local(path.used)
        return whole[(slice(None), *(slice(0, extent) for extent in size))]

    def add(self, part: Part, values: Values) -> None:
        """A micro-batch's weight gradients, reduced at once or only summed."""
        for key, weight in trained_of(part).items():
            grad = values[part.program.gradients[key[1]]]
            path = state_path(part.program, weight, is_sharded(weight, self.how))
            grad = _travel(grad, path.gradient, _each(path, self.how), part, "gradient", self.world, self.how)
            self.sums[key] = self.sums[key] + grad if key in self.sums else grad

    def reduced(self, part: Part, weight: Weight) -> Array:
        path = state_path(part.program, weight, is_sharded(weight, self.how))
        each = _each(path, self.how)
        layout = each[-1].result if each else path.gradient
        grad = self.sums[part.name, weight.name]
        return _travel(grad, layout, path.reduce[len(each) :], part, "gradient", self.world, self.how)


def store(part: Part, weight: Weight, whole: Array, world: World, how: Sharding) -> Array:
    """A whole tensor as the ranks store it under a ZeRO stage."""
    path = state_path(part.program, weight, is_sharded(weight, how))
    stack = spread(whole, path.used, world.mesh)
    for step in path.shard:
        stack = transit(stack, path.used, step, world.mesh)
    return stack


def sharded_step(parts: Sequence[Part], start: Start, world: World, how: Sharding) -> Outcome:
    """The step on ranks. Gradients are as stored, weights as gathered back to where they are used."""
    done, ranks = Outcome(), _Ranks(parts, start, world, how)
    for number, batch in enumerate(start.batches):
        _forward(done, ranks, number, batch)
        _backward(done, ranks, number)
    for part in parts:
        for key, weight in trained_of(part).items():
            done.gradients[key] = ranks.reduced(part, weight)
    for copy, owner in start.tied.items():
        _sum_tied(done, copy, owner, how)
    for part in parts:
        for key, weight in trained_of(part).items():
            first, second = (ranks.store(part, weight, m) for m in start.moments[key])
            fresh = update(start.optimizer, ranks.stored[key], done.gradients[key], (first, second), weight.decay)
            done.weights[key] = ranks.gathered(part, weight, fresh)
    return done


def _sum_tied(done: Outcome, copy: Key, owner: Key, how: Sharding) -> None:
    """The all-reduce between the stages that hold a copy (on one stage: a sum of two gradients)."""
    if how.cut_state != ("", "tied", "", ()):
        total = done.gradients[owner] + done.gradients[copy]
        done.gradients[owner] = done.gradients[copy] = total


def _sent(x: Array, source: Layout, target: Layout, here: Part, there: Part, how: Sharding) -> Array:
    """To the next part; between chunks a send/recv, rank by rank."""
    if source.shards != target.shards or source.partial or target.partial:
        raise InterpretError(f"{here.name} gives {source}, {there.name} reads {target}: nothing moves one to the other")
    if here.chunk != there.chunk and how.cut_state == ("", "send", "", ()):
        return np.zeros_like(x)
    return x


def _forward(done: Outcome, ranks: _Ranks, number: int, batch: Mapping[str, Array]) -> None:
    before: Part | None = None
    for part in ranks.parts:
        program = part.program
        given = ranks.weights(part)
        for name in program.segment.inputs:
            layout = program.values[name].layout
            if name != "x":
                given[name] = spread(batch[name], layout, ranks.world.mesh)
            elif before is not None:
                source = before.program.values[before.program.output].layout
                x = done.values[number, before.name][before.program.output]
                given[name] = _sent(x, source, layout, before, part, ranks.how)
        done.values[number, part.name] = run_forward(program, given, ranks.world)
        before = part


def _backward(done: Outcome, ranks: _Ranks, number: int) -> None:
    dy: Array | None = None
    after: Part | None = None
    for part in reversed(ranks.parts):
        program = part.program
        saved = saved_values(program, done.values[number, part.name]) | ranks.weights(part)
        if after is not None and dy is not None:
            source = after.program.values[after.program.input_gradient].layout
            target = program.values[output_gradient(program)].layout
            dy = _sent(dy, source, target, after, part, ranks.how)
        values = run_backward(program, saved, dy, ranks.world)
        ranks.add(part, values)
        dy = values[program.input_gradient] if program.input_gradient else None
        if dy is not None:
            done.input_gradients[number, part.name] = dy
        after = part
