"""Rows about runs: do they fit, how much memory do they take, how fast are they, which is faster."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.acceptance_rows import Answer, CannotAnswer, Row, Run, cluster_of, missing_facts, model_of, runs, words
from distplan.hardware.errors import DistplanError
from distplan.planner.api import estimate_setting, search_setting, setting
from distplan.planner.plan import VERDICTS, Choice

GIB = 2.0**30
_GIB_WORDS = {"gib": GIB, "gb": 1e9}
_DEGREES = ("tp", "pp", "cp", "ep", "zero", "dp_shard", "sharding", "dp")


def priced(run: Run) -> Choice:
    best = estimate_setting(run.job, run.strategy).best
    assert best is not None
    return best


def _verdict(row: Row, kind: str, values: Sequence[tuple[Run, float, bool]], show: Callable[[float], str]) -> Answer:
    """`values`: (run, our number, does it hold). Extremes that agree decide; so do those on one side of the truth."""
    seen = sorted(value for _, value, _ in values)
    span = show(seen[0]) if show(seen[0]) == show(seen[-1]) else f"{show(seen[0])} to {show(seen[-1])}"
    holds = [held for _, _, held in values]
    if len(set(holds)) > 1:
        return Answer(id=row["id"], kind=kind, verdict="undecided", said=span, missing=_missing(values))
    return Answer(id=row["id"], kind=kind, verdict="holds" if holds[0] else "fails", said=span)


def _missing(values: Sequence[tuple[Run, float, bool]]) -> tuple[str, ...]:
    """Facts whose extreme alone turns the verdict."""
    turning: dict[str, Any] = {}
    for run, _, held in values:
        for other, _, other_held in values:
            apart = [name for name in run.open if run.open[name] != other.open[name]]
            if held != other_held and len(apart) == 1:
                turning[apart[0]] = True
    return missing_facts(turning or values[0][0].open)


# ---------------------------------------------------------------- fits


def fits(row: Row) -> Answer:
    """Rows without a strategy ask for any."""
    if not any(word in row for word in _DEGREES):
        return _any_fits(row)
    found = []
    for run in runs(row):
        choice = priced(run)
        found.append((run, float(choice.estimate.device_bytes[0]), (choice.verdict != "out") == row["fits"]))
    usable = found[0][0].job.cluster.accelerator.memory_bytes
    made = _verdict(row, "fits", found, _gib)
    said = f"{made.said} of {_gib(usable)}"
    shares = re.search(words()["shared"]["pattern"], str(row.get("note", "")))
    if shares and made.verdict == "fails" and not row["fits"]:
        # alone it fits; nobody says what is left of the device
        return replace(made, verdict="undecided", said=said, missing=(words()["shared"]["said"],))
    return replace(made, said=said)


def _any_fits(row: Row) -> Answer:
    job = setting(model_of(row), gpus=int(row["gpus"]), hardware=cluster_of(str(row["gpu"])), runtime="any")
    plan = search_setting(job, int(row["gpus"]), top=1, allow_tight=True)
    fit = plan.best is not None
    said = f"a strategy fits: {plan.best.strategy}" if plan.best else "does not fit for any configuration"
    smallest = getattr(plan.why_nothing, "smallest_gpus", None)
    if smallest:
        said += f"; the smallest count that would is {smallest}"
    return Answer(id=row["id"], kind="fits", verdict="holds" if fit == row["fits"] else "fails", said=said)


def gpu_counts(row: Row) -> Answer:
    """Counts of GPUs at which a task is feasible and infeasible: with one sequence a GPU and recomputation as needed,
    which are the planner's to choose; the sequence is not."""
    task = str(row.get("task", "")).lower()
    zero = re.search(r"zero-?([0-3])", task)
    if not zero:
        raise CannotAnswer(f"task '{row.get('task')}' names no ZeRO stage")
    wanted = {**dict.fromkeys(row.get("infeasible", ()), False), **dict.fromkeys(row.get("feasible", ()), True)}
    said, held = [], []
    for count, feasible in wanted.items():
        given = {key: value for key, value in row.items() if key in ("id", "case", "model", "gpu")}
        found = [(run, priced(run)) for run in runs({**given, "gpus": count, "zero": int(zero[1]), "mbs": 1})]
        least: dict[int, tuple[float, int]] = {}
        for run, choice in found:
            seq = run.job.workload.seq_len
            least[seq] = min(least.get(seq, (float("inf"), 3)), _pressure(choice))
        held.append([(verdict < 2) == feasible for _, verdict in least.values()])
        said.append(f"{count}: {' to '.join(_gib(used) for used, _ in least.values())}")
    verdict = "holds" if all(map(all, held)) else "undecided" if all(map(any, held)) else "fails"
    missing = ("the sequence",) if verdict == "undecided" else ()
    usable = _gib(cluster_of(str(row["gpu"])).accelerator.memory_bytes)
    return Answer(
        id=row["id"], kind="min_gpus", verdict=verdict, said=f"{'; '.join(said)} of {usable}", missing=missing
    )


