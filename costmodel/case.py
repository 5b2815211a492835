"""One strategy with its estimate and the tables that price it: what takes an estimate apart starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from distplan.costmodel.combine import LocalTables, StateTables, local_tables, state_tables
from distplan.costmodel.estimate import Estimate
from distplan.costmodel.lower import Lowered
from distplan.costmodel.model import Model, Workload
from distplan.costmodel.program import SegmentProgram
from distplan.costmodel.runtime import Runtime
from distplan.costmodel.stage_costs import Activations, StateBytes, activations, state_bytes
from distplan.costmodel.stage_load import recomputed_share
from distplan.costmodel.stages import Content, Run, Split, stage_of
from distplan.costmodel.step_end import weight_content
from distplan.costmodel.strategy import Floats, Strategies, Strategy
from distplan.costmodel.tables import Engine, columns_of, engine
from distplan.hardware.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Columns and tables are of length 1."""

    eng: Engine
    strategy: Strategy
    estimate: Estimate
    cut: Split
    columns: Mapping[str, Floats]
    local: LocalTables
    state: StateTables

    def stages(self) -> list[Run]:
        """Every stage as a run of its own."""
        return _each(self.cut.stages)

    def chunks(self) -> list[Run]:
        """Every virtual stage as a run of its own, in the order of the model."""
        return _each(self.cut.chunks if self.strategy.vpp > 1 else self.cut.stages)

    def run_of(self, stage: int) -> Run:
        return next(run for run in self.cut.stages if run.first <= stage < run.first + run.count)

    def holder_of(self, chunk: Run) -> Run:
        """The stages among which is the one that holds a virtual stage."""
        return self.run_of(stage_of(chunk.first, self.strategy.pp, self.strategy.schedule))

    @property
    def worst(self) -> Run:
        return self.run_of(int(self.estimate.worst_stage[0]))

    def share(self, run: Run) -> float:
        """Part of the layers of a run of stages that is recomputed."""
        return float(recomputed_share(self.estimate.recompute_layers[:1], run)[0])

    def programs(self, recompute: str) -> tuple[SegmentProgram, ...]:
        s = self.strategy
        return self.eng.program(self.eng.structure(str(s.sp).lower(), s.cp_kind, recompute))

    def lowered(self) -> Lowered:
        s = self.strategy
        return self.eng.lower(str(s.sp).lower(), s.cp_kind, s.recompute)

    def acts(self, content: Content) -> Activations:
        return activations(content, self.local.plain, self.local.chosen)

    def states(self, content: Content) -> StateBytes:
        weights = weight_content(content, self.strategy.pp)
        return state_bytes(weights, self.state.tables, self.state.zero, self.eng.workload, self.eng.runtime)


def _each(runs: tuple[Run, ...]) -> list[Run]:
    return [replace(run, first=run.first + at, count=1) for run in runs for at in range(run.count)]


def case_of(
    model: Model, workload: Workload, cluster: Cluster, runtime: Runtime, strategy: Strategy, estimate: Estimate
) -> Case:
    """`estimate` is that of the strategy, whose micro-batches and recomputed layers are used."""
    eng = engine(model, workload, cluster, runtime)
    rows, gpus = Strategies.of([strategy]), np.array([float(strategy.gpus)])
    return Case(
        eng=eng,
        strategy=strategy,
        estimate=estimate,
        cut=eng.split(strategy.pp, strategy.vpp, strategy.schedule, strategy.stage_layers),
        columns=columns_of(strategy, gpus[0]),
        local=local_tables(eng, rows, gpus),
        state=state_tables(eng, rows, gpus),
    )
