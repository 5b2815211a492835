"""The Program: what one device does, derived from a graph and the structure of a strategy.

Forward: each operator's inputs are resharded to what its rule needs. Backward: derived from the
forward nodes in reverse; a value's gradient has the value's own placement, and is reduced where it
is first needed whole. Recompute is a transformation: what it no longer saves is made again by
copies of the forward nodes. No sizes are known here: program and prices meet in price.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from distplan.costmodel.graph import HIDDEN, TP_DIMS, Operator, Segment, Weight
from distplan.costmodel.layout import CP, DATA, TP, Axes, Dims, Layout, placed
from distplan.costmodel.spmd import Inference, SpmdError, infer_einsum, infer_elementwise, reshard

FSDP = ("dp_shard", *CP)
"""ZeRO stores a weight sharded on these, along its first dim"""
LINEAR = ("add",)
ELEMENTWISE = (
    "add", "bias", "activation", "glu", "mul", "rope", "dropout", "cast", "norm", "softmax", "scale", "concat",
    "gated_norm", "weighted_glu", "route",
)  # fmt: skip
REDUCTIONS = ("reduce", "pick")
SLOTS = ("dispatch", "dispatch_weights", "combine")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring_exchange", "slice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The part of strategy and runtime that decides which nodes exist."""

    sp: bool
    cp_kind: str
    recompute: tuple[str, ...]
    """tags of the operators that are recomputed; ('layer',) = all of a layer; () = none"""
    early_stop: bool
    sp_saves: str
    merged_input_gradients: str
    embedding_gradient: str = "sharded"
    """sharded as the table | whole on every tp rank"""
    placements: tuple[tuple[str, tuple[tuple[str, Axes], ...]], ...] = ()
    """tensor name -> ((dim or '' for replicated, axes), …), where the user says something else than the default"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    name: str
    layout: Layout
    dtype: str
    """compute | fp32 | bool | int64 | parameter | gradient"""
    chunks: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator or collective on one device."""

    kind: str
    name: str
    phase: str
    """forward | recompute | backward"""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operands: tuple[Dims, ...] = ()
    result: Dims = ()
    letters: Mapping[str, Axes] = field(default_factory=dict)
    function: str = ""
    axes: Axes = ()
    dim: str = ""
    to_dim: str = ""
    behind: tuple[str, ...] = ()
    """nodes that this collective can hide behind"""
    fused: bool = False
    in_place: bool = False
    """the first output takes the storage of the first input"""
    tag: str = ""
    window: int = 0
    block: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentProgram:
    segment: Segment
    structure: Structure
    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    saved: tuple[str, ...]
    """values kept from a micro-batch's forward to its backward"""
    remade: tuple[str, ...]
    """values that recomputation makes again: they live during one layer's backward"""
    gradients: Mapping[str, str]
    """weight -> value of its gradient as backward leaves it (Partial on the data axes)"""
    output: str
    """the value that the next segment reads, or the loss"""
    input_gradient: str
    """the value that the segment before gets back ('' where nothing comes before)"""


def residual_placement(sp: bool) -> dict[str, Axes]:
    """The residual stream: batch on the data axes, tokens on cp, and on tp too under SP."""
    return {"batch": DATA, "seq": (*CP, *TP) if sp else CP}


def weight_layout(weight: Weight, structure: Structure) -> Layout:
    """Where a weight is used: its dims in TP_DIMS on tp, or what the user says."""
    return marked(placed(weight.dims, TP_DIMS), dict(structure.placements).get(weight.name, ()))


def marked(layout: Layout, marks: Iterable[tuple[str, Axes]]) -> Layout:
    """The layout with the axes that the user placed where he said ('' = replicated); the others stay."""
    for dim, axes in marks:
        shards = [tuple(axis for axis in held if axis not in axes) for held in layout.shards]
        if dim:
            at = layout.dims.index(dim)
            shards[at] = (*shards[at], *axes)
        layout = Layout(layout.dims, tuple(shards), layout.partial)
    return layout


