"""The budgets that a strategy can be held to, as data: one row each, and the numbers that they look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distplan.hardware.errors import UnitError
from distplan.hardware.units import Dimension, parse, parse_bytes, parse_seconds
from distplan.planner.wording import gib, percent, seconds

Plain = Mapping[str, Any]

_DOLLARS = Dimension(name="a price", example="0.09 USD", units={"USD": 1.0, "$": 1.0}, least=0.0, most=1e9)


def parse_share(value: object) -> float:
    """'5%' or '0.05' as 0.05; UnitError for a bare number above 1, which could be either."""
    text = str(value).strip()
    number = text.removesuffix("%").strip()
    try:
        share = float(number) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        raise UnitError(f"'{text}' is not a share; write it like 5%") from None
    if not 0.0 <= share <= 100.0:
        raise UnitError(f"'{text}' is not a sensible share; write it like 5%")
    if share > 1.0 and not text.endswith("%"):
        raise UnitError(f"'{text}' has no unit; write {text}%")
    return share


def parse_count(value: object) -> float:
    """A plain number without a unit."""
    text = str(value).strip().replace(",", "").replace("_", "")
    try:
        number = float(text)
    except ValueError:
        raise UnitError(f"'{value}' is not a number") from None
    if not 0.0 <= number <= 1e15:
        raise UnitError(f"'{value}' is out of range")
    return number


def parse_dollars(value: object) -> float:
    return parse(value, _DOLLARS)


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _dollars(value: float) -> str:
    return f"{value:.4g} USD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """--max-… or --min-… of `check`."""

    option: str
    metric: str
    most: bool
    """True: the value must not exceed the limit; False: it must reach it"""
    parse: Callable[[object], float]
    show: Callable[[float], str]
    words: str
    takes: str
    help: str
    key: tuple[str, ...]
    """of the strategy file: where the number stands"""
    unknown: str = ""


_STEP, _MEMORY, _MFU = ("estimate", "step_seconds"), ("estimate", "device_bytes"), ("estimate", "mfu")
BUDGETS: tuple[Budget, ...] = (
    Budget(option="max-memory", metric="device_bytes", most=True, parse=parse_bytes, show=gib, words="memory",
           takes="SIZE", help="Expected memory per GPU, such as 76GiB.", key=_MEMORY),
    Budget(option="min-headroom", metric="headroom", most=False, parse=parse_share, show=percent, words="headroom",
           takes="SHARE", help="Usable memory that stays free, such as 5%.", key=_MEMORY),
    Budget(option="max-step-time", metric="step_seconds", most=True, parse=parse_seconds, show=seconds,
           words="step time", takes="TIME", help="Of one step, such as 12s.", key=_STEP),
    Budget(option="min-mfu", metric="mfu", most=False, parse=parse_share, show=percent, words="MFU", takes="SHARE",
           help="Model FLOPs utilization, such as 40%.", key=_MFU),
    Budget(option="min-tokens-per-second", metric="tokens_per_second_per_gpu", most=False, parse=parse_count,
           show=_number, words="tokens/s/GPU", takes="N", help="Per GPU.",
           key=("estimate", "tokens_per_second_per_gpu")),
    Budget(option="max-gpus", metric="gpus", most=True, parse=parse_count, show=_number, words="GPUs", takes="N",
           help="GPUs of the job.", key=("estimate", "gpus")),
    Budget(option="max-bubble", metric="bubble", most=True, parse=parse_share, show=percent, words="pipeline bubble",
           takes="SHARE", help="Share of the step that the pipeline idles.", key=("strategy", "pp")),
    Budget(option="max-exposed", metric="exposed", most=True, parse=parse_share, show=percent,
           words="exposed communication", takes="SHARE", help="Share of the step that waits for the network.",
           key=("strategy",)),
    Budget(option="max-cost", metric="cost_per_million_tokens", most=True, parse=parse_dollars, show=_dollars,
           words="cost per million tokens", takes="PRICE", help="Per million tokens, such as '0.1 USD'.",
           key=("limits", "price_per_gpu_hour"), unknown="the file has no price_per_gpu_hour"),
)  # fmt: skip
BY_OPTION: Mapping[str, Budget] = {budget.option: budget for budget in BUDGETS}


def metrics(shown: Plain) -> dict[str, float | None]:
    """What budgets are held against, from the plain data of a choice; None: not known."""
    step, usable = shown["step_seconds"], shown["usable_bytes"]
    cost = shown["cost_per_token"]
    exposed = sum(part for name, part in shown["time"].items() if name.startswith("exposed"))
    idle = shown["time"].get("bubble", 0.0) + shown["time"].get("schedule_wait", 0.0)
    return {
        "step_seconds": step,
        "tokens_per_second_per_gpu": shown["tokens_per_second_per_gpu"],
        "mfu": shown["mfu"],
        "hfu": shown["hfu"],
        "device_bytes": shown["device_bytes"],
        "headroom": (usable - shown["device_bytes"]) / usable,
        "gpus": float(shown["gpus"]),
        "bubble": idle / step,
        "exposed": exposed / step,
        "cost_per_million_tokens": None if cost is None else cost * 1e6,
    }


SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "step_seconds": ("step time", seconds),
    "tokens_per_second_per_gpu": ("tokens/s/GPU", _number),
    "mfu": ("MFU", percent),
    "device_bytes": ("memory per GPU", gib),
    "headroom": ("headroom", percent),
    "gpus": ("GPUs", _number),
    "bubble": ("pipeline bubble", percent),
    "exposed": ("exposed communication", percent),
    "cost_per_million_tokens": ("cost per million tokens", _dollars),
}
"""metric -> its words and how it is written, in reading order"""
