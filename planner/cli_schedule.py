"""`distplan schedule`: a pipeline schedule drawn, priced and compared. Start-up imports no numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distplan.planner.cli_options import SHOW, takes

if TYPE_CHECKING:
    from distplan.planner.schedule_view import Question, StageTimes

Options = dict[str, Any]
MAX_MICRO_BATCHES = 1 << 20
_MOST_TIME = 1e9

Name = Annotated[str | None, typer.Argument(help="Such as 1f1b; --compare takes several.", metavar="[SCHEDULE]")]


def _text(name: str, metavar: str, words: str) -> tuple[Any, Any]:
    return Annotated[str | None, typer.Option(name, metavar=metavar, help=words, show_default=False)], None


SCHEDULE = {
    "stages": _text("--stages", "N", "Pipeline stages; 4 unless told."),
    "micro_batches": _text("--micro-batches", "N", "Micro-batches per step; twice the stages unless told."),
    "chunks": _text("--chunks", "N", "Model chunks per stage, of schedules that loop; 2 unless told."),
    "times": _text(
        "--times", "F,B", "Of a stage: forward and backward, 1,2 unless told; F,I,W; 'F,B;F,B;…' per stage."
    ),
    "p2p": _text("--p2p", "T", "Time that a message occupies its link, in the unit of --times."),
    "latency": _text("--latency", "T", "Time until it arrives, on top."),
    "blocking": (
        Annotated[bool, typer.Option("--blocking", help="A message keeps its sender waiting.", show_default=False)],
        False,
    ),
    "dialect": _text("--dialect", "NAME", "megatron, paddle or torch, where frameworks differ."),
    "compare": _text("--compare", "NAMES", "Several schedules side by side: f_then_b,1f1b,zb_h1."),
    "trace": _text("--trace", "FILE", "Write a trace for chrome://tracing or ui.perfetto.dev."),
} | SHOW


def register(app: typer.Typer, epilog: str) -> None:
    app.command(epilog=epilog, no_args_is_help=True)(schedule)


@takes(SCHEDULE)
def schedule(name: Name = None, **options: Any) -> int:
    """Draw a pipeline schedule: timeline, bubble and memory per stage; or compare several.

    f_then_b, 1f1b, eager_1f1b, interleaved, looped_bfs, zb_h1, zb_v, interleaved_zero_bubble or dualpipe_v.
    """
    return run(name, options)


def run(name: str | None, options: Options) -> int:
    from distplan.costmodel.schedules import SCHEDULES
    from distplan.planner.inputs import InputError, one_word, words
    from distplan.planner.output import FORMATS

    form = one_word("--format", options["output_format"], FORMATS)
    asked = question(options)
    if options["compare"] is not None:
        names = words("--compare", options["compare"], tuple(SCHEDULES))
        first = () if name is None else (one_word("schedule", name, tuple(SCHEDULES)),)
        return _compare(tuple(dict.fromkeys((*first, *names))), asked, form, options)
    if name is None:
        raise InputError(f"which schedule? One of {', '.join(SCHEDULES)}, or several with --compare")
    return _one(one_word("schedule", name, tuple(SCHEDULES)), asked, form, options)


def question(options: Options) -> Question:
    from distplan.planner.inputs import one_number
    from distplan.planner.schedule_view import EVEN_TIMES, Question

    stages = one_number("--stages", options["stages"] or "4")
    given = options["micro_batches"] or str(2 * stages)
    chunks = options["chunks"]
    return Question(
        stages=stages,
        micro_batches=one_number("--micro-batches", given, most=MAX_MICRO_BATCHES),
        chunks=None if chunks is None else one_number("--chunks", chunks),
        times=(EVEN_TIMES,) if options["times"] is None else stage_times(options["times"]),
        p2p=_time("--p2p", options["p2p"] or "0"),
        latency=_time("--latency", options["latency"] or "0"),
        overlap_p2p=not options["blocking"],
        dialect=(options["dialect"] or "").lower(),
    )


def stage_times(text: str) -> tuple[StageTimes, ...]:
    """'1,2' for all stages, or '1,2;1,2;1,3' one by one; three numbers are F, I and W."""
    from distplan.planner.inputs import InputError
    from distplan.planner.schedule_view import StageTimes

    found = []
    for item in text.strip().strip(";").replace(" ", ";").split(";"):
        numbers = [_time("--times", part) for part in item.split(",")]
        if len(numbers) not in (2, 3) or min(numbers) <= 0.0:
            raise InputError(f"--times '{item}': F,B or F,I,W is expected, each above 0, such as 1,2")
        forward, first, *second = numbers
        backward = first + second[0] if second else first
        found.append(StageTimes(forward=forward, backward=backward, input_gradient=first if second else first / 2))
    return tuple(found)


def _time(option: str, text: str) -> float:
    from distplan.planner.inputs import InputError

    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{option} '{text}': a number is expected") from None
    if not math.isfinite(value) or value < 0.0 or value > _MOST_TIME:
        raise InputError(f"{option} '{text}': a number from 0 to {_MOST_TIME:.0e} is expected")
    return value


def _one(name: str, asked: Question, form: str, options: Options) -> int:
    from distplan.planner.schedule_view import document, run_schedule

    simulated = run_schedule(name, asked)
    shown = document(simulated)
    _trace([simulated], options)
    if form == "table":
        from distplan.planner.cli_show import print_table
        from distplan.planner.report_schedule import schedule_report

        print_table(list(schedule_report(simulated, shown, _width())), no_color=options["no_color"])
        return 0
    per_schedule = {key: shown[key] for key in ("schedule", "dialect", "step_time")}
    return _data(shown, [per_schedule | row for row in shown["per_stage"]], form)


def _compare(names: tuple[str, ...], asked: Question, form: str, options: Options) -> int:
    from distplan.planner.inputs import InputError
    from distplan.planner.schedule_view import Refused, compare, comparison

    found = compare(names, asked)
    runs = [item for item in found if not isinstance(item, Refused)]
    if not runs:
        raise InputError("; ".join(item.why for item in found if isinstance(item, Refused)))
    rows = comparison(found)
    _trace(runs, options)
    if form == "table":
        from distplan.planner.cli_show import print_table
        from distplan.planner.report_schedule import comparison_report

        title = f"{asked.stages} stages, {asked.micro_batches} micro-batches"
        print_table(list(comparison_report(rows, title)), no_color=options["no_color"])
        return 0
    return _data({"schedules": rows}, rows, form)


def _data(shown: dict[str, Any], rows: list[dict[str, Any]], form: str) -> int:
    from distplan.planner.output import csv_text, json_text, yaml_text
    from distplan.planner.terminal import write_data

    write_data(csv_text(rows) if form == "csv" else json_text(shown) if form == "json" else yaml_text(shown))
    return 0


def _trace(runs: list[Any], options: Options) -> None:
    if options["trace"] is None:
        return
    from distplan.planner.terminal import clean, say
    from distplan.planner.trace import trace_of, write_trace

    write_trace(options["trace"], trace_of(runs))
    say(f"wrote {clean(options['trace'])}", quiet=options["quiet"])


def _width() -> int:
    import sys

    from distplan.planner.terminal import console

    return console(sys.stdout).width
