"""A block of your own: a function that adds operators, priced and verified like any other.

A bottleneck MLP, hidden -> narrow -> ffn -> hidden. Its ffn dim is sharded on tp because every dim of
that name is; the narrow dim is not. Nothing about parallelism is said here, and nothing in distplan
is changed: which collectives tp, sp, cp and ZeRO need follows from the operators.

    python examples/custom_block.py
"""

from dataclasses import replace

import distplan
from distplan import Builder, Custom


def bottleneck(b: Builder, x: str) -> str:
    hidden, narrow, wide = ("batch", "seq", "hidden"), ("batch", "seq", "narrow"), ("batch", "seq", "ffn")
    h = b.linear("squeeze", x, hidden, ("hidden", "narrow"), narrow)
    h = b.linear("up", h, narrow, ("narrow", "ffn"), wide)
    h = b.add("activation", "act", {h: wide}, wide, function="gelu")
    return b.linear("down", h, wide, ("ffn", "hidden"), hidden)


def with_bottleneck(name: str, narrow: int, ffn: int) -> distplan.Model:
    """A shipped model whose MLPs are bottlenecks."""
    model = distplan.load_model(name).model
    block = Custom(build=bottleneck, sizes={"narrow": float(narrow), "ffn": float(ffn)})
    kinds = {key: replace(kind, ffn=block) for key, kind in model.kinds.items()}
    return replace(model, name=f"{name}-bottleneck", kinds=kinds)


if __name__ == "__main__":
    plan = distplan.search(with_bottleneck("llama-3.1-8b", narrow=1024, ffn=16384), gpus=16)
    assert plan.best is not None
    print(plan.best.strategy)
    print(f"{plan.best.step_seconds:.2f} s per step")
