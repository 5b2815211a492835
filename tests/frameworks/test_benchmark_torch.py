"""The script that `distplan calibrate --emit-benchmark` writes runs in PyTorch, alone and under torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest

from distplan.hardware.microbench import read_bench
from distplan.planner.benchmark_script import COLLECTIVES
from distplan.planner.calibrate import benchmark_script


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_writes_what_calibrate_reads(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "bench.py").write_text(benchmark_script(), encoding="utf-8")
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "bench.py", "--smoke", "-o", "bench.json"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=200, stdin=subprocess.DEVNULL)
    found = read_bench(str(tmp_path / "bench.json"))
    assert found.device == "cpu"
    assert found.gemm and found.attention and found.copies
    assert {row.kind for row in found.collectives} == (set(COLLECTIVES) if ranks > 1 else set())
    assert all(row.ranks == ranks for row in found.collectives)