def stored_layout(layout: Layout) -> Layout:
    """Where ZeRO keeps it: the first dim sharded on dp_shard×cp as well, an expert's on edp."""
    axes = ("edp",) if "experts" in layout.dims else FSDP
    return Layout(layout.dims, ((*layout.shards[0], *axes), *layout.shards[1:]))


class _Tape:
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
                    Node(kind=kind, name=copy, phase=phase, inputs=(name,), outputs=(copy,), axes=step.axes,
                         dim=step.dim, to_dim=step.to_dim, behind=behind)
                )
            name = copy
        return name


def infer(op: Operator, operands: tuple[Layout, ...], is_weight: tuple[bool, ...], structure: Structure) -> Inference:
    """The rule of `op.kind`. Raises SpmdError for a kind that has none."""
    if op.kind in ("einsum", "embedding"):
        return infer_einsum(operands, is_weight, op.result, op.whole)
    if op.kind == "position_embedding":
        inner = infer_elementwise(operands[:1], op.result, False)
        table = Layout(operands[1].dims, ((),) * len(operands[1].dims))
        return Inference((*inner.inputs, table), inner.output, inner.letters)
    if op.kind in ELEMENTWISE:
        return infer_elementwise(operands, op.result, op.kind in LINEAR, op.whole)
    if op.kind in REDUCTIONS:
        return infer_einsum(tuple(o.whole() for o in operands), is_weight, op.result, op.whole)
    if op.kind == "cross_entropy":
        inner = infer_einsum(tuple(o.whole() for o in operands), is_weight, op.result, op.whole)
        return Inference(inner.inputs, inner.output.whole(), inner.letters)
    if op.kind == "attention":
        return _infer_attention(op, operands, is_weight, structure)
    if op.kind in ("scan", "conv"):
        return _infer_scan(op, operands, is_weight)
    if op.kind in SLOTS:
        return _infer_slots(op, operands)
    raise SpmdError(f"operator kind '{op.kind}' ({op.name}) has no SPMD rule")


SLOT_AXES = {"capacity": ("edp", "etp", "ep")}
"""slots lie where their tokens are: the dense axes are the expert axes, seen otherwise"""


def _infer_slots(op: Operator, operands: tuple[Layout, ...]) -> Inference:
    """Tokens on every dense axis to slots on every expert axis and back, a local permutation."""
    tokens = residual_placement(True)
    inputs = tuple(placed(o.dims, SLOT_AXES if "capacity" in o.dims else tokens) for o in operands)
    return Inference(inputs, placed(op.result, SLOT_AXES if "capacity" in op.result else tokens), {})


def _infer_scan(op: Operator, operands: tuple[Layout, ...], is_weight: tuple[bool, ...]) -> Inference:
    """A scan, and the convolution before it, run over all tokens: cp turns from tokens to heads."""
    turned = [
        o if weight or not set(CP) & set(o.axes_of("seq")) else _turned(o.whole(), "seq", {"ssm_groups": CP})
        for o, weight in zip(operands, is_weight, strict=True)
    ]
    inference = infer_einsum(turned, is_weight, op.result)
    return Inference(inference.inputs, inference.output.whole(), inference.letters)


def _returned(layout: Layout) -> Layout:
    """A scan's output with cp back on its tokens."""
    pairs = zip(layout.dims, layout.shards, strict=True)
    return Layout(layout.dims, tuple(CP if d == "seq" else tuple(a for a in axes if a not in CP) for d, axes in pairs))


def _infer_attention(
    op: Operator, operands: tuple[Layout, ...], is_weight: tuple[bool, ...], structure: Structure
) -> Inference:
    """Flash attention: kv_seq and head_dim whole; Ulysses turns cp from tokens to heads."""
    q, k, v = (o.whole() for o in operands[:3])
    if structure.cp_kind == "ulysses":
        q = _turned(q, "seq", {"kv_heads": CP[:1], "group": CP[1:]})
        k, v = (_turned(o, "kv_seq", {"kv_heads": CP[:1]}) for o in (k, v))
    return infer_einsum((q, k, v, *operands[3:]), is_weight, op.result, ("kv_seq", "head_dim", "v_head_dim"))


