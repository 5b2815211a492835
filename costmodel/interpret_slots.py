"""What the operators of a mixture of experts mean: routing, slots, experts' activation.

Every rank holds as many slots per expert as it has tokens, in the order of its tokens: slot t of
expert e holds token t if the token goes there, and zeros if not. Nothing is ever dropped, so that
the result does not depend on how tokens lie on ranks. A route is one number: the expert's index in
front of the point, its probability (below 1) behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distplan.costmodel.interpret_kernels import Call, Kernel, activation, aligned
from distplan.costmodel.interpret_mesh import Array, Ints


def _probabilities(scores: Array) -> Array:
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share: Array = weight / weight.sum(axis=-1, keepdims=True)
    return share


def _chosen(scores: Array, count: int) -> Ints:
    """[…, count]: experts by falling score."""
    order: Ints = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    return order


def _route(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    experts = _chosen(inputs[0], call.shapes[0][-1])
    return (experts + np.take_along_axis(_probabilities(inputs[0]), experts, axis=-1),)


def _route_grad(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, scores = inputs
    share = _probabilities(scores)
    dshare = np.zeros_like(scores)
    np.put_along_axis(dshare, _chosen(scores, dy.shape[-1]), dy, axis=-1)
    return (share * (dshare - (dshare * share).sum(axis=-1, keepdims=True)),)


def _slots(routes: Array, experts: int, values: Array) -> Array:
    """[ranks, experts, tokens]: `values` [ranks, batch, seq, routes] of the token's routes, 0 elsewhere."""
    hit = np.floor(routes)[..., None] == np.arange(experts)
    by_token = (hit * values[..., None]).sum(axis=-2)
    return np.moveaxis(by_token.reshape(by_token.shape[0], -1, experts), 1, 2)


def _tokens(x: Array) -> Array:
    return x.reshape(x.shape[0], 1, -1, x.shape[-1])


def _dispatch(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    x, routes = inputs
    return (_slots(routes, call.shapes[0][0], np.ones_like(routes))[..., None] * _tokens(x),)


def _dispatch_grad(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, routes = inputs
    dx = (_slots(routes, dy.shape[1], np.ones_like(routes))[..., None] * dy).sum(axis=1)
    return (dx.reshape(dx.shape[0], *call.shapes[0]),)


def _combine(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return _dispatch_grad(call, inputs)


def _combine_grad(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return _dispatch(call, inputs)


def _weights(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    routes = inputs[0]
    return (_slots(routes, call.shapes[0][0], routes - np.floor(routes)),)


def _weights_grad(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, routes = inputs
    by_token = np.moveaxis(dy, 1, 2).reshape(*routes.shape[:-1], dy.shape[1])
    return (np.take_along_axis(by_token, np.floor(routes).astype(np.int64), axis=-1),)


def _weighted_glu(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """act(gate) · up · weight, or act(up) · weight without a gate."""
    value = activation(call.function, inputs[0])[0] * aligned(inputs[-1], call.dims[-1], call.result)
    return (value * inputs[1] if len(inputs) > 2 else value,)


def _weighted_glu_grad(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, first, *up, weight = inputs
    value, slope = activation(call.function, first)
    by_weight = dy * aligned(weight, call.out_dims[-1], call.result)
    if not up:
        return by_weight * slope, (dy * value).sum(axis=-1)
    return by_weight * slope * up[0], by_weight * value, (dy * value * up[0]).sum(axis=-1)


SLOT_FORWARD: Mapping[str, Kernel] = {
    "route": _route,
    "dispatch": _dispatch,
    "dispatch_weights": _weights,
    "weighted_glu": _weighted_glu,
    "combine": _combine,
}
SLOT_GRADIENTS: Mapping[str, Kernel] = {
    "route_grad": _route_grad,
    "dispatch_grad": _dispatch_grad,
    "dispatch_weights_grad": _weights_grad,
    "weighted_glu_grad": _weighted_glu_grad,
    "combine_grad": _combine_grad,
}
