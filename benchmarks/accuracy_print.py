"""The accuracy report as text and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.accuracy_choice import choices, summary
from benchmarks.accuracy_predict import Predicted, Prediction
from benchmarks.accuracy_rows import Selection
from benchmarks.accuracy_score import (
    AXES,
    JSON_AXES,
    Errors,
    coverage,
    errors,
    fully_stated,
    grouped,
    naive_errors,
    naive_seconds,
    out_of_memory,
    timed,
    with_memory,
)

_HEAD = f"  {'':36}{'rows':>6}{'median':>9}{'mean':>9}{'p90':>9}{'<5%':>7}{'<10%':>7}{'<20%':>7}{'signed':>9}"
FEW = 10
"""groups with fewer rows are listed without a verdict (a star)"""


def _line(name: str, found: Errors) -> str:
    star = "*" if found.n < FEW else ""
    close = "".join(f"{100 * share:>6.0f}%" for share in found.within)
    return (
        f"  {(name[:34] + star):36}{found.n:>6}{100 * found.median:>8.1f}%{100 * found.mean:>8.1f}%"
        f"{100 * found.p90:>8.1f}%{close}{100 * found.signed:>+8.1f}%"
    )


def text(selection: Selection, predicted: Predicted, apart: dict[str, Predicted]) -> str:
    everything = predicted.predictions
    lines = [*_rows(selection, predicted)]
    for title, chosen in (("all due rows", everything), ("fully stated rows", fully_stated(everything))):
        lines += ["", f"== {title}"]
        for section in (_time, _memory, _oom, _choosing, _bands):
            lines += section(chosen)
    lines += ["", "== rows apart", *_apart(apart), "", "== the twenty worst step times", *_worst(everything)]
    return "\n".join(lines)


def _rows(selection: Selection, predicted: Predicted) -> list[str]:
    due, out = len(selection.due), len(predicted.left_out)
    lines = [f"{selection.given} rows given, {due} due, {len(predicted.predictions)} predicted, {out} left out"]
    lines += [f"  not due: {n:5} {why}" for why, n in selection.not_due.items()]
    reasons = Counter(why for _, why in predicted.left_out)
    lines += [f"  left out: {n:4} ({100 * n / max(due, 1):.1f} %) {why}" for why, n in reasons.most_common()]
    return lines


def _time(chosen: Sequence[Prediction]) -> list[str]:
    rows = timed(chosen)
    if not rows:
        return ["step time: no rows"]
    lines = ["step time", _HEAD, _line("all", errors([p.error for p in rows]))]
    lines.append(_line("naive planner (the floor)", errors(naive_errors(rows))))
    for axis in AXES:
        lines.append(f"  -- by {axis}")
        lines += [_line(name, errors([p.error for p in group])) for name, group in grouped(rows, axis).items()]
    return lines


def _memory(chosen: Sequence[Prediction]) -> list[str]:
    rows = with_memory(chosen)
    unsaid = [p for p in chosen if p.case.memory > 0.0 and p.case.reading == "unsaid" and not p.case.offloads]
    lines = ["peak memory", _HEAD]
    if rows:
        lines.append(_line("all", errors([p.memory_error for p in rows])))
        for reading in ("allocated", "reserved", "device"):
            members = [p for p in rows if p.case.reading == reading]
            if members:
                lines.append(_line(reading, errors([p.memory_error for p in members])))
        for axis in ("GPU", "framework"):
            lines += [_line(n, errors([p.memory_error for p in g])) for n, g in grouped(rows, axis).items()]
    if unsaid:
        lines.append(_line("apart: kind unsaid, taken as device", errors([p.memory_error for p in unsaid])))
    return lines


def _oom(chosen: Sequence[Prediction]) -> list[str]:
    lines = ["out of memory (really / said: fits, tight, out)"]
    for name, members in {"all": list(chosen), **grouped(chosen, "source")}.items():
        found = out_of_memory(members)
        if not any(really == "out of memory" for really, _ in found.table):
            continue
        cells = {
            really: [found.table.get((really, said), 0) for said in ("fits", "tight", "out")]
            for really in ("ran", "out of memory")
        }
        lines.append(
            f"  {name[:46]:46} ran {cells['ran']}, out of memory {cells['out of memory']}; "
            f"recall {100 * found.recall:.1f} %, feasible {100 * found.feasible:.1f} %"
        )
    return lines


def _choosing(chosen: Sequence[Prediction]) -> list[str]:
    rows = timed(chosen)
    lines = ["choosing among measured strategies (groups of runs that differ only in strategy)"]
    ours, naive = choices(rows, [p.seconds for p in rows]), choices(rows, naive_seconds(rows) if rows else [])
    sources = dict.fromkeys(choice.source for choice in ours)
    for name, found in [("all", ours), ("naive planner", naive)] + [
        (source, [c for c in ours if c.source == source]) for source in sources
    ]:
        if found:
            s = summary(found)
            lines.append(
                f"  {name[:46]:46} {s.groups:4} groups, regret median {100 * s.median_regret:5.1f} %, mean "
                f"{100 * s.mean_regret:5.1f} %, Kendall tau {s.kendall_tau:.2f}"
            )
    return lines


def _bands(chosen: Sequence[Prediction]) -> list[str]:
    rows = timed(chosen)
    lines = [f"the band covers {100 * coverage(rows):.0f} % of measured step times; by GPU"]
    return lines + [
        f"  {name:36}{len(group):>6}{100 * coverage(group):>8.0f}%" for name, group in grouped(rows, "GPU").items()
    ]


def _apart(apart: dict[str, Predicted]) -> list[str]:
    lines = [_HEAD]
    for name, predicted in apart.items():
        rows = timed(predicted.predictions)
        if rows:
            lines.append(_line(name, errors([p.error for p in rows])))
        else:
            lines.append(f"  {name}: {len(predicted.predictions)} predicted, {len(predicted.left_out)} not, none timed")
    return lines


def guess(prediction: Prediction) -> str:
    """A cause to look at first: what was filled, else the largest term that is not compute."""
    if {"recompute", "vpp", "precision"} & set(prediction.case.filled):
        unsaid = ", ".join(name for name in ("recompute", "vpp", "precision") if name in prediction.case.filled)
        if prediction.error > 0 or "recompute" in unsaid:
            return f"unsaid: {unsaid} (taken: {prediction.recompute}, vpp {prediction.case.strategy.vpp})"
    compute = ("matrix products", "attention", "memory-bound", "recompute")
    rest = {name: value for name, value in prediction.time.items() if name not in compute}
    largest = max(rest, key=lambda name: rest[name])
    share = rest[largest] / prediction.seconds
    if share > 0.15:
        return f"{largest} is {100 * share:.0f} % of the prediction"
    return "kernels slower than modelled" if prediction.error < 0 else "kernels faster than modelled"


def _worst(chosen: Sequence[Prediction]) -> list[str]:
    rows = sorted(timed(chosen), key=lambda p: -abs(p.error))[:20]
    lines = []
    for p in rows:
        s = p.case.strategy
        layout = f"tp{s.tp} pp{s.pp}x{s.vpp} cp{s.cp} dp{s.dp} zero{s.zero} b{s.micro_batch} {p.recompute}"
        lines.append(
            f"  {p.case.row['id']:12}{p.case.row['model_name'][:18]:19}{p.case.row['n_gpus']:>6} "
            f"{p.case.row['derived_gpu_family'][:9]:10}{layout:42}{p.seconds:9.2f} s for {p.case.seconds:9.2f} s "
            f"({100 * p.error:+.0f} %): {guess(p)}"
        )
    return lines


def document(selection: Selection, predicted: Predicted) -> dict[str, Any]:
    """The report for programs: errors as fractions; null where nothing can be said."""
    rows, memory = timed(predicted.predictions), with_memory(predicted.predictions)
    choosing = summary(choices(rows, [p.seconds for p in rows]))
    facts = out_of_memory(predicted.predictions)

    def by_group(members: Sequence[Prediction], value: str) -> dict[str, dict[str, float]]:
        groups = {"all": list(members)}
        for axis in JSON_AXES:
            groups |= grouped(members, axis)
        return {name: errors([getattr(p, value) for p in g]).as_json() for name, g in groups.items() if g}

    found = {
        "rows": {
            "given": selection.given,
            "due": len(selection.due),
            "predicted": len(predicted.predictions),
            "left_out": dict(Counter(why for _, why in predicted.left_out)),
            "not_due": dict(selection.not_due),
        },
        "step_time": by_group(rows, "error"),
        "memory": by_group(memory, "memory_error"),
        "oom": {"recall": facts.recall, "feasible": facts.feasible},
        "choice": asdict(choosing),
        "band_coverage": coverage(rows),
    }
    return dict(_plain(found))


def _plain(value: Any) -> Any:
    """NaN has no place in JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
