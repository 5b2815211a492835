"""The goodput on a terminal: which share of the elapsed time is useful, and where the rest goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType

from distplan.hardware.units import format_traffic
from distplan.planner.report import heading, line, table
from distplan.planner.wording import count, percent

Plain = dict[str, Any]
_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))


def goodput_report(rows: Sequence[Plain]) -> Iterator[RenderableType]:
    """One line per GPU count, and what they rest on."""
    yield heading("Goodput: the share of the elapsed time that is useful")
    cells = [
        (
            f"{row['gpus']:,}", percent(row["goodput"]), percent(row["checkpoint_share"]), percent(row["lost_share"]),
            percent(row["restart_share"]), span(row["mtbf_seconds"]), span(row["checkpoint_interval_seconds"]),
        )
        for row in rows
    ]  # fmt: skip
    head = ("GPUs", "goodput", "checkpoints", "lost work", "restarts", "MTBF", "interval")
    yield table(head, cells, left=())
    first = rows[0]
    write, stall = first["checkpoint_write_seconds"], first["checkpoint_stall_seconds"]
    waits = "" if stall == write else f", of which training waits {span(stall)}"
    size, steps = format_traffic(first["checkpoint_bytes"]), round(first["checkpoint_interval_steps"])
    every = "step" if steps == 1 else count(steps, "step")
    lost, restart = span(first["lost_seconds_per_failure"]), span(first["restart_seconds"])
    alone, daily = f"{first['mtbf_gpu_seconds'] / 3600.0:,.0f} GPU-hours", number(first["failures_per_day"])
    yield line(f"on {first['gpus']:,} GPUs: a checkpoint of {size} every {every}, written in {span(write)}{waits};")
    yield line(f"{daily} failures a day, each costs {lost} of work and a restart of {restart}")
    rests = f"a failure in {alone}; medians of published figures unless yours are given (docs/goodput.md)"
    yield line(rests, style="dim")


def span(seconds: float) -> str:
    """A time of any length, to three digits."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    return f"{number(seconds / size)} {unit}"


def number(value: float) -> str:
    """Three digits, or all before the point; no exponent for what is counted."""
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"
