"""Many searches at once: models x systems x counts x batches x lengths, on all cores, resumable.

Every scenario is a search of its own. Rows come back in the order of the scenarios, whoever was done first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import Any

import distplan
from distplan.costmodel.goodput import Interruptions
from distplan.hardware.errors import DistplanError
from distplan.planner import api
from distplan.planner.document import FORMAT_VERSION, choice
from distplan.planner.plain import digest, plain, rounded
from distplan.planner.questions import Asked, best_of, job_of, training
from distplan.planner.questions_goodput import GivenGoodput, goodput_row, interruptions, refined
from distplan.planner.questions_limits import plan_of
from distplan.planner.space import Bounds
from distplan.planner.sweep_store import Store

Plain = dict[str, Any]
MAX_SCENARIOS = 100_000
ROWS = 2
"""counts up when rows gain a field, so that a file of old ones is not taken for complete"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One search. Names and plain values only, so that it can be sent to another process."""

    model: str
    hardware: str
    gpus: int
    runtime: str | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    """sequences per step; None = the default for `most_gpus`, the same for all counts"""
    most_gpus: int = 0
    batch_over: int = 0
    """> 0: the global batch times gpus over this"""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=dict)
    limits: api.Limits = field(default_factory=api.Limits)
    allow_tight: bool = False
    mesh_order: tuple[str, ...] = ()


def setting_of(scenario: Scenario) -> api.Setting:
    """The job of a scenario; DistplanError where a name is wrong."""
    overrides = dict(scenario.overrides) | {"seq_len": scenario.seq_len, "global_batch": scenario.global_batch}
    most = scenario.batch_over or max(scenario.most_gpus, scenario.gpus)
    job = api.setting(
        scenario.model, gpus=most, hardware=scenario.hardware, runtime=scenario.runtime,
        mesh_order=scenario.mesh_order, overrides=overrides, limits=scenario.limits,
    )  # fmt: skip
    if scenario.batch_over:
        batch = max(1, job.workload.global_batch * scenario.gpus // scenario.batch_over)
        job = replace(job, workload=replace(job.workload, global_batch=batch))
    return job


def key_of(scenario: Scenario, job: api.Setting) -> str:
    """A digest of everything that the result depends on: another version or other data is another key."""
    asked = plain(scenario) | {"bounds": {name: list(values) for name, values in sorted(scenario.bounds.items())}}
    content = [digest(value) for value in (job.model, job.workload, job.cluster, job.runtime)]
    return digest({"asked": asked, "content": content, "version": distplan.__version__, "rows": ROWS})


def solve(scenario: Scenario) -> Plain:
    """One row; a search without a result is a row too (status nothing_fits, nothing_legal or error)."""
    row: Plain = {
        "model": scenario.model, "hardware": scenario.hardware, "gpus": scenario.gpus,
        "runtime": scenario.runtime, "seq_len": scenario.seq_len, "global_batch": scenario.global_batch,
    }  # fmt: skip
    try:
        job = setting_of(scenario)
        row |= {"model": job.model.name, "hardware": job.cluster.id, "runtime": job.runtime.name,
                "seq_len": job.workload.seq_len, "global_batch": job.workload.global_batch}  # fmt: skip
        asked = job_of(job, scenario.bounds, allow_tight=scenario.allow_tight)
        best, tally = best_of(asked, scenario.gpus, price_per_gpu_hour=scenario.limits.price_per_gpu_hour)
    except DistplanError as error:
        return row | {"status": "error", "problem": str(error)}
    if best is None:
        if tally.nearest is None:
            return row | {"status": "nothing_legal"}
        over = float(tally.nearest.columns["over"][0])
        made: Plain = rounded(row | {"status": "nothing_fits", "bytes_over": over})
        return made
    shown = choice(best, plan_of(asked, best))
    kept = ("verdict", "step_seconds", "tokens_per_second_per_gpu", "mfu", "device_bytes", "usable_bytes",
            "num_micro_batches", "recompute_layers")  # fmt: skip
    price = scenario.limits.price_per_gpu_hour
    row |= {"status": "fits"} | {name: shown[name] for name in kept}
    row |= {
        "tokens_per_second": best.tokens_per_second_per_gpu * best.gpus,
        "price_per_gpu_hour": price if price is not None else job.cluster.price_per_gpu_hour or None,
        "gpus_per_node": job.cluster.gpus_per_node,
        "strategy": plain(best.strategy),
        "interruptions": plain(interruptions(job.model, job.workload, job.cluster, job.runtime)),
    }
    rounded_row: Plain = rounded(row)
    return rounded_row


# ---------------------------------------------------------------- running


@dataclass(slots=True)
class Progress:
    """How far a sweep is; `interrupted` where Ctrl-C ended it."""

    done: int = 0
    total: int = 0
    resumed: int = 0
    interrupted: bool = False


def run(
    scenarios: Sequence[Scenario],
    *,
    jobs: int = 0,
    store: Store | None = None,
    say: Callable[[float, float], None] | None = None,
    executor: Executor | None = None,
) -> tuple[list[Plain | None], Progress]:
    """Rows in the order of `scenarios`; None where an interrupt came first. `jobs`: processes, 0 = all cores.

    Results that `store` knows are taken from it, new ones are put there as soon as they are there.
    """
    keys = [_key(scenario) for scenario in scenarios]
    rows: list[Plain | None] = [None if store is None or key is None else store.get(key) for key in keys]
    progress = Progress(total=len(scenarios), resumed=sum(row is not None for row in rows))
    progress.done = progress.resumed
    todo = [at for at, row in enumerate(rows) if row is None]

    def finished(at: int, row: Plain) -> None:
        rows[at] = row
        progress.done += 1
        key = keys[at]
        if store is not None and key is not None:
            store.put(key, row)
        if say is not None:
            say(progress.done, progress.total)

    try:
        for at, row in _rows(scenarios, todo, jobs or cores(), executor):
            finished(at, row)
    except KeyboardInterrupt:
        progress.interrupted = True
    return rows, progress


def _key(scenario: Scenario) -> str | None:
    try:
        return key_of(scenario, setting_of(scenario))
    except DistplanError:
        return None  # its row says why, each time anew


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rows(
    scenarios: Sequence[Scenario], todo: Sequence[int], jobs: int, executor: Executor | None
) -> Iterator[tuple[int, Plain]]:
    """(place, row) as they are done."""
    if executor is None and (jobs == 1 or len(todo) <= 1):
        for at in todo:
            yield at, solve(scenarios[at])
        return
    before = set(active_children())
    made = executor or ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn"), initializer=_deaf)
    pending: dict[Future[Plain], int] = {}
    try:
        pending |= {made.submit(solve, scenarios[at]): at for at in todo}
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: pending[future]):
                yield pending.pop(future), future.result()
    except BrokenExecutor:
        problem = "a process of the sweep was ended from outside; with fewer --jobs it needs less memory"
        raise DistplanError(problem) from None
    finally:
        if executor is None:
            made.shutdown(wait=False, cancel_futures=True)
            if pending:
                _end(set(active_children()) - before)
        else:
            for future in pending:
                future.cancel()


