"""The Program: what one device does, as nodes over values that lie on the mesh. No sizes are known here.

Derived from a graph and the structure of a strategy by derive.py; priced through lower.py, executed by
interpret.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from distplan.costmodel.graph import TP_DIMS, Segment, Weight
from distplan.costmodel.layout import CP, DATA, TP, Axes, Dims, Layout, placed

FSDP = ("dp_shard", *CP)
"""ZeRO stores a weight sharded on these, along its first dim"""
RINGS = ("ring", "two_level")
"""cp_kinds whose ranks send keys and values round"""
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
    beside: tuple[SegmentProgram, ...] = ()
    """the Programs of what stands with the segment"""


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
