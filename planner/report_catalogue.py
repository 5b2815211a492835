"""The catalogue on a terminal: systems, one machine with the source of each number, models, one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from distplan.hardware.units import format_bytes_per_second, format_tflops_per_second
from distplan.planner.report import heading, line, table
from distplan.planner.terminal import clean
from distplan.planner.wording import gib, large, words

Plain = Mapping[str, Any]
_UNSAID = (0, 0.0, False, "", "none")


def systems_table(rows: Sequence[Plain]) -> list[RenderableType]:
    cells = [
        (
            row["id"],
            row["accelerator"],
            str(row["gpus_per_node"]),
            gib(row["memory_bytes"]),
            format_bytes_per_second(row["scaleup_bytes_per_second"]),
            format_bytes_per_second(row["fabric_bytes_per_second"]),
        )
        for row in rows
    ]
    header = ("system", "accelerator", "GPUs", "memory", "scale-up", "fabric")
    ending = "GPUs: per node. Bandwidths: per GPU and direction. distplan hardware show ID says where each is from."
    return [table(header, cells, left=(0, 1)), Text(f"\n{ending}", style="dim")]


def hardware_report(found: Plain) -> list[RenderableType]:
    return [*_system(found["system"]), *_accelerator(found["accelerator"])]


def _system(system: Plain | None) -> Iterator[RenderableType]:
    if system is None:
        yield Text("No shipped system has this accelerator; --hardware takes a file with your own.")
        return
    yield Text(clean(f"{system['id']}: {system['name']}"), style="bold")
    cells = [
        (
            tier["name"],
            "all" if tier["size"] is None else f"{tier['size']:,.0f}",
            f"{tier['technology']} {tier['topology']}",
            format_bytes_per_second(tier["bandwidth"]),
        )
        for tier in system["tiers"]
    ]
    yield table(("tier", "GPUs", "links", "per GPU and direction"), cells, left=(0, 2))
    yield from _facts({name: fact for name, fact in system["facts"].items() if not name.startswith("reliability.")})
    for price in system["prices"]:
        yield line(f"price {price['text']}, {price['status']}, {', '.join(price['sources'])}")
    for key, known in system["reliability"].items():
        for fact in known:
            yield from _facts({f"reliability.{key}": fact})
    if "calibration" in system:
        yield heading("Measured on this cluster, in place of the shipped constants")
        yield from _measured(system["calibration"], "")


def _measured(section: Plain, path: str) -> Iterator[RenderableType]:
    """An entry per block: its name with the measurements behind it, then its constants."""
    for name, entry in section.items():
        if "points" not in entry:
            yield from _measured(entry, f"{path}{name}.")
            continue
        values = ", ".join(f"{key} {value}" for key, value in entry.items() if key not in ("points", "source"))
        yield line(f"{path}{name:<26} {entry['points']} measured: {entry['source']}")
        yield line(values, style="dim", indent=6)


def _accelerator(accelerator: Plain) -> Iterator[RenderableType]:
    name, family = accelerator["name"], f"{accelerator['vendor']} {accelerator['generation']}"
    yield heading(f"{accelerator['id']}: {name} ({family})")
    peaks = ", ".join(f"{dtype} {format_tflops_per_second(peak)}" for dtype, peak in accelerator["peak_flops"].items())
    yield line(f"dense peaks: {peaks}")
    if accelerator["scaleup_technology"]:
        yield line(f"links to other devices: {accelerator['scaleup_technology']}")
    yield from _facts(accelerator["facts"])


def _facts(facts: Plain) -> Iterator[RenderableType]:
    """A number per line with its status; its sources and note, which may be long, below it."""
    for name, fact in facts.items():
        style = "yellow" if fact["status"] == "unverified" else ""
        yield line(f"{name:<26} {fact['text']:<18} {fact['status']}", style=style)
        sources = "; ".join(fact["sources"]) + (f" ({fact['note']})" if fact["note"] else "")
        yield line(sources, style="dim", indent=6)


def models_table(rows: Sequence[Plain]) -> list[RenderableType]:
    cells = [
        (
            row["name"],
            "not yet" if row["parameters"] is None else large(row["parameters"]),
            "" if row["active_parameters"] is None else large(row["active_parameters"]),
            str(row["layers"]),
            f"{row['hidden']:,}",
            f"{row['vocab']:,}",
        )
        for row in rows
    ]
    parts: list[RenderableType] = [table(("model", "parameters", "active", "layers", "hidden", "vocab"), cells)]
    if any(row["parameters"] is None for row in rows):
        parts.append(Text("\nnot yet: a kind of layer that cannot be priced yet (models show says which)", style="dim"))
    return parts


def model_report(found: Plain) -> list[RenderableType]:
    return [*_model(found), *_kinds(found), *_graph(found.get("graph", ()))]


def _model(found: Plain) -> Iterator[RenderableType]:
    yield Text(clean(found["name"]), style="bold")
    total, active = found["parameters"], found["active_parameters"]
    yield line(f"parameters         {total:,} ({large(total)})")
    yield line(f"active per token   {active:,} ({large(active)})")
    yield line(f"layers             {found['layers']}")
    architecture = found["architecture"]
    for key, value in architecture.items():
        if key not in ("name", "kinds") and value not in (None, 0, 0.0, False, "", {}):
            yield line(f"{words(key):<18} {_said(value)}")
    for key, value in found["workload"].items():
        yield line(f"workload.{key} {value}")
    yield line(f"read as            {found['kind']}")
    for label in ("path", "source"):
        if found[label]:
            yield line(f"{label:<18} {found[label]}", style="dim")
    for note in found["notes"]:
        yield line(f"note: {note}")


def _said(value: Any) -> str:
    return "yes" if value is True else str(value)


def _kinds(found: Plain) -> Iterator[RenderableType]:
    for name, kind in found["architecture"]["kinds"].items():
        yield heading(f"{found['layers_of_kind'][name]} layers of kind {name}")
        for part in ("mixer", "ffn"):
            if kind[part] is not None:
                stated = {key: _said(value) for key, value in kind[part].items() if value not in _UNSAID}
                yield line(f"{part}: " + ", ".join(f"{key} {value}" for key, value in stated.items()))
        yield line(f"norm: {kind['norm']} ({kind['norm_position']})")


def _graph(segments: Sequence[Plain]) -> Iterator[RenderableType]:
    for segment in segments:
        yield heading(f"Graph of {segment['name']}")
        for weight in segment["weights"]:
            sizes = " ".join(f"{dim}={size}" for dim, size in zip(weight["dims"], weight["sizes"], strict=True))
            yield line(f"weight {weight['name']} [{sizes}]")
        for operator in segment["operators"]:
            yield line(f"{operator['kind']}: {', '.join(operator['inputs'])} -> {operator['output']}")
