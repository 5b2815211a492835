"""The command `calibrate`, added to the command line. Start-up imports no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from distplan.planner.cli_check_options import flag, option, shown
from distplan.planner.cli_options import takes

Files = Annotated[
    list[str] | None,
    typer.Argument(
        help="bench.json of the emitted script, the text of nccl-tests, or runs.csv; several count together.",
        metavar="FILE...",
    ),
]
CALIBRATE: Mapping[str, tuple[Any, Any]] = {
    "emit_benchmark": flag("emit_benchmark", "Write the script that measures (needs torch), and nothing else.", "Task"),
    "hardware": option("hardware", "ID|FILE", "What the files were measured on; its constants are refined.", "Task"),
    "runtime": option("runtime", "NAME|FILE", "The framework of runs whose row names none.", "Task"),
    "collective": option("collective", "NAME", "Of an nccl-tests file that does not say: all_reduce, ….", "Task"),
    "ranks": option("ranks", "N", "Of an nccl-tests file that does not say.", "Task"),
    "nodes": option("nodes", "N", "Of an nccl-tests file that does not say.", "Task"),
    "output": option("output", "FILE", "Write the hardware file (or the script) here.", "Output", "-o"),
    **shown("table, json, yaml or csv on stdout"),
}


def register(app: typer.Typer, epilog: str) -> None:
    """Add the command to `app`."""
    app.command(epilog=epilog, no_args_is_help=True)(calibrate)


@takes(CALIBRATE)
def calibrate(files: Files = None, **options: Any) -> int:
    """Refine a hardware file with your own measurements: errors before and after, and a file for --hardware.

    First the script: distplan calibrate --emit-benchmark -o bench.py
    """
    from distplan.planner.cli_calibrate import run_calibrate

    return run_calibrate(files or [], options)
