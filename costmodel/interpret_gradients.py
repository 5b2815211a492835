"""What every gradient kernel means. Inputs are (dy, what forward kept …), outputs one gradient per input.

The two gradients of an einsum are einsums, and the gradient of a sum is the identity: neither is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from distplan.costmodel.interpret_kernels import (
    FORWARD,
    SOFTMAX_SCALE,
    Call,
    InterpretError,
    Kernel,
    activation,
    aligned,
    norm_axes,
    normalized,
    positions,
    rotate,
    scores,
    within,
)
from distplan.costmodel.interpret_mesh import Array, Ints
from distplan.costmodel.interpret_scan import SCAN_FORWARD, SCAN_GRADIENTS
from distplan.costmodel.interpret_slots import SLOT_FORWARD, SLOT_GRADIENTS
from distplan.costmodel.layout import Dims


def forward(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Outputs of one forward operator. Raises InterpretError for a kind without a meaning."""
    kernel = FORWARD.get(call.kind) or SLOT_FORWARD.get(call.kind) or SCAN_FORWARD.get(call.kind)
    if kernel is None:
        raise InterpretError(f"operator kind '{call.kind}' has no meaning that could be executed")
    return kernel(call, inputs)


def gradient(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Outputs of one gradient kernel. Raises InterpretError for a kind without a meaning."""
    if call.kind not in GRADIENTS:
        raise InterpretError(f"gradient kernel '{call.kind}' has no meaning that could be executed")
    return GRADIENTS[call.kind](call, inputs)


def _sum_over_others(array: Array, dims: Dims, kept: Dims) -> Array:
    summed: Array = array.sum(axis=tuple(at + 1 for at, dim in enumerate(dims) if dim not in kept))
    return summed


def _same(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (inputs[0],)


def _bias(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (_sum_over_others(inputs[0], call.result, call.out_dims[0]),)


def _activation(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (inputs[0] * activation(call.function, inputs[1])[1],)


def _glu(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, gate, up = inputs
    value, slope = activation(call.function, gate)
    return dy * up * slope, dy * value


def _concat(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Each part's columns, summed over the dims that the part does not have."""
    parts, at = [], 0
    for dims, shape in zip(call.out_dims, call.shapes, strict=True):
        columns = inputs[0][..., at : at + shape[-1]]
        parts.append(_sum_over_others(columns, call.result, (*dims[:-1], call.result[-1])))
        at += shape[-1]
    return tuple(parts)


def _scale(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, x, gate = inputs
    value, slope = activation(call.function, gate)
    dgate = _sum_over_others(dy * x, call.result, call.out_dims[1]) * slope
    return dy * aligned(value, call.out_dims[1], call.result), dgate


def _product(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, a, b = inputs
    return dy * aligned(b, call.out_dims[1], call.result), _sum_over_others(dy * a, call.result, call.out_dims[1])


def _dropout(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (inputs[0] * inputs[1],)


def _norm(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """dx = (dx̂ − mean(dx̂·x̂)·x̂ [− mean(dx̂) for layernorm]) / σ, with dx̂ = dy·weight."""
    dy, x, *weights = inputs
    over = norm_axes(call.result, call.dims[2] if weights else None)
    hat, spread = normalized(call.function, x, over)
    dhat = dy * aligned(weights[0], call.dims[2], call.result) if weights else dy
    dx = dhat - (dhat * hat).mean(axis=over, keepdims=True) * hat
    if call.function == "layernorm":
        dx = dx - dhat.mean(axis=over, keepdims=True)
    parts = [dx * spread]
    for term, dims in zip((dy * hat, dy), call.out_dims[1:], strict=False):
        parts.append(_sum_over_others(term, call.result, dims))
    return tuple(parts)


def _rope(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (rotate(inputs[0], positions(call, 0, "seq", inputs[0].shape[2]), -1.0),)


def _attention(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Flash attention's backward (arXiv 2205.14135, appendix B.4) in one block: inputs dy, q, k, v, out, lse."""
    dy, q, k, v, out, lse, *sinks = inputs
    of_qk = Call(
        kind=call.kind, function="", dims=call.dims, result=call.result, starts=call.starts[1:3],
        causal=call.causal, window=call.window, block=call.block,
    )  # fmt: skip
    p = np.exp(scores(of_qk, q, k) - np.moveaxis(lse, 2, -1)[..., None])
    dv = np.einsum("rbkgst,rbskgh->rbtkh", p, dy)
    dp = np.einsum("rbskgh,rbtkh->rbkgst", dy, v)
    inner = np.einsum("rbskgh,rbskgh->rbkgs", dy, out)
    ds = p * (dp - inner[..., None]) / math.sqrt(q.shape[-1])
    dq = np.einsum("rbkgst,rbtkh->rbskgh", ds, k)
    dk = np.einsum("rbkgst,rbskgh->rbtkh", ds, q)
    if not sinks:
        return dq, dk, dv
    share = np.exp(sinks[0][:, None, :, :, None] - np.moveaxis(lse, 2, -1))
    return dq, dk, dv, -(share * inner).sum(axis=(1, 4))


def _softmax(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, p = inputs
    return (p * (dy - (dy * p).sum(axis=-1, keepdims=True)) * SOFTMAX_SCALE,)


def _scatter(shape: tuple[int, ...], rows: Ints, values: Array) -> Array:
    """Adds values [ranks, n, width] to the rows [ranks, n] of a table of zeros [ranks, *shape]."""
    table = np.zeros((values.shape[0], *shape))
    ranks = np.broadcast_to(np.arange(values.shape[0])[:, None], rows.shape)
    np.add.at(table, (ranks, rows), values)
    return table


def _embedding(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    tokens, dy = inputs
    shape = call.shapes[0]
    rows, held = within(call, tokens, call.out_starts[0]["vocab"], shape[0])
    ranks, width = dy.shape[0], dy.shape[-1]
    values = (dy * held[..., None]).reshape(ranks, -1, width)
    return (_scatter(shape, rows.reshape(ranks, -1), values),)


def _position_embedding(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy = inputs[0].sum(axis=1)
    return (_scatter(call.shapes[0], positions(call, 0, "seq", dy.shape[1]), dy),)


def _cross_entropy(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    logits, top, total, labels = inputs
    share = np.exp(logits - top[..., None]) / total[..., None]
    column, held = within(call, labels, call.starts[0]["vocab"], logits.shape[-1])
    hit = (np.arange(logits.shape[-1]) == column[..., None]) * held[..., None]
    return ((share - hit) * call.scale,)


GRADIENTS: Mapping[str, Kernel] = {
    **SLOT_GRADIENTS,
    **SCAN_GRADIENTS,
    "cast_grad": _same,
    "bias_grad": _bias,
    "activation_grad": _activation,
    "glu_grad": _glu,
    "concat_grad": _concat,
    "scale_grad": _scale,
    "mul_grad": _product,
    "dropout_grad": _dropout,
    "norm_grad": _norm,
    "rope_grad": _rope,
    "attention_grad": _attention,
    "softmax_grad": _softmax,
    "embedding_grad": _embedding,
    "position_embedding_grad": _position_embedding,
    "cross_entropy_grad": _cross_entropy,
}
