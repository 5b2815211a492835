"""What a stage holds in each phase of a step, from the terms that the estimate is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distplan.costmodel.case import Case, case_of
from distplan.costmodel.estimate import PHASES, estimate
from distplan.costmodel.memory_phases import host_memory, memory_phases
from distplan.costmodel.model import DTYPE_BYTES
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import list_runtimes, load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import precision, workload
from distplan.hardware.cluster import load_cluster

SHAPES = {
    "megatron": Strategy(tp=2, sp=True, pp=2, dp_shard=2, zero=1),
    "megatron, recomputed": Strategy(tp=2, sp=True, pp=2, dp_shard=2, zero=1, recompute="full", recompute_layers=99),
    "deepspeed": Strategy(pp=2, dp_shard=4, zero=1),
    "torchtitan": Strategy(dp_shard=8, zero=3, recompute="selective"),
    "fsdp1": Strategy(dp_shard=8, zero=3),
}


def priced(name: str, **changes: object) -> Case:
    model, runtime = load_model("llama-3.1-8b").model, load_runtime(name.partition(",")[0])
    strategy = replace(SHAPES[name], **changes)  # type: ignore[arg-type]
    batch = {"seq_len": 4096, "global_batch": 4 * strategy.dp_shard}
    job = workload(model, {}, gpus=strategy.gpus, overrides=batch)
    if strategy.zero == 3:
        job = replace(job, precision=precision("bf16-sharded"))
    whole = (model, job, load_cluster("dgx-h100"), runtime, strategy)
    return case_of(*whole, estimate(*whole, detail=True))


@pytest.mark.parametrize("name", SHAPES)
def test_the_worst_phase_is_the_estimates_and_no_other_is_larger(name: str) -> None:
    case = priced(name)
    found = {phase.phase: phase for phase in memory_phases(case, int(case.estimate.worst_stage[0]))}
    worst = PHASES[int(case.estimate.worst_phase[0])]
    assert found[worst].device_bytes == case.estimate.device_bytes[0]
    assert max(phase.device_bytes for phase in found.values()) == found[worst].device_bytes
    for phase in found.values():
        assert sum(phase.parts.values()) == pytest.approx(phase.device_bytes, rel=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_a_forward_pass_holds_no_more_than_its_backward(name: str) -> None:
    case = priced(name)
    for stage in range(case.strategy.pp):
        found = {phase.phase: phase for phase in memory_phases(case, stage)}
        assert found["forward peak"].device_bytes <= found["backward"].device_bytes
        assert found["forward peak"].parts["activations"] == found["backward"].parts["activations"]
        assert ("loss" in found) == (stage == case.strategy.pp - 1)


def test_a_recomputed_layer_makes_in_forward_what_it_does_not_keep() -> None:
    """Without autograd's references its values live only until the next operator has read them."""
    kept, made_again = (memory_phases(priced(name), 0) for name in ("megatron", "megatron, recomputed"))
    forward = [{phase.phase: phase for phase in phases}["forward peak"].parts for phases in (kept, made_again)]
    assert forward[1]["activations"] < forward[0]["activations"]
    assert forward[1]["temporaries"] > forward[0]["temporaries"]


def test_megatron_copies_parameters_into_buffers_that_gradients_have_too() -> None:
    """param_and_grad_buffer.py: bf16 parameters twice and fp32 gradients, before any optimizer state."""
    case = priced("megatron")
    init = memory_phases(case, 0)[0]
    states = case.states(case.stages()[0].content)
    elements = float(states.parameters[0]) / DTYPE_BYTES["bf16"]
    assert init.phase == "init and load" and "optimizer" not in init.parts
    assert init.parts["temporaries"] == init.parts["parameters"] == 2.0 * elements
    assert init.device_bytes == pytest.approx(8.0 * elements + case.eng.runtime.context_bytes)


def test_initialisation_is_the_worst_phase_of_a_step_that_keeps_little() -> None:
    """Every layer recomputed, the states over 512 ranks: copies of the parameters are more than what follows."""
    case = priced("megatron, recomputed", tp=1, sp=False, pp=1, dp_shard=512)
    short = replace(case.eng.workload, seq_len=128)
    whole = (case.eng.model, short, case.eng.cluster, case.eng.runtime, case.strategy)
    found = estimate(*whole, detail=True)
    assert PHASES[int(found.worst_phase[0])] == "init and load"
    assert sum(float(part[0]) for part in found.memory.values()) == pytest.approx(float(found.device_bytes[0]))
    phases = memory_phases(case_of(*whole, found), 0)
    assert phases[0].device_bytes == found.device_bytes[0]


def test_a_rank_reads_its_shard_or_its_stage_or_the_model() -> None:
    """Llama 3.1 8B has 8.03e9 parameters: FSDP1 builds all in fp32; torchtitan reads an eighth of 12 bytes each."""
    fsdp, titan = host_memory(priced("fsdp1"), 0), host_memory(priced("torchtitan"), 0)
    assert fsdp.load_bytes == pytest.approx(8.03e9 * 4.0, rel=1e-3)
    assert titan.load_bytes == pytest.approx(8.03e9 * 12.0 / 8.0, rel=1e-2)
    case = priced("deepspeed")
    assert host_memory(case, 0).load_bytes == 2.0 * float(case.states(case.stages()[0].content).parameters[0])
    assert host_memory(case, 0).offload_bytes == 0.0


@pytest.mark.parametrize("name", list_runtimes())
def test_a_runtime_says_where_its_way_of_loading_is_from(name: str) -> None:
    runtime = load_runtime(name)
    for field in ("init", "init_optimizer", "load_host", "step_contiguous", "norm_copy", "wide_gradients_cast"):
        assert runtime.provenance[f"state.{field}"]
