"""The memory of an estimate taken apart again: every weight, gradient, optimizer state and saved activation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from distplan.costmodel.case import Case
from distplan.costmodel.casting import NARROW, casts_of, narrow_weights, stored_dtype
from distplan.costmodel.lower_terms import dtype_bytes, segment_sizes
from distplan.costmodel.model import DTYPE_BYTES, Precision
from distplan.costmodel.program import SegmentProgram
from distplan.costmodel.sizes import SizeTable, layout_size
from distplan.costmodel.stage_costs import cast_bytes, chunks_in_flight
from distplan.costmodel.state_path import state_path
from distplan.costmodel.step_end import weight_content
from distplan.costmodel.strategy import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One tensor of the worst stage, as it is kept."""

    part: str
    """of the memory that it is counted in"""
    segment: str
    name: str
    placement: str
    """[batch_dp, seq_cp, hidden]"""
    dtype: str
    elements: float
    """of one copy on one GPU"""
    copies: float
    """layers of this kind, times micro-batches in flight for an activation"""
    num_bytes: float


def held(case: Case) -> tuple[Held, ...]:
    """Every tensor that the worst stage keeps in its worst phase, of parameters, gradients, optimizer state, saved
    activations, logits and recomputed values. Padding of shards and values that nobody keeps are not in them."""
    return (*_weights(case), *_activations(case), *_head(case), *_remade(case))


def _weights(case: Case) -> Iterator[Held]:
    recipe = case.eng.workload.precision
    zero = case.strategy.zero
    rules = case.eng.runtime.state
    content = weight_content(case.worst.content, case.strategy.pp)
    symbols = case.eng.rows(case.columns, "none").symbols
    states = [*([("master", recipe.master)] if recipe.master else []), *(("moment", dtype) for dtype in recipe.moments)]
    sharded_from = 2 if rules.zero2_parameters == "sharded" else 3
    programs = [(at, part) for at, first in enumerate(case.programs("none")) for part in (first, *first.beside)]
    for at, program in programs:
        narrow = narrow_weights(program.segment, recipe)
        for weight in program.segment.weights:
            copies = float(content[-1] if weight.name in program.segment.shares else content[at])
            copies *= program.segment.times
            if not copies:
                continue
            path = state_path(program, weight, zero >= 1)
            made = path.gradient if rules.whole_gradients == "as_produced" else path.used
            dtype, size = _parameter(recipe, zero >= sharded_from, weight.name in narrow, weight.trained)
            rows = [("parameters", weight.name, path.stored if zero >= sharded_from else path.used, dtype)]
            if weight.trained:
                layout = path.stored if zero >= 2 else made.whole()
                rows.append(("gradients", weight.name, layout, recipe.gradients))
                if rules.kept_gradients and recipe.gradients != recipe.compute:
                    rows.append(("gradients", f"{weight.name} as backward left it", layout, recipe.compute))
                if not case.eng.workload.offload_optimizer:
                    rows += [("optimizer", f"{weight.name} {name}", path.stored, dtype) for name, dtype in states]
            for part, name, layout, dtype in rows:
                elements = _elements(layout_size(layout, program.segment.sizes), symbols)
                each = size if part == "parameters" else DTYPE_BYTES[dtype]
                yield Held(
                    part=part,
                    segment=program.segment.name,
                    name=name,
                    placement=str(layout),
                    dtype=dtype,
                    elements=elements,
                    copies=copies,
                    num_bytes=elements * copies * each,
                )


def _parameter(recipe: Precision, sharded: bool, narrow: bool, trained: bool) -> tuple[str, float]:
    """(dtype, bytes per element) of a parameter as it is stored, its cast copies with it."""
    plain = stored_dtype(recipe) if trained else recipe.compute
    cast = cast_bytes(recipe) if narrow else None
    if cast is None:
        return plain, DTYPE_BYTES[plain]
    size = DTYPE_BYTES[plain] + (cast.sharded if sharded else cast.whole)
    if recipe.parameters in NARROW:
        return recipe.matmul, size
    return (plain if sharded else f"{plain} and {recipe.matmul}"), size


def _elements(size: object, symbols: Mapping[str, Floats]) -> float:
    table = SizeTable()
    table.number(size)  # type: ignore[arg-type]
    return float(table.evaluate(symbols)[0, 0])


def _activations(case: Case) -> Iterator[Held]:
    """What one micro-batch keeps until its backward, times those in flight; recomputed layers keep less."""
    s, run = case.strategy, case.worst
    flight = float(chunks_in_flight(s.schedule, run, s.pp, s.vpp, case.estimate.num_micro_batches)[0])
    share = case.share(run)
    for recompute, part in (("none", 1.0 - share), (s.recompute, share)):
        if not part:
            continue
        for at, program in enumerate(case.programs(recompute)[:-1]):
            copies = run.content[at] * flight * (part if at else 1.0)
            if copies and (at or recompute == "none" or part == 1.0):
                yield from _saved(case, program, program.saved, copies if at else run.content[at] * flight)
                for tower in program.beside:
                    yield from _saved(case, tower, tower.saved, run.content[at] * flight * tower.segment.times)


def _head(case: Case) -> Iterator[Held]:
    """What head and loss keep, of one micro-batch; what they make and drop again is not in it."""
    program = case.programs(case.strategy.recompute)[-1]
    yield from _saved(case, program, program.saved, 1.0, "logits and loss")


def _remade(case: Case) -> Iterator[Held]:
    """What recomputation makes again while one layer runs backward: of the kind of layer that makes most."""
    programs = case.programs(case.strategy.recompute)[1:-1]
    content = case.worst.content[1:-1]
    kinds = [
        list(_saved(case, program, program.remade, 1.0, "recompute workspace"))
        for program, count in zip(programs, content, strict=True)
        if count
    ]
    yield from max(kinds, key=lambda kind: sum(each.num_bytes for each in kind), default=[])


def _saved(
    case: Case, program: SegmentProgram, names: Iterable[str], copies: float, part: str = "activations"
) -> Iterator[Held]:
    workload = case.eng.workload
    sizes = segment_sizes(program, workload)
    symbols = case.eng.rows(case.columns, case.strategy.cp_kind).symbols
    casts = casts_of(program, workload.precision)
    for name in names:
        value = program.values[name]
        elements = _elements(layout_size(value.layout, sizes), symbols) / value.chunks
        size = casts.kept.get(name, dtype_bytes(value.dtype, workload.precision))
        dtype = workload.precision.compute if value.dtype == "compute" else value.dtype
        if name in casts.kept:
            both = size > DTYPE_BYTES[dtype]
            dtype = f"{dtype} and {workload.precision.matmul}" if both else workload.precision.matmul
        yield Held(
            part=part,
            segment=program.segment.name,
            name=name.split("@")[0],
            placement=str(value.layout),
            dtype=dtype,
            elements=elements,
            copies=copies,
            num_bytes=elements * copies * size,
        )
