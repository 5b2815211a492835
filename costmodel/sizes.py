"""Local sizes of tensors as numbers: dims divided by the degrees of the axes that shard them.

A `Size` is a constant times the dims that vary from strategy to strategy (micro_batch, the vocabulary,
which is padded to a multiple of tp, and the load of the fullest rank of experts), divided by degrees.
All sizes of a Program are collected in one table and evaluated once for all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distplan.costmodel.layout import CP, DATA, EXPERT, MESH_AXES, TP, Axes, Layout
from distplan.costmodel.strategy import Floats

BY_EXPERTS = (*EXPERT, "load")
"""symbols that change with the degrees of the expert axes"""


@dataclass(frozen=True, slots=True)
class Size:
    constant: float
    varying: tuple[str, ...]
    axes: Axes


def size_of(dims: Iterable[tuple[str, Axes]], sizes: Mapping[str, float]) -> Size:
    """Local elements of a product of (dim, axes that shard it).

    The batch dim is micro_batch per data rank. `capacity` are the slots per expert of one sequence: sharded
    on all expert axes, which are the dense axes, it is 1/(cp·tp) of micro_batch sequences' slots; whole on
    ep or etp it is that many times more.
    """
    constant = 1.0
    varying: list[str] = []
    axes: list[str] = []
    for dim, sharded in dims:
        axes += sharded
        if dim == "batch":
            varying.append("micro_batch")
            axes = [axis for axis in axes if axis not in DATA]
        elif dim == "vocab":
            varying.append("vocab")
        elif dim == "capacity":
            constant *= sizes[dim]
            varying += ["micro_batch", *(["load"] if "dropless" in sizes else [])]
            varying += [axis for axis in ("ep", "etp") if axis not in sharded]
            axes = [axis for axis in axes if axis not in sharded] + [*CP, *TP]
        else:
            constant *= sizes[dim]
    return Size(constant, tuple(sorted(varying)), tuple(sorted(axes)))


@dataclass(frozen=True, slots=True)
class PaddedSize:
    """`rows` split over `axes` and rounded up to whole rows per rank, times `rest` and the degrees of `times`.

    It is the shard of the rank that has most; with `times` = `axes` it is the padded whole.
    """

    rows: Size
    axes: Axes
    rest: Size
    times: Axes


def layout_size(layout: Layout, sizes: Mapping[str, float]) -> Size:
    return size_of(zip(layout.dims, layout.shards, strict=True), sizes)


@dataclass(slots=True)
class SizeTable:
    """Distinct sizes, numbered as they are met."""

    index: dict[Size | PaddedSize, int] = field(default_factory=dict)

    def number(self, size: Size | PaddedSize) -> int:
        return self.index.setdefault(size, len(self.index))

    def following(self, symbols: Sequence[str]) -> frozenset[int]:
        """Numbers of the sizes that depend on one of these symbols."""
        return frozenset(at for size, at in self.index.items() if not _symbols(size).isdisjoint(symbols))

    def evaluate(self, symbols: Mapping[str, Floats]) -> Floats:
        """Array [number of sizes, rows] of elements; `symbols` are varying dims and axis degrees."""
        rows = max(len(values) for values in symbols.values())
        table = np.empty((len(self.index), rows))
        for size, position in self.index.items():
            table[position] = _padded(size, symbols) if isinstance(size, PaddedSize) else _elements(size, symbols)
        return table


def _symbols(size: Size | PaddedSize) -> set[str]:
    if isinstance(size, PaddedSize):
        return {*size.axes, *size.times} | _symbols(size.rows) | _symbols(size.rest)
    return {*size.varying, *size.axes}


def _elements(size: Size, symbols: Mapping[str, Floats]) -> Floats | float:
    value: Floats | float = size.constant
    for name in size.varying:
        value = value * symbols[name]
    for axis in size.axes:
        value = value / symbols[axis]
    return value


def _padded(size: PaddedSize, symbols: Mapping[str, Floats]) -> Floats:
    rows = _elements(size.rows, symbols)
    for axis in size.axes:
        rows = rows / symbols[axis]
    value: Floats = np.ceil(rows) * _elements(size.rest, symbols)
    for axis in size.times:
        value = value * symbols[axis]
    return value


def mesh_symbols(columns: Mapping[str, Floats], kv_heads: float, cp_kind: str) -> dict[str, Floats]:
    """Degrees of the mesh axes from those of the strategy: tp and cp in their _kv and _rep parts.

    Two-level context parallelism has its ring on the first part of cp and its all-to-all on the second, between
    neighbours.
    """
    tp, cp = columns["tp"], columns["cp"]
    tp_kv = np.minimum(tp, kv_heads)
    cp_kv = cp
    if cp_kind == "ulysses":
        cp_kv = np.minimum(cp, np.maximum(1.0, np.floor(kv_heads / tp_kv)))
    elif cp_kind == "two_level":
        cp_kv = cp / columns["cp_inner"]
    symbols = {name: columns[name] for name in ("pp", *DATA, "ep", "etp")}
    ranks = (columns["dp_replicate"] * columns["dp_shard"]) * (cp * tp)
    symbols["edp"] = ranks / (columns["ep"] * columns["etp"])
    return symbols | {"tp_kv": tp_kv, "tp_rep": tp / tp_kv, "cp_kv": cp_kv, "cp_rep": cp / cp_kv}


def mesh_strides(symbols: Mapping[str, Floats], order: tuple[str, ...]) -> dict[str, Floats]:
    """Distance in ranks between neighbours on each axis; `order` names dense axes outermost first.

    Expert axes are edp, ep, etp from outside in, within a stage (Megatron-LM, parallel_state.py).
    """
    axes = [
        part
        for name in order
        for part in {"tp": TP, "cp": CP}.get(name, (name,))
        if part in MESH_AXES and part not in EXPERT
    ]
    strides: dict[str, Floats] = {}
    stride = np.ones_like(symbols["pp"])
    for axis in reversed(axes):
        strides[axis] = stride
        stride = stride * symbols[axis]
    one = np.ones_like(stride)
    return strides | {"etp": one, "ep": symbols["etp"], "edp": symbols["etp"] * symbols["ep"]}


def padded_vocab(vocab: float, multiple: float, tp: Floats) -> Floats:
    """Rows of the vocabulary after padding to a multiple of `multiple`·tp (Megatron-LM, arguments.py:
    --make-vocab-size-divisible-by)."""
    step = multiple * tp
    return np.ceil(vocab / step) * step
