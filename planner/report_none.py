"""The report where no strategy is: what binds, and what would be needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from distplan.planner.terminal import clean
from distplan.planner.wording import count, gib, percent, strategy_label, words

Plain = dict[str, Any]


def nothing(shown: Plain) -> Iterator[RenderableType]:
    """The one reason, as sentences."""
    for number, sentence in enumerate(sentences(shown)):
        first = number == 0
        yield Padding(Text(clean(sentence), style="bold red" if first else ""), (int(first), 0, 0, 0 if first else 2))


def sentences(shown: Plain) -> Iterator[str]:
    why = shown["why_nothing"]
    if why is None:
        yield "Interrupted before anything was costed."
    elif why["reason"] == "nothing_legal":
        yield from _nothing_legal(why, bounded_out=shown["counts"]["enumerated"] == 0)
    else:
        yield from _nothing_fits(why, shown)


def _nothing_legal(why: Plain, *, bounded_out: bool) -> Iterator[str]:
    if bounded_out:
        yield f"No factorisation of {count(why['gpus'], 'GPU')} lies within the bounds given."
    else:
        yield f"No strategy is legal on {count(why['gpus'], 'GPU')}."
    near = [f"{why[side]:,}" for side in ("below", "above") if why[side] is not None]
    yield f"Nearest counts with a legal strategy: {' and '.join(near)}." if near else "No near count has a legal one."


def _nothing_fits(why: Plain, shown: Plain) -> Iterator[str]:
    nearest = why["nearest"]
    gpus = " or ".join(f"{n:,}" for n in shown["gpus"][:8])
    yield f"Nothing fits on {gpus} {'GPU' if gpus == '1' else 'GPUs'}."
    yield f"Nearest to fitting: {strategy_label(nearest['strategy'])}"
    total, usable = gib(nearest["device_bytes"]), gib(nearest["usable_bytes"])
    most = nearest["usable_bytes"] + why["bytes_over"]
    high = f", up to {gib(most)}," if most > nearest["device_bytes"] else ""
    yield f"stage {why['stage']} lacks {gib(why['bytes_over'])} at {why['phase']}: {total}{high} of {usable} usable"
    parts = sorted(nearest["memory"].items(), key=lambda item: (-item[1], item[0]))[:3]
    whole = nearest["device_bytes"]
    yield "largest parts: " + ", ".join(f"{words(name)} {gib(part)} ({percent(part / whole)})" for name, part in parts)
    if why["smallest"] is None:
        yield f"no count up to {why['searched_up_to']:,} GPUs fits at the same global batch"
    else:
        label = strategy_label(why["smallest"]["strategy"])
        yield f"smallest count that fits, at the same global batch: {count(why['smallest_gpus'], 'GPU')} ({label})"
