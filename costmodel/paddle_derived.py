"""Attributes that the notation needs and that follow from shapes: `derive` in paddle_rules.yaml."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from distplan.costmodel.paddle_attr import DistTensor, RuleRefusedError

Attributes = Mapping[str, object]


def _integers(value: object) -> list[int]:
    return [value] if isinstance(value, int) else list(value) if isinstance(value, (list, tuple)) else []


def _repeated(tensors: Sequence[DistTensor], attributes: Attributes) -> list[int]:
    """Dims of the input that tile repeats."""
    times = _integers(attributes["repeat_times"])
    rank = tensors[0].ndim
    aligned = ([1] * rank + times)[-rank:] if rank else []
    return [dim for dim, count in enumerate(aligned) if count != 1]


def _extra_tiled(tensors: Sequence[DistTensor], attributes: Attributes) -> int:
    """Leading dims that tile adds."""
    return max(len(_integers(attributes["repeat_times"])) - tensors[0].ndim, 0)


def _target(tensors: Sequence[DistTensor], attributes: Attributes) -> list[int]:
    """The shape to expand to: that of the second tensor, where there is one."""
    return list(tensors[1].sizes) if len(tensors) > 1 else _integers(attributes["shape"])


def _expanded(tensors: Sequence[DistTensor], attributes: Attributes) -> list[int]:
    """Dims of the input that expand makes larger; -1 in the target keeps a size."""
    sizes = tensors[0].sizes
    target = _target(tensors, attributes)[_extra_expanded(tensors, attributes) :]
    return [dim for dim, (size, wanted) in enumerate(zip(sizes, target, strict=True)) if wanted not in (-1, size)]


def _extra_expanded(tensors: Sequence[DistTensor], attributes: Attributes) -> int:
    return len(_target(tensors, attributes)) - tensors[0].ndim


def _index_depth(tensors: Sequence[DistTensor], attributes: Attributes) -> int:
    """Leading dims that the last dim of the index tensor addresses."""
    return tensors[1].sizes[-1]


def _axis_size(tensors: Sequence[DistTensor], attributes: Attributes) -> int:
    """Size of the first input's dim `axis`."""
    axis = attributes["axis"]
    return tensors[0].sizes[axis] if isinstance(axis, int) else 0


def _axis_of_index(tensors: Sequence[DistTensor], attributes: Attributes) -> list[int]:
    """The dim `axis` of the second input, if it has one."""
    axis = attributes["axis"]
    if not isinstance(axis, int) or axis < 0:
        raise RuleRefusedError(f"axis = {axis}: a number from 0 is needed")
    return [axis] if axis < tensors[1].ndim else []


def _vectors(count: int, at: int) -> Callable[[Sequence[DistTensor], Attributes], object]:
    """Whether `count` of the two factors are vectors, the one at `at` among them."""

    def stated(tensors: Sequence[DistTensor], attributes: Attributes) -> object:
        return tensors[at].ndim == 1 and sum(t.ndim == 1 for t in tensors[:2]) == count

    return stated


def _one_operand(tensors: Sequence[DistTensor], attributes: Attributes) -> bool:
    return tensors[1].shape is None


def _flatten_kept(tensors: Sequence[DistTensor], attributes: Attributes) -> bool:
    return bool(attributes.get("flatten") and attributes.get("keepdims"))


_FUNCTIONS: Mapping[str, Callable[[Sequence[DistTensor], Attributes], object]] = {
    "x_vector": _vectors(1, 0),
    "y_vector": _vectors(1, 1),
    "both_vectors": _vectors(2, 0),
    "flatten_kept": _flatten_kept,
    "one_operand": _one_operand,
    "repeated": _repeated,
    "extra_tiled": _extra_tiled,
    "expanded": _expanded,
    "extra_expanded": _extra_expanded,
    "index_depth": _index_depth,
    "axis_size": _axis_size,
    "axis_of_index": _axis_of_index,
}


def derive(names: Sequence[str], tensors: Sequence[DistTensor], attributes: Attributes) -> dict[str, object]:
    return {name: _FUNCTIONS[name](tensors, attributes) for name in names}
