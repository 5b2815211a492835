"""Which strategies a runtime can run: every rule a vectorised mask with a code (codes.yaml).

The same masks serve a million rows (`apply`) and one (`explain_row`), and find the nearest legal values
by varying one field. Rules come in two groups: those before `STRUCTURE_FROM` read no option that
`space.py` adds last (sp, zero, cp_kind, recompute), so that they can be applied before that expansion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.model import Attention, Custom, LinearAttention, Mlp, Model, Moe, Workload
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.strategy import DEGREES, STRUCTURE, Strategies, Strategy
from distplan.hardware.documents import Document, load_mapping, take
from distplan.planner.plan import Violation
from distplan.planner.rules import MASKS, Values

Bools = NDArray[np.bool_]
STRUCTURE_FROM = "DP030"
WARN_FROM = "DP090"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the rules see besides the strategy."""

    model: Model
    workload: Workload
    runtime: Runtime
    gpus: int
    domain: int = 8
    """GPUs of a scale-up domain: the other group that dp_shard·cp may fill"""
    offload_activations: bool = False
    facts: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", _facts(self))


def with_runtime(context: Context, runtime: Runtime) -> Context:
    """The same question asked of another runtime."""
    return Context(
        model=context.model,
        workload=context.workload,
        runtime=runtime,
        gpus=context.gpus,
        domain=context.domain,
        offload_activations=context.offload_activations,
    )


def _facts(context: Context) -> Mapping[str, Any]:
    model = context.model
    kinds = [model.kinds[name] for name in dict.fromkeys(model.pattern)]
    mixers = [kind.mixer for kind in kinds if kind.mixer]
    ffns = [kind.ffn for kind in kinds if kind.ffn]
    moes = [ffn for ffn in ffns if isinstance(ffn, Moe)]
    attention = [mixer for mixer in mixers if isinstance(mixer, Attention)]
    linear = [mixer.heads for mixer in mixers if isinstance(mixer, LinearAttention)]
    dense = [ffn.ffn if isinstance(ffn, Mlp) else ffn.shared_ffn for ffn in ffns if not isinstance(ffn, Custom)]
    dense += [int(block.sizes.get("ffn", 0)) for block in (*mixers, *ffns) if isinstance(block, Custom)]
    return {
        "gpus": float(context.gpus),
        "global_batch": float(context.workload.global_batch),
        "seq_len": float(context.workload.seq_len),
        "layers": float(model.layers),
        "mtp_layers": float(model.mtp_layers),
        "hidden": float(model.hidden),
        "vocab": float(model.vocab),
        "vocab_unit": float(model.vocab_pad_multiple),
        "heads": _distinct([mixer.heads for mixer in attention] + linear),
        "kv_heads": _distinct([mixer.kv_heads for mixer in attention]),
        "ffn": _distinct([width for width in dense if width]),
        "expert_ffn": _distinct([moe.ffn for moe in moes]),
        "experts": _distinct([moe.experts for moe in moes]),
        "offload_activations": context.offload_activations,
    }


def _distinct(values: list[int]) -> tuple[float, ...]:
    return tuple(float(value) for value in dict.fromkeys(values))


SKELETON_RULES = tuple(code for code in MASKS if code < STRUCTURE_FROM)
OPTION_RULES = tuple(code for code in MASKS if STRUCTURE_FROM <= code < WARN_FROM)
WARNINGS = tuple(code for code in MASKS if code >= WARN_FROM)


def apply(
    rows: Strategies,
    context: Context,
    *,
    rules: tuple[str, ...] = SKELETON_RULES + OPTION_RULES,
    weight: NDArray[np.int64] | None = None,
) -> tuple[Bools, dict[str, int]]:
    """Rows that break no rule, and per code the rows whose first broken rule it is.

    weight: what a row counts for (space.py: the rows that it would expand to); 1 each by default.
    """
    values = {**context.facts, **rows.columns}
    legal = np.ones(len(rows), dtype=np.bool_)
    counts = {}
    for code in rules:
        broken = MASKS[code](values, context.runtime)
        first = legal & broken
        counts[code] = int(np.count_nonzero(first) if weight is None else weight[first].sum())
        legal &= ~first
    return legal, counts


# ---------------------------------------------------------------- the words


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A rule's words."""

    code: str
    title: str
    sentence: Mapping[str, str]
    """variant -> template; '' where there is one form"""
    rule: str
    vary: tuple[str, ...]
    after: str
    """code that this rule takes for granted: not said where that is broken, and nearest values keep it"""
    warn: bool


@cache
def codes() -> Mapping[str, Code]:
    """Every code with its words, in the order of codes.yaml, which is that of MASKS."""
    document = load_mapping(Path(__file__).with_name("codes.yaml"))
    return {name: _code_of(name, document.section(name)) for name in document.value}


