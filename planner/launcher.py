"""What export and import share: the facts of a plan, and what a launcher's file cannot say of them.

A fact is a field of the strategy, or one of the job (`gpus`, `seq_len`, …), under its one name. Where a
launcher has no word for a fact, its file carries a line that says which value was meant and which one
the launcher takes; import reads that line back, unless the file has been changed since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.strategy import Strategy
from distplan.hardware.cluster import Cluster
from distplan.planner.plan_file import PlanFile

STRATEGY_FACTS = tuple(field.name for field in fields(Strategy))
JOB_FACTS = ("gpus", "global_batch", "seq_len", "precision", "optimizer", "attention", "clip_grad", "offload_optimizer")
Fact = int | bool | str
BY_HAND = "the layers of every stage are not its file's to say"
_UNKNOWN = "?"
"""what a launcher takes where the file leaves it open"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan to be launched. `recompute_layers`: the layers per stage that full recompute repeats, solved."""

    strategy: Strategy
    model: Model
    workload: Workload
    runtime: Runtime
    cluster: Cluster
    recompute_layers: int

    @staticmethod
    def of(plan: PlanFile, *, recompute_layers: int) -> Job:
        layers = recompute_layers if plan.strategy.recompute == "full" else 0
        return Job(
            strategy=plan.strategy,
            model=plan.model,
            workload=plan.workload,
            runtime=plan.runtime,
            cluster=plan.cluster,
            recompute_layers=plan.strategy.recompute_layers or layers,
        )

    @property
    def micro_batches(self) -> int:
        """per step and pipeline: the steps of gradient accumulation"""
        return max(1, self.workload.global_batch // (self.strategy.micro_batch * self.strategy.dp))

    @cached_property
    def facts(self) -> Mapping[str, Fact]:
        named = {name: getattr(self.strategy, name) for name in STRATEGY_FACTS}
        return named | {
            "stage_layers": ",".join(str(layers) for layers in self.strategy.stage_layers),
            "recompute_layers": self.recompute_layers,
            "gpus": self.strategy.gpus,
            "global_batch": self.workload.global_batch,
            "seq_len": self.workload.seq_len,
            "precision": self.workload.precision.name.replace(" ", "_"),
            "optimizer": self.workload.optimizer,
            "attention": self.workload.attention,
            "clip_grad": self.workload.clip_grad,
            "offload_optimizer": self.workload.offload_optimizer,
        }

    def unsaid(self, fact: str, taken: Fact | None, why: str) -> tuple[Unsaid, ...]:
        """Nothing where the launcher takes what is meant; `taken` None: the file leaves it open."""
        meant = self.facts[fact]
        return () if meant == taken else (Unsaid(fact=fact, meant=meant, taken=taken, why=why),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaid:
    """A fact for which a launcher has no word."""

    fact: str
    meant: Fact
    taken: Fact | None
    why: str

    @property
    def sentence(self) -> str:
        taken = _UNKNOWN if self.taken is None else json.dumps(self.taken)
        return f"cannot say {self.fact} = {json.dumps(self.meant)} (takes {taken}): {self.why}"


_SENTENCE = re.compile(
    r'cannot say (\w+) = (-?\d+|true|false|"[^"\s]*") \(takes (\?|-?\d+|true|false|"[^"\s]*")\): (.*)'
)


def read_unsaid(lines: Iterable[str]) -> tuple[Unsaid, ...]:
    """The sentences of `Unsaid` among lines of a file; anything else is passed over."""
    found = []
    for line in lines:
        match = _SENTENCE.search(line)
        if match and match[1] in (*STRATEGY_FACTS, *JOB_FACTS):
            taken = None if match[3] == _UNKNOWN else json.loads(match[3])
            found.append(Unsaid(fact=match[1], meant=json.loads(match[2]), taken=taken, why=match[4]))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file for a launcher. `remarks`: sentences on what the file leaves to the person who uses it."""

    text: str
    unsaid: tuple[Unsaid, ...]
    remarks: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        return (*(item.sentence for item in self.unsaid), *self.remarks)


NATIVE_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def other_order(job: Job, native: tuple[str, ...] = NATIVE_ORDER) -> tuple[str, ...]:
    """A remark where the plan was priced for ranks in another order than the launcher's."""
    order = job.runtime.mesh_order
    degrees = {axis: int(job.facts[axis]) for axis in NATIVE_ORDER}
    if [axis for axis in order if degrees[axis] > 1] == [axis for axis in native if degrees[axis] > 1]:
        return ()
    return (f"the plan lays ranks out as {', '.join(order)} (outermost first), this launcher as {', '.join(native)}",)
