"""The commands for CI, explanations and questions, added to the command line. Start-up imports no numpy."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from distplan.planner.cli_check_options import CHECK, DIFF, EXPLAIN, SCHEMA
from distplan.planner.cli_options import takes

StrategyFiles = Annotated[list[str], typer.Argument(help="Strategy files, as search writes them.", metavar="PLAN...")]
Before = Annotated[str, typer.Argument(help="A strategy file.", metavar="A")]
After = Annotated[str, typer.Argument(help="The strategy file to compare with it.", metavar="B")]
What = Annotated[
    str, typer.Argument(help="A rule's code (DP012), a strategy file, or a field (model.yaml:top_k).", metavar="WHAT")
]
OfPlan = Annotated[str | None, typer.Argument(help="With a code: the strategy file to apply it to.", metavar="[PLAN]")]
Kind = Annotated[str, typer.Argument(help="model, strategy or hardware.", metavar="WHAT")]


def register(app: typer.Typer, epilog: str) -> None:
    """Add every command of this module to `app`."""
    for command in (check, diff, explain, schema):
        app.command(epilog=epilog, no_args_is_help=True)(command)


@takes(CHECK)
def check(files: StrategyFiles, **options: Any) -> int:
    """Re-evaluate strategy files against limits: 0 holds, 4 a limit is broken, 3 it cannot run, 2 a bad file."""
    from distplan.planner.cli_check import run_check

    return run_check(files, options)


@takes(DIFF)
def diff(a: Before, b: After, **options: Any) -> int:
    """Compare two strategy files: strategy, setting, time, memory and communication."""
    from distplan.planner.cli_check import run_diff

    return run_diff(a, b, options)


@takes(EXPLAIN)
def explain(what: What, plan: OfPlan = None, **options: Any) -> int:
    """Explain a rule by its code, any number of a strategy file down to its source, or a field of a file."""
    from distplan.planner.cli_explain import run_explain

    return run_explain(what, plan, options)


@takes(SCHEMA)
def schema(what: Kind, **options: Any) -> int:
    """Print the JSON Schema of a file, with which editors complete and check it."""
    from distplan.planner.cli_check import run_schema

    return run_schema(what, options)
