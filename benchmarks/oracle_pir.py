"""Whole decoder blocks through our paddle dialect against PaddlePaddle 3.3.1's PIR programs (paddle_pir_blocks*).

Only the placements of the inputs and of the explicit `dist.reshard` targets are read from a case. The
block is built here as Paddle's test builds it (one operator after the other, then their gradient
operators), every placement comes from costmodel/paddle_rules.py, and compared are, as multisets: every
operator with the placements that it got, required and gave; the reshards; the gradients of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.oracle_schedules import Tally, read_lines
from distplan.costmodel.paddle_attr import Argument, DistAttr, DistTensor, attr
from distplan.costmodel.paddle_reshard import Exchange, reshard
from distplan.costmodel.paddle_rules import infer

Shape = tuple[int, ...]
Placements = tuple[str, ...]
RULES = {
    "embedding": "embedding_no_vocab_parallel", "rsqrt": "elementwise_unary", "add": "elementwise_binary",
    "multiply": "elementwise_binary_with_partial", "reshape": "reshape_dynamic", "mean_grad": "sum_grad",
    "cross_entropy_with_softmax": "cross_entropy_with_softmax_dynamic", "rsqrt_grad": "elementwise_unary_grad",
    "pow_grad": "elementwise_unary_grad", "multiply_grad": "elementwise_binary_grad",
    "add_grad": "elementwise_binary_grad", "swiglu_grad": "elementwise_binary_grad",
}  # fmt: skip
"""PIR's operator -> our rule, where the names differ (phi/ops/yaml: spmd_rule)"""
CONSTANTS = {"mean": 1, "scale": 1, "reshape": 1, "mean_grad": 2, "full_like": 1}
"""operand that holds an attribute (axis, factor, shape): always replicated"""
CROSS_ENTROPY = {
    "soft_label": False, "use_softmax": True, "numeric_stable_mode": True, "ignore_index": -100, "axis": -1,
}  # fmt: skip


@dataclass(eq=False, slots=True)
class Var:
    shape: Shape
    attr: DistAttr
    source: Var | None = None
    """of a reshard: what it was made from"""


@dataclass(frozen=True, slots=True)
class Record:
    """One operator as the program shows it; operands of add_n are not stored."""

    op: str
    role: str
    got: tuple[tuple[Shape, Placements], ...]
    required: tuple[Placements, ...]
    gave: tuple[tuple[Shape, Placements], ...]


Reshard = tuple[Placements, Placements, Shape]


def placements_of(of: DistAttr, axes: int) -> Placements:
    """Per mesh axis R, S<dim>, P or P<kind>, as the file has it."""
    said = ["R"] * axes
    for dim, holders in enumerate(of.dims_mapping):
        for axis in holders:
            said[axis] = f"S{dim}"
    for axis, kind in of.partial.items():
        said[axis] = "P" if kind == "SUM" else f"P{kind}"
    return tuple(said)


def attr_of(placements: Sequence[str], ndim: int) -> DistAttr:
    mapping: list[list[int]] = [[] for _ in range(ndim)]
    for axis, placement in enumerate(placements):
        if placement.startswith("S"):
            mapping[int(placement[1:])].append(axis)
    partial = {a: p[1:] or "SUM" for a, p in enumerate(placements) if p.startswith("P")}
    return attr([held or -1 for held in mapping], partial)


