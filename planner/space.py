"""The complete space of strategies for a GPU count, as columns, in a fixed order.

Two steps. `skeletons` enumerates what the degrees and the schedule can be; `expand` adds the options
(cp_kind, sp, zero, recompute) that a row's degrees leave open. Rules that read only the skeleton are
applied between the two, each row weighted by what it would expand to, so that counts are those of the
whole space while most of it is never built.

Canonical form, so that no program occurs twice: cp_inner > 1 exactly with cp_kind two_level, whose rows a bound on
cp_inner is for (without one it stays within a scale-up domain); an axis of degree 1 has no options (cp_kind none, sp
false, zero 0 where dp·cp = 1 or the group to shard over is 1); pp = 1 has schedule 1f1b; vpp > 1 exactly
with interleaved and zb_v (2); f_then_b is left out where 1f1b is the same order (one micro-batch); ZeRO-0 stores
nothing sharded, so of the splits of dp it has one: the largest dp_shard.

Bounds fix or list values of a field: degrees as whole numbers, options as their names, and `dp` for the
product. A bound is an order for what a row has: `--sp true` keeps the rows with tp = 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.strategy import CHUNKED, DEGREES, STRUCTURE, Floats, Strategies
from distplan.costmodel.tables import distinct
from distplan.hardware.errors import DistplanError, did_you_mean
from distplan.planner.constraints import OPTION_RULES, SKELETON_RULES, Context, apply
from distplan.planner.rules import per_stage_cut

Bounds = Mapping[str, Sequence[int | str | bool]]
Columns = dict[str, Floats]
"""of skeletons: degrees, the schedule's code and `first_split`, all float64"""
OPTIONS = ("cp_kind", "sp", "zero", "recompute")
CHUNK_ROWS = 1 << 17
MAX_TP_WITHOUT_HEADS = 1024


def check_bounds(bounds: Bounds) -> Bounds:
    """Bounds in one form: sorted ints, or names in the order of STRUCTURE. Raises DistplanError."""
    checked: dict[str, Sequence[int | str | bool]] = {}
    for name, values in bounds.items():
        if name in STRUCTURE:
            names = {str(value).lower() for value in values}
            unknown = sorted(names - set(STRUCTURE[name]))
            if unknown:
                raise DistplanError(f"{name}: unknown value '{unknown[0]}'{did_you_mean(unknown[0], STRUCTURE[name])}")
            checked[name] = tuple(value for value in STRUCTURE[name] if value in names)
        elif name in (*DEGREES, "dp"):
            wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, int) or value < 1]
            if wrong:
                raise DistplanError(f"{name}: {wrong[0]!r} is not a whole number of at least 1")
            checked[name] = tuple(sorted({int(value) for value in values}))
        else:
            raise DistplanError(f"unknown bound '{name}'{did_you_mean(name, (*DEGREES, *STRUCTURE, 'dp'))}")
    return checked


# ---------------------------------------------------------------- degrees and schedule


def skeletons(context: Context, bounds: Bounds) -> Columns:
    """Degrees and schedule of every row before its options; `first_split` marks the
    largest dp_shard of its (pp, tp, cp). Sorted by pp, tp, cp, cp_inner, dp_shard, ep, etp, schedule, vpp,
    micro_batch: a chunk has few pipelines, which the estimate groups by.
    """
    mesh = _meshes(context, bounds)
    mesh = _with_experts(mesh, context, bounds)
    schedules = {pp: _schedules(int(pp), context, bounds) for pp in np.unique(mesh["pp"])}
    mesh = _cross(mesh, "pp", schedules, ("schedule", "vpp"))
    mesh["dp"] = mesh["dp_replicate"] * mesh["dp_shard"]
    batches = {dp: [(float(b),) for b in _micro_batches(int(dp), context, bounds)] for dp in np.unique(mesh["dp"])}
    rows = _cross(mesh, "dp", batches, ("micro_batch",))
    return _without_repeats(rows, context)


