"""Every stage of a strategy adds up to what the estimate says of the worst, and its step to the step time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from distplan.costmodel.by_stage import kept_by_chunk, memory_by_stage, traffic_by_chunk
from distplan.costmodel.case import case_of
from distplan.costmodel.estimate import estimate
from distplan.costmodel.lower import PHASES
from distplan.costmodel.model_file import load_model
from distplan.costmodel.replay import simulate_plan
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.schedules import build_schedule
from distplan.costmodel.stages import chunks_of, stage_of
from distplan.costmodel.step_timeline import step_timeline
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster

CASES = {
    "1f1b": ("llama-3.1-8b", "megatron", Strategy(tp=2, pp=4, dp_shard=2, sp=True)),
    "interleaved": ("llama-3.1-8b", "megatron", Strategy(tp=2, pp=2, vpp=4, dp_shard=2, schedule="interleaved")),
    "f_then_b": ("llama-3.1-8b", "paddle", Strategy(pp=4, dp_shard=4, schedule="f_then_b", recompute="full")),
    "no pipeline": ("llama-3.1-8b", "torchtitan", Strategy(dp_shard=16, zero=3)),
    "zero 3": ("llama-3.1-8b", "torchtitan", Strategy(pp=2, dp_shard=8, zero=3, recompute="selective")),
    "experts": ("qwen3-30b-a3b", "megatron", Strategy(pp=2, dp_shard=8, ep=8)),
    "zb_h1": ("llama-3.1-8b", "paddle", Strategy(pp=4, dp_shard=4, schedule="zb_h1")),
    "zb_v": ("llama-3.1-8b", "torchtitan", Strategy(pp=2, vpp=2, dp_shard=8, zero=2, schedule="zb_v")),
    "tied": ("gemma-2-9b", "megatron", Strategy(tp=2, pp=2, cp=2, cp_kind="ring", dp_shard=2)),
}


def priced(name: str):  # type: ignore[no-untyped-def]
    model_name, runtime_name, strategy = CASES[name]
    model, runtime, cluster = load_model(model_name).model, load_runtime(runtime_name), load_cluster("dgx-h100")
    job = workload(model, {}, gpus=strategy.gpus, overrides={"seq_len": 4096, "global_batch": 128})
    whole = (model, job, cluster, runtime, strategy)
    return whole, estimate(*whole, detail=True)


@pytest.mark.parametrize("name", CASES)
def test_the_fullest_stage_is_the_estimates(name: str) -> None:
    whole, found = priced(name)
    stages = memory_by_stage(case_of(*whole, found))
    assert len(stages) == whole[-1].pp
    assert max(stage.device_bytes for stage in stages) == found.device_bytes[0]
    worst = stages[int(found.worst_stage[0])]
    assert worst.device_bytes == found.device_bytes[0]
    assert worst.parts == {part: float(column[0]) for part, column in found.memory.items()}
    for stage in stages:
        assert sum(stage.parts.values()) == pytest.approx(stage.device_bytes, rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_timeline_ends_with_the_step(name: str) -> None:
    whole, found = priced(name)
    step = step_timeline(*whole, found)
    seconds = simulate_plan(*whole, found) or float(found.step_seconds[0])
    assert step.shown == step.micro_batches
    assert step.seconds == pytest.approx(seconds, rel=1e-9)
    assert max(box.end for box in step.boxes) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_stage_does_one_thing_at_a_time(name: str) -> None:
    whole, found = priced(name)
    step = step_timeline(*whole, found)
    strategy = whole[-1]
    for stage in range(strategy.pp):
        computed = [box for box in step.boxes if (box.stage, box.lane) == (stage, "compute")]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(computed))
        assert [box.name for box in computed][-1] == "optimizer"
        numbered = [box for box in computed if box.micro_batch >= 0 and box.name[0] != "W"]
        assert len(numbered) == 2 * step.micro_batches * strategy.vpp
    assert all(0.0 <= box.start < box.end for box in step.boxes)


@pytest.mark.parametrize("name", ["1f1b", "no pipeline", "zero 3", "experts", "tied", "zb_h1"])
def test_what_is_held_stays_below_the_stages_peak(name: str) -> None:
    whole, found = priced(name)
    step, stages = step_timeline(*whole, found), memory_by_stage(case_of(*whole, found))
    for course, stage in zip(step.memory, stages, strict=True):
        kept = stage.parts["activations"]
        base = course[0][1]
        assert max(held for _, held in course) == pytest.approx(base + kept, rel=1e-9) or stage.phase != "backward"
        assert max(held for _, held in course) <= stage.device_bytes * (1 + 1e-9)
        assert course[-1][1] == pytest.approx(base, rel=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "experts", "tied"])
def test_traffic_of_the_critical_stage_is_the_table_of_collectives(name: str) -> None:
    whole, found = priced(name)
    chunks = traffic_by_chunk(case_of(*whole, found))
    of_weights = ("gradients", "parameters")
    local = [
        row for row in found.communication
        if row.phase in PHASES and row.name not in of_weights and row.axis.split("+")[0] in ("tp", "cp", "ep")
    ]  # fmt: skip
    listed = sum(float(row.seconds[0]) for row in local)
    _, _, cluster, runtime, _ = whole
    often = float(found.num_micro_batches[0]) * runtime.factor(cluster.accelerator.generation)
    sums = [sum(item.seconds for item in chunk if item.axis != "dp") * often for chunk in chunks]
    assert listed > 0.0
    assert any(np.isclose(total, listed, rtol=1e-9) for total in sums)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_chunks_keep_together_what_their_stage_keeps(layers: int) -> None:
    """Layers are recomputed by the stage, whichever of its chunks they are in."""
    (model, job, cluster, runtime, strategy), _ = priced("interleaved")
    again = replace(strategy, recompute="full", recompute_layers=layers)
    found = estimate(model, job, cluster, runtime, again, detail=True)
    case = case_of(model, job, cluster, runtime, again, found)
    kept = kept_by_chunk(case)
    for stage in case.stages():
        acts, share = case.acts(stage.content), layers / (model.layers / again.pp)
        held = chunks_of(stage.first, again.pp, again.vpp, again.schedule)
        whole = float(acts.kept[0] - share * (acts.kept[0] - acts.least[0]))
        assert sum(kept[chunk] for chunk in held) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("schedule, vpp", [("1f1b", 1), ("interleaved", 3), ("zb_v", 2)])
def test_every_chunk_lies_where_the_schedules_jobs_are(schedule: str, vpp: int) -> None:
    jobs = build_schedule(schedule, stages=4, micro_batches=8, chunks=vpp)
    for number, (stage, chunk) in enumerate(jobs.places()):
        assert chunks_of(stage, 4, vpp, schedule)[chunk] == number
        assert stage_of(number, 4, schedule) == stage


def test_of_very_many_micro_batches_the_first_are_shown() -> None:
    whole, found = priced("1f1b")
    step = step_timeline(*whole, found, max_jobs=200)
    assert step.shown == 24
    assert step.micro_batches == 64


@pytest.mark.parametrize(("micro_batches", "shown"), [(16, 16), (15, 15), (13, 12), (3, 3)])
def test_interleaved_takes_the_job_lists_that_there_are(micro_batches: int, shown: int) -> None:
    """16: Megatron's rounds of pp; 15 and 3: PyTorch's; 13 has none, and a step of 12 is shown."""
    (model, job, cluster, *_), _ = priced("interleaved")
    runtime = load_runtime("any")
    strategy = Strategy(pp=4, vpp=2, schedule="interleaved")
    job = replace(job, global_batch=micro_batches)
    found = estimate(model, job, cluster, runtime, strategy, detail=True)
    step = step_timeline(model, job, cluster, runtime, strategy, found)
    assert (step.shown, step.micro_batches) == (shown, micro_batches)