@dataclass(slots=True)
class Block:
    """A program under construction: `tape` holds, per forward operator, what makes its gradient operator."""

    mesh: tuple[int, ...]
    records: list[Record] = field(default_factory=list)
    wanted: list[tuple[Var, DistAttr]] = field(default_factory=list)
    """variables that an operator reads in another placement"""
    readers: Counter[Var] = field(default_factory=Counter)
    resharded: list[Var] = field(default_factory=list)
    """results of explicit reshards, and gradients that were resharded to their variable's placement"""
    tape: list[tuple[Var, Callable[[Var], None]]] = field(default_factory=list)
    parts: dict[Var, list[Var]] = field(default_factory=dict)
    """the gradients that a variable has got so far"""

    def apply(
        self,
        op: str,
        inputs: Sequence[Var],
        shapes: Sequence[Shape],
        attributes: Mapping[str, Any],
        role: str = "forward",
        like: Sequence[Var] = (),
    ) -> list[Var]:
        """Run the rule. `like`: the variables whose gradients the outputs are; where a gradient is sharded
        otherwise than its variable, it is resharded to it."""
        tensors: list[Argument] = [DistTensor(shape=v.shape, attr=v.attr) for v in inputs]
        if op == "add_n":
            tensors = [tuple(tensors)]  # type: ignore[arg-type]
        direction = "grad" if op.endswith("_grad") else "forward"
        inference = infer(RULES.get(op, op), direction, self.mesh, tensors, attributes=attributes)
        asked = [a for answer in inference.inputs for a in (answer if isinstance(answer, tuple) else (answer,))]
        for var, need in zip(inputs, asked, strict=True):
            self.readers[var] += 1
            if need != var.attr:
                self.wanted.append((var, need))
        outputs = []
        for number, shape in enumerate(shapes):
            given = inference.outputs[number]
            assert isinstance(given, DistAttr)
            made = Var(shape, given)
            if like and given.dims_mapping != like[number].attr.dims_mapping:
                made = Var(shape, like[number].attr, made)
                self.resharded.append(made)
            outputs.append(made)
        self._record(op, role, inputs, asked, outputs)
        return outputs

    def reshard(self, var: Var, target: DistAttr, role: str = "forward") -> Var:
        """An explicit dist.reshard."""
        made = Var(var.shape, target, var)
        self.resharded.append(made)
        self.readers[var] += 1
        self._record("dist.reshard", role, [var], [var.attr], [made])
        if role == "forward":
            self.tape.append((made, lambda dy: self.contribute(var, self.reshard(dy, var.attr, "backward"))))
        return made

    def _record(
        self, op: str, role: str, inputs: Sequence[Var], asked: Sequence[DistAttr], outputs: Sequence[Var]
    ) -> None:
        axes = len(self.mesh)
        shown = () if op == "add_n" else tuple((v.shape, placements_of(v.attr, axes)) for v in inputs)
        needs = () if op == "add_n" else tuple(placements_of(need, axes) for need in asked)
        gave = tuple((v.shape, placements_of(v.attr, axes)) for v in outputs)
        self.records.append(Record(op, role, shown, needs, gave))

    def contribute(self, var: Var, gradient: Var) -> None:
        self.parts.setdefault(var, []).append(gradient)

    def gradient(self, var: Var) -> Var | None:
        """The sum of all contributions."""
        parts = self.parts.get(var, [])
        if len(parts) > 1:
            parts = self.parts[var] = self.apply("add_n", parts, [var.shape], {}, "backward")
        return parts[0] if parts else None

    def op(
        self,
        name: str,
        inputs: Sequence[Var],
        shape: Shape,
        attributes: Mapping[str, Any] | None = None,
        kept: Sequence[int] = (),
        out: bool = False,
    ) -> Var:
        """A forward operator with one output whose gradient operator reads inputs `kept`, the output, and dy."""
        said = attributes or {}
        made = self.apply(name, inputs, [shape], said)[0]

        def backward(dy: Var) -> None:
            reads = [*(inputs[i] for i in kept), *([made] if out else []), dy]
            targets = inputs if name != "embedding" else inputs[1:]
            grad = "scale" if name == "scale" else f"{name}_grad"
            found = self.apply(grad, reads, [v.shape for v in targets], said, "backward", targets)
            for target, gradient in zip(targets, found, strict=True):
                self.contribute(target, gradient)

        self.tape.append((made, backward))
        return made

    def backward(self) -> None:
        for made, gradient_operator in reversed(self.tape):
            dy = self.gradient(made)
            if dy is not None:
                gradient_operator(dy)

    def transitions(self) -> list[tuple[Var, DistAttr]]:
        """(what, to where) of all reshards; one whose every reader wants something else is folded into theirs."""
        wanting = Counter(var for var, _ in self.wanted)
        folded = {var for var in self.resharded if self.readers[var] and wanting[var] == self.readers[var]}
        pairs = [(var.source if var in folded and var.source else var, need) for var, need in self.wanted]
        pairs += [(var.source, var.attr) for var in self.resharded if var not in folded and var.source]
        return [(var, need) for var, need in pairs if var.attr != need]

    def reshards(self) -> Counter[Reshard]:
        axes = len(self.mesh)
        said = ((placements_of(v.attr, axes), placements_of(need, axes), v.shape) for v, need in self.transitions())
        return Counter(said)

    def collectives(self) -> Counter[Exchange]:
        """What the program sends in the end: a variable is brought to a placement once, whoever reads it."""
        axes = len(self.mesh)
        once = {(var, placements_of(need, axes)): None for var, need in self.transitions()}
        found: Counter[Exchange] = Counter()
        for var, target in once:
            found.update(reshard(self.mesh, var.shape, placements_of(var.attr, axes), target).collectives)
        return found


