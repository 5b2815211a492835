"""Every shipped profile loads, and every number in it says where it comes from."""

import math
import re

import numpy as np
import pytest

from distplan.hardware.accelerator import accelerator_names, list_accelerators, load_accelerator
from distplan.hardware.cluster import cluster_names, list_clusters, load_cluster
from distplan.hardware.collectives import price
from distplan.hardware.errors import DistplanError, DocumentError, UnknownNameError
from distplan.hardware.facts import STATUSES
from distplan.hardware.groups import group_span
from distplan.hardware.links import CURVES, load_links


@pytest.mark.parametrize("name", list_accelerators())
def test_every_accelerator_is_whole_and_sourced(name):
    device = load_accelerator(name)
    assert device.id == name and device.vendor != "unknown" and device.generation != "unknown"
    assert {"bf16", "fp16"} & set(device.peak_flops)
    assert all(1e12 < peak < 1e17 for peak in device.peak_flops.values())
    assert 2**33 < device.memory_bytes <= device.memory_label_bytes < 2**39
    assert 1e11 < device.memory_bandwidth < 1e13
    required = {"memory_bytes", "memory_label_bytes", "memory_bandwidth"}
    assert required <= set(device.facts)
    for field, fact in device.facts.items():
        assert fact.status in STATUSES, field
        assert fact.sources and all(len(source) > 5 for source in fact.sources), field
        if any("NOT re-read" in source for source in fact.sources):
            assert fact.status == "unverified", field


@pytest.mark.parametrize("name", list_clusters())
def test_every_system_is_whole_and_sourced(name):
    cluster = load_cluster(name)
    sizes = [tier.size for tier in cluster.tiers]
    assert sizes == sorted(sizes) and math.isinf(sizes[-1])
    assert all(tier.bandwidth > 0 and tier.latency > 0 for tier in cluster.tiers)
    assert cluster.tiers[0].bandwidth >= cluster.tiers[-1].bandwidth
    for field, fact in (*cluster.facts.items(), *((f"price {n}", p) for n, p in enumerate(cluster.prices))):
        assert fact.status in STATUSES, field
        assert fact.sources and all(len(source) > 5 for source in fact.sources), field
        if any("NOT re-read" in source for source in fact.sources):
            assert fact.status == "unverified", field
    assert all(re.search(r"20\d\d", price.note) for price in cluster.prices)


def test_every_accelerator_has_a_reference_system():
    for name, id in accelerator_names().items():
        assert load_cluster(name).accelerator.id == id


@pytest.mark.parametrize(
    ("typed", "system"),
    [
        ("h100", "dgx-h100"),
        ("h100-sxm", "dgx-h100"),
        ("H100-SXM", "dgx-h100"),
        ("a100-80g", "dgx-a100"),
        ("a100-40g", "aws-p4d"),
        ("gb200-nvl72", "gb200-nvl72"),
        ("mi300x", "mi300x-8x400g"),
        ("v100-32g", "dgx-v100"),
        ("b200", "dgx-b200"),
        ("mi300", "mi300x-8x400g"),
        ("4090", "ws-4090"),
    ],
)
def test_names_that_people_type(typed, system):
    assert load_cluster(typed).id == system


def test_no_alias_means_two_things():
    names = cluster_names()
    assert set(list_clusters()) <= set(names)
    assert all(names[id] == id for id in list_clusters())


@pytest.mark.parametrize(("typed", "meant"), [("h10", "h100"), ("dgx-h1000", "dgx-h100")])
def test_a_near_miss_is_suggested(typed, meant):
    with pytest.raises(UnknownNameError, match=f"did you mean .*{meant}"):
        load_cluster(typed)


def test_every_technology_has_every_curve_and_a_source():
    for link in load_links().values():
        assert set(CURVES) - {"in_switch"} <= set(link.curves)
        assert link.source
    used = {tier.technology for name in list_clusters() for tier in load_cluster(name).tiers}
    assert used <= set(load_links())


