"""A parallel strategy: the same field names on the command line, in YAML, JSON and Python.

`Strategies` is the one form that formulas see: a float64 column per degree and an object column of
names per structure field. A single `Strategy` is a batch of one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distplan.hardware.errors import UnknownNameError

Floats = NDArray[np.float64]

CHUNKED = ("interleaved", "zb_v")
"""schedules whose stages hold several chunks"""
V_SHAPED = frozenset({"zb_v", "dualpipe_v"})
"""those of them whose stages hold two, laid out as a V (stages.py)"""
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "cp_inner", "ep", "etp", "micro_batch")
STRUCTURE: Mapping[str, tuple[str, ...]] = {
    "cp_kind": ("none", "ring", "all_gather", "ulysses", "two_level"),
    "sp": ("false", "true"),
    "zero": ("0", "1", "2", "3"),
    "schedule": ("f_then_b", "1f1b", "interleaved", "zb_h1", "zb_v"),
    "recompute": ("none", "selective", "full"),
}
"""Legal values of the structure fields; a column holds the index into its tuple (int8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    cp_inner: int = 1
    """neighbours of cp that turn tokens to heads, where cp_kind is two_level; 1 elsewhere"""
    cp_kind: str = "none"
    ep: int = 1
    etp: int = 1
    sp: bool = False
    zero: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    recompute_layers: int = 0
    """layers per stage that recompute = full repeats; 0 = the least that fits"""
    stage_layers: tuple[int, ...] = ()
    """a cut by hand: layers of every chunk in the order of the model (v·pp + s is the v-th chunk of stage s);
    () = as the runtime cuts"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage_layers", tuple(self.stage_layers))  # a list from Python or YAML is as good

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True, slots=True)
class Strategies:
    """Columns of equal length: float64 for every degree, int8 codes for every structure field.

    Rows cut by hand have the columns `cut` (index into `cuts`; 0 = as the runtime cuts), and the number, sum and least
    inner of its chunks' layers for the rules.
    """

    columns: Mapping[str, NDArray[np.generic]]
    cuts: tuple[tuple[int, ...], ...] = ((),)

    @staticmethod
    def of(strategies: Iterable[Strategy]) -> Strategies:
        """Raises UnknownNameError for a word that a field does not have."""
        rows = list(strategies)
        columns: dict[str, NDArray[np.generic]] = {
            name: np.array([float(getattr(row, name)) for row in rows], dtype=np.float64) for name in DEGREES
        }
        for name, values in STRUCTURE.items():
            words = [str(getattr(row, name)).lower() for row in rows]
            for word in words:
                if word not in values:
                    raise UnknownNameError(name, word, values)
            codes = [values.index(word) for word in words]
            columns[name] = np.array(codes, dtype=np.int8)
        columns["recompute_layers"] = np.array([float(row.recompute_layers) for row in rows], dtype=np.float64)
        cuts = tuple(dict.fromkeys(((), *(row.stage_layers for row in rows))))
        if len(cuts) > 1:
            columns["cut"] = np.array([float(cuts.index(row.stage_layers)) for row in rows])
            columns["cut_chunks"] = np.array([float(len(row.stage_layers)) for row in rows])
            columns["cut_layers"] = np.array([float(sum(row.stage_layers)) for row in rows])
            columns["cut_least"] = np.array([float(min(row.stage_layers[1:-1], default=1)) for row in rows])
        return Strategies(columns, cuts)

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def __getitem__(self, index: int) -> Strategy:
        values: dict[str, Any] = {}
        for f in fields(Strategy):
            if f.name == "stage_layers":
                values[f.name] = self.cuts[int(self.cut[index])]
                continue
            if f.name == "recompute_layers":
                values[f.name] = int(self.recompute_layers[index])
                continue
            value = self.columns[f.name][index]
            if f.name in DEGREES:
                values[f.name] = int(value)
            else:
                name = STRUCTURE[f.name][int(value)]
                plain: dict[str, Any] = {"sp": name == "true", "zero": int(name) if name.isdigit() else 0}
                values[f.name] = plain.get(f.name, name)
        return Strategy(**values)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Strategies:
        return Strategies({name: column[rows] for name, column in self.columns.items()}, self.cuts)

    @property
    def cut(self) -> Floats:
        """Index into `cuts` of every row."""
        column = self.columns.get("cut")
        return np.zeros(len(self)) if column is None else column.astype(np.float64, copy=False)

    @property
    def recompute_layers(self) -> Floats:
        """Zeros (solved) where the column is not given."""
        column = self.columns.get("recompute_layers")
        return np.zeros(len(self)) if column is None else column.astype(np.float64, copy=False)

    @property
    def gpus(self) -> Floats:
        return (
            self.degree("dp_replicate")
            * self.degree("dp_shard")
            * self.degree("tp")
            * self.degree("pp")
            * self.degree("cp")
        )

    def degree(self, name: str) -> Floats:
        return self.columns[name].astype(np.float64, copy=False)
