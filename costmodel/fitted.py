"""The constants fitted to end-to-end runs, and nothing else: fitted.yaml, written by `python -m benchmarks.fit`.

A software factor per runtime and generation of accelerator, how well each kind of collective hides behind compute,
fragmentation and context per runtime, and the quantiles of what is left: the bands of every estimate. They are
shared by all models; no run, source or model has a constant of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from distplan.hardware.cluster import Cluster
from distplan.hardware.documents import Document, load_mapping, no_other_keys, take

FILE = Path(__file__).with_name("fitted.yaml")
DEFAULT = "default"
OVERLAPS = ("fsdp_param", "fsdp_grad", "dp_grad", "dp_param", "tp", "tp_backward", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Quantiles of measured over predicted, of runs of sources left out of the fit; `runs` of them."""

    low: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """fitted.yaml. Keys of the bands: (generation, runtime, model kind), each may be `default`."""

    software_factor: Mapping[tuple[str, str], float]
    """(runtime, generation) -> measured over modelled time of everything that a micro-batch does"""
    overlap_efficiency: Mapping[str, float]
    """kind of collective -> the share of it that what it hides behind really hides"""
    fragmentation: Mapping[str, float]
    context_bytes: Mapping[str, float]
    spread: Mapping[str, float]
    """log: `cluster`, standard deviation of the medians of groups of runs (source, system, dense or with experts);
    `run`, robust deviation of the runs of one group from their median"""
    time_band: Mapping[tuple[str, ...], Band]
    memory_band: Mapping[tuple[str, ...], Band]


@cache
def fitted() -> Fitted:
    """The shipped constants."""
    return read_fitted(load_mapping(FILE))


def read_fitted(doc: Document) -> Fitted:
    """Raises DocumentError where the file is wrong."""
    no_other_keys(doc, ("note", *Fitted.__dataclass_fields__))
    factors = {}
    for of_runtime in doc.section("software_factor").items():
        for entry in of_runtime.items():
            factors[str(of_runtime.where[-1]), str(entry.where[-1])] = _value(entry, 0.1, 10.0)
    return Fitted(
        software_factor=factors,
        overlap_efficiency=_values(doc.section("overlap_efficiency"), 1.0),
        fragmentation=_values(doc.section("fragmentation"), 1.0),
        context_bytes=_values(doc.section("context_bytes"), float(2**40)),
        spread=_values(doc.section("spread"), 1.0),
        time_band=_bands(doc.section("time_band")),
        memory_band=_bands(doc.section("memory_band")),
    )


def _values(doc: Document, maximum: float) -> Mapping[str, float]:
    return {str(entry.where[-1]): _value(entry, 0.0, maximum) for entry in doc.items()}


def _value(entry: Document, minimum: float, maximum: float) -> float:
    return float(take(entry, "value", float, minimum=minimum, maximum=maximum))


def _bands(doc: Document) -> Mapping[tuple[str, ...], Band]:
    """Keys are "generation runtime kind"."""
    return {
        tuple(str(entry.where[-1]).split()): Band(
            low=take(entry, "low", float, minimum=0.0),
            high=take(entry, "high", float, minimum=0.0),
            runs=take(entry, "runs", int, minimum=0),
        )
        for entry in doc.items()
    }


def software_factors(runtime: str) -> Mapping[str, float]:
    """Generation -> factor of this runtime, else of all runtimes on that generation; `default` for the others."""
    factors = fitted().software_factor
    found = {generation: value for (name, generation), value in factors.items() if name == DEFAULT}
    return found | {generation: value for (name, generation), value in factors.items() if name == runtime}


def fragmentation(runtime: str) -> float:
    """Share of what is allocated and freed in a step that the allocator reserves on top."""
    values = fitted().fragmentation
    return values.get(runtime, values[DEFAULT])


def context_bytes(runtime: str) -> float:
    """Device memory outside the allocator: contexts, kernels, communicators."""
    values = fitted().context_bytes
    return values.get(runtime, values[DEFAULT])


def time_band(generation: str, runtime: str, kind: str) -> Band:
    """Of the step time; kind: dense | moe. The runs most like it: narrowest key first, `default` last."""
    return nearest_band(fitted().time_band, generation, runtime, kind)


def memory_band(generation: str, runtime: str, kind: str) -> Band:
    """Of the device's bytes."""
    return nearest_band(fitted().memory_band, generation, runtime, kind)


def measured_band(cluster: Cluster, name: str) -> Band | None:
    """time_band_dense, memory_band_moe, … of runs on this very cluster; None where it has none."""
    entry = cluster.calibration.scalars.get(name)
    return None if entry is None else Band(low=entry.values["low"], high=entry.values["high"], runs=entry.points)


def nearest_band(bands: Mapping[tuple[str, ...], Band], generation: str, runtime: str, kind: str) -> Band:
    """The band of the narrowest key that there is."""
    ladder = (
        (generation, runtime, kind),
        (generation, DEFAULT, kind),
        (DEFAULT, runtime, kind),
        (DEFAULT, DEFAULT, kind),
    )
    return next((bands[key] for key in ladder if key in bands), bands[DEFAULT, DEFAULT, DEFAULT])