def test_memory_is_what_the_driver_gives():
    """79.15 GiB of an A100's 80, 79.11 of an H100's (torch and nvidia-smi print-outs, see the facts)."""
    for name, gib in (("a100-80g", 79.15), ("h100", 79.11), ("b200", 178.4), ("h200", 139.8)):
        assert load_accelerator(name).memory_bytes == pytest.approx(gib * 2**30, rel=1e-12)
    fact = load_accelerator("h100").facts["memory_bytes"]
    assert fact.text == "79.11 GiB" and fact.status == "measured"


# ---------------------------------------------------------------- a user's own file

OWN = """\
name: my cluster
accelerator: h100-sxm
gpus_per_node: 8
scaleup:
  technology: nvlink4
  bandwidth: 450 GB/s
  in_switch_reduction: true
fabric:
  technology: roce
  bandwidth: 200 Gbit/s
"""


def own(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_a_new_cluster_is_ten_lines(tmp_path):
    assert len(OWN.splitlines()) == 10
    cluster = load_cluster(own(tmp_path, OWN))
    assert cluster.id == "mine" and cluster.accelerator.id == "h100-sxm5-80gb"
    assert [tier.bandwidth for tier in cluster.tiers] == [450e9, 25e9]
    assert cluster.tiers[0].size == 8
    assert cluster.facts["fabric.bandwidth"].sources == (f"{tmp_path / 'mine.yaml'}:10",)


def test_a_new_accelerator_stands_in_the_same_file(tmp_path):
    inline = "accelerator:\n  peak_flops: {bf16: 500 TFLOP/s}\n  memory: 64 GiB\n  memory_bandwidth: 2 TB/s\n"
    cluster = load_cluster(own(tmp_path, OWN.replace("accelerator: h100-sxm\n", inline)))
    assert cluster.accelerator.peak_flops == {"bf16": 500e12}
    assert cluster.accelerator.memory_bytes == 64 * 2**30


def test_a_stated_latency_scales_what_a_small_message_costs(tmp_path):
    plain = load_cluster(own(tmp_path, OWN))
    slow = load_cluster(own(tmp_path, OWN + f"  latency: {plain.tiers[1].latency * 3e6} us\n"))
    two = np.array([2.0])
    group = group_span([(two, np.array([8.0]))], plain)
    seconds = [price("send_recv", np.array([1.0]), group, cluster).seconds[0] for cluster in (plain, slow)]
    assert seconds[1] == pytest.approx(3 * seconds[0], rel=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("450 GB/s", "450", ":6: scaleup.bandwidth: 450 has no unit"),
        ("450 GB/s", "450 GiB", ":6: scaleup.bandwidth: .* not a data rate"),
        ("450 GB/s", "-450 GB/s", ":6: scaleup.bandwidth: .* negative"),
        ("gpus_per_node: 8", "gpus_per_node: 0", ":3: gpus_per_node: 0 is too small"),
        ("gpus_per_node: 8", "gpus_per_nodes: 8", ":3: gpus_per_nodes: unknown key; did you mean gpus_per_node"),
        ("gpus_per_node: 8\n", "", "'gpus_per_node' is missing"),
        ("h100-sxm", "h100-smx", ":2: accelerator: unknown accelerator 'h100-smx'; did you mean h100-sxm"),
        ("nvlink4", "nvlink9", ":5: scaleup.technology: 'nvlink9' is not one of .*did you mean nvlink"),
        ("fabric:", "fabrik:", ":8: fabrik: unknown key; did you mean fabric"),
        ("true", "maybe", ":7: scaleup.in_switch_reduction: expected true or false"),
    ],
)
def test_a_mistake_in_it_is_pointed_at(tmp_path, old, new, said):
    with pytest.raises(DocumentError, match=said):
        load_cluster(own(tmp_path, OWN.replace(old, new)))


def test_a_missing_file_is_an_error_of_its_own(tmp_path):
    with pytest.raises(DistplanError, match="No such file"):
        load_cluster(tmp_path / "absent.yaml")
