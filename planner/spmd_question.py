"""What `distplan spmd` is asked, from text to layouts. Every refusal says what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distplan.costmodel.interpret_mesh import Mesh
from distplan.costmodel.layout import Axes, Layout
from distplan.hardware.errors import did_you_mean
from distplan.planner.inputs import InputError, one_number

OPERANDS = ("x", "y", "z")
MAX_AXES, MAX_DEGREE = 6, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The options as typed."""

    notation: str | None
    mesh: str
    placements: tuple[str, ...]
    rule: str | None
    shapes: str
    attributes: str
    dialect: str


def read_mesh(text: str) -> Mesh:
    """'x=2,y=4'. Raises InputError."""
    axes: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, degree = item.partition("=")
        if not equals or not name.strip().isidentifier():
            raise InputError(f"--mesh '{item}': an axis and its degree are expected, such as x=2")
        if name.strip() in axes:
            raise InputError(f"--mesh: axis {name.strip()} occurs twice")
        axes[name.strip()] = one_number("--mesh", degree, most=MAX_DEGREE)
    if not axes:
        raise InputError("--mesh is missing: which axes? For example --mesh x=2,y=4")
    if len(axes) > MAX_AXES:
        raise InputError(f"--mesh: {len(axes)} axes, at most {MAX_AXES} can be shown")
    return Mesh(tuple(axes.items()))


def read_notation(text: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """'mk,kn->mn' -> ((m, k), (k, n)), (m, n). Raises InputError."""
    left, arrow, right = text.replace(" ", "").partition("->")
    operands = left.split(",")
    words = (*operands, right)
    if not arrow or not all(word.isascii() and word.isalpha() for word in operands):
        raise InputError(f"'{text}': an einsum such as 'mk,kn->mn' is expected")
    if right and not (right.isascii() and right.isalpha()):
        raise InputError(f"'{text}': an einsum such as 'mk,kn->mn' is expected")
    if len(operands) > len(OPERANDS):
        raise InputError(f"'{text}': {len(operands)} operands, at most {len(OPERANDS)} can be placed")
    for word in words:
        if len(set(word)) < len(word):
            raise InputError(f"'{text}': a letter occurs twice in '{word}'")
    unknown = sorted(set(right) - set("".join(operands)))
    if unknown:
        raise InputError(f"'{text}': no operand has the letter {unknown[0]} of the result")
    for operand in operands:
        others = [word for word in words if word is not operand]
        alone = sorted(set(operand) - set("".join(others)))
        if alone:
            raise InputError(f"'{text}': letter {alone[0]} is in one tensor only; sum it before the product")
    return tuple(tuple(word) for word in operands), tuple(right)


def read_layout(name: str, text: str, dims: Sequence[str], mesh: Mesh) -> Layout:
    """'m:x, k:y+z, partial:w' for one operand. Raises InputError."""
    option, known = f"--{name}", [axis for axis, _ in mesh.axes]
    shards: dict[str, Axes] = {}
    partial: Axes = ()
    for item in filter(None, (part.strip() for part in text.split(","))):
        dim, colon, places = item.partition(":")
        dim = dim.strip()
        axes = tuple(axis.strip() for axis in places.split("+"))
        if not colon or not all(axes):
            example = f"{dims[0] if dims else 'm'}:{known[0]}"
            raise InputError(f"{option} '{item}': a dim and its axes are expected, such as {example}")
        for axis in axes:
            if axis not in known:
                near = did_you_mean(axis, known) or f"; it has {', '.join(known)}"
                raise InputError(f"{option} '{item}': the mesh has no axis {axis}{near}")
        if dim == "partial":
            partial += axes
        elif dim not in dims:
            raise InputError(f"{option} '{item}': operand {name} has no dim {dim}; it has {', '.join(dims) or 'none'}")
        else:
            shards[dim] = shards.get(dim, ()) + axes
    used = [axis for axes in shards.values() for axis in axes] + list(partial)
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise InputError(f"{option} '{text}': axis {twice[0]} is used twice; in one tensor an axis has one place")
    return Layout(tuple(dims), tuple(shards.get(dim, ()) for dim in dims), partial)


def read_shapes(text: str, count: int | None = None) -> tuple[tuple[int, ...], ...]:
    """'64x32,32x48' -> ((64, 32), (32, 48)). Raises InputError."""
    shapes = tuple(
        tuple(one_number("--shapes", size, most=2**40) for size in item.strip().lower().split("x"))
        for item in filter(None, (part.strip() for part in text.split(",")))
    )
    if count is not None and shapes and len(shapes) != count:
        raise InputError(f"--shapes: {len(shapes)} shapes for {count} operands")
    return shapes


def read_attributes(text: str) -> dict[str, object]:
    """'axis=1,keepdim=true,perm=[1,0]' -> values; lists in brackets. Raises InputError."""
    found: dict[str, object] = {}
    for item in filter(None, _outside_brackets(text)):
        name, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"--attributes '{item}': a name and its value are expected, such as axis=1")
        found[name.strip()] = _value(value.strip())
    return found


def _outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _value(text: str) -> object:
    if text.startswith("[") and text.endswith("]"):
        return [_value(item) for item in _outside_brackets(text[1:-1]) if item]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
