"""`limits`, `crossover` and `sweep`: from what was typed to an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from distplan.costmodel.workload import default
from distplan.hardware.cluster import load_cluster
from distplan.planner import questions, sweep
from distplan.planner.cli_run import chosen, given_bounds, given_limits, given_mesh_order, job_setting, plan_file
from distplan.planner.cli_show import show
from distplan.planner.inputs import InputError, gpu_counts, one_number, one_word, whole_numbers
from distplan.planner.output import FORMATS
from distplan.planner.questions_crossover import crossover, parse_family
from distplan.planner.questions_limits import OF, Candidates, limits
from distplan.planner.report_questions import crossover_report, limits_report, sweep_report
from distplan.planner.sweep import MAX_SCENARIOS, Scenario
from distplan.planner.sweep_store import open_store
from distplan.planner.terminal import clean, progress, say

Options = dict[str, Any]
Plain = dict[str, Any]
OK, NOTHING, INTERRUPTED = 0, 3, 130
MAX_TOKENS = 10**9


# ---------------------------------------------------------------- limits and crossover


def run_limits(name: str, options: Options) -> int:
    one_word("--format", options["output_format"], FORMATS)
    of = one_word("--of", options["of"], OF)
    bounds = given_bounds(options)
    if plan_file(name) is not None:
        strategy, job, _ = chosen(name, options | {"recompute_layers": None})
        candidates = Candidates(gpus=strategy.gpus, strategy=strategy)
    else:
        gpus = _count(options)
        job = job_setting(name, options, gpus=gpus)
        candidates = Candidates(gpus=gpus)
    if of == "seq-len" and options["seq_len"] is not None:
        raise InputError("--seq-len: limits --of seq-len finds it; leave it out")
    with progress("trying", quiet=options["quiet"], no_color=options["no_color"]) as drawn:
        shown = limits(job, candidates, bounds, of=of, allow_tight=options["allow_tight"], say=drawn)
    show(shown, shown["rows"], options, list(limits_report(shown)))
    return OK if shown["largest"] is not None else NOTHING


def run_crossover(name: str, options: Options) -> int:
    one_word("--format", options["output_format"], FORMATS)
    first, second = parse_family("--a", options["a"]), parse_family("--b", options["b"])
    gpus = _count(options)
    job = job_setting(name, options | {"runtime": options["runtime"] or "any"}, gpus=gpus)
    with progress("comparing", quiet=options["quiet"], no_color=options["no_color"]) as drawn:
        shown = crossover(job, gpus, first, second, allow_tight=options["allow_tight"], say=drawn)
    show(shown, shown["rows"], options, list(crossover_report(shown)))
    compared = any(row["first_over_second"] is not None for row in shown["rows"])
    return OK if compared else NOTHING


def _count(options: Options) -> int:
    if options["gpus"] is None:
        raise InputError("--gpus is missing: how many GPUs? For example --gpus 64")
    return one_number("--gpus", options["gpus"])


# ---------------------------------------------------------------- sweep


def run_sweep(models: Sequence[str], options: Options) -> int:
    one_word("--format", options["output_format"], FORMATS)
    asked = questions.parse_asked(options)
    jobs = 0 if options["jobs"] is None else one_number("--jobs", options["jobs"], most=4096)
    scenarios = _scenarios(models, options)
    for scenario in {(s.model, s.hardware, s.runtime): s for s in scenarios}.values():
        sweep.setting_of(scenario)  # a wrong name ends the sweep before it begins
    store = open_store(options["results"]) if options["results"] else None
    quiet, no_color = options["quiet"], options["no_color"]
    with _executor(options) as executor, progress("sweeping", quiet=quiet, no_color=no_color) as drawn:
        rows, done = sweep.run(scenarios, jobs=jobs, store=store, say=drawn, executor=executor)
    if done.resumed:
        say(f"{done.resumed:,} of {done.total:,} were in {clean(options['results'])}", quiet=options["quiet"])
    shown = sweep.document(rows, tokens=asked.tokens, days=asked.days, goodput=asked.goodput)
    show(shown, shown["rows"], options, list(sweep_report(shown)))
    if done.interrupted:
        say(f"distplan: interrupted after {done.done:,} of {done.total:,}{_again(options)}")
        return INTERRUPTED
    return OK if any(row["status"] == "fits" for row in shown["rows"]) else NOTHING


def _executor(options: Options) -> AbstractContextManager[Executor | None]:
    """The Dask cluster that was named; None means processes here."""
    if not options["cluster"]:
        return nullcontext()
    if options["jobs"] is not None:
        raise InputError("--jobs counts processes here, --cluster has workers of its own: give one of them")
    from distplan.planner.sweep_cluster import cluster_executor

    return cluster_executor(options["cluster"])


def _again(options: Options) -> str:
    return "; the same command goes on from there" if options["results"] else "; --results FILE would keep them"


def _scenarios(models: Sequence[str], options: Options) -> list[Scenario]:
    if options["gpus"] is None:
        raise InputError("--gpus is missing: which counts? For example --gpus 64,128,256")
    listed = default("hardware") if options["hardware"] is None else options["hardware"]
    systems = [name.strip() for name in listed.split(",")]
    lengths = _many("--seq-len", options["seq_len"])
    batches = _many("--global-batch", options["global_batch"])
    common = _common(options)
    made = []
    for model in models:
        for system in systems:
            counts = gpu_counts(options["gpus"], node=load_cluster(system).gpus_per_node)
            for length in lengths:
                for batch in batches:
                    over = min(counts) if options["scale_batch"] else 0
                    made += [
                        Scenario(model=model, hardware=system, gpus=count, seq_len=length, global_batch=batch,
                                 most_gpus=max(counts), batch_over=over, **common)
                        for count in counts
                    ]  # fmt: skip
                    if len(made) > MAX_SCENARIOS:
                        raise InputError(f"more than {MAX_SCENARIOS:,} searches; sweep fewer at a time")
    return made


def _common(options: Options) -> Mapping[str, Any]:
    overrides = {name: options[name] for name in ("precision", "optimizer", "attention", "loss")}
    return {
        "runtime": options["runtime"],
        "overrides": {name: value for name, value in overrides.items() if value is not None},
        "bounds": given_bounds(options),
        "limits": given_limits(options),
        "allow_tight": options["allow_tight"],
        "mesh_order": given_mesh_order(options),
    }


def _many(option: str, text: str | None) -> tuple[int | None, ...]:
    return (None,) if text is None else whole_numbers(option, text, most=MAX_TOKENS)
