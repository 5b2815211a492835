"""Legal strategies as jobs for launchers: every row of a few small spaces, with what a search would solve."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

from hypothesis import strategies as st
from small import dense, mixture, workload

from distplan.costmodel.model import Model, Workload
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import for_optimizer, precision, precision_names
from distplan.hardware.cluster import load_cluster
from distplan.planner.constraints import Context
from distplan.planner.launcher import Job
from distplan.planner.space import legal_chunks, space

RUNTIMES = ("megatron", "megatron-fsdp", "deepspeed", "torchtitan", "paddle", "any")


def model(name: str) -> Model:
    return dense(layers=16) if name == "dense" else mixture(8, layers=16)


@cache
def legal(runtime: str, kind: str, gpus: int) -> tuple[Strategy, ...]:
    of = Context(model=model(kind), workload=workload(64), runtime=load_runtime(runtime), gpus=gpus, domain=8)
    bounds = {"micro_batch": (1, 2)}
    return tuple(
        chunk[i]
        for chunk in legal_chunks(space(of, bounds), of, {})
        for i in range(0, len(chunk), 1 + len(chunk) // 400)
    )


def job(
    strategy: Strategy, *, kind: str = "dense", runtime: str = "megatron", layers: int = 0, work: Workload | None = None
) -> Job:
    return Job(
        strategy=strategy,
        model=model(kind),
        workload=work or workload(64),
        runtime=load_runtime(runtime),
        cluster=load_cluster("dgx-h100"),
        recompute_layers=layers,
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    recipe = precision(draw(st.sampled_from(precision_names())))
    optimizer = draw(st.sampled_from(("adamw", "adamw8bit", "sgd")))
    return replace(
        workload(64, draw(st.sampled_from((2048, 4096)))),
        precision=for_optimizer(recipe, optimizer),
        optimizer=optimizer,
        attention=draw(st.sampled_from(("flash", "unfused"))),
        clip_grad=draw(st.booleans()),
        offload_optimizer=draw(st.booleans()),
    )


@st.composite
def jobs(draw: st.DrawFn, kinds: tuple[str, ...] = ("dense", "mixture")) -> Job:
    runtime, kind = draw(st.sampled_from(RUNTIMES)), draw(st.sampled_from(kinds))
    rows = legal(runtime, kind, draw(st.sampled_from((8, 16))))
    strategy = rows[draw(st.integers(0, len(rows) - 1))]
    layers = draw(st.integers(1, 16)) if strategy.recompute == "full" else 0
    return job(strategy, kind=kind, runtime=runtime, layers=layers, work=draw(workloads()))


def sample(runtime: str, count: int, gpus: int = 16) -> list[Job]:
    """Jobs of legal strategies, dense and with experts, drawn once and for all."""
    chosen = []
    for kind in ("dense", "mixture"):
        for row in Random(0).sample(legal(runtime, kind, gpus), count):
            layers = 2 if row.recompute == "full" else 0
            chosen.append(job(row, kind=kind, runtime=runtime, layers=layers))
    return chosen


def named(of: Job) -> str:
    """A test's name for a job."""
    s = of.strategy
    fields = ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "ep", "etp", "sp", "zero", "micro_batch")
    return "-".join(f"{name}{int(getattr(s, name))}" for name in fields) + f"-{s.schedule}-{s.recompute}"
