"""Constants of flash attention from the tables: the kernels that training runs, by family."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attention_rows import AttentionRow, attention_rows
from distplan.hardware.accelerator import Accelerator
from distplan.hardware.fit_attention import attention_rates, bench_rates, fit, measured, predicted
from distplan.hardware.residuals import residual_line

Tree = dict[str, Any]

TRAINING = {
    "ampere": {"a100-sxm4-80gb": ("flash2",), "a100-pcie-80gb": ("training",)},
    "hopper": {"h100-sxm5-80gb": ("flash3",), "h200-sxm-141gb": ("training",)},
    "blackwell": {"b200-sxm-180gb": ("training",)},
}
"""device -> kernels that a training run of that generation uses"""
BACKWARD_SHAPE_OF = {"hopper": ("h100-sxm5-80gb", "flash2")}
"""FlashAttention-3's backward is measured at one shape only: its ramp and tail are those of FlashAttention-2 there"""
PREFILL = {
    "ampere": ("a100-sxm4-80gb",),
    "hopper": ("h100-sxm5-80gb", "h200-sxm-141gb"),
    "blackwell": ("b200-sxm-180gb", "gb200", "b300-sxm-270gb", "gb300"),
    "ada": ("l40s",),
    "blackwell-rtx": ("rtxpro6000-server",),
}
HOST_TIMED_SECONDS = 130e-6
BLACKWELL_PRIOR_WEIGHT = 0.3
"""its rows start at 4,096 tokens: how efficiency falls at short lengths is taken from Hopper unless they object"""


class Table:
    """The measured rows, by accelerator and kernel."""

    def __init__(self, rows: Sequence[AttentionRow]) -> None:
        self._rows = rows

    def select(self, accelerator: str, *implementations: str) -> list[AttentionRow]:
        return [
            row
            for row in self._rows
            if row.accelerator == accelerator
            and row.implementation in implementations
            and (row.implementation != "training" or row.seconds >= HOST_TIMED_SECONDS)
        ]


def _sources(rows: Sequence[AttentionRow]) -> str:
    return "; ".join(sorted({row.source for row in rows}))


def _entry(value: float, rows: Sequence[AttentionRow], provenance: str, note: str = "") -> Tree:
    source = _sources(rows) + (f" ({note})" if note else "")
    return {"value": value, "points": len(rows), "source": source, "provenance": provenance}


def _lines(
    one: Accelerator, rows: Sequence[AttentionRow], ahead: Tree, back: Tree, values: tuple[float, float], label: str
) -> list[str]:
    rates = bench_rates(one, attention_rates(values[0], ahead), attention_rates(values[1], back))
    times, truth = predicted(rates, rows), measured(rows)
    works = np.array([row.work for row in rows])
    return [
        residual_line(f"{one.id} {label} {work}", times[works == work], truth[works == work])
        for work in ("forward", "backward", "both")
        if (works == work).any()
    ]


def _family(
    tree: Tree, family: str, direction: str, shape: Tree, fraction: float, rows: Sequence[AttentionRow]
) -> None:
    entry = dict(shape) | {"peak_fraction": fraction, "points": len(rows), "source": _sources(rows)}
    entry["provenance"] = "measured"
    tree["families"].setdefault(family, {}).setdefault("attention", {})[direction] = entry


def _device(tree: Tree, name: str, direction: str, entry: Tree) -> None:
    tree["accelerators"].setdefault(name, {}).setdefault("attention", {})[direction] = entry


