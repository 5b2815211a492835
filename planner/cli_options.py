"""The options of `search` and `estimate`, as data: one row each, one name everywhere.

A dimension takes a value, a list (4,8) or a range (1..8). Aliases are the names that Megatron-LM,
torchtitan and DeepSpeed users type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

Options = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One option that takes text: --name, other names it goes by, what it takes, what it does."""

    takes: str
    help: str
    aliases: tuple[str, ...] = ()


DIMENSIONS: Mapping[str, Row] = {
    "tp": Row(takes="N", help="Tensor parallel.", aliases=("tensor-model-parallel-size",)),
    "pp": Row(takes="N", help="Pipeline parallel.", aliases=("pipeline-model-parallel-size",)),
    "vpp": Row(
        takes="N", help="Chunks per pipeline rank (interleaving).", aliases=("virtual-pipeline-model-parallel-size",)
    ),
    "cp": Row(takes="N", help="Context parallel.", aliases=("context-parallel-size",)),
    "cp_kind": Row(takes="KIND", help="none, ring, all_gather, ulysses or two_level.", aliases=("cp-comm-type",)),
    "cp_inner": Row(takes="N", help="Ranks of the all-to-all inside a ring, with --cp-kind two_level."),
    "ep": Row(takes="N", help="Expert parallel.", aliases=("expert-model-parallel-size",)),
    "etp": Row(takes="N", help="Tensor parallel inside an expert.", aliases=("expert-tensor-parallel-size",)),
    "dp_replicate": Row(
        takes="N", help="Data parallel, replicated (HSDP).", aliases=("data-parallel-replicate-degree",)
    ),
    "dp_shard": Row(takes="N", help="Data parallel, sharded (ZeRO, FSDP).", aliases=("data-parallel-shard-degree",)),
    "dp": Row(takes="N", help="Data parallel: dp_replicate times dp_shard.", aliases=("data-parallel-size",)),
    "zero": Row(takes="0..3", help="ZeRO stage.", aliases=("zero-stage",)),
    "micro_batch": Row(takes="N", help="Sequences per micro-batch.", aliases=("micro-batch-size", "mbs")),
    "schedule": Row(takes="NAME", help="f_then_b, 1f1b, interleaved, zb_h1 or zb_v.", aliases=("pipeline-schedule",)),
    "recompute": Row(takes="KIND", help="none, selective or full.", aliases=("recompute-granularity",)),
}
"""strategy field (or dp) -> its option; `sp` is a flag and stands apart"""

SOLVED: Mapping[str, Row] = {
    "recompute_layers": Row(
        takes="N",
        help="Layers per stage that full recompute repeats; the least that fits unless told.",
        aliases=("recompute-num-layers",),
    ),
    "stage_layers": Row(
        takes="N,N,...", help="Layers of every stage, cut by hand: 15,16,16,17 or 15,16*2,17 (with vpp of every chunk)."
    ),
}
"""what a search solves, or leaves to the runtime, and only an estimate may be told"""

WORKLOAD: Mapping[str, Row] = {
    "global_batch": Row(
        takes="N", help="Sequences per step; search takes several.", aliases=("global-batch-size", "gbs")
    ),
    "seq_len": Row(takes="N", help="Tokens per sequence.", aliases=("seq-length",)),
    "precision": Row(takes="RECIPE", help="bf16, fp16, fp8, fp32 and variants (docs/cli.md)."),
    "images_per_sequence": Row(takes="N", help="Images in a sequence; 0 leaves the image tower out."),
    "moe_imbalance": Row(
        takes="N|LOW,HIGH", help="Tokens of the fullest rank of experts over the mean; or LOW,EXPECTED,HIGH."
    ),
    "optimizer": Row(takes="NAME", help="adamw, adamw8bit or sgd."),
    "attention": Row(takes="KIND", help="flash, unfused or eager."),
    "loss": Row(takes="KIND", help="vocab_parallel, fp32_logits, log_softmax, gathered, compiled or fused."),
}

MACHINE: Mapping[str, Row] = {
    "gpus": Row(
        takes="N|N..M|LIST",
        help="How many: 64, 64..512 (whole nodes) or 8,16,32.",
        aliases=("total-gpus", "world-size"),
    ),
    "hardware": Row(takes="ID|FILE", help="A system or accelerator (distplan hardware list), or a file of yours."),
    "runtime": Row(takes="NAME|FILE", help="The framework whose rules hold; any is the union of all."),
    "mesh_order": Row(takes="AXES", help="Mesh axes outermost first: pp,dp_replicate,dp_shard,cp,tp."),
    "reserve": Row(takes="SIZE", help="Memory to leave free on every GPU, such as 10GiB."),
    "memory_limit": Row(takes="SIZE", help="Memory to plan for where that is less than the device's, such as 76GiB."),
    "price": Row(takes="PRICE", help="Of a GPU-hour, such as '2.5 USD/h'."),
}

ALIASES = {
    alias: name.replace("_", "-")
    for rows in (DIMENSIONS, SOLVED, WORKLOAD, MACHINE)
    for name, row in rows.items()
    for alias in row.aliases
} | {"sequence-parallel": "sp", "no-sequence-parallel": "no-sp", "top-n": "top"}


