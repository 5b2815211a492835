"""What every kind of operator means, on float64 arrays: forward. (Backward: interpret_gradients.py.)

Arrays are stacks, [ranks, local dims …]; a kernel sees of other ranks nothing, and of the whole
tensor only where its own block begins (`Call.starts`). On one rank the same functions are the
single-device execution. Dropout keeps everything; scores are scaled by 1/sqrt(head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_letters

import numpy as np
from scipy.special import erf

from distplan.costmodel.interpret_mesh import Array, Ints
from distplan.costmodel.layout import Dims
from distplan.hardware.errors import DistplanError

EPSILON = 1e-5
ROPE_BASE = 10.0
"""small, so that a few positions already turn every pair by an angle of its own"""
SOFTMAX_SCALE = 0.5
"""unfused attention scales its scores in the softmax, which does not see head_dim"""


class InterpretError(DistplanError):
    """A node cannot be executed: its kind has no meaning here, or it reads what is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator: how it reads its inputs. `starts[i]` are the first indices of input i's block."""

    kind: str
    function: str
    dims: tuple[Dims, ...]
    result: Dims
    starts: tuple[Mapping[str, Ints], ...]
    causal: bool = True
    window: int = 0
    block: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    """local shapes of the outputs, where a kernel cannot see them in its inputs (gradients of tables)"""
    out_dims: tuple[Dims, ...] = ()
    out_starts: tuple[Mapping[str, Ints], ...] = field(default=())
    scale: float = 1.0
    """of the loss: one over the tokens of the whole batch"""


Kernel = Callable[[Call, Sequence[Array]], tuple[Array, ...]]


def einsum(operands: Sequence[Array], dims: Sequence[Dims], result: Dims) -> Array:
    """A product summed over the dims that `result` lacks, on every rank by itself."""
    names = dict.fromkeys(dim for each in (*dims, result) for dim in each)
    letter = dict(zip(names, ascii_letters[1:], strict=False))
    terms = ",".join("a" + "".join(letter[d] for d in each) for each in dims)
    product: Array = np.einsum(f"{terms}->a{''.join(letter[d] for d in result)}", *operands)
    return product