def _meshes(context: Context, bounds: Bounds) -> Columns:
    found = []
    degrees = divisors(context.gpus)
    # beyond these a rule refuses every row: a rank without a head, a stage without a layer, no token
    most_tp = max(context.facts["heads"], default=MAX_TP_WITHOUT_HEADS)
    most_pp = context.facts["layers"] + context.facts["mtp_layers"] + 2
    kinds = {str(kind) for kind in bounds.get("cp_kind", context.runtime.legal["cp_kind"])}
    for pp in _allowed("pp", [d for d in degrees if d <= most_pp], bounds):
        for tp in _allowed("tp", [d for d in degrees if d <= most_tp], bounds):
            for cp in _allowed("cp", [d for d in degrees if d <= context.workload.seq_len], bounds):
                dp, rest = divmod(context.gpus, tp * pp * cp)
                if rest or dp not in bounds.get("dp", (dp,)):
                    continue
                shards = _shards(dp, cp, context.domain, bounds)
                levels = [1, *_inner(cp, kinds, context.domain, bounds)]
                found += [(tp, pp, cp, c, dp // n, n, n == max(shards)) for c in levels for n in shards]
    table = np.array(found, dtype=np.float64).reshape(-1, 7)
    names = ("tp", "pp", "cp", "cp_inner", "dp_replicate", "dp_shard", "first_split")
    return {name: table[:, i] for i, name in enumerate(names)}


def _inner(cp: int, kinds: Collection[str], domain: int, bounds: Bounds) -> list[int]:
    """What the inner of two levels may be: a divisor between 1 and cp, within a scale-up domain unless listed."""
    if "two_level" not in kinds:
        return []
    listed = bounds.get("cp_inner")
    return [d for d in divisors(cp)[1:-1] if (d <= domain if listed is None else d in listed)]


def _shards(dp: int, cp: int, domain: int, bounds: Bounds) -> list[int]:
    """dp_shard·cp is the whole group or one scale-up domain, unless the user lists more."""
    listed = [int(shard) for shard in bounds.get("dp_shard", ())]
    proposed = listed or sorted({dp} | ({domain // cp} if domain % cp == 0 and domain > 1 else set()))
    replicas = bounds.get("dp_replicate")
    return [shard for shard in proposed if dp % shard == 0 and (replicas is None or dp // shard in replicas)]


def _with_experts(mesh: Columns, context: Context, bounds: Bounds) -> Columns:
    experts = int(max(context.facts["experts"], default=0.0))
    if not experts:
        ones = [(float(ep), float(etp)) for ep in _allowed("ep", [1], bounds) for etp in _allowed("etp", [1], bounds)]
        mesh["one"] = np.ones(len(mesh["tp"]))
        return _cross(mesh, "one", {np.float64(1.0): ones}, ("ep", "etp"))
    ranks = mesh["dp_replicate"] * mesh["dp_shard"] * mesh["cp"] * mesh["tp"]
    mesh["ranks_tp"] = ranks * 2.0**20 + mesh["tp"]
    options = {}
    for key in np.unique(mesh["ranks_tp"]):
        n, tp = divmod(int(key), 2**20)
        options[key] = [
            (float(ep), float(etp))
            for ep in _allowed("ep", [d for d in divisors(n) if d <= experts], bounds)
            for etp in _allowed("etp", sorted({1, tp}), bounds)
        ]
    return _cross(mesh, "ranks_tp", options, ("ep", "etp"))


def _schedules(pp: int, context: Context, bounds: Bounds) -> list[tuple[float, float]]:
    """(schedule code, vpp) for pp stages."""
    names = STRUCTURE["schedule"]
    if pp == 1:
        return [(float(names.index("1f1b")), 1.0)] if 1 in bounds.get("vpp", (1,)) else []
    chosen = [str(value) for value in bounds.get("schedule", context.runtime.legal["schedule"])]
    found = []
    for name in sorted(chosen, key=names.index):
        vpps = _vpps(pp, context) if name == "interleaved" else [2 if name in CHUNKED else 1]
        wanted = [v for v in _allowed("vpp", vpps, bounds) if (v > 1) == (name in CHUNKED)]
        wanted = [v for v in wanted if name != "zb_v" or v == 2]
        found += [(float(names.index(name)), float(vpp)) for vpp in wanted]
    return found


def _vpps(pp: int, context: Context) -> list[int]:
    """2, and all values at which chunks can be equal however embedding and loss are counted."""
    layers = context.facts["layers"]
    values = np.arange(2.0, np.floor((layers + 2.0) / pp) + 1.0)
    return [int(value) for value in values if value == 2 or per_stage_cut(pp * value, layers)]


def _micro_batches(dp: int, context: Context, bounds: Bounds) -> list[int]:
    """Every divisor of a rank's share of the batch; 1 where there is no whole share, for DP011 to refuse."""
    share, rest = divmod(context.workload.global_batch, dp)
    return _allowed("micro_batch", [1] if rest or not share else divisors(share), bounds)


def _without_repeats(rows: Columns, context: Context) -> Columns:
    f_then_b = rows["schedule"] == STRUCTURE["schedule"].index("f_then_b")
    if "1f1b" not in context.runtime.legal["schedule"] or context.runtime.rules["micro_batches"] != "any":
        return rows
    single = rows["micro_batch"] * rows["dp"] == context.workload.global_batch
    keep = ~(f_then_b & single)
    return {name: column[keep] for name, column in rows.items()}


def _allowed(name: str, proposed: list[int], bounds: Bounds) -> list[int]:
    return [int(value) for value in bounds[name]] if name in bounds else proposed


def divisors(n: int) -> list[int]:
    """Sorted divisors of n >= 1."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _cross(
    rows: Columns, key: str, options: Mapping[np.float64, Sequence[tuple[float, ...]]], names: tuple[str, ...]
) -> Columns:
    """Every row once per option of its key's list, in order; the options become columns `names`."""
    keys = sorted(options)
    sizes = np.array([len(options[k]) for k in keys], dtype=np.int64)
    table = np.array([option for k in keys for option in options[k]], dtype=np.float64).reshape(-1, len(names))
    which = np.searchsorted(np.array(keys, dtype=np.float64), rows[key])
    row, option = _ragged(which, sizes)
    crossed = {name: column[row] for name, column in rows.items()}
    return crossed | {name: table[option, i] for i, name in enumerate(names)}


def _ragged(which: NDArray[np.intp], sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, index into the concatenated lists) for every row and every entry of its list `which`."""
    counts = sizes[which] if len(sizes) else np.zeros(len(which), dtype=np.int64)
    starts = (np.cumsum(sizes) - sizes)[which] if len(sizes) else counts
    row = np.repeat(np.arange(len(which)), counts)
    first = np.cumsum(counts) - counts
    return row, np.arange(len(row)) + (starts - first)[row]


# ---------------------------------------------------------------- options


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of every class of row: combinations, and where a class's begin."""

    table: NDArray[np.int8]
    """(combination, OPTIONS)"""
    sizes: NDArray[np.int64]


def _options(context: Context, bounds: Bounds) -> _Options:
    def codes(name: str) -> list[int]:
        return [STRUCTURE[name].index(str(v)) for v in bounds.get(name, context.runtime.legal[name])]

    none = STRUCTURE["cp_kind"].index("none")
    two = STRUCTURE["cp_kind"].index("two_level")
    kinds = [[none], [code for code in codes("cp_kind") if code not in (none, two)], [two]]
    sps = [[0], codes("sp")]
    zeros = [[0], codes("zero"), [code for code in codes("zero") if code > 0]]
    combinations, sizes = [], []
    for zero in zeros:
        for sp in sps:
            for kind in kinds:
                rows = [(k, s, z, r) for k in kind for s in sp for z in zero for r in codes("recompute")]
                combinations += rows
                sizes.append(len(rows))
    table = np.array(combinations, dtype=np.int8).reshape(-1, len(OPTIONS))
    return _Options(table, np.array(sizes, dtype=np.int64))


def _classes(rows: Columns) -> NDArray[np.intp]:
    """Which list of options a row has: (zero: none to shard | all | all but 0) x (tp > 1) x (levels of cp)."""
    sharded = rows["dp_shard"] * rows["cp"] > 1
    first = rows["first_split"] == 1
    zero = np.where(sharded, np.where(first, 1, 2), 0)
    levels = (rows["cp"] > 1).astype(np.intp) + (rows["cp_inner"] > 1)
    return np.asarray(zero * 6 + (rows["tp"] > 1) * 3 + levels, dtype=np.intp)


def _without_repeated_zero(rows: Columns) -> Columns:
    """A split that shards over a group of one is ZeRO-0, which the largest dp_shard already is."""
    sharded = rows["dp_shard"] * rows["cp"] > 1
    keep = sharded | (rows["first_split"] == 1)
    return {name: column[keep] for name, column in rows.items()}


def _expand(rows: Columns, options: _Options) -> Strategies:
    row, option = _ragged(_classes(rows), options.sizes)
    columns: dict[str, NDArray[np.generic]] = {name: rows[name][row] for name in DEGREES}
    columns["schedule"] = rows["schedule"].astype(np.int8)[row]
    columns |= {name: options.table[option, i] for i, name in enumerate(OPTIONS)}
    return Strategies(columns)


# ---------------------------------------------------------------- the space


@dataclass(frozen=True, slots=True)
class Space:
    """What is left of the skeletons, and what was counted on the way."""

    rows: Columns
    weights: NDArray[np.int64]
    options: _Options
    enumerated: int
    rejected: Mapping[str, int]

    def distinct(self, names: Sequence[str]) -> Strategies:
        """A row of each combination that these fields have, some of which option rules may refuse."""
        degrees = [self.rows[name] for name in names if name in self.rows]
        first, _ = distinct(_classes(self.rows), *degrees)
        rows = _expand({name: column[first] for name, column in self.rows.items()}, self.options)
        return rows.take(distinct(*(rows.columns[name] for name in names))[0])

    def chunks(self, chunk_rows: int = CHUNK_ROWS) -> Iterator[Strategies]:
        """Whole rows, about `chunk_rows` at a time, in order; option rules are not applied yet."""
        ends = np.cumsum(self.weights)
        start = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + chunk_rows, side="right")))
            yield _expand({name: column[start:stop] for name, column in self.rows.items()}, self.options)
            start = stop


def space(context: Context, bounds: Bounds) -> Space:
    """Enumerate, and refuse what the skeleton alone decides. Raises DistplanError for a wrong bound."""
    bounds = check_bounds(bounds)
    options = _options(context, bounds)
    rows = _without_repeated_zero(skeletons(context, bounds))
    weights = options.sizes[_classes(rows)]
    degrees = Strategies({name: rows[name] for name in (*DEGREES, "schedule")})
    legal, counts = apply(degrees, context, rules=SKELETON_RULES, weight=weights)
    legal &= weights > 0
    left = {name: column[legal] for name, column in rows.items()}
    return Space(left, weights[legal], options, int(weights.sum()), counts)


def legal_chunks(
    found: Space, context: Context, counts: dict[str, int], chunk_rows: int = CHUNK_ROWS
) -> Iterator[Strategies]:
    """Legal rows chunk by chunk; what the option rules refuse is added to `counts`."""
    for rows in found.chunks(chunk_rows):
        legal, rejected = apply(rows, context, rules=OPTION_RULES)
        for code, count in rejected.items():
            counts[code] = counts.get(code, 0) + count
        yield rows if legal.all() else rows.take(legal)


def enumerate_all(context: Context, bounds: Bounds) -> Strategies:
    """Every row of the space, the illegal ones too, at once: small spaces and tests."""
    bounds = check_bounds(bounds)
    rows = _without_repeated_zero(skeletons(context, bounds))
    return _expand(rows, _options(context, bounds))
