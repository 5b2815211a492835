"""What calibrate reads and emits: the script stands alone, nccl-tests' tables, the document's examples."""

from __future__ import annotations

import ast
import csv
import io
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distplan.hardware.cluster import load_cluster
from distplan.hardware.errors import DistplanError
from distplan.hardware.microbench import FORMAT, MOST_ROWS, check_device, read_bench, read_nccl_tests
from distplan.planner import benchmark_script
from distplan.planner.cli import run
from distplan.planner.runs_file import read_runs

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
PUBLISHED = ROOT / "examples" / "calibrate" / "all_reduce_8xh100.txt"
HEAD = """# nThread 1 nGpus 1 minBytes 8388608 maxBytes 16777216 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid  31416 on node-a device  0 [0x1b] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  31417 on node-a device  1 [0x43] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  27182 on node-b device  0 [0x1b] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  27183 on node-b device  1 [0x43] NVIDIA H100 80GB HBM3
#
"""
TABLE = """#       size         count      type   redop    root     time   algbw   busbw #wrong    time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
     8388608       2097152     float     sum      -1    200.0   41.94   62.91      0    198.0
    16777216       4194304     float     sum      -1    390.0   43.02   64.53      0    388.0
# Out of bounds values : 0 OK
"""


def test_the_script_needs_torch_and_the_standard_library_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--emit-benchmark"]) == 0
    text = capsys.readouterr().out
    assert text.encode() == Path(benchmark_script.__file__).read_bytes()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported - {"torch"} <= sys.stdlib_module_names
    assert "torch" in imported


def test_the_script_is_written_whole_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--emit-benchmark", "-o", str(tmp_path / "bench.py")]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "bench.py" in captured.err
    compile((tmp_path / "bench.py").read_text(encoding="utf-8"), "bench.py", "exec")


def test_what_the_script_wrote_on_a_cpu_is_read_and_calibrates_nothing() -> None:
    """The file is torch 2.13's under `torchrun --nproc-per-node 2 bench.py --smoke`."""
    found = read_bench(str(DATA / "calibrate_smoke.json"))
    assert FORMAT == benchmark_script.FORMAT
    assert {row.kind for row in found.collectives} == set(benchmark_script.COLLECTIVES)
    assert {row.work for row in found.attention} == {"forward", "backward"}
    assert found.gemm and found.copies
    with pytest.raises(DistplanError, match="smoke"):
        check_device(found, load_cluster("dgx-h100"))


def test_a_device_of_ones_own_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        """accelerator: {name: cpu, peak_flops: {bf16: 1 TFLOP/s}, memory: 64 GiB, memory_bandwidth: 100 GB/s}
gpus_per_node: 2
scaleup: {technology: pcie4, bandwidth: 25 GB/s}
fabric: {technology: ethernet, bandwidth: 10 Gbit/s}
"""
    )
    measured = replace(read_bench(str(DATA / "calibrate_smoke.json")), smoke=False)
    check_device(measured, load_cluster(tmp_path / "mine.yaml"))
    with pytest.raises(DistplanError, match="cpu"):
        check_device(measured, load_cluster("dgx-h100"))


