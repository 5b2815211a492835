"""`import distplan`: the surface is sorted, complete, lazy and typed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import distplan


def test_the_surface_is_sorted_and_every_name_is_there() -> None:
    assert sorted(distplan.__all__) == distplan.__all__
    for name in distplan.__all__:
        assert getattr(distplan, name).__module__.startswith("distplan.")
    assert set(distplan.__all__) <= set(dir(distplan))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = distplan.nothing_here


def test_importing_distplan_imports_nothing_else() -> None:
    program = "import sys; import distplan; print(*[m for m in sys.modules if m in ('numpy', 'yaml', 'typer', 'rich')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
