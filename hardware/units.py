"""Quantities at the edge: strings with units in, base floats (bytes, seconds, FLOPs) inside, strings out.

The only place that knows 1e9 and 2**30. A bare number is an error: it has no unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distplan.hardware.errors import UnitError

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BINARY_DOWN = (("Ti", 2.0**40), ("Gi", 2.0**30), ("Mi", 2.0**20), ("Ki", 2.0**10), ("", 1.0))
_QUANTITY = re.compile(r"\s*([-+]?(?:\d[\d_,]*)?\.?\d+(?:[eE][-+]?\d+)?)\s*(.*?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """What a quantity measures: its units, and the range outside which a value is a slip of the pen."""

    name: str
    example: str
    units: Mapping[str, float]
    least: float
    most: float


def _with_prefixes(*units: tuple[str, float]) -> dict[str, float]:
    return {f"{prefix}{unit}": scale * factor for unit, factor in units for prefix, scale in _DECIMAL.items()}


_BYTES = (
    _with_prefixes(("B", 1.0))
    | {f"{prefix}B": scale for prefix, scale in _BINARY.items()}
    | {"KB": 1e3, "bytes": 1.0, "byte": 1.0}
)
_RATES = {f"{unit}{per}": scale for unit, scale in _BYTES.items() for per in ("/s", "ps") if unit[-1] == "B"}
_BIT_RATES = _with_prefixes(*((bit, 1.0 / 8.0) for bit in ("bit/s", "bits/s", "b/s", "bps")))

BYTES = Dimension(name="a number of bytes", example="80 GiB", units=_BYTES, least=0.0, most=1e18)
BYTES_PER_SECOND = Dimension(
    name="a data rate", example="400 Gbit/s or 3.35 TB/s", units=_RATES | _BIT_RATES, least=1e3, most=1e16
)
FLOPS_PER_SECOND = Dimension(
    name="a compute rate",
    example="989 TFLOP/s",
    units=_with_prefixes(("FLOP/s", 1.0), ("FLOPS", 1.0), ("FLOPs/s", 1.0), ("OP/s", 1.0), ("OPS", 1.0)),
    least=1e6,
    most=1e19,
)
SECONDS = Dimension(
    name="a time",
    example="8.4 us",
    units={"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0},
    least=0.0,
    most=1e8,
)
GPU_SECONDS = Dimension(
    name="GPU time between failures",
    example="30,000 GPU-h",
    units={"GPU-h": 3600.0, "GPU-hours": 3600.0, "GPU-days": 86400.0},
    least=3600.0,
    most=1e15,
)
WATTS = Dimension(name="a power", example="700 W", units={"W": 1.0, "kW": 1e3}, least=1.0, most=1e5)
DOLLARS_PER_HOUR = Dimension(
    name="a price", example="2.95 USD/h", units={"USD/h": 1.0, "$/h": 1.0, "USD/hour": 1.0}, least=0.0, most=1e4
)


def parse(value: object, dimension: Dimension) -> float:
    """The quantity in base units; UnitError where it is no quantity of `dimension` in a sensible range."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise UnitError(f"{value} has no unit; expected {dimension.name} such as {dimension.example}")
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) and len(value) < 80 else None
    if match is None:
        raise UnitError(f"{_shown(value)} is not {dimension.name}; write it like {dimension.example}")
    number, unit = match.groups()
    factor = dimension.units.get(unit)
    if factor is None:
        problem = _unit_problem(unit, dimension)
        raise UnitError(f"{_shown(value)} {problem}; write it like {dimension.example}")
    quantity = float(re.sub("[_,]", "", number)) * factor
    if quantity < 0.0:
        raise UnitError(f"{_shown(value)} is negative; expected {dimension.name} such as {dimension.example}")
    if not dimension.least <= quantity <= dimension.most:
        raise UnitError(f"{_shown(value)} is out of range for {dimension.name}; did you mean another unit?")
    return quantity


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unit_problem(unit: str, dimension: Dimension) -> str:
    if not unit:
        return "has no unit"
    same = [known for known in dimension.units if known.lower() == unit.lower()]
    if same:
        return f"has the unit '{unit}', which could be {' or '.join(sorted(same))}"
    return f"has the unit '{unit}', which is not {dimension.name}"


def _parser(dimension: Dimension) -> Callable[[object], float]:
    def parser(value: object) -> float:
        return parse(value, dimension)

    return parser


parse_bytes = _parser(BYTES)
parse_bytes_per_second = _parser(BYTES_PER_SECOND)
parse_flops_per_second = _parser(FLOPS_PER_SECOND)
parse_seconds = _parser(SECONDS)
parse_gpu_seconds = _parser(GPU_SECONDS)
parse_watts = _parser(WATTS)
parse_dollars_per_hour = _parser(DOLLARS_PER_HOUR)


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """Three significant digits or so, in the largest unit that leaves a number of at least one."""
    factor, unit = next(((f, u) for f, u in steps if abs(value) >= f), steps[-1])
    number = value / factor
    digits = 0 if abs(number) >= 1000 else 1 if abs(number) >= 10 else 2
    return f"{number:,.{digits}f} {unit}"


def format_bytes(value: float) -> str:
    """Binary units, as frameworks report memory: 79.2 GiB."""
    return _scaled(value, tuple((scale, f"{prefix}B") for prefix, scale in _BINARY_DOWN))


def format_gib(value: float) -> str:
    """Always GiB, for columns that are compared: 0.03 GiB."""
    return f"{value / 2.0**30:,.2f} GiB"


def format_traffic(value: float) -> str:
    """Decimal units, as network volumes are reported: 12.4 GB."""
    return _scaled(value, ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))


def format_bytes_per_second(value: float) -> str:
    return _scaled(value, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")))


def format_seconds(value: float) -> str:
    return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def format_tflops_per_second(value: float) -> str:
    """Always TFLOP/s, the unit in which rates per GPU are compared: 989.4 TFLOP/s."""
    return f"{value / 1e12:,.1f} TFLOP/s"
