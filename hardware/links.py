"""What is achieved over each kind of link: constants of the collective model, from data/collectives.yaml.

The numbers in data/collectives_fit.yaml are written by benchmarks/calibrate_collectives.py from
published measurements; data/collectives.yaml says which technology uses which of them, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from distplan.hardware.documents import Document, load_mapping, no_other_keys, take
from distplan.hardware.units import parse_seconds

LINKS_FILE = Path(__file__).parent / "data" / "collectives.yaml"
FITS_FILE = Path(__file__).parent / "data" / "collectives_fit.yaml"
CURVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "in_switch")
STATUSES = ("measured", "scaled", "assumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """seconds = L + T + large·L·T/(T + knee·L), of latency L and transfer time T.

    Small messages travel by low-latency protocols, large ones by protocols with (1 + large) times the
    latency and the full bandwidth (NVIDIA/nccl src/graph/tuning.cc has three of them); the last term
    goes smoothly from one to the other.
    """

    base_seconds: float
    rank_seconds: float
    """added per further rank (ring step, or peer of an all-to-all)"""
    efficiency: float
    """of the link's line rate, for large messages"""
    own_copy: float
    """bytes of the rank's own part that cost as much as a byte on the wire"""
    large: float
    knee: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Constants of one technology."""

    technology: str
    curves: Mapping[str, Curve]
    """collective -> Curve; a fabric's rank_seconds is its latency per hop"""
    least_switch_ranks: float
    """in-switch reduction is used from this many ranks on"""
    share_by_ranks: tuple[float, ...]
    """share of the links that n = 1, 2, … ranks can use, where the wiring is irregular; else empty"""
    status: str
    source: str


def _read_curve(doc: Document) -> Curve:
    no_other_keys(doc, ("base", "per_rank", "efficiency", "own_copy", "large", "knee"))
    return Curve(
        base_seconds=take(doc, "base", parse_seconds),
        rank_seconds=take(doc, "per_rank", parse_seconds),
        efficiency=take(doc, "efficiency", float, minimum=0.01, maximum=1.5),
        own_copy=take(doc, "own_copy", float, minimum=-0.9, maximum=4.0),
        large=take(doc, "large", float, minimum=0.0, maximum=100.0),
        knee=take(doc, "knee", float, minimum=0.01, maximum=100.0),
    )


@cache
def _fits() -> Mapping[str, Mapping[str, Curve]]:
    fits = take(load_mapping(FITS_FILE), "fits", Document)
    return {
        name: {curve: _read_curve(take(fits.section(name), curve, Document)) for curve in fits.value[name]}
        for name in fits.value
    }


@cache
def load_links() -> Mapping[str, Link]:
    """Technology -> constants, of every technology that a system file may name."""
    entries = take(load_mapping(LINKS_FILE), "technologies", Document)
    return {name: _read_link(entries.section(name), name) for name in entries.value}


@cache
def link_of(technology: str, hop_seconds: float) -> Link:
    """Constants of a technology whose hop takes `hop_seconds`: every latency scaled alike."""
    link = load_links()[technology]
    pair = link.curves["send_recv"]
    return _with_latency(link, hop_seconds / (pair.base_seconds + pair.rank_seconds))


def _with_latency(link: Link, scale: float) -> Link:
    curves = {
        key: replace(curve, base_seconds=curve.base_seconds * scale, rank_seconds=curve.rank_seconds * scale)
        for key, curve in link.curves.items()
    }
    return replace(link, curves=curves)


def _read_link(doc: Document, name: str) -> Link:
    no_other_keys(doc, ("fit", "efficiency_scale", "least_switch_ranks", "share_by_ranks", "status", "source"))
    fit = take(doc, "fit", str, choices=tuple(_fits()))
    scale = take(doc, "efficiency_scale", float, default=1.0, minimum=0.01, maximum=10.0)
    curves = {key: replace(curve, efficiency=curve.efficiency * scale) for key, curve in _fits()[fit].items()}
    return Link(
        technology=name,
        curves=curves,
        least_switch_ranks=take(doc, "least_switch_ranks", float, default=2.0, minimum=2),
        share_by_ranks=tuple(float(share) for share in take(doc, "share_by_ranks", list, default=[])),
        status=take(doc, "status", str, choices=STATUSES),
        source=take(doc, "source", str),
    )
