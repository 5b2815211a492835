"""Rows about rules: is a strategy accepted or refused, with the nearest legal values that were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.acceptance_rows import Answer, CannotAnswer, Row, load_named, runtime_of
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Moe
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.sizes import padded_vocab
from distplan.costmodel.strategy import DEGREES, Strategy
from distplan.costmodel.workload import precision, workload
from distplan.planner.constraints import Context, explain_row
from distplan.planner.plan import Violation

_WHEN = {
    "layers",
    "vp_layers",
    "vp",
    "account_embedding_and_loss",
    "config",
    "gbs",
    "mbs",
    "dp",
    "microbatches",
    "schedule",
    "local_batch",
    "zero",
    "moe",
    "sp",
    "experts",
    "gpus",
    "distopt_instances",
    "cpu_offloading",
    "kv_heads",
    "vocab",
    "pad_multiple",
    "per_rank_multiple",
    "hidden",
    "heads",
    "seq",
    "cp_kind",
    "recompute",
    "ffn",
    *DEGREES,
}
_SCHEDULES = {"1f1b": "1f1b", "gpipe": "f_then_b", "interleaved": "interleaved", "interleaved1f1b": "interleaved"}
_EXPERTS, _LAYERS, _HEADS = 64, 48, 64


def rule(row: Row) -> Answer:
    """Accepted, or refused; `suggest_*`, `valid_*`, `padded_vocab` and `warn` are held to as well."""
    when, model, strategy, found = _asked(row)
    refused = [broken for broken in found if not broken.warning]
    wrong = list(_wrong(row, when, model, strategy, found))
    if row["accept"] == bool(refused):
        wrong.insert(0, "is refused" if refused else "is accepted")
    said = "; ".join(f"{v.code} {v.sentence}" for v in found) or "accepted"
    return Answer(id=row["id"], kind="rules", verdict="fails" if wrong else "holds", said="; ".join([*wrong, said]))


def violations(row: Row) -> list[Violation]:
    """What the rules say of a row; CannotAnswer where it has a fact that they do not know."""
    return _asked(row)[3]


def _asked(row: Row) -> tuple[dict[str, Any], Model, Strategy, list[Violation]]:
    when = dict(row["when"])
    unknown = sorted(set(when) - _WHEN)
    if unknown:
        raise CannotAnswer(f"'{unknown[0]}' is not a fact that the rules know")
    model = _model(when)
    strategy = _strategy(when, model)
    return when, model, strategy, explain_row(strategy, _context(row, when, model, strategy))


def _wrong(row: Row, when: dict[str, Any], model: Model, s: Strategy, found: list[Violation]) -> Iterator[str]:
    nearest = {text for broken in found for text in broken.nearest}
    for key, field in (("suggest_gbs", "global_batch"), ("suggest_vocab", "vocab")):
        wanted = row.get(key, [])
        for value in wanted if isinstance(wanted, list) else [wanted]:
            if f"{field}={value}" not in nearest:
                yield f"{field} {value} is not suggested"
    if "valid_vp_layers" in row:
        chunks = [int(text.removeprefix("vpp=")) for text in nearest if text.startswith("vpp=")]
        each = sorted(model.layers // (s.pp * vpp) for vpp in chunks)
        if each != sorted(row["valid_vp_layers"]):
            yield f"layers per chunk {each} are suggested"
    if "padded_vocab" in row:
        padded = float(padded_vocab(float(when["vocab"]), float(model.vocab_pad_multiple), np.array([float(s.tp)]))[0])
        if padded != row["padded_vocab"]:
            yield f"the padded vocabulary is {padded:.0f}"
    if "warn" in row and not any(broken.warning for broken in found):
        yield "nothing is warned of"


def _model(when: dict[str, Any]) -> Model:
    """The named config, or a model of even numbers that breaks no rule but with the row's own facts."""
    if "config" in when:
        return load_named(str(when["config"]))
    heads = int(when.get("heads", _HEADS))
    hidden = int(when.get("hidden", 64 * heads))
    # every number that the row does not give divides by any power of two that tp may be
    head_dim = hidden // heads if hidden % heads == 0 else 64
    experts = any(key in when for key in ("experts", "ep", "etp")) or bool(when.get("moe"))
    width = int(when.get("ffn", 4 * hidden))
    ffn = Moe(experts=int(when.get("experts", _EXPERTS)), top_k=2, ffn=1024) if experts else Mlp(ffn=width, gated=True)
    kv_heads = int(when.get("kv_heads", heads))
    mixer = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim)
    layers = int(when.get("layers", _LAYERS))
    return Model(
        name="row",
        hidden=hidden,
        vocab=int(when.get("vocab", 32768)),
        tied_embedding=False,
        kinds={"layer": LayerKind(name="layer", mixer=mixer, ffn=ffn)},
        pattern=("layer",) * layers,
        vocab_pad_multiple=int(when.get("pad_multiple", when.get("per_rank_multiple", 128))),
    )


