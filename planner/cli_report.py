"""`distplan report`: a strategy as one self-contained HTML page. Start-up imports no numpy."""

from __future__ import annotations

from typing import Annotated

import typer

PlanFile = Annotated[str, typer.Argument(help="A strategy.yaml.", metavar="PLAN")]
Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write the page here.")]
Counts = Annotated[
    str | None,
    typer.Option(
        "--gpus", metavar="LIST", help="GPU counts of the scaling curve; a quarter to four times its own unless told."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result: no progress, no remarks.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of a fault of ours.")]

OK, NOTHING = 0, 3
MAX_COUNTS = 16
DEFAULT_OUTPUT = "report.html"


def register(app: typer.Typer, epilog: str) -> None:
    app.command(epilog=epilog, no_args_is_help=True)(report)


def report(
    plan: PlanFile, output: Output = DEFAULT_OUTPUT, gpus: Counts = None, quiet: Quiet = False, verbose: Verbose = False
) -> int:
    """Write a strategy's report as one HTML page: memory, communication, pipeline, Pareto front, scaling."""
    return run(plan, output, gpus, quiet=quiet)


def run(plan: str, output: str, gpus: str | None, *, quiet: bool) -> int:
    from distplan.hardware.documents import write_atomically
    from distplan.planner.api import Limits, Setting
    from distplan.planner.html_report import find
    from distplan.planner.html_report_page import page
    from distplan.planner.inputs import InputError, gpu_counts
    from distplan.planner.plan_file import load_plan
    from distplan.planner.search import RuleError
    from distplan.planner.terminal import clean, progress, say

    file = load_plan(plan)
    for sentence in file.changed:
        say(f"distplan: {clean(plan)}: {sentence}")
    limits = Limits(
        reserve_bytes=file.reserve_bytes,
        memory_limit_bytes=file.memory_limit_bytes,
        price_per_gpu_hour=file.price_per_gpu_hour,
    )
    job = Setting(
        model=file.model, workload=file.workload, cluster=file.cluster, runtime=file.runtime, limits=limits
    )  # fmt: skip
    counts = () if gpus is None else gpu_counts(gpus, node=file.cluster.gpus_per_node)
    if len(counts) > MAX_COUNTS:
        raise InputError(f"--gpus {gpus}: {len(counts)} counts, each of which is searched; at most {MAX_COUNTS}")
    try:
        with progress("searching", quiet=quiet, no_color=False):
            found = find(job, file.strategy, counts)
    except RuleError as error:
        say(f"distplan: {file.runtime.name} cannot run this strategy: {clean(error)}")
        return NOTHING
    write_atomically(output, page(found))
    say(f"wrote {clean(output)}", quiet=quiet)
    return OK
