"""Figures of merit over predictions: errors by group, out-of-memory facts, bands, and a naive planner beside them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy_predict import Prediction

Groups = dict[str, list[Prediction]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of absolute relative errors, fractions; `signed` is the median with its sign."""

    n: int
    median: float
    mean: float
    p90: float
    within: tuple[float, float, float]
    """share within 5, 10 and 20 %"""
    signed: float

    def as_json(self) -> dict[str, float]:
        return {"n": self.n, "median": self.median, "mean": self.mean, "p90": self.p90}


def errors(values: Sequence[float]) -> Errors:
    """Of at least one relative error."""
    signed = np.array(values)
    size = np.abs(signed)
    return Errors(
        n=len(size),
        median=float(np.median(size)),
        mean=float(np.mean(size)),
        p90=float(np.quantile(size, 0.9)),
        within=tuple(float(np.mean(size <= limit)) for limit in (0.05, 0.10, 0.20)),  # type: ignore[arg-type]
        signed=float(np.median(signed)),
    )


def timed(predictions: Sequence[Prediction]) -> list[Prediction]:
    return [p for p in predictions if p.case.seconds > 0.0]


def with_memory(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Runs whose peak is printed with the reading that it is; what is offloaded by a share is not modelled."""
    return [p for p in predictions if p.case.memory > 0.0 and p.case.reading != "unsaid" and not p.case.offloads]


def fully_stated(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Rows that say everything but the make of the network."""
    return [p for p in predictions if not set(p.case.filled) - {"network"}]


def model_kind(prediction: Prediction) -> str:
    return "moe" if prediction.case.row["model_kind"] in ("moe", "hybrid-moe") else "dense"


def family(prediction: Prediction) -> str:
    return prediction.case.row["derived_gpu_family"] or "unsaid GPU"


def precision(prediction: Prediction) -> str:
    return prediction.case.row["derived_precision_class"] or "unsaid precision"


def scale(prediction: Prediction) -> str:
    gpus = int(float(prediction.case.row["n_gpus"]))
    edges = (8, 64, 512, 4096)
    for low, high in zip((1, *(e + 1 for e in edges)), edges, strict=False):
        if gpus <= high:
            return f"{low}-{high} GPUs"
    return "more than 4096 GPUs"


AXES: Mapping[str, Callable[[Prediction], str]] = {
    "model kind": model_kind,
    "GPU": family,
    "framework": lambda p: p.case.framework,
    "precision": precision,
    "number of GPUs": scale,
    "source": lambda p: p.case.row["source"].split("@")[0].split(" (")[0],
}
JSON_AXES = ("model kind", "GPU", "framework", "precision")


def grouped(predictions: Sequence[Prediction], axis: str) -> Groups:
    groups: Groups = defaultdict(list)
    for prediction in predictions:
        groups[AXES[axis](prediction)].append(prediction)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """`table[really, said]`: really ran | out of memory, said fits | tight | out."""

    table: Mapping[tuple[str, str], int]
    recall: float
    """share of the runs out of memory that are not called safe (fits)"""
    feasible: float
    """share of the runs that ran that are called feasible (fits or tight)"""
    n: int


def out_of_memory(predictions: Sequence[Prediction]) -> OutOfMemory:
    """OOM facts against verdicts on the same device. A run with unsaid recompute fits by construction: left out."""
    facts = [p for p in predictions if p.case.oom is not None and p.case.recompute != "least" and not p.case.offloads]
    table = Counter(("out of memory" if p.case.oom else "ran", p.verdict) for p in facts)
    lost = sum(n for (really, _), n in table.items() if really == "out of memory")
    ran = len(facts) - lost
    return OutOfMemory(
        table=dict(table),
        n=len(facts),
        recall=1.0 - table["out of memory", "fits"] / lost if lost else float("nan"),
        feasible=1.0 - table["ran", "out"] / ran if ran else float("nan"),
    )


def coverage(predictions: Sequence[Prediction]) -> float:
    """Share of measured step times inside the band."""
    inside = [p.low <= p.case.seconds <= p.high for p in predictions]
    return float(np.mean(inside)) if inside else float("nan")


def naive_errors(predictions: Sequence[Prediction]) -> list[float]:
    """Relative errors of FLOPs over one median efficiency per (GPU family, precision, model kind), with the bubble.

    The medians are taken over these very rows, which flatters it.
    """
    ratio = [p.model_flops * (1.0 + _bubble(p)) / p.case.seconds for p in predictions]
    keys = [(family(p), precision(p), model_kind(p)) for p in predictions]
    by_key: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for key, value in zip(keys, ratio, strict=True):
        by_key[key].append(value)
    rates = {key: float(np.median(values)) for key, values in by_key.items()}
    return [value / rates[key] - 1.0 for key, value in zip(keys, ratio, strict=True)]


def _bubble(prediction: Prediction) -> float:
    strategy, batch = prediction.case.strategy, prediction.case.workload.global_batch
    micro_batches = batch / (strategy.dp * strategy.micro_batch)
    return (strategy.pp - 1) / (micro_batches * strategy.vpp)


def naive_seconds(predictions: Sequence[Prediction]) -> list[float]:
    return [p.case.seconds * (1.0 + e) for p, e in zip(predictions, naive_errors(predictions), strict=True)]
