"""What was measured on one cluster: the section `calibration` of a hardware file, in place of the shipped constants.

`distplan calibrate` writes it. Constants have the form of those shipped (rate_types, links.Curve, fitted.yaml); each
entry says how many measurements are behind it and which file they came from. What is absent is as shipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distplan.hardware.documents import Document, no_other_keys, take
from distplan.hardware.errors import DistplanError
from distplan.hardware.units import BYTES, SECONDS, Dimension, parse

Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One constant of an entry: its dimension (None = a plain number) and the range in base units that makes sense."""

    dimension: Dimension | None = None
    low: float = 0.0
    high: float = 1.5


_TIME = Key(dimension=SECONDS, high=0.1)
_BAND: Mapping[str, Key] = {"low": Key(low=0.01, high=1.0), "high": Key(low=1.0, high=100.0)}
GEMM: Mapping[str, Key] = {
    "peak_fraction": Key(low=0.01),
    "bandwidth_fraction": Key(low=0.01),
    "latency": _TIME,
    "overlap": Key(),
    "ramp": Key(high=1e4),
    "wave": Key(),
    "tile_128": Key(low=0.5, high=5.0),
    "tile_64": Key(low=0.5, high=5.0),
}
"""fields of GemmRates; bandwidth and rate as fractions of the accelerator's peaks, the costs of tiles of 128 and 64"""
ATTENTION: Mapping[str, Key] = {
    "peak_fraction": Key(low=0.01),
    "head_dim_64": Key(low=0.1, high=3.0),
    "head_dim_256": Key(low=0.1, high=3.0),
    "ramp": Key(high=1e4),
    "causal_ramp": Key(high=1e4),
    "tail_rows": Key(high=1e4),
    "latency": _TIME,
}
"""fields of AttentionRates"""
CURVE: Mapping[str, Key] = {
    "base": _TIME,
    "per_rank": _TIME,
    "efficiency": Key(low=0.01),
    "own_copy": Key(low=-0.9, high=4.0),
    "large": Key(high=100.0),
    "knee": Key(low=0.01, high=100.0),
}
"""fields of links.Curve"""
SCALARS: Mapping[str, Mapping[str, Key]] = {
    "memory_fraction": {"value": Key(low=0.01)},
    "host_fraction": {"value": Key(low=0.01)},
    "sustained": {"value": Key(low=0.1, high=1.0)},
    "software_factor": {"value": Key(low=0.1, high=10.0)},
    "fragmentation": {"value": Key(high=1.0)},
    "context_bytes": {"value": Key(dimension=BYTES, high=2.0**40)},
    "time_band_dense": _BAND,
    "time_band_moe": _BAND,
    "memory_band_dense": _BAND,
    "memory_band_moe": _BAND,
}
"""entries that stand alone; from software_factor on they are of end-to-end runs (the context may be of a benchmark).
software_factor multiplies the runtime's own; bands are quantiles of measured over predicted, by kind of model"""
DTYPES = ("bf16", "fp16", "fp8")
DIRECTIONS = ("forward", "backward")
TIERS = ("scaleup", "node", "fabric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Constants in base units with the number of measurements behind them and where these came from."""

    values: Mapping[str, float]
    points: int
    source: str

    @property
    def value(self) -> float:
        """Of an entry with one number."""
        return self.values["value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Entries by what they are of; empty where nothing was measured."""

    gemm: Mapping[str, Entry] = field(default_factory=dict)
    """dtype -> GEMM's keys"""
    attention: Mapping[str, Entry] = field(default_factory=dict)
    """forward | backward -> ATTENTION's keys"""
    links: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    """tier -> curve (links.CURVES) -> CURVE's keys"""
    scalars: Mapping[str, Entry] = field(default_factory=dict)
    """SCALARS' names"""

    def number(self, name: str) -> float | None:
        """Of a scalar; None where it was not measured."""
        return self.scalars[name].value if name in self.scalars else None


NOTHING = Calibration()


def read_calibration(doc: Document, curves: tuple[str, ...]) -> Calibration:
    """The section of a hardware file; DocumentError with the line where it is wrong. `curves`: names of collectives."""
    no_other_keys(doc, ("gemm", "attention", "links", *SCALARS))
    links = take(doc, "links", Document, default=None)
    if links is not None:
        no_other_keys(links, TIERS)
    return Calibration(
        gemm=_entries(doc, "gemm", DTYPES, GEMM),
        attention=_entries(doc, "attention", DIRECTIONS, ATTENTION),
        links={} if links is None else {tier: _entries(links, tier, curves, CURVE) for tier in links.value},
        scalars={name: _entry(take(doc, name, Document), keys) for name, keys in SCALARS.items() if name in doc.value},
    )


def _entries(doc: Document, name: str, known: tuple[str, ...], keys: Mapping[str, Key]) -> Mapping[str, Entry]:
    section = take(doc, name, Document, default=None)
    if section is None:
        return {}
    no_other_keys(section, known)
    return {key: _entry(take(section, key, Document), keys) for key in section.value}


def _entry(doc: Document, keys: Mapping[str, Key]) -> Entry:
    no_other_keys(doc, (*keys, "points", "source"))
    return Entry(
        values={name: _number(doc, name, key) for name, key in keys.items()},
        points=take(doc, "points", int, minimum=0),
        source=take(doc, "source", str),
    )


def _number(doc: Document, name: str, key: Key) -> float:
    dimension = key.dimension
    if dimension is None:
        return float(take(doc, name, float, minimum=key.low, maximum=key.high))
    return float(take(doc, name, lambda raw: parse(raw, dimension), minimum=key.low, maximum=key.high))


def check_bounds(calibration: Calibration) -> None:
    """Raise DistplanError where a constant is outside the range that `read_calibration` takes."""
    of_links = [(f"links.{tier}", CURVE, of) for tier, of in calibration.links.items()]
    for prefix, keys, entries in (
        ("gemm", GEMM, calibration.gemm),
        ("attention", ATTENTION, calibration.attention),
        *of_links,
    ):
        for name, entry in entries.items():
            _check_entry(f"{prefix}.{name}", entry, keys)
    for name, entry in calibration.scalars.items():
        _check_entry(name, entry, SCALARS[name])


def _check_entry(where: str, entry: Entry, keys: Mapping[str, Key]) -> None:
    for name, key in keys.items():
        value = entry.values[name]
        if not key.low <= value <= key.high:
            which = where if name == "value" else f"{where}.{name}"
            raise DistplanError(
                f"{entry.source}: {which} would be {value:.4g}, and {key.low:g} to {key.high:g} makes sense: "
                "the file's times or sizes are not what they are taken for, or of another system"
            )


def content_of(calibration: Calibration) -> dict[str, Any]:
    """The section as plain values with units, 6 significant digits: `read_calibration`'s inverse."""
    content: dict[str, Any] = {}
    for name, keys, entries in (("gemm", GEMM, calibration.gemm), ("attention", ATTENTION, calibration.attention)):
        if entries:
            content[name] = {key: _written(entries[key], keys) for key in sorted(entries)}
    links = {
        tier: {name: _written(entry, CURVE) for name, entry in sorted(calibration.links[tier].items())}
        for tier in TIERS
        if calibration.links.get(tier)
    }
    content |= {"links": links} if links else {}
    return content | {
        name: _written(calibration.scalars[name], keys) for name, keys in SCALARS.items() if name in calibration.scalars
    }


def _written(entry: Entry, keys: Mapping[str, Key]) -> dict[str, Any]:
    values = {name: _text(entry.values[name], key.dimension) for name, key in keys.items()}
    return values | {"points": entry.points, "source": entry.source}


def _text(value: float, dimension: Dimension | None) -> Any:
    if dimension is SECONDS:
        return f"{value * 1e6:.6g} us"
    return f"{value / 2.0**30:.6g} GiB" if dimension is BYTES else float(f"{value:.6g}")
