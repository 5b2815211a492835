"""Measurements that a cluster would give if it were exactly what its hardware file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distplan.costmodel.fitting import end_seconds
from distplan.costmodel.strategy import Strategy
from distplan.hardware.calibrated import links_of, rates_of
from distplan.hardware.cluster import Cluster
from distplan.hardware.fit_collectives import CollectiveRow, predict_rows
from distplan.hardware.rates import attention_seconds, gemm_seconds, memory_seconds, pcie_seconds
from distplan.planner import api, benchmark_script

RUNS = (
    ("llama-3.1-8b", Strategy(dp_shard=8, recompute="full", recompute_layers=32), 64),
    ("llama-3.1-8b", Strategy(dp_shard=4, tp=2, sp=True), 64),
    ("llama-3.1-8b", Strategy(dp_shard=2, tp=4, sp=True, micro_batch=2), 64),
    ("llama-3.1-8b", Strategy(dp_shard=2, tp=2, pp=2, sp=True), 64),
    ("llama-3.1-8b", Strategy(dp_shard=4, pp=4), 128),
    ("llama-3.1-8b", Strategy(dp_shard=4, tp=2, pp=2, sp=True), 128),
    ("llama-3.1-8b", Strategy(dp_shard=2, tp=8, sp=True), 128),
    ("llama-3.1-8b", Strategy(dp_shard=1, tp=8, sp=True), 64),
)
"""model, strategy, global batch; sequences of 4,096"""


def bench(cluster: Cluster, device: str, times: float = 1.0) -> dict[str, Any]:
    """The content of a bench.json with the script's own shapes; every time is `times` the modelled one."""
    rates, script = rates_of(cluster), benchmark_script
    half = "bf16" if "bf16" in rates.gemm else "fp16"
    found: list[dict[str, Any]] = []
    for n, k in script.WEIGHTS:
        for m in script.TOKENS:
            seconds = float(gemm_seconds(rates, m, n, k, half, cast_input=False))
            found.append({"kind": "gemm", "m": m, "n": n, "k": k, "dtype": half, "seconds": seconds})
    for head_dim in script.HEAD_DIMS if half == "bf16" else ():  # torch has no flash kernel before sm_80
        for length in script.LENGTHS:
            batch, heads = script.ATTENTION_TOKENS // length, script.ATTENTION_WIDTH // head_dim
            shape = {"kernel": "flash3", "batch": batch, "heads": heads, "head_dim": head_dim, "seq_len": length}
            flops = 4.0 * batch * heads * length**2 * head_dim
            for direction in ("forward", "backward"):
                for causal in (True, False):
                    backward = direction == "backward"
                    seconds = float(attention_seconds(rates, flops, head_dim, length, length, causal, backward))
                    row = {"kind": "attention", "direction": direction, "causal": causal, "dtype": "bf16"}
                    found.append({**row, **shape, "seconds": seconds})
    for size in script.COPIES:
        inside, host = float(memory_seconds(rates, 2 * size)), float(pcie_seconds(rates, size))
        found.append({"kind": "copy", "path": "device", "bytes": 2 * size, "seconds": inside})
        found.append({"kind": "copy", "path": "host", "bytes": size, "seconds": host})
    found += _collectives(cluster)
    rows = [row | {"seconds": row["seconds"] * times} for row in found]
    date = "2026-11-30T12:00:00+00:00"
    return {"format": script.FORMAT, "date": date, "device": device, "versions": {"torch": "2.9.1"}, "ranks": 16,
            "nodes": 2, "smoke": False, "measurements": rows}  # fmt: skip


def _collectives(cluster: Cluster) -> list[dict[str, Any]]:
    rows = [
        CollectiveRow(kind=kind, ranks=ranks, nodes=nodes, size=float(size), seconds=1.0)
        for kind in benchmark_script.COLLECTIVES
        for ranks, nodes in ((8, 1), (16, 2))
        for size in benchmark_script.MESSAGES
    ]
    times = predict_rows(rows, cluster, links_of(cluster))
    return [
        {"kind": "collective", "collective": row.kind, "bytes": int(row.size), "ranks": row.ranks,
         "nodes": row.nodes, "dtype": "bf16", "seconds": float(seconds)}
        for row, seconds in zip(rows, times, strict=True)
    ]  # fmt: skip


def write_bench(path: Path, cluster: Cluster, device: str, times: float = 1.0) -> Path:
    path.write_text(json.dumps(bench(cluster, device, times)), encoding="utf-8")
    return path


def runs_csv(hardware: str, *, times: float = 1.0, more_bytes: float = 0.0, number: int = len(RUNS)) -> str:
    """A runs.csv of what the estimate says, with what a micro-batch does `times` as long and `more_bytes` a GPU."""
    columns = ("dp_shard", "tp", "pp", "sp", "recompute", "micro_batch")
    lines = [",".join(("model", "gpus", *columns, "global_batch", "seq_len", "step_time", "peak_memory"))]
    for model, strategy, batch in RUNS[:number]:
        workload = {"global_batch": batch, "seq_len": 4096}
        best = api.estimate(model, strategy, hardware=hardware, workload=workload).best
        assert best is not None
        end = end_seconds({name: float(part[0]) for name, part in best.estimate.time.items()}, strategy.zero)
        seconds = (best.step_seconds - end) * times + end
        held = float(best.estimate.device_bytes[0]) + more_bytes
        values = [str(getattr(strategy, name)).lower() for name in columns]
        lines.append(f"{model},{strategy.gpus},{','.join(values)},{batch},4096,{seconds!r}s,{held / 2**30!r} GiB")
    return "\n".join(lines) + "\n"
