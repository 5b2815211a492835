"""`search` and `estimate`: from what was typed to a plan, from the plan to stdout and strategy.yaml."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distplan.costmodel.model_file import ModelFile
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import default
from distplan.hardware.cluster import is_file_name, load_cluster
from distplan.hardware.documents import load_mapping
from distplan.hardware.units import parse_bytes, parse_dollars_per_hour
from distplan.planner import api
from distplan.planner.cli_options import DIMENSIONS, SOLVED
from distplan.planner.cli_show import print_table
from distplan.planner.cli_timeline import show_step
from distplan.planner.document import document
from distplan.planner.inputs import (
    InputError,
    decimals,
    dimension,
    gpu_counts,
    one_number,
    one_word,
    quantity,
    whole_numbers,
)
from distplan.planner.output import FORMATS, csv_text, json_text, yaml_text
from distplan.planner.plan import OBJECTIVES, Plan
from distplan.planner.plan_file import PlanFile, is_plan, read_plan, write_plan
from distplan.planner.questions import answered, parse_asked
from distplan.planner.report import report
from distplan.planner.report_questions import answers_report
from distplan.planner.search import RuleError
from distplan.planner.strategy_from import strategy_from
from distplan.planner.terminal import clean, progress, say, write_data

Options = dict[str, Any]
OK, NOTHING, INTERRUPTED = 0, 3, 130
DEFAULT_OUTPUT = "strategy.yaml"
MAX_TOKENS = 10**9
MANY = 8


def run_search(model: str, options: Options) -> int:
    form = one_word("--format", options["output_format"], FORMATS)
    parse_asked(options)
    if plan_file(model) is not None:
        raise InputError(
            f"{model} is a strategy file, and search takes a model: distplan estimate {model} prices it again"
        )
    objective = one_word("--objective", options["objective"], OBJECTIVES)
    cluster = load_cluster(default("hardware") if options["hardware"] is None else options["hardware"])
    gpus = gpu_counts(_gpus(options), node=cluster.gpus_per_node)
    batches = _global_batches(options)
    job = _setting(model, options, gpus=max(gpus), global_batch=batches[0] if batches else None)
    bounds = given_bounds(options)
    quiet, no_color = options["quiet"], options["no_color"]
    with progress("searching", quiet=quiet, no_color=no_color) as shown:
        plan = api.search_setting(
            job,
            gpus,
            bounds=bounds,
            global_batches=batches,
            objective=objective,
            top=options["top"],
            allow_tight=options["allow_tight"],
            sensitivity=options["sensitivity"],
            other_runtimes=True,
            progress=shown,
        )
    plan = replace(plan, notes=(*_within(bounds), *plan.notes))
    _show(plan, form, options)
    if plan.interrupted:
        return INTERRUPTED
    if plan.best is None:
        return NOTHING
    if not options["no_write"]:
        _write(options["output"] or DEFAULT_OUTPUT, plan, _own_hardware(options), quiet=quiet)
    return OK


def run_estimate(name: str, options: Options) -> int:
    form = one_word("--format", options["output_format"], FORMATS)
    parse_asked(options)
    strategy, job, hardware = chosen(name, options)
    try:
        plan = replace(api.estimate_setting(job, strategy), allow_tight=options["allow_tight"])
    except RuleError as error:
        say(f"distplan: {job.runtime.name} cannot run this strategy: {clean(error)}")
        return NOTHING
    _show(plan, form, options)
    show_step(plan, options, form)
    if options["output"]:
        _write(options["output"], plan, hardware, quiet=options["quiet"])
    admitted = ("fits", "tight") if options["allow_tight"] else ("fits",)
    return OK if plan.best is not None and plan.best.verdict in admitted else NOTHING


def chosen(name: str, options: Options) -> tuple[Strategy, api.Setting, Any]:
    """The one strategy of a strategy file, or of a model and options; its setting; the user's own hardware."""
    file = plan_file(name)
    if file is not None:
        for sentence in file.changed:
            say(f"distplan: {name}: {sentence}")
        return file.strategy, _setting_of(file, options), file.hardware_document
    strategy = strategy_from(given_bounds(options), gpus=_one_gpu_count(options))
    batches = _global_batches(options)
    if len(batches) > 1:
        raise InputError("--global-batch: estimate takes one; search compares several")
    job = _setting(name, options, gpus=strategy.gpus, global_batch=batches[0] if batches else None)
    return strategy, job, _own_hardware(options)


def _gpus(options: Options) -> str:
    if options["gpus"] is None:
        raise InputError("--gpus is missing: how many GPUs? For example --gpus 64")
    return str(options["gpus"])


def _one_gpu_count(options: Options) -> int | None:
    return None if options["gpus"] is None else one_number("--gpus", options["gpus"])


def _global_batches(options: Options) -> tuple[int, ...]:
    text = options["global_batch"]
    return () if text is None else whole_numbers("--global-batch", text, most=MAX_TOKENS)


