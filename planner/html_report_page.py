"""The page of `distplan report`: one file that needs no network. Text is escaped; only scripts of known hash run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template

from distplan.hardware.units import format_tflops_per_second, format_traffic
from distplan.planner.document import Plain, document
from distplan.planner.html_report import Found, figures
from distplan.planner.plain import plain
from distplan.planner.plan import Choice
from distplan.planner.terminal import clean
from distplan.planner.wording import count, duration, gib, large, percent, seconds, strategy_label, words

_VERDICTS = {"fits": "fits", "tight": "fits only if the estimate is exact", "out": "does not fit"}


def page(found: Found) -> str:
    """HTML. The same Found gives the same text."""
    style, script, library = (_file(name) for name in ("report.css", "report.js", "chart.umd.min.js"))
    library = "\n".join(line for line in library.splitlines() if not line.startswith("//# sourceMappingURL"))
    shown = document(found.plan)
    return Template(_file("page.html")).substitute(
        title=_text(_title(shown)),
        style=style,
        style_hash=_hash(style),
        script_hashes=f"{_hash(library)} {_hash(script)}",
        body="\n".join(_body(found, shown)),
        data=_embedded(figures(found)),
        library=library,
        script=script,
    )


def _file(name: str) -> str:
    return files("distplan.planner").joinpath("html", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names what may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: Plain) -> str:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(value: object) -> str:
    return escape(clean(value))


def _title(shown: Plain) -> str:
    given = shown["assumptions"]
    return f"{shown['model']['name']} on {count(shown['best']['gpus'], 'GPU')} of {given['hardware']}"


def _body(found: Found, shown: Plain) -> Iterator[str]:
    best = shown["best"]
    yield f"<h1>{_text(_title(shown))}</h1>"
    label = _text(strategy_label(best["strategy"]))
    yield f'<p><code>{label}</code> <strong class="{best["verdict"]}">{_VERDICTS[best["verdict"]]}</strong></p>'
    yield f'<p class="faint">{_text(_job(shown))}</p>'
    yield from (f'<p class="tight">{_text(w["code"])} {_text(w["sentence"])}</p>' for w in best["warnings"])
    yield from _cards(best)
    yield '<div class="figures">'
    yield from _memory(found, best)
    yield from _communication(best)
    yield from _timeline(found)
    yield from _front(found)
    yield from _scaling(found)
    yield "</div>"
    yield from _time(best)
    yield from (f'<p class="faint">{_text(note)}</p>' for note in shown["notes"])


def _job(shown: Plain) -> str:
    given = shown["assumptions"]
    parts = (
        f"{given['seq_len']:,} tokens per sequence",
        f"global batch {shown['best']['global_batch']:,} ({large(given['tokens_per_step'])} tokens)",
        f"{given['precision']['name']}, {given['optimizer']}",
        f"{given['accelerator']}",
        f"runtime {given['runtime']} {given['runtime_version']}",
    )
    return "; ".join(parts)


def _cards(best: Plain) -> Iterator[str]:
    peak = f"{format_tflops_per_second(best['peak_flops_per_second'])} {best['peak_dtype']}"
    cards = [
        ("step time", seconds(best["step_seconds"])),
        ("between", f"{seconds(best['step_seconds_low'])} and {seconds(best['step_seconds_high'])}"),
        ("tokens/s/GPU", f"{best['tokens_per_second_per_gpu']:,.0f}"),
        (f"MFU of {peak}", percent(best["mfu"])),
        ("memory per GPU", gib(best["device_bytes"])),
        ("of usable", percent(best["device_bytes"] / best["usable_bytes"])),
    ]
    if best["cost_per_token"] is not None:
        cards.append(("USD per million tokens", f"{best['cost_per_token'] * 1e6:.4g}"))
    yield '<dl class="cards">'
    yield from (f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in cards)
    yield "</dl>"


def _figure(
    name: str,
    title: str,
    caption: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    wide: bool = False,
    height: float = 0.0,
) -> Iterator[str]:
    """A chart with its numbers as a table below. height: in rem."""
    more = f' data-rem="{height:g}"' if height else ""  # set by the script: style attributes are not allowed to run
    yield f'<figure id="figure-{name}"{" class=wide" if wide else ""}>'
    yield f"<figcaption><h2>{_text(title)}</h2><p>{_text(caption)}</p></figcaption>"
    inside = f'<div class="chart"{more}><canvas id="{name}" role="img" aria-label="{_text(title)}"></canvas></div>'
    yield f'<div class="scroll">{inside}</div>' if wide else inside
    yield f"<details><summary>Numbers</summary>{_table(header, rows)}</details>"
    yield "</figure>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells of a column called `strategy` may wrap."""
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in header)
    text = [' class="text"' if name == "strategy" else "" for name in header]
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{_text(cell)}</td>' for kind, cell in zip(text, row, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _memory(found: Found, best: Plain) -> Iterator[str]:
    names = [name for name in found.stages[0].parts if any(stage.parts[name] for stage in found.stages)]
    caption = (
        f"Every pipeline stage in its own worst phase. Stage {best['worst_stage']} is the fullest: "
        f"{gib(best['device_bytes'])}, between {gib(best['device_bytes_low'])} and {gib(best['device_bytes_high'])}, "
        f"of {gib(best['usable_bytes'])} usable."
    )
    rows = [(str(s.stage), s.phase, gib(s.device_bytes), *(gib(s.parts[name]) for name in names)) for s in found.stages]
    yield from _figure("memory", "Memory per stage", caption, ("stage", "phase", "in all", *names), rows)