def _turned(layout: Layout, seq: str, onto: Mapping[str, Axes]) -> Layout:
    shards = []
    for dim, axes in zip(layout.dims, layout.shards, strict=True):
        kept = tuple(axis for axis in axes if axis not in CP) if dim == seq else axes
        shards.append((*kept, *onto.get(dim, ())))
    return Layout(layout.dims, tuple(shards))


def _forward(segment: Segment, tape: _Tape) -> None:
    structure = tape.structure
    residual = placed(HIDDEN, residual_placement(structure.sp))
    said = dict(structure.placements)
    for op in segment.operators:
        names = tuple(tape.current[value] for value in op.inputs)
        operands = tuple(tape.values[n].layout.renamed(d) for n, d in zip(names, op.operands, strict=True))
        is_weight = tuple(value in tape.weights for value in op.inputs)
        inference = infer(op, operands, is_weight, structure)
        ring = structure.cp_kind == "ring" and op.kind == "attention"
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
            Node(kind=op.kind, name=op.name, phase="forward", inputs=used, outputs=tuple(outputs),
                 operands=op.operands, result=op.result, letters=inference.letters, function=op.function,
                 fused=op.fused, tag=op.tag, window=op.window, block=op.block)
        )
        target = residual if op.output in segment.residual else None
        if op.kind == "scan":
            target = _returned(inference.output)
        if op.kind in ("attention", "norm"):
            # heads go back to tokens (Ulysses), a norm over all heads to shards
            target = operands[0].whole().renamed(op.result)
        if op.output in said:
            target = marked(target or inference.output.whole(), said[op.output])
        if target is not None:
            tape.current[op.output] = tape.move(op.output, target, "forward", behind=(op.name,))


def _kept_for_gradient(node: Node) -> tuple[str, ...]:
    """The forward values that a gradient kernel reads. Raises SpmdError for a kind that has none."""
    if node.kind in ("activation", "glu", "mul", "scale", "weighted_glu", "gated_norm", "conv", "route", "scan"):
        return node.inputs
    kept = {"norm": node.inputs[:2], "softmax": node.outputs, "dropout": node.outputs[1:], "rope": (), "cast": ()}
    kept["concat"] = ()
    if node.kind not in kept:
        raise SpmdError(f"operator kind '{node.kind}' ({node.name}) has no gradient")
    return kept[node.kind]


