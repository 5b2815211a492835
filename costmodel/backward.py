"""The backward half of a Program, derived from the forward nodes in reverse.

A value's gradient has the value's own placement, and is reduced where it is first needed whole.
"""

from __future__ import annotations

from dataclasses import replace

from distplan.costmodel.layout import TP, Layout, placed
from distplan.costmodel.program import RINGS, Node
from distplan.costmodel.rules import SLOTS
from distplan.costmodel.spmd import Inference, SpmdError, infer_einsum
from distplan.costmodel.tape import Tape


def _kept_for_gradient(node: Node) -> tuple[str, ...]:
    """The forward values that a gradient kernel reads. Raises SpmdError for a kind that has none."""
    if node.kind in ("activation", "glu", "mul", "scale", "weighted_glu", "gated_norm", "conv", "route", "scan"):
        return node.inputs
    kept = {"norm": node.inputs[:2], "softmax": node.outputs, "dropout": node.outputs[1:], "rope": (), "cast": ()}
    kept["concat"] = ()
    if node.kind not in kept:
        raise SpmdError(f"operator kind '{node.kind}' ({node.name}) has no gradient")
    return kept[node.kind]


class Backward:
    """Derives gradients from the forward nodes of a tape, last to first."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.saved: dict[str, None] = {}
        self.contributions: dict[str, list[str]] = {}
        self.gradients: dict[str, str] = {}
        self.live: set[str] = set()

    def contribute(self, value: str, gradient: str) -> None:
        self.contributions.setdefault(self.tape.root[value], []).append(gradient)

    def keep(self, value: str) -> str:
        """The name under which backward reads a forward value, which is saved or gathered again."""
        tape = self.tape
        if value in tape.weights:
            return value
        maker = tape.made_by.get(value)
        if maker is not None and maker.kind in ("all_gather", "ring_exchange", "all_to_all"):
            on_tp = set(maker.axes) <= set(TP)
            if maker.kind != "all_to_all" and (not on_tp or tape.structure.sp_saves == "shard"):
                source = self.keep(maker.inputs[0])
                copy = f"{value}.again"
                if copy not in tape.values:
                    tape.root[copy] = tape.root[value]
                    tape.define(copy, tape.values[value].layout, tape.values[value].dtype)
                    behind = tuple(f"{name}.{'dgrad' if on_tp else 'grad'}" for name in maker.behind)
                    tape.emit(
                        replace(maker, name=copy, phase="backward", inputs=(source,), outputs=(copy,), behind=behind)
                    )
                return copy
        self.saved[value] = None
        return value

    def gradient_of(self, value: str, linear: bool = False, ring: bool = False) -> str | None:
        """The summed gradient of a value, in the value's own placement; None if nothing asks for it.

        A Partial that all contributions share may stay one where the value's producer is `linear`
        and the value is not sharded on that axis.
        """
        tape = self.tape
        parts = self.contributions.get(value)
        if not parts:
            return None
        target = tape.values[value].layout.whole()
        shared = set.intersection(*(set(tape.values[part].layout.partial) for part in parts))
        if linear and shared:
            stays = tuple(a for a in tape.values[parts[0]].layout.partial if a in shared - set(target.sharded))
            target = Layout(target.dims, target.shards, stays)
        suffix = ".grad" if ring else ".wgrad"
        behind = tuple(
            n.name for n in tape.nodes if n.name.endswith(suffix) and value in (tape.root.get(i) for i in n.inputs)
        )

        def settle(name: str) -> str:
            return tape.move(name, target, "backward", ring, behind)

        rule = tape.structure.merged_input_gradients
        merged = rule == "always" or (rule != "never" and self.gathered(value))
        merged = merged or (rule == "attention" and all("attention." in part for part in parts))
        same: dict[Layout, list[str]] = {}
        for part in parts:
            same.setdefault(tape.values[part].layout if merged else target, []).append(part if merged else settle(part))
        settled = [settle(self.total(f"{value}.grad", names, index)) for index, names in enumerate(same.values())]
        return self.total(f"{value}.grad", settled, len(same))

    def gathered(self, value: str) -> bool:
        """Whether one gather of the value feeds all who read it."""
        gathers = (n for n in self.tape.nodes if n.kind == "all_gather" and n.phase == "forward")
        return any(self.tape.root[n.inputs[0]] == value for n in gathers)

    def weight_gradient(self, weight: str) -> str | None:
        """The gradient of a weight as backward leaves it; the data axes are the optimizer stage's matter."""
        parts = self.contributions.get(weight)
        return self.total(f"{weight}.grad", parts, 0) if parts else None

    def total(self, name: str, parts: list[str], index: int) -> str:
        if len(parts) == 1:
            return parts[0]
        tape = self.tape
        first = tape.values[parts[0]]
        output = tape.define(f"{name}.sum{index}", first.layout, first.dtype)
        dims = first.layout.dims
        tape.emit(
            Node(
                kind="add",
                name=output,
                phase="backward",
                inputs=tuple(parts),
                outputs=(output,),
                operands=(dims,) * len(parts),
                result=dims,
                letters=dict(zip(dims, first.layout.shards, strict=True)),
            )
        )
        return output

    def einsum(self, node: Node, dy: str) -> None:
        tape = self.tape
        for index, (value, dims) in enumerate(zip(node.inputs, node.operands, strict=True)):
            other = 1 - index
            weight = tape.root[value] in tape.weights
            if weight and not tape.weights[tape.root[value]].trained:
                continue
            if tape.root[value] == "pixels":
                continue  # data
            reads = (self.keep(node.inputs[other]), dy) if other == 0 else (dy, self.keep(node.inputs[other]))
            names = (node.operands[other], node.result) if other == 0 else (node.result, node.operands[other])
            flags = tuple(tape.root[r] in tape.weights for r in reads)
            layouts = tuple(tape.values[r].layout.renamed(d) for r, d in zip(reads, names, strict=True))
            whole = tuple(d for d in ("kv_seq",) if d in (*node.operands[0], *node.operands[1]))
            inference = infer_einsum(layouts, flags, dims, whole)
            by_weight = tape.root[node.inputs[other]] in tape.weights
            suffix = "wgrad" if weight else "dgrad" if by_weight else f"dgrad{index}"
            used = self.place(reads, inference)
            output = tape.define(
                f"{node.name}.{suffix}.out",
                inference.output.renamed(tape.values[value].layout.dims),
                "gradient" if weight else "compute",
                1.0,
            )
            tape.emit(
                Node(
                    kind="einsum",
                    name=f"{node.name}.{suffix}",
                    phase="backward",
                    inputs=used,
                    outputs=(output,),
                    operands=names,
                    result=dims,
                    letters=inference.letters,
                    function=suffix,
                )
            )
            self.contribute(value, output)

    def place(self, reads: tuple[str, ...], inference: Inference) -> tuple[str, ...]:
        tape = self.tape
        return tuple(
            tape.move(r, need.renamed(tape.values[r].layout.dims), "backward")
            for r, need in zip(reads, inference.inputs, strict=True)
        )

    def pointwise(self, node: Node, dy: str, keeps: tuple[str, ...], targets: tuple[str, ...]) -> None:
        """A gradient kernel that reads dy and `keeps` and writes one gradient per target that is trained."""
        tape = self.tape
        targets = tuple(t for t in targets if tape.root[t] not in tape.weights or tape.weights[tape.root[t]].trained)
        if not targets:
            return
        kept = tuple(self.keep(value) for value in keeps)
        reads = (dy, *kept)
        letters = dict(node.letters)
        outputs: list[str] = []
        for target in targets:
            layout = tape.values[target].layout.whole()
            spent = [a for d, axes in letters.items() if d not in layout.dims for a in axes]
            spent += [a for a in tape.values[dy].layout.partial if a not in spent]
            layout = Layout(layout.dims, layout.shards, tuple(spent))
            dtype = "gradient" if tape.root[target] in tape.weights else "compute"
            dtype = tape.values[target].dtype if node.kind in ("cast", "softmax") else dtype
            chunks = tape.values[target].chunks
            outputs.append(tape.define(f"{node.name}.grad.{len(outputs)}", layout, dtype, chunks))
        kind = f"{node.kind}_grad"
        tape.emit(
            Node(
                kind=kind,
                name=f"{node.name}.grad",
                phase="backward",
                inputs=reads,
                outputs=tuple(outputs),
                operands=(node.result,),
                result=node.result,
                letters=letters,
                function=node.function,
                fused=node.fused and node.kind != "bias",
                tag=node.tag,
                window=node.window,
                block=node.block,
            )
        )
        for target, output in zip(targets, outputs, strict=True):
            self.contribute(target, output)

    def node(self, node: Node) -> None:
        tape = self.tape
        value = node.outputs[0]
        if node.kind == "cross_entropy":
            self.cross_entropy(node)
            return
        if not self.asks(node):
            return
        ring = tape.structure.cp_kind in RINGS and self.feeds_attention(value)
        dy = self.gradient_of(value, node.kind in ("einsum", "bias", "rope", "concat"), ring)
        if dy is None:
            return
        if node.kind == "einsum":
            self.einsum(node, dy)
        elif node.kind == "add":
            for target in node.inputs:
                self.contribute(target, dy)
        elif node.kind in ("bias", "position_embedding"):
            self.contribute(node.inputs[0], dy)
            self.pointwise(node, dy, (), node.inputs[1:])
        elif node.kind == "embedding":
            self.embedding(node, dy)
        elif node.kind == "attention":
            self.attention(node, dy)
        elif node.kind in SLOTS:
            self.pointwise(node, dy, node.inputs[-1:], node.inputs[:1])  # which slots: the routes are kept
        else:
            self.pointwise(node, dy, _kept_for_gradient(node), node.inputs)

    def asks(self, node: Node) -> bool:
        """Whether anything trained, or the segment before, lies behind the node."""
        tape = self.tape
        if not self.live:
            self.live = {"x"} | {weight.name for weight in tape.weights.values() if weight.trained}
            for each in tape.nodes:
                if self.live.intersection(each.inputs):
                    self.live.update(each.outputs)
        return bool(self.live.intersection(node.outputs))

    def feeds_attention(self, value: str) -> bool:
        root = self.tape.root
        return any(n.kind == "attention_grad" and value in (root[i] for i in n.inputs[2:4]) for n in self.tape.nodes)

    def attention(self, node: Node, dy: str) -> None:
        """dK and dV are sums over the queries, so they are Partial on what shards the queries' tokens."""
        tape = self.tape
        q, k, v = node.inputs[:3]
        kept = tuple(self.keep(x) for x in (q, k, v, *node.outputs, *node.inputs[3:]))
        dy = tape.move(dy, tape.values[node.outputs[0]].layout, "backward")
        spent = tuple(node.letters["seq"]) + tuple(node.letters["group"])
        outputs = []
        for name, source in (("dq", q), ("dk", k), ("dv", v)):
            layout = tape.values[source].layout
            layout = layout if name == "dq" else Layout(layout.dims, layout.shards, spent)
            outputs.append(tape.define(f"{node.name}.{name}", layout, "compute"))
        for sinks in node.inputs[3:]:
            layout = tape.values[sinks].layout
            spent_on_tokens = tuple(node.letters["batch"]) + tuple(node.letters["seq"])
            layout = Layout(layout.dims, layout.shards, spent_on_tokens)
            outputs.append(tape.define(f"{node.name}.dsinks", layout, "gradient"))
        tape.emit(
            Node(
                kind="attention_grad",
                name=f"{node.name}.grad",
                phase="backward",
                inputs=(dy, *kept),
                outputs=tuple(outputs),
                operands=node.operands,
                result=node.result,
                letters=node.letters,
                tag=node.tag,
                window=node.window,
                block=node.block,
            )
        )
        for source, output in zip(node.inputs, outputs, strict=True):
            self.contribute(source, output)

    def embedding(self, node: Node, dy: str) -> None:
        tape = self.tape
        tokens, table = node.inputs
        if not tape.weights[table].trained:
            return
        layout = tape.values[table].layout
        if tape.structure.embedding_gradient == "whole":
            layout = placed(layout.dims)
        layouts = (tape.values[tokens].layout, tape.values[dy].layout, layout)
        inference = infer_einsum(layouts, (False, False, True), node.operands[1])
        used = self.place((tokens, dy), Inference(inference.inputs[:2], inference.output, inference.letters))
        output = tape.define(f"{node.name}.wgrad.out", inference.output, "gradient")
        tape.emit(
            Node(
                kind="embedding_grad",
                name=f"{node.name}.wgrad",
                phase="backward",
                inputs=used,
                outputs=(output,),
                operands=(node.operands[0], node.result),
                result=node.operands[1],
                letters=inference.letters,
            )
        )
        self.contribute(table, output)

    def cross_entropy(self, node: Node) -> None:
        """softmax(logits) − onehot(label); where the loss is vocabulary-parallel, in the logits' storage."""
        tape = self.tape
        logits, top, total, _, labels = node.inputs
        kept = tuple(self.keep(v) for v in (logits, top, total, labels))
        source = tape.values[logits]
        output = tape.define(f"{node.name}.grad.0", source.layout, source.dtype, source.chunks)
        tape.emit(
            Node(
                kind="cross_entropy_grad",
                name=f"{node.name}.grad",
                phase="backward",
                inputs=kept,
                outputs=(output,),
                operands=(node.operands[0],),
                result=node.operands[0],
                letters=node.letters,
                in_place=node.function in ("vocab_parallel", "fused"),
            )
        )
        self.contribute(logits, output)
