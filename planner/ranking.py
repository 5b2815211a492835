"""Which of many candidates come first: objectives as columns, a deterministic order, the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.estimate import Estimate
from distplan.costmodel.strategy import DEGREES, STRUCTURE, Floats, Strategies

_POWERS = 10.0 ** np.arange(-30.0, 31.0)
ORDER = (
    "dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "cp_inner", "cp_kind", "ep", "etp", "sp", "zero",
    "micro_batch", "schedule", "recompute",
)  # fmt: skip
"""the last word between candidates of equal value and time: smaller first, column by column"""


@dataclass(frozen=True, slots=True)
class Pool:
    """Candidates of one or more cases, with the few columns that rank them (equal lengths)."""

    rows: Strategies
    columns: Mapping[str, Floats]
    """gpus, global_batch, step_seconds, tokens, device_bytes, over (bytes above what is usable)"""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Pool:
        return Pool(self.rows.take(rows), {name: column[rows] for name, column in self.columns.items()})


def pool_of(rows: Strategies, estimate: Estimate, *, gpus: int, global_batch: int, allow_tight: bool) -> Pool:
    """What ranks a chunk of priced rows. `over` reads what the verdict must read: the high end, or with
    allow_tight the expected bytes."""
    reading = estimate.device_bytes if allow_tight else estimate.device_bytes_high
    columns = {
        "gpus": np.full(len(rows), float(gpus)),
        "global_batch": np.full(len(rows), float(global_batch)),
        "step_seconds": estimate.step_seconds,
        "tokens": estimate.tokens,
        "device_bytes": estimate.device_bytes,
        "over": reading - estimate.usable_bytes,
    }
    return Pool(rows, columns)


def joined(pools: list[Pool]) -> Pool:
    """Pools end to end (at least one)."""
    names = (*DEGREES, *STRUCTURE)
    rows = {name: np.concatenate([pool.rows.columns[name] for pool in pools]) for name in names}
    columns = {name: np.concatenate([pool.columns[name] for pool in pools]) for name in pools[0].columns}
    return Pool(Strategies(rows), columns)


def rounded(values: Floats) -> Floats:
    """Non-negative values to six significant decimal digits: what counts as equal."""
    finite = np.isfinite(values) & (values > 0)
    power = np.clip(np.searchsorted(_POWERS, values, side="right") - 1, 5, len(_POWERS) - 1)
    step = _POWERS[power - 5]
    return np.where(finite, np.rint(np.where(finite, values, 0.0) / step) * step, values)


def value(pool: Pool, objective: str) -> Floats:
    """What the objective makes small. step-time, pareto: seconds per token (that of a step where one global
    batch is searched, up to a constant); memory: bytes; gpus: GPUs; cost: GPU·seconds per token.
    """
    per_token = pool.columns["step_seconds"] / pool.columns["tokens"]
    if objective == "memory":
        return pool.columns["device_bytes"]
    if objective == "gpus":
        return pool.columns["gpus"]
    return per_token * pool.columns["gpus"] if objective == "cost" else per_token


def in_order(pool: Pool, objective: str) -> NDArray[np.intp]:
    """Indices, best first: value, then time, both rounded, then GPUs, batch and the fields in ORDER."""
    time = rounded(value(pool, "step-time"))
    last = [pool.columns["gpus"], pool.columns["global_batch"], *(pool.rows.columns[name] for name in ORDER)]
    keys = [rounded(value(pool, objective)), time, *last]
    return np.lexsort(tuple(reversed(keys)))


def best(pool: Pool, objective: str, count: int) -> Pool:
    """The `count` first, in order; for pareto the whole front instead."""
    if objective == "pareto":
        pool = front(pool)
        return pool.take(in_order(pool, objective))
    values = value(pool, objective)
    if len(pool) > 4 * count:
        # equal after rounding must stay in; 2e-5 is wider than half a step of six digits
        bound = np.partition(values, count - 1)[count - 1] * (1.0 + 2e-5)
        pool = pool.take(values <= bound)
    return pool.take(in_order(pool, objective)[:count])


def front(pool: Pool) -> Pool:
    """Candidates that no other beats in time per token and bytes with no more GPUs (equals: the first)."""
    pool = pool.take(_near_front(pool))
    time, memory = rounded(value(pool, "step-time")), rounded(pool.columns["device_bytes"])
    last = [pool.rows.columns[name] for name in ORDER]
    order = np.lexsort((*reversed(last), pool.columns["global_batch"], memory, time, pool.columns["gpus"]))
    kept: list[np.intp] = []
    counts = pool.columns["gpus"][order]
    for gpus in np.unique(counts):
        part = order[counts == gpus]
        lowest = np.minimum.accumulate(memory[part])
        falls = np.ones(len(part), dtype=np.bool_)
        falls[1:] = lowest[1:] < lowest[:-1]
        kept += [i for i in part[falls] if not _beaten(i, kept, time, memory)]
    return pool.take(np.array(kept, dtype=np.intp))


def _near_front(pool: Pool) -> NDArray[np.bool_]:
    """A superset of the front, by exact values with room for rounding: spares most rows the full sort."""
    time, memory = value(pool, "step-time"), pool.columns["device_bytes"]
    near = np.zeros(len(pool), dtype=np.bool_)
    for gpus in np.unique(pool.columns["gpus"]):
        part = np.flatnonzero(pool.columns["gpus"] == gpus)
        part = part[np.lexsort((memory[part], time[part]))]
        near[part] = memory[part] <= np.minimum.accumulate(memory[part]) * (1.0 + 2e-5)
    return near


def _beaten(i: np.intp, kept: list[np.intp], time: Floats, memory: Floats) -> bool:
    others = np.array(kept, dtype=np.intp)
    return bool(np.any((time[others] <= time[i]) & (memory[others] <= memory[i])))
