"""Where words and numbers go: data to stdout, words and progress to stderr, colour only on a terminal.

Text that came from a file may hold terminal escapes; `clean` makes them visible. A stream that is not
UTF-8 gets ASCII.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
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
    return Console(
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
    """rich's bar, imported and started only where the work turns out to be long."""

    def __init__(self, what: str, *, no_color: bool) -> None:
        import time

        self._what = what
        self._no_color = no_color
        self._now = time.monotonic
        self._started = time.monotonic()
        self._stop: Callable[[], None] | None = None
        self._update: Callable[[float, float], None] | None = None

    def show(self, done: float, total: float) -> None:
        if self._update is None:
            if self._now() - self._started < _PATIENCE_SECONDS:
                return
            self._start()
        if self._update is not None:
            self._update(done, total)

    def _start(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(self._what), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
        drawn = Progress(*columns, console=console(sys.stderr, no_color=self._no_color), transient=True)
        task = drawn.add_task(self._what, total=None)
        drawn.start()
        self._stop = drawn.stop
        self._update = lambda done, total: drawn.update(task, completed=done, total=total)

    def stop(self) -> None:
        if self._stop is not None:
            self._stop()
