"""Products in fp8 and fp4: which run so, what is cast for them, what is kept cast and what is sent cast.

A linear layer has three products; a narrow recipe casts their operands (scalings.yaml) and keeps everything
else as it is. Every fact follows from the Program: an operand is cast by the product that reads it first; what
only such products read can be sent cast; a saved value is kept cast for the weight's gradient, and in 16 bits
where anything else reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from distplan.costmodel.architecture import data_file
from distplan.costmodel.layout import TP
from distplan.costmodel.model import DTYPE_BYTES, Model, Precision
from distplan.costmodel.operators import HIGH, Operator, Segment
from distplan.costmodel.program import COLLECTIVES, Node, SegmentProgram
from distplan.hardware.accelerator import Accelerator
from distplan.hardware.errors import DistplanError

NARROW = ("fp8", "fp4")
_ACTIVATIONS = ("glu_grad", "weighted_glu_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How operands are cast; the fields are those of scalings.yaml, bytes per element instead of blocks."""

    name: str
    dtype: str
    generations: tuple[str, ...]
    reads: float
    launches: float
    operand_bytes: float
    """of one element of an activation or gradient with its share of the scale"""
    weight_bytes: float
    layouts: Mapping[str, int]
    saves: str
    weights: str
    gathers: str
    fuses_norm: bool
    source: str


@cache
def scaling_named(name: str) -> Scaling:
    """The scaling of scalings.yaml."""
    fields: Mapping[str, Any] = data_file("scalings.yaml").value[name]
    element = DTYPE_BYTES[fields["dtype"]]
    of_block, of_weights = (fields["scale"] / max(fields[key], 1) for key in ("block", "weight_block"))
    return Scaling(
        name=name,
        dtype=fields["dtype"],
        generations=tuple(fields["generations"]),
        reads=float(fields["reads"]),
        launches=float(fields["launches"]),
        operand_bytes=element + of_block,
        weight_bytes=element + of_weights,
        layouts=fields["layouts"],
        saves=fields["saves"],
        weights=fields["weights"],
        gathers=fields["gathers"],
        fuses_norm=fields["fuses_norm"],
        source=fields["source"],
    )


@cache
def scaling_names() -> tuple[str, ...]:
    return tuple(name for name in data_file("scalings.yaml").value if name != "unsaid")


def stored_dtype(precision: Precision) -> str:
    """The dtype of a parameter that no narrow product has: such a recipe keeps it in the compute dtype."""
    return precision.compute if precision.parameters in NARROW else precision.parameters


def scaling_of(precision: Precision) -> Scaling | None:
    """None where products are not narrow."""
    if precision.matmul not in NARROW:
        return None
    return scaling_named(precision.scaling or data_file("scalings.yaml").value["unsaid"][precision.matmul])


def layouts_of(precision: Precision) -> float:
    """Copies of a cast tensor, before the device is known as on one that cannot read both ways."""
    scaling = scaling_of(precision)
    return float(precision.layouts or (scaling.layouts["default"] if scaling else 0))


def for_accelerator(precision: Precision, accelerator: Accelerator) -> Precision:
    """The recipe as the device runs it. DistplanError where it has no products of such a dtype or scaling."""
    peaks = accelerator.peak_flops
    for dtype in dict.fromkeys((precision.matmul, precision.compute)):
        if dtype not in peaks:
            raise DistplanError(
                f"precision '{precision.name}' needs products in {dtype}, which {accelerator.name} "
                f"({accelerator.generation}) does not have: it has {', '.join(peaks)}. {_runnable(accelerator)}"
            )
    scaling = scaling_of(precision)
    if scaling is None:
        return precision
    if scaling.generations and accelerator.generation not in scaling.generations:
        raise DistplanError(
            f"precision '{precision.name}' scales as only {' and '.join(scaling.generations)} accelerators do "
            f"('{scaling.name}'), and {accelerator.name} is {accelerator.generation}. {_runnable(accelerator)}"
        )
    found = scaling.layouts.get(accelerator.generation, scaling.layouts["default"])
    return replace(precision, layouts=precision.layouts or found)


