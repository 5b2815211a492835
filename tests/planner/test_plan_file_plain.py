"""Dataclasses as plain values and back; digests; six digits."""

from __future__ import annotations

import pytest

from distplan.costmodel.model import Attention, LayerKind, LinearAttention, Mlp, Model, Moe, Precision, Workload
from distplan.hardware.documents import Document
from distplan.hardware.errors import DocumentError
from distplan.planner.plain import build, digest, plain, rounded

KINDS = {
    "dense": LayerKind(
        name="dense",
        mixer=Attention(heads=8, kv_heads=2, head_dim=16, v_head_dim=16, window=128),
        ffn=Mlp(ffn=512, gated=True),
    ),
    "mamba": LayerKind(
        name="mamba", mixer=LinearAttention(kind="mamba2", heads=4, head_dim=16, state=64, groups=1), ffn=None
    ),
    "moe": LayerKind(name="moe", mixer=None, ffn=Moe(experts=8, top_k=2, ffn=64, capacity_factor=1.25)),
}
MODEL = Model(
    name="mixed",
    hidden=128,
    vocab=1000,
    kinds=KINDS,
    pattern=("dense", "mamba", "moe", "dense"),
    tied_embedding=False,
    placements={"layer.mlp.up.weight": {"tp": "shard(1)"}},
)
BF16 = Precision(
    name="bf16",
    compute="bf16",
    parameters="bf16",
    gradients="fp32",
    master="fp32",
    moments=("fp32", "fp32"),
    matmul="bf16",
)
WORKLOAD = Workload(seq_len=4096, global_batch=256, precision=BF16)


def as_document(value: object) -> Document:
    return Document(file="strategy.yaml", value=value, lines={(): 1, ("hidden",): 7})


@pytest.mark.parametrize("value", [MODEL, WORKLOAD, BF16], ids=lambda value: type(value).__name__)
def test_build_undoes_plain(value: Model | Workload | Precision) -> None:
    assert build(type(value), as_document(plain(value))) == value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden": "wide"}, "strategy.yaml:7: hidden: expected a whole number"),
        ({"hidden": 0}, "hidden: 0 is too small"),
        ({"hidden": -5}, "too small"),
        ({"hiden": 5}, "did you mean hidden"),
        ({"tied_embedding": "yes"}, "true or false"),
        ({"pattern": "dense"}, "a list"),
        ({"pattern": [1]}, "text"),
        ({"kinds": {"dense": {"type": "LayerKind", "name": "x", "mixer": {"type": "Atention"}}}}, "Attention"),
    ],
)
def test_a_wrong_value_is_refused_where_it_stands(change: dict[str, object], says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        build(Model, as_document(plain(MODEL) | change))


def test_a_missing_key_is_named() -> None:
    values = plain(MODEL)
    del values["vocab"]
    with pytest.raises(DocumentError, match="'vocab' is missing"):
        build(Model, as_document(values))


def test_floats_keep_six_digits_and_nothing_that_json_lacks() -> None:
    assert rounded({"a": [1234567.0, 0.1234567], "b": 12345678, "c": float("inf"), "d": float("nan")}) == {
        "a": [1234570.0, 0.123457],
        "b": 12345678,
        "c": None,
        "d": None,
    }


def test_a_digest_sees_content_and_not_order() -> None:
    assert digest({"a": 1, "b": 2.0}) == digest({"b": 2.0, "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert digest(MODEL) != digest(WORKLOAD)
