"""What a logit costs in memory while the loss is computed, by how it is computed."""

from __future__ import annotations

import pytest

from distplan.costmodel.case import case_of
from distplan.costmodel.estimate import estimate
from distplan.costmodel.model import Workload
from distplan.costmodel.model_file import read_model
from distplan.costmodel.runtime import load_runtime
from distplan.costmodel.strategy import Strategy
from distplan.costmodel.unfold import operators
from distplan.costmodel.workload import precision
from distplan.hardware.cluster import load_cluster
from distplan.hardware.documents import Document

VOCAB, SEQ = 2**20, 512
WIDE = {"layers": 1, "hidden": 64, "heads": 1, "ffn": 64, "vocab": VOCAB}
COPIES = {
    "vocab_parallel": 4 + 2,  # fp32 logits, whose gradient takes their place; its copy in bf16
    "fp32_logits": 4 + 4 + 2,  # fp32 logits; their gradient, and its copy in bf16
    "log_softmax": 2 + 4 + 4 + 4,  # the model's output; log-softmax; a gradient of each fp32 tensor
    "gathered": 2 + 4 + 4 + 4,  # the same, on logits of the whole vocabulary
    "compiled": 2 + 2,  # logits and their gradient in bf16
}


@pytest.mark.parametrize("loss", COPIES)
def test_bytes_per_logit(loss: str) -> None:
    model = read_model(Document(file="wide", value=WIDE, lines={}), "wide")
    workload = Workload(seq_len=SEQ, global_batch=1, precision=precision("bf16"), loss=loss)
    priced = estimate(model, workload, load_cluster("dgx-h100"), load_runtime("any"), Strategy(), detail=True)
    per_logit = float(priced.memory["logits and loss"][0]) / (SEQ * VOCAB)
    assert per_logit == pytest.approx(COPIES[loss], rel=0.01)


def test_capped_logits_are_one_more_pass_each_way() -> None:
    """tanh reads and writes logits of two bytes; backward reads them and their gradient and writes the next."""
    model = read_model(Document(file="wide", value=WIDE | {"logit_softcap": True}, lines={}), "wide")
    workload = Workload(seq_len=SEQ, global_batch=1, precision=precision("bf16"))
    given = (model, workload, load_cluster("dgx-h100"), load_runtime("any"), Strategy())
    passes = [op for op in operators(case_of(*given, estimate(*given, detail=True))) if "softcap" in op.name]
    moved = {op.phase: op.moved_bytes / (SEQ * VOCAB) for op in passes}
    assert moved == {"forward": 2 + 2, "backward": 2 + 2 + 2}
