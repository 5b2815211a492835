"""The documents cannot drift from the program: every command and option, the examples, the words."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

import distplan.costmodel
import distplan.hardware
import distplan.planner
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import load_cluster
from distplan.planner.cli import EXIT_CODES, app, run
from distplan.planner.cli_options import ALIASES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def commands(command: Any, path: str = "distplan") -> Iterator[tuple[str, Any]]:
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        yield path, command
    for name, sub in subcommands.items():
        yield from commands(sub, f"{path} {name}")


COMMANDS = dict(commands(typer.main.get_command(app)))
MODULES = [
    f"{room.__name__}.{module.name}"
    for room in (distplan.hardware, distplan.costmodel, distplan.planner)
    for module in pkgutil.iter_modules(room.__path__)
]


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help_and_is_documented(path: str) -> None:
    command = COMMANDS[path]
    assert len((command.help or "").split()) > 2
    assert path.split()[1] in CLI
    for parameter in command.params:
        if parameter.name != "help":
            assert parameter.help, f"{path}: {parameter.name} has no help"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_is_documented(path: str) -> None:
    for parameter in COMMANDS[path].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("--") and option != "--help":
                assert f"`{option}`" in CLI, f"{option} of {path}"


def test_every_alias_is_documented() -> None:
    missing = [alias for alias in ALIASES if f"--{alias}" not in CLI and not alias.startswith("no-")]
    assert not missing


def test_exit_codes_are_documented() -> None:
    for code in EXIT_CODES:
        assert f"| {code} |" in CLI
        assert re.search(rf"^\| {code} \|", README, re.MULTILINE)


def test_every_field_of_a_strategy_is_in_the_glossary() -> None:
    for field in fields(Strategy):
        assert f"`{field.name}`" in GLOSSARY, field.name


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


def readme_commands() -> list[str]:
    """Command lines of distplan in the README's code blocks."""
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", README, re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    found = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in found if re.match(r"(\.venv/bin/)?distplan\b", part)]


def test_the_readme_shows_commands_that_exist() -> None:
    found = readme_commands()
    assert found
    for line in found:
        words = shlex.split(line, comments=True)[1:]
        path = next((path for path in COMMANDS if words[: len(path.split()) - 1] == path.split()[1:]), None)
        assert path, line
        known = {name for parameter in COMMANDS[path].params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            if word.startswith("-"):
                assert word.split("=")[0] in known, f"{word} in: {line}"
            if word.startswith("examples/"):
                assert (ROOT / word).is_file(), word


def test_the_output_that_the_readme_shows_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """.ci/readme writes it anew, with … in place of the later runners-up."""
    monkeypatch.chdir(tmp_path)
    assert run(["search", str(ROOT / "examples" / "llama-3.1-70b.yaml"), "--gpus", "64"]) == 0
    shown = re.search(r"<!-- output[^\n]*\n```text\n(.*?)```", README, re.DOTALL)
    assert shown
    before, after = shown[1].split("\n  …\n")
    out = capsys.readouterr().out
    assert out.startswith(f"{before}\n") and out.endswith(f"\n{after}")


def test_the_hardware_in_the_readme_loads(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert block
    assert len(block[1].splitlines()) <= 10
    (tmp_path / "lab.yaml").write_text(block[1])
    assert load_cluster(tmp_path / "lab.yaml").gpus_per_node == 4


def test_the_python_in_its_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), scope)
    assert scope["plan"].best.gpus in (8, 16)
    assert (tmp_path / "strategy.yaml").is_file()


def test_links_inside_the_repository_lead_somewhere() -> None:
    for document in (README, CLI, GLOSSARY):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document):
            assert (ROOT / target).exists() or (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("name", ["distplan", *MODULES])
def test_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
