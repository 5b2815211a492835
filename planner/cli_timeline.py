"""`estimate --timeline` and `--trace`: the step of one strategy, stage by stage. Start-up imports no numpy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from distplan.planner.plan import Plan

STEP = {
    "timeline": (
        Annotated[
            bool,
            typer.Option(
                "--timeline", help="Also draw the pipeline, as -v does.", rich_help_panel="Output", show_default=False
            ),
        ],
        False,
    ),
    "trace": (
        Annotated[
            str | None,
            typer.Option(
                "--trace",
                metavar="FILE",
                help="Write a trace for chrome://tracing or ui.perfetto.dev.",
                rich_help_panel="Output",
                show_default=False,
            ),
        ],
        None,
    ),
}
"""options of `estimate`"""


def show_step(plan: Plan, options: dict[str, Any], form: str) -> None:
    """What the options ask for beyond the report: the timeline on stdout, the trace in its file."""
    best = plan.best
    drawn = form == "table" and (options["timeline"] or options["verbose"])
    if best is None or not (drawn or options["trace"]):
        return
    from distplan.costmodel.step_timeline import step_timeline
    from distplan.planner.terminal import clean, say
    from distplan.planner.trace import trace_of_step, write_trace

    step = step_timeline(plan.model, plan.workload, plan.cluster, plan.runtime, best.strategy, best.estimate)
    if drawn:
        from distplan.planner.cli_show import print_table
        from distplan.planner.report import heading
        from distplan.planner.report_schedule import timeline_rows
        from distplan.planner.terminal import console

        title = f"Pipeline: {best.strategy.schedule}, {step.shown} of {step.micro_batches} micro-batches"
        width = console(sys.stdout).width
        print_table([heading(title), *timeline_rows(step.simulation, width)], no_color=options["no_color"])
    if options["trace"]:
        write_trace(options["trace"], trace_of_step(step))
        cut = "" if step.shown == step.micro_batches else f": a step of {step.shown} micro-batches"
        say(f"wrote {clean(options['trace'])}{cut}", quiet=options["quiet"])
