"""Laws of the collective prices, and the published wire formulas."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distplan.hardware.cluster import list_clusters, load_cluster, with_compute_scaled, with_network_scaled
from distplan.hardware.collectives import ALGORITHMS, KINDS, p2p_seconds, price
from distplan.hardware.groups import group_span

MIB = 2.0**20
SOME = ("dgx-h100", "dgx-a100", "gb200-nvl72", "mi300x-8x400g", "a100-pcie-80gb", "dgx-v100", "meta-24k-roce")


def column(*values):
    return np.array(values, dtype=np.float64)


def span(cluster, ranks, stride=1.0):
    ranks = np.atleast_1d(np.asarray(ranks, dtype=np.float64))
    return group_span([(ranks, np.full_like(ranks, stride))], cluster)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list_clusters())
def test_a_group_of_one_is_free_and_every_other_is_not(kind, name):
    cluster = load_cluster(name)
    cost = price(kind, column(MIB, MIB, MIB, MIB), span(cluster, [1, 2, 8, 128]), cluster)
    assert cost.seconds[0] == cost.wire_bytes[0] == cost.algorithm[0] == 0.0
    assert np.all(cost.seconds[1:] > 0) and np.all(cost.wire_bytes[1:] > 0)
    assert np.all(np.isfinite(cost.seconds))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_payload_is_free(kind):
    cluster = load_cluster("dgx-h100")
    cost = price(kind, column(0.0), span(cluster, 16), cluster)
    assert cost.seconds[0] == cost.wire_bytes[0] == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("ranks", "stride"), [(2, 1), (8, 1), (6, 1), (16, 1), (64, 1), (32, 8), (4, 64)])
def test_more_bytes_never_take_less_time(kind, name, ranks, stride):
    cluster = load_cluster(name)
    sizes = 2.0 ** np.arange(10.0, 36.0, 0.25)
    seconds = price(kind, sizes, span(cluster, np.full_like(sizes, ranks), stride), cluster).seconds
    assert np.all(np.diff(seconds) > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("ranks", "stride"), [(4, 1), (16, 1), (8, 8)])
def test_doubling_every_bandwidth_halves_what_is_not_latency(kind, name, ranks, stride):
    cluster = load_cluster(name)
    group = span(cluster, ranks, stride)
    huge, tiny = column(2.0**50), column(1.0)  # a petabyte drowns the latency, a byte is all latency
    fast = with_network_scaled(cluster, 2.0)
    ratio = price(kind, huge, group, fast).seconds / price(kind, huge, group, cluster).seconds
    assert ratio[0] == pytest.approx(0.5, rel=1e-4)
    ratio = price(kind, tiny, group, fast).seconds / price(kind, tiny, group, cluster).seconds
    assert ratio[0] == pytest.approx(1.0, rel=1e-3)


def test_wire_bytes_are_those_of_nccl_tests():
    """NVIDIA/nccl-tests doc/PERFORMANCE.md, with payloads as one rank gives them."""
    cluster = load_cluster("dgx-a100")  # no in-switch reduction
    n, size = column(2, 3, 8, 16), column(*[MIB] * 4)
    group = span(cluster, n)
    expected = {
        "all_reduce": 2 * (n - 1) / n * size,
        "all_gather": (n - 1) * size,
        "reduce_scatter": (n - 1) / n * size,
        "all_to_all": (n - 1) / n * size,
        "send_recv": size,
        "ring_exchange": (n - 1) * size,
    }
    for kind, wire in expected.items():
        assert price(kind, size, group, cluster).wire_bytes == pytest.approx(wire, rel=1e-15), kind


def test_reduce_scatter_then_all_gather_moves_what_a_ring_all_reduce_moves():
    cluster = load_cluster("dgx-a100")
    group, size = span(cluster, 16), column(64 * MIB)
    scatter = price("reduce_scatter", size, group, cluster).wire_bytes
    gather = price("all_gather", size / 16, group, cluster).wire_bytes
    assert (scatter + gather)[0] == pytest.approx(price("all_reduce", size, group, cluster).wire_bytes[0])


def test_reduction_in_the_switch_sends_the_payload_once():
    cluster = load_cluster("dgx-h100")
    cost = price("all_reduce", column(512 * MIB), span(cluster, 8), cluster)
    assert ALGORITHMS[int(cost.algorithm[0])] == "in_switch"
    assert cost.wire_bytes[0] == 512 * MIB
    four = price("all_reduce", column(512 * MIB), span(cluster, 4), cluster)
    assert ALGORITHMS[int(four.algorithm[0])] == "ring"


def test_a_gather_over_thousands_of_nodes_does_not_walk_them_one_by_one():
    """One GPU per node: NCCL's PAT takes 2.8 us per rank (tuning.cc), a ring a network hop of 2.7 to 14 us."""
    cluster = load_cluster("dgx-h100")
    size = column(1024.0)
    small, large = (price("all_gather", size, span(cluster, n, 8), cluster) for n in (4, 2048))
    assert ALGORITHMS[int(large.algorithm[0])] == "pat"
    assert large.seconds[0] < 2048 * 5e-6
    inside = price("all_gather", size, span(cluster, 2048, 1), cluster)
    assert ALGORITHMS[int(inside.algorithm[0])] == "ring"
    assert small.seconds < large.seconds