def _einsum(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (einsum(inputs, call.dims, call.result),)


def aligned(array: Array, dims: Dims, result: Dims) -> Array:
    """`array` with a dim of one for every dim of `result` that it lacks (its dims are in that order)."""
    shape = iter(array.shape[1:])
    return array.reshape(array.shape[0], *(next(shape) if dim in dims else 1 for dim in result))


def _sum(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    total = inputs[0]
    for array, dims in zip(inputs[1:], call.dims[1:], strict=True):
        total = total + aligned(array, dims, call.result)
    return (total,)


def _product(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (inputs[0] * aligned(inputs[1], call.dims[1], call.result),)


def _same(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (inputs[0],)


def _dropout(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return inputs[0], np.ones_like(inputs[0])


def activation(name: str, x: Array) -> tuple[Array, Array]:
    """(value, slope). gelu is the exact one, x·Φ(x); relu2 is max(0, x)²."""
    if name == "silu":
        gate = 1.0 / (1.0 + np.exp(-x))
        return x * gate, gate * (1.0 + x * (1.0 - gate))
    if name == "gelu":
        share = 0.5 * (1.0 + erf(x / math.sqrt(2.0)))
        return x * share, share + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    if name == "sigmoid":
        gate = 1.0 / (1.0 + np.exp(-x))
        return gate, gate * (1.0 - gate)
    if name == "tanh":
        value = np.tanh(x)
        return value, 1.0 - value * value
    if name == "relu":
        return np.maximum(x, 0.0), (x > 0.0).astype(np.float64)
    if name == "relu2":
        return np.maximum(x, 0.0) ** 2, 2.0 * np.maximum(x, 0.0)
    raise InterpretError(f"activation '{name}' has no meaning that could be executed")


def _activation(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (activation(call.function, inputs[0])[0],)


def _glu(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (activation(call.function, inputs[0])[0] * inputs[1],)


def normalized(function: str, x: Array, over: tuple[int, ...]) -> tuple[Array, Array]:
    """(x̂, 1/σ) of a layernorm, or of an rmsnorm, which does not subtract the mean."""
    centred = x - x.mean(axis=over, keepdims=True) if function == "layernorm" else x
    spread = 1.0 / np.sqrt((centred * centred).mean(axis=over, keepdims=True) + EPSILON)
    return centred * spread, spread


def norm_axes(result: Dims, weight: Dims | None) -> tuple[int, ...]:
    """Positions (behind the ranks) of the dims that a norm runs over: its weight's, or the last one."""
    over = weight or result[-1:]
    return tuple(result.index(dim) + 1 for dim in over)


def _concat(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Along the last dim; a part without some of the other dims is repeated over them."""
    spread = np.broadcast_shapes(*((*_leading(x, d, call.result),) for x, d in zip(inputs, call.dims, strict=True)))
    parts = [
        np.broadcast_to(aligned(x, (*d[:-1], call.result[-1]), call.result), (*spread, x.shape[-1]))
        for x, d in zip(inputs, call.dims, strict=True)
    ]
    return (np.concatenate(parts, axis=-1),)


def _leading(x: Array, dims: Dims, result: Dims) -> tuple[int, ...]:
    return aligned(x, (*dims[:-1], result[-1]), result).shape[:-1]


def _scale(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (inputs[0] * aligned(activation(call.function, inputs[1])[0], call.dims[1], call.result),)


def _norm(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    over = norm_axes(call.result, call.dims[1] if len(inputs) > 1 else None)
    y = normalized(call.function, inputs[0], over)[0]
    if len(inputs) > 1:
        y = y * aligned(inputs[1], call.dims[1], call.result)
    if len(inputs) > 2:
        y = y + aligned(inputs[2], call.dims[2], call.result)
    return (y,)


def positions(call: Call, index: int, dim: str, size: int) -> Ints:
    """[ranks, size]: indices of input `index` along `dim` in the whole tensor."""
    return call.starts[index][dim][:, None] + np.arange(size)[None, :]


def rotate(x: Array, at: Ints, sign: float) -> Array:
    """Rotary embedding (arXiv 2104.09864): the two halves of head_dim are turned against each other.

    x is [ranks, batch, seq, heads …, head_dim], `at` [ranks, seq].
    """
    half = x.shape[-1] // 2
    angle = at[:, :, None] * ROPE_BASE ** (-np.arange(half) / half)
    angle = angle.reshape(angle.shape[0], 1, angle.shape[1], *(1,) * (x.ndim - 4), half)
    cos, sin = np.cos(angle), sign * np.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _rope(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return (rotate(inputs[0], positions(call, 0, "seq", inputs[0].shape[2]), 1.0),)


def hidden_from(call: Call, at: Ints, seen: Ints) -> Array:
    """[ranks, queries, keys]: 0 where a query sees a key, −inf elsewhere."""
    distance = at[:, :, None] - seen[:, None, :]
    open_ = np.ones_like(distance, dtype=bool)
    if call.causal:
        open_ &= distance >= 0
    if call.window:
        open_ &= np.abs(distance) < call.window
    if call.block:
        open_ &= at[:, :, None] // call.block == seen[:, None, :] // call.block
    return np.where(open_, 0.0, -np.inf)


def scores(call: Call, q: Array, k: Array) -> Array:
    """[ranks, batch, kv_heads, group, seq, kv_seq], scaled and masked."""
    mask = hidden_from(call, positions(call, 0, "seq", q.shape[2]), positions(call, 1, "kv_seq", k.shape[2]))
    raw: Array = np.einsum("rbskgh,rbtkh->rbkgst", q, k) / math.sqrt(q.shape[-1])
    return raw + mask[:, None, None, None]


def _attention(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    s = scores(call, inputs[0], inputs[1])
    if len(inputs) > 3:  # a sink is one more score, which no value belongs to
        sink = np.broadcast_to(inputs[3][:, None, :, :, None, None], (*s.shape[:-1], 1))
        top = np.maximum(s.max(axis=-1, keepdims=True), sink)
        lse = np.log(np.exp(s - top).sum(axis=-1) + np.exp(sink - top)[..., 0]) + top[..., 0]
    else:
        top = s.max(axis=-1, keepdims=True)
        lse = np.log(np.exp(s - top).sum(axis=-1)) + top[..., 0]
    out = np.einsum("rbkgst,rbtkh->rbskgh", np.exp(s - lse[..., None]), inputs[2])
    return out, np.moveaxis(lse, -1, 2)


def _softmax(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    s = inputs[0]
    mask = hidden_from(call, positions(call, 0, "seq", s.shape[-2]), positions(call, 0, "kv_seq", s.shape[-1]))
    s = s * SOFTMAX_SCALE + mask[:, None, None, None]
    weight = np.exp(s - s.max(axis=-1, keepdims=True))
    return (weight / weight.sum(axis=-1, keepdims=True),)


def within(call: Call, ids: Array, at: Ints, size: int) -> tuple[Ints, Array]:
    """(row of the local block, 1 where it is held here) of every id."""
    local = ids.astype(np.int64) - at.reshape(-1, *(1,) * (ids.ndim - 1))
    held = (local >= 0) & (local < size)
    return np.where(held, local, 0), held.astype(np.float64)


def _ranks(ids: Ints) -> Ints:
    return np.arange(ids.shape[0]).reshape(-1, *(1,) * (ids.ndim - 1))


def _embedding(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Rows that other ranks hold read as zero, so that the sum over a sharded vocabulary is the lookup."""
    rows, held = within(call, inputs[0], call.starts[1]["vocab"], inputs[1].shape[1])
    return (inputs[1][_ranks(rows), rows] * held[..., None],)


def _position_embedding(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    at = positions(call, 0, "seq", inputs[0].shape[2])
    return (inputs[0] + inputs[1][_ranks(at), at][:, None],)


def _reduce(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    if call.function == "max":
        return (inputs[0].max(axis=-1),)
    return (np.exp(inputs[0] - inputs[1][..., None]).sum(axis=-1),)


def _pick(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """The label's logit; zero where another rank holds it."""
    column, held = within(call, inputs[1], call.starts[0]["vocab"], inputs[0].shape[-1])
    return (np.take_along_axis(inputs[0], column[..., None], axis=-1)[..., 0] * held,)


def _cross_entropy(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    _, top, total, target, _ = inputs
    return (np.log(total) + top - target,)


FORWARD: Mapping[str, Kernel] = {
    "einsum": _einsum,
    "add": _sum,
    "bias": _sum,
    "mul": _product,
    "cast": _same,
    "dropout": _dropout,
    "activation": _activation,
    "glu": _glu,
    "concat": _concat,
    "scale": _scale,
    "norm": _norm,
    "rope": _rope,
    "attention": _attention,
    "softmax": _softmax,
    "embedding": _embedding,
    "position_embedding": _position_embedding,
    "reduce": _reduce,
    "pick": _pick,
    "cross_entropy": _cross_entropy,
}
