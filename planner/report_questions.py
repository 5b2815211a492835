"""Answers to questions on a terminal: training, a measured step, limits, crossovers, sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from distplan.hardware.units import format_bytes_per_second
from distplan.planner.report import heading, line, table
from distplan.planner.report_goodput import goodput_report
from distplan.planner.terminal import clean
from distplan.planner.wording import bar, count, gib, large, percent, seconds, strategy_label, words

Plain = dict[str, Any]
BAR_WIDTH = 30


def answers_report(shown: Plain) -> Iterator[RenderableType]:
    """What was asked beside a plan."""
    if "training" in shown:
        yield from _training(shown["training"])
    if "goodput" in shown:
        yield from goodput_report(shown["goodput"])
    if "measured" in shown:
        yield from _measured(shown["measured"])


def _training(rows: Sequence[Plain]) -> Iterator[RenderableType]:
    yield heading(f"To train {large(rows[0]['tokens'])} tokens")
    cells: list[tuple[str, ...]] = []
    for row in rows:
        steps = f"{row['gpus']:,}", f"{row['steps']:,}"
        cells.append((*steps, "useful", _days(row["days"]), f"{row['gpu_hours']:,.0f}", money(row["cost"])))
        cells.append(("", "", "elapsed", *_spent(row)))
    yield table(("GPUs", "steps", "time", "days", "GPU-hours", "cost"), cells, left=(2,))
    yield line("elapsed: with failures, restarts and checkpoints (--goodput), without evaluation", style="dim")
    first = rows[0]
    if first["days_asked"] is None:
        return
    if first["in_time"]:
        yield line(f"done in the {_days(first['days_asked'])} days asked", style="green")
        return
    more = "no count of GPUs would do: they fail too often"
    if first["gpus_needed"] is not None:
        more = f"{first['gpus_needed']:,} GPUs would do at the same rate per GPU (distplan sweep finds it)"
    yield line(f"not done in {_days(first['days_asked'])} days; {more}", style="yellow")


def _spent(row: Plain) -> tuple[str, str, str]:
    """Days, GPU-hours and money that pass."""
    if row["elapsed_days"] is None:
        return "never", "", ""
    return _days(row["elapsed_days"]), f"{row['elapsed_gpu_hours']:,.0f}", money(row["elapsed_cost"])


def _days(days: float) -> str:
    return f"{days:,.1f}" if days < 100.0 else f"{days:,.0f}"


def money(cost: float | None) -> str:
    """US dollars, rounded as nobody pays cents of millions."""
    if cost is None:
        return ""
    return f"{cost:,.0f} USD" if cost >= 100.0 else f"{cost:.2f} USD"


def _measured(found: Plain) -> Iterator[RenderableType]:
    verdict = {"reasonable": "reasonable", "slow": "slower than it should be", "fast": "faster than thought"}
    yield heading(f"Measured {seconds(found['seconds'])}: {verdict[found['verdict']]}")
    between = f"{seconds(found['low_seconds'])} to {seconds(found['high_seconds'])}"
    yield line(f"{found['ratio']:.2f} times the {seconds(found['expected_seconds'])} expected ({between})")
    yield line(f"MFU {percent(found['mfu'])} in place of {percent(found['expected_mfu'])}; "
               f"{found['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU")  # fmt: skip
    if found["verdict"] == "fast":
        yield line("check that sequence, global batch, GPUs and dtypes are those of the run")
    if found["causes"]:
        yield line("What alone would do it:")
        rows = [(_explains(each, found), each["what"], seconds(each["seconds"])) for each in found["causes"]]
        yield table(("", "", "step"), rows, left=(0, 1))


def _explains(cause: Plain, found: Plain) -> str:
    if cause["explains"]:
        return "explains it"
    return "not enough" if cause["seconds"] < found["seconds"] else "too much"


# ---------------------------------------------------------------- limits


def limits_report(shown: Plain) -> Iterator[RenderableType]:
    yield Text(clean(f"{shown['model']} on {count(shown['gpus'], 'GPU')} of {shown['hardware']}, {shown['runtime']}"),
               style="bold")  # fmt: skip
    what = "longest sequence" if shown["of"] == "seq-len" else "largest micro-batch"
    other = "" if shown["of"] == "seq-len" else f", sequences of {shown['seq_len']:,} tokens"
    yield line(f"global batch {shown['global_batch']:,} sequences{other}")
    if shown["largest"] is None:
        yield line("none fits", style="bold red")
    else:
        unit = " tokens" if shown["of"] == "seq-len" else ""
        yield line(f"{what} that fits: {shown['largest']:,}{unit}", style="bold green")
    rows = [_limit_row(row, shown) for row in shown["rows"] if row["fits"]]
    if rows:
        yield Text("")
        name = "tokens" if shown["of"] == "seq-len" else "micro-batch"
        yield table((name, "strategy", "step", "tokens/s/GPU", "memory", ""), rows, left=(1, 5))
    if shown["binds"]:
        yield from _binds(shown)


def _limit_row(row: Plain, shown: Plain) -> tuple[str, ...]:
    mark = "fastest" if row["value"] == shown["fastest"] else ""
    rate = f"{row['tokens_per_second_per_gpu']:,.0f}"
    label = strategy_label(row["strategy"])
    return f"{row['value']:,}", label, seconds(row["step_seconds"]), rate, gib(row["device_bytes"]), mark


def _binds(shown: Plain) -> Iterator[RenderableType]:
    binds = shown["binds"]
    yield Text("")
    over = f"{gib(binds['bytes_over'])} too much on stage {binds['stage']} at {binds['phase']}"
    where = "the nearest to fitting" if shown["largest"] is None else "beyond it the nearest"
    yield line(f"{where} needs {over}, mostly {words(binds['part'])} ({gib(binds['part_bytes'])})")
    yield line(strategy_label(binds["strategy"]), style="dim")


# ---------------------------------------------------------------- crossover


def gbit(bandwidth: float) -> str:
    return f"{bandwidth * 8e-9:,.4g} Gbit/s"


def crossover_report(shown: Plain) -> Iterator[RenderableType]:
    yield Text(clean(f"{shown['model']} on {count(shown['gpus'], 'GPU')} of {shown['hardware']}, {shown['runtime']}"),
               style="bold")  # fmt: skip
    yield line(f"a: {shown['first']}; b: {shown['second']}")
    own = f"{gbit(shown['bandwidth'])} ({format_bytes_per_second(shown['bandwidth'])})"
    yield line(f"{shown['tier']} bandwidth per GPU and direction; its own is {own}")
    yield Text("")
    names = {"first": "a", "second": "b"}
    if not shown["crossings"]:
        yield line(_one_wins(shown), style="bold")
    for crossing in shown["crossings"]:
        other = "b" if names[crossing["above"]] == "a" else "a"
        yield line(f"{names[crossing['above']]} beats {other} above {gbit(crossing['bandwidth'])} "
                   f"({format_bytes_per_second(crossing['bandwidth'])})", style="bold green")  # fmt: skip
    yield Text("")
    rows = []
    for row in shown["rows"]:
        times = [_time(row[f"{name}_seconds"]) for name in names]
        strategies = [row[f"{name}_strategy"] for name in names]
        labels = [strategy_label(each) if each else "nothing fits" for each in strategies]
        rows.append((gbit(row["bandwidth"]), times[0], times[1], *labels))
    yield table(("bandwidth", "a", "b", "strategy a", "strategy b"), rows, left=(3, 4))


def _time(value: float | None) -> str:
    return "" if value is None else seconds(value)


def _one_wins(shown: Plain) -> str:
    ratios = [row["first_over_second"] for row in shown["rows"] if row["first_over_second"] is not None]
    if not ratios:
        missing = "a" if all(row["first_seconds"] is None for row in shown["rows"]) else "b"
        return f"nothing of {missing} fits, so there is nothing to compare"
    wins = "a" if ratios[-1] < 1.0 else "b"
    return f"{wins} is faster at every bandwidth in the table"


# ---------------------------------------------------------------- sweep


def sweep_report(shown: Plain) -> Iterator[RenderableType]:
    rows = shown["rows"]
    groups: dict[tuple[str, ...], list[Plain]] = {}
    for row in rows:
        group = (str(row["model"]), str(row["hardware"]), str(row["runtime"]), str(row["seq_len"]))
        groups.setdefault(group, []).append(row)
    for number, ((model, hardware, runtime, seq_len), members) in enumerate(groups.items()):
        if number:
            yield Text("")
        length = f", {int(seq_len):,} tokens" if seq_len.isdigit() else ""
        yield Text(clean(f"{model} on {hardware}, {runtime}{length}"), style="bold")
        yield from _group(members, shown)


def _group(rows: Sequence[Plain], shown: Plain) -> Iterator[RenderableType]:
    cells = [_sweep_row(row) for row in rows]
    head = ("GPUs", "batch", "strategy", "step", "tokens/s/GPU", "MFU", "memory")
    yield table(head, cells, left=(2,))
    fits = [row for row in rows if row["status"] == "fits"]
    if shown["tokens"] is not None and fits:
        yield heading(f"To train {large(shown['tokens'])} tokens")
        costs = ("GPUs", "batch", "useful days", "goodput", "days", "GPU-hours", "cost", "")
        yield table(costs, [_cost_row(row) for row in fits], left=(7,))
    if fits and "checkpoint_share" in fits[0]:
        yield from goodput_report(fits)
    if len({row["gpus"] for row in fits}) > 1:
        yield heading("Tokens per second, and how much of linear scaling is kept")
        yield from _plot(fits)


def _sweep_row(row: Plain) -> tuple[str, ...]:
    first = (f"{row['gpus']:,}", f"{row['global_batch']:,}" if row["global_batch"] else "")
    if row["status"] == "fits":
        return (*first, strategy_label(row["strategy"]), seconds(row["step_seconds"]),
                f"{row['tokens_per_second_per_gpu']:,.0f}", percent(row["mfu"]), gib(row["device_bytes"]))  # fmt: skip
    why = {
        "nothing_fits": f"nothing fits, {gib(row.get('bytes_over', 0.0))} too much",
        "nothing_legal": "no strategy is legal",
        "error": str(row.get("problem", "")),
    }[row["status"]]
    return (*first, why, "", "", "", "")


def _cost_row(row: Plain) -> tuple[str, ...]:
    late = "" if row["in_time"] is None else "in time" if row["in_time"] else "too late"
    first = f"{row['gpus']:,}", f"{row['global_batch']:,}", _days(row["days"]), percent(row["goodput"])
    return (*first, *_spent(row), late)


def _plot(rows: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """A bar per count; the light part is what linear scaling from the smallest count would add."""
    most = max(row["tokens_per_second"] / min(row["scaling"], 1.0) for row in rows)
    cells = []
    for row in rows:
        linear = row["tokens_per_second"] / min(row["scaling"], 1.0)
        width = max(1, round(BAR_WIDTH * linear / most))
        drawn = bar(row["tokens_per_second"], linear, width)
        rate = large(row["tokens_per_second"])
        cells.append((f"{row['gpus']:,}", f"{row['global_batch']:,}", drawn, rate, percent(row["scaling"])))
    yield table(("GPUs", "batch", "", "tokens/s", "scaling"), cells, left=(2,))
