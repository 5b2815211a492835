"""Does a strategy file still hold: it is legal, it fits, it keeps its budgets, it is no slower than a baseline.

Pure: files in, plain results out; formats are in check_formats.py, the command in cli_check.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distplan.hardware.documents import Document, load_mapping
from distplan.hardware.errors import DistplanError, DocumentError
from distplan.planner import api
from distplan.planner.check_budgets import BY_OPTION, Budget, metrics
from distplan.planner.constraints import Context, codes, explain_row
from distplan.planner.document import choice
from distplan.planner.plain import rounded
from distplan.planner.plan import Plan, Violation
from distplan.planner.plan_file import PlanFile, is_plan, read_plan
from distplan.planner.wording import gib, percent, seconds

Plain = dict[str, Any]
OK, WARNING, BROKEN, CANNOT_RUN = "ok", "warning", "broken", "cannot_run"
_DRIFT = 1e-3
"""of the recorded step time: a smaller change is not worth a line"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A strategy file and what it costs today. `plan` is None where it cannot be priced: see `broken`, `problem`."""

    path: str
    document: Document
    file: PlanFile
    plan: Plan | None
    broken: tuple[Violation, ...] = ()
    problem: str = ""

    @property
    def shown(self) -> Plain:
        """The choice as plain data, six significant digits; only where there is a plan."""
        assert self.plan is not None and self.plan.best is not None
        made: Plain = rounded(choice(self.plan.best, self.plan))
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    """fits, rules, references, a DP code, or a budget's option: max-memory"""
    result: str
    """ok | warning | broken | cannot_run"""
    message: str
    key: tuple[str, ...] = ()
    """of the file, to what it is about"""
    value: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of every file."""

    budgets: Mapping[str, float] = field(default_factory=dict)
    """option -> limit in base units"""
    allow_tight: bool = False
    baseline: Evaluated | None = None
    fail_if_slower: float | None = None
    """share of the baseline's time per token"""


def evaluate(path: str | os.PathLike[str]) -> Evaluated:
    """Read and price a strategy file. Raises DistplanError where it cannot be read."""
    document = load_mapping(path)
    name = os.fspath(path)
    if not is_plan(document):
        raise DocumentError("is not a strategy file; distplan search and estimate -o write one", file=name)
    return price(name, document, read_plan(document))


def price(name: str, document: Document, file: PlanFile) -> Evaluated:
    job = setting_of(file)
    bare = Evaluated(path=name, document=document, file=file, plan=None)
    broken = tuple(v for v in explain_row(file.strategy, context_of(job, file.strategy.gpus)) if not v.warning)
    if broken:
        return replace(bare, broken=broken)
    try:
        return replace(bare, plan=replace(api.estimate_setting(job, file.strategy), allow_tight=file.allow_tight))
    except DistplanError as error:
        return replace(bare, problem=str(error))


def setting_of(file: PlanFile) -> api.Setting:
    limits = api.Limits(
        reserve_bytes=file.reserve_bytes,
        memory_limit_bytes=file.memory_limit_bytes,
        price_per_gpu_hour=file.price_per_gpu_hour,
    )
    return api.Setting(
        model=file.model, workload=file.workload, cluster=file.cluster, runtime=file.runtime, limits=limits
    )


def context_of(job: api.Setting, gpus: int) -> Context:
    """What the rules see of a setting."""
    size = job.cluster.tiers[0].size
    domain = gpus if size == float("inf") else int(size)
    return Context(model=job.model, workload=job.workload, runtime=job.runtime, gpus=gpus, domain=domain)


def check(found: Evaluated, question: Question) -> list[Check]:
    """Everything that was looked at, in a fixed order."""
    done = [*_rules(found), *_references(found)]
    if found.plan is None:
        return done
    shown = found.shown
    done += _fits(found, shown, question.allow_tight)
    values = metrics(shown)
    done += [_budget(BY_OPTION[name], limit, values) for name, limit in question.budgets.items()]
    done += _recorded(found, shown)
    if question.baseline is not None:
        done += _against(found, shown, question.baseline, question.fail_if_slower)
    return done


def status(checks: Sequence[Check]) -> str:
    """holds | broken | cannot_run, of the worst check."""
    results = {each.result for each in checks}
    return CANNOT_RUN if CANNOT_RUN in results else BROKEN if BROKEN in results else "holds"


def _rules(found: Evaluated) -> list[Check]:
    if found.problem:
        return [Check(name="priced", result=CANNOT_RUN, message=found.problem)]
    if found.broken:
        return [_violation(each, found, CANNOT_RUN) for each in found.broken]
    best = found.plan.best if found.plan else None
    warned = [_violation(each, found, WARNING) for each in (best.warnings if best else ())]
    runtime = found.file.runtime.name
    return [Check(name="rules", result=OK, message=f"{runtime} can run it", key=("strategy",)), *warned]


