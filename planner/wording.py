"""Numbers and strategies as people read them. Base units in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from distplan.hardware.units import format_gib, format_seconds

Plain = Mapping[str, Any]

_DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "cp_inner", "ep", "etp")


def strategy_label(strategy: Plain) -> str:
    """The strategy in one breath; what is 1, off or none is left out: 'tp8 pp4 vpp5 sp zero1 mb1'."""
    words = [f"{name}{strategy[name]}" for name in _DEGREES if strategy[name] > 1]
    if strategy["cp"] > 1:
        words.append(strategy["cp_kind"])
    words += ["sp"] if strategy["sp"] else []
    words += [f"zero{strategy['zero']}", f"mb{strategy['micro_batch']}"]
    words += [strategy["schedule"]] if strategy["pp"] > 1 and strategy["vpp"] == 1 else []
    words += [f"recompute-{strategy['recompute']}"] if strategy["recompute"] != "none" else []
    words += [f"layers{split_label(strategy['stage_layers'])}".replace(", ", ",")] if strategy["stage_layers"] else []
    return " ".join(words)


def percent(share: float, *, signed: bool = False) -> str:
    return f"{100.0 * share:+.1f} %" if signed else f"{100.0 * share:.1f} %"


def seconds(value: float) -> str:
    """Always seconds, so that a column can be compared; to the millisecond, or three digits of what is less."""
    if 0.0 < abs(value) < 0.1:
        return f"{value:.3g} s"
    return f"{value:.3f} s" if abs(value) < 100.0 else f"{value:,.1f} s"


def signed_seconds(value: float) -> str:
    return ("+" if value >= 0.0 else "-") + seconds(abs(value))


def duration(value: float) -> str:
    """In the unit that suits it; nothing is 0 s."""
    return format_seconds(value) if value else "0 s"


def gib(value: float) -> str:
    return format_gib(value)


def count(value: float, one: str, many: str | None = None) -> str:
    """'1 node', '2 nodes'; numbers with thousands' commas."""
    return f"{value:,.0f} {one if value == 1 else many or one + 's'}"


def large(value: float) -> str:
    """4.19 M, 70.6 B: counts of tokens and parameters."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:,.0f}"


def bar(part: float, whole: float, width: int) -> str:
    """A filled bar; more than the whole fills it."""
    filled = round(width * min(max(part / whole, 0.0), 1.0)) if whole > 0.0 else 0
    return "█" * filled + "░" * (width - filled)


def share(part: float, whole: float, width: int) -> str:
    """The filled part of such a bar alone."""
    return bar(part, whole, width).rstrip("░")


def words(name: str) -> str:
    """A field's name as prose: exposed_tp -> 'exposed tp'."""
    return name.replace("_", " ")


def split_label(layers: Sequence[int]) -> str:
    """Layers of chunks, runs of equal ones together: 8, 9×2, 6."""
    runs = [(value, len(list(run))) for value, run in groupby(layers)]
    return ", ".join(f"{value}" if times == 1 else f"{value}×{times}" for value, times in runs)
