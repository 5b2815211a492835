"""`verify`: the proof that a strategy is equivalent to one device, as a table or as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from distplan.costmodel.interpret_small import MICRO_BATCHES
from distplan.costmodel.layout import join_axes
from distplan.costmodel.model_file import load_model
from distplan.costmodel.verify import TOLERANCE, Collective, Verification, verify
from distplan.planner.cli_run import chosen
from distplan.planner.cli_show import show
from distplan.planner.report import heading, line, table
from distplan.planner.terminal import say

Options = dict[str, Any]
OK, NOT_EQUIVALENT = 0, 4
WHAT = ("loss", "output", "input gradient", "gradient", "weight")
MOST = 10
SENT = {True: "needed", False: "not needed", None: "not sent here"}


def run_verify(name: str, plan: str | None, options: Options) -> int:
    """Exit code 0 if everything is equal, 4 if not; a needless collective is a remark. Raises DistplanError."""
    strategy, job, _ = chosen(plan or name, options)
    model = job.model if plan is None else load_model(name).model
    found = verify(model, job.workload, job.runtime, strategy, cluster=job.cluster)
    shown = document(found) | {"model": model.name, "runtime": job.runtime.name}
    show(shown, [*shown["tensors"], *shown["collectives"]], options, list(report(shown)))
    if not found.passed:
        say(f"distplan: {_sentence(found)}")
    return OK if found.equal else NOT_EQUIVALENT


def document(found: Verification) -> dict[str, Any]:
    """Plain data of a verification."""
    return {
        "passed": found.passed,
        "equal": found.equal,
        "ranks": found.ranks,
        "degrees": dict(found.degrees),
        "layers": found.layers,
        "micro_batches": MICRO_BATCHES,
        "sizes": dict(found.sizes),
        "tolerance": TOLERANCE,
        "tensors": [{"what": t.what, "name": t.name, "error": t.error} for t in found.tensors],
        "collectives": [_collective(each) for each in found.collectives],
    }


def _collective(each: Collective) -> dict[str, Any]:
    result = "repeated in vain" if each.repeated and each.needed is False else SENT[each.needed]
    return {
        "segment": each.segment or "pipeline",
        "phase": each.phase,
        "name": each.name,
        "kind": {"send": "send_recv", "tied": "all_reduce"}.get(each.kind, each.kind),
        "axes": join_axes(each.axes),
        "result": result,
    }


def report(shown: Mapping[str, Any]) -> Iterator[RenderableType]:
    verdict = "equivalent to one device" if shown["equal"] else "NOT equivalent to one device"
    yield Text(f"{shown['model']} on {shown['runtime']}: {verdict}", style="bold")
    degrees = " x ".join(f"{axis} {n}" for axis, n in shown["degrees"].items() if n > 1 and axis != "edp") or "1 rank"
    yield line(f"{shown['ranks']} simulated ranks ({degrees}), {shown['layers']} layers, "
               f"{shown['micro_batches']} micro-batches, one optimizer step; the Program that is priced")  # fmt: skip
    yield line("sizes " + " ".join(f"{dim} {size}" for dim, size in sorted(shown["sizes"].items())), style="dim")
    yield from _tensors(shown["tensors"])
    yield from _collectives(shown["collectives"])


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    yield heading("Compared, every rank's block")
    rows = []
    for what in WHAT:
        errors = [t["error"] for t in tensors if t["what"] == what]
        if errors:
            wrong = sum(error > TOLERANCE for error in errors)
            rows.append((what, str(len(errors)), f"{max(errors):.1e}", f"{wrong} differ" if wrong else "equal"))
    yield table(("tensor", "compared", "largest error", ""), rows, left=(0, 3))
    wrong = [t for t in tensors if t["error"] > TOLERANCE]
    for t in wrong[:MOST]:
        yield line(f"{t['what']} {t['name']}: {t['error']:.1e}")
    if len(wrong) > MOST:
        yield line(f"and {len(wrong) - MOST} more")


def _collectives(collectives: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    yield heading("Collectives, each left out once")
    counts: dict[tuple[str, ...], int] = {}
    for each in collectives:
        key = (each["segment"], each["phase"], each["kind"], each["axes"], each["result"])
        counts[key] = counts.get(key, 0) + 1
    sent = [(*key[:4], str(n), key[4]) for key, n in counts.items() if key[4] != SENT[None]]
    if sent:
        yield table(("segment", "phase", "collective", "axes", "count", "result"), sent, left=(0, 1, 2, 3, 5))
    else:
        yield line("none is sent")
    unsent = sum(n for key, n in counts.items() if key[4] == SENT[None])
    if unsent:
        yield line(f"{unsent} more are not sent: their axes have degree 1", style="dim")


def _sentence(found: Verification) -> str:
    wrong = [t for t in found.tensors if t.error > TOLERANCE]
    if wrong:
        return f"{len(wrong)} of {len(found.tensors)} tensors differ from the single device's, first {wrong[0].name}"
    names = ", ".join(each.name for each in found.needless)
    return f"the result is the same without {names}"
