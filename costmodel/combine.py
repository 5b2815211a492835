"""Tables of all structures side by side, so that rows of different structures are gathered together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.strategy import STRUCTURE, Floats, Strategies
from distplan.costmodel.tables import Engine, Ints, Store, distinct, renumbered

STATE_KEY = ("pp", "tp", "cp", "dp_replicate", "dp_shard", "ep", "etp")
DEFAULT_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class LocalTables:
    """`chosen` of each combination's structure, `plain` of the same without recomputation; arrays [..., combination]."""

    chosen: Mapping[str, Floats]
    plain: Mapping[str, Floats]
    index: Ints
    """combination of every row"""

    def of(self, rows: NDArray[np.intp]) -> LocalTables:
        """Only the combinations of these rows."""
        used, index = renumbered(self.index[rows], self.chosen["boundary"].shape[-1])
        return LocalTables(_taken(self.chosen, used), _taken(self.plain, used), index)


@dataclass(frozen=True, slots=True)
class StateTables:
    tables: Mapping[str, Floats]
    zero: Floats
    gpus: Floats
    index: Ints

    def of(self, rows: NDArray[np.intp]) -> StateTables:
        used, index = renumbered(self.index[rows], len(self.zero))
        return StateTables(_taken(self.tables, used), self.zero[used], self.gpus[used], index)


def _taken(tables: Mapping[str, Floats], places: Ints) -> dict[str, Floats]:
    return {name: values[..., places] for name, values in tables.items()}


def _local_columns(eng: Engine, rows: Strategies, gpus: Floats) -> dict[str, Floats]:
    """What local costs depend on. Outer axes matter only where the mesh order puts them inside tp or cp."""
    names = ("pp", "tp", "cp", "dp_replicate", "dp_shard", "ep", "etp", "micro_batch")
    columns = {name: rows.degree(name) for name in names}
    if eng.runtime.mesh_order == DEFAULT_ORDER:
        ones = np.ones(len(rows))
        columns |= {name: ones for name in ("dp_replicate", "dp_shard", "pp")}
    return columns | {"gpus": gpus}


def local_tables(eng: Engine, rows: Strategies, gpus: Floats) -> LocalTables:
    """Costs per micro-batch of every row's (structure, tp, cp, micro_batch)."""
    columns = _local_columns(eng, rows, gpus)
    names = ("sp", "cp_kind", "recompute")
    first, index = distinct(*columns.values(), *(rows.columns[name] for name in names))
    at = {name: column[first] for name, column in columns.items()}
    codes = [rows.columns[name][first] for name in names]

    def stores(recompute: NDArray[np.generic]) -> Mapping[str, Floats]:
        def store(key: Sequence[str]) -> Store:
            return eng.local_store(key[0], key[1], key[2])

        return _side_by_side(store, ("sp", "cp_kind", "recompute"), [codes[0], codes[1], recompute], at)

    return LocalTables(stores(codes[2]), stores(np.zeros_like(codes[2])), index)


def state_tables(eng: Engine, rows: Strategies, gpus: Floats) -> StateTables:
    """Weights and their movements for every row's (sp, zero, tp, cp, dp_replicate, dp_shard, pp)."""
    columns = {name: rows.degree(name) for name in STATE_KEY} | {"gpus": gpus}
    first, index = distinct(*columns.values(), rows.columns["sp"], rows.columns["zero"])
    at = {name: column[first] for name, column in columns.items()}
    codes = [rows.columns["sp"][first], rows.columns["zero"][first]]

    def store(key: Sequence[str]) -> Store:
        return eng.state_store(key[0], key[1])

    tables = _side_by_side(store, ("sp", "zero"), codes, at)
    return StateTables(tables, codes[1].astype(np.float64), at["gpus"], index)


def _side_by_side(
    store: object, names: Sequence[str], codes: Sequence[NDArray[np.generic]], columns: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Arrays [..., combination] from the store of each combination's structure."""
    total = len(codes[0])
    _, group = distinct(*codes)
    tables: dict[str, Floats] = {}
    for number in range(int(group.max(initial=-1)) + 1):
        members = np.flatnonzero(group == number)
        key = [STRUCTURE[name][int(code[members[0]])] for name, code in zip(names, codes, strict=True)]
        found = store(key)  # type: ignore[operator]
        places = found.find({name: column[members] for name, column in columns.items()})
        for name, values in found.arrays.items():
            if name not in tables:
                tables[name] = np.empty((*values.shape[:-1], total))
            tables[name][..., members] = values[..., places]
    return tables