@dataclass(slots=True)
class Decoder:
    """The decoder of the cases: RMSNorm and attention from primitives, SwiGLU, untied head, mean loss."""

    block: Block
    case: Mapping[str, Any]
    weights: dict[str, Var] = field(default_factory=dict)

    def attr(self, said: Mapping[str, str], ndim: int) -> DistAttr:
        return attr_of([said.get(name, "R") for name in self.case["names"]], ndim)

    def weight(self, kind: str, shape: Shape, layer: str = "") -> Var:
        made = Var(shape, self.attr(self.case["w"].get(kind, {}), len(shape)))
        self.weights[layer + kind] = made
        return made

    def hidden(self, x: Var) -> Var:
        """Sequence-parallel cases reshard the residual stream explicitly."""
        said = self.case.get("hidden")
        return self.block.reshard(x, self.attr(said, 3)) if said else x

    def gathered(self, x: Var) -> Var:
        return self.block.reshard(x, self.attr(self.case["data"], 3)) if self.case.get("explicit_gather") else x

    def norm(self, x: Var, kind: str, layer: str = "") -> Var:
        op, lines = self.block.op, (*x.shape[:2], 1)
        axis = {"axis": [-1], "keep_dim": True, "reduce_all": False}
        square = op("pow", [x], x.shape, {}, kept=(0,))
        mean = op("mean", [square], lines, axis, kept=(0,))
        root = op("rsqrt", [op("scale", [mean], lines)], lines, out=True)
        y = op("multiply", [x, root], x.shape, {"axis": -1}, kept=(0, 1))
        return op("multiply", [y, self.weight(kind, x.shape[2:], layer)], x.shape, {"axis": -1}, kept=(0, 1))

    def product(self, x: Var, y: Var, shape: Shape, trans_y: bool = False) -> Var:
        return self.block.op("matmul", [x, y], shape, {"trans_x": False, "trans_y": trans_y}, kept=(0, 1))

    def attention(self, x: Var, layer: str) -> Var:
        op, m = self.block.op, self.case["model"]
        b, s, h, heads = m["B"], m["S"], m["H"], m["heads"]
        split, turned = (b, s, heads, h // heads), (b, heads, s, h // heads)
        perm = {"perm": [0, 2, 1, 3]}
        made = []
        for kind in ("q", "k", "v"):
            y = self.product(x, self.weight(kind, (h, h), layer), (b, s, h))
            made.append(op("reshape", [y], split, {"shape": list(split)}, kept=(0,)))
        q, k, v = (op("transpose", [y], turned, perm) for y in made)
        scores = op("scale", [self.product(q, k, (b, heads, s, s), True)], (b, heads, s, s))
        probs = op("softmax", [scores], (b, heads, s, s), {"axis": -1}, out=True)
        y = op("transpose", [self.product(probs, v, turned)], split, perm)
        y = op("reshape", [y], (b, s, h), {"shape": [b, s, h]}, kept=(0,))
        return self.product(y, self.weight("o", (h, h), layer), (b, s, h))

    def mlp(self, x: Var, layer: str) -> Var:
        m = self.case["model"]
        wide = (m["B"], m["S"], m["ffn"])
        gate, up = (self.product(x, self.weight(kind, (m["H"], m["ffn"]), layer), wide) for kind in ("gate", "up"))
        y = self.block.op("swiglu", [gate, up], wide, kept=(0, 1))
        return self.product(y, self.weight("down", (m["ffn"], m["H"]), layer), x.shape)

    def build(self) -> None:
        m, block = self.case["model"], self.block
        shape = (m["B"], m["S"], m["H"])
        ids, labels = (Var(s, self.attr(self.case["data"], len(s))) for s in (shape[:2], (*shape[:2], 1)))
        table = self.weight("embed", (m["vocab"], m["H"]))
        lookup = {"padding_idx": -1, "sparse": False}
        x = self.hidden(block.op("embedding", [ids, table], shape, lookup, kept=(0, 1)))
        for number in range(self.case["layers"]):
            layer = f"l{number}."
            y = self.attention(self.gathered(self.norm(x, "norm1", layer)), layer)
            x = block.op("add", [x, self.hidden(y)], shape, {"axis": -1}, kept=(0, 1))
            y = self.mlp(self.gathered(self.norm(x, "norm2", layer)), layer)
            x = block.op("add", [x, self.hidden(y)], shape, {"axis": -1}, kept=(0, 1))
        y = self.gathered(self.norm(x, "norm"))
        logits = self.product(y, self.weight("head", (m["H"], m["vocab"])), (*shape[:2], m["vocab"]))
        self.loss(logits, labels)
        block.backward()

    def loss(self, logits: Var, labels: Var) -> None:
        """Cross entropy and its mean; the backward begins with ones like the loss."""
        block, shapes = self.block, [logits.shape, labels.shape]
        softmax, losses = block.apply("cross_entropy_with_softmax", [logits, labels], shapes, CROSS_ENTROPY)

        def backward(dy: Var) -> None:
            reads = [labels, softmax, dy]
            op = "cross_entropy_with_softmax_grad"
            block.contribute(logits, block.apply(op, reads, shapes[:1], CROSS_ENTROPY, "backward", [logits])[0])

        block.tape.append((losses, backward))
        mean = block.op("mean", [losses], (), {"axis": [], "keep_dim": False, "reduce_all": True}, kept=(0,))
        block.contribute(mean, block.apply("full_like", [mean], [()], {}, "backward")[0])


def stored_records(case: Mapping[str, Any]) -> list[Record]:
    found = []
    for line in case["built"]:
        op, count = line["op"], CONSTANTS.get(line["op"], len(line["in"]))
        got = () if op == "add_n" else tuple((tuple(t["shape"]), tuple(t["placements"])) for t in line["in"][:count])
        needs = () if op == "add_n" else tuple(tuple(p) for p in line["required_in"][:count])
        gave = tuple((tuple(t["shape"]), tuple(t["placements"])) for t in line["out"])
        found.append(Record(op, line["role"], got, needs, gave))
    return found


def decoder(case: Mapping[str, Any]) -> Decoder:
    made = Decoder(Block(tuple(case["mesh"])), case)
    made.build()
    return made


def check(path: Path) -> dict[str, Tally]:
    """Per operator (and reshards, weights' gradients) the tally of a file whose name begins with paddle_pir_blocks."""
    tallies: dict[str, Tally] = {}
    for case in read_lines(path):
        made = decoder(case)
        axes = len(case["mesh"])
        ours, real = Counter(made.block.records), Counter(stored_records(case))
        for op in sorted({record.op for record in real | ours}):
            mine, theirs = ({r: n for r, n in each.items() if r.op == op} for each in (ours, real))
            _count(tallies, f"pir {op}", case["id"], Counter(mine), Counter(theirs))
        stored = Counter((tuple(r["from"]), tuple(r["to"]), tuple(r["shape"])) for r in case["reshards"])
        _count(tallies, "pir reshards", case["id"], made.block.reshards(), stored)
        sent = Counter(Exchange(c["op"], tuple(c["ranks"]), c["bytes_in_local"]) for c in case["final_comm"])
        _count(tallies, "pir final collectives", case["id"], made.block.collectives(), sent)
        gradients = {name: made.block.gradient(w) for name, w in made.weights.items()}
        found = Counter((name, placements_of(g.attr, axes)) for name, g in gradients.items() if g)
        said = Counter((line["param"], tuple(line["grad_placements"])) for line in case["param_grads"])
        _count(tallies, "pir weights' gradients", case["id"], found, said)
    return tallies


def _count(tallies: dict[str, Tally], rule: str, case: str, ours: Counter[Any], real: Counter[Any]) -> None:
    tally = tallies.setdefault(rule, Tally())
    tally.total += max(ours.total(), real.total())
    tally.agree += (ours & real).total()
    for missing in (real - ours).elements():
        others = [o for o in (ours - real) if getattr(o, "role", "") == getattr(missing, "role", "")]
        tally.differ.append(f"{case} {rule}: {missing} is missing; ours: {others[:1]}")
    if not real - ours:
        tally.differ += [f"{case} {rule}: {extra} is not there" for extra in (ours - real).elements()]
