"""Our Program's account of a step against PyTorch's: FLOPs, collectives and bytes of torch_cases*.

Each case becomes a model, a workload and the torchtitan runtime with the case's variations as data;
what is counted are the tables that are priced (costmodel/lower.py, costmodel/state.py). FLOPs,
collectives (count, bytes in and out by phase, collective, axis and dtype) and bytes of parameters,
gradients and optimizer state must be equal, saved activations within 2 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.oracle_schedules import Tally, read_lines
from distplan.costmodel.exchanges import evaluate_terms
from distplan.costmodel.layout import Axes, join_axes
from distplan.costmodel.lower import CATEGORIES, PHASES, Lowered, Work, lower
from distplan.costmodel.model import Attention, LayerKind, Mlp, Model, Precision, Workload
from distplan.costmodel.program import COLLECTIVES, SegmentProgram
from distplan.costmodel.runtime import Runtime, StateRules, load_runtime
from distplan.costmodel.stage_costs import state_bytes
from distplan.costmodel.state import Movement, in_root_unit, largest_elements, lower_state, movement_dtype, on_tp
from distplan.costmodel.strategy import Floats
from distplan.costmodel.tables import Engine, engine
from distplan.hardware.cluster import load_cluster
from distplan.hardware.rates import BACKWARD_OVER_FORWARD

ACTIVATIONS_WITHIN = 0.02
KINDS = {
    "all_reduce": "all_reduce", "allreduce_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
}  # fmt: skip
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
RECIPES = {"bf16": ("bf16", "bf16"), "mixed": ("bf16", "fp32"), "fp32": ("fp32", "fp32")}
"""precision -> dtype of compute, and of everything that is kept"""

Key = tuple[str, str, str, str]
"""phase, collective, axis, dtype"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one rank does in a step: FLOPs by (phase, mm | attention), collectives as (calls, bytes in, bytes out)."""

    flops: Mapping[tuple[str, str], float]
    communication: Mapping[Key, tuple[float, float, float]]
    parameters: float
    gradients: float
    optimizer: float
    activations: float


def model_of(case: Mapping[str, Any]) -> Model:
    head_dim = case["hidden"] // case["heads"]
    mixer = Attention(heads=case["heads"], kv_heads=case["kv_heads"], head_dim=head_dim, v_head_dim=head_dim)
    kind = LayerKind(name="layer", mixer=mixer, ffn=Mlp(ffn=case["ffn"], gated=True))
    return Model(
        name=case["model"],
        hidden=case["hidden"],
        vocab=case["vocab"],
        kinds={"layer": kind},
        pattern=("layer",) * case["layers"],
        tied_embedding=False,
        positions="none",
        vocab_pad_multiple=1,
    )


def workload_of(case: Mapping[str, Any]) -> Workload:
    compute, kept = RECIPES[case["precision"]]
    recipe = Precision(
        name=case["precision"],
        compute=compute,
        parameters=kept,
        gradients=kept,
        master="",
        moments=(kept, kept),
        matmul=compute,
    )
    loss = "vocab_parallel" if case["loss_parallel"] else "fp32_logits"
    return Workload(seq_len=case["seq"], global_batch=case["mb"], precision=recipe, loss=loss, causal=False)


def runtime_of(case: Mapping[str, Any]) -> Runtime:
    """torchtitan, with what the case asks for; without FSDP's wrapper gradients stay as DTensor made them."""
    runtime = load_runtime("torchtitan")
    rules = replace(runtime.state, root_resharded=bool(case["root_reshard"]))
    if case["dp_mode"] == "none":
        rules = replace(rules, whole_gradients="as_produced", tp_gradient_times=3)
    return replace(runtime, state=rules, fused_norm=case["norm_impl"] == "fused")


def zero_of(case: Mapping[str, Any]) -> int:
    if case["dp_mode"] in ("none", "replicate"):
        return 0
    return 3 if case["reshard_after_forward"] else 2


