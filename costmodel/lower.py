"""A Program lowered to tables: which sizes, rates and groups each node needs. Still no numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distplan.costmodel.casting import NARROW, Casts, casts_of
from distplan.costmodel.feed_forward import WEIGHTED
from distplan.costmodel.joined import Joined, joined_products
from distplan.costmodel.layout import EXPERT, TP, Axes
from distplan.costmodel.lower_terms import dtype_bytes, held_outputs, segment_sizes, terms_of, traffic, transients_of
from distplan.costmodel.model import Precision, Workload
from distplan.costmodel.program import COLLECTIVES, RINGS, Node, SegmentProgram
from distplan.costmodel.sizes import BY_EXPERTS, Size, SizeTable, layout_size, size_of

PHASES = ("forward", "recompute", "backward")
CATEGORIES = ("gemm", "attention", "memory_bound", "tp", "cp", "ep")
Terms = tuple[tuple[int, float], ...]
"""(number of a size, factor) of a sum of sizes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One node, lowered. Sizes are numbers in the SizeTable."""

    segment: int
    phase: int
    category: int
    name: str
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 0
    groups: int = 0
    """products of one grouped kernel (experts)"""
    dtype: str = ""
    accumulate: float = 0.0
    """of a weight gradient, which is added into the gradient buffer: bytes of an element there; 0 = no such product"""
    leader: int = -1
    """position of the product that this one is part of (its time is the leader's); -1 = its own"""
    grows: str = ""
    """the dim of a leading product to which its members' own is added: n, or k for the input's gradient"""
    terms: Terms = ()
    """bytes = Σ size · factor: what a memory-bound kernel moves, or what a collective is given"""
    launches: float = 1.0
    """kernels of a memory-bound work"""
    kind: str = ""
    axes: Axes = ()
    behind: tuple[int, ...] = ()
    """positions of the works that can hide this collective"""
    share: float = 1.0
    """attention: scores executed over the whole square (before causality halves them)"""
    length: float = 1.0
    """attention: how much of the sequence a kernel sees at once"""
    full: bool = False
    """attention: every query sees every key of its block"""
    times: float = 1.0
    """so many alike, one after the other (the layers of an image tower)"""
    ring: bool = False
    """attention: one kernel per rank of cp, on the K and V that have just arrived"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """All segments of one structure."""

    sizes: SizeTable
    works: tuple[Work, ...]
    saved: tuple[Terms, ...]
    """per segment: bytes kept per micro-batch, as terms"""
    remade: tuple[Terms, ...]
    transients: tuple[tuple[Terms, ...], ...]
    """per segment: the sets of short-lived values that can be alive at once"""
    boundary: tuple[int, float]
    """the activation that one stage sends to the next"""
    boundary_sharded: bool
    """each rank of tp has a part of it"""
    expert_sizes: frozenset[int]
    """the sizes that depend on the degrees of the expert axes"""
    experts: frozenset[int]
    """positions of the works whose price depends on them"""


def lower(programs: Sequence[SegmentProgram], workload: Workload) -> Lowered:
    """Lower the programs of all segments of one structure into one table."""
    table = SizeTable()
    works: list[Work] = []
    saved, remade, transients = [], [], []
    boundary, sharded = (0, 0.0), False
    for index, program in enumerate(programs):
        kept, again, alive = _lower_program(index, program, table, works, workload)
        for part in program.beside:
            more = _lower_program(index, part, table, works, workload)
            kept, again = kept + _times(more[0], part.segment.times), again + more[1]
            alive = tuple(sorted({*alive, *more[2]}))
        saved.append(kept)
        remade.append(again)
        transients.append(alive)
        sizes = dict(program.segment.sizes) | {"seq": float(workload.seq_len)}
        if "x" in program.segment.inputs and program.segment.name.startswith("layer"):
            layout = program.values["x"].layout
            boundary = (table.number(layout_size(layout, sizes)), dtype_bytes("compute", workload.precision))
            sharded = any(axis in TP for axes in layout.shards for axis in axes)
    expert_sizes = table.following(BY_EXPERTS)
    return Lowered(
        sizes=table,
        works=tuple(works),
        saved=tuple(saved),
        remade=tuple(remade),
        transients=tuple(transients),
        boundary=boundary,
        boundary_sharded=sharded,
        expert_sizes=expert_sizes,
        experts=_of_experts(works, expert_sizes),
    )


def _of_experts(works: Sequence[Work], sizes: frozenset[int]) -> frozenset[int]:
    """Works of these sizes or of expert axes, and the products and collectives that share their time with one."""
    found = {at for at, work in enumerate(works) if set(work.axes) & set(EXPERT) or not sizes.isdisjoint(_sizes(work))}
    found |= {works[at].leader for at in found} - {-1}
    found |= {at for at, work in enumerate(works) if work.leader in found}
    hidden = {work.behind for at, work in enumerate(works) if at in found or not found.isdisjoint(work.behind)} - {()}
    return frozenset(found | {at for at, work in enumerate(works) if work.behind in hidden})


def _sizes(work: Work) -> tuple[int, ...]:
    shape = (work.m, work.n, work.k, work.batch, work.groups)
    return shape if work.category < 2 else (work.groups, *(number for number, _ in work.terms))


def _times(terms: Terms, times: float) -> Terms:
    return tuple((number, factor * times) for number, factor in terms)


def _lower_program(
    index: int, program: SegmentProgram, table: SizeTable, works: list[Work], workload: Workload
) -> tuple[Terms, Terms, tuple[Terms, ...]]:
    """(saved, remade, transients) of one Program, whose nodes are added to `works` as those of segment `index`."""
    sizes = segment_sizes(program, workload)
    precision = workload.precision
    first = len(works)
    positions: dict[tuple[str, int], int] = {}
    joined = joined_products(program)
    casts = casts_of(program, precision)
    for node in program.nodes:
        if (node.name, node.phase) in joined.sums:
            continue
        for work in _works(index, node, program, sizes, table, workload, casts):
            positions[(node.name, work.phase)] = len(works)
            works.append(work)
    for at in range(first, len(works)):
        led = _led(_placed_behind(works[at], program, positions), joined, positions)
        works[at] = led if program.segment.times == 1.0 else replace(led, times=program.segment.times)
    return (
        terms_of((*program.saved, *held_outputs(program, workload)), program, sizes, table, precision, casts.kept),
        terms_of(program.remade, program, sizes, table, precision, casts.kept),
        transients_of(program, sizes, table, precision, casts.sent),
    )


def _placed_behind(work: Work, program: SegmentProgram, positions: Mapping[tuple[str, int], int]) -> Work:
    if not work.axes:
        return work
    node = next(n for n in program.nodes if n.name == work.name and PHASES.index(n.phase) == work.phase)
    found = tuple(positions[(name, work.phase)] for name in node.behind if (name, work.phase) in positions)
    return Work(
        segment=work.segment,
        phase=work.phase,
        category=work.category,
        name=work.name,
        terms=work.terms,
        kind=work.kind,
        axes=work.axes,
        behind=found,
        dtype=work.dtype,
    )


def _led(work: Work, joined: Joined, positions: Mapping[tuple[str, int], int]) -> Work:
    leader = joined.leader.get((work.name, PHASES[work.phase]))
    return work if leader is None else replace(work, leader=positions[leader, work.phase])


def _works(
    segment: int,
    node: Node,
    program: SegmentProgram,
    sizes: Mapping[str, float],
    table: SizeTable,
    workload: Workload,
    casts: Casts,
) -> list[Work]:
    phase = PHASES.index(node.phase)
    precision = workload.precision

    def letters(*dims: str) -> int:
        return table.number(size_of([(d, node.letters.get(d, ())) for d in dims], sizes))

    if node.kind in COLLECTIVES:
        if node.kind == "slice":
            return []
        category = CATEGORIES.index(axis_class(node.axes))
        reduces = set(node.axes) & set(program.values[node.inputs[0]].layout.partial)
        given = node.outputs if node.kind == "ring_exchange" and reduces else node.inputs
        cast = {name: casts.sent[node.outputs[0]] for name in given} if node.outputs[0] in casts.sent else {}
        terms = terms_of(given, program, sizes, table, precision, cast)
        sent = Work(
            segment=segment, phase=phase, category=category, name=node.name, terms=terms, kind=node.kind, axes=node.axes
        )
        if node.kind != "all_to_all" or node.axes != ("ep",):
            return [sent]
        here = table.number(size_of([("experts", ("ep",))], sizes))
        moved = tuple((number, 2.0 * factor) for number, factor in terms)
        order = replace(sent, category=2, name=f"{node.name}.sort", terms=moved, kind="sort", axes=(), groups=here)
        return [order, sent]
    if node.kind == "einsum":
        a, b, out = set(node.operands[0]), set(node.operands[1]), set(node.result)
        made = [
            Work(
                segment=segment,
                phase=phase,
                category=2,
                name=f"{node.name}.cast",
                kind="cast",
                terms=terms_of((cast.value,), program, sizes, table, precision, {cast.value: cast.bytes_per_element}),
                launches=cast.launches,
            )
            for cast in casts.kernels.get((node.name, node.phase), ())
        ]
        dtype = _product_dtype(node, program, precision, casts)
        return [
            *made,
            Work(
                segment=segment,
                phase=phase,
                category=0,
                name=node.name,
                dtype=dtype,
                m=letters(*sorted((a & out) - b)),
                n=letters(*sorted((b & out) - a)),
                k=letters(*sorted((a & b) - out)),
                batch=letters(*sorted((a & b & out) - {"experts"})),
                groups=letters(*sorted(a & b & out & {"experts"})),
                accumulate=dtype_bytes("gradient", precision) if node.function == "wgrad" else 0.0,
                grows="k" if node.function == "dgrad" else "n",
            ),
        ]
    if node.kind in ("attention", "attention_grad"):
        shape = ("batch", "kv_heads", "group")
        return [
            Work(
                segment=segment,
                phase=phase,
                category=1,
                name=node.name,
                dtype=precision.compute,
                kind=node.kind,
                m=letters("seq"),
                n=letters(node.operands[1][1]),
                k=letters("head_dim"),
                groups=letters("v_head_dim"),
                batch=letters(*shape),
                share=_share(node, program, workload),
                length=_length(node, program, workload),
                full=_sees_all(program),
                ring=program.structure.cp_kind in RINGS and not _sees_all(program),
            )
        ]
    if node.kind in ("scan", "scan_grad"):
        return _scan(segment, phase, node, sizes, table, precision)
    if node.kind in ("bias", "bias_grad") and node.function == WEIGHTED:
        terms, kind = terms_of(node.inputs[:1], program, sizes, table, precision, {}), f"expert_{node.kind}"
        here = table.number(size_of([("experts", ("ep",))], sizes))
        return [Work(segment=segment, phase=phase, category=2, name=node.name, terms=terms, kind=kind, groups=here)]
    terms = traffic(node, program, sizes, table, precision)
    if not terms:
        return []
    return [Work(segment=segment, phase=phase, category=2, name=node.name, terms=terms, kind=node.kind)]


def _product_dtype(node: Node, program: SegmentProgram, precision: Precision, casts: Casts) -> str:
    """Where products are in tf32, those of weights are; narrow ones where the recipe says so."""
    if node.name in casts.products:
        return precision.matmul
    if precision.matmul in NARROW or program.segment.name == "head":
        return precision.compute
    weighted = any(v in {w.name for w in program.segment.weights} for v in node.inputs) or node.function == "wgrad"
    return precision.matmul if weighted else precision.compute


def _scan(
    segment: int, phase: int, node: Node, sizes: Mapping[str, float], table: SizeTable, precision: Precision
) -> list[Work]:
    """The four products of a chunked scan: scores and their output within a chunk of Q tokens, the chunk's
    state, and the state's output (Mamba-2, arXiv 2405.21060, section 6); twice each in backward."""
    length, state, dim = sizes["scan_chunk"], sizes["state"], sizes["ssm_dim"]
    length = min(length, sizes["seq"])

    def chunks(*dims: str) -> int:
        size = size_of([(d, node.letters.get(d, ())) for d in dims], sizes)
        return table.number(Size(size.constant / length, size.varying, size.axes))

    heads, groups = ("batch", "seq", "ssm_groups", "ssm_rep"), ("batch", "seq", "ssm_groups")
    products = (
        (length, length, state, groups),
        (length, dim, length, heads),
        (state, dim, length, heads),
        (length, dim, state, heads),
    )
    one = table.number(Size(1.0, (), ()))
    works = []
    for m, n, k, over in products:
        numbers = [table.number(Size(value, (), ())) for value in (m, n, k)]
        work = Work(
            segment=segment,
            phase=phase,
            category=0,
            name=node.name,
            dtype=precision.compute,
            m=numbers[0],
            n=numbers[1],
            k=numbers[2],
            batch=chunks(*over),
            groups=one,
        )
        works += [work] * (2 if node.kind == "scan_grad" else 1)
    return works


def axis_class(axes: Axes) -> str:
    """The category that a collective's time is counted in: tp | ep | cp."""
    if set(axes) <= set(TP):
        return "tp"
    return "ep" if set(axes) <= {"ep", "etp"} else "cp"


def _length(node: Node, program: SegmentProgram, workload: Workload) -> float:
    """Part of the sequence that one query can see."""
    seq = segment_sizes(program, workload)["seq"]
    limits = [limit for limit in (node.window, node.block, _documents(program, workload)) if limit]
    return min([*limits, seq]) / seq


def _sees_all(program: SegmentProgram) -> bool:
    """Attention without a mask: within an image, or of the text to the images."""
    return program.segment.full or "images" in program.segment.inputs


def _documents(program: SegmentProgram, workload: Workload) -> int:
    """Tokens of a packed document; an image tower sees images, which are its blocks."""
    return 0 if _sees_all(program) else workload.document_len


def _share(node: Node, program: SegmentProgram, workload: Workload) -> float:
    """Scores over the square, twice the causal ones: a window w of s tokens w/s·(2 − w/s), blocks of w tokens w/s."""
    length = _length(node, program, workload)
    blocks = min([limit for limit in (node.block, _documents(program, workload)) if limit], default=0)
    in_blocks = blocks and (not node.window or blocks <= node.window)
    causal = workload.causal and not _sees_all(program)
    return length if in_blocks or not causal else length * (2.0 - length)
