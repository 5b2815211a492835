"""Where words and numbers go: data to stdout, words and progress to stderr, colour only on a terminal.

Text that came from a file may hold terminal escapes; `clean` makes them visible. A stream that is not
UTF-8 gets ASCII.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

WIDTH = 80
NARROWEST = 72
"""A narrower terminal wraps lines itself: a table squeezed into it would lose ends of numbers."""
_PATIENCE_SECONDS = 1.0
_ASCII = str.maketrans({"×": "x", "·": "*", "−": "-", "–": "-", "≤": "<=", "≥": ">=", "█": "#", "░": ".", "µ": "u",
                        "…": ".", "→": "->", "±": "+/-", "²": "^2"})  # fmt: skip


def clean(text: object) -> str:
    """`text` on one line without control characters: an escape sequence in a name cannot reach the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def is_utf8(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"


def degrade(text: str, stream: TextIO) -> str:
    """`text` as the stream can show it."""
    if is_utf8(stream):
        return text
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def has_colour(stream: TextIO, *, no_color: bool) -> bool:
    """Only on a terminal that wants it (https://no-color.org: NO_COLOR counts where it is not empty)."""
    return not (no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb") and stream.isatty()


def console(stream: TextIO, *, no_color: bool = False) -> Console:
    from rich.console import Console

    coloured = has_colour(stream, no_color=no_color)
    made = Console(
        file=stream,
        width=None if stream.isatty() else WIDTH,
        force_terminal=coloured,
        color_system="standard" if coloured else None,
        no_color=not coloured,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )
    made.width = max(made.width, NARROWEST)
    return made


def write_data(text: str) -> None:
    """To stdout, whole; an OSError (a full disk, a closed pipe) is raised here and not at exit."""
    stream = sys.stdout
    if not is_utf8(stream):
        text = text.encode("ascii", "backslashreplace").decode("ascii")
    stream.write(text)
    stream.flush()


def say(text: str, *, quiet: bool = False) -> None:
    """A sentence to stderr."""
    if not quiet:
        sys.stderr.write(degrade(text, sys.stderr) + "\n")


@contextmanager
def progress(what: str, *, quiet: bool, no_color: bool) -> Iterator[Callable[[float, float], None] | None]:
    """A callback (done, total) that draws a bar on stderr once the work has lasted a second.

    None where nobody would see the bar: stderr is no terminal, or `quiet`.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(what, no_color=no_color)
    try:
        yield bar.show
    finally:
        bar.stop()


class _Bar:
    """rich's bar, imported and started by a timer, and so only where the work turns out to be long.

    It pulses until the first call and again after the last, while the best strategies are compared.
    """

    def __init__(self, what: str, *, no_color: bool) -> None:
        self._what = what
        self._no_color = no_color
        self._lock = threading.Lock()
        self._ended = False
        self._progress: tuple[float, float | None] = (0.0, None)
        self._drawn: Progress | None = None
        self._timer = threading.Timer(_PATIENCE_SECONDS, self._start)
        self._timer.daemon = True
        self._timer.start()

    def show(self, done: float, total: float) -> None:
        with self._lock:
            self._progress = (done, total if done < total else None)
            self._update()

    def _start(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        drawn = Progress(*columns, console=console(sys.stderr, no_color=self._no_color), transient=True)
        drawn.add_task(self._what, total=None)
        with self._lock:
            if not self._ended:
                self._drawn = drawn
                self._update()
                drawn.start()

    def _update(self) -> None:
        if self._drawn is not None:
            done, total = self._progress
            self._drawn.update(self._drawn.task_ids[0], completed=done, total=total)

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._drawn is not None:
                self._drawn.stop()
