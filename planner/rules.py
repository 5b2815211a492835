"""The masks of constraints.py: which rows break a rule. True = broken.

Each takes the values (columns and facts, or arrays in their place to vary them) and the runtime, and
returns one bool per row. Elementwise only: a row alone and in a batch give the same answer. The rules'
variants are described at costmodel.runtime.RULE_VARIANTS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distplan.costmodel.runtime import Runtime
from distplan.costmodel.strategy import DEGREES, STRUCTURE

Values = Mapping[str, Any]
"""column or fact -> float64 (a number, or an array to vary it); structure fields as int8 codes"""


def _code(name: str, value: str) -> int:
    return STRUCTURE[name].index(value)


_F_THEN_B = _code("schedule", "f_then_b")
_1F1B = _code("schedule", "1f1b")
_INTERLEAVED = _code("schedule", "interleaved")
_ZERO_BUBBLE = (_code("schedule", "zb_h1"), _code("schedule", "zb_v"))
_NO_CP = _code("cp_kind", "none")
_ULYSSES = _code("cp_kind", "ulysses")
_TWO_LEVEL = _code("cp_kind", "two_level")


def _divides(unit: Any, value: Any) -> Any:
    """value % unit == 0, exact for whole numbers below 2**26, several times faster than %."""
    quotient = value / unit
    return quotient == np.floor(quotient)


def _no(values: Values) -> Any:
    return np.zeros(np.shape(values["tp"]), dtype=np.bool_)


def _dp(values: Values) -> Any:
    return values["dp_replicate"] * values["dp_shard"]


def _micro_batches(values: Values) -> Any:
    return np.floor(values["global_batch"] / (values["micro_batch"] * _dp(values)))


def _gpus(values: Values, runtime: Runtime) -> Any:
    return _dp(values) * values["tp"] * values["pp"] * values["cp"] != values["gpus"]


def _not_among(column: Any, legal: list[float]) -> Any:
    broken = column != legal[0]
    for value in legal[1:]:
        broken = broken & (column != value)
    return broken


def _degrees(values: Values, runtime: Runtime) -> Any:
    broken = _no(values)
    for name in DEGREES:
        if name in runtime.legal:
            broken = broken | _not_among(values[name], [float(value) for value in runtime.legal[name]])
    return broken


def _option(name: str, values: Values, runtime: Runtime) -> Any:
    return _not_among(values[name], [_code(name, value) for value in runtime.legal[name]])


def _schedule(values: Values, runtime: Runtime) -> Any:
    return (values["pp"] > 1) & _option("schedule", values, runtime)


def _heads(values: Values, runtime: Runtime) -> Any:
    broken = _no(values)
    for heads in values["heads"]:
        broken = broken | ~_divides(values["tp"], heads)
    return broken


def _kv_heads(values: Values, runtime: Runtime) -> Any:
    broken = _no(values)
    for kv_heads in values["kv_heads"]:
        legal = _divides(values["tp"], kv_heads)
        if runtime.rules["kv_heads"] != "refuse":
            legal = legal | _divides(kv_heads, values["tp"])
        broken = broken | ~legal
    return broken


def _ffn(values: Values, runtime: Runtime) -> Any:
    broken = _no(values)
    for ffn in values["ffn"]:
        broken = broken | ~_divides(values["tp"], ffn)
    for ffn in values["expert_ffn"]:
        broken = broken | ~_divides(values["etp"], ffn)
    return broken


def _vocab(values: Values, runtime: Runtime) -> Any:
    variant = runtime.rules["vocab"]
    if variant == "uneven" or (variant == "pad" and values["vocab_unit"] > 1):
        return _no(values)
    return ~_divides(values["tp"], values["vocab"])


def _default_cut(values: Values) -> Any:
    """The runtime cuts the layers: no numbers are given."""
    return values["cut"] == 0.0 if "cut" in values else True


def _stage_layers(values: Values, runtime: Runtime) -> Any:
    if "cut" not in values:
        return _no(values)
    whole = (values["cut_chunks"] == values["pp"] * values["vpp"]) & (values["cut_layers"] == values["layers"])
    return (values["cut"] > 0.0) & ~(whole & (values["cut_least"] > 0.0))


def _uneven(values: Values, runtime: Runtime) -> Any:
    if "cut" not in values or runtime.rules["uneven_stages"] != "none":
        return _no(values)
    return values["cut"] > 0.0


def _filled(values: Values, runtime: Runtime) -> Any:
    chunks = values["pp"] * values["vpp"]
    counted = runtime.rules["chunks"] != "even" or runtime.rules["layers"] == "even_counted"
    return (chunks > values["layers"] + (2.0 + values["mtp_layers"] if counted else 0.0)) & _default_cut(values)


def _even(chunks: Any, values: Values, counted: bool) -> Any:
    even = _divides(chunks, values["layers"])
    if not counted:
        return even
    for extra in {0.0, values["mtp_layers"]}:
        for ends in (0.0, 1.0, 2.0):
            even = even | _divides(chunks, values["layers"] + (ends + extra))
    return even


def _layers(values: Values, runtime: Runtime) -> Any:
    variant = runtime.rules["layers"]
    if variant == "any":
        return _no(values)
    return (values["vpp"] == 1) & ~_even(values["pp"], values, variant == "even_counted") & _default_cut(values)


def per_stage_cut(chunks: Any, layers: float) -> Any:
    """True where ceil(n / whole number) = chunks for n = layers, + 1 or + 2 (embedding, loss)."""
    cut = np.zeros(np.shape(chunks), dtype=np.bool_)
    for weight in (layers, layers + 1.0, layers + 2.0):
        cut = cut | (np.ceil(weight / np.ceil(weight / chunks)) == chunks)
    return cut


def _chunks(values: Values, runtime: Runtime) -> Any:
    variant, chunks = runtime.rules["chunks"], values["pp"] * values["vpp"]
    if variant == "layers_per_stage":
        legal = (values["vpp"] == 2) | per_stage_cut(chunks, values["layers"])
    else:
        legal = _even(chunks, values, variant == "even_counted")
    return (values["vpp"] > 1) & ~legal & _default_cut(values)


def _batch(values: Values, runtime: Runtime) -> Any:
    return ~_divides(values["micro_batch"] * _dp(values), values["global_batch"])


def _stages(values: Values, runtime: Runtime) -> Any:
    m, pp = _micro_batches(values), values["pp"]
    broken = _no(values)
    if runtime.rules["micro_batches"] == "at_least_stages":
        broken = broken | ((values["schedule"] == _1F1B) & (m < pp))
    for schedule in _ZERO_BUBBLE:
        broken = broken | ((values["schedule"] == schedule) & (m < pp))
    if runtime.rules["f_then_b"] == "divide":
        broken = broken | ((values["schedule"] == _F_THEN_B) & ~_divides(pp, m))
    return broken & (pp > 1)


def _interleaved(values: Values, runtime: Runtime) -> Any:
    variant, m, pp = runtime.rules["interleaved"], _micro_batches(values), values["pp"]
    if variant == "divide":
        legal = _divides(pp, m) & (m > 0)
    elif variant == "rounds":
        legal = _divides(np.maximum(1.0, np.floor(m / pp)), m)
    else:
        legal = (m >= pp) if variant == "at_least_stages" else ~_no(values)
    return (values["schedule"] == _INTERLEAVED) & ~legal


def _experts(values: Values, runtime: Runtime) -> Any:
    if not values["experts"]:
        return (values["ep"] > 1) | (values["etp"] > 1)
    broken = _no(values)
    for experts in values["experts"]:
        broken = broken | ~_divides(values["ep"], experts)
    return broken


def _expert_ranks(values: Values) -> Any:
    return _dp(values) * values["cp"] * values["tp"]


def _expert_mesh(values: Values, runtime: Runtime) -> Any:
    return bool(values["experts"]) & ~_divides(values["ep"] * values["etp"], _expert_ranks(values))


def _expert_tp(values: Values, runtime: Runtime) -> Any:
    if not values["experts"] or runtime.rules["ep_at_least_tp"] == "false":
        return _no(values)
    return (values["ep"] > 1) & (values["ep"] < values["tp"])


def _expert_replicas(values: Values, runtime: Runtime) -> Any:
    if not values["experts"]:
        return _no(values)
    expert_dp = _expert_ranks(values) / (values["ep"] * values["etp"])
    return (values["dp_replicate"] > 1) & ~_divides(values["dp_replicate"], expert_dp)


def _vpp(values: Values, runtime: Runtime) -> Any:
    in_a_v = values["schedule"] == _ZERO_BUBBLE[1]
    chunked = (values["schedule"] == _INTERLEAVED) | in_a_v
    return (chunked != (values["vpp"] > 1)) | (chunked & (values["pp"] == 1)) | (in_a_v & (values["vpp"] != 2))


def _options(values: Values, runtime: Runtime) -> Any:
    broken = _option("sp", values, runtime) & (values["tp"] > 1)
    # ZeRO over a group of one is the same program as ZeRO-0, and needs no framework's leave
    broken = broken | (_option("zero", values, runtime) & (_dp(values) * values["cp"] > 1))
    broken = broken | _option("cp_kind", values, runtime)
    return broken | _option("recompute", values, runtime)


def _sp_alone(values: Values, runtime: Runtime) -> Any:
    if runtime.rules["sp_without_tp"] == "allow":
        return _no(values)
    return (values["sp"] == 1) & (values["tp"] == 1)


def _sp_sequence(values: Values, runtime: Runtime) -> Any:
    return (values["sp"] == 1) & ~_divides(values["tp"] * values["cp"], values["seq_len"])


def _cp_kind(values: Values, runtime: Runtime) -> Any:
    return (values["cp_kind"] == _NO_CP) != (values["cp"] == 1)


def _cp_sequence(values: Values, runtime: Runtime) -> Any:
    legal = _divides(2.0 * values["cp"], values["seq_len"])
    if runtime.rules["cp_sequence"] == "cp":
        legal = legal | ((values["cp_kind"] == _ULYSSES) & _divides(values["cp"], values["seq_len"]))
    return (values["cp"] > 1) & ~legal


def _ulysses(values: Values, runtime: Runtime) -> Any:
    ranks = values["tp"] * values["cp"]
    broken = _no(values)
    for heads in values["heads"]:
        broken = broken | ~_divides(ranks, heads)
    for kv_heads in values["kv_heads"]:
        legal = _divides(ranks, kv_heads)
        if runtime.rules["ulysses_kv"] == "replicate":
            legal = legal | _divides(kv_heads, ranks)
        broken = broken | ~legal
    return broken & (values["cp_kind"] == _ULYSSES)


def _cp_inner(values: Values, runtime: Runtime) -> Any:
    inner, cp = values["cp_inner"], values["cp"]
    between = (inner > 1) & (inner < cp) & _divides(inner, cp)
    return np.where(values["cp_kind"] == _TWO_LEVEL, ~between, inner != 1)


def _inner_heads(values: Values, runtime: Runtime) -> Any:
    """What turns to heads is shared evenly: no key/value head on several ranks of the inner level."""
    ranks = values["tp"] * values["cp_inner"]
    broken = _no(values)
    for heads in (*values["heads"], *values["kv_heads"]):
        broken = broken | ~_divides(ranks, heads)
    return broken & (values["cp_kind"] == _TWO_LEVEL)


def _zero_with_pp(values: Values, runtime: Runtime) -> Any:
    if runtime.rules["zero_with_pp"] == "any":
        return _no(values)
    return (values["pp"] > 1) & (values["zero"] > 1)


def _hsdp(values: Values, runtime: Runtime) -> Any:
    if runtime.rules["hsdp"] == "allow":
        return _no(values)
    return (values["dp_replicate"] > 1) & (values["zero"] > 0) & (values["zero"] < 3)


def _expert_sp(values: Values, runtime: Runtime) -> Any:
    if not values["experts"] or runtime.rules["moe_sp"] == "optional":
        return _no(values)
    return (values["tp"] > 1) & (values["sp"] == 0)


def _offload(values: Values, runtime: Runtime) -> Any:
    refused = bool(values["offload_activations"]) and runtime.rules["offload_with_pp"] == "refuse"
    return (values["pp"] > 1) & refused


def _width(values: Values, runtime: Runtime) -> Any:
    return ~_divides(64.0 * values["tp"], values["hidden"])


MASKS: Mapping[str, Callable[[Values, Runtime], Any]] = {
    "DP001": _gpus, "DP002": _degrees, "DP003": _schedule, "DP004": _heads, "DP005": _kv_heads,
    "DP006": _ffn, "DP007": _vocab, "DP008": _filled, "DP009": _layers, "DP010": _chunks,
    "DP011": _batch, "DP012": _stages, "DP013": _interleaved, "DP014": _experts, "DP015": _expert_mesh,
    "DP016": _expert_tp, "DP017": _expert_replicas, "DP018": _vpp, "DP019": _stage_layers, "DP020": _uneven,
    "DP030": _options, "DP031": _sp_alone, "DP032": _sp_sequence, "DP033": _cp_kind,
    "DP034": _cp_sequence, "DP035": _ulysses, "DP036": _zero_with_pp, "DP037": _hsdp,
    "DP038": _expert_sp, "DP039": _offload, "DP040": _cp_inner, "DP041": _inner_heads, "DP090": _width,
}  # fmt: skip
"""code -> mask of the rows that break it; the order is the order in which rows are counted"""
