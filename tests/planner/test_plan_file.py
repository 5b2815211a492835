"""strategy.yaml: what is written is read back, strictly; the same plan is the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distplan.hardware.cluster import Cluster, load_cluster, with_network_scaled
from distplan.hardware.documents import load_mapping
from distplan.hardware.errors import DistplanError, DocumentError
from distplan.planner.plan import Plan
from distplan.planner.plan_file import load_plan, plan_text, write_plan


def written(plan: Plan) -> str:
    assert plan.best is not None
    return plan_text(plan, plan.best)


def test_what_is_written_is_read_back(invented_plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "strategy.yaml"
    write_plan(path, replace(invented_plan, reserve_bytes=10.0 * 2**30 + 1))
    read = load_plan(path)
    assert invented_plan.best is not None
    assert read.strategy == invented_plan.best.strategy
    assert read.model == invented_plan.model
    assert read.workload == invented_plan.workload
    assert read.cluster == invented_plan.cluster
    assert read.runtime == invented_plan.runtime
    assert read.reserve_bytes == 10.0 * 2**30 + 1
    assert read.changed == ()


def test_the_same_plan_is_the_same_bytes_and_names_no_time(invented_plan: Plan) -> None:
    text = written(invented_plan)
    assert text == written(invented_plan)
    assert text.isascii()
    assert "20" + "26" not in text


def test_hardware_of_ones_own_travels_in_the_file(invented_plan: Plan, tmp_path: Path) -> None:
    own = tmp_path / "lab.yaml"
    own.write_text(
        "name: lab\naccelerator: h100-sxm\ngpus_per_node: 4\n"
        "scaleup: {technology: nvlink4, bandwidth: 450 GB/s}\nfabric: {technology: infiniband, bandwidth: 25 GB/s}\n"
    )
    cluster = load_cluster(own)
    plan = replace(invented_plan, cluster=cluster)
    with pytest.raises(DistplanError, match="content of its file"):
        write_plan(tmp_path / "strategy.yaml", plan)
    write_plan(tmp_path / "strategy.yaml", plan, hardware=load_mapping(own).value)
    own.unlink()
    again = load_plan(tmp_path / "strategy.yaml")
    assert [tier.bandwidth for tier in again.cluster.tiers] == [tier.bandwidth for tier in cluster.tiers]
    assert again.hardware_document is not None


def test_a_runtime_of_ones_own_travels_in_the_file(invented_plan: Plan, tmp_path: Path) -> None:
    runtime = replace(invented_plan.runtime, name="ours", context_bytes=1.5e9)
    write_plan(tmp_path / "strategy.yaml", replace(invented_plan, runtime=runtime))
    assert load_plan(tmp_path / "strategy.yaml").runtime == runtime


def test_a_reference_whose_content_changed_is_reported(
    invented_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(tmp_path / "strategy.yaml", invented_plan)

    def slower(name: str) -> Cluster:
        return with_network_scaled(load_cluster(name), 0.5)

    monkeypatch.setattr("distplan.planner.plan_file.load_cluster", slower)
    assert load_plan(tmp_path / "strategy.yaml").changed == (
        "hardware dgx-h100 is not what it was when this file was written",
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("format_version: '1.0'", "format_version: '2.0'", r"strategy.yaml:3: format_version: version 2.0"),
        ("  tp: 8", "  tp: eight", "strategy.tp: expected a whole number"),
        ("  tp: 8", "  tp: 0", "too small"),
        ("  tp: 8", "  tpp: 8", "did you mean tp"),
        ("  zero: 1", "  zero: 7", "is not one of 0, 1, 2, 3"),
        ("  schedule: interleaved", "  schedule: interleved", "did you mean interleaved"),
        ("  id: dgx-h100", "  id: dgx-h10", "did you mean dgx-h100"),
        ("    layers: 80", "    layers: 99999999", "too large"),
        ("    compute: bf16", "    compute: bf61", "did you mean bf16"),
        ("  seq_len: 8192", "  seq_len: -1", "too small"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(
    invented_plan: Plan, tmp_path: Path, old: str, new: str, says: str
) -> None:
    text = written(invented_plan)
    assert text.count(old + "\n") >= 1
    path = tmp_path / "strategy.yaml"
    path.write_text(text.replace(old + "\n", new + "\n", 1))
    with pytest.raises(DocumentError, match=says) as caught:
        load_plan(path)
    assert caught.value.line is not None


@pytest.mark.parametrize("place", ["/dev/full", ".", "absent/strategy.yaml"])
def test_a_place_that_cannot_be_written_is_refused(invented_plan: Plan, tmp_path: Path, place: str) -> None:
    with pytest.raises(DistplanError):
        write_plan(tmp_path / place, invented_plan)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_survives_a_write_that_fails(
    invented_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "strategy.yaml"
    path.write_text("mine")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(DistplanError, match="No space left"):
        write_plan(path, invented_plan)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]
