"""Rules made of matrix products: the gradients of matmul and bmm, and the fused linear gradient."""

from __future__ import annotations

from collections.abc import Sequence

from distplan.costmodel.paddle_attr import Argument, Axes, DistAttr, DistTensor, Inference, RuleRefusedError, flat
from distplan.costmodel.paddle_engine import Spec, answered, forward
from distplan.costmodel.paddle_notation import Attributes

Arguments = Sequence[Argument]


def _product(
    spec: Spec, mesh: Sequence[int], x: DistTensor, y: DistTensor, trans_x: bool, trans_y: bool
) -> tuple[DistAttr, DistAttr, DistAttr]:
    """Placements of x, y and the product."""
    done = forward(spec, mesh, [x, y], {"trans_x": trans_x, "trans_y": trans_y})
    left, right, out = done.inputs[0], done.inputs[1], done.outputs[0]
    assert isinstance(left, DistAttr) and isinstance(right, DistAttr) and isinstance(out, DistAttr)
    return left, right, out


def reduce_broadcast(shape: Sequence[int], gradient: DistAttr, full: Sequence[int]) -> DistAttr:
    """A gradient over the dims that were broadcast becomes partial on their axes."""
    mapping = gradient.dims_mapping
    extra = len(mapping) - len(shape)
    if extra < 0:
        raise RuleRefusedError("the gradient has fewer dims than its input")
    due = dict.fromkeys(gradient.partial, "SUM") if extra else dict(gradient.partial)
    kept: list[Axes] = []
    for dim, axes in enumerate(mapping):
        if dim < extra:
            due.update(dict.fromkeys(axes, "SUM"))
        elif shape[dim - extra] == 1 and full and full[dim] > 1:
            due.update(dict.fromkeys(axes, "SUM"))
            kept.append(())
        else:
            kept.append(axes)
    return answered(tuple(kept), due) if extra or due != dict(gradient.partial) else gradient


def matmul_grad(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """Both gradients by the forward rule; refuses unless all three products agree on every operand."""
    x, y, g = flat(inputs)
    trans_x, trans_y = bool(attributes.get("trans_x")), bool(attributes.get("trans_y"))
    left, right, _ = _product(spec, mesh, x, y, trans_x, trans_y)
    x, y = DistTensor(shape=x.shape, attr=left), DistTensor(shape=y.shape, attr=right)
    if trans_x:
        y_for_dx, g_for_dx, dx = _product(spec, mesh, y, g, trans_y, True)
    else:
        g_for_dx, y_for_dx, dx = _product(spec, mesh, g, y, False, not trans_y)
    if trans_y:
        g_for_dy, x_for_dy, dy = _product(spec, mesh, g, x, True, trans_x)
    else:
        x_for_dy, g_for_dy, dy = _product(spec, mesh, x, g, not trans_x, False)
    given = g_for_dx if not trans_x and not trans_y else g.attr
    for wanted, has in ((y_for_dx, y.attr), (x_for_dy, x.attr), (g_for_dx, given), (g_for_dy, given)):
        if wanted != has:
            raise RuleRefusedError("the products of the gradient disagree about an operand's placement")
    return Inference(
        inputs=(x_for_dy, y_for_dx, g_for_dx),
        outputs=(reduce_broadcast(x.sizes, dx, g.sizes), reduce_broadcast(y.sizes, dy, g.sizes)),
    )


def linear_param_grad(
    spec: Spec, mesh: Sequence[int], inputs: Arguments, outputs: Arguments, attributes: Attributes
) -> Inference:
    """x' · dout added to a weight gradient; refuses if the one given is placed otherwise."""
    x, gradient, weight, bias = flat(inputs)
    left, right, product = _product(spec, mesh, x, gradient, True, False)
    due = reduce_broadcast((0, 0), product, ()) if len(product.dims_mapping) > 2 else product
    bias_due = DistAttr(dims_mapping=())
    if attributes.get("has_bias"):
        bias_due = reduce_broadcast(gradient.sizes[-1:], gradient.attr, ())
    if weight.sizes and weight.sizes[0] and weight.attr != due:
        raise RuleRefusedError("the weight gradient to add to is placed otherwise")
    if bias.sizes and bias.sizes[0] and bias.attr != bias_due:
        raise RuleRefusedError("the bias gradient to add to is placed otherwise")
    return Inference(inputs=(left, right, weight.attr, bias.attr), outputs=(due, bias_due))


FUNCTIONS = {"matmul_grad": matmul_grad, "linear_param_grad": linear_param_grad}
