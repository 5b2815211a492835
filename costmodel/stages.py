"""How a runtime cuts the layers into pp·vpp chunks, and which stages hold the same.

Chunk v·pp + s is the v-th chunk of stage s. A content is the number of times that each segment
(embedding, layer kinds, head) occurs in a chunk; equal neighbours are run-length encoded, so that
costs are computed once per run and not once per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Content = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` neighbours with the same `content`, of which `first` is the first (a stage or a chunk)."""

    content: Content
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    stages: tuple[Run, ...]
    chunks: tuple[Run, ...]


def chunk_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk: equal; where they do not divide, embedding or loss (or both) counts as one.

    Megatron-LM's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split. What
    still does not divide leaves its remainder on the chunks in the middle, which hold nothing else.
    """
    for first, last in ((0, 0), (0, 1), (1, 0), (1, 1)):
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
def split(
    pattern: Sequence[int], num_segments: int, pp: int, vpp: int, mtp_layers: int = 0, v_shaped: bool = False
) -> Split:
    """The default split of layers whose segment numbers are `pattern` (segment 0 is the embedding, the
    last one the head) into pp stages of vpp chunks. Multi-token-prediction modules (the segment before the
    head) stand with the head, which they use once more each (Megatron-LM, multi_token_prediction.py). `v_shaped`: stage s holds chunks s and 2·pp−1−s."""
    sizes = chunk_layers(len(pattern), pp * vpp)
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
        tuple(sum(contents[k][i] for k in chunks_of(s, pp, vpp, v_shaped)) for i in range(num_segments))
        for s in range(pp)
    ]
    return Split(stages=_runs(stages), chunks=_runs(contents))


def chunks_of(stage: int, pp: int, vpp: int, v_shaped: bool) -> tuple[int, ...]:
    """The chunks of a stage, in the order of the model."""
    return (stage, 2 * pp - 1 - stage) if v_shaped else tuple(v * pp + stage for v in range(vpp))


def _runs(contents: Sequence[Content]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for at, content in enumerate(contents):
        if runs and runs[-1].content == content:
            runs[-1] = Run(content=content, first=runs[-1].first, count=runs[-1].count + 1)
        else:
            runs.append(Run(content=content, first=at, count=1))
    return tuple(runs)