def degrees_of(case: Mapping[str, Any]) -> dict[str, Floats]:
    data = 1 if case["dp_mode"] == "none" else case["world"] // case["tp"]
    replicas = {"hsdp": case["dp_replicate"], "replicate": data}.get(case["dp_mode"], 1)
    degrees = {name: 1 for name in ("cp", "pp", "ep", "etp")}
    degrees |= {"tp": case["tp"], "dp_replicate": replicas, "dp_shard": data // replicas, "micro_batch": case["mb"]}
    return {name: np.array([float(degree)]) for name, degree in (degrees | {"gpus": case["tp"] * data}).items()}


@lru_cache(maxsize=1)
def _cluster() -> Any:
    return load_cluster("dgx-h100")


def account(case: Mapping[str, Any], runtime: Runtime | None = None) -> Account:
    """The account of one case, from the Programs that are priced; by another runtime if given."""
    eng = engine(model_of(case), workload_of(case), _cluster(), runtime or runtime_of(case))
    columns = degrees_of(case)
    symbols = eng.rows(columns, "none").symbols
    counts = [eng.pattern.count(number) for number in range(len(eng.segments))]
    counts[0] = counts[-1] = 1
    programs = eng.program(eng.structure(_sp(case), "none", case["ac"]))
    lowered_layers = lower(programs, eng.workload)
    flops, communication = _local(eng, case, programs, lowered_layers, symbols, counts)
    lowered = lower_state(
        eng.program(eng.structure(_sp(case), "all_gather", "none")), zero_of(case), eng.workload, eng.runtime.state
    )
    table = lowered.sizes.evaluate(symbols)
    for key, values in _state(eng, case, lowered.movements, table, symbols, counts):
        communication[key] = tuple(a + b for a, b in zip(communication[key], values, strict=True))  # type: ignore[assignment]
    elements = {
        name: np.array([evaluate_terms(terms, table) for terms in getattr(lowered, name)])
        for name in ("used", "produced", "stored", "trained")
    }
    elements["largest"] = largest_elements(lowered, table)
    held = state_bytes((*counts, 0), elements, np.array([float(zero_of(case))]), eng.workload, eng.runtime)
    return Account(
        flops=flops,
        communication=dict(communication),
        parameters=float(held.parameters[0]),
        gradients=float(held.gradients[0]),
        optimizer=float(held.optimizer[0]),
        activations=_activations(lowered_layers, symbols, counts),
    )


def _sp(case: Mapping[str, Any]) -> str:
    return str(case["sp"]).lower()


def _local(
    eng: Engine,
    case: Mapping[str, Any],
    programs: Sequence[SegmentProgram],
    lowered: Lowered,
    symbols: Mapping[str, Floats],
    counts: Sequence[int],
) -> tuple[dict[tuple[str, str], float], defaultdict[Key, tuple[float, float, float]]]:
    """What every segment's nodes execute and send; torch counts recomputation as backward."""
    table = lowered.sizes.evaluate(symbols)
    flops: dict[tuple[str, str], float] = defaultdict(float)
    sent: defaultdict[Key, tuple[float, float, float]] = defaultdict(lambda: (0.0, 0.0, 0.0))
    for work in lowered.works:
        phase = "forward" if PHASES[work.phase] == "forward" else "backward"
        times = counts[work.segment]
        if CATEGORIES[work.category] == "gemm":
            flops[phase, "mm"] += times * 2.0 * float(np.prod(table[[work.m, work.n, work.k, work.batch], 0]))
        elif CATEGORIES[work.category] == "attention":
            square = 4.0 * float(np.prod(table[[work.m, work.n, work.k, work.batch], 0]))
            passes = BACKWARD_OVER_FORWARD if work.kind == "attention_grad" else 1.0
            flops[phase, "attention"] += times * square * passes
        elif work.axes and _degree(work.axes, symbols) > 1.0:
            dtype = _dtype(eng, work, programs)
            given = float(evaluate_terms(work.terms, table)[0])
            key = (phase, work.kind, _axis_name(case, work.axes, symbols), dtype)
            sent[key] = _plus(sent[key], times, times * given, work.kind, work.axes, symbols)
    return dict(flops), sent


def _dtype(eng: Engine, work: Work, programs: Sequence[SegmentProgram]) -> str:
    program = programs[work.segment]
    node = next(n for n in program.nodes if n.name == work.name and n.kind in COLLECTIVES)
    dtype = program.values[node.inputs[0]].dtype
    recipe = eng.workload.precision
    return {"compute": recipe.compute, "gradient": recipe.gradients}.get(dtype, dtype)


def _degree(axes: Axes, symbols: Mapping[str, Floats]) -> float:
    product = 1.0
    for axis in axes:
        product *= float(symbols[axis][0])
    return product


def _plus(
    held: tuple[float, float, float], calls: float, given: float, kind: str, axes: Axes, symbols: Mapping[str, Floats]
) -> tuple[float, float, float]:
    degree = _degree(axes, symbols)
    result = given * {"all_gather": degree, "reduce_scatter": 1.0 / degree}.get(kind, 1.0)
    return held[0] + calls, held[1] + given, held[2] + result


def _state(
    eng: Engine,
    case: Mapping[str, Any],
    movements: Sequence[Movement],
    table: Floats,
    symbols: Mapping[str, Floats],
    counts: Sequence[int],
) -> Iterator[tuple[Key, tuple[float, float, float]]]:
    """Collectives of weights and gradients. Embedding and head are one unit where the runtime says so."""
    rules = eng.runtime.state
    zero, last = zero_of(case), len(counts) - 1
    for movement in movements:
        if movement.segment > last or _degree(movement.axes, symbols) == 1.0:
            continue
        joined = in_root_unit(movement, rules, counts)
        dtype = movement_dtype(movement.role, movement.axes, rules, eng.workload)
        for phase in _phases(movement, zero, rules, movement.segment in (0, last)):
            axis = _axis_name(case, movement.axes, symbols)
            times = counts[movement.segment]
            given = times * float(evaluate_terms(movement.terms, table)[0])
            calls = 0.0 if joined else float(times * movement.calls)
            one = _plus((0.0, 0.0, 0.0), calls, given, movement.kind, movement.axes, symbols)
            yield (phase, movement.kind, axis, dtype), one


def _phases(movement: Movement, zero: int, rules: StateRules, is_root: bool) -> tuple[str, ...]:
    if movement.role == "gradient":
        return ("optimizer",) if on_tp(movement.axes) and rules.tp_gradient_times > 1 else ("backward",)
    again = zero == 3 and (rules.root_resharded or not is_root)
    return ("forward", "backward") if again else ("forward",)


def _axis_name(case: Mapping[str, Any], axes: Axes, symbols: Mapping[str, Floats]) -> str:
    """As the oracle names it: tp, dp_shard, dp_replicate, or dp where there is one data axis."""
    live = tuple(axis for axis in axes if float(symbols[axis][0]) > 1.0)
    if on_tp(live):
        return "tp"
    return join_axes(live) if case["dp_mode"] == "hsdp" else "dp"


def _activations(lowered: Lowered, symbols: Mapping[str, Floats], counts: Sequence[int]) -> float:
    table = lowered.sizes.evaluate(symbols)
    total = 0.0
    for times, terms in zip(counts, lowered.saved, strict=True):
        total += times * float(evaluate_terms(terms, table)[0])
    return total


def stored_account(case: Mapping[str, Any]) -> Account:
    """What PyTorch counted."""
    result = case["result"]
    flops: dict[tuple[str, str], float] = defaultdict(float)
    for line in result["flops"]:
        flops[line["phase"], "mm" if line["op"] == "mm" else "attention"] += line["flops"]
    communication: dict[Key, tuple[float, float, float]] = {}
    for line in result["comm"]:
        key = (line["phase"], KINDS[line["op"]], line["axis"], DTYPES[line["dtype"]])
        communication[key] = (line["count"], line["bytes_in"], line["bytes_out"])
    return Account(
        flops=dict(flops),
        communication=communication,
        parameters=result["local_param_bytes"],
        gradients=result["local_grad_bytes"],
        optimizer=result["local_optim_bytes"],
        activations=result["mem"]["end_of_forward"]["Activation"],
    )


def differences(case: Mapping[str, Any]) -> dict[str, str]:
    """Field -> what differs, or ''."""
    ours, real = account(case), stored_account(case)
    found = {"FLOPs": _unequal(ours.flops, real.flops)}
    for part, index in (("calls", 0), ("bytes in", 1), ("bytes out", 2)):
        mine, theirs = ({k: v[index] for k, v in each.communication.items()} for each in (ours, real))
        found[f"collectives, {part}"] = _unequal(mine, theirs)
    for name in ("parameters", "gradients", "optimizer"):
        a, b = getattr(ours, name), getattr(real, name)
        found[f"{name}, bytes"] = "" if a == b else f"{a:.0f}, not {b}"
    error = ours.activations / real.activations - 1.0
    found["activations within 2 %"] = (
        "" if abs(error) <= ACTIVATIONS_WITHIN else (f"{ours.activations:.0f}, not {real.activations} ({error:+.1%})")
    )
    return found


def _unequal(ours: Mapping[Any, float], real: Mapping[Any, float]) -> str:
    wrong = [key for key in dict.fromkeys((*real, *ours)) if ours.get(key, 0.0) != real.get(key, 0.0)]
    return "; ".join(f"{' '.join(key)} {ours.get(key, 0.0):.0f}, not {real.get(key, 0.0):.0f}" for key in wrong)


def check(path: Path) -> dict[str, Tally]:
    """Per field the tally of a file whose name begins with torch_cases."""
    tallies: dict[str, Tally] = {}
    for case in read_lines(path):
        for field, difference in differences(case).items():
            tally = tallies.setdefault(f"torch {field}", Tally())
            tally.total += 1
            if difference:
                tally.differ.append(f"{case['id']} {field}: {difference}")
            else:
                tally.agree += 1
    return tallies