def _pressure(choice: Choice) -> tuple[float, int]:
    return float(choice.estimate.device_bytes[0]), VERDICTS.index(choice.verdict)


# ---------------------------------------------------------------- memory and rate


def memory(row: Row) -> Answer:
    parts = [_memory({**_common(row), **each}, row) for each in row.get("rows", (row,))]
    if len(parts) == 1:
        return parts[0]
    order = ("holds", "undecided", "fails")
    worst = max(parts, key=lambda part: order.index(part.verdict))
    said = "; ".join(f"{part.said} ({part.verdict})" for part in parts)
    missing = tuple(dict.fromkeys(fact for part in parts for fact in part.missing))
    return Answer(id=row["id"], kind="memory", verdict=worst.verdict, said=said, missing=missing)


def _common(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "rows"}


def _memory(row: Row, whole: Row) -> Answer:
    unit = next((word for word in _GIB_WORDS if word in row), None)
    if unit is None:
        raise CannotAnswer("no measured memory (gib, gb)")
    truth = float(row[unit]) * _GIB_WORDS[unit]
    found = []
    for run in runs({key: value for key, value in row.items() if key != "tol_pct"}):
        choice = priced(run)
        found.append((run, float(getattr(choice.estimate, f"{run.reading}_bytes")[0]), True))
    return _against(whole, "memory", found, truth, float(whole["tol_pct"]) / 100.0, _gib)


def rate(row: Row) -> Answer:
    found = [(run, priced(run).tokens_per_second_per_gpu, True) for run in runs(row)]
    truth, tolerance = float(row["tokens_per_s_gpu"]), float(row["tol_pct"]) / 100.0
    return _against(row, "rate", found, truth, tolerance, lambda value: f"{value:,.0f} tokens/s/GPU")


def _against(
    row: Row,
    kind: str,
    found: Sequence[tuple[Run, float, bool]],
    truth: float,
    tolerance: float,
    show: Callable[[float], str],
) -> Answer:
    """Within the tolerance at every extreme: holds. All on one side of it: fails. Else the facts decide."""
    values = [(run, value, abs(value / truth - 1.0) <= tolerance) for run, value, _ in found]
    made = _verdict(row, kind, values, show)
    low, high = min(value for _, value, _ in values), max(value for _, value, _ in values)
    around = low < truth * (1.0 - tolerance) and high > truth * (1.0 + tolerance)
    off = " to ".join(dict.fromkeys(f"{value / truth - 1.0:+.1%}" for value in (low, high)))
    verdict, missing = made.verdict, made.missing
    if verdict == "fails" and around:
        verdict, missing = "undecided", missing_facts(values[0][0].open)
    return replace(made, verdict=verdict, said=f"{made.said} for {show(truth)} ({off})", missing=missing)


def _gib(value: float) -> str:
    return f"{value / GIB:.2f} GiB"


# ---------------------------------------------------------------- rank


def rank(row: Row) -> Answer:
    """The first of `order` is the fastest, and so on down."""
    entries = row.get("order")
    if not entries:
        raise CannotAnswer("a sentence, not an order of strategies")
    degrees = [_degrees_of(str(entry)) for entry in entries]
    if "model" not in row and "inline" not in row:
        return Answer(
            id=row["id"], kind="rank", verdict="undecided", said=" > ".join(map(str, entries)), missing=("the model",)
        )
    common = {key: value for key, value in row.items() if key != "order"}
    speeds = [_speeds({**common, **each}) for each in degrees]
    held, said = [], []
    for at in speeds[0]:
        ordered = [speed[at] for speed in speeds]
        held.append(ordered == sorted(ordered, reverse=True))
        said.append(" > ".join(f"{value:,.0f}" for value in ordered))
    verdict = "holds" if all(held) else "fails" if not any(held) else "undecided"
    missing = missing_facts(dict.fromkeys(name for name, _ in next(iter(speeds[0])))) if verdict == "undecided" else ()
    return Answer(id=row["id"], kind="rank", verdict=verdict, said=f"{said[0]} tokens/s/GPU", missing=missing)


def _degrees_of(entry: str) -> dict[str, int]:
    """tp4 pp12 dp8 mbs2 (110.5 s) -> its fields."""
    found = {name: int(number) for name, number in re.findall(r"\b(tp|pp|cp|ep|etp|dp|vp|mbs)(\d+)\b", entry)}
    if not found:
        raise CannotAnswer(f"'{entry}' names no strategy")
    return found


def _speeds(row: Row) -> Mapping[tuple[tuple[str, Any], ...], float]:
    return {tuple(run.open.items()): priced(run).tokens_per_second_per_gpu for run in runs(row)}


def answered(ask: Callable[[Row], Answer], row: Row, kind: str) -> Answer:
    """An error of the planner is the reason why the row cannot be answered."""
    try:
        return ask(row)
    except DistplanError as error:
        return Answer(id=row["id"], kind=kind, verdict="cannot answer", said=str(error))
