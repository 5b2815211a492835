"""`spmd`: one inference, step by step: notation, merge, reshards, result, communication, proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from distplan.costmodel.interpret_einsum import Plan, Product, Proof, Steps, plan, prove, sizes_of
from distplan.costmodel.interpret_mesh import Mesh
from distplan.costmodel.layout import Dims, Layout
from distplan.hardware.units import format_bytes
from distplan.planner.cli_show import show
from distplan.planner.inputs import InputError, one_word
from distplan.planner.report import heading, line, table
from distplan.planner.spmd_question import OPERANDS, Question, read_layout, read_mesh, read_notation, read_shapes

Options = dict[str, Any]
OK, NOT_EQUIVALENT = 0, 4
DIALECTS = ("ideal", "paddle")
MAX_RANKS = 64
EXACT = 1e-9
ELEMENT_BYTES = 2.0
"""bf16, the usual dtype of what is moved"""

__all__ = ["Question", "run_spmd"]


def run_spmd(question: Question, options: Options) -> int:
    """Exit code 0, or 4 if the executed result differs. Raises DistplanError."""
    dialect = one_word("--dialect", question.dialect or ("paddle" if question.rule else "ideal"), DIALECTS)
    if dialect == "paddle":
        from distplan.planner.cli_spmd_paddle import answer

        shown = answer(question)
    else:
        shown = _answer(question)
    show(shown, shown["communication"], options, list(_report(shown)))
    return NOT_EQUIVALENT if shown["proof"].get("passed") is False else OK


def _answer(question: Question) -> dict[str, Any]:
    if question.rule is not None:
        raise InputError("--op names a rule of the paddle dialect; the ideal one takes an einsum such as 'mk,kn->mn'")
    if question.notation is None:
        raise InputError("what is inferred? For example: distplan spmd 'mk,kn->mn' --mesh x=2,y=4 --x m:x --y n:y")
    mesh = read_mesh(question.mesh)
    operands, result = read_notation(question.notation)
    layouts = place(question, operands, mesh)
    made = plan(Product(operands=layouts, is_weight=(False,) * len(layouts), result=result))
    sizes = read_sizes(question, operands, sizes_of(made, mesh))
    small = small_mesh(mesh)
    proof = prove(made, small, seed=0)
    return {
        "dialect": "ideal",
        "notation": question.notation,
        "mesh": dict(mesh.axes),
        "operands": {name: str(layout) for name, layout in zip(OPERANDS, layouts, strict=False)},
        "sizes": sizes,
        "merge": merge_rows(made.inference.letters, layouts, result),
        "needs": {name: str(layout) for name, layout in zip(OPERANDS, made.inference.inputs, strict=False)},
        "result": str(made.inference.output),
        "partial": list(made.inference.output.partial),
        "communication": list(_communication(made, mesh, sizes)),
        "proof": _proof(made, proof, small),
    }


def place(question: Question, operands: Sequence[Dims], mesh: Mesh) -> tuple[Layout, ...]:
    count = len(operands)
    extra = [name for name, text in zip(OPERANDS[count:], question.placements[count:], strict=True) if text]
    if extra:
        raise InputError(f"--{extra[0]}: the notation has {count} operands, {', '.join(OPERANDS[:count])}")
    return tuple(
        read_layout(name, text, dims, mesh)
        for name, text, dims in zip(OPERANDS, question.placements, operands, strict=False)
    )


def read_sizes(question: Question, operands: Sequence[Dims], least: Mapping[str, int]) -> dict[str, int]:
    """Size of each letter: from --shapes, or the least that every placement divides."""
    shapes = read_shapes(question.shapes, len(operands))
    sizes: dict[str, int] = {}
    for dims, shape in zip(operands, shapes, strict=False):
        if len(dims) != len(shape):
            raise InputError(f"--shapes: {'x'.join(map(str, shape))} for the dims {', '.join(dims)}")
        for dim, size in zip(dims, shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise InputError(f"--shapes: dim {dim} has {sizes[dim]} elements in one operand and {size} in another")
    return sizes or dict(least)


def small_mesh(mesh: Mesh) -> Mesh:
    """The mesh itself, or with degrees of at most 2 where it has more ranks than are simulated."""
    return mesh if mesh.ranks <= MAX_RANKS else Mesh(tuple((axis, min(degree, 2)) for axis, degree in mesh.axes))


def merge_rows(letters: Mapping[str, Sequence[str]], layouts: Sequence[Layout], result: Dims) -> list[dict[str, str]]:
    """Per letter: what every operand says, what is kept, and what that means."""
    rows = []
    for letter, axes in letters.items():
        row = {"letter": letter}
        for name, layout in zip(OPERANDS, layouts, strict=False):
            row[name] = _axes(layout.axes_of(letter)) if letter in layout.dims else ""
        row["merged"] = _axes(axes)
        row["then"] = _meaning(letter, axes, layouts, result)
        rows.append(row)
    return rows


def _meaning(letter: str, axes: Sequence[str], layouts: Sequence[Layout], result: Dims) -> str:
    wanted = {axis for layout in layouts if letter in layout.dims for axis in layout.axes_of(letter)}
    lost = sorted(wanted - set(axes))
    if letter in result:
        text = f"the result is sharded on {_axes(axes)}" if axes else "whole in the result"
    else:
        text = f"summed: the result is Partial on {_axes(axes)}" if axes else "summed, whole on every rank"
    return text + (f"; {', '.join(lost)} shards another letter" if lost else "")


def _axes(axes: Sequence[str]) -> str:
    return "+".join(axes) or "-"


def step_rows(
    what: str, layout: Layout, steps: Steps, mesh: Mesh, sizes: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """One row per transition: kind, axes, and the bytes that every rank gives to it."""
    for step in steps:
        elements = 1.0
        for dim, axes in zip(layout.dims, layout.shards, strict=True):
            elements *= -(-sizes[dim] // mesh.degree(axes))
        sent = 0.0 if step.kind == "slice" or mesh.degree(step.axes) == 1 else elements * ELEMENT_BYTES
        yield {
            "for": what,
            "kind": step.kind,
            "axes": _axes(step.axes),
            "ranks": mesh.degree(step.axes),
            "dim": step.dim + (f" to {step.to_dim}" if step.to_dim else ""),
            "bytes": sent,
            "gives": str(step.result),
        }
        layout = step.result


def _communication(made: Plan, mesh: Mesh, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    count = len(made.product.operands)
    for name, layout, steps in zip(OPERANDS, made.product.operands, made.moves, strict=False):
        yield from step_rows(f"forward: {name}", layout, steps, mesh, sizes)
    for index, gradient in enumerate(made.gradients):
        names = [*(name for at, name in enumerate(OPERANDS[:count]) if at != index), "dresult"]
        title = f"d{OPERANDS[index]}"
        for name, layout, steps in zip(names, gradient.product.operands, gradient.moves, strict=True):
            yield from step_rows(f"{title}: {name}", layout, steps, mesh, sizes)
        yield from step_rows(f"{title}: its sum", gradient.inference.output, gradient.settle, mesh, sizes)


def _proof(made: Plan, proof: Proof, mesh: Mesh) -> dict[str, Any]:
    return {
        "passed": proof.error <= EXACT,
        "ranks": mesh.ranks,
        "sizes": sizes_of(made, mesh),
        "differences": {"result": proof.output}
        | {f"d{name}": error for name, error in zip(OPERANDS, proof.gradients, strict=False)},
    }


def _report(shown: Mapping[str, Any]) -> Iterator[RenderableType]:
    mesh = ", ".join(f"{axis}={degree}" for axis, degree in shown["mesh"].items())
    yield Text(f"{shown['notation']} on the mesh {mesh} ({shown['dialect']} dialect)", style="bold")
    yield heading("1. Where the operands are")
    yield table(("operand", "placement"), list(shown["operands"].items()), left=(0, 1))
    if shown["merge"]:
        yield heading("2. Merge, letter by letter")
        columns = tuple(shown["merge"][0])
        yield table(columns, [tuple(row.values()) for row in shown["merge"]], left=range(len(columns)))
    yield heading("3. What the operator needs")
    yield from _needs(shown)
    yield heading("4. Result")
    yield line(shown["result"] + (f", to be summed over {', '.join(shown['partial'])}" if shown["partial"] else ""))
    yield heading("5. Communication, forward and of the gradients")
    yield from _steps(shown["communication"])
    yield heading("6. Proof")
    yield from _verdict(shown["proof"])


def _needs(shown: Mapping[str, Any]) -> Iterator[RenderableType]:
    rows = [
        (name, placement, "as it is" if placement == shown["operands"][name] else "to be resharded")
        for name, placement in shown["needs"].items()
    ]
    yield table(("operand", "placement", ""), rows, left=(0, 1, 2))


def _steps(rows: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    if not rows:
        yield line("none")
        return
    cells = [
        (*(row[key] for key in ("for", "kind", "axes", "dim")), format_bytes(row["bytes"]), row["gives"])
        for row in rows
    ]
    yield table(("for", "collective", "axes", "dim", "bytes", "gives"), cells, left=(0, 1, 2, 3, 5))
    yield line("bytes: what each rank gives to the collective, in bf16; a slice sends nothing", style="dim")


def _verdict(proof: Mapping[str, Any]) -> Iterator[RenderableType]:
    if "passed" not in proof:
        yield line(proof["reason"])
        return
    word = "equals" if proof["passed"] else "DIFFERS FROM"
    yield line(f"executed on {proof['ranks']} simulated ranks in float64, it {word} the single-device result:")
    rows = [(name, f"{error:.1e}") for name, error in proof["differences"].items()]
    yield table(("tensor", "largest difference"), rows)
