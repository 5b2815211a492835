"""Each phase of a step in memory: what a GPU of one stage holds in it, and what its rank holds on the host meanwhile.

Only some phases can be the worst, and those alone are priced in a batch (stage_costs.stage_memory). The others are
made here from the same terms: a forward pass makes no more at a time than backward, which makes it again or keeps it;
an initialisation without copies holds a part of what every later phase holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from distplan.costmodel.case import Case
from distplan.costmodel.casting import casts_of
from distplan.costmodel.exchanges import evaluate_terms
from distplan.costmodel.graph import parameters
from distplan.costmodel.lower_terms import segment_sizes, transients_of
from distplan.costmodel.model import DTYPE_BYTES
from distplan.costmodel.sizes import SizeTable
from distplan.costmodel.stage_costs import (
    FORWARD,
    INIT,
    MEMORY_PARTS,
    PHASES,
    StageMemory,
    StateBytes,
    WorstMemory,
    chunks_in_flight,
    in_phase,
    layers_only,
    run_max,
    stage_memory,
)
from distplan.costmodel.stages import Content, Run
from distplan.costmodel.strategy import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Bytes on one GPU of a stage in one phase; `parts` add up to `device_bytes`."""

    phase: str
    parts: Mapping[str, float]
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of one rank in host memory."""

    load_bytes: float
    """what it reads of a checkpoint, or makes of the model, before the device has it"""
    offload_bytes: float
    """optimizer states that stay there"""


def memory_phases(case: Case, stage: int) -> tuple[PhaseMemory, ...]:
    """Every phase of a stage, in the order of PHASES (loss: of the last stage alone)."""
    s, runtime = case.strategy, case.eng.runtime
    run = next(run for run in case.stages() if run.first == stage)
    states, acts = case.states(run.content), case.acts(run.content)
    flight = chunks_in_flight(s.schedule, run, s.pp, s.vpp, case.estimate.num_micro_batches)
    share = np.array([case.share(case.run_of(stage))])
    usable = float(case.estimate.usable_bytes[0])
    priced = stage_memory(run, states, acts, flight, share, runtime, stage == s.pp - 1, usable)
    held = flight * (acts.kept - share * (acts.kept - acts.least))
    whole = (states.parameters, states.gradients, states.optimizer)
    forward = (held, None, None, forward_temporaries(case, run.content), states.gathered, None)
    made = [*priced, in_phase(run, whole, forward, FORWARD, runtime)]
    made = [phase for phase in made if PHASES[phase.phase] != INIT] + [_init(case, run, states, priced)]
    return tuple(_plain(case, phase) for phase in sorted(made, key=lambda phase: phase.phase))


def _init(case: Case, run: Run, states: StateBytes, priced: list[StageMemory]) -> StageMemory:
    """Whichever is more: copies of parameters beside their buffers, or the master copies made after them."""
    recipe, rules = case.eng.workload.precision, case.eng.runtime.state
    copied = [phase for phase in priced if PHASES[phase.phase] == INIT]
    master = DTYPE_BYTES[recipe.master] if recipe.master else 0.0
    moments = sum(DTYPE_BYTES[dtype] for dtype in recipe.moments)
    made = master + moments if rules.init_optimizer else master
    optimizer = states.optimizer * (made / max(master + moments, 1.0))
    gradients = states.gradients if copied else None
    nothing = (np.zeros_like(states.parameters), None, None, None, None, None)
    after = in_phase(run, (states.parameters, gradients, optimizer), nothing, INIT, case.eng.runtime)
    return max([*copied, after], key=lambda phase: float(phase.allocated[0]))


def _plain(case: Case, phase: StageMemory) -> PhaseMemory:
    worst = WorstMemory.of([phase], case.eng.runtime)
    sizes = worst.parts([phase], case.eng.runtime)[:, 0]
    return PhaseMemory(
        phase=PHASES[phase.phase],
        parts={name: float(size) for name, size in zip(MEMORY_PARTS, sizes, strict=True) if size},
        device_bytes=float(worst.device[0]),
    )


def forward_temporaries(case: Case, content: Content) -> Floats:
    """The most that a forward operator of the stage's layers finds alive beside what is kept for backward."""
    s, eng = case.strategy, case.eng
    symbols = eng.rows(case.columns, s.cp_kind).symbols
    rows = []
    for first in case.programs(s.recompute):
        most = np.zeros(1)
        for program in (first, *first.beside):
            table, precision = SizeTable(), eng.workload.precision
            sizes, casts = segment_sizes(program, eng.workload), casts_of(program, precision)
            sets = transients_of(program, sizes, table, precision, casts.sent, only_forward=True)
            elements = table.evaluate(symbols)
            for terms in sets:
                most = np.maximum(most, evaluate_terms(terms, elements))
        rows.append(most)
    return run_max((content[0], *layers_only(content)[1:]), np.array(rows))


def host_memory(case: Case, stage: int) -> HostMemory:
    """Of one rank of the stage, as its runtime loads (state.load_host, with its source in the runtime's file)."""
    recipe, states = case.eng.workload.precision, case.states(case.stages()[stage].content)
    size = DTYPE_BYTES[recipe.parameters]
    load = {
        "shard": float((states.parameters + states.optimizer + states.host)[0]),
        "stage": 2.0 * float(states.parameters[0]),
        "model": parameters(case.eng.model, case.eng.workload)[0] * size,
    }
    return HostMemory(load_bytes=load[case.eng.runtime.state.load_host], offload_bytes=float(states.host[0]))
