"""The rooms and the one way through them: hardware <- costmodel <- planner."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from distplan.costmodel.runtime import Runtime, StateRules
from distplan.hardware.accelerator import Accelerator
from distplan.hardware.cluster import Cluster, Tier

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "hardware": {"hardware"},
    "costmodel": {"hardware", "costmodel"},
    "planner": {"hardware", "costmodel", "planner"},
}
SPEAKS = ("cli", "report", "terminal")
"""beginnings of the only modules, all in planner, that may know typer and rich"""
MODULES = sorted(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{named(path)}:{node.lineno}: a relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_imports_go_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        top, _, rest = module.partition(".")
        assert top not in MAY_IMPORT, f"'{module}' works only by accident; write distplan.{module}"
        if top == "distplan" and rest:
            assert rest.split(".")[0] in MAY_IMPORT[room], f"{room} may not import {module}"


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_what_computes_neither_prints_nor_logs_nor_draws(path: Path) -> None:
    known = {module.split(".")[0] for module in imports(path)}
    assert "logging" not in known
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    printing = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert not printing, f"print at line {printing}"
    if path.parent.name != "planner" or not path.name.startswith(SPEAKS):
        assert not known & {"typer", "rich", "click"}


def test_rooms_are_flat() -> None:
    nested = [named(path) for path in MODULES if len(path.relative_to(ROOT).parts) > 2]
    assert not nested, "a sub-package would be missing from the wheel"


def test_no_file_reaches_above_the_repository() -> None:
    above = ("/work" + "/", ".." + "/shared")
    for path in [*MODULES, *(path for room in ("tests", "src", "benchmarks") for path in (ROOT / room).rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        assert not any(place in text for place in above), named(path)


def test_modules_are_imported_under_one_name_only() -> None:
    modules = ", ".join(f"distplan.{named(path)[:-3].replace('/', '.')}" for path in MODULES if path.stem != "__init__")
    program = f"import {modules}, sys; print(*[m for m in sys.modules if m.split('.')[0] in {set(MAY_IMPORT)}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == ""


def test_start_up_imports_neither_numpy_nor_scipy() -> None:
    program = "import sys, distplan.planner.cli; print(*{'numpy', 'scipy', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@cache
def read_names() -> frozenset[str]:
    """Names that some module reads: attributes, keys of plain data, and getattr's f-strings, whose beginnings count."""
    found = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                found.add(str(node.slice.value))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                found |= {f"{part.value}*" for part in ast.walk(node.args[1]) if isinstance(part, ast.Constant)}
    return frozenset(found)


@pytest.mark.parametrize("facts", [Accelerator, Cluster, Tier, Runtime, StateRules], ids=lambda kind: kind.__name__)
def test_no_fact_is_asked_of_a_user_and_never_read(facts: type) -> None:
    known = read_names()
    names = {field.name for field in fields(facts)}  # type: ignore[arg-type]
    unread = {name for name in names - known if not any(f"{name[:at]}*" in known for at in range(1, len(name) + 1))}
    assert not unread
