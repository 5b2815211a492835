"""The options of the questions, as data. Imported at start-up: no numpy, no rooms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from distplan.planner.cli_check_options import flag, option, shown
from distplan.planner.cli_options import DIMENSIONS, MACHINE, SEARCH, WORKLOAD

TRAINING: dict[str, tuple[Any, Any]] = {
    "tokens": option("tokens", "N", "Say days, GPU-hours and money to train so many, such as 15T.", "Questions"),
    "days": option("days", "N", "With --tokens: do so many days suffice, and how many GPUs would do?", "Questions"),
    "goodput": flag("goodput", "Say which share of the time is useful, with failures and checkpoints.", "Questions"),
    "mtbf": option("mtbf", "TIME", "GPU time between failures, such as '30,000 GPU-h'.", "Questions"),
    "restart_time": option("restart_time", "TIME", "From a failure to the next step, such as 10min.", "Questions"),
    "storage_bandwidth": option("storage_bandwidth", "RATE", "For all checkpoints, such as '2 TB/s'.", "Questions"),
    "checkpoint_interval": option("checkpoint_interval", "TIME", "In place of the best, such as 30min.", "Questions"),
    "async_checkpoint": flag("async_checkpoint", "Training waits only for the copy to the host.", "Questions"),
}
"""of search, estimate and sweep"""
MEASURED: dict[str, tuple[Any, Any]] = TRAINING | {
    "measured": option("measured", "TIME", "A measured step time, such as 12.3s: is it reasonable?", "Questions")
}
"""of estimate"""

_JOB = {name: SEARCH[name] for name in (*MACHINE, "allow_tight", *WORKLOAD, *DIMENSIONS, "sp")}
_FORMATS = "table, json, yaml or csv on stdout"


def _text(name: str, default: str, takes: str, words: str) -> tuple[Any, Any]:
    made = typer.Option(f"--{name}", metavar=takes, help=words, rich_help_panel="Questions")
    return Annotated[str, made], default


LIMITS: Mapping[str, tuple[Any, Any]] = {
    "of": _text("of", "seq-len", "WHAT", "seq-len or micro-batch: what is made as large as fits."),
    **_JOB,
    **shown(_FORMATS),
}
CROSSOVER: Mapping[str, tuple[Any, Any]] = {
    "a": _text("a", "zero=3 tp=1 pp=1", "DIMS", "The first family of strategies."),
    "b": _text("b", "zero=0,1", "DIMS", "The second."),
    **{name: _JOB[name] for name in (*MACHINE, "allow_tight", *WORKLOAD)},
    **shown(_FORMATS),
}
SWEEP: Mapping[str, tuple[Any, Any]] = {
    **_JOB,
    "scale_batch": flag("scale_batch", "The global batch grows with the GPUs, from the smallest count.", "Sweep"),
    "results": option("results", "FILE", "Keep results here, and take from it what is done.", "Sweep"),
    "cluster": option("cluster", "ADDRESS", "An existing Dask scheduler: tcp://host:8786.", "Sweep"),
    "jobs": option("jobs", "N", "Processes; all cores unless told.", "Sweep"),
    **TRAINING,
    **shown(_FORMATS),
}
