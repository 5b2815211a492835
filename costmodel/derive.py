"""From a segment of the graph and a structure to its Program: forward, backward, and recomputation.

Recomputation is a transformation: what is no longer saved is made again by copies of the forward nodes.
"""

from __future__ import annotations

from dataclasses import replace

from distplan.costmodel.backward import Backward
from distplan.costmodel.graph import HIDDEN, Segment
from distplan.costmodel.layout import Dims, placed
from distplan.costmodel.program import COLLECTIVES, Node, SegmentProgram, Structure, residual_placement, weight_layout
from distplan.costmodel.tape import Tape, forward


def derive(segment: Segment, structure: Structure) -> SegmentProgram:
    """The Program of one segment. Pure: the same segment and structure give equal programs."""
    weights = {weight.name: weight for weight in segment.weights}
    tape = Tape(structure, weights)
    for name in segment.inputs:
        dense = name == "x" or name in segment.input_dims
        dims: Dims = segment.input_dims.get(name, HIDDEN if dense else HIDDEN[:2])
        tape.define(name, placed(dims, residual_placement(structure.sp and dense)), "compute" if dense else "int64")
    for weight in segment.weights:
        tape.define(weight.name, weight_layout(weight, structure), "parameter")
    forward(segment, tape)
    passes = list(tape.nodes)
    beside = tuple(derive(part, replace(structure, recompute=())) for part in segment.beside)
    if segment.frozen:
        return SegmentProgram(
            segment=segment,
            structure=structure,
            nodes=tuple(passes),
            values=dict(tape.values),
            saved=(),
            remade=(),
            gradients={},
            output=tape.current[segment.output],
            input_gradient="",
            beside=beside,
        )
    backward = Backward(tape)
    if segment.output != "loss" and not segment.output.startswith("head."):
        seed = tape.define(f"{segment.output}.grad_in", tape.values[tape.current[segment.output]].layout, "compute")
        backward.contribute(segment.output, seed)
    for node in reversed(passes):
        if node.kind not in COLLECTIVES:
            backward.node(node)
    for name in weights:
        gradient = backward.weight_gradient(name)
        if gradient is not None:
            backward.gradients[name] = gradient
    input_gradient = backward.gradient_of("x") if "x" in segment.inputs else None
    for value in [value for value in backward.saved if tape.root[value] == "images"]:
        del backward.saved[value]  # one tensor for all layers that read it
    saved, remade, again = _recompute(tape, passes, backward, structure)
    nodes = (*passes, *again, *tape.nodes[len(passes) :])
    return SegmentProgram(
        segment=segment,
        structure=structure,
        nodes=nodes,
        values=dict(tape.values),
        saved=saved,
        remade=remade,
        gradients=backward.gradients,
        output=tape.current[segment.output],
        input_gradient=input_gradient or "",
        beside=beside,
    )


def _recompute(
    tape: Tape, forward: list[Node], backward: Backward, structure: Structure
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Node, ...]]:
    """(what stays saved, what is made again, the copied nodes).

    Norms and activation functions discard their output too (Megatron Core, CheckpointWithoutOutput); core
    attention's output is the next operator's input and stays (Korthikanti et al. 2022, section 5).
    """
    saved = list(backward.saved)
    chosen = set(structure.recompute)
    whole = "layer" in chosen
    if not chosen:
        return tuple(saved), (), ()
    makers = {output: node for node in forward for output in node.outputs}
    held = _held(forward) if "operators" in chosen else ()
    leaves = {value for node in forward for value in node.inputs if node.tag != "core_attention"}

    def remakes(value: str) -> bool:
        maker = makers.get(value)
        if maker is None or value in held:
            return False
        if "operators" in chosen:
            return True
        if maker.kind in COLLECTIVES:
            return remakes(maker.inputs[0]) or whole
        if maker.tag == "core_attention" and not whole:
            return maker.tag in chosen and value not in leaves
        return whole or maker.tag in chosen

    def gathers(value: str) -> bool:
        """Gathered again rather than kept, as backward does (keep)."""
        maker = makers.get(value)
        return maker is not None and maker.kind in ("all_gather", "ring_exchange")

    remade = [value for value in saved if remakes(value)]
    kept = dict.fromkeys((*(value for value in saved if not remakes(value)), *held))
    if not remade:
        return tuple(saved), (), ()
    needed = set(remade)
    copies: list[Node] = []
    for node in reversed(forward):
        everything = whole and not structure.early_stop
        if not everything and not needed.intersection(node.outputs):
            continue
        copies.append(replace(node, phase="recompute"))
        for source in node.inputs:
            if remakes(source) or gathers(source):
                needed.add(source)
            elif tape.root[source] not in tape.weights and source not in kept:
                kept[source] = None
    return tuple(kept), tuple(remade), tuple(reversed(copies))


def _held(forward: list[Node]) -> tuple[str, ...]:
    """What torchtitan's per-operator policy keeps: outputs of attention, of reduce-scatters, and of the first, third,
    fifth … product that is no grouped one (torchtitan/distributed/activation_checkpoint.py, _apply_op_sac), whether
    or not backward reads them (torch/utils/checkpoint.py, _CachingTorchDispatchMode)."""
    products = [node for node in forward if node.kind == "einsum" and "experts" not in node.letters]
    found = [node for node in forward if node.kind in ("attention", "reduce_scatter")] + products[::2]
    return tuple(output for node in found for output in node.outputs)
