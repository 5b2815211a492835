"""What the operators of state-space and linear-attention mixers mean: convolution, scan, gated norm.

The scan is the recurrence itself, token by token; chunking is how kernels compute it. Shapes:
values [ranks, batch, seq, groups, rep, dim], keys and queries [ranks, batch, seq, groups, state],
steps [ranks, batch, seq, groups, rep], weights [ranks, groups, rep].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distplan.costmodel.interpret_kernels import Call, InterpretError, Kernel, activation, aligned, normalized
from distplan.costmodel.interpret_mesh import Array

LIGHTNING_DECAY = 0.9
"""lightning attention's per-head constant; any value below 1 does"""


def _sigmoid(x: Array) -> Array:
    return activation("sigmoid", x)[0]


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def _shifted(x: Array, by: int) -> Array:
    """x as it was `by` tokens before; zeros before the first. A negative `by` looks ahead."""
    moved = np.zeros_like(x)
    if by > 0:
        moved[:, :, by:] = x[:, :, : x.shape[2] - by]
    elif by < 0:
        moved[:, :, :by] = x[:, :, -by:]
    else:
        moved[:] = x
    return moved


def _taps(weight: Array) -> list[Array]:
    """Weights of the token `by` tokens before, by = 0, 1, …, ready to multiply [ranks, batch, seq, channels …]."""
    count = weight.shape[-1]
    return [weight[..., count - 1 - by][:, None, None] for by in range(count)]


def _filtered(inputs: Sequence[Array]) -> Array:
    y: Array = sum((tap * _shifted(inputs[0], by) for by, tap in enumerate(_taps(inputs[1]))), np.zeros(()))
    return y + inputs[2][:, None, None] if len(inputs) > 2 else y