def test_the_ring_exchange_is_its_steps():
    cluster = load_cluster("dgx-h100")
    for ranks, stride in ((4, 1), (16, 1), (8, 8)):
        cost = price("ring_exchange", column(MIB), span(cluster, ranks, stride), cluster)
        assert cost.seconds[0] == (ranks - 1) * cost.step_seconds[0]
        assert cost.step_seconds[0] == p2p_seconds(column(MIB), span(cluster, ranks, stride), cluster)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_the_node_is_never_cheaper(kind):
    cluster = load_cluster("dgx-h100")
    size = column(64 * MIB)
    near = price(kind, size, span(cluster, 8, 1), cluster).seconds
    far = price(kind, size, span(cluster, 8, 8), cluster).seconds
    straddling = price(kind, size, span(cluster, 6, 1), cluster).seconds
    assert near < far
    assert price(kind, size, span(cluster, 4, 1), cluster).seconds < straddling


def test_all_to_all_across_nodes_is_bound_by_one_nic_per_gpu():
    """busbw tends to N/(N-1) times the NIC's rate for N nodes (sjeaugey, nccl-tests 130 and 267)."""
    cluster = load_cluster("dgx-h100")
    size = 2.0**40
    for nodes in (2, 4, 16):
        n = 8 * nodes
        busbw = (n - 1) / n * size / price("all_to_all", column(size), span(cluster, n), cluster).seconds[0]
        bound = (n - 1) / (n - 8) * 50e9
        assert 0.9 * bound < busbw <= bound


def test_an_oversubscribed_fabric_is_felt_between_pods_only():
    cluster = load_cluster("meta-24k-roce")  # pods of 3072, 7:1 between them
    size = column(2.0**34)
    within = price("all_gather", size, span(cluster, 128, 8), cluster).seconds
    between = price("all_gather", size, span(cluster, 8, 3072), cluster).seconds
    ratio = (within / 127) / (between / 7)
    assert ratio[0] == pytest.approx(1 / 7, rel=0.05)


def test_a_mesh_gives_a_pair_one_link():
    """MI300X: 47.7 GB/s between two GPUs, 312.9 GB/s among eight (ml-engineering network/README)."""
    cluster = load_cluster("mi300x")
    size = 2.0**32
    for ranks, measured in ((2, 47.67e9), (8, 312.9e9)):
        group = group_span([(column(ranks), column(1))], cluster, gpus=column(ranks))
        seconds = price("all_reduce", column(size), group, cluster).seconds[0]
        assert 2 * (ranks - 1) / ranks * size / seconds == pytest.approx(measured, rel=0.1)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS), st.sampled_from(SOME))
def test_one_row_alone_equals_itself_in_a_batch(seed, kind, name):
    rng = np.random.default_rng(seed)
    cluster = load_cluster(name)
    rows = 33
    ranks = rng.choice([1.0, 2, 3, 4, 6, 8, 12, 16, 64, 512], rows)
    stride = rng.choice([1.0, 2, 3, 4, 8, 16, 72], rows)
    size = np.exp(rng.uniform(0, 25, rows))
    batch = price(kind, size, group_span([(ranks, stride)], cluster), cluster)
    for row in range(0, rows, 4):
        one = slice(row, row + 1)
        alone = price(kind, size[one], group_span([(ranks[one], stride[one])], cluster), cluster)
        for field in ("seconds", "wire_bytes", "algorithm", "step_seconds"):
            assert getattr(alone, field)[0] == getattr(batch, field)[row]


def test_compute_scaling_leaves_the_network_alone():
    cluster = load_cluster("dgx-h100")
    scaled = with_compute_scaled(cluster, 0.9)
    assert scaled.tiers == cluster.tiers
    for dtype, peak in cluster.accelerator.peak_flops.items():
        assert scaled.accelerator.peak_flops[dtype] == 0.9 * peak
    assert math.isinf(cluster.tiers[-1].size)
