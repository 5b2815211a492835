"""Predictions of cases, batched by what they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.accuracy_fill import Case, LeftOut, case_of
from benchmarks.accuracy_rows import Row
from distplan.costmodel.estimate import Estimate, estimate
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.hardware.errors import DistplanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner says of a case. Bytes are allocated, reserved and device; parts in seconds and bytes."""

    case: Case
    recompute: str
    """as priced: the least that fits where the row does not say"""
    seconds: float
    low: float
    high: float
    time: dict[str, float]
    bytes: dict[str, float]
    bytes_low: float
    bytes_high: float
    memory: dict[str, float]
    usable: float
    model_flops: float
    """per GPU and step"""

    @property
    def error(self) -> float:
        """relative error of the step time"""
        return self.seconds / self.case.seconds - 1.0

    @property
    def memory_error(self) -> float:
        """relative error of the reading that the row names (device where it does not say)"""
        return self.bytes.get(self.case.reading, self.bytes["device"]) / self.case.memory - 1.0

    @property
    def verdict(self) -> str:
        if self.bytes_high <= self.usable:
            return "fits"
        return "tight" if self.bytes["device"] <= self.usable else "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    predictions: tuple[Prediction, ...]
    left_out: tuple[tuple[Row, str], ...]


def cases_of(rows: Sequence[Row]) -> tuple[list[Case], list[tuple[Row, str]]]:
    """(what can be described, what is left out and why)."""
    cases, left_out = [], []
    for row in rows:
        try:
            cases.append(case_of(row))
        except DistplanError as error:
            left_out.append((row, str(error)))
    return cases, left_out


def predict(rows: Sequence[Row]) -> Predicted:
    """Every row, or why not."""
    cases, left_out = cases_of(rows)
    found: list[Prediction] = []
    for members in _batches(cases):
        try:
            found += _predict_alike(members)
        except DistplanError as error:
            left_out += [(case.row, str(error)) for case in members]
    order = {row["id"]: at for at, row in enumerate(rows)}
    found.sort(key=lambda prediction: order[prediction.case.row["id"]])
    return Predicted(predictions=tuple(found), left_out=tuple(left_out))


def predict_cases(cases: Sequence[Case]) -> list[Prediction]:
    """Predictions in the order of the cases. Raises DistplanError for one that cannot be priced."""
    found = {p.case.row["id"]: p for members in _batches(cases) for p in _predict_alike(members)}
    return [found[case.row["id"]] for case in cases]


def _batches(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Cases of one model, workload, machine and runtime; batches that share an engine follow each other."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        engine = (id(case.model), id(case.cluster), id(case.runtime), replace(case.workload, global_batch=1))
        groups.setdefault((engine, case.workload.global_batch), []).append(case)
    yield from (groups[key] for key in sorted(groups, key=repr))


def _predict_alike(cases: list[Case]) -> list[Prediction]:
    """Rows that do not say their recompute take the first of none, selective, full that fits (or full)."""
    found: dict[int, Prediction] = {}
    open_cases = list(enumerate(cases))
    for choice in ("none", "selective", "full"):
        rows = [
            replace(case.strategy, recompute=choice, recompute_layers=0) if case.recompute == "least" else case.strategy
            for _, case in open_cases
        ]
        priced = _price(cases[0], rows)
        for place, (at, case) in enumerate(open_cases):
            found[at] = _prediction(case, rows[place].recompute, priced, place)
        open_cases = [(at, case) for at, case in open_cases if case.recompute == "least" and found[at].verdict == "out"]
        if not open_cases:
            break
    return [found[at] for at in range(len(cases))]


def _price(case: Case, rows: list[Strategy]) -> Estimate:
    with np.errstate(all="ignore"):
        return estimate(case.model, case.workload, case.cluster, case.runtime, Strategies.of(rows))


def _prediction(case: Case, recompute: str, priced: Estimate, at: int) -> Prediction:
    seconds = float(priced.step_seconds[at])
    if not np.isfinite(seconds) or seconds <= 0.0:
        raise LeftOut(f"{case.row['id']}: the estimate is {seconds}")
    return Prediction(
        case=case,
        recompute=recompute,
        seconds=seconds,
        low=float(priced.step_seconds_low[at]),
        high=float(priced.step_seconds_high[at]),
        time={name: float(part[at]) for name, part in priced.time.items()},
        bytes={
            "allocated": float(priced.allocated_bytes[at]),
            "reserved": float(priced.reserved_bytes[at]),
            "device": float(priced.device_bytes[at]),
        },
        bytes_low=float(priced.device_bytes_low[at]),
        bytes_high=float(priced.device_bytes_high[at]),
        memory={name: float(part[at]) for name, part in priced.memory.items()},
        usable=float(priced.usable_bytes[at]),
        model_flops=float(priced.model_flops[at]),
    )
