"""The one strategy that a few options mean: what is not said is 1, off, none, or follows from the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distplan.costmodel.strategy import Strategy
from distplan.planner.inputs import InputError


def strategy_from(given: Mapping[str, tuple[Any, ...]], *, gpus: int | None) -> Strategy:
    """Defaults: sp where tp > 1, zero 1, vpp 1, micro_batch 1, recompute none; schedule 1f1b, or
    interleaved where vpp > 1; cp_kind ring where cp > 1; dp_shard fills up `gpus`.

    Raises InputError for several values of one field, or degrees that do not multiply to `gpus`.
    """
    one: dict[str, Any] = {}
    for name, values in given.items():
        if len(values) != 1:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option}: estimate takes one value, {len(values)} were given; search compares several")
        one[name] = values[0]
    one.setdefault("sp", one.get("tp", 1) > 1)
    one.setdefault("cp_kind", "ring" if one.get("cp", 1) > 1 else "none")
    one.setdefault("schedule", "interleaved" if one.get("vpp", 1) > 1 else "1f1b")
    dp = one.pop("dp", None)
    if dp is not None and "dp_shard" not in one:
        one["dp_shard"] = _rest(dp, {"dp_replicate": one.get("dp_replicate", 1)}, "--dp")
    if gpus is not None and "dp_shard" not in one:
        degrees = {name: one.get(name, 1) for name in ("dp_replicate", "tp", "pp", "cp")}
        one["dp_shard"] = _rest(gpus, degrees, "--gpus")
    strategy = Strategy(**one)
    if dp is not None and strategy.dp != dp:
        raise InputError(f"--dp {dp}: dp_replicate times dp_shard is {strategy.dp}")
    if gpus is not None and strategy.gpus != gpus:
        raise InputError(f"--gpus {gpus}: the degrees given multiply to {strategy.gpus}")
    return strategy


def _rest(total: int, degrees: Mapping[str, int], option: str) -> int:
    product = 1
    for degree in degrees.values():
        product *= degree
    if total % product:
        said = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        below, above = total // product * product, -(-total // product) * product
        near = f"{below} or {above}" if below else str(above)
        raise InputError(f"{option} {total} is not a multiple of {product} ({said}); {near} would be")
    return total // product