def _runnable(accelerator: Accelerator) -> str:
    """The recipes that a device runs, in words."""
    names = []
    for name, fields in data_file("precisions.yaml").value.items():
        scaling = scaling_named(fields["scaling"]) if "scaling" in fields else None
        known = scaling is None or not scaling.generations or accelerator.generation in scaling.generations
        if known and {fields["matmul"], fields["compute"]} <= set(accelerator.peak_flops):
            names.append(name)
    return f"Precisions that run there: {', '.join(names)}"


def with_high_ends(model: Model, precision: Precision) -> Model:
    """The model with its first and last layers as kinds of their own, which stay in the compute dtype."""
    if scaling_of(precision) is None or not (precision.first_layers or precision.last_layers):
        return model
    last = model.layers - precision.last_layers
    pattern = tuple(
        name if precision.first_layers <= at < last else f"{name}{HIGH}" for at, name in enumerate(model.pattern)
    )
    kinds = {name: model.kinds[name.removesuffix(HIGH)] for name in dict.fromkeys(pattern)}
    return replace(model, pattern=pattern, kinds=dict(model.kinds) | kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """A kernel that casts `value` before a product: bytes per element, and kernels."""

    value: str
    bytes_per_element: float
    launches: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """What a recipe does to one segment's Program; empty where products are not narrow."""

    products: frozenset[str] = frozenset()
    sent: Mapping[str, float] = field(default_factory=dict)
    """bytes per element of values that arrive cast, and of what the collective is given"""
    kernels: Mapping[tuple[str, str], tuple[Cast, ...]] = field(default_factory=dict)
    """(product, phase) -> what is cast for it"""
    kept: Mapping[str, float] = field(default_factory=dict)
    """bytes per element of saved values that are not kept in their own dtype alone"""


def _is_narrow(op: Operator, segment: Segment, precision: Precision) -> bool:
    """A linear layer's product with a matrix that is trained or frozen whole (adapters stay in compute)."""
    if op.kind != "einsum" or (segment.name == "head" and "head" in precision.keeps):
        return False
    if op.name.endswith("moe.router") and "router" in precision.keeps:
        return False
    matrices = {weight.name for weight in segment.weights if len(weight.dims) > 1 and "lora" not in weight.dims}
    return not matrices.isdisjoint(op.inputs)


def narrow_operators(segment: Segment, precision: Precision) -> frozenset[str]:
    if precision.matmul not in NARROW or segment.name.endswith(HIGH) or segment.name.startswith("vision."):
        return frozenset()
    return frozenset(op.name for op in segment.operators if _is_narrow(op, segment, precision))


def narrow_weights(segment: Segment, precision: Precision) -> frozenset[str]:
    """Weights of narrow products, of which cast copies exist."""
    names = narrow_operators(segment, precision)
    owned = {weight.name for weight in segment.weights}
    return frozenset(name for op in segment.operators if op.name in names for name in op.inputs if name in owned)


@dataclass(slots=True)
class _Reading:
    """Who makes and who reads the values of a Program."""

    program: SegmentProgram
    makers: dict[str, Node]
    readers: dict[str, list[Node]]

    @staticmethod
    def of(program: SegmentProgram) -> _Reading:
        found = _Reading(program, {}, {})
        for node in program.nodes:
            for name in node.outputs:
                found.makers.setdefault(name, node)
            for name in node.inputs:
                found.readers.setdefault(name, []).append(node)
        return found

    def before(self, value: str, through: Sequence[str] | None = None) -> str:
        """What the collectives that made `value` were given (`through`: only those whose outputs are in it)."""
        maker = self.makers.get(value)
        while maker is not None and maker.kind in COLLECTIVES and (through is None or value in through):
            value = maker.inputs[0]
            maker = self.makers.get(value)
        return value

    def is_gradient(self, value: str) -> bool:
        source = self.before(value)
        maker = self.makers.get(source)
        return source.split("@")[0].endswith(".grad_in") if maker is None else maker.phase == "backward"


def casts_of(program: SegmentProgram, precision: Precision) -> Casts:
    """What casting costs in one segment: kernels, bytes kept, bytes sent. Pure."""
    scaling = scaling_of(precision)
    if scaling is None:
        return Casts()
    forward = narrow_operators(program.segment, precision)
    narrow_wgrad = precision.wgrad in ("", precision.matmul)
    products = {
        node.name
        for node in program.nodes
        if node.kind == "einsum"
        and node.name.removesuffix(".dgrad").removesuffix(".wgrad") in forward
        and (narrow_wgrad or node.function != "wgrad")
    }
    reading = _Reading.of(program)
    sent = _sent(reading, products, precision, scaling)
    return Casts(
        products=frozenset(products),
        sent=sent,
        kernels=_kernels(reading, products, sent, precision, scaling),
        kept=_kept(reading, products, sent, precision, scaling),
    )


def _sent(reading: _Reading, products: set[str], precision: Precision, scaling: Scaling) -> dict[str, float]:
    """Outputs of gathers on tp and exchanges on ep that nothing but narrow products reads."""
    sent: dict[str, float] = {}
    for node in reversed(reading.program.nodes):
        axes = set(node.axes)
        axis = "tp" if axes <= set(TP) else "ep" if axes <= {"ep", "etp"} else ""
        if node.kind not in ("all_gather", "all_to_all") or axis not in precision.sends:
            continue
        readers = reading.readers.get(node.outputs[0], [])
        if readers and all(r.name in products or (r.kind in COLLECTIVES and r.outputs[0] in sent) for r in readers):
            sent[node.outputs[0]] = scaling.operand_bytes
    return sent


def _kernels(
    reading: _Reading, products: set[str], sent: Mapping[str, float], precision: Precision, scaling: Scaling
) -> dict[tuple[str, str], tuple[Cast, ...]]:
    """An operand is cast once per phase, before its first narrow product and before it is sent."""
    done: set[tuple[str, str]] = set()
    kernels: dict[tuple[str, str], tuple[Cast, ...]] = {}
    for node in reading.program.nodes:
        if node.name not in products:
            continue
        found = []
        for value in _cast_for(reading, node, scaling):
            source = reading.before(value, tuple(sent))
            if (source, node.phase) not in done and not _fused(reading, source, products, sent, scaling):
                found.append(_cast(source, precision, scaling))
            done.add((source, node.phase))
        if found:
            kernels[node.name, node.phase] = tuple(found)
    return kernels


def _cast_for(reading: _Reading, node: Node, scaling: Scaling) -> Iterator[str]:
    """Operands that a product does not find cast: weights are where casts are cached, saved inputs where they are
    kept cast."""
    weights = {weight.name for weight in reading.program.segment.weights}
    for value in node.inputs:
        if reading.before(value) in weights:
            if scaling.weights == "each":
                yield value
        elif node.function != "wgrad" or scaling.saves == "compute" or reading.is_gradient(value):
            yield value


def _cast(value: str, precision: Precision, scaling: Scaling) -> Cast:
    read = scaling.reads * DTYPE_BYTES[precision.compute]
    moved = read + layouts_of(precision) * scaling.operand_bytes
    return Cast(value=value, bytes_per_element=moved, launches=scaling.launches)


def _fused(reading: _Reading, source: str, products: set[str], sent: Mapping[str, float], scaling: Scaling) -> bool:
    """A norm whose output only narrow products read writes it cast."""
    maker = reading.makers.get(source)
    if not scaling.fuses_norm or maker is None or maker.kind != "norm":
        return False
    return all(r.name in products or (r.kind in COLLECTIVES and r.outputs[0] in sent) for r in reading.readers[source])


def _kept(
    reading: _Reading, products: set[str], sent: Mapping[str, float], precision: Precision, scaling: Scaling
) -> dict[str, float]:
    """Saved values that the weights' gradients read cast, or that gated activations keep in few bits."""
    kept: dict[str, float] = {}
    for name in (*reading.program.saved, *reading.program.remade):
        if reading.program.values[name].dtype != "compute":
            continue
        again = [node for node in reading.readers.get(name, []) if node.phase != "forward"]
        cast = [n for n in again if n.name in products or (n.kind in COLLECTIVES and n.outputs[0] in sent)]
        gated = [n for n in again if n.kind in _ACTIVATIONS and precision.glu_inputs in NARROW]
        whole = len(again) > len(cast) + len(gated) or (cast and scaling.saves == "compute")
        if not cast and not gated:
            continue
        kept[name] = (DTYPE_BYTES[precision.compute] if whole else 0.0) + (
            scaling.operand_bytes if (cast and scaling.saves == "cast") or (gated and not whole) else 0.0
        )
    return kept
