"""The host's side of a micro-batch: operators that Python issues one after the other, ahead of the device or behind it.

Kernels are queued. As long as the host is ahead its time is hidden; a pass over a segment takes the longer of what the
device computes and what the host needs to issue it. The host's lead does not last over layers with experts, whose
forward waits for the number of tokens of each expert (Megatron Core, moe/token_dispatcher.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml

from distplan.costmodel.lower import PHASES, Work
from distplan.costmodel.strategy import Floats

CAPTURED: Mapping[str, tuple[str, ...]] = {
    "attn": (".attention.",),
    "mlp": (".mlp.",),
    "moe_router": (".mlp.norm", ".moe.router", ".moe.route", ".moe.shared"),
    "moe_preprocess": (),
    "moe": (".mlp.norm", ".moe."),
}
"""Parts of a layer that a CUDA graph can hold (Megatron Core's --cuda-graph-modules) -> parts of the names of their
operators, which one launch replays; preprocessing is a part of dispatch. `moe` holds all of an expert layer, whose
sizes must not depend on the routing for that."""


@cache
def _counts() -> Mapping[str, Any]:
    with Path(__file__).with_name("host_operators.yaml").open(encoding="utf-8") as file:
        counts: Mapping[str, Any] = yaml.safe_load(file)
    return counts


def host_operators(
    works: Sequence[Work],
    table: Floats,
    captured: Sequence[str],
    sizes: Mapping[str, Floats],
    kernels: Mapping[str, float] = MappingProxyType({}),
) -> Floats:
    """Operators that the host issues for each [work, row].

    `captured`: parts of a layer that graphs replay. `sizes`: ranks of each mesh axis; one rank alone calls nothing.
    `kernels` of kinds that are not fused: each is an operator.
    """
    names = tuple(part for module in captured for part in CAPTURED[module])
    found = np.zeros((len(works), table.shape[1]))
    for at, work in enumerate(works):
        if work.leader >= 0 or any(part in work.name for part in names):
            continue
        number = _operators(work, table, "moe_preprocess" in captured)
        found[at] = np.maximum(number, kernels.get(work.kind, 0.0)) * work.times
        if work.axes:
            ranks = np.ones(table.shape[1])
            for axis in work.axes:
                ranks = ranks * sizes[axis]
            found[at] *= np.minimum(ranks - 1.0, 1.0)
    return found


def _operators(work: Work, table: Floats, prepared: bool) -> Floats | float:
    kinds = _counts()["kinds"]
    backward = work.phase == PHASES.index("backward")
    kind = "collective" if work.axes else "einsum" if work.category == 0 else work.kind.removesuffix("_grad")
    number = float(kinds.get(kind, (1.0, 1.0))[backward])
    if kind == "dispatch" and not prepared:
        number += float(kinds["preprocess"][backward])
    each = _counts()["per_expert"].get(kind)
    if each is None:
        return number
    experts = table[work.groups]
    return number + np.where(experts > 1.0, experts, 0.0) * float(each[backward])


def host_wait(device: Floats, host: Floats) -> Floats:
    """Seconds that the device waits for the host, all [phase, ...]; what is recomputed runs within backward.

    Of recomputation it is what that adds to backward's wait: less than nothing where its kernels keep the device busy.
    """
    recompute, backward = PHASES.index("recompute"), PHASES.index("backward")
    late = host - device
    wait = np.maximum(late, 0.0)
    wait[recompute] = np.maximum(late[recompute] + late[backward], 0.0) - wait[backward]
    return wait
