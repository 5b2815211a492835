"""Calibration gives back what the measurements were made from, changes nothing without cause, and refuses nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from measuring import RUNS, bench, runs_csv, write_bench

from distplan.costmodel.fitted import fitted
from distplan.hardware.calibrated import links_of, rates_of
from distplan.hardware.cluster import load_cluster
from distplan.planner import api, benchmark_script
from distplan.planner.calibrate import calibrate
from distplan.planner.cli import run
from distplan.planner.schema import schema

H100 = "NVIDIA H100 80GB HBM3"
CONSTANTS = {"peak_fraction": 0.01, "bandwidth_fraction": 0.03, "head_dim_64": 0.02}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def known_cluster(folder: Path) -> Any:
    """dgx-h100 with constants of our choice, measured by nobody."""
    text = {
        "name": "known",
        "accelerator": "h100-sxm5-80gb",
        "gpus_per_node": 8,
        "scaleup": {"technology": "nvlink4", "bandwidth": "450 GB/s", "in_switch_reduction": True},
        "fabric": {"technology": "infiniband", "bandwidth": "400 Gbit/s"},
    }
    shipped = load_cluster("dgx-h100")
    curve = links_of(shipped)[0].curves["all_gather"]
    rates = rates_of(shipped)
    gemm, ahead = rates.gemm["bf16"], rates.attention_forward
    points = {"points": 1, "source": "invented"}
    text["calibration"] = {
        "gemm": {
            "bf16": {
                "peak_fraction": 0.61, "bandwidth_fraction": 0.7, "latency": "6 us", "overlap": gemm.overlap,
                "ramp": 2.0 * gemm.ramp, "wave": gemm.wave, "tile_128": gemm.tile_costs[1][2],
                "tile_64": gemm.tile_costs[2][2], **points,
            }
        },
        "attention": {
            "forward": {
                "peak_fraction": 0.5, "head_dim_64": 0.7, "head_dim_256": ahead.head_dim_256, "ramp": ahead.ramp,
                "causal_ramp": 1.5 * ahead.causal_ramp, "tail_rows": ahead.tail_rows, "latency": "9 us", **points,
            }
        },
        "links": {
            "scaleup": {
                "all_gather": {
                    "base": "20 us", "per_rank": f"{curve.rank_seconds * 1e6} us", "efficiency": 0.6,
                    "own_copy": curve.own_copy, "large": curve.large, "knee": curve.knee, **points,
                }
            }
        },
        "memory_fraction": {"value": 0.7, **points},
        "host_fraction": {"value": 0.5, **points},
    }  # fmt: skip
    path = folder / "known.yaml"
    path.write_text(yaml.safe_dump(text))
    return load_cluster(path)


def test_constants_come_back_from_what_they_predict(in_a_folder: Path) -> None:
    known = known_cluster(in_a_folder)
    write_bench(in_a_folder / "bench.json", known, H100)
    found, _ = calibrate(["bench.json"], "dgx-h100")
    for group in ("gemm", "attention"):
        for name, entry in getattr(known.calibration, group).items():
            values = getattr(found.calibration, group)[name].values
            # a latency is little of most of these times: what is known holds it back
            for key, within in CONSTANTS.items():
                if key in entry.values:
                    assert values[key] == pytest.approx(entry.values[key], rel=within), (group, name, key)
    for name in ("memory_fraction", "host_fraction"):
        assert found.calibration.number(name) == pytest.approx(known.calibration.number(name), rel=0.005)
    of = found.calibration.links["scaleup"]["all_gather"].values
    assert of["efficiency"] == pytest.approx(0.6, rel=0.02)
    assert of["base"] + 7 * of["per_rank"] == pytest.approx(
        20e-6 + 7 * links_of(known)[0].curves["all_gather"].rank_seconds, rel=0.03
    )


def test_the_error_after_is_far_below_that_before(in_a_folder: Path) -> None:
    write_bench(in_a_folder / "bench.json", known_cluster(in_a_folder), H100)
    _, (done,) = calibrate(["bench.json"], "dgx-h100")
    by_kind = {residual.kind: residual for residual in done.residuals}
    for kind in ("gemm bf16", "attention forward", "all_gather, in a domain"):
        assert by_kind[kind].before_median > 0.1
        assert by_kind[kind].after_median < 0.01
    assert by_kind["all_reduce, across"].before_p90 < 1e-6, "what was not changed was predicted exactly"


def test_a_device_without_bf16_is_measured_in_fp16(in_a_folder: Path) -> None:
    volta = SimpleNamespace(cuda=SimpleNamespace(get_device_capability=lambda: (7, 0)))
    assert benchmark_script.half(volta, benchmark_script.Timer(volta, False)) == "fp16"
    before = load_cluster("dgx-v100")
    write_bench(in_a_folder / "bench.json", before, "Tesla V100-SXM2-32GB")
    after, (done,) = calibrate(["bench.json"], "dgx-v100")
    assert "gemm fp16" in [residual.kind for residual in done.residuals]
    was, now = rates_of(before).gemm["fp16"], rates_of(after).gemm["fp16"]
    assert now.flops_per_second == pytest.approx(was.flops_per_second, rel=1e-6)


@pytest.mark.parametrize("start", ["dgx-h100", "known.yaml"])
def test_calibrating_on_its_own_predictions_changes_nothing(in_a_folder: Path, start: str) -> None:
    known_cluster(in_a_folder)
    before = load_cluster(start)
    write_bench(in_a_folder / "bench.json", before, H100)
    (in_a_folder / "runs.csv").write_text(runs_csv(start))
    after, _ = calibrate(["bench.json", "runs.csv"], start)
    was, now = rates_of(before), rates_of(after)
    assert now.gemm["bf16"].flops_per_second == pytest.approx(was.gemm["bf16"].flops_per_second, rel=1e-6)
    assert now.gemm["bf16"].ramp == pytest.approx(was.gemm["bf16"].ramp, rel=1e-4)
    assert now.gemm["fp8"] == was.gemm["fp8"]
    assert now.attention_backward.peak_fraction == pytest.approx(was.attention_backward.peak_fraction, rel=1e-6)
    assert now.memory_bandwidth == pytest.approx(was.memory_bandwidth, rel=1e-6)
    for link, own in zip(links_of(before), links_of(after), strict=True):
        for name, curve in link.curves.items():
            assert own.curves[name].efficiency == pytest.approx(curve.efficiency, rel=1e-6), name
    assert after.calibration.number("software_factor") == pytest.approx(1.0, abs=1e-6)
    for model, strategy, batch in RUNS[:3]:
        times = [
            api.estimate(model, strategy, hardware=of, workload={"global_batch": batch, "seq_len": 4096}).best
            for of in (before, after)
        ]
        assert times[0] and times[1]
        assert times[1].step_seconds == pytest.approx(times[0].step_seconds, rel=1e-5)


def test_a_cluster_that_is_a_fifth_slower_gets_a_factor_of_1_2(in_a_folder: Path) -> None:
    (in_a_folder / "runs.csv").write_text(runs_csv("dgx-h100", times=1.2))
    assert run(["calibrate", "runs.csv", "-o", "mine.yaml", "-q"]) == 0
    mine = load_cluster("mine.yaml")
    assert mine.calibration.number("software_factor") == pytest.approx(1.2, rel=0.005)
    model, strategy, batch = RUNS[1]
    workload = {"global_batch": batch, "seq_len": 4096}
    before, after = (api.estimate(model, strategy, hardware=of, workload=workload).best for of in ("dgx-h100", mine))
    assert before and after
    for part in ("matrix products", "attention", "memory-bound", "exposed tp"):
        ratio = float(after.estimate.time[part][0] / before.estimate.time[part][0])
        assert ratio == pytest.approx(mine.calibration.number("software_factor"), rel=1e-9), part
    for part in ("optimizer", "exposed dp"):
        assert after.estimate.time[part][0] == before.estimate.time[part][0]


def test_one_run_moves_the_factor_less_than_many_that_agree(in_a_folder: Path) -> None:
    found = []
    for number in (1, 2, 8):
        (in_a_folder / "runs.csv").write_text(runs_csv("dgx-h100", times=1.3, number=number))
        cluster, _ = calibrate(["runs.csv"], "dgx-h100")
        found.append(cluster.calibration.number("software_factor"))
    assert 1.0 < found[0] < found[1] < found[2] < 1.3
    cluster, run = fitted().spread["cluster"] ** 2, fitted().spread["run"] ** 2
    kept = cluster / (cluster + run)
    assert found[0] == pytest.approx(1.3**kept, rel=1e-6), "the mean of a normal prior and one normal observation"


def test_memory_that_every_run_has_more_of_is_context(in_a_folder: Path) -> None:
    (in_a_folder / "runs.csv").write_text(runs_csv("dgx-h100", more_bytes=2.0 * 2**30))
    cluster, (done,) = calibrate(["runs.csv"], "dgx-h100")
    memory = next(residual for residual in done.residuals if residual.kind == "peak memory, device")
    assert memory.after_median < 0.5 * memory.before_median
    added = cluster.calibration.number("context_bytes") - api.setting("gpt2", gpus=1).runtime.context_bytes
    assert 0.8 * 2**30 < added < 2.1 * 2**30


def test_bands_narrow_with_runs_that_agree_and_widen_with_runs_that_do_not(in_a_folder: Path) -> None:
    (in_a_folder / "agree.csv").write_text(runs_csv("dgx-h100"))
    rows = runs_csv("dgx-h100").splitlines()
    spread = [rows[0]]
    for at, line in enumerate(rows[1:]):
        cells = line.split(",")
        cells[-2] = repr(float(cells[-2].removesuffix("s")) * (1.5 if at % 2 else 0.7))
        spread.append(",".join(cells))
    (in_a_folder / "differ.csv").write_text("\n".join(spread))
    model, strategy, batch = RUNS[1]
    workload = {"global_batch": batch, "seq_len": 4096}
    reach = {}
    for name in ("agree", "differ"):
        cluster, _ = calibrate([f"{name}.csv"], "dgx-h100")
        best = api.estimate(model, strategy, hardware=cluster, workload=workload).best
        assert best
        reach[name] = float(best.estimate.step_seconds_high[0] / best.estimate.step_seconds[0])
    best = api.estimate(model, strategy, hardware="dgx-h100", workload=workload).best
    assert best
    shipped = float(best.estimate.step_seconds_high[0] / best.estimate.step_seconds[0])
    assert reach["agree"] < shipped < reach["differ"]


def test_a_kind_of_run_that_one_factor_does_not_describe_is_named(
    in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = runs_csv("dgx-h100").splitlines()
    at = rows[0].split(",").index("pp")
    slower = [rows[0]]
    for line in rows[1:]:
        cells = line.split(",")
        if cells[at] != "1":
            cells[-2] = repr(float(cells[-2].removesuffix("s")) * 1.25)
        slower.append(",".join(cells))
    (in_a_folder / "runs.csv").write_text("\n".join(slower))
    assert run(["calibrate", "runs.csv"]) == 0
    captured = capsys.readouterr()
    assert "runs with pp above 1 take" in captured.err and "more time" in captured.err
    assert "tp above 1" not in captured.err


def test_too_few_measurements_keep_the_shipped_constant_and_say_so(
    in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = bench(load_cluster("dgx-h100"), H100, times=2.0)
    whole["measurements"] = [row for row in whole["measurements"] if row["kind"] in ("gemm", "collective")][:2]
    (in_a_folder / "bench.json").write_text(json.dumps(whole))
    assert run(["calibrate", "bench.json", "-o", "mine.yaml"]) == 0
    assert "too few" in capsys.readouterr().err
    assert rates_of(load_cluster("mine.yaml")).gemm == rates_of(load_cluster("dgx-h100")).gemm


def test_the_file_is_the_same_each_time_and_every_command_takes_it(
    in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bench(in_a_folder / "bench.json", known_cluster(in_a_folder), H100)
    (in_a_folder / "runs.csv").write_text(runs_csv("dgx-h100", times=1.1))
    for name in ("one.yaml", "two.yaml"):
        assert run(["calibrate", "runs.csv", "bench.json", "-o", name, "-q", "--format", "json"]) == 0
    assert (in_a_folder / "one.yaml").read_bytes() == (in_a_folder / "two.yaml").read_bytes()
    written = yaml.safe_load((in_a_folder / "one.yaml").read_text())
    assert [error.message for error in Draft202012Validator(schema("hardware")).iter_errors(written)] == []
    shown = json.loads(capsys.readouterr().out.split("}\n{")[0] + "}")
    assert shown["calibration"] == written["calibration"]
    job = ["--gpus", "8", "--global-batch", "64", "--seq-len", "4096", "-q"]
    assert run(["hardware", "show", "./one.yaml"]) == 0
    assert "measured: bench.json, 2026-11-30" in capsys.readouterr().out
    assert run(["search", "llama-3.1-8b", "--hardware", "one.yaml", *job]) == 0
    assert run(["estimate", "strategy.yaml", "-q"]) == 0, "the calibration travels in the strategy file"
    capsys.readouterr()
    assert run(["explain", "strategy.yaml", "--time", "--format", "json"]) == 0
    assert "bench.json, 2026-11-30" in capsys.readouterr().out
    assert run(["calibrate", "bench.json", "--hardware", "one.yaml", "-o", "one.yaml", "-q"]) == 0


def broken(change: Callable[[dict[str, Any]], Any]) -> str:
    whole = bench(load_cluster("dgx-h100"), H100)
    change(whole)
    return json.dumps(whole)


def changed(kind: str, **values: Any) -> str:
    """Every row of `kind` with other values."""

    def change(whole: dict[str, Any]) -> None:
        for row in whole["measurements"]:
            row.update(values if row["kind"] == kind else {})

    return broken(change)


def few(kind: str, **values: Any) -> str:
    """Four rows of `kind` with other values, and nothing else: too few for more than one constant."""

    def change(whole: dict[str, Any]) -> None:
        rows = [row | values for row in whole["measurements"] if row["kind"] == kind and row["direction"] == "forward"]
        whole["measurements"] = rows[:4]

    return broken(change)


def contexts(*sizes: int) -> str:
    rows = [{"kind": "context", "after": "nccl", "bytes": size} for size in sizes]
    return broken(lambda whole: whole["measurements"].extend(rows))


HOSTILE: dict[str, Callable[[], str | bytes]] = {
    "empty.csv": lambda: "",
    "header.csv": lambda: "model,gpus,step_time\n",
    "nan.csv": lambda: "model,gpus,step_time\nllama-3.1-8b,8,nan\n",
    "negative.csv": lambda: "model,gpus,step_time\nllama-3.1-8b,8,-3s\n",
    "unit.csv": lambda: "model,gpus,step_time\nllama-3.1-8b,8,3 parsecs\n",
    "memory.csv": lambda: "model,gpus,step_time,peak_memory\nllama-3.1-8b,8,3s,71000\n",
    "too_slow.csv": lambda: "model,gpus,step_time\nllama-3.2-1b,8,99999s\n",
    "too_fast.csv": lambda: "model,gpus,step_time\nllama-3.2-1b,8,0.2ms\n",
    "precision.csv": lambda: "model,gpus,step_time,precision\nllama-3.2-1b,8,3s,nvfp4\n",
    "semicolons.csv": lambda: "model;gpus;step_time\nllama-3.2-1b;8;3s\n",
    "column.csv": lambda: "model,gpuss,step_time\nllama-3.1-8b,8,3s\n",
    "model.csv": lambda: "model,gpus,step_time\nno-such-model,8,3s\n",
    "cells.csv": lambda: "model,gpus,step_time\nllama-3.1-8b,8\n",
    "rule.csv": lambda: "model,gpus,step_time,zero\nllama-3.1-8b,8,3s,3\n",
    "binary.csv": lambda: bytes(range(256)),
    "nul.csv": lambda: "model,gpus,step_time\n\0,8,3s\n",
    "quote.csv": lambda: 'model,gpus,step_time\n"llama,8,3s\n',
    "empty.json": lambda: "",
    "list.json": lambda: "[]",
    "binary.json": lambda: bytes(range(256)),
    "none.json": lambda: broken(lambda whole: whole.update(measurements=[])),
    "nan.json": lambda: broken(lambda whole: whole["measurements"][0].update(seconds=float("nan"))),
    "negative.json": lambda: broken(lambda whole: whole["measurements"][0].update(seconds=-1.0)),
    "kind.json": lambda: broken(lambda whole: whole["measurements"][0].update(kind="guess")),
    "device.json": lambda: broken(lambda whole: whole.update(device="NVIDIA A100-SXM4-80GB")),
    "nobody.json": lambda: broken(lambda whole: whole.update(device="cpu")),
    "too_fast.json": lambda: broken(lambda whole: whole["measurements"][0].update(seconds=1e-9)),
    "ranks.json": lambda: broken(lambda whole: whole["measurements"][-1].update(nodes=1)),
    "smoke.json": lambda: broken(lambda whole: whole.update(smoke=True)),
    "count.json": lambda: broken(lambda whole: whole.update(ranks=-3)),
    "attention_too_fast.json": lambda: changed("attention", seconds=1e-9),
    "attention_too_slow.json": lambda: few("attention", seconds=3000.0),
    "attention_dtype.json": lambda: changed("attention", dtype="fp8"),
    "collective_too_fast.json": lambda: changed("collective", seconds=1e-9),
    "copy_too_slow.json": lambda: changed("copy", seconds=3000.0),
    "settled.json": lambda: changed("gemm", settled=True, seconds=3000.0),
    "context.json": lambda: contexts(2**40),
    "contexts.json": lambda: contexts(2**30, 2**31),
    "version.json": lambda: broken(lambda whole: whole.update(format="distplan-bench 9")),
    "words.txt": lambda: "all reduce is fast here\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_wrong_is_one_line_and_leaves_the_output_alone(
    in_a_folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content = HOSTILE[name]()
    (in_a_folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (in_a_folder / "mine.yaml").write_text("as it was")
    assert run(["calibrate", name, "--hardware", "dgx-h100", "-o", "mine.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1 and name in captured.err
    assert (in_a_folder / "mine.yaml").read_text() == "as it was"
    assert sorted(path.name for path in in_a_folder.iterdir()) == sorted([name, "mine.yaml"])


def test_a_file_given_twice_does_not_count_double(in_a_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bench(in_a_folder / "bench.json", load_cluster("dgx-h100"), H100)
    (in_a_folder / "again.json").symlink_to("bench.json")
    assert run(["calibrate", "bench.json", "./bench.json"]) == 2
    assert run(["calibrate", "bench.json", "again.json"]) == 2
    assert "twice" in capsys.readouterr().err


def test_measurements_that_no_constants_describe_are_named(
    in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products of one shape that take now 1, now 50 times as long."""
    whole = bench(load_cluster("dgx-h100"), H100)
    rows = [row for row in whole["measurements"] if row["kind"] == "gemm"]
    whole["measurements"] = [row | {"seconds": row["seconds"] * times} for row in rows for times in (1.0, 50.0)]
    (in_a_folder / "bench.json").write_text(json.dumps(whole))
    assert run(["calibrate", "bench.json", "--hardware", "dgx-h100"]) == 0
    assert "gemm bf16: the calibrated model is still off by" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--emit-benchmark", "bench.json"],
        ["bench.json", "--ranks", "two"],
        ["bench.json", "--runtime", "nope"],
        ["bench.json", "--hardware", ""],
    ],
)
def test_a_command_that_makes_no_sense_is_refused(
    in_a_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """The file itself is right."""
    write_bench(in_a_folder / "bench.json", load_cluster("dgx-h100"), H100)
    assert run(["calibrate", *arguments]) == 2
    assert "bench.json: " not in capsys.readouterr().err
