"""The forward half of a Program: each operator's inputs are resharded to what its rule needs."""

from __future__ import annotations

from collections.abc import Mapping

from distplan.costmodel.graph import HIDDEN, Segment, Weight
from distplan.costmodel.layout import CP, Layout, placed
from distplan.costmodel.program import RINGS, Node, Structure, Value, marked, residual_placement
from distplan.costmodel.rules import infer, returned_to_tokens
from distplan.costmodel.spmd import reshard


class Tape:
    """Nodes and values while a program is being derived."""

    def __init__(self, structure: Structure, weights: Mapping[str, Weight]) -> None:
        self.structure = structure
        self.weights = weights
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}
        self.root: dict[str, str] = {}
        self.current: dict[str, str] = {}
        self.made_by: dict[str, Node] = {}

    def emit(self, node: Node) -> None:
        self.nodes.append(node)
        for output in node.outputs:
            self.made_by.setdefault(output, node)

    def define(self, name: str, layout: Layout, dtype: str, chunks: float = 1.0) -> str:
        self.values[name] = Value(name=name, layout=layout, dtype=dtype, chunks=chunks)
        self.root.setdefault(name, name)
        self.current.setdefault(name, name)
        return name

    def move(self, name: str, target: Layout, phase: str, ring: bool = False, behind: tuple[str, ...] = ()) -> str:
        """A copy of `name` in `target`; the transitions are emitted once and shared by all who ask."""
        for step in reshard(self.values[name].layout, target):
            copy = f"{name}@{step.result}"
            if copy not in self.values:
                self.root[copy] = self.root[name]
                self.define(copy, step.result, self.values[name].dtype, self.values[name].chunks)
                kind = step.kind
                if ring and step.kind in ("all_gather", "reduce_scatter") and set(step.axes) <= set(CP):
                    kind = "ring_exchange"
                self.emit(
                    Node(
                        kind=kind,
                        name=copy,
                        phase=phase,
                        inputs=(name,),
                        outputs=(copy,),
                        axes=step.axes,
                        dim=step.dim,
                        to_dim=step.to_dim,
                        behind=behind,
                    )
                )
            name = copy
        return name


def forward(segment: Segment, tape: Tape) -> None:
    structure = tape.structure
    residual = placed(HIDDEN, residual_placement(structure.sp))
    said = dict(structure.placements)
    for op in segment.operators:
        names = tuple(tape.current[value] for value in op.inputs)
        operands = tuple(tape.values[n].layout.renamed(d) for n, d in zip(names, op.operands, strict=True))
        is_weight = tuple(value in tape.weights for value in op.inputs)
        inference = infer(op, operands, is_weight, structure)
        ring = structure.cp_kind in RINGS and op.kind == "attention"
        behind = (op.name,) if op.kind in ("attention", "einsum") else ()
        used = tuple(
            tape.move(n, need.renamed(tape.values[n].layout.dims), "forward", ring, behind)
            for n, need in zip(names, inference.inputs, strict=True)
        )
        outputs = [tape.define(op.output, inference.output, op.dtype, op.chunks)]
        if op.kind == "dropout":
            outputs.append(tape.define(f"{op.output}.mask", inference.output, "bool"))
        if op.kind == "attention":
            dims = tuple(d for d in op.result if d != "v_head_dim")
            axes = {d: inference.output.axes_of(d) for d in dims}
            outputs.append(tape.define(f"{op.output}.lse", placed(dims, axes), "fp32"))
        tape.emit(
            Node(
                kind=op.kind,
                name=op.name,
                phase="forward",
                inputs=used,
                outputs=tuple(outputs),
                operands=op.operands,
                result=op.result,
                letters=inference.letters,
                function=op.function,
                fused=op.fused,
                tag=op.tag,
                window=op.window,
                block=op.block,
            )
        )
        target = residual if op.output in segment.residual else None
        if op.kind == "scan":
            target = returned_to_tokens(inference.output)
        if op.kind in ("attention", "norm"):
            # heads go back to tokens (Ulysses), a norm over all heads to shards
            target = operands[0].whole().renamed(op.result)
        if op.output in said:
            target = marked(target or inference.output.whole(), said[op.output])
        if target is not None:
            tape.current[op.output] = tape.move(op.output, target, "forward", behind=(op.name,))
