"""python -m benchmarks.oracles FILE…: our answers against those of the real frameworks.

A file's format is told by the beginning of its name. Per file and rule: how many cases agree, and the
first that differ. Exit status 1 if any differs (there are no deviations), 2 for an unknown file.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.oracle_schedules import Tally

CHECKS: Mapping[str, str] = {
    "paddle_spmd": "benchmarks.oracle_spmd",
    "paddle_tests": "benchmarks.oracle_spmd",
    "paddle_reshard": "benchmarks.oracle_reshard",
    "paddle_pir_blocks": "benchmarks.oracle_pir",
    "paddle_jobs": "benchmarks.oracle_schedules",
    "torch_schedules": "benchmarks.oracle_schedules",
    "torch_cases": "benchmarks.oracle_torch",
    "megatron_memory": "benchmarks.oracle_megatron",
}
"""beginning of the file's name -> module with check(path) -> Tally per rule"""
SHOWN = 5


def check_of(path: Path) -> Callable[[Path], Mapping[str, Tally]]:
    """Raises ValueError for a name of no known beginning."""
    for beginning, module in CHECKS.items():
        if path.name.startswith(beginning):
            check: Callable[[Path], Mapping[str, Tally]] = importlib.import_module(module).check
            return check
    raise ValueError(f"{path}: no known format; the name begins with one of {', '.join(CHECKS)}")


def report(path: Path) -> bool:
    """Prints the table of one file; whether everything agrees."""
    tallies = check_of(path)(path)
    agree, total = sum(t.agree for t in tallies.values()), sum(t.total for t in tallies.values())
    print(f"{path.name}: {agree} of {total} agree")
    for rule, tally in sorted(tallies.items()):
        refused = getattr(tally, "refused", 0)
        both = f", of them {refused} refused by both" if refused else ""
        print(f"  {rule}: {tally.agree} of {tally.total}{both}")
        for difference in tally.differ[:SHOWN]:
            print(f"    differs: {difference}")
        if len(tally.differ) > SHOWN:
            print(f"    … and {len(tally.differ) - SHOWN} more")
    return agree == total


def main(arguments: Sequence[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else 2
    all_agree = True
    for argument in arguments:
        path = Path(argument)
        try:
            all_agree = report(path) and all_agree
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
    return 0 if all_agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