def _communication(best: Plain) -> Iterator[str]:
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
    caption = "Per GPU of the slowest stage and step." if rows else "None: a single GPU has nobody to talk to."
    header = ("axis", "collective", "calls", "payload", "on the wire", "time", "exposed")
    yield from _figure("communication", "Communication by mesh axis", caption, header, rows)


def _timeline(found: Found) -> Iterator[str]:
    step, stages = found.step, len(found.stages)
    cut = ""
    if step.shown < step.micro_batches:
        more = count(step.micro_batches - step.shown, "micro-batch", "micro-batches")
        cut = f" A step of {step.shown} micro-batches is drawn; {more} more repeat its middle."
    bubbles = zip(step.simulation.busy, step.simulation.bubble, step.simulation.peak, strict=True)
    total = step.simulation.seconds
    rows = [(str(at), seconds(busy), percent(idle / total), gib(peak)) for at, (busy, idle, peak) in enumerate(bubbles)]
    title = f"Pipeline: {found.chosen.strategy.schedule}, {count(stages, 'stage')}"
    caption = f"What each stage computes, and when.{cut}"
    header = ("stage", "busy", "idle", "activations at the peak")
    height = 6.0 + stages * (1.8 if stages <= 16 else 1.1)
    yield from _figure("timeline", title, caption, header, rows, wide=True, height=height)


def _front(found: Found) -> Iterator[str]:
    caption = (
        f"Strategies on {count(found.chosen.gpus, 'GPU')} that fit and that no other beats in both, and this one."
        if found.front
        else f"No strategy fits on {count(found.chosen.gpus, 'GPU')}."
    )
    rows = [_choice_row(choice) for choice in (found.chosen, *found.front)]
    yield from _figure("front", "Time against memory", caption, ("strategy", "step", "memory"), rows)


def _choice_row(choice: Choice) -> tuple[str, str, str]:
    label = strategy_label(plain(choice.strategy))
    return label, seconds(choice.step_seconds), gib(float(choice.estimate.device_bytes[0]))


def _scaling(found: Found) -> Iterator[str]:
    rows = []
    for (gpus, same), (_, best) in zip(found.same, found.best, strict=True):
        rows.append((f"{gpus:,}", _step(same), _efficiency(same, found.chosen), _step(best), _label(best)))
    header = ("GPUs", "this strategy", "tokens/s/GPU of its own", "best", "strategy")
    caption = "The same global batch on fewer and on more GPUs; what does not fit is not drawn."
    yield from _figure("scaling", "Scaling", caption, header, rows)


def _step(choice: Choice | None) -> str:
    if choice is None:
        return "-"
    return seconds(choice.step_seconds) + ("" if choice.verdict == "fits" else f" ({_VERDICTS[choice.verdict]})")


def _efficiency(choice: Choice | None, own: Choice) -> str:
    return "-" if choice is None else percent(choice.tokens_per_second_per_gpu / own.tokens_per_second_per_gpu)


def _label(choice: Choice | None) -> str:
    return "nothing fits" if choice is None else strategy_label(plain(choice.strategy))


def _time(best: Plain) -> Iterator[str]:
    total = best["step_seconds"]
    rows = [(words(name), duration(part), percent(part / total)) for name, part in best["time"].items() if part]
    yield f"<section><h2>Step time {_text(seconds(total))}</h2>{_table(('part', 'time', 'share'), rows)}</section>"
