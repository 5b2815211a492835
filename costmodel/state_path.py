"""The ways that a weight's gradient and parameter travel between where they are made, stored and used."""

from __future__ import annotations

from dataclasses import dataclass

from distplan.costmodel.graph import Weight
from distplan.costmodel.layout import TP, Layout
from distplan.costmodel.program import SegmentProgram, stored_layout, weight_layout
from distplan.costmodel.spmd import Transition, reshard

Steps = tuple[Transition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePath:
    gradient: Layout
    """as backward leaves it"""
    used: Layout
    """the parameter in forward and backward"""
    stored: Layout
    """what the optimizer updates"""
    reduce: Steps
    """gradient -> stored"""
    gather: Steps
    """stored -> used"""
    shard: Steps
    """used -> stored: nothing is sent"""

    @property
    def each(self) -> Steps:
        """The beginning of `reduce`, without the all-reduce between the replicas of HSDP."""
        return tuple(step for step in self.reduce if not _replicates(step))


def _reduce(gradient: Layout, used: Layout, stored: Layout) -> Steps:
    """On tp first, where the gradient is still whole (finalize_model_grads in Megatron, DTensor in torch)."""
    on_tp = tuple(a for a in gradient.partial if a in TP and a not in used.sharded)
    settled = Layout(gradient.dims, gradient.shards, tuple(a for a in gradient.partial if a not in on_tp))
    return (*reshard(gradient, settled), *reshard(settled, stored))


def _replicates(step: Transition) -> bool:
    return step.kind == "all_reduce" and step.axes == ("dp_replicate",)


def state_path(program: SegmentProgram, weight: Weight, sharded: bool) -> StatePath:
    """`sharded`: the optimizer state is (ZeRO 1 and above)."""
    used = weight_layout(weight, program.structure)
    stored = stored_layout(used) if sharded else used
    gradient = program.values[program.gradients[weight.name]].layout if weight.trained else stored
    return StatePath(
        gradient=gradient,
        used=used,
        stored=stored,
        reduce=_reduce(gradient, used, stored),
        gather=reshard(stored, used),
        shard=reshard(used, stored),
    )
