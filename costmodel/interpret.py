"""Executes the nodes of a SegmentProgram, the very ones that are priced, on simulated ranks.

Forward nodes see weights and the segment's inputs. Backward and recompute nodes see weights, integer
inputs (the data loader has them), the gradient of the output, and what the Program says is saved: a
value that was not kept and is read again is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distplan.costmodel.interpret_gradients import GRADIENTS, forward, gradient
from distplan.costmodel.interpret_kernels import Call, InterpretError
from distplan.costmodel.interpret_mesh import Array, Mesh, all_reduce, starts, transit
from distplan.costmodel.layout import Axes, Dims, Layout
from distplan.costmodel.program import COLLECTIVES, Node, SegmentProgram
from distplan.costmodel.spmd import Transition

Values = dict[str, Array]
Cut = tuple[str, str, str]
"""(segment, phase, node): a collective that is left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where and how small everything is. `sizes`: true size of each dim; `scale`: of the loss."""

    mesh: Mesh
    sizes: Mapping[str, int]
    causal: bool
    window: int
    scale: float
    cut: Cut | None = None

    def local(self, layout: Layout) -> tuple[int, ...]:
        """Shape of a block; a shard that does not divide is padded."""
        return tuple(
            -(-self.sizes[dim] // self.mesh.degree(axes)) for dim, axes in zip(layout.dims, layout.shards, strict=True)
        )


def run_forward(program: SegmentProgram, inputs: Mapping[str, Array], world: World) -> Values:
    """All values of forward by name; `inputs` are weights and segment inputs, placed."""
    values = dict(inputs)
    _run(program, [n for n in program.nodes if n.phase == "forward"], values, world)
    return values


def saved_values(program: SegmentProgram, values: Mapping[str, Array]) -> Values:
    """What is left of forward when backward begins."""
    kept = set(program.saved) | {w.name for w in program.segment.weights}
    kept |= {name for name in program.segment.inputs if program.values[name].dtype == "int64"}
    missing = kept - set(values)
    if missing:
        raise InterpretError(f"{program.segment.name}: saved but never made: {', '.join(sorted(missing))}")
    return {name: value for name, value in values.items() if name in kept}


def run_backward(program: SegmentProgram, saved: Mapping[str, Array], dy: Array | None, world: World) -> Values:
    """All values of recompute and backward; `dy` is the gradient of the output (None for the loss)."""
    values = dict(saved)
    if dy is not None:
        values[output_gradient(program)] = dy
    _run(program, [n for n in program.nodes if n.phase != "forward"], values, world)
    return values


def output_gradient(program: SegmentProgram) -> str:
    return f"{program.segment.output}.grad_in"


def _run(program: SegmentProgram, nodes: Iterable[Node], values: Values, world: World) -> None:
    maxima = {n.outputs[0] for n in program.nodes if n.kind == "reduce" and n.function == "max"}
    for node in nodes:
        missing = [name for name in node.inputs if name not in values]
        if missing:
            raise InterpretError(f"{node.name} ({node.phase}) reads {missing[0]}, which is not there")
        if node.kind in COLLECTIVES:
            made: tuple[Array, ...] = (_collective(program, node, values, maxima, world),)
        else:
            made = _operator(program, node, values, world)
        for name, array in zip(node.outputs, made, strict=True):
            expected = world.local(program.values[name].layout)
            if array.shape[1:] != expected:
                raise InterpretError(f"{node.name} makes {name} of {array.shape[1:]}, its layout says {expected}")
            values[name] = array


def step_of(node: Node, source: Layout, target: Layout) -> Transition:
    """The transition that a collective node stands for; a ring moves what a gather or a reduction would."""
    kind = node.kind
    if kind == "ring_exchange":
        kind = "reduce_scatter" if set(node.axes) & set(source.partial) else "all_gather"
    return Transition(kind, node.axes, node.dim, node.to_dim, target)


def _collective(program: SegmentProgram, node: Node, values: Values, maxima: set[str], world: World) -> Array:
    source, target = program.values[node.inputs[0]].layout, program.values[node.outputs[0]].layout
    kind = "max" if node.inputs[0].split("@")[0] in maxima else "sum"
    cut = world.cut == (program.segment.name, node.phase, node.name)
    return transit(values[node.inputs[0]], source, step_of(node, source, target), world.mesh, kind, cut)


def _operator(program: SegmentProgram, node: Node, values: Values, world: World) -> tuple[Array, ...]:
    layouts = [program.values[name].layout for name in node.inputs]
    dims = _read_as(node, layouts)
    outputs = [program.values[name].layout for name in node.outputs]
    shapes = tuple(world.local(layout) for layout in outputs)
    inputs = [values[name] for name in node.inputs]
    call = Call(
        kind=node.kind, function=node.function, dims=dims, result=node.result,
        starts=tuple(
            starts(layout.renamed(names), world.mesh, array.shape[1:])
            for layout, names, array in zip(layouts, dims, inputs, strict=True)
        ),
        causal=world.causal, window=min(node.window, world.window), block=min(node.block, world.window), shapes=shapes,
        out_dims=tuple(layout.dims for layout in outputs),
        out_starts=tuple(starts(layout, world.mesh, shape) for layout, shape in zip(outputs, shapes, strict=True)),
        scale=world.scale,
    )  # fmt: skip
    return gradient(call, inputs) if node.kind in GRADIENTS else forward(call, inputs)


def _read_as(node: Node, layouts: list[Layout]) -> tuple[Dims, ...]:
    """Names of the dims under which a node reads its inputs."""
    if node.kind == "attention_grad":
        return (node.result, *node.operands[:3], *(layout.dims for layout in layouts[4:]))
    if node.kind in GRADIENTS:
        return (node.operands[0], *(layout.dims for layout in layouts[1:]))
    return node.operands


def settled(array: Array, layout: Layout, mesh: Mesh, kind: str = "sum") -> Array:
    """The array with what is Partial summed (or its maximum taken)."""
    axes: Axes = layout.partial
    return all_reduce(array, mesh, axes, kind) if axes else array