class _Backward:
    """Derives gradients from the forward nodes of a tape, last to first."""

    def __init__(self, tape: _Tape) -> None:
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
        merged = rule == "always" or (rule == "gathered" and self.gathered(value))
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
            Node(kind="add", name=output, phase="backward", inputs=tuple(parts), outputs=(output,),
                 operands=(dims,) * len(parts), result=dims, letters=dict(zip(dims, first.layout.shards, strict=True)))
        )
        return output

    def einsum(self, node: Node, dy: str) -> None:
        tape = self.tape
        for index, (value, dims) in enumerate(zip(node.inputs, node.operands, strict=True)):
            other = 1 - index
            weight = tape.root[value] in tape.weights
            if weight and not tape.weights[tape.root[value]].trained:
                continue
            reads = (self.keep(node.inputs[other]), dy) if other == 0 else (dy, self.keep(node.inputs[other]))
            names = (node.operands[other], node.result) if other == 0 else (node.result, node.operands[other])
            flags = tuple(tape.root[r] in tape.weights for r in reads)
            layouts = tuple(tape.values[r].layout.renamed(d) for r, d in zip(reads, names, strict=True))
            whole = tuple(d for d in ("kv_seq",) if d in (*node.operands[0], *node.operands[1]))
            inference = infer_einsum(layouts, flags, dims, whole)
            by_weight = tape.root[node.inputs[other]] in tape.weights
            suffix = "wgrad" if weight else "dgrad" if by_weight else f"dgrad{index}"
            used = self.place(reads, inference)
            output = tape.define(f"{node.name}.{suffix}.out", inference.output.renamed(tape.values[value].layout.dims),
                                 "gradient" if weight else "compute", 1.0)
            tape.emit(
                Node(kind="einsum", name=f"{node.name}.{suffix}", phase="backward", inputs=used, outputs=(output,),
                     operands=names, result=dims, letters=inference.letters, function=suffix)
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
            chunks = tape.values[target].chunks
            outputs.append(tape.define(f"{node.name}.grad.{len(outputs)}", layout, dtype, chunks))
        kind = f"{node.kind}_grad"
        tape.emit(
            Node(kind=kind, name=f"{node.name}.grad", phase="backward", inputs=reads, outputs=tuple(outputs),
                 operands=(node.result,), result=node.result, letters=letters, function=node.function,
                 fused=node.fused and node.kind != "bias", tag=node.tag, window=node.window, block=node.block)
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
        ring = tape.structure.cp_kind == "ring" and self.feeds_attention(value)
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
            Node(kind="attention_grad", name=f"{node.name}.grad", phase="backward", inputs=(dy, *kept),
                 outputs=tuple(outputs), operands=node.operands, result=node.result, letters=node.letters,
                 tag=node.tag, window=node.window, block=node.block)
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
            Node(kind="embedding_grad", name=f"{node.name}.wgrad", phase="backward", inputs=used, outputs=(output,),
                 operands=(node.operands[0], node.result), result=node.operands[1], letters=inference.letters)
        )
        self.contribute(table, output)

    def cross_entropy(self, node: Node) -> None:
        """softmax(logits) − onehot(label); where the loss is vocabulary-parallel, in the logits' storage."""
        tape = self.tape
        logits, top, total, _, labels = node.inputs
        kept = tuple(self.keep(v) for v in (logits, top, total, labels))
        source = tape.values[logits]
        output = tape.define(f"{node.name}.grad.0", source.layout, "fp32", source.chunks)
        tape.emit(
            Node(kind="cross_entropy_grad", name=f"{node.name}.grad", phase="backward", inputs=kept, outputs=(output,),
                 operands=(node.operands[0],), result=node.operands[0], letters=node.letters,
                 in_place=node.function != "fp32_logits")
        )
        self.contribute(logits, output)


def derive(segment: Segment, structure: Structure) -> SegmentProgram:
    """The Program of one segment. Pure: the same segment and structure give equal programs."""
    weights = {weight.name: weight for weight in segment.weights}
    tape = _Tape(structure, weights)
    for name in segment.inputs:
        dims: Dims = HIDDEN if name == "x" else HIDDEN[:2]
        by_dim = residual_placement(structure.sp and name == "x")
        tape.define(name, placed(dims, by_dim), "compute" if name == "x" else "int64")
    for weight in segment.weights:
        tape.define(weight.name, weight_layout(weight, structure), "parameter")
    _forward(segment, tape)
    forward = list(tape.nodes)
    backward = _Backward(tape)
    if segment.output != "loss" and not segment.output.startswith("head."):
        seed = tape.define(f"{segment.output}.grad_in", tape.values[tape.current[segment.output]].layout, "compute")
        backward.contribute(segment.output, seed)
    for node in reversed(forward):
        if node.kind not in COLLECTIVES:
            backward.node(node)
    for name in weights:
        gradient = backward.weight_gradient(name)
        if gradient is not None:
            backward.gradients[name] = gradient
    input_gradient = backward.gradient_of("x") if "x" in segment.inputs else None
    saved, remade, again = _recompute(tape, forward, backward, structure)
    nodes = (*forward, *again, *tape.nodes[len(forward):])
    return SegmentProgram(
        segment=segment, structure=structure, nodes=nodes, values=dict(tape.values), saved=saved, remade=remade,
        gradients=backward.gradients, output=tape.current[segment.output], input_gradient=input_gradient or "",
    )


def _recompute(
    tape: _Tape, forward: list[Node], backward: _Backward, structure: Structure
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
    leaves = {value for node in forward for value in node.inputs if node.tag != "core_attention"}

    def remakes(value: str) -> bool:
        maker = makers.get(value)
        if maker is None:
            return False
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
    kept = dict.fromkeys(value for value in saved if not remakes(value))
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
