"""The JSON Schemas: valid themselves, they accept every shipped file, and refuse what the readers refuse."""

from __future__ import annotations

import copy
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from distplan.costmodel.model_file import read_model, shipped_models
from distplan.costmodel.workload import read_workload
from distplan.hardware import accelerator, cluster
from distplan.hardware.documents import Document
from distplan.hardware.errors import DistplanError
from distplan.planner.cli import run
from distplan.planner.plan_file import read_plan
from distplan.planner.schema import SCHEMAS, schema

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path(str(files("distplan.costmodel"))) / "models"
SYSTEMS = yaml.safe_load(cluster.SYSTEMS_FILE.read_text())["systems"]
ACCELERATORS = yaml.safe_load(accelerator.ACCELERATORS_FILE.read_text())["accelerators"]
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if "layers" in path.read_text()]


def problems(what: str, value: Any) -> list[str]:
    validator = Draft202012Validator(schema(what))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("plans") / "strategy.yaml"
    job = ["--gpus", "16", "--global-batch", "64", "--seq-len", "2048", "-q"]
    assert run(["estimate", "mixtral-8x7b", *job, "--ep", "8", "--zero", "1", "-o", str(path)]) in (0, 3)
    made: dict[str, Any] = yaml.safe_load(path.read_text())
    return made


@pytest.mark.parametrize("what", SCHEMAS)
def test_it_is_a_schema_and_every_property_is_described(what: str) -> None:
    made = schema(what)
    Draft202012Validator.check_schema(made)
    for name, inner in made["properties"].items():
        if name not in ("format_version", "strategy", "limits", "workload", "hardware", "runtime", "model"):
            assert inner.get("description"), name


@pytest.mark.parametrize("name", shipped_models())
def test_every_shipped_model_is_accepted(name: str) -> None:
    assert problems("model", yaml.safe_load((MODELS / f"{name}.yaml").read_text())) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_accepted(path: Path) -> None:
    assert problems("model", yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_shipped_system_is_accepted(name: str) -> None:
    assert problems("hardware", SYSTEMS[name]) == []


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_shipped_accelerator_is_accepted(name: str) -> None:
    assert problems("hardware", SYSTEMS["dgx-h100"] | {"accelerator": ACCELERATORS[name]}) == []


def test_a_written_strategy_is_accepted_and_names_its_schema(plan: dict[str, Any], tmp_path: Path) -> None:
    assert problems("strategy", plan) == []
    job = ["--gpus", "8", "--global-batch", "64", "--seq-len", "2048", "-q"]
    assert run(["estimate", "llama-3.2-1b", *job, "-o", str(tmp_path / "s.yaml")]) == 0
    first = (tmp_path / "s.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=strategy.schema.json"
    assert run(["schema", "strategy", "-o", str(tmp_path / "strategy.schema.json"), "-q"]) == 0
    assert json.loads((tmp_path / "strategy.schema.json").read_text()) == schema("strategy")


WRONG_IN_MODEL = [
    {"layres": 3}, {"layers": 0}, {"layers": "many"}, {"hidden": 1.5}, {"positions": "sin"}, {"norm": "batchnorm"},
    {"kinds": {"a": {"headz": 3}}}, {"kinds": {"a b": {}}}, {"pattern": ["a*0"]}, {"pattern": []}, {"kinds": {}},
    {"placements": {"x": {"tp": "Split(ffn)"}}}, {"placements": {"x": {"zp": "Replicate"}}},
    {"workload": {"seq_len": 0}}, {"workload": {"precision": "bf17"}}, {"workload": {"optimizer": "lion"}},
    {"workload": {"precision": {"like": "bf16", "gradients": "bf17"}}}, {"tied_embedding": "yes"},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_IN_MODEL, ids=str)
def test_what_the_reader_of_models_refuses_the_schema_refuses(wrong: dict[str, Any]) -> None:
    value = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 64, "vocab": 100}
    assert problems("model", value) == []
    value |= wrong
    document = Document(file="model.yaml", value=value, lines={})
    with pytest.raises(DistplanError):
        read_model(document, "model")
        read_workload(document.section("workload"))
    assert problems("model", value)


WRONG_IN_PLAN: list[tuple[tuple[str, ...], Any]] = [
    (("strategy", "tp"), 0), (("strategy", "tp"), "two"), (("strategy", "zero"), 4), (("strategy", "cp_kind"), "rings"),
    (("strategy", "tpp"), 2), (("format_version",), "2.0"), (("workload", "seq_len"), 0), (("limits", "spare"), 1),
    (("workload", "precision", "compute"), "bf17"), (("model", "pattern"), []), (("model", "hidden"), None),
    (("hardware", "id"), 3), (("runtime", "name"), 3), (("model", "kinds", "layer", "mixer", "type"), "Attentoin"),
    (("limits", "reserve_bytes"), -1),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value"), WRONG_IN_PLAN, ids=str)
def test_what_the_reader_of_strategies_refuses_the_schema_refuses(
    plan: dict[str, Any], where: tuple[str, ...], value: Any
) -> None:
    changed = copy.deepcopy(plan)
    inner = changed
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(DistplanError):
        read_plan(Document(file="strategy.yaml", value=changed, lines={}))
    assert problems("strategy", changed)


WRONG_IN_HARDWARE: list[tuple[str, Any]] = [
    ("gpus_per_node", "8 GB"), ("host_memory", "512"), ("host_memory", "512 GiBs"), ("racks", 3),
    ("scaleup", {"technology": "nvlink4"}), ("scaleup", {"technology": "nvlink44", "bandwidth": "450 GB/s"}),
    ("fabric", {"technology": "infiniband", "bandwidth": 50}), ("prices", "2 EUR/h"),
    ("accelerator", {"memory": "80 GiB", "memory_bandwidth": "3 TB/s", "peak_flops": {}}),
    ("accelerator", {"memory": "80 GiB", "memory_bandwidth": "3 TB/s", "peak_flops": {"bf17": "1 PFLOP/s"}}),
    ("nic_bandwidth", {"value": "400 Gbit/s", "status": "guessed"}),
    ("reliability", {"mtbf": "3 h"}), ("reliability", {"mttf": "30,000 GPU-h"}), ("reliability", "good"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG_IN_HARDWARE, ids=str)
def test_what_the_reader_of_hardware_refuses_the_schema_refuses(key: str, value: Any) -> None:
    changed = copy.deepcopy(SYSTEMS["dgx-h100"]) | {key: value}
    with pytest.raises(DistplanError):
        cluster.read_cluster(Document(file="own.yaml", value=changed, lines={}), "own", {})
    assert problems("hardware", changed)


def test_the_keys_of_hardware_are_the_readers() -> None:
    made = schema("hardware")
    assert set(made["properties"]) == set(cluster._SYSTEM_KEYS)
    assert set(made["$defs"]["accelerator"]["properties"]) == set(accelerator._KEYS)


def test_an_unknown_schema_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "modell"]) == 2
    assert "did you mean model" in capsys.readouterr().err
