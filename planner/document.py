"""A Plan as plain data: what --format json, yaml and csv print and what the report draws.

Field names are those of the Python API; units are in the names (bytes, seconds, FLOPs).
"""

from __future__ import annotations

from typing import Any

from distplan.costmodel.estimate import PHASES, Estimate
from distplan.planner.plain import plain, rounded
from distplan.planner.plan import Choice, NothingFits, NothingLegal, OtherRuntime, Plan, Sensitivity

FORMAT_VERSION = "1.0"
"""minor: fields were added; major: a field changed its meaning or went. Readers ignore what they do not know."""
_UNSEEN = 1e-7
"""a share that six significant digits do not show: the simulation's sums in another order"""

Plain = dict[str, Any]


def document(plan: Plan) -> Plain:
    return rounded(
        {
            "format_version": FORMAT_VERSION,
            "status": status(plan),
            "model": model_summary(plan),
            "assumptions": assumptions(plan),
            "objective": plan.objective,
            "gpus": list(plan.gpus),
            "global_batches": list(plan.global_batches),
            "best": None if plan.best is None else choice(plan.best, plan),
            "runners_up": [_runner_up(runner, plan) for runner in plan.runners_up],
            "counts": plain(plan.counts),
            "why_nothing": _why_nothing(plan),
            "sensitivity": [_sensitivity(item, plan) for item in plan.sensitivity],
            "other_runtime": _other_runtime(plan.other_runtime, plan),
            "simulated": plan.simulated,
            "simulation_cut": plan.simulation_cut,
            "interrupted": plan.interrupted,
            "notes": list(plan.notes),
        }
    )


def status(plan: Plan) -> str:
    if plan.best is not None:
        return plan.best.verdict
    if isinstance(plan.why_nothing, NothingLegal):
        return "nothing_legal"
    return "nothing_fits" if plan.why_nothing is not None else "interrupted"


def model_summary(plan: Plan) -> Plain:
    return {
        "name": plan.model.name,
        "layers": plan.model.layers,
        "hidden": plan.model.hidden,
        "vocab": plan.model.vocab,
    }


def assumptions(plan: Plan) -> Plain:
    """Everything that was not searched: printed in every header."""
    workload = plain(plan.workload)
    accelerator = plan.cluster.accelerator
    return {
        **workload,
        "tokens_per_step": plan.workload.seq_len * plan.workload.global_batch,
        "hardware": plan.cluster.id,
        "accelerator": accelerator.id,
        "memory_bytes": accelerator.memory_bytes,
        "memory_label_bytes": accelerator.memory_label_bytes,
        "runtime": plan.runtime.name,
        "runtime_version": plan.runtime.version,
        "mesh_order": list(plan.runtime.mesh_order),
        "reserve_bytes": plan.reserve_bytes,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "allow_tight": plan.allow_tight,
        "price_per_gpu_hour": plan.price_per_gpu_hour,
    }


def choice(chosen: Choice, plan: Plan) -> Plain:
    """One strategy with what it costs; the parts in `time` add up to `step_seconds`."""
    estimate = chosen.estimate
    return {
        "strategy": plain(chosen.strategy),
        "gpus": chosen.gpus,
        "global_batch": chosen.global_batch,
        "num_micro_batches": int(estimate.num_micro_batches[0]),
        "recompute_layers": int(estimate.recompute_layers[0]),
        "verdict": chosen.verdict,
        "step_seconds": chosen.step_seconds,
        "step_seconds_low": _moved(chosen, estimate.step_seconds_low[0]),
        "step_seconds_high": _moved(chosen, estimate.step_seconds_high[0]),
        "simulated_seconds": chosen.simulated_seconds,
        "time": time_parts(chosen),
        "tokens_per_second_per_gpu": chosen.tokens_per_second_per_gpu,
        "gpu_seconds_per_token": chosen.gpu_seconds_per_token,
        "cost_per_token": chosen.cost_per_token,
        **utilization(chosen, plan),
        "communication": communication(estimate),
        **memory(estimate),
        "relative": chosen.relative,
        "tie": chosen.tie,
        "warnings": [plain(warning) for warning in chosen.warnings],
        "balanced": plain(chosen.balanced),
        "imbalance": plain(chosen.imbalance),
    }


def _moved(chosen: Choice, seconds: float) -> float:
    """A bound of the closed form, scaled as the simulated time is to it."""
    return float(seconds) * chosen.step_seconds / float(chosen.estimate.step_seconds[0])