def test_ranks_nodes_and_device_are_read_above_the_table(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("# Collective test starting: all_reduce_perf\n" + HEAD + TABLE)
    found = read_nccl_tests(str(path))
    assert found.device == "NVIDIA H100 80GB HBM3"
    assert [(row.kind, row.ranks, row.nodes) for row in found.collectives] == [("all_reduce", 4, 2)] * 2
    assert [row.seconds for row in found.collectives] == pytest.approx([200e-6, 390e-6]), "out of place"


def test_what_a_table_does_not_say_must_be_given(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(TABLE)
    with pytest.raises(DistplanError, match="--collective"):
        read_nccl_tests(str(path))
    with pytest.raises(DistplanError, match="--ranks and --nodes"):
        read_nccl_tests(str(path), collective="all_reduce")
    assert read_nccl_tests(str(path), collective="all_reduce", ranks=4, nodes=2).collectives
    with pytest.raises(DistplanError, match="ranks 4, nodes 8"):
        read_nccl_tests(str(path), collective="all_reduce", ranks=4, nodes=8)


def test_a_table_longer_than_any_is_refused_and_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(TABLE * (1 + MOST_ROWS // 2))
    with pytest.raises(DistplanError, match="more than"):
        read_nccl_tests(str(path), collective="all_reduce", ranks=4, nodes=2)


@pytest.mark.parametrize(("collective", "ranks"), [("all_reduce", 8), ("all_gather", 4)])
def test_a_bus_bandwidth_of_another_collective_or_size_is_refused(tmp_path: Path, collective: str, ranks: int) -> None:
    """busbw / algbw is 2(n-1)/n for all_reduce and (n-1)/n for all_gather (nccl-tests, doc/PERFORMANCE.md)."""
    path = tmp_path / "log.txt"
    path.write_text(TABLE)
    with pytest.raises(DistplanError, match=r"busbw / algbw is 1\.500"):
        read_nccl_tests(str(path), collective=collective, ranks=ranks, nodes=1)


@pytest.mark.parametrize(
    "row",
    [
        "     8388608       2097152     float     sum      -1      nan   41.94   62.91      0",
        "     8388608       2097152     float     sum      -1   -200.0   41.94   62.91      0",
        "     8388608       2097152     float     sum      -1    200.0   41.94   62.91     17",
    ],
)
def test_a_row_that_is_no_measurement_is_refused_with_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(f"{row}\n")
    with pytest.raises(DistplanError, match=r"log.txt:1"):
        read_nccl_tests(str(path), collective="all_reduce", ranks=4, nodes=1)


def test_published_all_reduces_are_nearer_to_the_model_after_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What NVIDIA prints for 8 GPUs of a DGX H100."""
    monkeypatch.chdir(tmp_path)
    bench = read_nccl_tests(str(PUBLISHED), ranks=8, nodes=1)
    assert len(bench.collectives) == 25
    arguments = ["calibrate", str(PUBLISHED), "--ranks", "8", "--nodes", "1", "-o", "mine.yaml", "--format", "csv"]
    assert run(arguments) == 0
    (found,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(found["after_p90"]) < float(found["before_p90"])
    assert load_cluster("mine.yaml").calibration.links["scaleup"]["in_switch"].points == 25


def test_columns_go_by_the_names_that_launchers_use(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "# a remark\n"
        "model,--gpus,tensor-model-parallel-size,micro_batch_size,global-batch-size,step-time,peak_memory,note\n"
        + "llama-3.1-8b,8,2,1,64,3.7,45.5,mine\n"
        + "llama-3.1-8b,8,4,1,64,3700 ms,45.5GiB,\n"
    )
    first, second = read_runs(str(path), load_cluster("dgx-h100"))
    assert (first.strategy.tp, first.strategy.dp, first.strategy.sp) == (2, 4, True)
    assert first.step_seconds == second.step_seconds == 3.7
    assert first.peak_bytes == second.peak_bytes == 45.5 * 2**30
    assert first.job.workload.global_batch == 64


# ---------------------------------------------------------------- docs/calibrate.md

DOC = (ROOT / "docs" / "calibrate.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ (distplan [^\n]+)\n(.*?)```", DOC, re.DOTALL)


@pytest.mark.parametrize(("line", "shown"), EXAMPLES, ids=[line.split()[2] for line, _ in EXAMPLES])
def test_the_output_in_the_document_is_real(
    line: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """.ci/questions writes it anew."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert run(shlex.split(line)[1:]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:1] == shown.splitlines()[:1]
    assert max(len(text) for text in out.splitlines()) <= 80
    assert load_cluster("my-cluster.yaml").calibration.number("software_factor") != 1.0
