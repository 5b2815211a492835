"""Flash attention and rotary embedding: batch and heads may be sharded, sequence hardly, head dim never.

Letters: b batch, s and t query and key length, h heads, d head dim. Tensors: q, k, v, output and its
gradient [b, s, h, d], mask and softmax [b, h, s, t], log-sum-exp [b, h, s].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distplan.costmodel import paddle_merge
from distplan.costmodel.merge import read
from distplan.costmodel.paddle_attr import Argument, Axes, DistAttr, DistTensor, Inference, RuleRefusedError, flat
from distplan.costmodel.paddle_engine import Spec
from distplan.costmodel.paddle_notation import Attributes

Arguments = Sequence[Argument]
Merged = Mapping[str, Axes]

_QKV, _SCORES, _LSE = ("b", "s", "h", "d"), ("b", "h", "s", "t"), ("b", "h", "s")


def _present(tensor: DistTensor) -> bool:
    return bool(tensor.sizes) and tensor.sizes[0] != 0


def _check(q: DistTensor, k: DistTensor, v: DistTensor) -> None:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise RuleRefusedError("q, k and v have four dims")
    (batch, _, heads, width), (k_batch, length, k_heads, k_width) = q.sizes, k.sizes
    if not batch == k_batch == v.sizes[0] or width != k_width or length != v.sizes[1]:
        raise RuleRefusedError("q, k and v differ in batch, head dim or key length")
    if heads % k_heads or heads % v.sizes[2]:
        raise RuleRefusedError("the query heads are no multiple of the key and value heads")


def _merge(
    stated: Sequence[tuple[tuple[str, ...], DistTensor]], k: DistTensor, grouped: bool, mesh: Sequence[int]
) -> Merged:
    """Batch and heads of the tensors; grouped heads that the axis of k does not divide are whole."""
    axes = k.attr.dims_mapping[2]
    whole = grouped and bool(axes) and k.sizes[2] % mesh[axes[0]] != 0
    free = ("b",) if whole else ("b", "h")
    operands = []
    for letters, tensor in stated:
        pairs = zip(letters, tensor.attr.dims_mapping, strict=True)
        operands.append((letters, tuple(axes if letter in free else () for letter, axes in pairs)))
    return paddle_merge.single(operands)


def _answer(letters: tuple[str, ...], merged: Merged) -> DistAttr:
    return DistAttr(dims_mapping=read(letters, merged))


def _mask(mask: DistTensor, merged: Merged) -> DistAttr:
    if not _present(mask):
        return mask.attr
    placed = read(_SCORES, merged)
    return DistAttr(dims_mapping=(placed[0], () if mask.sizes[1] == 1 else placed[1], *placed[2:]))


def flash_attention(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """v is placed as k is, whatever it was."""
    q, k, v, seed, mask = flat(inputs)
    _check(q, k, v)
    stated = [(_QKV, q), (_QKV, k)] + ([(_SCORES, mask)] if _present(mask) else [])
    merged = _merge(stated, k, q.sizes[2] != v.sizes[2], mesh)
    heads = _answer(_QKV, merged)
    return Inference(
        inputs=(heads, heads, heads, seed.attr, _mask(mask, merged)),
        outputs=(heads, _answer(_SCORES, merged), _answer(_LSE, merged), DistAttr(dims_mapping=((),))),
    )


def flash_attention_reverse(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """The log-sum-exp decides, and v in place of the output (as 3.3.1 does)."""
    q, k, v, seed, mask = flat(inputs)
    _, softmax, lse, _ = flat(outputs)
    merged = _merge([(_QKV, v), (_LSE, lse)], k, q.sizes[2] != k.sizes[2], mesh)
    heads = _answer(_QKV, merged)
    return Inference(
        inputs=(heads, heads, heads, seed.attr, _mask(mask, merged)),
        outputs=(heads, softmax.attr, _answer(_LSE, merged), seed.attr),
    )


def flash_attention_grad(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    q, k, v, out, lse, seed, mask, gradient = flat(inputs)
    _check(q, k, v)
    stated = [(_QKV, q), (_QKV, k), (_QKV, out), (_QKV, gradient), (_LSE, lse)]
    merged = _merge(stated, k, q.sizes[2] != v.sizes[2], mesh)
    heads, sums = _answer(_QKV, merged), _answer(_LSE, merged)
    return Inference(
        inputs=(heads, heads, heads, heads, sums, seed.attr, _mask(mask, merged), heads), outputs=(heads, heads, heads)
    )


def _rope_tables(sine: DistTensor, cosine: DistTensor, sequence: Axes) -> list[DistAttr]:
    """Sine and cosine, [s, d] or [1, s, 1, d], sharded as the sequence is.

    With a sharded sequence a cosine of four dims is placed as the sine (as 3.3.1 does).
    """
    if sequence and sine.ndim == 4:
        cosine = sine
    at = 0 if sine.ndim == 2 else 1
    placed = []
    for table in (sine, cosine):
        dims = enumerate(table.attr.dims_mapping)
        last = table.ndim - 1
        mapping = tuple(sequence if dim == at else () if dim == last else axes for dim, axes in dims)
        placed.append(DistAttr(dims_mapping=mapping))
    return placed


def _check_heads(q: DistTensor, k: DistTensor, v: DistTensor) -> None:
    present = [t for t in (k, v) if _present(t)]
    if q.ndim != 4 or any(t.ndim != 4 for t in present) or len({t.shape for t in present}) > 1:
        raise RuleRefusedError("q, k and v have four dims, k and v the same")
    for t in present:
        same = (t.sizes[0], t.sizes[1], t.sizes[3]) == (q.sizes[0], q.sizes[1], q.sizes[3])
        if not same or q.sizes[2] % t.sizes[2]:
            raise RuleRefusedError("k and v differ from q in more than a divisor of the heads")


def _rope(
    mesh: Sequence[int], heads: Sequence[DistTensor], tables: Sequence[DistTensor], major: bool, ids_decide: bool
) -> tuple[list[DistAttr], list[DistAttr]]:
    """Placements of q, k, v (where present), and of sine, cosine and position ids.

    The sequence stays sharded only with tables and without position ids.
    """
    (q, k, v), (sine, cosine, ids) = heads, tables
    _check_heads(q, k, v)
    letters = ("s", "b", "h", "d") if major else ("b", "s", "h", "d")
    dropped = [t for t in (k, v) if _present(t) and _uneven_heads(q, t, mesh)]
    stated: list[paddle_merge.Operand] = [(letters, t.attr.dims_mapping) for t in heads if _present(t)]
    if dropped:
        stated = [(x, (*mapping[:2], (), mapping[3])) for x, mapping in stated]
    if _present(ids) and ids_decide:
        stated.append((("b", "s"), ids.attr.dims_mapping))
    merged = dict(paddle_merge.single(stated))
    has_tables = _present(sine) and _present(cosine)
    if has_tables:
        _check_tables(q, tables, major)
    merged["d"] = ()
    merged["s"] = merged["s"] if has_tables and not _present(ids) else ()
    one = _answer(letters, merged)
    placed = _rope_tables(sine, cosine, merged["s"]) if has_tables else [DistAttr(dims_mapping=())] * 2
    placed.append(DistAttr(dims_mapping=(merged["b"], ())) if _present(ids) else ids.attr)
    return [one if _present(t) else t.attr for t in heads], placed


def _uneven_heads(q: DistTensor, k: DistTensor, mesh: Sequence[int]) -> bool:
    axes = k.attr.dims_mapping[2]
    return q.sizes[2] != k.sizes[2] and bool(axes) and k.sizes[2] % mesh[axes[0]] != 0


def _check_tables(q: DistTensor, tables: Sequence[DistTensor], major: bool) -> None:
    sine, cosine, ids = tables
    batch, length = (q.sizes[1], q.sizes[0]) if major else (q.sizes[0], q.sizes[1])
    if sine.shape != cosine.shape or sine.ndim not in (2, 4):
        raise RuleRefusedError("sine and cosine have the same two or four dims")
    if sine.ndim == 4 and (sine.sizes[0], sine.sizes[2]) != (1, 1):
        raise RuleRefusedError("sine and cosine have no batch and no heads")
    rows, width = sine.sizes[0 if sine.ndim == 2 else 1], sine.sizes[-1]
    enough = rows >= length if _present(ids) else rows == length
    if not enough or width != q.sizes[3] or (_present(ids) and ids.sizes != (batch, length)):
        raise RuleRefusedError("sine, cosine or position ids do not fit the sequence")


def rope(spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes) -> Inference:
    tensors = flat(inputs)
    heads, tables = _rope(mesh, tensors[:3], tensors[3:], bool(attributes.get("time_major")), ids_decide=True)
    return Inference(inputs=(*heads, *tables), outputs=tuple(heads))


def rope_reverse(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """The outputs decide, that of v only if v is there."""
    tensors = flat(inputs)
    given = [*flat(outputs)[:2], flat(outputs)[2] if _present(tensors[2]) else tensors[2]]
    heads, tables = _rope(mesh, given, tensors[3:], bool(attributes.get("time_major")), ids_decide=False)
    return Inference(inputs=(*heads, *tables), outputs=tuple(heads))


def rope_grad(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    tensors = flat(inputs)
    heads, tables = _rope(mesh, tensors[3:], tensors[:3], bool(attributes.get("time_major")), ids_decide=True)
    return Inference(inputs=(*tables, *heads), outputs=tuple(heads))


FUNCTIONS = {
    "flash_attention": flash_attention,
    "flash_attention_reverse": flash_attention_reverse,
    "flash_attention_grad": flash_attention_grad,
    "rope": rope,
    "rope_reverse": rope_reverse,
    "rope_grad": rope_grad,
}