def time_parts(chosen: Choice) -> Plain:
    """Parts of the closed form, and what the simulation found beyond it (waits between uneven stages)."""
    parts = {name: float(seconds[0]) for name, seconds in chosen.estimate.time.items()}
    beyond = chosen.step_seconds - float(chosen.estimate.step_seconds[0])
    seen = abs(beyond) > _UNSEEN * chosen.step_seconds
    return parts | ({"schedule_wait": beyond} if seen else {})


def utilization(chosen: Choice, plan: Plan) -> Plain:
    """Model and hardware FLOP/s over the accelerator's dense peak in the dtype of the matrix products.

    mfu: forward x 3, full attention square (PaLM, arXiv 2204.02311, appendix B); hfu adds recompute;
    mfu_causal counts only the half of the square that a causal mask leaves.
    """
    estimate = chosen.estimate
    peaks = plan.cluster.accelerator.peak_flops
    dtype = plan.workload.precision.matmul
    peak = peaks[dtype]
    per_second = 1.0 / (chosen.step_seconds * peak)
    return {
        "model_flops": float(estimate.model_flops[0]),
        "hardware_flops": float(estimate.hardware_flops[0]),
        "kernel_flops": float(estimate.kernel_flops[0]),
        "mfu": float(estimate.model_flops[0]) * per_second,
        "mfu_causal": float(estimate.model_flops_causal[0]) * per_second,
        "hfu": float(estimate.hardware_flops[0]) * per_second,
        "peak_flops_per_second": peak,
        "peak_dtype": dtype,
        "bf16_peak_flops_per_second": peaks.get("bf16"),
    }


def communication(estimate: Estimate) -> list[Plain]:
    """Per GPU and step, one row per mesh axis and collective, the longest first."""
    rows: dict[tuple[str, str], Plain] = {}
    for item in estimate.communication:
        row = rows.setdefault(
            (item.axis, item.kind), {"axis": item.axis, "kind": item.kind} | dict.fromkeys(_SUMS, 0.0)
        )
        for name in _SUMS:
            row[name] += float(getattr(item, name)[0])
    moved = [row for row in rows.values() if row["wire_bytes"] > 0.0 or row["seconds"] > 0.0]
    return sorted(moved, key=lambda row: (-rounded(row["seconds"]), row["axis"], row["kind"]))


_SUMS = ("count", "payload_bytes", "wire_bytes", "seconds", "exposed_seconds")
_READINGS = (
    "allocated_bytes",
    "reserved_bytes",
    "device_bytes",
    "device_bytes_low",
    "device_bytes_high",
    "usable_bytes",
    "host_bytes",
)


def memory(estimate: Estimate) -> Plain:
    """Of the worst stage in its worst phase; the parts in `memory` add up to `device_bytes`."""
    return {
        "memory": {name: float(column[0]) for name, column in estimate.memory.items()},
        **{name: float(getattr(estimate, name)[0]) for name in _READINGS},
        "worst_stage": int(estimate.worst_stage[0]),
        "worst_phase": PHASES[int(estimate.worst_phase[0])],
    }


def _runner_up(runner: Choice, plan: Plan) -> Plain:
    shown = choice(runner, plan)
    assert plan.best is not None
    best = time_parts(plan.best)
    # for as many tokens as the best's step has and, where GPU time is what counts, on as many GPUs
    scale = plan.best.global_batch / runner.global_batch
    if plan.objective == "cost":
        scale *= runner.gpus / plan.best.gpus
    gaps = {name: shown["time"].get(name, 0.0) * scale - best.get(name, 0.0) for name in shown["time"] | best}
    part = max(sorted(gaps), key=lambda name: rounded(gaps[name]))
    return shown | {"slower_mostly": {"part": part, "seconds": gaps[part]}}


def _why_nothing(plan: Plan) -> Plain | None:
    why = plan.why_nothing
    if isinstance(why, NothingFits):
        return {
            "reason": "nothing_fits",
            "stage": why.stage,
            "phase": why.phase,
            "bytes_over": why.bytes_over,
            "smallest_gpus": why.smallest_gpus,
            "searched_up_to": why.searched_up_to,
            "nearest": choice(why.nearest, plan),
            "smallest": None if why.smallest is None else choice(why.smallest, plan),
        }
    if isinstance(why, NothingLegal):
        return {"reason": "nothing_legal", **plain(why)}
    return None


def _sensitivity(item: Sensitivity, plan: Plan) -> Plain:
    return {
        "change": item.change,
        "winner_changes": item.winner_changes,
        "winner": None if item.winner is None else choice(item.winner, plan),
        "loss": item.loss,
    }


def _other_runtime(other: OtherRuntime | None, plan: Plan) -> Plain | None:
    if other is None:
        return None
    return {"runtime": other.runtime, "speedup": other.speedup, "best": choice(other.best, plan)}
