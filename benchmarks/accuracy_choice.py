"""Choosing among measured strategies: rank correlation and regret."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from benchmarks.accuracy_predict import Prediction

_SAME = (
    "source",
    "framework",
    "model_name",
    "num_layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "derived_seq_len",
    "gpu",
    "gpu_mem_gb",
    "n_gpus",
    "precision",
    "global_batch",
    "derived_global_batch",
    "attention_impl",
)
"""cells that two runs share which differ only in strategy"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One group of runs that differ only in strategy."""

    source: str
    members: tuple[Prediction, ...]
    regret: float
    """how much slower the run predicted fastest was than the fastest run"""
    tau: float
    """Kendall's rank correlation of predicted and measured times; NaN for two runs or all equal"""


def choices(predictions: Sequence[Prediction], seconds: Sequence[float]) -> list[Choice]:
    """Groups of at least two timed runs with different strategies; `seconds` are the predictions to choose by."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at, prediction in enumerate(predictions):
        groups[tuple(prediction.case.row[name] for name in _SAME)].append(at)
    return [
        _choice([predictions[at] for at in members], np.array([seconds[at] for at in members]))
        for members in groups.values()
        if len({(predictions[at].case.strategy, predictions[at].recompute) for at in members}) > 1
    ]


def _choice(members: list[Prediction], predicted: np.ndarray) -> Choice:
    measured = np.array([member.case.seconds for member in members])
    chosen = measured[int(np.argmin(predicted))]
    tau = float(kendalltau(predicted, measured).statistic) if len(members) > 2 else float("nan")
    return Choice(
        source=members[0].case.row["source"].split("@")[0].split(" (")[0],
        members=tuple(members),
        regret=float(chosen / measured.min() - 1.0),
        tau=tau,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    groups: int
    median_regret: float
    mean_regret: float
    kendall_tau: float
    """mean over groups of three and more"""


def summary(found: Sequence[Choice]) -> Choosing:
    regrets = [choice.regret for choice in found]
    taus = [choice.tau for choice in found if not np.isnan(choice.tau)]
    nothing = float("nan")
    return Choosing(
        groups=len(found),
        median_regret=float(np.median(regrets)) if regrets else nothing,
        mean_regret=float(np.mean(regrets)) if regrets else nothing,
        kendall_tau=float(np.mean(taus)) if taus else nothing,
    )