def canonical(name: str) -> str:
    """The option that an alias or a spelling with underscores means."""
    dashed = name.replace("_", "-")
    return ALIASES.get(dashed, dashed)


_DIMENSION_PANEL = "Fix or bound a dimension (4 or 4,8 or 1..8)"


def _rows(rows: Mapping[str, Row], panel: str) -> dict[str, tuple[Any, Any]]:
    made = {}
    for name, row in rows.items():
        also = f" Also {', '.join(f'--{alias}' for alias in row.aliases)}." if row.aliases else ""
        option = typer.Option(f"--{name.replace('_', '-')}", metavar=row.takes, help=row.help + also, **_in(panel))
        made[name] = (Annotated[str | None, option], None)
    return made


def _flag(name: str, help_text: str, panel: str, *more: str) -> Any:
    return Annotated[bool, typer.Option(name, *more, help=help_text, **_in(panel))]


def _in(panel: str) -> dict[str, Any]:
    return {"rich_help_panel": panel, "show_default": False}


def _job() -> dict[str, tuple[Any, Any]]:
    sp = typer.Option(
        "--sp/--no-sp", help="Sequence parallel on the tp axis. Also --sequence-parallel.", **_in(_DIMENSION_PANEL)
    )
    tight = "Also take what fits only if the estimate is exact."
    return (
        _rows(MACHINE, "Machine")
        | {"allow_tight": (_flag("--allow-tight", tight, "Machine"), False)}
        | _rows(WORKLOAD, "Workload")
        | _rows(DIMENSIONS, _DIMENSION_PANEL)
        | {"sp": (Annotated[bool | None, sp], None)}
    )


def _search() -> dict[str, tuple[Any, Any]]:
    objective = typer.Option(
        "--objective", metavar="NAME", help="step-time, memory, gpus, cost or pareto.", **_in("Search")
    )
    top = typer.Option(
        "--top", metavar="N", min=1, max=1000, help="Strategies to show; 5 unless told.", **_in("Search")
    )
    sensitivity = "Search again with the network 20 % and the compute 10 % slower."
    return {
        "objective": (Annotated[str, objective], "step-time"),
        "top": (Annotated[int, top], 5),
        "sensitivity": (_flag("--sensitivity", sensitivity, "Search"), False),
        "no_write": (_flag("--no-write", "Do not write strategy.yaml.", "Output"), False),
    }


def _shown() -> dict[str, tuple[Any, Any]]:
    form = typer.Option("--format", metavar="NAME", help="table, json, yaml or csv on stdout.", **_in("Output"))
    return {
        "output_format": (Annotated[str, form], "table"),
        "no_color": (_flag("--no-color", "No colour, as with NO_COLOR=1.", "Output"), False),
        "quiet": (_flag("--quiet", "Only the result: no progress, no remarks.", "Output", "-q"), False),
        "verbose": (_flag("--verbose", "Show the traceback of a fault of ours.", "Output", "-v"), False),
    }


def _written() -> dict[str, tuple[Any, Any]]:
    output = typer.Option("--output", "-o", metavar="FILE", help="Write the strategy here.", **_in("Output"))
    return {"output": (Annotated[str | None, output], None)}


SEARCH = _job() | _search() | _written() | _shown()
ESTIMATE = _job() | _rows(SOLVED, _DIMENSION_PANEL) | _written() | _shown()
SHOW = _shown()


def _launchers(*names: str) -> dict[str, tuple[Any, Any]]:
    """Options of `export` and `import` that take text, and -o and -q."""
    launchers = "megatron, megatron-bridge, deepspeed, torchtitan, accelerate, paddle-fleet, paddle-auto or nanotron."
    rows = {
        "to": ("--to", "NAME", launchers),
        "from_": ("--from", "NAME", "megatron, deepspeed, torchtitan or accelerate; told by the content unless given."),
        "model": ("--model", "MODEL", "Price it for this model, and write a strategy.yaml."),
    }
    made = {}
    for name in names:
        option, takes_text, help_text = rows[name]
        made[name] = (
            Annotated[str | None, typer.Option(option, metavar=takes_text, help=help_text, show_default=False)],
            None,
        )
    output = typer.Option("--output", "-o", metavar="FILE", help="Write here in place of stdout.", show_default=False)
    quiet = _flag("--quiet", "Only the result: no remarks.", "Output", "-q")
    return made | {"output": (Annotated[str | None, output], None), "quiet": (quiet, False)}


def _some(rows: Mapping[str, Row], names: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    return _rows({name: rows[name] for name in names}, "Job")


EXPORT = _launchers("to")
IMPORT = (
    _launchers("from_", "model")
    | _some(MACHINE, ("gpus", "hardware", "runtime"))
    | _some(WORKLOAD, ("global_batch", "seq_len"))
)


def takes(options: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command that ends in `**options` one keyword parameter per row, which is what typer reads."""

    def dress(command: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        rows = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
        command.__signature__ = signature.replace(parameters=[*own, *rows])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *rows]} | {"return": int}
        return command

    return dress
