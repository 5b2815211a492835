"""Memory-bound work moves the bytes of its dtype: in fp32 twice those of bf16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distplan.costmodel.lower import CATEGORIES, lower
from distplan.costmodel.model_file import load_model
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.tables import LOCAL_KEY, engine
from distplan.costmodel.workload import workload
from distplan.hardware.cluster import load_cluster

LAYER = 1


def layer_bytes(recipe: str, category: str, *, cp: int) -> float:
    """Bytes that one layer's operators of a category move forward: what a device of half the bandwidth takes longer."""
    model = load_model("llama-3.2-1b").model
    job = workload(model, {"precision": recipe}, gpus=8, overrides={"seq_len": 8192, "global_batch": 8})
    eng = engine(model, job, load_cluster("dgx-h100"), load_runtime("torchtitan"))
    kind = "ring" if cp > 1 else "none"
    lowered = lower(eng.program(eng.structure("false", kind, "none")), eng.workload)
    columns = {name: np.ones(1) for name in (*LOCAL_KEY, "gpus")} | {"cp": np.array([cp]), "gpus": np.array([cp])}
    bandwidth = eng.rates.memory_bandwidth
    slow = replace(eng, rates=replace(eng.rates, memory_bandwidth=bandwidth / 2.0))
    fast, half = (each.local_costs(lowered, columns, kind).prices.seconds for each in (eng, slow))
    forward = (0, LAYER, CATEGORIES.index(category))
    chosen = [at for at, w in enumerate(lowered.works) if (w.phase, w.segment, w.category) == forward and w.leader < 0]
    return float(sum(half[at][0] - fast[at][0] for at in chosen) * bandwidth)


def test_rings_partial_outputs_are_merged_in_their_dtype() -> None:
    """Two read and one written, of heads · head_dim, after every step of the ring but the first."""
    tokens, width, cp = 8192 / 4, 2048, 4
    for recipe, element in (("bf16", 2.0), ("fp32", 4.0)):
        merged = layer_bytes(recipe, "attention", cp=cp) - layer_bytes(recipe, "attention", cp=1) / cp
        assert merged == pytest.approx((cp - 1) * 3.0 * element * tokens * width)


def test_the_same_pass_moves_twice_the_bytes_in_fp32() -> None:
    """Rope in torch's eager operators among them: 9 tensors where one kernel moves 2."""
    assert layer_bytes("fp32", "memory_bound", cp=1) > 1.9 * layer_bytes("bf16", "memory_bound", cp=1)