def _training(table: Table, accelerators: Mapping[str, Accelerator], tree: Tree) -> list[str]:
    lines = ["", "Flash attention: kernels of training"]
    start: Mapping[str, float] | None = None
    for family, devices in TRAINING.items():
        names = list(devices)
        rows_of = [table.select(name, *devices[name]) for name in names]
        of = [accelerators[name] for name in names]
        options: dict[str, Any] = {}
        if family == "blackwell" and start is not None:
            options = {"start": start, "prior_weight": BLACKWELL_PRIOR_WEIGHT}
        ahead, forward, back, backward = fit(of, rows_of, **options)
        if family in BACKWARD_SHAPE_OF:
            name, kernel = BACKWARD_SHAPE_OF[family]
            *_, backward = fit([accelerators[name]], [table.select(name, kernel)])
            back = _backward_fractions(of, rows_of, ahead, forward, backward)
            start = forward
        rows = [row for part in rows_of for row in part]
        _family(tree, family, "forward", forward, float(np.mean(ahead)), rows)
        _family(tree, family, "backward", backward, float(np.mean(back)), rows)
        for one, part, first, second in zip(of, rows_of, ahead, back, strict=True):
            works = {row.work for row in part}
            for direction, value, words in (
                ("forward", first, {"forward", "both"}),
                ("backward", second, {"backward", "both"}),
            ):
                _device(tree, one.id, direction, _entry(value, part, "measured" if works & words else "scaled"))
            lines += _lines(one, part, forward, backward, (first, second), "training")
    return lines


def _backward_fractions(
    of: Sequence[Accelerator],
    rows_of: Sequence[Sequence[AttentionRow]],
    ahead: Sequence[float],
    forward: Tree,
    backward: Tree,
) -> list[float]:
    """Backward fraction, from the device that ran both passes; the same for the rest of the family (bisection)."""
    one, rows, first = next(
        (one, rows, first)
        for one, rows, first in zip(of, rows_of, ahead, strict=True)
        if any(row.work != "forward" for row in rows)
    )
    low, high = 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2.0
        rates = bench_rates(one, attention_rates(first, forward), attention_rates(middle, backward))
        late = np.median(predicted(rates, rows) / measured(rows)) > 1.0
        low, high = (middle, high) if late else (low, middle)
    return [(low + high) / 2.0] * len(of)


def _prefill(table: Table, accelerators: Mapping[str, Accelerator], tree: Tree) -> list[str]:
    """Prefill kernels: the ratio between devices of a family, and the only measurement of Ada and RTX Blackwell."""
    lines = ["", "Flash attention: prefill kernels of an inference library (own constants, to compare devices)"]
    for family, names in PREFILL.items():
        of = [accelerators[name] for name in names]
        rows_of = [table.select(name, "prefill") for name in names]
        ahead, forward, _, _ = fit(of, rows_of)
        for one, rows, value in zip(of, rows_of, ahead, strict=True):
            lines += _lines(one, rows, forward, forward, (value, value), "prefill")
        if family in TRAINING:
            known = tree["accelerators"]
            base = next(name for name in names if "attention" in known.get(name, {}))
            for one, rows, value in zip(of, rows_of, ahead, strict=True):
                if "attention" in known.get(one.id, {}):
                    continue
                ratio = value / ahead[names.index(base)]
                for direction in ("forward", "backward"):
                    scaled = known[base]["attention"][direction]["value"] * ratio
                    note = f"{base}'s training kernel × ratio of prefill kernels"
                    _device(tree, one.id, direction, _entry(scaled, rows, "scaled", note))
            continue
        ampere = tree["families"]["ampere"]["attention"]
        ratio = ampere["backward"]["peak_fraction"] / ampere["forward"]["peak_fraction"]
        rows = [row for part in rows_of for row in part]
        _family(tree, family, "forward", forward, ahead[0], rows)
        shape = {key: ampere["backward"][key] for key in forward}
        _family(tree, family, "backward", shape, ahead[0] * ratio, rows)
        tree["families"][family]["attention"]["backward"]["provenance"] = "scaled"
        _device(tree, names[0], "forward", _entry(ahead[0], rows, "measured"))
        note = "forward × Ampere's ratio of FlashAttention-2's backward to forward"
        _device(tree, names[0], "backward", _entry(ahead[0] * ratio, rows, "scaled", note))
    return lines


def attention_constants(
    measured_csv: Path, micro_csv: Path, accelerators: Mapping[str, Accelerator]
) -> tuple[Tree, list[str]]:
    """(constants as in fitted.yaml, report lines)."""
    table = Table(attention_rows(measured_csv, micro_csv))
    tree: Tree = {"families": {}, "accelerators": {}}
    lines = _training(table, accelerators, tree)
    lines += _prefill(table, accelerators, tree)
    return tree, lines
