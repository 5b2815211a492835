"""Re-fit the rates of local operators: python -m benchmarks.calibrate --measured m.csv --micro u.csv [-o fitted.yaml].

Prints the residual of every accelerator × kind (n, median and 90th percentile of the absolute error, bias) and writes
the constants, 6 significant digits, sorted. What is left out, and why: rows marked SUSPECT (collectives of a host
without P2P); best-shape searches, short and settled runs of a device that has a table of shapes (they are checks,
printed as such); attention kernels faster than 130 us in the training-layouts tables (4 heads take as long as 16: the
host was timed); prefill kernels where training kernels are measured (other code), except for the ratio between devices.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.bandwidth_rows import bandwidth_rows, fractions
from benchmarks.calibrate_attention import attention_constants
from benchmarks.calibrate_gemm import gemm_constants
from distplan.hardware.accelerator import Accelerator, list_accelerators, load_accelerator

Tree = dict[str, Any]

FASTEST_PCIE = 128e9
"""bytes/s of PCIe 6.0 x16: a link with more is NVLink-C2C"""

_HEADER = "# Written by `python -m benchmarks.calibrate` from tables of measured kernels; do not edit.\n"


def merged(*trees: Mapping[str, Any]) -> Tree:
    """Nested mappings put together; later ones win."""
    whole: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, Mapping) and isinstance(whole.get(key), Mapping)
            whole[key] = merged(whole[key], value) if both else value
    return whole


def rounded(node: Any) -> Any:
    """The same tree with numbers of 6 significant digits."""
    if isinstance(node, Mapping):
        return {key: rounded(value) for key, value in sorted(node.items())}
    if isinstance(node, list | tuple):
        return [rounded(value) for value in node]
    return float(f"{node:.6g}") if isinstance(node, float) else node


def mean_entry(entries: Sequence[Mapping[str, Any]]) -> Tree:
    """Constants of a family that stands in for others: the mean of each number, points summed."""
    first = entries[0]
    if not first.keys() & {"points"}:
        keys = sorted({key for entry in entries for key in entry})
        return {key: mean_entry([entry[key] for entry in entries if key in entry]) for key in keys}
    made: Tree = {"provenance": "assumed", "points": 0, "source": "mean of the fitted families"}
    for key, value in first.items():
        if isinstance(value, float):
            made[key] = sum(entry[key] for entry in entries) / len(entries)
        elif key == "tile_costs":
            costs = [[row[2] for row in entry[key]] for entry in entries]
            means = [sum(column) / len(column) for column in zip(*costs, strict=True)]
            made[key] = [[m, n, cost] for (m, n, _), cost in zip(value, means, strict=True)]
    return made


def bandwidth_constants(measured: Path, accelerators: Sequence[Accelerator]) -> Tree:
    """Fractions of nominal bandwidth: of devices; of families (memory) and of kinds of link (host) as their means."""
    rows = bandwidth_rows(measured)
    tree: Tree = {"families": {}, "accelerators": {}, "hosts": {}}
    for name, host in (("memory_fraction", False), ("host_fraction", True)):
        together: dict[str, list[float]] = {}
        for one in accelerators:
            found = fractions(rows, one, host)
            if found is None:
                continue
            value, points, source = found
            entry = {"value": value, "points": points, "source": source, "provenance": "measured"}
            tree["accelerators"].setdefault(one.id, {})[name] = entry
            link = "c2c" if one.pcie_bandwidth > FASTEST_PCIE else "pcie"
            together.setdefault(link if host else one.generation, []).append(value)
        for group, values in together.items():
            if host:
                tree["hosts"][group] = family_mean(values, "with such a link")
            else:
                tree["families"].setdefault(group, {})[name] = family_mean(values)
    return tree


def family_mean(values: Sequence[float], which: str = "of the family") -> Tree:
    """A family's constant from those of its devices."""
    source = f"mean of {len(values)} device{'s' if len(values) > 1 else ''} {which}"
    return {"value": sum(values) / len(values), "points": len(values), "source": source, "provenance": "measured"}


def with_default(tree: Tree) -> Tree:
    """Add the family `default`: the mean of every constant over the families that have it."""
    families = tree["families"]
    keys = sorted({key for family in families.values() for key in family})
    default = {key: mean_entry([family[key] for family in families.values() if key in family]) for key in keys}
    return merged(tree, {"families": {"default": default}})


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, report, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibrate", description=__doc__.split("\n")[0])
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--micro", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, help="where to write the constants; only reported without it")
    options = parser.parse_args(arguments)
    accelerators = {name: load_accelerator(name) for name in list_accelerators()}
    gemm, gemm_lines = gemm_constants(options.measured, options.micro, accelerators)
    attention, attention_lines = attention_constants(options.measured, options.micro, accelerators)
    tree = merged(gemm, attention, bandwidth_constants(options.measured, list(accelerators.values())))
    sys.stdout.write("\n".join([*gemm_lines, *attention_lines]) + "\n")
    if options.output:
        text = yaml.safe_dump(rounded(with_default(tree)), width=110, sort_keys=True, default_flow_style=None)
        options.output.write_text(_HEADER + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
