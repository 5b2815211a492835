"""What a causal mask spares, for the utilization that counts it."""

from __future__ import annotations

from distplan.costmodel.model import Attention, Model, Workload


def causal_saving_flops(model: Model, workload: Workload) -> float:
    """FLOPs per token, forward and backward, of the half of the attention square above the diagonal.

    The scores cost 2·s·head_dim and the weighted sum 2·s·v_head_dim per head and token; backward
    costs twice forward (Narayanan et al. 2021, arXiv 2104.04473, appendix); half of it is masked.

    >>> from types import SimpleNamespace
    >>> mixer = Attention(heads=2, kv_heads=2, head_dim=8, v_head_dim=8)
    >>> model = SimpleNamespace(kinds={"a": SimpleNamespace(mixer=mixer)}, pattern=("a", "a"))
    >>> causal_saving_flops(model, SimpleNamespace(seq_len=10, causal=True))  # 2 layers · 3 · 2·10·16·2 / 2
    1920.0
    """
    if not workload.causal:
        return 0.0
    per_layer = {
        name: 2.0 * workload.seq_len * kind.mixer.heads * (kind.mixer.head_dim + kind.mixer.v_head_dim)
        for name, kind in model.kinds.items()
        if isinstance(kind.mixer, Attention)
    }
    return 3.0 / 2.0 * sum(per_layer.get(name, 0.0) for name in model.pattern)
