"""The single-device execution: its gradients are those of finite differences, for every kind of operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from distplan.costmodel.graph import Segment, segments
from distplan.costmodel.interpret_kernels import activation
from distplan.costmodel.interpret_mesh import Array
from distplan.costmodel.interpret_reference import Alone, reference_backward, reference_forward
from distplan.costmodel.interpret_step import LEARNING_RATE, update
from distplan.costmodel.model import LayerKind, LinearAttention, Model, Workload
from distplan.costmodel.model_file import load_model
from distplan.costmodel.workload import workload

STEP, PRECISION = 1e-6, 2e-5
MODELS = ("gpt2", "llama-3.1-8b", "gpt-neox-20b", "gemma-2-9b", "olmo-2-7b", "qwen3-8b", "bloom-176b")
MODELS += ("mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "llama-4-scout", "glm-4.5-air")
SIZES = {
    "batch": 2, "seq": 3, "hidden": 4, "kv_heads": 2, "group": 2, "head_dim": 4, "v_head_dim": 4, "ffn": 3, "vocab": 5,
    "positions": 4, "kv_seq": 3, "latent": 3, "q_latent": 3, "nope_dim": 2, "rope_dim": 2, "experts": 4,
    "router_experts": 4, "routes": 2, "capacity": 6, "expert_ffn": 3, "shared_ffn": 3, "moe_latent": 3, "mtp_hidden": 4,
    "ssm_groups": 2, "ssm_rep": 2, "ssm_dim": 3, "state": 2, "conv_kernel": 3,
}  # fmt: skip
ALONE = Alone(causal=True, window=2, scale=0.25, sizes=SIZES)


def recurrent(kind: str) -> Model:
    """A model of one layer whose mixer is a state-space or linear-attention one."""
    mixer = LinearAttention(kind=kind, heads=4, head_dim=3, state=2, groups=2, conv_kernel=3, conv_bias=True)
    layer = LayerKind(name="layer", mixer=mixer, ffn=None)
    return Model(name=kind, hidden=4, vocab=5, kinds={"layer": layer}, pattern=("layer",), tied_embedding=False)


def cases() -> Iterator[tuple[str, str, bool, Segment]]:
    for name in MODELS:
        for attention, fused in (("flash", True), ("unfused", False)):
            file = load_model(name)
            job: Workload = workload(file.model, file.workload, gpus=1, overrides={"attention": attention})
            model: Model = file.model
            for segment in segments(model, job, fused):
                yield name, attention, fused, segment
    job = workload(load_model("gpt2").model, {}, gpus=1)
    for kind in ("mamba2", "gated_delta_net", "lightning"):
        yield kind, "flash", True, segments(recurrent(kind), job, True)[1]


CASES = {f"{name}-{attention}-{segment.name}": segment for name, attention, _, segment in cases()}


def inputs_of(segment: Segment, rng: np.random.Generator) -> dict[str, Array]:
    given: dict[str, Array] = {w.name: rng.normal(0.5, 0.5, [SIZES[d] for d in w.dims]) for w in segment.weights}
    for name in segment.inputs:
        shape = [SIZES["batch"], SIZES["seq"]]
        if name == "x":
            given[name] = rng.normal(size=[*shape, SIZES["hidden"]])
        else:
            given[name] = rng.integers(0, SIZES["vocab"], shape).astype(float)
    return given


def objective(segment: Segment, given: Mapping[str, Array], dy: Array) -> float:
    return float((reference_forward(segment, given, ALONE)[segment.output] * dy).sum())


@pytest.mark.parametrize("segment", CASES.values(), ids=CASES)
def test_gradients_of_the_reference_are_finite_differences(segment: Segment) -> None:
    rng = np.random.default_rng(5)
    given = inputs_of(segment, rng)
    values = reference_forward(segment, given, ALONE)
    is_loss = segment.operators[-1].kind == "cross_entropy"
    shape = values[segment.output].shape
    dy = np.full(shape, ALONE.scale) if is_loss else rng.normal(size=shape)
    grads = reference_backward(segment, values, None if is_loss else dy, ALONE)
    continuous = [w.name for w in segment.weights] + [n for n in segment.inputs if n == "x"]
    for name in continuous:
        for _ in range(4):
            at = tuple(int(rng.integers(0, size)) for size in given[name].shape)
            ends = []
            for sign in (1.0, -1.0):
                shifted = given[name].copy()
                shifted[at] += sign * STEP
                ends.append(objective(segment, {**given, name: shifted}, dy))
            slope = (ends[0] - ends[1]) / (2.0 * STEP)
            assert grads[name][at] == pytest.approx(slope, rel=PRECISION, abs=PRECISION), name


@pytest.mark.parametrize("name", ["silu", "gelu", "relu", "relu2"])
def test_slopes_of_activations_are_finite_differences(name: str) -> None:
    x = np.linspace(-3.0, 3.0, 41) + 0.013
    slope = (activation(name, x + STEP)[0] - activation(name, x - STEP)[0]) / (2.0 * STEP)
    np.testing.assert_allclose(activation(name, x)[1], slope, atol=1e-8)


def test_activations_have_their_published_values() -> None:
    """gelu(1) = Φ(1) and silu(1) = σ(1)."""
    one = np.ones(1)
    assert activation("gelu", one)[0][0] == pytest.approx(0.8413447460685429, rel=1e-12)
    assert activation("silu", one)[0][0] == pytest.approx(0.7310585786300049, rel=1e-12)
    assert activation("relu2", -one)[0][0] == 0.0


def test_attention_is_causal_and_its_window_counts_the_query_itself() -> None:
    """With a window of 1 every token sees itself only, so the output of attention is its own value."""
    segment = CASES["llama-3.1-8b-flash-layer"]
    attention = next(op for op in segment.operators if op.kind == "attention")
    given = inputs_of(segment, np.random.default_rng(6))
    narrow = [replace(op, window=1) if op is attention else op for op in segment.operators]
    values = reference_forward(replace(segment, operators=tuple(narrow)), given, ALONE)
    own = np.broadcast_to(values[attention.inputs[2]][:, :, :, None], values[attention.output].shape)
    np.testing.assert_allclose(values[attention.output], own)
    whole = reference_forward(segment, given, ALONE)
    np.testing.assert_allclose(whole[attention.output][:, 0], own[:, 0])
    assert not np.allclose(whole[attention.output][:, 1:], own[:, 1:])


def test_adamw_moves_against_the_gradient_and_decays_the_weight() -> None:
    weight, zero = np.array([2.0, -2.0]), np.zeros(2)
    still = update("adamw", weight, zero, (zero, zero), decay=False)
    np.testing.assert_array_equal(still, weight)
    shrunk = update("adamw", weight, zero, (zero, zero), decay=True)
    assert (np.abs(shrunk) < np.abs(weight)).all()
    moved = update("adamw", weight, np.array([1.0, -1.0]), (zero, zero), decay=False)
    assert moved[0] < weight[0] and moved[1] > weight[1]
    sgd = update("sgd", weight, np.array([1.0, -1.0]), (zero, zero), decay=False)
    np.testing.assert_allclose(sgd, weight - LEARNING_RATE * np.array([1.0, -1.0]))