def given_bounds(options: Options) -> dict[str, tuple[Any, ...]]:
    """Strategy field -> the values typed for it, in order."""
    given = {
        name: dimension(name, f"--{name.replace('_', '-')}", options[name])
        for name in (*DIMENSIONS, *SOLVED)
        if options.get(name) is not None
    }
    return given if options["sp"] is None else given | {"sp": (options["sp"],)}


def _within(bounds: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """The bounds as a sentence for the report; ranges of more than a few values by their ends."""
    if not bounds:
        return ()
    said = []
    for name, values in bounds.items():
        words = [str(value).lower() for value in values]
        said.append(f"{name} {', '.join(words) if len(words) <= MANY else f'{words[0]} … {words[-1]}'}")
    return (f"searched within {'; '.join(said)}",)


def job_setting(model: str | ModelFile, options: Options, *, gpus: int) -> api.Setting:
    """The job of the options, for questions about one count and one batch."""
    batches = _global_batches(options)
    if len(batches) > 1:
        raise InputError("--global-batch: one value is expected here; search and sweep compare several")
    return _setting(model, options, gpus=gpus, global_batch=batches[0] if batches else None)


def _setting(model: str | ModelFile, options: Options, *, gpus: int, global_batch: int | None) -> api.Setting:
    seq_len, images = options["seq_len"], options["images_per_sequence"]
    overrides = {
        "seq_len": None if seq_len is None else one_number("--seq-len", seq_len, most=MAX_TOKENS),
        "global_batch": global_batch,
        "images_per_sequence": None if images is None else one_number("--images-per-sequence", images, least=0),
        "moe_imbalance": decimals("--moe-imbalance", options["moe_imbalance"]),
    } | {name: options[name] for name in ("precision", "optimizer", "attention", "loss")}
    return api.setting(
        model,
        gpus=gpus,
        hardware=options["hardware"],
        runtime=options["runtime"],
        mesh_order=given_mesh_order(options),
        overrides=overrides,
        limits=given_limits(options),
    )


def given_limits(options: Options) -> api.Limits:
    return api.Limits(
        reserve_bytes=quantity("--reserve", options["reserve"], parse_bytes) or 0.0,
        memory_limit_bytes=quantity("--memory-limit", options["memory_limit"], parse_bytes),
        price_per_gpu_hour=quantity("--price", options["price"], parse_dollars_per_hour),
    )


def given_mesh_order(options: Options) -> tuple[str, ...]:
    if options["mesh_order"] is None:
        return ()
    axes = tuple(axis.strip() for axis in options["mesh_order"].split(","))
    known = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    if sorted(axes) != sorted(known):
        raise InputError(f"--mesh-order {options['mesh_order']}: every axis once, as in {','.join(known)}")
    return axes


def plan_file(name: str) -> PlanFile | None:
    """The strategy file of that name; None where it is a model."""
    if not name.lower().endswith((".yaml", ".yml")) or not Path(name).is_file():
        return None
    document = load_mapping(name)
    return read_plan(document) if is_plan(document) else None


def _setting_of(file: PlanFile, options: Options) -> api.Setting:
    """The file's own setting; the options that describe a job are for models only."""
    job_options: tuple[str, ...] = (
        "gpus",
        "hardware",
        "runtime",
        "mesh_order",
        "global_batch",
        "seq_len",
        "precision",
        "optimizer",
    )
    job_options += ("attention", "loss", "images_per_sequence", "moe_imbalance", "sp", *DIMENSIONS, *SOLVED)
    given = [name for name in job_options if options.get(name) is not None]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise InputError(f"{option} cannot be combined with a strategy file, which says it; edit the file instead")
    limits = given_limits(options)
    return api.Setting(
        model=file.model,
        workload=file.workload,
        cluster=file.cluster,
        runtime=file.runtime,
        limits=api.Limits(
            reserve_bytes=file.reserve_bytes if options["reserve"] is None else limits.reserve_bytes,
            memory_limit_bytes=file.memory_limit_bytes
            if limits.memory_limit_bytes is None
            else limits.memory_limit_bytes,
            price_per_gpu_hour=file.price_per_gpu_hour
            if limits.price_per_gpu_hour is None
            else limits.price_per_gpu_hour,
        ),
    )


def _own_hardware(options: Options) -> Any:
    """Content of the user's hardware file, which travels in the strategy file; None for shipped hardware."""
    name = options["hardware"] or ""
    return load_mapping(name).value if is_file_name(name) else None


def _show(plan: Plan, form: str, options: Options) -> None:
    shown = document(plan) | answered(plan, options)
    if form == "table":
        print_table([*report(shown), *answers_report(shown)], no_color=options["no_color"])
    elif form == "csv":
        write_data(csv_text([row for row in (shown["best"], *shown["runners_up"]) if row is not None]))
    else:
        write_data(json_text(shown) if form == "json" else yaml_text(shown))
    if plan.best is None and form != "table":
        from distplan.planner.report_none import sentences

        say("distplan: " + " ".join(sentences(shown)))


def _write(path: str, plan: Plan, hardware: Any, *, quiet: bool) -> None:
    write_plan(path, plan, hardware=hardware)
    say(f"wrote {path}", quiet=quiet)
    sys.stderr.flush()
