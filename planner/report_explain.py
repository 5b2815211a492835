"""What `explain` shows on a terminal, drawn from the plain data of explain_*.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from distplan.hardware.units import format_bytes, format_bytes_per_second, format_tflops_per_second, format_traffic
from distplan.planner.report import heading, line, table
from distplan.planner.terminal import clean
from distplan.planner.wording import count, duration, gib, percent, seconds, strategy_label, words

Plain = dict[str, Any]


def plan_report(shown: Plain) -> Iterator[RenderableType]:
    where = f"{count(shown['gpus'], 'GPU')} of {shown['hardware']}, {shown['runtime']}"
    yield Text(clean(f"{shown['model']} on {where}"), style="bold")
    yield line(strategy_label(shown["strategy"]))
    if "memory" in shown:
        yield from _memory(shown["memory"])
    if "communication" in shown:
        yield from _communication(shown["communication"])
    if "time" in shown:
        yield from _time(shown["time"])
    yield from _constants(shown["constants"])


# ---------------------------------------------------------------- memory


def _memory(memory: Plain) -> Iterator[RenderableType]:
    total, usable = gib(memory["device_bytes"]), gib(memory["usable_bytes"])
    yield heading(f"Memory of stage {memory['stage']} at its peak ({memory['phase']}): {total} of {usable} usable")
    yield table(("phase", "device", "mostly"), _phases(memory["phases"]), left=(0, 2))
    host = memory["host"]
    stays = f", {gib(host['offload_bytes'])} for good" if host["offload_bytes"] else ""
    yield line(f"host memory of its rank: {gib(host['load_bytes'])} while it loads{stays}", style="dim")
    for part in memory["parts"]:
        yield Text("")
        yield line(f"{part['part']}: {gib(part['bytes'])} ({percent(part['share'])})", style="bold")
        if part["how"]:
            yield line(part["how"], style="dim", indent=4)
        if part["terms"]:
            yield table(("bytes", "tensor", "elements x copies x dtype"), _terms(part), left=(1, 2))


def _phases(phases: Sequence[Plain]) -> Iterator[tuple[str, ...]]:
    """The three largest parts of each."""
    for each in phases:
        parts = sorted(each["parts"].items(), key=lambda part: -part[1])[:3]
        yield each["phase"], gib(each["device_bytes"]), ", ".join(f"{name} {gib(size)}" for name, size in parts)


_REST = {"logits and loss": "values that live only while the loss is computed"}
"""part -> what its terms leave out"""


def _terms(part: Plain) -> Iterator[tuple[str, ...]]:
    for term in _merged(part["terms"]):
        copies = f" x {term['copies']:,.4g}" if term["copies"] != 1.0 else ""
        tensor = f"{_short(term)} {term['placement']}"
        yield _size(term["bytes"]), tensor, f"{term['elements']:,.0f}{copies} x {term['dtype']}"
    if part["rest"]:
        yield _size(part["rest"]), _REST.get(part["part"], "padding of shards to whole rows"), ""


def _size(value: float) -> str:
    return gib(value) if value >= 0.005 * 2.0**30 else format_bytes(value)


def _merged(terms: Sequence[Plain]) -> list[Plain]:
    """Largest first; equal tensors (two moments) together."""
    rows: dict[tuple[str, ...], Plain] = {}
    for term in terms:
        key = (term["segment"], term["name"], term["placement"], term["dtype"])
        old = rows.get(key, {"bytes": 0.0, "copies": 0.0})
        sums = {name: old[name] + term[name] for name in ("bytes", "copies")}
        rows[key] = term | sums
    return sorted(rows.values(), key=lambda term: -term["bytes"])


def _short(term: Plain) -> str:
    name = term["name"]
    return name if name.startswith(term["segment"]) else f"{term['segment']}.{name}"


# ---------------------------------------------------------------- communication


def _communication(rows: Sequence[Plain]) -> Iterator[RenderableType]:
    yield heading("Communication per GPU and step")
    if not rows:
        yield line("none")
    for row in rows:
        yield Text("")
        ranks = f" over {row['ranks']:,.0f} ranks" if row["ranks"] else ""
        tier = f" ({row['tier']}, {row['algorithm']})" if row["tier"] else ""
        yield line(f"{row['name']}: {words(row['kind'])} on {row['axis']}{ranks}{tier}, {row['phase']}", style="bold")
        for pair in row["placements"][:6]:
            of = f"{pair['of']} " if pair["of"] else ""
            yield line(f"{of}{pair['before']} → {pair['after']}", indent=4)
        if len(row["placements"]) > 6:
            yield line(f"and {len(row['placements']) - 6} more weights alike", indent=4, style="dim")
        sent = f"{format_traffic(row['payload_bytes'])} given, {format_traffic(row['wire_bytes'])} sent"
        times = f"{duration(row['seconds'])}, exposed {duration(row['exposed_seconds'])}"
        yield line(f"{count(row['count'], 'call')}: {sent}, {times}", indent=4)
        if row["behind"]:
            yield line(f"can hide behind {', '.join(row['behind'])}", indent=4, style="dim")


# ---------------------------------------------------------------- time


def _time(time: Plain) -> Iterator[RenderableType]:
    batches = count(time["num_micro_batches"], "micro-batch", "micro-batches")
    yield heading(f"Time of a step: {seconds(time['step_seconds'])}, {batches}")
    for part in time["parts"]:
        yield Text("")
        yield line(f"{part['part']}: {duration(part['seconds'])} ({percent(part['share'])})", style="bold")
        if part["how"]:
            yield line(part["how"], style="dim", indent=4)
        if abs(part["factor"] - 1.0) > 1e-6:
            yield line(f"times {part['factor']:.4g}, the runtime's software factor", style="dim", indent=4)
        if part["terms"]:
            yield table(("time", "calls", "operator", "rate"), _operators(part), left=(2,))


def _operators(part: Plain) -> Iterator[tuple[str, ...]]:
    for each in sorted(part["terms"], key=lambda each: -each["seconds"]):
        sizes = each["sizes"]
        shape = " ".join(f"{name}={size:,.0f}" for name, size in sizes.items() if size != 1.0)
        if each["flops"]:
            rate = format_tflops_per_second(each["flops_per_second"])
        else:
            rate = format_bytes_per_second(each["bytes_per_second"]) if each["moved_bytes"] else ""
        phase = "" if each["phase"] == "forward" else f" ({each['phase']})"
        yield duration(each["seconds"]), f"{each['calls']:,.0f}", f"{_short(each)}{phase} {shape}".rstrip(), rate


def _constants(rows: Sequence[Plain]) -> Iterator[RenderableType]:
    yield heading("Constants and their sources")
    for row in rows:
        points = f", {row['points']} points" if row["points"] else ""
        yield line(f"{row['name']}: {row['value']} ({row['status']}{points})")
        yield line(row["source"], style="dim", indent=6)


# ---------------------------------------------------------------- rules and fields


def rule_report(shown: Plain) -> Iterator[RenderableType]:
    kind = "refuses" if shown["refuses"] else "warns"
    yield Text(clean(f"{shown['code']} {shown['title']}: {kind}"), style="bold")
    yield line(shown["why"])
    for variant in shown["variants"]:
        name = f"{variant['variant']}: " if variant["variant"] else ""
        sentence = variant["sentence"].replace("{", "<").replace("}", ">")
        yield line(f"{name}{sentence}", style="dim")
    if shown["after"]:
        yield line(f"said only where {shown['after']} holds", style="dim")
    example = shown["example"]
    yield heading(f"{example['of']} with {example['runtime']} on {count(example['gpus'], 'GPU')}")
    yield line(strategy_label(example["strategy"]))
    if example["broken"]:
        yield line(example["sentence"], style="red")
        nearest = ", ".join(example["nearest"]) or "none by changing one field alone"
        yield line(f"nearest legal: {nearest}", style="green")
    else:
        yield line("the rule holds here", style="green")
    yield heading("The same strategy in each runtime")
    rows = [
        (row["runtime"], "broken" if row["breaks"] else "holds", row["variant"], row["source"])
        for row in shown["runtimes"]
    ]
    yield table(("runtime", "", "variant", "source"), rows, left=(0, 1, 2, 3))


def field_report(shown: Plain) -> Iterator[RenderableType]:
    needed = " (required)" if shown["required"] else ""
    yield Text(clean(f"{shown['field']} of a {shown['kind']} file{needed}"), style="bold")
    if shown["meaning"]:
        yield line(shown["meaning"])
    yield line(f"takes {shown['takes']}")
    bounds = [f"{word} {shown[key]:,}" for word, key in (("at least", "least"), ("at most", "most"))
              if shown[key] is not None]  # fmt: skip
    if bounds:
        yield line(", ".join(bounds))
    if shown["default"] is not None:
        default = shown["default"]
        text = str(default).lower() if isinstance(default, bool) else str(default) or "empty"
        yield line(f"default {text}")
    if shown["fields"]:
        yield line(f"holds {', '.join(shown['fields'])}")
    if shown["line"] is not None:
        yield line(f"{shown['file']}:{shown['line']}: {shown.get('place', shown['field'])} is {shown['value']}")
