"""The command `distplan`: its commands, its exit codes, and what a person sees when something is wrong.

Start-up imports neither numpy nor the rooms' modules that need it: every command imports its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from distplan.hardware.errors import DistplanError
from distplan.planner import cli_calibrate_options, cli_report, cli_schedule
from distplan.planner.cli_commands import register
from distplan.planner.cli_options import ESTIMATE, EXPORT, IMPORT, SEARCH, SHOW, canonical, takes
from distplan.planner.cli_question_options import MEASURED, TRAINING
from distplan.planner.cli_timeline import STEP
from distplan.planner.terminal import clean, say

OK, FAULT, USAGE, NOTHING, BROKEN, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_CODES = {
    OK: "a result",
    FAULT: "a fault of distplan's own; please report it",
    USAGE: "bad usage, or a file that cannot be read or written",
    NOTHING: "nothing fits, or no strategy is legal",
    BROKEN: "a check failed: a strategy is not equivalent, or a budget is broken",
    INTERRUPTED: "interrupted",
}
_EPILOG = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + "."

_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": canonical}
app = typer.Typer(
    name="distplan",
    help="Plan the parallel training of large models: which strategy is fastest, does it fit, and why.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=_SETTINGS,
)
hardware_app = typer.Typer(help="The systems and accelerators that are shipped.", no_args_is_help=True)
models_app = typer.Typer(help="The models that are shipped, and what a model file says.", no_args_is_help=True)
app.add_typer(hardware_app, name="hardware")
app.add_typer(models_app, name="models")

ModelFile = Annotated[str, typer.Argument(help="model.yaml, config.json (file or folder), or a shipped model's name.")]
EstimateFile = Annotated[
    str, typer.Argument(help="As for search; or a strategy.yaml, which needs no other option.", metavar="MODEL|PLAN")
]
StrategyFile = Annotated[str | None, typer.Argument(help="A strategy.yaml whose strategy is used.", metavar="[PLAN]")]
Notation = Annotated[str | None, typer.Argument(help="An einsum such as 'mk,kn->mn'.", metavar="[NOTATION]")]
MeshOption = Annotated[str, typer.Option("--mesh", metavar="AXES", help="Axes and degrees: x=2,y=4.")]
Placement = Annotated[str, typer.Option(metavar="PLACES", help="Of the operand: m:x, k:x+y, partial:y.")]
RuleOption = Annotated[str | None, typer.Option("--op", metavar="NAME", help="A rule of the paddle dialect.")]
ShapesOption = Annotated[str, typer.Option("--shapes", metavar="SIZES", help="Per operand: 64x32,32x48.")]
AttributesOption = Annotated[
    str, typer.Option("--attributes", metavar="PAIRS", help="Of the rule: axis=1,keepdim=true.")
]
DialectOption = Annotated[str, typer.Option("--dialect", metavar="NAME", help="ideal, or paddle, which --op means.")]
PlanFile = Annotated[str, typer.Argument(help="A strategy.yaml.", metavar="PLAN")]
LauncherFile = Annotated[
    str,
    typer.Argument(
        help="Arguments of Megatron-LM or torchtitan, a DeepSpeed JSON, an accelerate YAML.", metavar="FILE"
    ),
]
Identifier = Annotated[str, typer.Argument(help="An id from the list, an alias of it, or a file of your own.")]
Graph = Annotated[bool, typer.Option("--graph", help="Also list the operators of every kind of layer.")]


def _version(asked: bool) -> None:
    if asked:
        from distplan.planner.cli_show import version_text

        say_data(version_text())
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Versions, of data too.")]


@app.callback()
def _root(version: Version = False) -> None:
    pass


@app.command(epilog=_EPILOG, no_args_is_help=True)
@takes(SEARCH | TRAINING)
def search(model: ModelFile, **options: Any) -> int:
    """Find the fastest strategy that fits, and write it to strategy.yaml."""
    from distplan.planner.cli_run import run_search

    return run_search(model, options)


@app.command(epilog=_EPILOG, no_args_is_help=True)
@takes(ESTIMATE | STEP | MEASURED)
def estimate(model: EstimateFile, **options: Any) -> int:
    """Price one strategy: --tp 8 --pp 4 …, or a strategy.yaml. What is not given is 1, off or none.

    Defaults: sp where tp > 1, zero 1, vpp 1, micro_batch 1, recompute none, schedule 1f1b.
    """
    from distplan.planner.cli_run import run_estimate

    return run_estimate(model, options)


@app.command(epilog=_EPILOG, no_args_is_help=True)
@takes(ESTIMATE)
def verify(model: EstimateFile, plan: StrategyFile = None, **options: Any) -> int:
    """Prove that a strategy computes what one device computes: execute it on small simulated ranks.

    MODEL with --tp 8 --pp 4 …, MODEL with a strategy.yaml, or a strategy.yaml alone.
    """
    from distplan.planner.cli_verify import run_verify

    return run_verify(model, plan, options)


@app.command(epilog=_EPILOG, no_args_is_help=True)
@takes(SHOW)
def spmd(
    notation: Notation = None, mesh: MeshOption = "", x: Placement = "", y: Placement = "", z: Placement = "",
    op: RuleOption = None, shapes: ShapesOption = "", attributes: AttributesOption = "",
    dialect: DialectOption = "", **options: Any,
) -> int:  # fmt: skip
    """Show one inference step by step: notation, merge, reshards, result, communication, proof."""
    from distplan.planner.cli_spmd import Question, run_spmd

    placements = (x, y, z)
    question = Question(
        notation=notation, mesh=mesh, placements=placements, rule=op, shapes=shapes, attributes=attributes,
        dialect=dialect,
    )  # fmt: skip
    return run_spmd(question, options)


@app.command("export", epilog=_EPILOG, no_args_is_help=True)
@takes(EXPORT)
def export_plan(plan: PlanFile, **options: Any) -> int:
    """Write a strategy.yaml as the file that a launcher reads; what it cannot say goes to stderr."""
    from distplan.planner.cli_launchers import run_export

    return run_export(plan, options)


@app.command("import", epilog=_EPILOG, no_args_is_help=True)
@takes(IMPORT)
def import_plan(file: LauncherFile, **options: Any) -> int:
    """Read the strategy from a launcher's file, to be estimated."""
    from distplan.planner.cli_launchers import run_import

    return run_import(file, options)


