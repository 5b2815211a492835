"""A real model's Programs on a small model: degrees, sizes, layers, weights and tokens to execute them with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from distplan.costmodel.interpret import World
from distplan.costmodel.interpret_mesh import Array, Mesh
from distplan.costmodel.interpret_step import Key, Part, Sharding, Start, weights_of
from distplan.costmodel.layout import CP, DATA, EXPERT, TP, Layout
from distplan.costmodel.model import Attention, Moe
from distplan.costmodel.program import SegmentProgram
from distplan.costmodel.sizes import mesh_symbols
from distplan.costmodel.state_path import state_path
from distplan.costmodel.strategy import Strategies, Strategy
from distplan.costmodel.tables import Engine

MAX_RANKS = 64
MICRO_BATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """The small execution of one strategy, ready to run."""

    parts: tuple[Part, ...]
    start: Start
    world: World
    how: Sharding
    pp: int


def programs_of(eng: Engine, strategy: Strategy) -> tuple[SegmentProgram, ...]:
    """The Programs that an estimate of `strategy` prices."""
    sp = str(strategy.sp).lower()
    return eng.program(eng.structure(sp, strategy.cp_kind, strategy.recompute))


def shrink(eng: Engine, strategy: Strategy, seed: int) -> Small:
    programs = programs_of(eng, strategy)
    degrees = small_degrees(eng, strategy)
    dense = tuple((axis, degrees[axis]) for axis in (*DATA, *CP, *TP))
    mesh = Mesh(dense, tuple((axis, degrees[axis]) for axis in EXPERT))
    sizes = small_sizes(eng, programs, mesh, strategy)
    parts = _parts(eng, programs, degrees["pp"] * min(strategy.vpp, 2))
    tokens = MICRO_BATCHES * sizes["batch"] * sizes["seq"]
    workload, runtime = eng.workload, eng.runtime
    world = World(mesh=mesh, sizes=sizes, causal=workload.causal, window=max(1, sizes["seq"] // 2), scale=1.0 / tokens)
    within, across = (bool(each[0]) for each in runtime.reduces_each(np.array([float(strategy.zero)]), strategy.pp))
    how = Sharding(
        zero=strategy.zero, frozen_from=runtime.state.parameters_sharded_from, reduce_each=within, replicate_each=across
    )
    start = _start(parts, world, "sgd" if workload.optimizer == "sgd" else "adamw", seed)
    return Small(parts=parts, start=start, world=world, how=how, pp=degrees["pp"])


def small_degrees(eng: Engine, strategy: Strategy) -> dict[str, int]:
    """1 stays 1, more becomes 2; a lone tp, cp or dp_shard of 4 or more becomes 4 while ranks last."""
    columns = {
        name: Strategies.of([strategy]).degree(name) for name in ("tp", "cp", "cp_inner", "pp", "ep", "etp", *DATA)
    }
    real = {k: int(v[0]) for k, v in mesh_symbols(columns, eng.kv_heads, strategy.cp_kind).items()}
    small = {axis: min(degree, 2) for axis, degree in real.items() if axis not in EXPERT}
    for axis in ("tp_kv", "cp_kv", "dp_shard"):
        if real[axis] >= 4 and 2 * int(np.prod(list(small.values()))) <= MAX_RANKS // 2:
            small[axis] = 4
    ranks = int(np.prod([degree for axis, degree in small.items() if axis != "pp"]))
    ep, etp = min(real["ep"], 2, ranks), min(real["etp"], 2)
    etp = etp if ranks % (ep * etp) == 0 else 1
    return small | {"edp": ranks // (ep * etp), "ep": ep, "etp": etp}


LEAST = {
    "hidden": 6, "ffn": 3, "vocab": 5, "batch": 1, "kv_heads": 1, "group": 1, "experts": 4, "v_head_dim": 3,
    "conv_kernel": 3,
}  # fmt: skip
"""elements of a dim that few ranks share; 2 for those that are not named"""


def small_sizes(eng: Engine, programs: Sequence[SegmentProgram], mesh: Mesh, strategy: Strategy) -> dict[str, int]:
    """The least sizes that every layout divides, larger where one element would hide an order."""
    multiple: dict[str, int] = dict.fromkeys(LEAST, 1)
    for layout in _layouts(programs, strategy.zero > 0):
        for dim, axes in zip(layout.dims, layout.shards, strict=True):
            multiple[dim] = lcm(multiple.get(dim, 1), mesh.degree(axes))
    sizes = {dim: n if n >= 4 else n * LEAST.get(dim, 2) for dim, n in multiple.items()}
    mixers = [kind.mixer for kind in eng.model.kinds.values() if isinstance(kind.mixer, Attention)]
    if all(m.kv_heads > 1 for m in mixers):
        sizes["kv_heads"] = max(sizes["kv_heads"], 2)
    if any(m.heads > m.kv_heads for m in mixers):
        sizes["group"] = max(sizes["group"], 2)
    sizes["batch"] = mesh.degree(DATA) * (2 if strategy.micro_batch > 1 else 1)
    tokens = mesh.degree((*CP, *TP)) if strategy.sp else mesh.degree(CP)
    sizes["seq"] = lcm(multiple.get("seq", 1), 2 * tokens)
    routes = [kind.ffn.top_k for kind in eng.model.kinds.values() if isinstance(kind.ffn, Moe)]
    halves = (multiple.get("nope_dim", 1), multiple.get("rope_dim", 1), -(-multiple.get("head_dim", 1) // 2))
    half_head = lcm(2, *halves)
    rows = multiple.get("positions", 1)
    return sizes | {
        "nope_dim": half_head, "rope_dim": half_head, "head_dim": 2 * half_head, "mtp_hidden": sizes["hidden"],
        "kv_seq": sizes["seq"], "positions": -(-(sizes["seq"] + 2) // rows) * rows, "router_experts": sizes["experts"],
        "routes": min([2, *routes]), "capacity": sizes["batch"] * sizes["seq"],
    }  # fmt: skip


def _layouts(programs: Sequence[SegmentProgram], sharded: bool) -> Iterator[Layout]:
    for program in programs:
        for value in program.values.values():
            yield value.layout
        for weight in program.segment.weights:
            if weight.name in program.gradients:
                yield state_path(program, weight, sharded).stored


def _parts(eng: Engine, programs: Sequence[SegmentProgram], chunks: int) -> tuple[Part, ...]:
    """Embedding, layers of every kind in turn over `chunks` pipeline chunks, head."""
    kinds = list(dict.fromkeys(eng.pattern))
    if eng.model.mtp_layers:
        kinds.append(len(programs) - 2)  # a module that predicts a later token is one more layer here
    count = max(2, chunks, len(kinds))
    parts = [Part(name="embedding", program=programs[0], chunk=0)]
    for layer in range(count):
        program = programs[kinds[layer % len(kinds)]]
        parts.append(Part(name=f"layer {layer}", program=program, chunk=layer * chunks // count))
    return (*parts, Part(name="head", program=programs[-1], chunk=chunks - 1))


def _start(parts: Sequence[Part], world: World, optimizer: str, seed: int) -> Start:
    rng = np.random.default_rng(seed)
    sizes = world.sizes
    weights: dict[Key, Array] = {}
    moments: dict[Key, tuple[Array, Array]] = {}
    tied: dict[Key, Key] = {}
    for part in parts:
        for key, weight in weights_of(part).items():
            shape = [sizes[dim] for dim in weight.dims]
            owner = part.program.segment.shares.get(weight.name)
            if owner is not None:
                tied[key] = next(k for other in parts for k in weights_of(other) if k[1] == owner)
                weights[key], moments[key] = weights[tied[key]], moments[tied[key]]
                continue
            weights[key] = rng.normal(1.0, 0.3, shape) if len(shape) == 1 else rng.normal(0.0, 0.5, shape)
            moments[key] = (rng.normal(0.0, 0.1, shape), rng.uniform(0.01, 0.1, shape))
    shape = [sizes["batch"], sizes["seq"]]
    batches = [{name: _ids(rng, shape, sizes["vocab"]) for name in ("tokens", "labels")} for _ in range(MICRO_BATCHES)]
    return Start(weights=weights, moments=moments, batches=batches, optimizer=optimizer, tied=tied)


def _ids(rng: np.random.Generator, shape: Sequence[int], vocab: int) -> Array:
    """Random, but the first sequence falls from the last word to the first: no rank that holds a part of the
    tokens holds the same part of the vocabulary, so that no exchange is needless by chance."""
    ids: Array = rng.integers(0, vocab, shape).astype(np.float64)
    ids[0] = vocab - 1 - np.arange(shape[1]) * vocab // shape[1]
    return ids
