"""The commands for CI, explanations and questions, added to the command line. Start-up imports no numpy."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from distplan.planner.cli_check_options import CHECK, DIFF, EXPLAIN, SCHEMA
from distplan.planner.cli_options import takes
from distplan.planner.cli_question_options import CROSSOVER, LIMITS, SWEEP

StrategyFiles = Annotated[list[str], typer.Argument(help="Strategy files, as search writes them.", metavar="PLAN...")]
Before = Annotated[str, typer.Argument(help="A strategy file.", metavar="A")]
After = Annotated[str, typer.Argument(help="The strategy file to compare with it.", metavar="B")]
What = Annotated[
    str, typer.Argument(help="A rule's code (DP012), a strategy file, or a field (model.yaml:top_k).", metavar="WHAT")
]
OfPlan = Annotated[str | None, typer.Argument(help="With a code: the strategy file to apply it to.", metavar="[PLAN]")]
ModelOrPlan = Annotated[str, typer.Argument(help="A model as for search, or a strategy file.", metavar="MODEL|PLAN")]
OneModel = Annotated[str, typer.Argument(help="A model as for search.", metavar="MODEL")]
Models = Annotated[list[str], typer.Argument(help="Models as for search.", metavar="MODEL...")]
Kind = Annotated[str, typer.Argument(help="model, strategy or hardware.", metavar="WHAT")]


def register(app: typer.Typer, epilog: str) -> None:
    """Add every command of this module to `app`."""
    for command in (check, diff, explain, schema, limits, crossover, sweep):
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


@takes(LIMITS)
def limits(model: ModelOrPlan, **options: Any) -> int:
    """Find the longest sequence or the largest micro-batch that fits, and what is in the way beyond it."""
    from distplan.planner.cli_questions import run_limits

    return run_limits(model, options)


@takes(CROSSOVER)
def crossover(model: OneModel, **options: Any) -> int:
    """Find the network bandwidth at which one family of strategies (ZeRO 3) beats another (TP and PP)."""
    from distplan.planner.cli_questions import run_crossover

    return run_crossover(model, options)


@takes(SWEEP)
def sweep(models: Models, **options: Any) -> int:
    """Search many models, systems, GPU counts, batches and lengths: scaling, days and money. Resumable."""
    from distplan.planner.cli_questions import run_sweep

    return run_sweep(models, options)