@hardware_app.command("list", epilog=_EPILOG)
@takes(SHOW)
def hardware_list(**options: Any) -> int:
    """List systems and accelerators."""
    from distplan.planner.cli_show import list_hardware

    return list_hardware(options)


@hardware_app.command("show", epilog=_EPILOG)
@takes(SHOW)
def hardware_show(name: Identifier, **options: Any) -> int:
    """Every number of a system or an accelerator, with its source and whether it was measured."""
    from distplan.planner.cli_show import show_hardware

    return show_hardware(name, options)


@models_app.command("list", epilog=_EPILOG)
@takes(SHOW)
def models_list(**options: Any) -> int:
    """List the shipped models."""
    from distplan.planner.cli_show import list_models

    return list_models(options)


@models_app.command("show", epilog=_EPILOG)
@takes(SHOW)
def models_show(model: ModelFile, graph: Graph = False, **options: Any) -> int:
    """Parameters, layers and sizes of a model."""
    from distplan.planner.cli_show import show_model

    return show_model(model, options, graph=graph)


register(app, _EPILOG)
cli_schedule.register(app, _EPILOG)
cli_report.register(app, _EPILOG)
cli_calibrate_options.register(app, _EPILOG)


def say_data(text: str) -> None:
    from distplan.planner.terminal import write_data

    write_data(text)


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of one invocation; nothing but a code and text on stderr leaves it."""
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="distplan", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:
            say("distplan: interrupted")
        return int(code or OK)
    except DistplanError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        say("distplan: interrupted")
        return INTERRUPTED
    except SystemExit:
        return _reader_left()  # typer's own end to a closed pipe; nothing else exits here
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:
        return _unwritable(error)
    except Exception as error:
        if hasattr(error, "format_message"):
            return _misused(error)
        return _fault(error, sys.argv if arguments is None else arguments)


def _complain(text: str) -> int:
    say(f"distplan: {clean(text)}")
    return USAGE


def _misused(error: Any) -> int:
    """A usage error of typer's, whatever module it lives in; an empty one came with the help text."""
    text = error.format_message()
    if not text.strip() or type(error).__name__ == "NoArgsIsHelpError":
        say(text)
        return USAGE
    command = error.ctx.command_path if getattr(error, "ctx", None) else "distplan"
    say(f"{command}: {clean(text)} Try '{command} --help'.")
    return USAGE


def _reader_left() -> int:
    """Whoever read our output has enough (`| head`)."""
    _close_stdout()
    return OK


def _unwritable(error: OSError) -> int:
    if error.filename is None:
        _close_stdout()
    return _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")


def _close_stdout() -> None:
    """What is still buffered has nowhere to go; Python would try once more at exit, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _fault(error: Exception, arguments: Sequence[str]) -> int:
    wanted = "-v" in arguments or "--verbose" in arguments or os.environ.get("DISTPLAN_DEBUG")
    if wanted:
        import traceback

        traceback.print_exc()
    how = "" if wanted else " (run it again with -v for the traceback)"
    say(f"distplan: a fault of ours: {clean(type(error).__name__)}: {clean(error)}; please report it{how}")
    return FAULT