def _code_of(name: str, doc: Document) -> Code:
    sentence = doc.value["sentence"]
    return Code(
        code=name,
        title=take(doc, "title", str),
        sentence={"": sentence} if isinstance(sentence, str) else sentence,
        rule=take(doc, "rule", str, default=""),
        vary=tuple(take(doc, "vary", list)),
        after=take(doc, "after", str, default=""),
        warn=take(doc, "warn", bool, default=False),
    )


def explain_row(strategy: Strategy, context: Context) -> list[Violation]:
    """Every rule that one strategy breaks (not only the first), then the warnings it earns."""
    rows = Strategies.of([strategy])
    values = {**context.facts, **rows.columns}
    words = _words(strategy, context)
    broken = {code for code, mask in MASKS.items() if bool(np.any(mask(values, context.runtime)))}
    return [
        _violation(codes()[code], values, words, context)
        for code in MASKS
        if code in broken and codes()[code].after not in broken
    ]


def warnings(strategy: Strategy, context: Context) -> tuple[Violation, ...]:
    """What is said of a legal strategy without refusing it."""
    return tuple(broken for broken in explain_row(strategy, context) if broken.warning)


def _violation(code: Code, values: Values, words: Mapping[str, Any], context: Context) -> Violation:
    template = code.sentence[context.runtime.rules[code.rule] if code.rule else ""]
    nearest = tuple(text for name in code.vary for text in _nearest(name, code, values, context))
    return Violation(code=code.code, sentence=template.format_map(words), nearest=nearest, warning=code.warn)


def _nearest(name: str, code: Code, values: Values, context: Context) -> list[str]:
    """Legal values of one field with all others as they are: all if few and a degree, else the two around."""
    if name in STRUCTURE:
        candidates = np.arange(len(STRUCTURE[name]), dtype=np.int8)
        legal = candidates[_unbroken(code, {**values, name: candidates}, context, len(candidates))]
        known = context.runtime.legal[name]
        return [f"{name}={STRUCTURE[name][i]}" for i in legal if STRUCTURE[name][i] in known]
    now = float(np.ravel(values[name])[0])
    low = max(1.0, now - 65536.0)
    numbers = np.arange(low, min(2.0 * now, now + 65536.0) + 2.0)
    numbers = numbers[_unbroken(code, {**values, name: numbers}, context, len(numbers))]
    if len(numbers) > 8 or name not in DEGREES:
        below, above = numbers[numbers < now][-1:], numbers[numbers > now][:1]
        numbers = np.concatenate([below, above])
    return [f"{name}={number:.0f}" for number in numbers]


def _unbroken(code: Code, values: Values, context: Context, count: int) -> Bools:
    broken = MASKS[code.code](values, context.runtime)
    if code.after:
        broken = broken | MASKS[code.after](values, context.runtime)
    return np.broadcast_to(~np.asarray(broken), count)


class _Words(dict[str, Any]):
    """Numbers as people write them."""

    def __getitem__(self, key: str) -> str:
        value = super().__getitem__(key)
        if isinstance(value, tuple):
            return " and ".join(f"{number:g}" for number in value) or "no"
        return f"{value:.10g}" if isinstance(value, float) else str(value)


def _words(strategy: Strategy, context: Context) -> _Words:
    s, facts = strategy, context.facts
    m = facts["global_batch"] // (s.micro_batch * s.dp)
    degrees = {name: getattr(s, name) for name in (*DEGREES, *STRUCTURE)}
    missing = [
        f"{name} {getattr(s, name)}"
        for name in ("sp", "zero", "cp_kind", "recompute")
        if str(getattr(s, name)).lower() not in context.runtime.legal[name]
    ]
    expert_ranks = s.dp * s.cp * s.tp
    only = [f"{name} {'|'.join(context.runtime.legal[name])}" for name in DEGREES if name in context.runtime.legal]
    experts = " and ".join(f"{width:g}" for width in facts["expert_ffn"])
    schedule_rule = {
        "1f1b": "at least one for each stage", "zb_h1": "at least one for each stage",
        "zb_v": "at least one for each stage", "f_then_b": "a multiple of the stages"
    }  # fmt: skip
    return _Words(
        **degrees, **facts, runtime=context.runtime.name, dp=s.dp, product=s.gpus, m=m, chunks=s.pp * s.vpp,
        batch_unit=s.micro_batch * s.dp, batch_rest=facts["global_batch"] % (s.micro_batch * s.dp),
        rounds=max(1.0, m // s.pp), expert_ranks=expert_ranks,
        expert_dp=expert_ranks / (s.ep * s.etp), hidden_per_rank=facts["hidden"] / s.tp,
        stage_layers=",".join(str(layers) for layers in s.stage_layers), cut_chunks=len(s.stage_layers),
        cut_layers=sum(s.stage_layers), missing_option=", ".join(missing), legal_degrees=", ".join(only),
        micro_batch_rule=schedule_rule.get(s.schedule, ""),
        experts_too=f" (experts' {experts} by etp {s.etp})" if experts else "",
    )  # fmt: skip