def _end(children: set[BaseProcess]) -> None:
    """Searches that nobody waits for any more."""
    for child in children:
        child.terminate()


def _deaf() -> None:
    """Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# ---------------------------------------------------------------- what it says


def document(
    rows: Iterable[Plain | None],
    *,
    tokens: float | None = None,
    days: float | None = None,
    goodput: GivenGoodput | None = None,
) -> Plain:
    """Plain data: the rows with their scaling against the smallest count of the same job, and training. InputError."""
    known = [row for row in rows if row is not None]
    smallest: dict[tuple[Any, ...], Plain] = {}
    for row in known:
        if row["status"] == "fits":
            group = _group(row)
            if group not in smallest or row["gpus"] < smallest[group]["gpus"]:
                smallest[group] = row
    asked = Asked(tokens=tokens, days=days, goodput=goodput or GivenGoodput())
    shown = [_scaled(row, smallest.get(_group(row)), asked) for row in known]
    made: Plain = rounded({"format_version": FORMAT_VERSION, "tokens": tokens, "days": days, "rows": shown})
    return made


def _group(row: Plain) -> tuple[Any, ...]:
    """What stays the same while GPUs (and with them a scaled batch) grow."""
    return row["model"], row["hardware"], row["runtime"], row["seq_len"]


_USEFUL = ("days", "gpu_hours", "cost", "goodput", "failures")
_ELAPSED = ("elapsed_days", "elapsed_gpu_hours", "elapsed_cost", "in_time")


def _scaled(row: Plain, first: Plain | None, asked: Asked) -> Plain:
    if row["status"] != "fits" or first is None:
        return row
    stops = refined(Interruptions(**row["interruptions"]), asked.goodput)  # as the row's own hardware has them
    made = {name: value for name, value in row.items() if name != "interruptions"} | {
        "scaling": row["tokens_per_second_per_gpu"] / first["tokens_per_second_per_gpu"],
        "speedup": row["tokens_per_second"] / first["tokens_per_second"],
    }
    if asked.goodput.shown:
        made |= goodput_row(stops, row["gpus"], row["step_seconds"])
    if asked.tokens is None:
        return made
    cost = training(
        gpus=row["gpus"], node=row["gpus_per_node"], step_seconds=row["step_seconds"],
        tokens_per_step=float(row["seq_len"] * row["global_batch"]), price_per_gpu_hour=row["price_per_gpu_hour"],
        tokens=asked.tokens, days=asked.days, stops=stops,
    )  # fmt: skip
    return made | {name: cost[name] for name in (*_USEFUL, *_ELAPSED)}
