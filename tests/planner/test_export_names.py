"""What an export writes are names that the launcher knows: its own stored list of them, with its source."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from launching import jobs

from distplan.planner.export import export
from distplan.planner.imported import option_names
from distplan.planner.launcher import Job

LISTS = ("megatron", "megatron-bridge", "deepspeed", "torchtitan", "accelerate", "nanotron")


def unknown(written: Iterable[str], known: Iterable[str]) -> set[str]:
    return set(written) - set(known)


@pytest.mark.parametrize("launcher", LISTS)
def test_every_list_names_its_source_and_no_name_twice(launcher: str) -> None:
    names = option_names(launcher).value
    assert "https://github.com/" in names["source"]
    for section, listed in names.items():
        if section != "source":
            assert len(listed) == len(set(listed)) > 0, section


@settings(max_examples=80, deadline=None)
@given(of=jobs())
def test_megatron_arguments(of: Job) -> None:
    names = option_names("megatron").value
    for line in export(of, "megatron").text.splitlines():
        if line and not line.startswith("#"):
            option, *values = line.split()
            assert option[2:] in names["options" if values else "flags"], line


@settings(max_examples=80, deadline=None)
@given(of=jobs())
def test_megatron_bridge_overrides(of: Job) -> None:
    names = option_names("megatron-bridge").value
    content: dict[str, Any] = yaml.safe_load(export(of, "megatron-bridge").text)
    recipe = content.pop("mixed_precision", None)
    assert recipe is None or recipe in names["mixed_precision"]
    for section, values in content.items():
        assert not unknown(values, names[section]), section


@settings(max_examples=80, deadline=None)
@given(of=jobs())
def test_nanotron_yaml(of: Job) -> None:
    names = option_names("nanotron").value
    content: dict[str, Any] = yaml.safe_load(export(of, "nanotron").text)
    assert not unknown(content, names["top"])
    model = content["model"]["model_config"]
    assert not unknown(model, names["model_config"])
    assert not unknown(model.get("moe_config", {}), names["moe_config"])
    for section in ("parallelism", "tokens", "optimizer", "model"):
        assert not unknown(content[section], names[section]), section


@settings(max_examples=80, deadline=None)
@given(of=jobs())
def test_the_lists_that_import_checks_against_hold_what_export_writes(of: Job) -> None:
    deepspeed = json.loads(export(of, "deepspeed").text)
    assert not unknown(deepspeed, option_names("deepspeed").value["top"])
    assert not unknown(deepspeed["zero_optimization"], option_names("deepspeed").value["zero_optimization"])
    accelerate: dict[str, Any] = yaml.safe_load(export(of, "accelerate").text)
    names = option_names("accelerate").value
    assert not unknown(accelerate, names["top"])
    for section in ("fsdp_config", "parallelism_config"):
        assert not unknown(accelerate.get(section, {}), names[section])
    for line in export(of, "torchtitan").text.splitlines():
        if line.startswith("--"):
            section, _, option = line.split()[0][2:].partition(".")
            assert option.removeprefix("no-") in option_names("torchtitan").value[section], line
