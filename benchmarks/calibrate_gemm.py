"""Constants of matrix products from the tables: families first, then each device's fraction of peak."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurements import Gemm, gemms
from distplan.hardware.accelerator import Accelerator
from distplan.hardware.fit_gemm import Rows, fit_family, fit_weight_gradient, fraction_of, gemm_rates, predicted
from distplan.hardware.rate_tables import like
from distplan.hardware.residuals import residual_line

Tree = dict[str, Any]
Shape = Mapping[str, float]

FAMILIES = {
    "ampere": ("a100-sxm4-80gb", "a100-pcie-80gb"),
    "hopper": ("h100-sxm5-80gb", "h200-sxm-141gb"),
    "blackwell": ("b200-sxm-180gb", "gb200", "b300-sxm-270gb", "gb300"),
    "ada": ("l40s",),
    "blackwell-rtx": ("rtxpro6000-server",),
}
"""the devices whose tables of shapes a family's constants are fitted to"""
TRAINING_LAYOUTS = {"ampere": "a100-pcie-80gb", "blackwell": "b200-sxm-180gb"}
TABLE_OF = {"a100-pcie-80gb": ("library-table", "training-layouts")}
SHRINKAGE_POINTS = 0.5
"""points that the family's mean counts for in a device's own fraction of peak: one best-shape search repeats to about
7 % (H100: 794 and 821, MI300X: 668 and 788 TFLOP/s), while the devices of a family differ by about 10 %"""
BEST_SHAPE_MARGIN = 1.05
"""the winner of a search over thousands of shapes is within 5 % of the limit: H100's winner of 821 TFLOP/s is 0.83 of
peak, and the limit that its table of 200 shapes fits is 0.81; A100's are 0.87 and 0.88"""
LONG_FLOPS = 5e10
"""above it a product takes over 20 us on the fastest device here, several times its latency"""
L2_REUSE_FAMILIES = ("ada", "blackwell-rtx")
"""their 96 and 128 MiB caches hold the weight between a benchmark's repeats: rows of few m are left out"""


class Table:
    """The measured rows, by accelerator, dtype and class of source."""

    def __init__(self, rows: Sequence[Gemm]) -> None:
        self._rows = rows

    def select(self, accelerator: str, dtype: str, *origins: str, least_m: int = 0) -> list[Gemm]:
        return [
            row
            for row in self._rows
            if row.accelerator == accelerator and row.dtype == dtype and row.origin in origins and row.m >= least_m
        ]

    def others(self, accelerator: str, dtype: str) -> dict[str, list[Gemm]]:
        """Rows that are not tables of shapes, by class of source."""
        found: dict[str, list[Gemm]] = {}
        for row in self._rows:
            if row.accelerator == accelerator and row.dtype == dtype and row.origin in _SINGLES:
                found.setdefault(row.origin, []).append(row)
        return found


_SINGLES = ("best-shape", "short", "settled", "other")


def _sources(rows: Sequence[Gemm]) -> str:
    return "; ".join(sorted({row.source for row in rows}))


def _value(value: float, rows: Sequence[Gemm], provenance: str = "measured") -> Tree:
    return {"value": value, "points": len(rows), "source": _sources(rows), "provenance": provenance}


def _shape_entry(shape: Shape, rows: Sequence[Gemm], dtype: str) -> Tree:
    entry: Tree = {
        "bandwidth_fraction": shape["bandwidth"],
        "latency": shape["latency"],
        "overlap": shape["overlap"],
        "ramp": shape["ramp"],
        "wave": shape["wave"],
        "tile_costs": [[256, 128, 1.0], [128, 128, shape["tile128"]], [64, 64, shape["tile64"]]],
        "points": len(rows),
        "source": _sources(rows),
        "provenance": "measured",
    }
    return entry | ({"cast_bytes": shape["cast"], "cast_latency": shape["cast_latency"]} if dtype == "fp8" else {})


