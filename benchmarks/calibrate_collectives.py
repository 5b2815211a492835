"""Fit the constants of hardware/data/collectives_fit.yaml to published collective benchmarks.

    python -m benchmarks.calibrate_collectives MEASURED_CSV MICRO_CSV [--write]

Prints, for every system, collective and group size, the median and the worst relative error from 1 MiB
up (and below), with the number of rows; `--report-only` does so for the shipped constants, `--write`
replaces them. One constant set per technology is fitted to all devices and group sizes together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.collective_report import predict, report
from benchmarks.collective_rows import Row, distinct, measured_rows, micro_rows
from distplan.hardware.documents import write_atomically
from distplan.hardware.fit_collectives import MIB, OUTLIER_SCALE, RDMA, weights_of
from distplan.hardware.links import FITS_FILE, Curve, Link, load_links

NET_PEER = 2.7e-6
"""NCCL's ring latency per network peer with the LL protocol (NVIDIA/nccl src/graph/tuning.cc)"""

FITS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "nvlink2": {"all_reduce": ("dgx-v100",)},
    "nvlink3": {kind: ("dgx-a100",) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")}
    | {"send_recv": ("dgx-a100",)},
    "nvlink4": {
        kind: ("dgx-h100", "hgx-h200")
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    },
    "nvlink5": {
        kind: ("dgx-b200", "dgx-b300", "gb200-nvl72", "gb300-nvl72")
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    },
    "pcie5": {kind: ("rtxpro6000-8",) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")},
}
"""technology -> collective -> systems; fitted in this order, on one node"""
FABRICS = {
    "infiniband": ("h20-96gb-node", "dgx-a100", "dgx-h100", "hgx-h200", "dgx-b200"),
    "roce": ("gcp-a3-ultra", "oci-bm-gpu-h100"),
    "efa1": ("aws-p4de",),
    "efa": ("aws-p5", "aws-p5en", "aws-p6-b200"),
    "tcpxo": ("gcp-a3-mega",),
    "tcpx": ("gcp-a3-high",),
}


def with_curves(links: Mapping[str, Link], technology: str, curves: Mapping[str, Curve]) -> dict[str, Link]:
    link = links[technology]
    return {**links, technology: replace(link, curves={**link.curves, **curves})}


START = np.array([8e-6, 1e-6, 0.8, 0.1, 2.0, 1.5])
LOW = np.array([2e-6, 1e-9, 0.1, -0.85, 0.0, 0.1])
NET_HOP = 14e-6
"""NCCL's ring and tree latency per network hop with the Simple protocol (same table). Most rows have two nodes, one
hop, which cannot tell a hop from the set-up: the hop is kept between NCCL's two figures."""
SWITCH_RANK = 1e-6
"""a switch reduces in one pass whatever the ranks: what is added per rank is bounded by a ring's step"""
HIGH = np.array([2e-3, 1e-3, 1.2, 2.0, 20.0, 20.0])


def curve_of(x: NDArray[np.float64]) -> Curve:
    return Curve(base_seconds=x[0], rank_seconds=x[1], efficiency=x[2], own_copy=x[3], large=x[4], knee=x[5])


def solve(
    rows: list[Row],
    links_for: Callable[[NDArray[np.float64]], Mapping[str, Link]],
    start: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    in_switch: bool = True,
) -> NDArray[np.float64]:
    seconds = np.array([row.seconds for row in rows])
    weight = weights_of(row.size for row in rows)

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        errors: NDArray[np.float64] = weight * np.log(predict(rows, links_for(x), in_switch) / seconds)
        return errors

    # bounded parameters span six decades: scale them by their start
    scale = np.maximum(np.abs(start), 1e-9)
    result = least_squares(
        lambda y: residuals(y * scale),
        start / scale,
        bounds=(low / scale, high / scale),
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
        max_nfev=60,
    )
    found: NDArray[np.float64] = result.x * scale
    return found


def trial(links: Mapping[str, Link], technology: str, kind: str, x: NDArray[np.float64]) -> Mapping[str, Link]:
    return with_curves(links, technology, {kind: curve_of(x)})


def fabric_trial(links: Mapping[str, Link], technology: str, x: NDArray[np.float64]) -> Mapping[str, Link]:
    return with_curves(links, technology, fabric_curves(x))


def fit_scaleup(rows: list[Row], links: dict[str, Link]) -> dict[str, Link]:
    for technology, kinds in FITS.items():
        for kind, systems in kinds.items():
            switch = technology in ("nvlink4", "nvlink5") and kind == "all_reduce"
            mine = [r for r in rows if r.system in systems and r.kind == kind and r.nodes == 1 and r.ranks <= 8]
            ringed = [r for r in mine if not switch or r.ranks <= 4 or r.size <= MIB]
            low, high = LOW.copy(), HIGH.copy()
            if kind == "send_recv":  # one pair: nothing to tell ranks apart, no own part
                high[[1, 3]], low[3] = 2e-9, -1e-9
            x = solve(
                ringed, partial(trial, links, technology, kind), np.clip(START, low, high), low, high, in_switch=False
            )
            links = with_curves(links, technology, {kind: curve_of(x)})
            if switch:
                wide = [r for r in rows if r.system in systems and r.kind == kind and r.nodes == 1 and r.ranks > 4]
                x = solve(
                    wide,
                    partial(trial, links, technology, "in_switch"),
                    np.array([1.5e-5, 5e-7, 0.55, 0.0, 4.0, 1.5]),
                    np.array([2e-6, 1e-9, 0.4, -1e-9, 0.0, 0.1]),
                    np.array([5e-5, SWITCH_RANK, 0.7, 1e-9, 20.0, 20.0]),
                )
                links = with_curves(links, technology, {"in_switch": curve_of(x)})
    return links


def fabric_curves(x: NDArray[np.float64]) -> dict[str, Curve]:
    """One set-up and one hop latency, one efficiency, one shape; an all-reduce passes every hop twice."""
    base, hop, efficiency, large, knee = x
    common = {"efficiency": efficiency, "own_copy": 0.0, "large": large, "knee": knee}
    gather = Curve(base_seconds=base, rank_seconds=hop, **common)
    return {
        "all_reduce": Curve(base_seconds=base, rank_seconds=2.0 * hop, **common),
        "all_gather": gather,
        "reduce_scatter": gather,
        "all_to_all": Curve(base_seconds=base + hop, rank_seconds=NET_PEER, **common),
        "send_recv": Curve(base_seconds=base + hop, rank_seconds=0.0, **common),
    }


def _one_hop(curve: Curve) -> float:
    return curve.base_seconds + curve.rank_seconds


def fit_fabrics(rows: list[Row], links: dict[str, Link]) -> dict[str, Link]:
    for technology, systems in FABRICS.items():
        mine = [r for r in rows if r.system in systems and r.nodes > 1 and r.kind != "send_recv"]
        x = solve(
            mine,
            partial(fabric_trial, links, technology),
            np.array([2e-5, 1e-5, 0.85, 1.0, 1.5]),
            np.array([1e-6, NET_PEER, 0.3, 0.0, 0.1]),
            np.array([2e-3, NET_HOP, RDMA, 4.0, 5.0]),
        )
        links = with_curves(links, technology, fabric_curves(x))
        pairs = [r for r in rows if r.system in systems and r.nodes > 1 and r.kind == "send_recv"]
        if pairs:
            low, high = LOW.copy(), HIGH.copy()
            high[[1, 3]], low[3] = 2e-9, -1e-9
            x = solve(pairs, partial(trial, links, technology, "send_recv"), np.clip(START, low, high), low, high)
            links = with_curves(links, technology, {"send_recv": curve_of(x)})
    measured, gather = links["infiniband"].curves["send_recv"], links["infiniband"].curves["all_gather"]
    for technology in set(FABRICS) - {"infiniband"}:  # a pair over other fabrics, as over InfiniBand
        own = links[technology].curves["all_gather"]
        pair = replace(
            measured,
            base_seconds=measured.base_seconds * _one_hop(own) / _one_hop(gather),
            efficiency=own.efficiency * measured.efficiency / gather.efficiency,
        )
        links = with_curves(links, technology, {"send_recv": pair})
    return links


def complete(links: dict[str, Link]) -> dict[str, Link]:
    """Collectives that nobody measured on a technology, from the nearest that somebody did."""

    def relative(source: Curve, by: float) -> Curve:
        return replace(source, efficiency=source.efficiency * by)

    v3, v4 = links["nvlink3"].curves, links["nvlink4"].curves
    by = links["nvlink2"].curves["all_reduce"].efficiency / v3["all_reduce"].efficiency
    others = ("all_gather", "reduce_scatter", "all_to_all")
    links = with_curves(links, "nvlink2", {kind: relative(v3[kind], by) for kind in others})
    links = with_curves(links, "nvlink2", {"send_recv": v3["send_recv"]})
    links = with_curves(links, "nvlink5", {"send_recv": v4["send_recv"]})
    # two ranks exchanging halves are a pair sending
    halves = links["pcie5"].curves["all_to_all"]
    pair = replace(halves, efficiency=halves.efficiency / (1.0 + halves.own_copy), own_copy=0.0)
    links = with_curves(links, "pcie5", {"send_recv": pair})
    return links


def fit_xgmi(rows: list[Row], links: dict[str, Link]) -> dict[str, Link]:
    """Two large all-reduces give the efficiency; latencies and shape are NVLink 4's."""
    mine = [r for r in rows if r.system == "mi300x-8x400g"]
    v4 = links["nvlink4"].curves
    by = 1.0
    for _ in range(20):
        ratio = predict(mine, links) / np.array([r.seconds for r in mine])
        by *= float(np.exp(np.mean(np.log(ratio))))
        curves = {
            kind: replace(v4[kind], efficiency=min(v4[kind].efficiency * by, 1.0), own_copy=0.0)
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
        }
        links = with_curves(links, "xgmi", curves)
    return links


def as_yaml(links: Mapping[str, Link], num_rows: int) -> str:
    lines = [
        "# Written by benchmarks/calibrate_collectives.py --write; do not edit.",
        f"# Fitted to {num_rows} published measurements (nccl-tests and the like), each used once.",
        "fits:",
    ]
    for technology in [*FITS, "xgmi", *FABRICS]:
        lines.append(f"  {technology}:")
        for kind, c in links[technology].curves.items():
            lines.append(
                f"    {kind}: {{base: {c.base_seconds * 1e6:.4g} us, per_rank: {c.rank_seconds * 1e6:.4g} us, "
                f"efficiency: {c.efficiency:.4g}, own_copy: {round(c.own_copy, 6):.4g}, "
                f"large: {c.large:.4g}, knee: {c.knee:.4g}}}"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("micro", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--report-only", action="store_true", help="residuals of the shipped constants")
    options = parser.parse_args()
    rows = distinct([*measured_rows(options.measured), *micro_rows(options.micro)])
    links: dict[str, Link] = dict(load_links())
    if not options.report_only:
        links = fit_xgmi(rows, complete(fit_scaleup(rows, links)))
        links = fit_fabrics(rows, links)
    report(rows, links)
    if options.write:
        write_atomically(FITS_FILE, as_yaml(links, len(rows)))


if __name__ == "__main__":
    main()
