"""A pipeline schedule on a terminal: timeline, bubble and memory per stage, several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from distplan.costmodel.simulate import Simulation
from distplan.planner.report import heading, line, table
from distplan.planner.schedule_view import Plain, drawn, legend
from distplan.planner.wording import count, percent

_STYLE: Mapping[str, str] = {"F": "cyan", "B": "green", "I": "green", "W": "blue", "O": "magenta", ".": "dim"}
_STAGES = 32
"""rows of the table per stage; of more, the first and the last"""


def schedule_report(run: Simulation, shown: Plain, width: int) -> Iterator[RenderableType]:
    """Parts in reading order; `shown` is schedule_view.document(run)."""
    chunks = f", {shown['chunks']} chunks each" if shown["chunks"] > 1 else ""
    title = f"{shown['schedule']} ({shown['dialect']}): {count(shown['stages'], 'stage')}{chunks}"
    yield Text(f"{title}, {count(shown['micro_batches'], 'micro-batch', 'micro-batches')}", style="bold")
    yield line(f"step time {shown['step_time']:.6g}, of it {percent(shown['bubble_share'])} idle on average")
    yield Text("")
    yield from timeline_rows(run, width)
    yield heading("Per stage")
    yield _stages(shown["per_stage"])
    yield line("memory: micro-batches whose activations are held, of a whole stage", style="dim")


def timeline_rows(run: Simulation, width: int) -> Iterator[RenderableType]:
    for label, pieces in drawn(run, width):
        row = Text(label, no_wrap=True, overflow="crop")
        for kind, text in pieces:
            row.append(text, style=_STYLE.get(kind, ""))
        yield row
    yield Text(legend(run), style="dim")


def _stages(rows: Sequence[Plain]) -> RenderableType:
    kept = rows if len(rows) <= _STAGES else [*rows[: _STAGES // 2], *rows[-_STAGES // 2 :]]
    cells = [
        (
            str(row["stage"]),
            f"{row['busy']:.6g}",
            f"{row['bubble']:.6g}",
            percent(row["bubble_share"]),
            f"{row['peak_memory']:.4g}",
        )
        for row in kept
    ]
    return table(("stage", "busy", "bubble", "share", "peak memory"), cells)


def comparison_report(rows: Sequence[Plain], title: str) -> Iterator[RenderableType]:
    """`rows` as of schedule_view.comparison."""
    yield Text(title, style="bold")
    cells = []
    for row in rows:
        if row["refused"] is None:
            peaks = f"{row['peak_memory_first']:.4g}", f"{row['peak_memory_last']:.4g}"
            measures = f"{row['step_time']:.6g}", percent(row["bubble_share"]), *peaks
            cells.append((row["schedule"], row["dialect"], str(row["chunks"]), *measures))
        else:
            cells.append((row["schedule"], "cannot run", "", "", "", "", ""))
    yield table(("schedule", "dialect", "chunks", "step time", "bubble", "peak first", "peak last"), cells, left=(0, 1))
    yield line("peak: micro-batches held by the first and by the last stage", style="dim")
    for row in rows:
        if row["refused"] is not None:
            yield line(row["refused"])
