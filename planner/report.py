"""The report of a search or an estimate on a terminal, drawn from the plain document of document.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from distplan.hardware.units import format_tflops_per_second, format_traffic
from distplan.planner.report_none import nothing
from distplan.planner.terminal import clean
from distplan.planner.wording import (
    bar,
    count,
    duration,
    gib,
    large,
    percent,
    seconds,
    share,
    signed_seconds,
    split_label,
    strategy_label,
    words,
)

Plain = dict[str, Any]
BAR_WIDTH = 22
LITTLE = 0.01  # of a step: a gain too small to spell out


def draw(shown: Plain, console: Console) -> None:
    for part in report(shown):
        console.print(part)


def report(shown: Plain) -> Iterator[RenderableType]:
    """Parts in reading order."""
    yield from _header(shown)
    best = shown["best"]
    if best is None:
        yield from nothing(shown)
    else:
        yield from _strategy(best)
        yield from _time(best, shown)
        yield from _imbalance(best)
        yield from _balanced(best)
        yield from _communication(best)
        yield from _memory(best, shown["assumptions"])
        yield from _runners_up(shown)
    yield from _counts(shown["counts"])
    yield from _outlook(shown)


def heading(text: str) -> Text:
    return Text(f"\n{clean(text)}", style="bold")


def line(text: str, style: str = "", *, indent: int = 2) -> RenderableType:
    """Indented, and so are the lines into which it wraps."""
    return Padding(Text(clean(text), style=style), (0, 0, 0, indent))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)) -> Table:
    """Right-aligned except the columns in `left`; no lines, so that it can be pasted anywhere."""
    made = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim", show_edge=False)
    made.add_column("")
    for index, name in enumerate(columns):
        words_wrap = index in left and index > 0
        made.add_column(name, justify="left" if index in left else "right", no_wrap=not words_wrap, overflow="fold")
    for row in rows:
        made.add_row("", *(clean(cell) for cell in row))
    return made


def _header(shown: Plain) -> Iterator[RenderableType]:
    given = shown["assumptions"]
    gpus = shown["gpus"]
    many = count(gpus[0], "GPU") if len(gpus) == 1 else f"{gpus[0]:,} to {gpus[-1]:,} GPUs ({len(gpus)} counts)"
    yield Text(clean(f"{shown['model']['name']} on {many} of {given['hardware']}"), style="bold")
    grid = Table.grid(padding=(0, 2))
    for name, text in _assumed(shown):
        grid.add_row("", Text(name, style="dim"), Text(clean(text)))
    yield grid


def _assumed(shown: Plain) -> Iterator[tuple[str, str]]:
    given = shown["assumptions"]
    dtypes = given["precision"]
    batches = " or ".join(f"{batch:,}" for batch in shown["global_batches"])
    tokens = f" ({large(given['tokens_per_step'])} tokens per step)" if len(shown["global_batches"]) == 1 else ""
    yield "sequence", f"{given['seq_len']:,} tokens, global batch {batches}{tokens}"
    kept = ", ".join(f"{name} {dtypes[name] or 'none'}" for name in ("compute", "matmul", "parameters", "gradients"))
    moments = "+".join(dtypes["moments"]) or "none"
    yield "precision", f"{dtypes['name']}: {kept}, master {dtypes['master'] or 'none'}, moments {moments}"
    offload = ", optimizer states in host memory" if given["offload_optimizer"] else ""
    yield "optimizer", f"{given['optimizer']}{offload}; attention {given['attention']}; loss {words(given['loss'])}"
    limit = given["memory_limit_bytes"]
    room = f"{gib(given['memory_bytes'])} of {gib(given['memory_label_bytes'])}"
    if limit is not None:
        lower = limit < given["memory_bytes"]
        room = f"planned for {gib(limit)}" if lower else f"{room} (the limit of {gib(limit)} is no less)"
    kept = f", {gib(given['reserve_bytes'])} kept free" if given["reserve_bytes"] else ""
    yield "hardware", f"{given['accelerator']}, {room}{kept}"
    yield "runtime", f"{given['runtime']}, {given['runtime_version']}"
    yield "objective", shown["objective"]


def _strategy(best: Plain) -> Iterator[RenderableType]:
    chosen = best["strategy"]
    verdict = {"fits": "fits", "tight": "fits only if the estimate is exact", "out": "does not fit"}[best["verdict"]]
    yield heading(f"Strategy on {count(best['gpus'], 'GPU')}: {verdict}")
    names = ("tp", "pp", "vpp", "cp", "dp_replicate", "dp_shard", "ep", "etp")
    yield line("   ".join(f"{name} {chosen[name]}" for name in names))
    inner = f" (all-to-all over {chosen['cp_inner']})" if chosen["cp_inner"] > 1 else ""
    kind = f"   cp_kind {chosen['cp_kind']}{inner}" if chosen["cp"] > 1 else ""
    yield line(f"zero {chosen['zero']}   sp {'yes' if chosen['sp'] else 'no'}{kind}   schedule {chosen['schedule']}")
    if chosen["stage_layers"]:
        yield line(f"stages by hand: layers {split_label(chosen['stage_layers'])}")
    batches = count(best["num_micro_batches"], "micro-batch", "micro-batches")
    yield line(f"micro_batch {chosen['micro_batch']}   {batches} per step of {best['global_batch']:,} sequences")
    layers = f" of {count(best['recompute_layers'], 'layer')} per stage" if chosen["recompute"] != "none" else ""
    yield line(f"recompute {chosen['recompute']}{layers}")
    for warning in best["warnings"]:
        yield line(f"{warning['code']} {warning['sentence']}", style="yellow")


def _time(best: Plain, shown: Plain) -> Iterator[RenderableType]:
    total = best["step_seconds"]
    how = ", simulated" if best["simulated_seconds"] is not None else ""
    low, high = seconds(best["step_seconds_low"]), seconds(best["step_seconds_high"])
    yield heading(f"Step time {seconds(total)} (between {low} and {high}{how})")
    rows = [
        (words(name), duration(part), percent(part / total), share(part, total, BAR_WIDTH))
        for name, part in best["time"].items()
        if part
    ]
    yield table(("part", "time", "share", ""), rows, left=(0, 3))
    yield line(f"{best['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU")
    yield from _utilization(best, shown["assumptions"]["accelerator"])
    if best["cost_per_token"] is not None:
        yield line(f"{best['cost_per_token'] * 1e6:.4g} USD per million tokens")


def _utilization(best: Plain, accelerator: str) -> Iterator[RenderableType]:
    values = (
        f"MFU {percent(best['mfu'])}, with causal halving {percent(best['mfu_causal'])}; HFU {percent(best['hfu'])}"
    )
    yield line(values)
    peak = best["peak_flops_per_second"]
    yield line(f"relative to {format_tflops_per_second(peak)}, the dense {best['peak_dtype']} peak of {accelerator}")
    bf16 = best["bf16_peak_flops_per_second"]
    if best["peak_dtype"] not in ("bf16", "fp16") and bf16:
        share = percent(best["mfu"] * peak / bf16)
        yield line(f"MFU {share} relative to {format_tflops_per_second(bf16)}, its dense bf16 peak")


def _imbalance(best: Plain) -> Iterator[RenderableType]:
    """Experts that are not evenly loaded: the range in two lines."""
    found = best["imbalance"]
    if found is None:
        return
    low, high = seconds(found["step_seconds_low"]), seconds(found["step_seconds_high"])
    loads = f"{found['low']:g} to {found['high']:g} times the mean (expected {found['expected']:g})"
    yield line(f"fullest rank of experts {loads}: step {low} to {high}")
    least, most = gib(found["device_bytes_low"]), gib(found["device_bytes_high"])
    said = {"fits": "", "tight": ", which fits only if exact", "out": ", which does not fit"}[found["verdict_high"]]
    worse = said if found["verdict_high"] != best["verdict"] else ""
    yield line(f"then memory {least} to {most}{worse}", style="yellow" if worse else "")


def _balanced(best: Plain) -> Iterator[RenderableType]:
    """Stages cut by hand: at most three lines."""
    split = best["balanced"]
    if split is None:
        return
    gain = 1.0 - split["step_seconds"] / split["default_step_seconds"]
    layers, default = split_label(split["layers"]), split_label(split["default_layers"])
    if gain < LITTLE and (gain > 0.0 or layers == default):
        said = f"a cut by hand gains {percent(gain)} over" if gain > 0.0 else "no cut by hand beats"
        yield line(f"stages: {said} the default {default}{_proved(split)}")
        return
    yield line(f"stages by hand: layers {layers}, by default {default}")
    here, there = gib(split["device_bytes"]), gib(split["default_device_bytes"])
    time = f"{seconds(split['step_seconds'])} ({percent(-gain, signed=True)})"
    yield line(f"then {time} and {here} on the worst stage, by default {there}{_proved(split)}")
    again = split["recompute_layers"]
    if any(number != split["default_recompute_layers"] for number in again):
        yield line(f"layers recomputed per stage {split_label(again)}, by default {split['default_recompute_layers']}")


def _proved(split: Plain) -> str:
    return f" (at most {percent(split['gap'])} from the best)" if split["gap"] > 0.0 else ""


def _communication(best: Plain) -> Iterator[RenderableType]:
    yield heading("Communication per GPU and step")
    rows = [
        (
            row["axis"],
            words(row["kind"]),
            f"{row['count']:,.0f}",
            format_traffic(row["payload_bytes"]),
            format_traffic(row["wire_bytes"]),
            duration(row["seconds"]),
            duration(row["exposed_seconds"]),
        )
        for row in best["communication"]
    ]
    if not rows:
        yield line("none")
        return
    sums = {
        name: sum(row[name] for row in best["communication"]) for name in ("wire_bytes", "seconds", "exposed_seconds")
    }
    times = duration(sums["seconds"]), duration(sums["exposed_seconds"])
    rows.append(("all", "", "", "", format_traffic(sums["wire_bytes"]), *times))
    yield table(("axis", "collective", "calls", "payload", "on the wire", "time", "exposed"), rows, left=(0, 1))


def _memory(best: Plain, given: Plain) -> Iterator[RenderableType]:
    total, usable = best["device_bytes"], best["usable_bytes"]
    stages = f"stage {best['worst_stage']} of {best['strategy']['pp']}" if best["strategy"]["pp"] > 1 else "every GPU"
    yield heading(f"Memory per GPU: {stages}, at its peak ({best['worst_phase']})")
    rows = [
        (words(name), gib(part), percent(part / total), share(part, total, BAR_WIDTH))
        for name, part in best["memory"].items()
        if part
    ]
    yield table(("part", "memory", "share", ""), rows, left=(0, 3))
    low, high = gib(best["device_bytes_low"]), gib(best["device_bytes_high"])
    yield line(f"{gib(total)} on the device, between {low} and {high}")
    yield line(f"of it allocated {gib(best['allocated_bytes'])}, reserved {gib(best['reserved_bytes'])}")
    style = {"fits": "green", "tight": "yellow", "out": "red"}[best["verdict"]]
    yield line(f"{bar(total, usable, 44)} {percent(total / usable)} of {gib(usable)} usable", style=style)
    if best["host_bytes"]:
        yield line(f"{gib(best['host_bytes'])} of host memory per GPU")


def _runners_up(shown: Plain) -> Iterator[RenderableType]:
    runners = shown["runners_up"]
    if not runners:
        return
    several = len(shown["gpus"]) > 1
    header = {"cost": "dearer", "step-time": "slower"}.get(shown["objective"], "time")
    yield heading("On the front as well" if shown["objective"] == "pareto" else "Runners-up")
    rows = []
    for rank, runner in enumerate(runners, start=2):
        extra = [f"{runner['gpus']} GPUs"] if several else []
        extra += [f"batch {runner['global_batch']}"] if len(shown["global_batches"]) > 1 else []
        label = " ".join([*extra, strategy_label(runner["strategy"])])
        ratio = runner["relative"] if header == "dearer" else _per_sequence(runner) / _per_sequence(shown["best"])
        cause = runner["slower_mostly"]
        late = cause["seconds"] if ratio >= 1.0 else 0.0
        why = f"{words(cause['part'])} {signed_seconds(late)}" if late > 0.0 else ""
        slower = ("tie " if runner["tie"] else "") + percent(ratio - 1.0, signed=True)
        rows.append((str(rank), label, seconds(runner["step_seconds"]), slower, gib(runner["device_bytes"]), why))
    yield table(("#", "strategy", "step", header, "memory", "mostly"), rows, left=(1, 5))
    if any(runner["tie"] for runner in runners):
        yield line("tie: within the error band of the first; their order is not known")


def _per_sequence(chosen: Plain) -> float:
    return float(chosen["step_seconds"] / chosen["global_batch"])


def _counts(counts: Plain) -> Iterator[RenderableType]:
    if counts["enumerated"] <= 1:
        return
    yield heading(f"{counts['enumerated']:,} candidates")
    sizes = f"{counts['fits']:,} fit, {counts['tight']:,} are tight, {counts['out']:,} do not fit"
    yield line(f"{counts['costed']:,} legal and costed: {sizes}")
    rejected = sum(rule["rejected"] for rule in counts["rejected"])
    if rejected:
        yield line(f"{rejected:,} excluded by a rule:")
        rows = [(rule["code"], rule["title"], f"{rule['rejected']:,}") for rule in counts["rejected"]]
        yield table(("rule", "", "candidates"), rows, left=(0, 1))


def _outlook(shown: Plain) -> Iterator[RenderableType]:
    lines = [*_sensitivities(shown), *_elsewhere(shown), *shown["notes"]]
    if shown["interrupted"]:
        lines.append("interrupted: the best of what had been costed until then")
    if shown["simulation_cut"]:
        lines.append(f"the simulation stopped after {shown['simulated']} strategies; a later one may be better")
    if lines:
        yield Text("")
    yield from (line(text) for text in lines)


def _sensitivities(shown: Plain) -> Iterator[str]:
    for item in shown["sensitivity"]:
        if not item["winner_changes"]:
            yield f"{item['change']}: the same strategy wins"
        elif item["winner"] is None:
            yield f"{item['change']}: nothing fits"
        else:
            other = strategy_label(item["winner"]["strategy"])
            yield f"{item['change']}: {other} wins; staying costs {percent(item['loss'])}"


def _elsewhere(shown: Plain) -> Iterator[str]:
    other = shown["other_runtime"]
    if other is None:
        return
    if other["speedup"] <= 1.0:
        yield "no other runtime's rules allow a faster strategy"
    else:
        label = strategy_label(other["best"]["strategy"])
        gain = percent(other["speedup"] - 1.0, signed=True)
        whose = "rules of several" if other["runtime"] == "any" else other["runtime"]
        yield f"any runtime: {gain} speed with {whose} ({label})"