def _violation(broken: Violation, found: Evaluated, result: str) -> Check:
    hint = f" (legal: {', '.join(broken.nearest)})" if broken.nearest else ""
    return Check(name=broken.code, result=result, message=f"{broken.sentence}{hint}", key=key_of(broken.code, found))


def key_of(code: str, found: Evaluated) -> tuple[str, ...]:
    """The first key of the file that a rule is about."""
    for name in codes()[code].vary:
        for section in ("strategy", "workload", "model"):
            if (section, name) in found.document.lines:
                return section, name
    return ("strategy",)


def _references(found: Evaluated) -> list[Check]:
    if not found.file.changed:
        return [Check(name="references", result=OK, message="all that the file refers to is unchanged")]
    return [
        Check(name="references", result=WARNING, message=sentence, key=(sentence.split()[0],))
        for sentence in found.file.changed
    ]


def _fits(found: Evaluated, shown: Plain, allow_tight: bool) -> list[Check]:
    usable, high, device = shown["usable_bytes"], shown["device_bytes_high"], shown["device_bytes"]
    key = ("estimate", "device_bytes")
    verdict = shown["verdict"]
    place = f"stage {shown['worst_stage']} at {shown['worst_phase']}"
    if verdict == "out":
        text = f"does not fit: {place} needs {gib(device)} of {gib(usable)} usable, {gib(device - usable)} too much"
        return [Check(name="fits", result=CANNOT_RUN, message=text, key=key, value=device, limit=usable)]
    if verdict == "tight" and not (allow_tight or found.file.allow_tight):
        text = f"is tight: {place} needs {gib(device)}, up to {gib(high)}, of {gib(usable)} usable"
        return [Check(name="fits", result=BROKEN, message=text, key=key, value=high, limit=usable)]
    text = f"{gib(device)} of {gib(usable)} usable, {place}"
    return [Check(name="fits", result=OK, message=text, key=key, value=device, limit=usable)]


def _budget(budget: Budget, limit: float, values: Mapping[str, float | None]) -> Check:
    value = values[budget.metric]
    key = budget.key
    if value is None:
        text = f"{budget.words} is not known: {budget.unknown}"
        return Check(name=budget.option, result=BROKEN, message=text, key=key, limit=limit)
    holds = value <= limit if budget.most else value >= limit
    relation = ("within" if holds else "over") if budget.most else ("at least" if holds else "under")
    text = f"{budget.words} {budget.show(value)} is {relation} {budget.show(limit)}"
    return Check(name=budget.option, result=OK if holds else BROKEN, message=text, key=key, value=value, limit=limit)


def _recorded(found: Evaluated, shown: Plain) -> list[Check]:
    """The estimate that the file holds was made by another version or other data where it differs."""
    recorded = found.document.value.get("estimate")
    before = recorded.get("step_seconds") if isinstance(recorded, dict) else None
    if not isinstance(before, int | float) or isinstance(before, bool) or before <= 0:
        return []
    now = shown["step_seconds"]
    change = now / before - 1.0
    if abs(change) <= _DRIFT:
        return []
    text = f"the file records a step of {seconds(before)}, today it is {seconds(now)} ({percent(change, signed=True)})"
    return [Check(name="recorded", result=WARNING, message=text, key=("estimate", "step_seconds"), value=now)]


def _against(found: Evaluated, shown: Plain, baseline: Evaluated, most: float | None) -> list[Check]:
    before, now = time_per_token(baseline), time_per_token(found)
    slower = now / before - 1.0
    word = "slower" if slower >= 0.0 else "faster"
    text = f"{percent(abs(slower))} {word} per token than {baseline.path}"
    failed = most is not None and slower > most
    if failed and most is not None:
        text += f", allowed are {percent(most)}"
    result = BROKEN if failed else OK
    key = ("estimate", "step_seconds")
    return [Check(name="baseline", result=result, message=text, key=key, value=slower, limit=most)]


def time_per_token(found: Evaluated) -> float:
    shown = found.shown
    made: float = shown["step_seconds"] / (shown["global_batch"] * found.file.workload.seq_len)
    return made


def line_of(found: Evaluated, key: Sequence[str]) -> int | None:
    """The line of the key, or of the nearest section above it."""
    for length in range(len(key), 0, -1):
        line = found.document.lines.get(tuple(key[:length]))
        if line is not None:
            return line
    return None
