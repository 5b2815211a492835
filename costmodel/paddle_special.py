"""Rules that a notation alone does not say: guards, quirks that look at placements, composite gradients.

Every function has the signature of paddle_align.concat; most add one thing to the generic rule of
their YAML entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distplan.costmodel import paddle_merge
from distplan.costmodel.merge import WHOLE, read
from distplan.costmodel.paddle_attr import ABSENT, Argument, DistAttr, Inference, RuleRefusedError, flat, single_axis
from distplan.costmodel.paddle_engine import Spec, answered, forward, reverse
from distplan.costmodel.paddle_notation import Attributes

Arguments = Sequence[Argument]


def embedding(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """Refuses a vocabulary-sharded table with a padding index or sparse gradients."""
    table = flat(inputs)[1]
    unsuited = attributes.get("padding_idx", -1) != -1 or attributes.get("sparse")
    if unsuited and table.ndim == 2 and table.attr.dims_mapping[0]:
        raise RuleRefusedError("a vocabulary-sharded table takes neither padding_idx nor sparse gradients")
    return forward(spec, mesh, inputs, attributes)


def embedding_grad(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    if attributes.get("sparse"):
        raise RuleRefusedError("the gradient of an embedding is not sparse")
    return forward(spec, mesh, inputs, attributes)


def cross_entropy(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """Refuses a sharded softmax dim unless it is the last, with hard labels and the softmax in the operator."""
    logits = flat(inputs)[0]
    axis = attributes["axis"]
    if not isinstance(axis, int) or not -logits.ndim <= axis < logits.ndim:
        raise RuleRefusedError(f"axis {axis} is outside the logits")
    last = axis % logits.ndim == logits.ndim - 1
    suited = last and attributes["use_softmax"] and not attributes["soft_label"]
    if logits.attr.dims_mapping[axis] and not suited:
        raise RuleRefusedError("the softmax dim is sharded, which needs hard labels on the last dim")
    return forward(spec, mesh, inputs, attributes)


def where(spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes) -> Inference:
    """The third operand's letters are merged with the second one's sharding (as 3.3.1 does)."""
    tensors = flat(inputs)
    widest = tensors[0].ndim
    if any(t.ndim > widest for t in tensors):
        raise RuleRefusedError("the condition has fewer dims than an operand")
    spelt = [tuple(f"X{i}" for i in range(widest - t.ndim, widest)) for t in tensors]
    chosen = tensors[1].attr.dims_mapping
    if len(chosen) > tensors[2].ndim + 1:
        raise RuleRefusedError("the third operand has fewer dims than the second")
    operands = [(letters, t.attr.dims_mapping) for letters, t in zip(spelt[:2], tensors, strict=False)]
    count = min(len(chosen), tensors[2].ndim)
    operands.append((spelt[2][:count], chosen[:count]))
    operands += [(spelt[0], t.attr.dims_mapping) for t in tensors[3:]]
    merged = paddle_merge.single(operands)
    answers = [answered(read(letters, merged)) for letters in spelt]
    if spec.get("gradient"):
        results = []
        for answer in answers[1:3]:
            missing = answers[0].dims_mapping[: widest - len(answer.dims_mapping)]
            results.append(answered(answer.dims_mapping, {axis: "SUM" for axes in missing for axis in axes}))
        return Inference(inputs=tuple(answers), outputs=tuple(results))
    return Inference(inputs=tuple(answers), outputs=(answers[0],))


def multiply(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """A partial operand stays partial, the first before the second, unless the merge shards its axis."""
    plain = forward(spec, mesh, inputs, attributes)
    tensors = flat(inputs)
    source = 0 if tensors[0].attr.partial else 1
    partial = tensors[source].attr.partial
    out = plain.outputs[0]
    assert isinstance(out, DistAttr)
    if {axis for axes in out.dims_mapping for axis in axes} & set(partial):
        return plain
    kept = list(plain.inputs)
    wanted = kept[source]
    assert isinstance(wanted, DistAttr)
    kept[source] = replace(wanted, partial=dict(partial))
    return Inference(inputs=tuple(kept), outputs=(replace(out, partial=dict(partial)),))


def add_n(spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes) -> Inference:
    """A partial status that all inputs share passes through the sum."""
    tensors = flat(inputs)
    plain = forward(spec, mesh, inputs, attributes)
    partial = tensors[0].attr.partial
    if not partial or any(t.attr.partial != partial for t in tensors):
        return plain
    mapping = plain.outputs[0]
    assert isinstance(mapping, DistAttr)
    settled = answered(mapping.dims_mapping, partial)
    return Inference(inputs=((settled,) * len(tensors),), outputs=(settled,))


def moe_combine(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """A sharded top-k dim un-shards hidden; the output is then partial on mesh axis 1, whichever axis it was."""
    tensors = flat(inputs)
    letters = [("s", "h"), ("s", "k"), ("s", "k"), ("s", "h")][: len(tensors)]
    if any(t.ndim != 2 for t in tensors):
        raise RuleRefusedError("x, weights and index have two dims")
    merged = paddle_merge.single([(x, t.attr.dims_mapping) for x, t in zip(letters, tensors, strict=True)])
    if spec.get("gradient"):
        merged["k"] = ()
        answers = [answered(read(x, merged)) for x in letters]
        return Inference(inputs=tuple(answers), outputs=tuple(answers[:3]))
    if merged["k"]:
        merged["h"] = ()
        if len(mesh) < 2:
            raise RuleRefusedError("there is no mesh axis 1 to be partial on")
    out = answered(read(("s", "h"), merged), {1: "SUM"} if merged["k"] else {})
    return Inference(inputs=tuple(answered(read(x, merged)) for x in letters), outputs=(out,))


def adamw(spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes) -> Inference:
    """One placement for parameter, gradient, both moments and master: per dim, unless two axes dispute it.

    Inputs: parameter, gradient, learning rate, two moments, two powers of beta, master, skip flag;
    the answer holds the absent third moment too.
    """
    param, grad, rate, m1, m2, beta1, beta2, master, skip = flat(inputs)
    if len({t.ndim for t in (param, grad, m1, m2)}) > 1:
        raise RuleRefusedError("parameter, gradient and moments differ in rank")
    if any(axes for axes in skip.attr.dims_mapping):
        raise RuleRefusedError("the skip flag is sharded")
    letters = tuple(WHOLE if size == 1 else f"X{i}" for i, size in enumerate(param.sizes))
    merged = paddle_merge.single([(letters, t.attr.dims_mapping) for t in (param, grad)])
    stated = [read(letters, merged), *(t.attr.dims_mapping for t in (m1, m2))]
    offers = [{axes for axes in dim if axes} for dim in zip(*stated, strict=True)]
    one = DistAttr(dims_mapping=tuple(next(iter(offer)) if len(offer) == 1 else () for offer in offers))
    scalars = [DistAttr(dims_mapping=t.attr.dims_mapping) for t in (rate, beta1, beta2)]
    saved = one if master.shape is not None else ABSENT.attr
    flag = DistAttr(dims_mapping=skip.attr.dims_mapping)
    return Inference(
        inputs=(one, one, scalars[0], one, one, ABSENT.attr, scalars[1], scalars[2], saved, flag),
        outputs=(one, one, one, ABSENT.attr, scalars[1], scalars[2], saved),
    )


def gather_reverse(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """The index is taken for a vector, whatever its rank (as 3.3.1 does)."""
    x, _ = flat(inputs)
    (out,) = flat(outputs)
    axis = attributes["axis"]
    if not isinstance(axis, int) or not 0 <= axis < x.ndim:
        raise RuleRefusedError(f"axis {axis} is outside x")
    mapping = single_axis(out.attr.dims_mapping, mesh)[: x.ndim]
    kept = tuple(() if dim == axis else axes for dim, axes in enumerate(mapping))
    return Inference(inputs=(DistAttr(dims_mapping=kept), DistAttr(dims_mapping=(mapping[axis],))), outputs=(out.attr,))


def first_of(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """A reverse rule that is the forward rule over again: the outputs given are not looked at."""
    return forward(spec, mesh, inputs, attributes)


def cross_entropy_reverse(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """The softmax dim is whole again unless it is the last with hard labels; refuses use_softmax = False."""
    rank = flat(inputs)[0].ndim
    axis = attributes["axis"]
    if not attributes["use_softmax"] or not isinstance(axis, int):
        raise RuleRefusedError("without a softmax there is no softmax output to infer from")
    if attributes["soft_label"] or axis % rank != rank - 1:
        spec = {**spec, "in": ["X*^axis", "X*^axis"], "out_into": ["X*^axis", "X*^axis"], "when": {}}
    return reverse(spec, mesh, inputs, outputs, attributes)


def data_parallel(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """Dim 0 of everything is the batch, all else is whole; inputs decide, or the outputs in reverse."""
    deciding = flat(outputs if spec.get("from_outputs") else inputs)
    if any(t.ndim == 0 for t in [*flat(inputs), *flat(outputs)]):
        raise RuleRefusedError("a scalar has no batch dim")
    batch = paddle_merge.single([(("b",), t.attr.dims_mapping[:1]) for t in deciding])["b"]

    def placed(tensors: Arguments) -> tuple[DistAttr, ...]:
        return tuple(DistAttr(dims_mapping=(batch, *((),) * (t.ndim - 1))) for t in flat(tensors))

    return Inference(inputs=placed(inputs), outputs=placed(outputs))


def replicated(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    def whole(tensors: Arguments) -> tuple[DistAttr, ...]:
        return tuple(DistAttr(dims_mapping=((),) * t.ndim) for t in flat(tensors))

    return Inference(inputs=whole(inputs), outputs=whole(outputs))


FUNCTIONS = {
    "cross_entropy_reverse": cross_entropy_reverse,
    "data_parallel": data_parallel,
    "replicated": replicated,
    "embedding": embedding,
    "embedding_grad": embedding_grad,
    "cross_entropy": cross_entropy,
    "where": where,
    "multiply": multiply,
    "add_n": add_n,
    "moe_combine": moe_combine,
    "adamw": adamw,
    "gather_reverse": gather_reverse,
    "forward_again": first_of,
}
