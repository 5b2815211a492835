"""`export` and `import`: a plan to a launcher's file, and a launcher's file to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from distplan.costmodel.model import Attention, Mlp, Model, Moe
from distplan.costmodel.strategy import Strategy
from distplan.hardware.documents import load_mapping, write_atomically
from distplan.hardware.errors import DistplanError
from distplan.planner.inputs import InputError, one_number, one_word
from distplan.planner.terminal import clean, say, write_data

if TYPE_CHECKING:
    from distplan.planner.import_file import Imported

Options = dict[str, Any]
OK, NOTHING = 0, 3


def run_export(name: str, options: Options) -> int:
    """Write the file to stdout or -o; every sentence on what it cannot say to stderr."""
    from distplan.planner.export import LAUNCHERS, export, read_job
    from distplan.planner.plan_file import is_plan

    if options["to"] is None:
        raise InputError(f"--to is missing: {', '.join(LAUNCHERS)}")
    launcher = one_word("--to", options["to"], LAUNCHERS)
    document = load_mapping(name)
    if not is_plan(document):
        raise DistplanError(f"{name}: is not a strategy.yaml; `distplan search` and `distplan estimate -o` write one")
    job, plan = read_job(document)
    made = export(job, launcher)
    for sentence in (*plan.changed, *made.sentences):
        say(f"distplan: {clean(name)}: {clean(sentence)}", quiet=options["quiet"])
    return _put(made.text, options)


def run_import(name: str, options: Options) -> int:
    """Print the strategy that a launcher's file means; with --model price it, and write a strategy.yaml."""
    from distplan.costmodel.model_file import load_model
    from distplan.planner.import_file import READERS, import_file

    launcher = None if options["from_"] is None else one_word("--from", options["from_"], READERS)
    gpus = None if options["gpus"] is None else one_number("--gpus", options["gpus"])
    layers = None if options["model"] is None else load_model(options["model"]).model.layers
    found = import_file(name, launcher=launcher, gpus=gpus, layers=layers)
    for note in found.notes:
        say(f"distplan: {clean(name)}: {clean(note)}", quiet=options["quiet"])
    if options["model"] is None:
        return _put(_as_yaml(found), options)
    return _price(name, found, options)


def _as_yaml(found: Imported) -> str:
    from distplan.planner.output import yaml_text
    from distplan.planner.plain import plain

    words = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in _typed(found).items())
    command = f"# distplan estimate MODEL --gpus {found.strategy.gpus} --runtime {found.runtime} {words}"
    sp = "" if found.strategy.tp == 1 else " --sp" if found.strategy.sp else " --no-sp"
    content = {"launcher": found.launcher, "strategy": plain(found.strategy), "workload": dict(found.workload)}
    return command + sp + "\n" + yaml_text(content | ({"model": dict(found.model)} if found.model else {}))


def _typed(found: Imported) -> dict[str, Any]:
    """What differs from what estimate assumes, as its options."""
    usual = Strategy(tp=found.strategy.tp)
    typed = {
        f.name: getattr(found.strategy, f.name)
        for f in fields(Strategy)
        if f.name != "sp" and getattr(found.strategy, f.name) != getattr(usual, f.name)
    }
    if found.strategy.tp > 1:
        typed = {"tp": found.strategy.tp} | typed
    options = ("global_batch", "seq_len", "precision", "optimizer", "attention")
    return typed | {key: found.workload[key] for key in options if key in found.workload}


def _price(name: str, found: Imported, options: Options) -> int:
    from distplan.planner import api
    from distplan.planner.plan_file import plan_text
    from distplan.planner.search import RuleError

    overrides = dict(found.workload)
    for key in ("seq_len", "global_batch"):
        if options[key] is not None:
            overrides[key] = one_number(f"--{key.replace('_', '-')}", options[key], most=10**9)
    job = api.setting(
        options["model"],
        gpus=found.strategy.gpus,
        hardware=options["hardware"],
        runtime=options["runtime"] or found.runtime,
        overrides=overrides,
    )
    for sentence in _differences(found.model, job.model):
        say(f"distplan: {clean(name)}: {clean(sentence)}", quiet=options["quiet"])
    try:
        plan = api.estimate_setting(job, found.strategy)
    except RuleError as error:
        hint = "" if options["runtime"] else "; --runtime NAME prices it by another framework's rules"
        say(f"distplan: {job.runtime.name} cannot run this strategy: {clean(error)}{hint}")
        return NOTHING
    if plan.best is None:
        raise DistplanError(f"{name}: cannot be priced")
    hardware = _own_hardware(options["hardware"])
    return _put(plan_text(plan, plan.best, hardware=hardware), options)


def _own_hardware(name: str | None) -> Any:
    is_file = name is not None and ("/" in name or name.lower().endswith((".yaml", ".yml", ".json")))
    return load_mapping(name).value if name is not None and is_file else None


def _differences(stated: Mapping[str, Any], model: Model) -> list[str]:
    """Sentences: sizes in the file that are not the model's."""
    kinds = [model.kinds[kind] for kind in dict.fromkeys(model.pattern)]
    attention = next((kind.mixer for kind in kinds if isinstance(kind.mixer, Attention)), None)
    dense = next((kind.ffn for kind in kinds if isinstance(kind.ffn, Mlp)), None)
    moe = next((kind.ffn for kind in kinds if isinstance(kind.ffn, Moe)), None)
    have = {
        "layers": model.layers,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "heads": attention.heads if attention else None,
        "kv_heads": attention.kv_heads if attention else None,
        "ffn": dense.ffn if dense else None,
        "experts": moe.experts if moe else None,
        "top_k": moe.top_k if moe else None,
    }
    return [
        f"says {word} = {value}, {model.name} has {have[word]}; {model.name} is priced"
        for word, value in stated.items()
        if have.get(word) is not None and have[word] != value
    ]


def _put(text: str, options: Options) -> int:
    if options["output"] is None:
        write_data(text)
    else:
        write_atomically(options["output"], text)
        say(f"wrote {clean(options['output'])}", quiet=options["quiet"])
    return OK
