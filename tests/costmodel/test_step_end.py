"""What a step has once: clipping, offloading and reduction move the bytes of the recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distplan.costmodel.estimate import estimate
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster
from distplan.hardware.rates import memory_seconds, pcie_seconds, rates_for

H100 = load_cluster("dgx-h100")
RATES = rates_for(H100.accelerator)


@pytest.mark.parametrize(
    "recipe, gradient, parameter",
    [("bf16", 4.0, 2.0), ("bf16-grads", 2.0, 2.0), ("bf16-sharded", 4.0, 4.0), ("fp32", 4.0, 4.0)],
)
def test_clipping_reads_and_offloading_sends_the_bytes_of_the_recipe(
    recipe: str, gradient: float, parameter: float
) -> None:
    """Clipping reads every gradient; ZeRO-Offload sends gradients down and parameters up (Ren et al. 2021)."""
    model, runtime = load_model("gpt2").model, load_runtime("megatron")
    job = workload(model, {"precision": recipe}, gpus=1, overrides={"seq_len": 1024, "global_batch": 8})

    def update(**options: bool) -> tuple[float, float]:
        found = estimate(model, replace(job, **options), H100, runtime, Strategy(), detail=True)
        return float(found.time["optimizer"][0]), float(found.memory["gradients"][0]) / gradient

    plain, elements = update(clip_grad=False)
    assert update(clip_grad=True)[0] - plain == pytest.approx(float(memory_seconds(RATES, elements * gradient)))
    sent = float(pcie_seconds(RATES, elements * (gradient + parameter)))
    assert update(clip_grad=False, offload_optimizer=True)[0] - plain == pytest.approx(sent)
