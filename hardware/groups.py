"""Process groups on a machine: how many members share each tier's domains, at the worst instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from distplan.hardware.cluster import Cluster

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Group:
    """n ranks; per tier (inner to outer) the fewest that share a domain and the most domains spanned."""

    size: Floats
    inside: tuple[Floats, ...]
    spans: tuple[Floats, ...]


def group_span(axes: Sequence[tuple[Floats, Floats]], cluster: Cluster, gpus: Floats | None = None) -> Group:
    """The group formed by mesh axes, innermost first: (degree, stride) in ranks, stride 1 = neighbours.

    Groups tile the ranks, so their starts are multiples of their extent. Where a domain is straddled
    unevenly, `inside` and `spans` are those of the worst of all instances (6 neighbours in domains of 4
    leave 2 alone in one). `gpus`: size of the job, as a launcher places it: in one domain if it fits,
    else evenly (128 GPUs on racks of 72 take 64 of each; 12 on nodes of 8 take 6 of each).
    """
    runs = _merged(axes)
    size = _product([degree for degree, _ in runs])
    inside: list[Floats] = []
    spans: list[Floats] = []
    for tier in cluster.tiers:
        domain = np.full_like(size, tier.size) if gpus is None else _even_domain(gpus + 0.0 * size, tier.size)
        parts = [_in_domains(degree, stride, domain) for degree, stride in runs]
        within = _product([members for members, _ in parts])
        across = _product([domains for _, domains in parts])
        if gpus is not None:
            whole = gpus <= tier.size
            within = np.where(whole, size, within)
            most = np.ones_like(size) if np.isinf(tier.size) else np.ceil(gpus / domain)
            across = np.where(whole, 1.0, np.minimum(across, most))
        inside.append(within)
        spans.append(np.minimum(across, size))
    return Group(size, tuple(inside), tuple(spans))


def _even_domain(gpus: Floats, domain: float) -> Floats:
    """GPUs that a job takes of each domain: the largest divisor of `gpus` that fills at least half of it.

    Launchers start the same number of ranks on every node, schedulers take equal segments of racks.
    """
    if np.isinf(domain) or domain == 1.0:
        return np.full_like(gpus, domain)
    jobs, index = np.unique(gpus, return_inverse=True)
    return np.array([_even_share(job, domain) for job in jobs.tolist()])[index]


@cache
def _even_share(gpus: float, domain: float) -> float:
    if not np.isfinite(gpus) or gpus % domain == 0.0:
        return domain
    shares = range(int(domain), int(domain / 2.0 - 0.5), -1)
    return float(next((share for share in shares if gpus % share == 0.0), domain))


def _product(factors: Sequence[Floats]) -> Floats:
    total = factors[0]
    for factor in factors[1:]:
        total = total * factor
    return total


def _merged(axes: Sequence[tuple[Floats, Floats]]) -> list[tuple[Floats, Floats]]:
    """Runs of evenly spaced ranks: an axis that continues the one inside it is joined to it."""
    runs: list[tuple[Floats, Floats]] = []
    degree, stride = axes[0]
    for outer_degree, outer_stride in axes[1:]:
        alone = degree == 1.0
        joined = alone | (outer_stride == stride * degree) | (outer_degree == 1.0)
        runs.append((np.where(joined, 1.0, degree), stride))
        stride = np.where(joined & ~alone, stride, outer_stride)
        degree = np.where(joined, degree * outer_degree, outer_degree)
    return [*runs, (degree, stride)]


def _in_domains(degree: Floats, stride: Floats, domain: Floats) -> tuple[Floats, Floats]:
    """Fewest members in one domain, and most domains, of `degree` ranks `stride` apart."""
    unbounded = np.isinf(domain)
    domain = np.where(unbounded, degree * stride, domain)
    slots = domain / stride
    whole_slots = np.floor(slots) == slots
    # Starts are multiples of degree, so the remainders at a domain's edge are multiples of the gcd.
    edge = np.gcd(degree.astype(np.int64), np.maximum(slots, 1.0).astype(np.int64)).astype(np.float64)
    even_inside = edge
    even_spans = np.ceil((slots - edge + degree) / np.maximum(slots, 1.0))
    # Strides that do not divide the domain: whole domains where the extent is a multiple, else the worst.
    extent = degree * stride
    aligned = np.floor(extent / domain) * domain == extent
    odd_inside = np.where(aligned, np.floor(slots), 1.0)
    odd_spans = np.where(aligned, extent / domain, np.ceil(extent / domain) + 1.0)
    apart = stride >= domain
    inside = np.where(apart, 1.0, np.where(whole_slots, even_inside, odd_inside))
    spans = np.where(apart, degree, np.where(whole_slots, even_spans, np.minimum(odd_spans, degree)))
    single = degree == 1.0
    return np.where(single, 1.0, inside), np.where(single, 1.0, spans)