def _conv(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """A causal convolution of every channel over the tokens, then the activation."""
    return (activation(call.function, _filtered(inputs))[0],)


def _conv_grad(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, x, weight, *bias = inputs
    du = dy * activation(call.function, _filtered([x, weight, *bias]))[1]
    taps = _taps(weight)
    dx: Array = sum((tap * _shifted(du, -by) for by, tap in enumerate(taps)), np.zeros(()))
    dw = np.stack([(du * _shifted(x, by)).sum(axis=(1, 2)) for by in range(len(taps))][::-1], axis=-1)
    return (dx, dw, du.sum(axis=(1, 2)))[: len(call.out_dims)]


def _over(call: Call, dims: Sequence[str]) -> tuple[int, ...]:
    """A gated norm runs over its weight's dims within a group (Mamba-2's RMSNormGated, group_size)."""
    return tuple(call.result.index(dim) + 1 for dim in dims if dim != "ssm_groups")


def _gated_norm(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    y, gate, weight = inputs
    hat = normalized(call.function, y, _over(call, call.dims[2]))[0]
    return (hat * aligned(weight, call.dims[2], call.result) * activation("silu", gate)[0],)


def _gated_norm_grad(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, y, gate, weight = inputs
    dims = call.dims[3]
    over = _over(call, dims)
    hat, spread = normalized(call.function, y, over)
    scale, (value, slope) = aligned(weight, dims, call.result), activation("silu", gate)
    dhat = dy * scale * value
    dx = dhat - (dhat * hat).mean(axis=over, keepdims=True) * hat
    if call.function == "layernorm":
        dx = dx - dhat.mean(axis=over, keepdims=True)
    others = tuple(at + 1 for at, dim in enumerate(call.result) if dim not in dims)
    return dx * spread, dy * hat * scale * slope, (dy * hat * value).sum(axis=others)


def _outer(key: Array, value: Array) -> Array:
    """[ranks, batch, groups, rep, state, dim] of one token."""
    return key[:, :, :, None, :, None] * value[:, :, :, :, None, :]


def _wide(x: Array) -> Array:
    return x[..., None, None]


def _gates(kind: str, rest: Sequence[Array]) -> tuple[Array | float, Array | float]:
    """(decay of the state, strength of what is added) of every token."""
    if kind == "mamba2":
        step = _softplus(rest[0] + rest[3][:, None, None])
        return np.exp(-np.exp(rest[1])[:, None, None] * step), step
    if kind == "gated_delta_net":
        step = _softplus(rest[1] + rest[3][:, None, None])
        return np.exp(-np.exp(rest[2])[:, None, None] * step), _sigmoid(rest[0])
    if kind == "lightning":
        return LIGHTNING_DECAY, 1.0
    raise InterpretError(f"scan '{kind}' has no meaning that could be executed")


def _states(kind: str, inputs: Sequence[Array]) -> tuple[list[Array], Array, Array]:
    """(the state before the first token and after each, decay, strength)."""
    values, keys = inputs[:2]
    shape = values.shape[:-1]
    decay, strength = (np.broadcast_to(np.asarray(g), shape) for g in _gates(kind, inputs[3:]))
    states = [np.zeros((*values.shape[:2], *values.shape[3:5], keys.shape[-1], values.shape[-1]))]
    for t in range(values.shape[2]):
        held = states[-1]
        if kind == "gated_delta_net":
            held = held - _wide(strength[:, :, t]) * _outer(keys[:, :, t], _read(keys[:, :, t], held))
        added = _wide(strength[:, :, t]) * _outer(keys[:, :, t], values[:, :, t])
        states.append(_wide(decay[:, :, t]) * held + added)
    return states, decay, strength


def _read(key: Array, state: Array) -> Array:
    read: Array = np.einsum("zbgn,zbgrnd->zbgrd", key, state)
    return read


def _scan(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """State: S ← decay·S + strength·k⊗v, read by q (Mamba-2; lightning with constants); the gated delta
    rule first takes away what k reads (arXiv 2412.06464, equation 10)."""
    states, _, _ = _states(call.function, inputs)
    y = np.stack([_read(inputs[2][:, :, t], state) for t, state in enumerate(states[1:])], axis=2)
    if call.function == "mamba2":
        y = y + inputs[5][:, None, None, ..., None] * inputs[0]
    return (y,)


def _scan_grad(call: Call, inputs: Sequence[Array]) -> tuple[Array, ...]:
    dy, *rest = inputs
    values, keys, queries = rest[:3]
    states, decay, strength = _states(call.function, rest)
    dv, dk, dq = np.zeros_like(values), np.zeros_like(keys), np.zeros_like(queries)
    ddecay, dstrength = np.zeros(values.shape[:-1]), np.zeros(values.shape[:-1])
    ds = np.zeros_like(states[0])
    for t in reversed(range(values.shape[2])):
        k, v, g, before = keys[:, :, t], values[:, :, t], _wide(strength[:, :, t]), states[t]
        dq[:, :, t] = np.einsum("zbgrnd,zbgrd->zbgn", states[t + 1], dy[:, :, t])
        ds = ds + _outer(queries[:, :, t], dy[:, :, t])
        dstrength[:, :, t] = (ds * _outer(k, v)).sum(axis=(-2, -1))
        dk[:, :, t] = np.einsum("zbgrnd,zbgrd->zbgn", ds * g, v)
        dv[:, :, t] = _read(k, ds * g)
        if call.function == "gated_delta_net":
            seen = _read(k, before)
            ddecay[:, :, t] = (ds * (before - g * _outer(k, seen))).sum(axis=(-2, -1))
            ds = _wide(decay[:, :, t]) * ds
            dstrength[:, :, t] -= (ds * _outer(k, seen)).sum(axis=(-2, -1))
            dseen = -_read(k, ds * g)
            dk[:, :, t] -= np.einsum("zbgrnd,zbgrd->zbgn", ds * g, seen)
            dk[:, :, t] += np.einsum("zbgrnd,zbgrd->zbgn", before, dseen)
            ds = ds + _outer(k, dseen)
        else:
            ddecay[:, :, t] = (ds * before).sum(axis=(-2, -1))
            ds = _wide(decay[:, :, t]) * ds
    return _gate_gradients(call.function, dy, rest, (dv, dk, dq), (ddecay * decay, dstrength))


def _gate_gradients(
    kind: str, dy: Array, rest: Sequence[Array], qkv: tuple[Array, Array, Array], gates: tuple[Array, Array]
) -> tuple[Array, ...]:
    """From decay = exp(−exp(a)·softplus(u)) and strength to what they are made of; gates[0] is d(log decay)."""
    dv, dk, dq = qkv
    dlog, dstrength = gates
    if kind == "lightning":
        return dv, dk, dq
    raw, a_log, bias = (rest[3], rest[4], rest[6]) if kind == "mamba2" else (rest[4], rest[5], rest[6])
    u = raw + bias[:, None, None]
    rate = np.exp(a_log)[:, None, None]
    da_log = -(dlog * rate * _softplus(u)).sum(axis=(1, 2))
    dstep = -dlog * rate
    if kind == "mamba2":
        du = (dstep + dstrength) * _sigmoid(u)
        skip = rest[5][:, None, None, ..., None]
        return dv + skip * dy, dk, dq, du, da_log, (dy * rest[0]).sum(axis=(1, 2, 5)), du.sum(axis=(1, 2))
    du = dstep * _sigmoid(u)
    beta = _sigmoid(rest[3])
    return dv, dk, dq, dstrength * beta * (1.0 - beta), du, da_log, du.sum(axis=(1, 2))


SCAN_FORWARD: Mapping[str, Kernel] = {"conv": _conv, "gated_norm": _gated_norm, "scan": _scan}
SCAN_GRADIENTS: Mapping[str, Kernel] = {
    "conv_grad": _conv_grad, "gated_norm_grad": _gated_norm_grad, "scan_grad": _scan_grad,
}  # fmt: skip
