"""Damaged strategy files: check, diff and explain end with a documented code and words, never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distplan.planner.cli import run

VALUES = (
    "0", "-1", "1e9", "1e400", "null", "true", "text", "[]", "{}", '"\\e[31m"', "0.5", "99999999999999999999", ".nan",
    "3", "!!python/object/apply:os.system [x]", "*a", "Custom", "LinearAttention", "[1, 2]", "{a: 1}", "fp8",
    "interleaved", '"<script>"', '"::error::x"',
)  # fmt: skip


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("plans") / "s.yaml"
    job = ["--gpus", "8", "--tp", "2", "--pp", "2", "--global-batch", "64", "--seq-len", "2048", "-q"]
    assert run(["estimate", "mixtral-8x7b", *job, "-o", str(path)]) in (0, 3)
    return path.read_text().splitlines()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(2, 10**6), value=st.sampled_from(VALUES), kind=st.sampled_from(("value", "value", "drop", "key")))
def test_a_damaged_line_is_words_and_a_documented_code(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int, value: str, kind: str
) -> None:
    changed = list(lines)
    index = 2 + at % (len(lines) - 2)
    key = changed[index].split(":")[0]
    changed[index] = {"value": f"{key}: {value}", "drop": "", "key": changed[index].replace(":", "x:", 1)}[kind]
    path, whole = tmp_path / "damaged.yaml", tmp_path / "whole.yaml"
    path.write_text("\n".join(changed) + "\n")
    whole.write_text("\n".join(lines) + "\n")
    commands = (
        ["check", str(path), "--format", "github"], ["diff", str(whole), str(path)], ["explain", "DP011", str(path)],
        ["explain", str(path), "--memory"],
    )  # fmt: skip
    for command in commands:
        assert run(command) in (0, 2, 3, 4), (command, changed[index])
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        assert "Traceback" not in err


def test_no_file_can_name_a_type_that_holds_code(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text("\n".join(lines).replace("type: Attention", "type: Custom") + "\n")
    assert run(["check", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