def _fit_shapes(table: Table, accelerators: Mapping[str, Accelerator]) -> tuple[Tree, dict[Any, Shape], list[str]]:
    tree: Tree = {"families": {}, "accelerators": {}}
    shapes: dict[Any, Shape] = {}
    lines = ["Matrix products: tables of shapes (large: m, n, k >= 1024)"]
    for family, names in FAMILIES.items():
        for dtype in ("bf16", "fp8"):
            least = 128 if family in L2_REUSE_FAMILIES else 0
            rows = {
                name: table.select(name, dtype, *TABLE_OF.get(name, ("library-table",)), least_m=least)
                for name in names
            }
            if not all(rows.values()):
                continue
            of = [accelerators[name] for name in names]
            parts = [Rows.of(rows[name]) for name in names]
            values, shape = fit_family(of, dtype, parts)
            shapes[family, dtype] = shape
            together = [row for part in rows.values() for row in part]
            tree["families"].setdefault(family, {}).setdefault("gemm", {})[dtype] = _shape_entry(shape, together, dtype)
            for one, value, part in zip(of, values, parts, strict=True):
                entry = _value(value, rows[one.id])
                tree["accelerators"].setdefault(one.id, {}).setdefault("gemm", {})[dtype] = entry
                times = predicted(dtype, gemm_rates(one, dtype, value, shape), part)
                for word, mask in (("large", part.large), ("small", ~part.large)):
                    lines.append(residual_line(f"{one.id} {dtype} {word}", times[mask], part.seconds[mask]))
    return tree, shapes, lines


def _training_layouts(
    table: Table, accelerators: Mapping[str, Accelerator], tree: Tree, shapes: Mapping[Any, Shape]
) -> list[str]:
    """Bytes of accumulating weight gradients, latency of a group; that B200 ran below its power: `power_limited`."""
    lines = ["", "Matrix products: training layouts (NT adds into fp32), grouped by experts"]
    for family, name in TRAINING_LAYOUTS.items():
        rows = table.select(name, "bf16", "training-layouts", "training-layouts-grouped")
        part, one = Rows.of(rows), accelerators[name]
        value, extra, group = fit_weight_gradient(one, shapes[family, "bf16"], part)
        shape = {**shapes[family, "bf16"], "accumulate_bytes": extra, "group_latency": group}
        grouped = [row for row in rows if row.groups > 1]
        tree["families"][family]["accumulate_bytes"] = _value(extra, [row for row in rows if row.accumulate_fp32])
        tree["families"][family]["group_latency"] = _value(group, grouped)
        own = tree["accelerators"][name]["gemm"]["bf16"]["value"]
        if "training-layouts" not in TABLE_OF.get(name, ()):
            tree["accelerators"][name]["power_limited"] = _value(value / own, rows)
        times = predicted("bf16", gemm_rates(one, "bf16", value, shape), part)
        masks = {
            "plain, large": (part.groups == 1) & ~part.accumulate & part.large,
            "accumulating, large": (part.groups == 1) & part.accumulate & part.large,
            "small": (part.groups == 1) & ~part.large,
            "grouped": (part.groups > 1) & ~part.accumulate,
            "grouped accumulating": (part.groups > 1) & part.accumulate,
        }
        for word, mask in masks.items():
            label = f"{name} {word}, at {value / own:.2f} of the table's rate"
            lines.append(residual_line(label, times[mask], part.seconds[mask]))
    return lines


def _long(rows: Sequence[Gemm]) -> list[Gemm]:
    """Rows whose time is compute: a fraction of peak says nothing of a product that is all latency."""
    return [row for row in rows if 2.0 * row.m * row.n * row.k >= LONG_FLOPS] or list(rows)


def _family_fractions(tree: Tree, accelerators: Mapping[str, Accelerator], dtype: str) -> dict[str, list[float]]:
    """Fractions of a family's devices: of those with a table of shapes, where there are any."""
    found: dict[str, dict[str, float]] = {}
    for name, entry in tree["accelerators"].items():
        gemm = entry.get("gemm", {})
        value = gemm.get(dtype) or (gemm.get("fp16") if dtype == "bf16" else None)
        if value is not None:
            found.setdefault(accelerators[name].generation, {})[name] = value["value"]
    return {
        family: [value for name, value in of.items() if name in FAMILIES.get(family, of) or dtype in ("tf32", "fp32")]
        for family, of in found.items()
    }


def _shape_for(shapes: Mapping[Any, Shape], family: str, dtype: str) -> Shape:
    """The shape constants that `rates_for` will give a device of this family."""
    wide = "fp8" if dtype == "fp8" else "bf16"
    for tried in like(family):
        if (tried, wide) in shapes:
            return shapes[tried, wide]
    known = [shape for (_, name), shape in shapes.items() if name == wide]
    return {key: sum(shape[key] for shape in known) / len(known) for key in known[0]}


