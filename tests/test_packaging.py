"""What is installed is what is in git: nothing missing, nothing more."""

from __future__ import annotations

import os
import subprocess
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import distplan

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("hardware", "costmodel", "planner")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def tracked() -> set[str]:
    """Files in git that belong into the package, by their place in it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "src/distplan", *ROOMS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        name.removeprefix("src/") if name.startswith("src/") else f"distplan/{name}"
        for name in listed.stdout.splitlines()
        if (ROOT / name).exists()
    }


def test_every_tracked_file_is_matched_by_the_packaging() -> None:
    data = SETUPTOOLS["package-data"]
    for name in tracked():
        path = PurePosixPath(name)
        if path.suffix == ".py":
            assert ".".join(path.parts[:-1]) in SETUPTOOLS["packages"], f"{name} is in no listed package"
            continue
        package = ".".join(path.parts[:2]) if path.parts[1] in ROOMS else "distplan"
        inside = PurePosixPath(*path.parts[package.count(".") + 1 :])
        patterns = [pattern.removeprefix("**/") for pattern in data[package]]
        assert any(inside.match(pattern) for pattern in patterns), f"{name} matches no package-data of {package}"


def installed_wheel() -> Distribution | None:
    """The metadata beside the package that is imported; an editable install has none there."""
    imported = Path(distplan.__file__)
    found = [d for d in distributions(name="distplan") if Path(str(d.locate_file("distplan/__init__.py"))) == imported]
    return found[0] if found else None


def test_the_wheel_holds_exactly_the_tracked_files() -> None:
    wheel = installed_wheel()
    if wheel is None:
        assert not os.environ.get("DISTPLAN_WHEEL"), "CI says that a wheel is installed, and it is not"
        pytest.skip("an editable install has no file list; .ci/run runs this against the wheel")
    files = [str(path) for path in wheel.files or []]
    assert {name for name in files if name.startswith("distplan/") and "__pycache__" not in name} == tracked()
    tops = {name.split("/")[0] for name in files if not name.startswith("..")}
    assert tops == {"distplan", f"distplan-{distplan.__version__}.dist-info"}


def test_the_version_is_said_once() -> None:
    assert PROJECT["project"]["version"] == distplan.__version__


def test_the_package_is_typed() -> None:
    assert (Path(distplan.__file__).parent / "py.typed").exists()
