"""What rows of strategies depend on: their combinations' places in the engine's stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.strategy import Floats, Strategies
from distplan.costmodel.tables import Engine, Ints, distinct, renumbered

LOCAL_FIELDS = ("tp", "cp", "cp_inner", "cp_kind", "ep", "etp", "sp", "micro_batch", "recompute")
"""what local costs depend on in the usual order of the mesh; see _local_columns"""
STATE_KEY = ("pp", "tp", "cp", "dp_replicate", "dp_shard", "ep", "etp")
STATE_FIELDS = (*STATE_KEY, "sp", "zero")
DEFAULT_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Places(Mapping[str, Floats]):
    """Arrays of a store at some places: `places[name]` is [..., combination], gathered when it is asked for."""

    arrays: Mapping[str, Floats]
    places: Ints

    def at(self, name: str, combinations: Ints) -> Floats:
        """Only these combinations, in this order."""
        return self.arrays[name][..., self.places[combinations]]

    def __getitem__(self, name: str) -> Floats:
        return self.arrays[name][..., self.places]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


@dataclass(frozen=True, slots=True)
class LocalTables:
    """`chosen` of each combination's structure, `plain` of the same without recomputation."""

    chosen: Places
    plain: Places
    index: Ints
    """combination of every row"""

    def of(self, rows: NDArray[np.intp]) -> LocalTables:
        """Only the combinations of these rows."""
        used, index = renumbered(self.index[rows], len(self.chosen.places))
        chosen = Places(self.chosen.arrays, self.chosen.places[used])
        return LocalTables(chosen, Places(self.plain.arrays, self.plain.places[used]), index)


@dataclass(frozen=True, slots=True)
class StateTables:
    tables: Mapping[str, Floats]
    zero: Floats
    gpus: Floats
    index: Ints

    def of(self, rows: NDArray[np.intp]) -> StateTables:
        used, index = renumbered(self.index[rows], len(self.zero))
        if len(used) < len(self.zero):
            tables = {name: values[..., used] for name, values in self.tables.items()}
            return StateTables(tables, self.zero[used], self.gpus[used], index)
        return StateTables(self.tables, self.zero, self.gpus, index)


def _local_columns(eng: Engine, rows: Strategies, gpus: Floats) -> dict[str, Floats]:
    """What local costs depend on. Outer axes matter only where the mesh order puts them inside tp or cp."""
    names = ("pp", "tp", "cp", "cp_inner", "dp_replicate", "dp_shard", "ep", "etp", "micro_batch")
    columns = {name: rows.degree(name) for name in names}
    if eng.runtime.mesh_order == DEFAULT_ORDER:
        ones = np.ones(len(rows))
        columns |= {name: ones for name in ("dp_replicate", "dp_shard", "pp")}
    codes = {name: rows.columns[name].astype(np.float64) for name in ("cp_kind", "sp", "recompute")}
    return codes | columns | {"gpus": gpus}


def local_tables(eng: Engine, rows: Strategies, gpus: Floats) -> LocalTables:
    """Costs per micro-batch of every row's (structure, tp, cp, micro_batch)."""
    columns = _local_columns(eng, rows, gpus)
    first, index = distinct(*columns.values())
    chosen = {name: column[first] for name, column in columns.items()}
    places = eng.local.find(chosen)
    alike, which = distinct(*(column for name, column in chosen.items() if name != "recompute"))
    plain = {name: column[alike] for name, column in chosen.items()} | {"recompute": np.zeros(len(alike))}
    without = eng.local.find(plain)[which]
    return LocalTables(Places(eng.local.arrays, places), Places(eng.local.arrays, without), index)


def state_tables(eng: Engine, rows: Strategies, gpus: Floats) -> StateTables:
    """Weights and their movements for every row's (sp, zero, tp, cp, dp_replicate, dp_shard, pp)."""
    columns = {name: rows.degree(name) for name in STATE_KEY} | {"gpus": gpus}
    columns |= {name: rows.columns[name].astype(np.float64) for name in ("sp", "zero")}
    first, index = distinct(*columns.values())
    at = {name: column[first] for name, column in columns.items()}
    places = eng.state.find(at)
    return StateTables(dict(Places(eng.state.arrays, places)), at["zero"], at["gpus"], index)
