"""Measured attention kernels from the two tables that `measurements` reads, once each, in base units."""

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurements import accelerator_of, origin_of, read_rows, short_source

BACKWARD_OVER_FORWARD = 2.5
"""Five products against two: Dao 2023, FlashAttention-2, section 4.1."""

_TERA = 1e12
_WORK = {"forward": 1.0, "backward": BACKWARD_OVER_FORWARD, "both": 1.0 + BACKWARD_OVER_FORWARD}
_IMPLEMENTATIONS = {"FlashAttention-2": "flash2", "FlashAttention-3": "flash3", "cuDNN": "cudnn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """One measured kernel over whole sequences (queries = keys = length); `work` is forward | backward | both."""

    accelerator: str
    origin: str
    implementation: str
    work: str
    causal: bool
    batch: int
    heads: int
    kv_heads: int
    head_dim: float
    length: int
    seconds: float
    source: str

    @property
    def flops_full(self) -> float:
        """FLOPs of the two forward products over the whole square of scores: 4 b h s^2 d."""
        return 4.0 * self.batch * self.heads * self.length * self.length * self.head_dim

    @property
    def executed_flops(self) -> float:
        """What the kernel executes: half where causal, 2.5 times forward in backward."""
        return self.flops_full * (0.5 if self.causal else 1.0) * _WORK[self.work]


def _row(
    row: dict[str, str],
    implementation: str,
    work: str,
    shape: tuple[int, int, int, float, int, bool],
    *,
    seconds: float = 0.0,
    executed_rate: float = 0.0,
) -> AttentionRow | None:
    accelerator = accelerator_of(row.get("gpu", row.get("device", "")))
    if accelerator is None:
        return None
    batch, heads, kv_heads, head_dim, length, causal = shape
    flops = 4.0 * batch * heads * length * length * head_dim * (0.5 if causal else 1.0) * _WORK[work]
    return AttentionRow(
        accelerator=accelerator,
        origin=origin_of(row["source"]),
        implementation=implementation,
        work=work,
        causal=causal,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        length=length,
        seconds=seconds or flops / executed_rate,
        source=short_source(row["source"]),
    )


def _prefill(row: dict[str, str]) -> AttentionRow | None:
    found = re.match(r"b(\d+) s(\d+) h(\d+) kv(\d+) d(\d+)", row["shape"])
    if not found or row["unit"] != "ms":
        return None
    b, s, h, kv, d = (int(item) for item in found.groups())
    return _row(row, "prefill", "forward", (b, h, kv, d, s, True), seconds=float(row["achieved"]) * 1e-3)


def _figure(row: dict[str, str]) -> AttentionRow | None:
    found = re.match(r"b(\d+) s(\d+) h(\d+) d(\d+) causal=(\d)", row["shape"])
    implementation = _IMPLEMENTATIONS.get(row["notes"].split(";")[0])
    if not found or implementation is None or row["unit"] != "TFLOP/s":
        return None
    b, s, h, d, causal = (int(item) for item in found.groups())
    work = "both" if "backward" in row["kind"] else "forward"
    rate = float(row["achieved"]) * _TERA
    return _row(row, implementation, work, (b, h, h, d, s, bool(causal)), executed_rate=rate)


def _calibrated(row: dict[str, str]) -> AttentionRow | None:
    """SimuMax counts causal FLOPs in full (its efficiencies exceed 1 otherwise) and five products in backward.

    Where keys and values differ in width it counts the mean, while kernels pad to the wider: `head_dim` is the wider.
    """
    found = re.findall(r"(\w+)=(\d+)", row["shape"])
    peak = re.search(r"fraction of ([\d.]+) TFLOP/s", row["unit"])
    if not found or peak is None or "qkv_contiguous=True" not in row["shape"]:
        return None
    size = {name: int(value) for name, value in found}
    head_dim = float(max(size["qk_head_dim"], size["v_head_dim"]))
    padding = 2.0 * head_dim / (size["qk_head_dim"] + size["v_head_dim"])
    work = "backward" if row["kind"].startswith("sdp_bwd") else "forward"
    rate = float(row["achieved"]) * float(peak.group(1)) * _TERA / 2.0 * padding
    shape = (size["batch"], size["head_num"], size["kv_head_num"], head_dim, size["seq_len"], True)
    return _row(row, "training", work, shape, executed_rate=rate)


def _step_bucket(row: dict[str, str]) -> AttentionRow | None:
    """The attention share of a training step of Llama-3.1-8B (32 heads of 128) at 8,192 tokens.

    The source prints model FLOPs (forward times 3) as MFU does; kernels execute 3.5. Read so, its B200 figure is
    973 TFLOP/s, against 977 from SimuMax's own forward and backward kernels on B200: the reading is consistent.
    """
    rate = float(row["value"]) * _TERA * _WORK["both"] / 3.0
    return _row(row, "training", "both", (1, 32, 8, 128, 8192, True), executed_rate=rate)


def attention_rows(measured: Path, micro: Path) -> list[AttentionRow]:
    """Every flash kernel of the two tables; figures that the sources cross-read are taken from `micro` alone."""
    rows: list[AttentionRow | None] = []
    for row in read_rows(micro):
        if row["kind"] == "attention forward (causal)":
            rows.append(_prefill(row))
        elif row["kind"] in ("attention forward", "attention forward+backward"):
            rows.append(_figure(row))
        elif row["kind"].startswith(("sdp_fwd", "sdp_bwd")):
            rows.append(_calibrated(row))
    for row in read_rows(measured):
        if row["kind"] == "train_step_tflops" and "bucket: attention" in row["detail"]:
            rows.append(_step_bucket(row))
    kept = {
        (
            row.accelerator,
            row.origin,
            row.implementation,
            row.work,
            row.causal,
            row.batch,
            row.heads,
            row.kv_heads,
            row.head_dim,
            row.length,
        ): row
        for row in reversed(rows)
        if row is not None
    }
    return [kept[key] for key in sorted(kept)]
