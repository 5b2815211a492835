"""Cuts into several chunks a stage, improved layer by layer: quick where a program has only begun, and no proof."""

from __future__ import annotations

from collections.abc import Iterator

from distplan.costmodel.balance_problem import Problem, Sizes

Score = tuple[float, ...]
"""stages' seconds, the heaviest first: of two cuts with the same heaviest stage the one with fewer such is better"""


def climbed(problem: Problem, again: int, start: Sizes) -> tuple[Sizes, float]:
    """(a cut that no move of one layer betters and that fits, its heaviest stage in seconds), from one that fits.

    A layer moves from a chunk of the heaviest stage to any chunk: the boundaries between the two shift by one.
    """
    best, score = start, _score(problem, again, start)
    while True:
        better = sorted(
            (each, sizes) for sizes in _moves(problem, again, best) if (each := _score(problem, again, sizes)) < score
        )
        fitting = next((found for found in better if _fits(problem, again, found[1])), None)
        if fitting is None:
            return best, score[0]
        score, best = fitting


def _loads(problem: Problem, again: int, sizes: Sizes) -> list[float]:
    return [problem.load(problem.stage_content(sizes, stage), again) for stage in range(problem.strategy.pp)]


def _score(problem: Problem, again: int, sizes: Sizes) -> Score:
    return tuple(sorted(_loads(problem, again, sizes), reverse=True))


def _fits(problem: Problem, again: int, sizes: Sizes) -> bool:
    return all(problem.fits(problem.stage_content(sizes, s), s, again) for s in range(problem.strategy.pp))


def _moves(problem: Problem, again: int, sizes: Sizes) -> Iterator[Sizes]:
    loads = _loads(problem, again, sizes)
    heaviest = max(range(len(loads)), key=loads.__getitem__)
    chunks = problem.stage_chunks(heaviest)
    for giver in chunks:
        least = 0 if giver in (0, problem.chunks - 1) else 1
        if sizes[giver] <= least:
            continue
        for taker in range(problem.chunks):
            if taker not in chunks:
                moved = list(sizes)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
