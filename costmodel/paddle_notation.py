"""The notation of paddle_rules.yaml: one short template per tensor, letters per dim out.

A template is a list of tokens:

    b           one dim with that letter
    1           one dim that reads as not sharded, though its sharding takes part in the merge
    _           one dim whose sharding is dropped before the merge
    ...         the remaining dims, aligned from the right between tensors; a size of 1 reads as `1`
    X*          a group: the remaining dims, letters X0 X1 …; the same in every tensor of the rule
    X<attr      a group of as many dims as the attribute says

and a group may be followed by operations on the dims that an attribute names (without a name: all):

    -attr  without them      ^attr  as `1`      !attr  as `_`      @attr  permuted by it
    ~attr  `^attr` if the rule's `keep` attribute is true, else `-attr`; an empty list is all dims
    +attr  with a `1` inserted at each position    =attr  as the letter i

>>> letters(["S<begin N*!", "_"], [3, 1], {"begin": 2})
[('S0', 'S1', '_'), ('_',)]
>>> letters(["X*", "X*-axis"], [3, None], {"axis": [-1]})
[('X0', 'X1', 'X2'), ('X0', 'X1')]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from distplan.costmodel.merge import WHOLE
from distplan.costmodel.paddle_attr import RuleRefusedError

Attributes = Mapping[str, object]
Letters = tuple[str, ...]

DROPPED = "_"
_TOKEN = re.compile(r"(\.\.\.|[A-Z]\*|[A-Z]<\w+|[a-z1_])((?:[-^!~@+=]\w*)*)$")
_OPERATION = re.compile(r"([-^!~@+=])(\w*)")


@cache
def _parse(template: str) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    tokens = []
    for token in template.split():
        match = _TOKEN.match(token)
        if match is None:
            raise ValueError(f"unreadable token {token!r} in {template!r}")
        tokens.append((match[1], tuple(_OPERATION.findall(match[2]))))
    return tuple(tokens)


def positions(value: object, rank: int, extra: int = 0) -> tuple[int, ...]:
    """Attribute values as dims in order; None = all dims; negative from the end."""
    if value is None:
        return tuple(range(rank))
    listed = [value] if isinstance(value, int) else list(value) if isinstance(value, (list, tuple)) else []
    dims = tuple(dim + rank + extra if dim < 0 else dim for dim in listed)
    if any(not 0 <= dim < rank + extra for dim in dims):
        raise RuleRefusedError(f"dims {listed} are outside a tensor of rank {rank}")
    return dims


def _insert(group: Letters, dims: Sequence[int]) -> Letters:
    out = list(group)
    for dim in dims:
        out.insert(dim, WHOLE)
    return tuple(out)


_REPLACE: Mapping[str, Callable[[Letters, tuple[int, ...]], Letters]] = {
    "-": lambda group, dims: tuple(x for i, x in enumerate(group) if i not in dims),
    "^": lambda group, dims: tuple(WHOLE if i in dims else x for i, x in enumerate(group)),
    "!": lambda group, dims: tuple(DROPPED if i in dims else x for i, x in enumerate(group)),
    "=": lambda group, dims: tuple("i" if i in dims else x for i, x in enumerate(group)),
    "@": lambda group, dims: tuple(group[i] for i in dims),
}


def _operate(group: Letters, operations: Sequence[tuple[str, str]], attributes: Attributes, keep: str) -> Letters:
    for operation, name in operations:
        kind = operation
        value = attributes[name] if name else None
        if kind == "~":
            kind = "^" if attributes.get(keep) else "-"
            value = None if value in ([], ()) else value
        if kind == "+":
            group = _insert(group, positions(value, len(group), extra=1))
        else:
            group = _REPLACE[kind](group, positions(value, len(group)))
    return group


def _rank(symbol: str, attributes: Attributes, known: Mapping[str, int]) -> int | None:
    if symbol == "..." or symbol.endswith("*"):
        return known.get(symbol)
    if "<" in symbol:
        value = attributes[symbol[2:]]
        if not isinstance(value, int) or value < 0:
            raise RuleRefusedError(f"{symbol[2:]} = {value}: a number from 0 is needed")
        return value
    return 1


def _solve(template: str, rank: int, attributes: Attributes, known: dict[str, int]) -> None:
    """The rank of the one group of `template` that is not known yet."""
    total, unknown = 0, ""
    for symbol, _ in _parse(template):
        size = None if symbol == "..." else _rank(symbol, attributes, known)
        if size is None:
            unknown = symbol
        else:
            total += size
    left = rank - total
    if left < 0 or (left > 0 and not unknown):
        raise RuleRefusedError(f"a tensor of rank {rank} does not match the notation '{template}'")
    if unknown == "...":
        known[unknown] = max(left, known.get(unknown, 0))
    elif unknown:
        known[unknown] = left


def _spell(template: str, rank: int | None, attributes: Attributes, known: Mapping[str, int], keep: str) -> Letters:
    out: Letters = ()
    fixed = sum(_rank(symbol, attributes, known) or 0 for symbol, _ in _parse(template) if symbol != "...")
    for symbol, operations in _parse(template):
        if symbol == "...":
            widest = known[symbol]
            here = widest if rank is None else rank - fixed
            group = tuple(f".{i}" for i in range(widest - here, widest))
            out += _operate(group, operations, attributes, keep)
        elif len(symbol) == 1:
            out += (symbol,)
        else:
            group = tuple(f"{symbol[0]}{i}" for i in range(_rank(symbol, attributes, known) or 0))
            out += _operate(group, operations, attributes, keep)
    return out


def letters(
    templates: Sequence[str], ranks: Sequence[int | None], attributes: Attributes, keep: str = "keep_dim"
) -> list[Letters]:
    """Letters of every tensor; the ranks that are given fix the groups. Refuses ranks that do not fit."""
    known: dict[str, int] = {}
    for template, rank in zip(templates, ranks, strict=True):
        if rank is not None and not any(operations for _, operations in _parse(template)):
            _solve(template, rank, attributes, known)
    for template, rank in zip(templates, ranks, strict=True):
        operated = any(kind not in "^!@=" for _, operations in _parse(template) for kind, _ in operations)
        if rank is not None and not operated:
            _solve(template, rank, attributes, known)
    return [_spell(template, rank, attributes, known, keep) for template, rank in zip(templates, ranks, strict=True)]
