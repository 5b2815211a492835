"""The end of a step, and what it leaves to the next: gradients reduced, weights updated, parameters gathered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distplan.costmodel.casting import stored_dtype
from distplan.costmodel.combine import StateTables
from distplan.costmodel.model import DTYPE_BYTES
from distplan.costmodel.stage_costs import StateBytes, run_sum
from distplan.costmodel.stages import Content, Split
from distplan.costmodel.state import gathers
from distplan.costmodel.strategy import Floats
from distplan.costmodel.tables import Engine
from distplan.hardware.rates import memory_seconds, pcie_seconds


def step_end(
    eng: Engine,
    state: StateTables,
    states: list[StateBytes],
    cut: Split,
    pp: int,
    index: NDArray[np.int64],
    stage_f: list[Floats],
    stage_b: list[Floats],
    p2p: Floats,
    last: Floats,
) -> tuple[Floats, Floats]:
    """(exposed gradient reduction and parameter gathering, optimizer) in seconds per row.

    Reduction hides behind the backwards of its stage that follow (`last` micro-batches), gathering behind the
    first forwards; the last and the first layer's share never hides. A later stage is done earlier by the
    backwards that follow it, and starts later by the forwards before it.
    """
    exposed_reduce = np.zeros(len(index))
    exposed_gather = np.zeros(len(index))
    optimizer = np.zeros(len(index))
    before_f, before_b = np.zeros_like(p2p), np.zeros_like(p2p)
    for number, run in enumerate(cut.stages):
        behind = (last * stage_f[number])[index], (last * stage_b[number])[index]
        once = once_a_step(eng, state, run.content, pp, *behind)
        exposed_reduce = np.maximum(exposed_reduce, (once.reduce - once.reduce_hidden) - before_b[index])
        exposed_gather = np.maximum(exposed_gather, (once.gather - once.gather_hidden) - before_f[index])
        optimizer = np.maximum(optimizer, optimizer_seconds(eng, states[number])[state.index])
        before_f = before_f + run.count * (stage_f[number] + p2p)
        before_b = before_b + run.count * (stage_b[number] + p2p)
    exposed = (exposed_reduce + exposed_gather) + state.tables["tied"][state.index]
    return exposed, optimizer + state.tables["clip"][state.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnceAStep:
    """Seconds of one stage's gradients and parameters that move once a step, per row."""

    reduce: Floats
    reduce_hidden: Floats
    """behind the stage's own backward"""
    gather: Floats
    gather_hidden: Floats
    """behind its own forward"""


def once_a_step(
    eng: Engine, state: StateTables, content: Content, pp: int, forward: Floats, backward: Floats
) -> OnceAStep:
    """`forward` and `backward`: seconds per row of a stage's work that its gathering and reduction can hide behind;
    the share of the first or last layer never hides."""
    weights = weight_content(content, pp)
    reduce, gather = (seconds[state.index] for seconds in moved_once(eng, state, weights, pp))
    parts = max(1, sum(weights))
    most = (parts - 1.0) / parts
    return OnceAStep(
        reduce=reduce,
        reduce_hidden=eng.runtime.hidden("dp_grad") * np.minimum(backward, reduce * most),
        gather=gather,
        gather_hidden=eng.runtime.hidden("dp_param") * np.minimum(forward, gather * most),
    )


def last_round(m: Floats, pp: int, vpp: int, schedule: str) -> Floats:
    """Micro-batches' worth of a stage's work that is left when the first of its gradients are whole.

    Interleaved, the backwards of the last pp micro-batches run chunk by chunk (Narayanan et al. 2021, section 2.2),
    so that a chunk is reduced while the vpp - 1 others work (Megatron Core, schedules.py: enable_grad_sync at a
    chunk's last micro-batch); gathered parameters are read chunk by chunk in the same way.
    """
    if schedule != "interleaved":
        return np.ones_like(m)
    return np.maximum(1.0, np.minimum(m, float(pp)) * ((vpp - 1.0) / vpp))


def weight_content(content: tuple[int, ...], pp: int) -> tuple[int, ...]:
    """The content as weights: the head once however often it is used, and the tied copy of the embedding,
    a second weight only where head and embedding part."""
    head = min(content[-1], 1)
    return (*content[:-1], head, head if pp > 1 else 0)


def moved_once(eng: Engine, state: StateTables, content: tuple[int, ...], pp: int) -> tuple[Floats, Floats]:
    """Seconds per step, per combination, of reducing a stage's gradients after its last backward and of gathering
    its parameters before the next forward; what is done every micro-batch is not in them."""
    within, across = eng.runtime.reduces_each(state.zero, pp)
    reduce = (1.0 - within) * run_sum(content, state.tables["reduce"])
    reduce = reduce + (1.0 - across) * run_sum(content, state.tables["replicate"])
    gather = run_sum(content, state.tables["gather"])
    return reduce, np.where(gathers(state.zero, eng.runtime.state, 2)[0][0] > 0.0, 0.0, gather)


def optimizer_seconds(eng: Engine, held: StateBytes) -> Floats:
    """The update reads and writes every byte of its state once; clipping reads the gradients once more.

    Offloaded, gradients go to the host and parameters come back over PCIe, each in its dtype (Ren et al. 2021,
    ZeRO-Offload, section 4.1: two bytes each way where both are of two bytes).
    """
    recipe = eng.workload.precision
    gradient, parameter = DTYPE_BYTES[recipe.gradients], DTYPE_BYTES[stored_dtype(recipe)]
    seconds = memory_seconds(eng.rates, held.optimizer_traffic)
    if eng.workload.clip_grad:
        seconds = seconds + memory_seconds(eng.rates, held.gradient_elements * gradient)
    if eng.workload.offload_optimizer:
        seconds = seconds + pcie_seconds(eng.rates, held.gradient_elements * (gradient + parameter))
    return seconds
