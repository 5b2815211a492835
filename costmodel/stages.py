"""How a runtime cuts the layers into pp·vpp chunks, and which stages hold the same.

Chunk v·pp + s is the v-th chunk of stage s; where stages are laid out as a V, stage s holds chunks s and 2·pp − 1 − s
(arXiv 2401.10241, section 6). A content is the number of times that each segment
(embedding, layer kinds, head) occurs in a chunk; equal neighbours are run-length encoded, so that
costs are computed once per run and not once per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from distplan.costmodel.strategy import V_SHAPED

Content = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` neighbours with the same `content`, of which `first` is the first (a stage or a chunk)."""

    content: Content
    first: int
    count: int
    recompute: int | None = None
    """layers of each stage that are recomputed; None: what the strategy says"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    stages: tuple[Run, ...]
    chunks: tuple[Run, ...]


def chunk_layers(layers: int, chunks: int, mtp_layers: int = 0) -> tuple[int, ...]:
    """Layers of each chunk: equal; where they do not divide, embedding or loss (or both) counts as one.

    Megatron-LM's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split; then with the
    multi-token-prediction modules counted too, as layouts of DeepSeek-V3 are written (custom_pipeline_layout,
    Megatron Core docs: 61 + 1 and both ends are 64). What still does not divide leaves its remainder on the
    chunks in the middle, which hold nothing else.
    """
    ends = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for first, last in ends + [(first, last + mtp_layers) for first, last in ends if mtp_layers]:
        if (layers + first + last) % chunks == 0 and (layers + first + last) // chunks >= max(first, last):
            each = (layers + first + last) // chunks
            sizes = [each] * chunks
            sizes[0] -= first
            sizes[-1] -= last
            return tuple(sizes)
    each, rest = divmod(layers, chunks)
    sizes = [each] * chunks
    start = max(0, min(1, chunks - rest - 1))
    for at in range(start, start + rest):
        sizes[at] += 1
    return tuple(sizes)


@lru_cache(maxsize=4096)
def split(pattern: Sequence[int], num_segments: int, pp: int, vpp: int, schedule: str, mtp_layers: int = 0) -> Split:
    """The default split of layers whose segment numbers are `pattern` (segment 0 is the embedding, the
    last one the head) into pp stages of vpp chunks. Multi-token-prediction modules (the segment before the
    head) stand with the head, which they use once more each (Megatron-LM, multi_token_prediction.py).
    """
    sizes = chunk_layers(len(pattern), pp * vpp, mtp_layers)
    return split_of(pattern, num_segments, sizes, pp, vpp, schedule, mtp_layers)


def split_of(
    pattern: Sequence[int],
    num_segments: int,
    sizes: Sequence[int],
    pp: int,
    vpp: int,
    schedule: str,
    mtp_layers: int = 0,
    recompute: Sequence[int] = (),
) -> Split:
    """The split with `sizes` layers in each chunk, and `recompute` layers of each stage repeated (empty: as the
    strategy says)."""
    contents: list[Content] = []
    start = 0
    for at, size in enumerate(sizes):
        counts = [0] * num_segments
        for segment in pattern[start : start + size]:
            counts[segment] += 1
        counts[0] += at == 0
        if at == len(sizes) - 1:
            counts[-1] += 1 + mtp_layers
            if mtp_layers:
                counts[-2] += mtp_layers
        contents.append(tuple(counts))
        start += size
    stages = [
        tuple(sum(contents[k][i] for k in chunks_of(s, pp, vpp, schedule)) for i in range(num_segments))
        for s in range(pp)
    ]
    return Split(stages=_runs(stages, recompute), chunks=_runs(contents))


def virtual_stage(stage: int, chunk: int, pp: int, v_shaped: bool) -> int:
    """Number in the order of the model of what `stage` holds as its `chunk`, first to last."""
    return 2 * pp - 1 - stage if v_shaped and chunk else chunk * pp + stage


def chunks_of(stage: int, pp: int, vpp: int, schedule: str) -> tuple[int, ...]:
    """The chunks of a stage, numbered in the order of the model."""
    return tuple(virtual_stage(stage, chunk, pp, schedule in V_SHAPED) for chunk in range(vpp))


def stage_of(chunk: int, pp: int, schedule: str) -> int:
    """The stage that holds a chunk, which is numbered in the order of the model."""
    return 2 * pp - 1 - chunk if schedule in V_SHAPED and chunk >= pp else chunk % pp


def _runs(contents: Sequence[Content], recompute: Sequence[int] = ()) -> tuple[Run, ...]:
    runs: list[Run] = []
    for at, content in enumerate(contents):
        again = recompute[at] if recompute else None
        if runs and (runs[-1].content, runs[-1].recompute) == (content, again):
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(Run(content=content, first=at, count=1, recompute=again))
    return tuple(runs)
