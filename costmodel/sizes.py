"""Local sizes of tensors as numbers: dims divided by the degrees of the axes that shard them.

A `Size` is a constant times the dims that vary from strategy to strategy (micro_batch, and the
vocabulary, which is padded to a multiple of tp), divided by degrees. All sizes of a Program are
collected in one table and evaluated once for all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from distplan.costmodel.layout import CP, DATA, MESH_AXES, TP, Axes, Layout
from distplan.costmodel.strategy import Floats

VARYING = ("micro_batch", "vocab")


@dataclass(frozen=True, slots=True)
class Size:
    constant: float
    varying: tuple[str, ...]
    axes: Axes


def size_of(dims: Iterable[tuple[str, Axes]], sizes: Mapping[str, float]) -> Size:
    """Local elements of a product of (dim, axes that shard it).

    The batch dim is micro_batch per data rank: sharded on every data axis it is micro_batch, and
    whole on one it is that many times more.
    """
    constant, varying, axes = 1.0, [], []
    for dim, sharded in dims:
        axes += sharded
        if dim == "batch":
            varying.append("micro_batch")
            axes = [axis for axis in axes if axis not in DATA]
        elif dim == "vocab":
            varying.append("vocab")
        else:
            constant *= sizes[dim]
    return Size(constant, tuple(sorted(varying)), tuple(sorted(axes)))


def layout_size(layout: Layout, sizes: Mapping[str, float]) -> Size:
    return size_of(zip(layout.dims, layout.shards, strict=True), sizes)


@dataclass(slots=True)
class SizeTable:
    """Distinct sizes, numbered as they are met."""

    index: dict[Size, int] = field(default_factory=dict)

    def number(self, size: Size) -> int:
        return self.index.setdefault(size, len(self.index))

    def evaluate(self, symbols: Mapping[str, Floats]) -> Floats:
        """Array [number of sizes, rows] of elements; `symbols` are varying dims and axis degrees."""
        rows = max(len(values) for values in symbols.values())
        table = np.empty((len(self.index), rows))
        for size, position in self.index.items():
            value: Floats | float = size.constant
            for name in size.varying:
                value = value * symbols[name]
            for axis in size.axes:
                value = value / symbols[axis]
            table[position] = value
        return table


def mesh_symbols(columns: Mapping[str, Floats], kv_heads: float, ulysses: bool) -> dict[str, Floats]:
    """Degrees of the mesh axes from those of the strategy: tp and cp in their _kv and _rep parts."""
    tp, cp = columns["tp"], columns["cp"]
    tp_kv = np.minimum(tp, kv_heads)
    cp_kv = np.minimum(cp, np.maximum(1.0, np.floor(kv_heads / tp_kv))) if ulysses else cp
    symbols = {name: columns[name] for name in ("pp", *DATA)}
    return symbols | {"tp_kv": tp_kv, "tp_rep": tp / tp_kv, "cp_kv": cp_kv, "cp_rep": cp / cp_kv}


def mesh_strides(symbols: Mapping[str, Floats], order: tuple[str, ...]) -> dict[str, Floats]:
    """Distance in ranks between neighbours on each axis; `order` names axes outermost first."""
    axes = [part for name in order for part in {"tp": TP, "cp": CP}.get(name, (name,)) if part in MESH_AXES]
    strides: dict[str, Floats] = {}
    stride = np.ones_like(symbols["pp"])
    for axis in reversed(axes):
        strides[axis] = stride
        stride = stride * symbols[axis]
    return strides


def padded_vocab(vocab: float, multiple: float, tp: Floats) -> Floats:
    """Rows of the vocabulary after padding to a multiple of `multiple`·tp (Megatron-LM, arguments.py:
    --make-vocab-size-divisible-by)."""
    step = multiple * tp
    return np.ceil(vocab / step) * step
