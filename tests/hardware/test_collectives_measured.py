"""Modelled against published collective times (nccl-tests and the like; tests/data/collective_times.csv).

`bytes` there is nccl-tests' size: the full buffer also for all_gather. The ceilings are generous; what is
reached is printed by `python -m benchmarks.calibrate_collectives`.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from distplan.hardware.cluster import load_cluster
from distplan.hardware.collectives import price
from distplan.hardware.groups import group_span

TIMES = Path(__file__).parents[1] / "data" / "collective_times.csv"


def rows():
    with TIMES.open() as stream:
        return [row for row in csv.DictReader(stream) if float(row["bytes"]) >= 2**20]


def relative_errors(mine):
    errors = []
    for row in mine:
        cluster = load_cluster(row["system"])
        ranks, nodes, size = (np.array([float(row[key])]) for key in ("ranks", "nodes", "bytes"))
        axes = [(ranks / nodes, np.ones(1)), (nodes, np.full(1, cluster.tiers[0].size))]
        group = group_span(axes, cluster, gpus=np.where(nodes == 1.0, ranks, np.inf))
        payload = size / ranks if row["collective"] == "all_gather" else size
        errors.append(price(row["collective"], payload, group, cluster).seconds[0] / float(row["seconds"]) - 1.0)
    return np.abs(errors)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"])
def test_one_node_from_one_mebibyte_up(kind):
    errors = relative_errors([r for r in rows() if r["collective"] == kind and r["nodes"] == "1"])
    assert len(errors) >= 8
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.9) < 0.25


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "send_recv"])
def test_several_nodes_from_one_mebibyte_up(kind):
    errors = relative_errors([r for r in rows() if r["collective"] == kind and r["nodes"] != "1"])
    assert len(errors) >= 4
    assert np.median(errors) < 0.10
    assert np.quantile(errors, 0.9) < 0.35


@pytest.mark.parametrize("system", sorted({row["system"] for row in rows()}))
def test_no_system_is_far_off(system):
    errors = relative_errors([r for r in rows() if r["system"] == system])
    assert np.median(errors) < 0.15
