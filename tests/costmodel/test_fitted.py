"""Constants fitted to runs are data: narrowest key first, bands hold the estimate, a wrong file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distplan.costmodel import fitted
from distplan.costmodel.estimate import estimate
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import list_runtimes, load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster
from distplan.hardware.documents import load_mapping
from distplan.hardware.errors import DistplanError


@pytest.mark.parametrize("runtime", list_runtimes())
@pytest.mark.parametrize("generation", ["ampere", "hopper", "blackwell", "never-heard-of"])
def test_every_runtime_has_constants_on_every_generation(runtime: str, generation: str) -> None:
    assert 0.5 <= load_runtime(runtime).factor(generation) <= 2.0
    for kind in ("dense", "moe"):
        for band in (fitted.time_band(generation, runtime, kind), fitted.memory_band(generation, runtime, kind)):
            assert 0.0 < band.low <= 1.0 <= band.high
    assert 0.0 <= fitted.fragmentation(runtime) <= 1.0 and fitted.context_bytes(runtime) > 0.0


def test_the_estimates_band_is_that_of_the_runs_most_like_it() -> None:
    found = load_model("llama-2-7b")
    work = workload(found.model, found.workload, gpus=8)
    cluster, runtime = load_cluster("dgx-h100"), load_runtime("megatron")
    one = estimate(found.model, work, cluster, runtime, Strategy(dp_shard=8))
    band = fitted.time_band("hopper", "megatron", "dense")
    assert one.step_seconds_low[0] == one.step_seconds[0] * band.low
    assert one.step_seconds_high[0] == one.step_seconds[0] * band.high


def test_the_narrowest_key_wins(tmp_path: Path) -> None:
    value = yaml.safe_load(fitted.FILE.read_text(encoding="utf-8"))
    value["time_band"] = {
        "default default default": {"low": 0.5, "high": 2.0, "runs": 1},
        "hopper default dense": {"low": 0.8, "high": 1.2, "runs": 1},
        "hopper megatron dense": {"low": 0.9, "high": 1.1, "runs": 1},
    }
    file = tmp_path / "fitted.yaml"
    file.write_text(yaml.safe_dump(value))
    bands = fitted.read_fitted(load_mapping(file)).time_band
    assert fitted.nearest_band(bands, "hopper", "megatron", "dense").high == 1.1
    assert fitted.nearest_band(bands, "hopper", "paddle", "dense").high == 1.2
    assert fitted.nearest_band(bands, "volta", "paddle", "moe").high == 2.0


def test_every_constant_says_how_many_runs_stand_behind_it() -> None:
    value = yaml.safe_load(fitted.FILE.read_text(encoding="utf-8"))
    for part in ("overlap_efficiency", "fragmentation", "context_bytes", "time_band", "memory_band"):
        assert all(entry["runs"] >= 0 for entry in value[part].values()), part
    for factors in value["software_factor"].values():
        assert all(entry["runs"] >= 0 for entry in factors.values())


def test_a_wrong_file_is_refused_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "fitted.yaml"
    file.write_text(fitted.FILE.read_text(encoding="utf-8").replace("overlap_efficiency:", "overlap_efficency:"))
    with pytest.raises(DistplanError, match="overlap_efficency"):
        fitted.read_fitted(load_mapping(file))
