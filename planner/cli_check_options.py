"""The options of `check`, `diff` and `schema`, as data. Imported at start-up: no numpy, no rooms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

_BUDGETS: tuple[tuple[str, str, str], ...] = (
    ("max_memory", "SIZE", "Expected memory per GPU at most, such as 76GiB."),
    ("min_headroom", "SHARE", "Usable memory that stays free, at least, such as 5%."),
    ("max_step_time", "TIME", "Step time at most, such as 12s."),
    ("min_mfu", "SHARE", "Model FLOPs utilization at least, such as 40%."),
    ("min_tokens_per_second", "N", "Tokens per second and GPU at least."),
    ("max_gpus", "N", "GPUs of the job at most."),
    ("max_bubble", "SHARE", "Share of the step that the pipeline idles, at most."),
    ("max_exposed", "SHARE", "Share of the step that waits for the network, at most."),
    ("max_cost", "PRICE", "Cost per million tokens at most, such as '0.1 USD'."),
)
"""option, what it takes, help; check_budgets.py has the same options with their meaning (a test compares them)"""


def option(name: str, takes: str, words: str, panel: str, *short: str) -> tuple[Any, Any]:
    """An option that takes text and is absent unless given."""
    made = typer.Option(
        f"--{name.replace('_', '-')}", *short, metavar=takes, help=words, rich_help_panel=panel, show_default=False
    )
    return Annotated[str | None, made], None


def flag(name: str, words: str, panel: str, *short: str) -> tuple[Any, Any]:
    made = typer.Option(f"--{name.replace('_', '-')}", *short, help=words, rich_help_panel=panel, show_default=False)
    return Annotated[bool, made], False


def shown(formats: str) -> dict[str, tuple[Any, Any]]:
    form = typer.Option("--format", metavar="NAME", help=f"{formats}.", rich_help_panel="Output", show_default=False)
    return {
        "output_format": (Annotated[str, form], "table"),
        "no_color": flag("no_color", "No colour, as with NO_COLOR=1.", "Output"),
        "quiet": flag("quiet", "Only the result.", "Output", "-q"),
        "verbose": flag("verbose", "Show the traceback of a fault of ours.", "Output", "-v"),
    }


_FORMATS = "table, json, yaml, csv, markdown, github or junit on stdout"
CHECK: Mapping[str, tuple[Any, Any]] = {
    **{name: option(name, takes, words, "Budgets") for name, takes, words in _BUDGETS},
    "allow_tight": flag("allow_tight", "Also pass what fits only if the estimate is exact.", "Budgets"),
    "baseline": option("baseline", "FILE", "A strategy file to compare with.", "Comparison"),
    "fail_if_slower": option(
        "fail_if_slower", "SHARE", "Slower per token than the baseline by at most, such as 3%.", "Comparison"
    ),
    "warn_only": flag("warn_only", "Report, and end with 0 whatever is broken.", "Output"),
    **shown(_FORMATS),
}
DIFF: Mapping[str, tuple[Any, Any]] = {
    "exit_code": flag("exit_code", "End with 4 where the files differ.", "Output"),
    **shown(_FORMATS),
}
SCHEMA: Mapping[str, tuple[Any, Any]] = {
    "output": option("output", "FILE", "Write it here.", "Output", "-o"),
    "quiet": flag("quiet", "Only the result.", "Output", "-q"),
    "verbose": flag("verbose", "Show the traceback of a fault of ours.", "Output", "-v"),
}
EXPLAIN: Mapping[str, tuple[Any, Any]] = {
    "memory": flag("memory", "Only memory, term by term.", "Parts"),
    "communication": flag("communication", "Only communication, collective by collective.", "Parts"),
    "time": flag("time", "Only time, operator by operator.", "Parts"),
    **shown("table, json, yaml or csv on stdout"),
}
