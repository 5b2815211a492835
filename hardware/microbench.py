"""Micro-benchmarks of a user's own: bench.json, as the emitted script writes it, and the text of nccl-tests.

Both are read without trust: what is negative, not a number, without a unit's sense or of another device is refused,
with the line. Sizes of collectives are nccl-tests' (the full buffer, also for all_gather).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from distplan.hardware.cluster import Cluster
from distplan.hardware.documents import Document, load_mapping, no_other_keys, read_text, take
from distplan.hardware.errors import DistplanError, DocumentError
from distplan.hardware.fit_collectives import COLLECTIVES, CollectiveRow

FORMAT = "distplan-bench 1"
NAMES_FILE = Path(__file__).parent / "data" / "device_names.yaml"
MOST_ROWS = 5_000
_LONGEST = 3600.0
"""seconds; a single kernel or collective takes less"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRow:
    """[m, k] x [k, n] in one kernel; `settled`: in the last part of a run long enough for the clocks to settle."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float
    settled: bool = False
    groups: int = 1
    accumulate_fp32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """Flash attention in one direction over whole sequences; `kernel`: flash1 | flash2 | flash3 (or cuDNN's)."""

    work: str
    kernel: str
    batch: int
    heads: int
    head_dim: int
    length: int
    causal: bool
    seconds: float

    @property
    def flops_full(self) -> float:
        """FLOPs of the two forward products over the whole square of scores: 4 b h s² d."""
        return 4.0 * self.batch * self.heads * float(self.length) ** 2 * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRow:
    """`bytes` moved (device: read and written) in one copy; `path`: device | host."""

    path: str
    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What one file measured. `device` is empty where the file does not say."""

    file: str
    date: str
    device: str
    gemm: tuple[GemmRow, ...] = ()
    attention: tuple[AttentionRow, ...] = ()
    copies: tuple[CopyRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    smoke: bool = False
    """tiny shapes on a CPU, to see that the script works"""
    context: dict[str, float] = field(default_factory=dict)
    """bytes outside the allocator after `cuda` and after `nccl` was initialised"""

    @property
    def source(self) -> str:
        name = Path(self.file).name
        return f"{name}, {self.date}" if self.date else name


def read_bench(path: str) -> Bench:
    """A bench.json. Raises DocumentError."""
    doc = load_mapping(path)
    no_other_keys(doc, ("format", "date", "device", "versions", "ranks", "nodes", "smoke", "measurements"))
    take(doc, "format", str, choices=(FORMAT,))
    take(doc, "versions", dict, default={})
    for name in ("ranks", "nodes"):
        take(doc, name, int, default=1, minimum=1)
    take(doc, "measurements", list)
    rows: dict[str, list[Any]] = {name: [] for name in (*_KINDS, "context")}
    for entry in doc.section("measurements").items():
        if not isinstance(entry.value, dict):
            raise entry.error("expected keys and values")
        kind = take(entry, "kind", str, choices=tuple(rows))
        rows[kind].append(_context(entry) if kind == "context" else _KINDS[kind](entry))
        if kind == "context" and len(dict(rows[kind])) < len(rows[kind]):
            raise entry.error(f"the context after {rows[kind][-1][0]} is given twice", "after")
    if not doc.value["measurements"]:
        raise doc.error("holds no measurement", "measurements")
    return Bench(
        file=path,
        date=take(doc, "date", str)[:10],
        device=take(doc, "device", str),
        gemm=tuple(rows["gemm"]),
        attention=tuple(rows["attention"]),
        copies=tuple(rows["copy"]),
        collectives=tuple(rows["collective"]),
        smoke=take(doc, "smoke", bool, default=False),
        context=dict(rows["context"]),
    )


def _size(doc: Document, key: str) -> int:
    return take(doc, key, int, minimum=1, maximum=2**40)


def _seconds(doc: Document) -> float:
    return take(doc, "seconds", float, minimum=1e-9, maximum=_LONGEST)


def _gemm(doc: Document) -> GemmRow:
    no_other_keys(doc, ("kind", "m", "n", "k", "dtype", "settled", "seconds", "repeats"))
    return GemmRow(
        dtype=take(doc, "dtype", str, choices=("bf16", "fp16", "fp8")),
        m=_size(doc, "m"),
        n=_size(doc, "n"),
        k=_size(doc, "k"),
        settled=take(doc, "settled", bool, default=False),
        seconds=_seconds(doc),
    )


def _attention(doc: Document) -> AttentionRow:
    keys = ("kind", "direction", "kernel", "batch", "heads", "head_dim", "seq_len", "causal", "dtype")
    no_other_keys(doc, (*keys, "seconds", "repeats"))
    take(doc, "dtype", str, default="bf16", choices=("bf16", "fp16"))  # the same kernels at the same peak
    return AttentionRow(
        work=take(doc, "direction", str, choices=("forward", "backward")),
        kernel=take(doc, "kernel", str, choices=("flash1", "flash2", "flash3")),
        batch=_size(doc, "batch"),
        heads=_size(doc, "heads"),
        head_dim=_size(doc, "head_dim"),
        length=_size(doc, "seq_len"),
        causal=take(doc, "causal", bool),
        seconds=_seconds(doc),
    )


def _copy(doc: Document) -> CopyRow:
    no_other_keys(doc, ("kind", "path", "bytes", "seconds", "repeats"))
    path = take(doc, "path", str, choices=("device", "host"))
    return CopyRow(path=path, bytes=float(_size(doc, "bytes")), seconds=_seconds(doc))


def _collective(doc: Document) -> CollectiveRow:
    no_other_keys(doc, ("kind", "collective", "bytes", "ranks", "nodes", "dtype", "seconds", "repeats"))
    ranks = _size(doc, "ranks")
    return CollectiveRow(
        kind=take(doc, "collective", str, choices=COLLECTIVES),
        ranks=take(doc, "ranks", int, minimum=2),
        nodes=take(doc, "nodes", int, minimum=1, maximum=ranks),
        size=float(_size(doc, "bytes")),
        seconds=_seconds(doc),
    )


def _context(doc: Document) -> tuple[str, float]:
    no_other_keys(doc, ("kind", "after", "bytes"))
    return take(doc, "after", str, choices=("cuda", "nccl")), float(_size(doc, "bytes"))


_KINDS: dict[str, Callable[[Document], Any]] = {
    "gemm": _gemm,
    "attention": _attention,
    "copy": _copy,
    "collective": _collective,
}

_TESTS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
_RANK = re.compile(r"#\s+Rank\s+\d+\s.*\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.+?)\s*$")
_NAMED = re.compile(r".*?\b([a-z_]+)_perf\b")
_DATA = re.compile(r"\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+(\S+)\s+(\S+)\s+(\S+)\s+(\S+)")


def read_nccl_tests(
    path: str, *, collective: str | None = None, ranks: int | None = None, nodes: int | None = None
) -> Bench:
    """The table that all_reduce_perf and its like print; the out-of-place times. What the lines above the table do not
    say (the collective in older versions; ranks and nodes without "Using devices") must be given. DocumentError."""
    lines = read_text(path).splitlines()
    hosts, device, named = [], "", collective
    rows: list[CollectiveRow] = []
    for number, line in enumerate(lines, 1):
        rank, name = _RANK.match(line), _NAMED.match(line)
        if rank:
            hosts.append(rank[1])
            device = rank[2]
        elif name and named is None:
            named = _TESTS.get(name[1], name[1])
        row = _DATA.match(line)
        if row is None:
            continue
        if len(rows) >= MOST_ROWS:
            raise DocumentError(f"holds more than {MOST_ROWS:,} measurements", file=path, line=number)
        count = ranks or len(hosts)
        spanned = nodes or len(set(hosts))
        if named not in COLLECTIVES:
            said = "is not said in the file" if named is None else f"'{named}' is not one that is modelled"
            raise DocumentError(
                f"the collective {said}; give --collective {', '.join(COLLECTIVES[:-1])} or {COLLECTIVES[-1]}",
                file=path,
                line=number,
            )
        if not count or not spanned:
            raise DocumentError(
                "how many ranks on how many nodes is not said in the file; give --ranks and --nodes",
                file=path,
                line=number,
            )
        if count < 2 or spanned > count:
            raise DocumentError(f"no collective runs on ranks {count}, nodes {spanned}", file=path, line=number)
        rows += _table_row(path, number, row, named, count, spanned)
    if not rows:
        raise DocumentError("holds no table of nccl-tests (size, count, type, redop, root, time, …)", file=path)
    return Bench(file=path, date="", device=device, collectives=tuple(rows))


def _table_row(path: str, number: int, row: re.Match[str], kind: str, ranks: int, nodes: int) -> list[CollectiveRow]:
    size = float(row[1])
    try:
        seconds, rate, bus = float(row[6]) * 1e-6, float(row[7]), float(row[8])
    except ValueError:
        raise DocumentError(f"the time '{row[6]}' is not a number", file=path, line=number) from None
    if row[9] not in ("0", "0e+00", "N/A", "0.0e+00") or not 0.0 < seconds < _LONGEST or not size:
        problem = f"a time of {row[6]} us with {row[9]} wrong results for {row[1]} bytes is no measurement"
        if not size:
            return []
        raise DocumentError(problem, file=path, line=number)
    factor = {"all_reduce": 2.0 * (ranks - 1) / ranks, "send_recv": 1.0}.get(kind, (ranks - 1) / ranks)
    if rate > 1.0 and abs(bus / rate - factor) > 0.02 * factor:
        raise DocumentError(
            f"busbw / algbw is {bus / rate:.3f}, but {kind} of {ranks} ranks has {factor:.3f}: "
            "another collective, or another number of ranks",
            file=path,
            line=number,
        )
    return [CollectiveRow(kind=kind, ranks=ranks, nodes=nodes, size=size, seconds=seconds)]


@cache
def _device_names() -> dict[str, str]:
    names = take(load_mapping(NAMES_FILE), "names", Document)
    return {str(text).lower(): id for id in names.value for text in take(names, id, list)}


def check_device(bench: Bench, cluster: Cluster) -> None:
    """Raise DistplanError where the file was measured on another device than the cluster's, or with --smoke.

    A device that no shipped accelerator is needs a hardware file with an accelerator of its own, of that name.
    """
    if bench.smoke:
        raise DistplanError(f"{bench.file}: was measured with --smoke, whose tiny shapes calibrate nothing")
    if not bench.device:
        return
    accelerator = cluster.accelerator
    found = _device_names().get(bench.device.strip().lower())
    if bench.device.strip().lower() in (accelerator.name.lower(), accelerator.id) or found == accelerator.id:
        return
    if found is not None:
        raise DistplanError(
            f"{bench.file}: was measured on {bench.device} ({found}), but {cluster.id} has {accelerator.id}; "
            f"give --hardware a system of {found}"
        )
    raise DistplanError(
        f"{bench.file}: the device '{bench.device}' is none that is shipped; give --hardware a file whose accelerator "
        f"has this name (docs/hardware.md)"
    )
