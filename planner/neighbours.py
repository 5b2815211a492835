"""When there is no plan: why, and the GPU counts nearby at which there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distplan.planner.pricing import Job, any_fits, any_legal

MAX_GPUS = 131_072
"""no job of public record is larger; the search for a smallest count ends here or at 4 x the count asked"""
MAX_SCAN = 64
"""counts tried one by one between the last that does not fit and the first that does"""
MAX_STEPS = 512
"""counts tried in each direction for a legal factorisation"""


def whole_counts(node: int, limit: int) -> list[int]:
    """1, 2, 4 … below a node, then node, 2, 4 … nodes up to `limit`: the doubling sequence."""
    counts = [1 << n for n in range(node.bit_length()) if 1 << n < node]
    nodes = node
    while nodes <= limit:
        counts.append(nodes)
        nodes *= 2
    return counts


def smallest_that(fits: Callable[[int], bool], node: int, limit: int) -> tuple[int | None, bool]:
    """(the smallest count up to `limit` that fits, was every smaller one tried).

    Doubles until one fits, then tries the whole-node counts between, all of them where they are at most
    MAX_SCAN, else by bisection, which can miss a smaller one: fitting need not be monotone in the count.
    """
    below = 0
    for count in whole_counts(node, limit):
        if fits(count):
            between = [n for n in range(below + 1, count) if n % node == 0] if count > node else []
            if len(between) <= MAX_SCAN:
                return next((n for n in between if fits(n)), count), True
            return _bisected(fits, between, count), False
        below = count
    return None, True


def _bisected(fits: Callable[[int], bool], between: list[int], found: int) -> int:
    low, high = 0, len(between)
    while low < high:
        middle = (low + high) // 2
        if fits(between[middle]):
            high, found = middle, between[middle]
        else:
            low = middle + 1
    return found


def smallest_gpus(job: Job, gpus: int, global_batch: int) -> tuple[int | None, int, bool]:
    """(the smallest count at which something fits, the largest that was tried, every smaller one tried)."""
    limit = min(MAX_GPUS, max(4 * gpus, 64 * job.cluster.gpus_per_node))
    count, whole = smallest_that(lambda n: any_fits(job, n, global_batch), job.cluster.gpus_per_node, limit)
    return count, limit, whole


def legal_neighbours(job: Job, gpus: int, global_batch: int) -> tuple[int | None, int | None]:
    """The nearest counts below and above `gpus` that have a legal strategy, within MAX_STEPS."""
    below = _first_legal(job, range(gpus - 1, max(0, gpus - 1 - MAX_STEPS), -1), global_batch)
    above = _first_legal(job, range(gpus + 1, gpus + 1 + MAX_STEPS), global_batch)
    return below, above


def _first_legal(job: Job, counts: Iterable[int], global_batch: int) -> int | None:
    return next((count for count in counts if any_legal(job, count, global_batch)), None)