def _strategy(when: dict[str, Any], model: Model) -> Strategy:
    degrees: dict[str, Any] = {name: int(when[name]) for name in DEGREES if name in when}
    pp, tp, cp = (degrees.get(name, 1) for name in ("pp", "tp", "cp"))
    vpp = int(when.get("vp", degrees.get("vpp", 1)))
    if "vp_layers" in when:
        vpp = model.layers // (pp * int(when["vp_layers"]))  # as frameworks floor it
    if "local_batch" in when:
        degrees["micro_batch"] = -(-int(when["local_batch"]) // int(when["microbatches"]))
    if "mbs" in when:
        degrees["micro_batch"] = int(when["mbs"])
    instances = int(when.get("distopt_instances", 1))
    schedule = _SCHEDULES.get(str(when.get("schedule", "")).lower(), "interleaved" if vpp > 1 else "1f1b")
    experts = any(isinstance(kind.ffn, Moe) for kind in model.kinds.values())
    return replace(
        Strategy(**degrees),
        vpp=vpp,
        dp_replicate=instances,
        dp_shard=_shards(when, tp * pp * cp, instances),
        schedule=schedule,
        zero=int(when.get("zero", 0)),
        sp=bool(when.get("sp", experts)) and tp > 1,
        cp_kind=str(when.get("cp_kind", "ulysses")) if cp > 1 else "none",
        recompute=str(when.get("recompute", "none")),
    )


def _shards(when: dict[str, Any], others: int, instances: int) -> int:
    """Data-parallel ranks: as said, or of the GPUs, or enough that the experts' mesh fits."""
    if "dp" in when:
        return int(when["dp"])
    if "gpus" in when:
        return max(1, int(when["gpus"]) // (others * instances))
    return int(when.get("ep", 1)) * int(when.get("etp", 1))


def _context(row: Row, when: dict[str, Any], model: Model, s: Strategy) -> Context:
    runtime = load_runtime(runtime_of(str(row.get("fw", "any"))))
    share = int(when.get("local_batch", s.micro_batch * int(when.get("microbatches", 8 * s.pp))))
    fields = {"seq_len": int(when.get("seq", 4096)), "global_batch": int(when.get("gbs", share * s.dp))}
    job = workload(model, {**fields, "precision": precision("bf16")}, gpus=s.gpus)
    return Context(
        model=model,
        workload=job,
        runtime=runtime,
        gpus=int(when.get("gpus", s.gpus)),
        offload_activations=bool(when.get("cpu_offloading", False)),
    )


def least_gpus(row: Row) -> Answer:
    """The smallest count that has room for the degrees: the first multiple of pp·tp·cp that a rule does not refuse."""
    when = {key: int(row[key]) for key in ("tp", "cp", "pp", "ep", "etp") if key in row}
    model = _model(when)
    model = replace(model, kinds={k: _with_experts(v, when.get("ep", 1)) for k, v in model.kinds.items()})
    block = when.get("tp", 1) * when.get("cp", 1) * when.get("pp", 1)
    count = next((n for n in range(block, 65537, block) if _legal(row, when, model, n)), None)
    return Answer(
        id=row["id"],
        kind="min_gpus",
        verdict="holds" if count == row["min_gpus"] else "fails",
        said=f"{count} GPUs" if count else "no count is legal",
    )


def _with_experts(kind: LayerKind, ep: int) -> LayerKind:
    """As many experts as any ep divides."""
    assert isinstance(kind.ffn, Moe)
    return replace(kind, ffn=replace(kind.ffn, experts=ep * _EXPERTS))


def _legal(row: Row, when: dict[str, Any], model: Model, gpus: int) -> bool:
    asked = {**when, "gpus": gpus}
    strategy = _strategy(asked, model)
    found = explain_row(strategy, _context({"fw": row.get("fw", "megatron")}, asked, model, strategy))
    return all(broken.warning for broken in found)
