"""group_span against an enumeration of every instance of the group."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distplan.hardware.cluster import load_cluster
from distplan.hardware.groups import _in_domains, group_span


def column(*values):
    return np.array(values, dtype=np.float64)


def enumerate_worst(world, mesh, used, domain):
    """(fewest members that share a domain, most domains) over all groups of the `used` axes of a mesh.

    mesh: degrees, innermost first, repeated outwards until `world` ranks are covered.
    """
    strides = [math.prod(mesh[:axis]) for axis in range(len(mesh))]
    fewest, most = math.inf, 0
    for start in range(world):
        if any((start // strides[axis]) % mesh[axis] for axis in used):
            continue
        members = [
            start + sum(i * strides[axis] for i, axis in zip(index, used, strict=True))
            for index in product(*(range(mesh[axis]) for axis in used))
        ]
        domains = [member // domain for member in members]
        fewest = min(fewest, *(domains.count(d) for d in set(domains)))
        most = max(most, len(set(domains)))
    return fewest, most


@given(st.integers(1, 14), st.integers(1, 14))
def test_neighbours_are_priced_at_the_worst_instance(n, domain):
    world = math.lcm(n, domain)
    inside, spans = _in_domains(column(n), column(1), column(domain))
    assert (inside[0], spans[0]) == enumerate_worst(world, (n,), (0,), domain)


@given(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=4, max_size=4),
    st.sets(st.integers(0, 3), min_size=1, max_size=3),
    st.sampled_from(["dgx-h100", "gb200-nvl72", "meta-24k-roce"]),
)
def test_power_of_two_meshes_are_exact(mesh, used, name):
    cluster = load_cluster(name)
    used = tuple(sorted(used))
    strides = [math.prod(mesh[:axis]) for axis in range(4)]
    group = group_span([(column(mesh[axis]), column(strides[axis])) for axis in used], cluster)
    domain = int(cluster.tiers[0].size)
    if domain & (domain - 1) == 0:
        expected = enumerate_worst(max(math.prod(mesh), domain), mesh, used, domain)
        assert (group.inside[0][0], group.spans[0][0]) == expected
    assert group.size[0] == math.prod(mesh[axis] for axis in used)
    assert group.inside[-1][0] == group.size[0] and group.spans[-1][0] == 1


@given(
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.sets(st.integers(0, 2), min_size=1, max_size=2),
    st.integers(1, 9),
)
def test_no_instance_is_worse_than_what_is_priced(mesh, used, domain):
    used = tuple(sorted(used))
    strides = [math.prod(mesh[:axis]) for axis in range(3)]
    world = math.lcm(math.prod(mesh), domain)
    fewest, most = enumerate_worst(world, mesh, used, domain)
    parts = [_in_domains(column(mesh[axis]), column(strides[axis]), column(domain)) for axis in used]
    assert math.prod(inside[0] for inside, _ in parts) <= fewest
    assert math.prod(spans[0] for _, spans in parts) >= most


def test_six_neighbours_in_domains_of_four_leave_two_alone():
    cluster = load_cluster("a100-pcie-80gb")  # bridged pairs in nodes of eight
    group = group_span([(column(6), column(1))], cluster)
    assert [t.size for t in cluster.tiers[:2]] == [2, 8]
    assert group.inside[0][0] == 2 and group.spans[0][0] == 3
    assert group.inside[1][0] == 2 and group.spans[1][0] == 2


def test_an_axis_that_continues_another_is_one_run():
    cluster = load_cluster("dgx-h100")
    whole = group_span([(column(6), column(1))], cluster)
    split = group_span([(column(3), column(1)), (column(2), column(3))], cluster)
    assert split.inside == whole.inside and split.spans == whole.spans


def test_a_job_within_one_domain_straddles_nothing():
    cluster = load_cluster("dgx-h100")
    group = group_span([(column(3, 3), column(1, 1))], cluster, gpus=column(6, 48))
    assert group.inside[0].tolist() == [3, 1]
    assert group.spans[0].tolist() == [1, 2]


def test_a_job_takes_as_many_of_each_domain():
    racks = load_cluster("gb200-nvl72")
    jobs = column(64, 72, 128, 144, 1024)
    whole = group_span([(column(64, 72, 64, 36, 64), np.ones(5))], racks, gpus=jobs)
    assert whole.spans[0].tolist() == [1, 1, 1, 1, 1]
    nodes = load_cluster("dgx-h100")
    assert group_span([(column(6), column(1))], nodes, gpus=column(12)).inside[0][0] == 6
    # a prime number of GPUs fills nodes one after the other
    assert group_span([(column(13), column(1))], nodes, gpus=column(13)).spans[0][0] == 2


@pytest.mark.parametrize("stride", [1, 2, 8, 64])
def test_a_group_of_one_spans_nothing(stride):
    group = group_span([(column(1), column(stride))], load_cluster("dgx-h100"))
    assert group.size[0] == group.inside[0][0] == group.spans[0][0] == 1