def _devices_without_table(
    table: Table, accelerators: Mapping[str, Accelerator], tree: Tree, shapes: Mapping[Any, Shape]
) -> list[str]:
    """Fractions of peak from single points, shrunk to the family's mean; checks of devices that have a table."""
    lines = ["", "Matrix products: single points, not fitted where the device has a table (a check)"]
    for dtype in ("bf16", "fp16", "fp8", "tf32", "fp32"):
        fractions = _family_fractions(tree, accelerators, dtype)
        means = {family: float(np.mean(values)) for family, values in fractions.items()}
        for name, one in accelerators.items():
            own = tree["accelerators"].setdefault(name, {}).setdefault("gemm", {})
            peak_dtype = dtype if dtype in one.peak_flops else "fp16"
            for origin, rows in table.others(name, dtype).items():
                if peak_dtype not in one.peak_flops:
                    continue
                shape = _shape_for(shapes, one.generation, dtype)
                part = Rows.of(rows)
                known = own.get(dtype) or (own.get("bf16") if dtype == "fp16" else None)
                if known is None:
                    found = fraction_of(one, peak_dtype, shape, Rows.of(_long(rows)))
                    if origin == "best-shape":
                        best = max(2.0 * row.m * row.n * row.k / row.seconds for row in rows)
                        found = min(found, best / one.peak_flops[peak_dtype] * BEST_SHAPE_MARGIN)
                    mean = means.get(one.generation)
                    if mean is not None:
                        found = (found * len(rows) + mean * SHRINKAGE_POINTS) / (len(rows) + SHRINKAGE_POINTS)
                    known = own[peak_dtype] = _value(found, rows)
                of = gemm_rates(one, peak_dtype, known["value"], shape)
                times = predicted(peak_dtype, of, part, cast_input=False)
                lines.append(residual_line(f"{name} {dtype} {origin}", times, part.seconds))
    return lines


def _sustained(table: Table, accelerators: Mapping[str, Accelerator], tree: Tree, shapes: Mapping[Any, Shape]) -> None:
    """Rate of thermally settled runs (m, n, k >= 4096) over the rate that the short runs of the table give.

    Of 16-bit runs where there are any; fp8 rates without the cast are less sure (the table has the cast in it).
    """
    by_family: dict[str, list[float]] = {}
    for name, entry in tree["accelerators"].items():
        for dtype in ("bf16", "fp16", "fp8"):
            rows = [row for row in table.others(name, dtype).get("settled", []) if min(row.m, row.n, row.k) >= 4096]
            own = entry.get("gemm", {}).get("bf16" if dtype == "fp16" else dtype)
            if not rows or own is None:
                continue
            one, part = accelerators[name], Rows.of(rows)
            of = gemm_rates(one, dtype, own["value"], _shape_for(shapes, one.generation, dtype))
            ratios = predicted(dtype, of, part, cast_input=False) / part.seconds
            entry["sustained"] = _value(min(1.0, float(np.median(ratios))), rows)
            break
        if "sustained" in entry:
            by_family.setdefault(accelerators[name].generation, []).append(entry["sustained"]["value"])
    for family, values in by_family.items():
        tree["families"][family]["sustained"] = {
            "value": sum(values) / len(values),
            "points": len(values),
            "source": f"mean of {len(values)} devices of the family",
            "provenance": "measured",
        }


def gemm_constants(measured: Path, micro: Path, accelerators: Mapping[str, Accelerator]) -> tuple[Tree, list[str]]:
    """(constants as in fitted.yaml, report lines)."""
    table = Table(gemms(measured, micro))
    tree, shapes, lines = _fit_shapes(table, accelerators)
    lines += _training_layouts(table, accelerators, tree, shapes)
    lines += _devices_without_table(table, accelerators, tree, shapes)
    _sustained(table, accelerators, tree, shapes)
    for dtype in ("bf16", "fp8", "fp32"):
        for family, values in _family_fractions(tree, accelerators, dtype).items():
            tree["families"].setdefault(family, {}).setdefault("gemm_fraction", {})[dtype] = {
                "value": sum(values) / len(values),
                "points": len(values),
                "source": f"mean of {len(values)} devices of the family",
                "provenance": "measured",
            }
    return tree, lines
