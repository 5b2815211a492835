"""Text that leaves: no escape sequence from a file, no colour where none is wanted, ASCII where needed."""

from __future__ import annotations

import io

import pytest

from distplan.planner.terminal import clean, degrade, has_colour
from distplan.planner.wording import bar, strategy_label


class Screen(io.StringIO):
    def __init__(self, encoding: str, *, terminal: bool) -> None:
        super().__init__()
        self._encoding = encoding
        self._terminal = terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


def test_escapes_in_names_become_visible() -> None:
    hostile = "gpt\x1b[31m\x07\r\nx\u202ey\x9b0m"
    assert clean(hostile).isprintable()
    assert "\\x1b[31m" in clean(hostile)


def test_ascii_streams_get_ascii() -> None:
    text = degrade("█░ 2 × 3 · µs ≥ naïve", Screen("ascii", terminal=False))
    assert text.isascii()
    assert text.startswith("#. 2 x 3")
    assert degrade("█ ×", Screen("UTF-8", terminal=False)) == "█ ×"


@pytest.mark.parametrize(
    ("terminal", "no_color", "variable", "coloured"),
    [(True, False, "", True), (False, False, "", False), (True, True, "", False), (True, False, "1", False)],
)
def test_colour_only_on_a_terminal_that_wants_it(
    terminal: bool, no_color: bool, variable: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colour(Screen("utf-8", terminal=terminal), no_color=no_color) is coloured


def test_a_bar_never_leaves_its_width() -> None:
    assert bar(5.0, 10.0, 10) == "█" * 5 + "░" * 5
    assert bar(50.0, 10.0, 10) == "█" * 10
    assert bar(-1.0, 10.0, 10) == bar(1.0, 0.0, 10) == "░" * 10


def test_a_label_leaves_out_what_is_one_off_or_none() -> None:
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "cp_inner", "ep", "etp"), 1)
    rest = {"cp_kind": "none", "sp": False, "zero": 1, "micro_batch": 1, "schedule": "1f1b", "recompute": "none"}
    rest["stage_layers"] = []
    assert strategy_label(degrees | rest) == "zero1 mb1"
    label = strategy_label(degrees | rest | {"tp": 8, "cp": 2, "cp_kind": "ring", "sp": True})
    assert label == "tp8 cp2 ring sp zero1 mb1"
    cut = {"pp": 2, "cp": 4, "cp_inner": 2, "cp_kind": "two_level", "stage_layers": [15, 17]}
    assert strategy_label(degrees | rest | cut) == "pp2 cp4 cp_inner2 two_level zero1 mb1 1f1b layers15,17"
