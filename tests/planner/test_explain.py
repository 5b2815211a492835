"""`distplan explain`: terms add up to the estimate, placements are the literature's, every rule has its example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distplan.costmodel import runtime as runtimes
from distplan.costmodel.runtime import list_runtimes
from distplan.planner import explain_fields, explain_rules
from distplan.planner.check import evaluate, setting_of
from distplan.planner.cli import run
from distplan.planner.constraints import codes
from distplan.planner.explain_constants import constants
from distplan.planner.explain_plan import _words, explain

JOB = ["--global-batch", "64", "--seq-len", "4096", "-q"]
STRATEGIES: dict[str, list[str]] = {
    "tp-pp": ["llama-3.1-8b", "--gpus", "8", "--tp", "2", "--pp", "2"],
    "interleaved-recompute": [
        "llama-3.1-8b", "--gpus", "8", "--tp", "2", "--pp", "2", "--vpp", "2", "--recompute", "full",
        "--recompute-layers", "3",
    ],
    "fsdp2": ["llama-3.1-8b", "--gpus", "8", "--zero", "3", "--runtime", "torchtitan"],
    "experts": ["mixtral-8x7b", "--gpus", "16", "--tp", "2", "--ep", "8"],
    "experts-once-per-domain": ["mixtral-8x7b", "--gpus", "16", "--ep", "8", "--runtime", "@once_per_domain"],
    "two-level": ["llama-3.1-8b", "--gpus", "8", "--cp", "4", "--cp-kind", "two_level", "--cp-inner", "2"],
    "ring": ["llama-3.1-8b", "--gpus", "8", "--cp", "2"],
    "tied-selective": ["llama-3.2-1b", "--gpus", "8", "--pp", "2", "--recompute", "selective"],
    "zero2": ["llama-3.1-8b", "--gpus", "8", "--zero", "2", "--runtime", "deepspeed"],
}  # fmt: skip


@pytest.fixture(scope="module", params=STRATEGIES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("plans") / f"{request.param}.yaml"
    once = path.with_name("once_per_domain.yaml")
    shipped = Path(runtimes.__file__).with_name("runtimes").joinpath("megatron.yaml").read_text(encoding="utf-8")
    once.write_text(shipped.replace("\nloss:", "\nexpert_dispatch: once_per_domain\nloss:", 1), encoding="utf-8")
    words = [str(once) if word == "@once_per_domain" else word for word in STRATEGIES[request.param]]
    assert run(["estimate", *words, *JOB, "-o", str(path)]) in (0, 3)
    return evaluate(path)


def test_tensors_add_up_to_the_parts_of_memory(found: Any) -> None:
    parts = {part["part"]: part for part in explain(found, ["memory"])["memory"]["parts"]}
    for name in ("parameters", "gradients", "optimizer", "activations"):
        if name in parts:
            terms = sum(term["bytes"] for term in parts[name]["terms"])
            assert terms + parts[name]["rest"] == pytest.approx(parts[name]["bytes"], rel=1e-4)
            assert abs(parts[name]["rest"]) <= 1e-3 * parts[name]["bytes"]
    if "recompute workspace" in parts:
        workspace = parts["recompute workspace"]
        assert sum(term["bytes"] for term in workspace["terms"]) == pytest.approx(workspace["bytes"], rel=1e-4)
    if "logits and loss" in parts:
        assert 0.0 <= parts["logits and loss"]["rest"] < parts["logits and loss"]["bytes"]
    total = sum(part["bytes"] for part in parts.values())
    assert total == pytest.approx(found.shown["device_bytes"], rel=1e-4)


def test_operators_add_up_to_the_parts_of_time(found: Any) -> None:
    parts = {part["part"]: part for part in explain(found, ["time"])["time"]["parts"]}
    for name in ("matrix products", "attention", "memory-bound", "recompute", "exposed tp", "exposed cp", "exposed ep"):
        if name in parts:
            assert parts[name]["terms"]
            terms = sum(term["seconds"] for term in parts[name]["terms"])
            assert terms == pytest.approx(parts[name]["seconds"], rel=1e-4)
    factors = {round(part["factor"], 5) for part in parts.values() if part["terms"]}
    assert len(factors) == 1  # the runtime's software factor and nothing else stands between operators and totals


def test_products_multiply_to_their_flops(found: Any) -> None:
    for part in explain(found, ["time"])["time"]["parts"]:
        for term in part["terms"]:
            if term["kind"] == "matrix product":
                sizes = term["sizes"]
                one = 2.0 * sizes["m"] * sizes["n"] * sizes["k"] * sizes["batch"] * sizes["experts"]
                assert one * term["calls"] == pytest.approx(term["flops"], rel=1e-4), term["name"]


def test_every_collective_of_the_estimate_is_explained(found: Any) -> None:
    rows = explain(found, ["communication"])["communication"]
    for name in ("seconds", "wire_bytes", "exposed_seconds"):
        total = sum(row[name] for row in found.shown["communication"])
        assert sum(row[name] for row in rows) == pytest.approx(total, rel=1e-4)
    for row in rows:
        assert row["placements"] or row["axis"] == "pp", row
        for pair in row["placements"]:
            assert pair["before"][0] == pair["after"][0] == "["
            assert pair["before"] != pair["after"] or row["kind"] in ("ring_exchange", "all_to_all")


def test_an_all_reduce_ends_what_was_partial(found: Any) -> None:
    """U_axis in, gone after: what an all-reduce and a reduce-scatter are for."""
    for row in explain(found, ["communication"])["communication"]:
        if row["kind"] in ("all_reduce", "reduce_scatter"):
            for pair in row["placements"]:
                assert "{U_" in pair["before"], pair
                gone = set(row["axis"].split("+"))
                left = re.findall(r"\{U_([^}]*)\}", pair["after"])
                assert not gone & {axis for axes in left for axis in re.split(r"[+,]", axes)}, (row["axis"], pair)


def test_every_constant_has_a_source_and_every_part_says_how(found: Any) -> None:
    for row in constants(setting_of(found.file)):
        assert row["source"], row["name"]
        assert row["status"] in ("measured", "nominal", "scaled", "assumed", "unverified", "stated", "fitted"), row
    for what in ("memory", "time"):
        for part in explain(found, [what])[what]["parts"]:
            assert part["how"], part["part"]


def test_the_parts_point_at_constants_that_exist(found: Any) -> None:
    names = [row["name"] for row in constants(setting_of(found.file))]
    for words in (*_words("time").values(), *_words("memory").values()):
        for start in words["constants"]:
            if start != "host_bandwidth":  # only where optimizer states are offloaded
                assert any(name.startswith(start) for name in names), start


def test_it_is_shown_in_80_columns_and_by_parts(found: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for chosen, other in (("--memory", "Communication"), ("--communication", "Memory of"), ("--time", "Memory of")):
        assert run(["explain", found.path, chosen]) == 0
        out = capsys.readouterr().out
        assert other not in out
        assert max(len(line) for line in out.splitlines()) <= 80


def test_every_format_is_data(found: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", found.path, "--format", "json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) >= {"memory", "communication", "time", "constants"}
    assert run(["explain", found.path, "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("of,")


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("code", codes())
def test_every_rule_has_an_example_that_breaks_it(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = explain_rules.explain(code)
    assert shown["example"]["broken"], code
    assert shown["why"]
    assert [row["runtime"] for row in shown["runtimes"]] == list(list_runtimes())
    assert next(row for row in shown["runtimes"] if row["runtime"] == shown["example"]["runtime"])["breaks"]
    assert run(["explain", code]) == 0
    out = capsys.readouterr().out
    assert shown["title"] in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_reasons_are_of_rules_that_exist() -> None:
    assert list(explain_rules._reasons()) == list(codes())


def test_a_rule_is_applied_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.yaml"
    assert run(["estimate", "llama-3.1-8b", "--gpus", "8", "--tp", "2", *JOB, "-o", str(path)]) == 0
    assert run(["explain", "dp4", str(path)]) == 0
    assert "the rule holds here" in capsys.readouterr().out
    path.write_text(path.read_text().replace("  tp: 2", "  tp: 3"))
    assert run(["explain", "DP004", str(path)]) == 0
    assert "32 heads do not divide by tp 3" in capsys.readouterr().out
    assert run(["explain", str(path)]) == 3
    assert "distplan explain DP0" in capsys.readouterr().err


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("model.yaml:moe.top_k", "top_k", "experts that a token uses"),
        ("model.yaml:num_experts_per_tok", "top_k", "experts that a token uses"),
        ("model.yaml:workload.seq_len", "workload.seq_len", "tokens of a sequence"),
        ("strategy.yaml:cp_kind", "strategy.cp_kind", "ring"),
        ("strategy.yaml:strategy.zero", "strategy.zero", "FSDP"),
        ("strategy.yaml:workload.precision.master", "workload.precision.master", "optimizer's own copy"),
        ("hardware.yaml:fabric.bandwidth", "fabric.bandwidth", "line rate"),
        ("hardware.yaml:accelerator.peak_flops", "accelerator.peak_flops", "dense FLOP/s"),
    ],
)
def test_a_field_is_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, field: str, said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    file, _, name = text.partition(":")
    shown = explain_fields.explain(file, name)
    assert said in shown["meaning"]
    assert shown["field"].endswith(name.split(".")[-1]) or field == "top_k"
    assert run(["explain", text]) == 0
    assert said.split(maxsplit=1)[0] in capsys.readouterr().out


def test_a_field_of_a_file_has_its_value_and_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    kinds = "kinds:\n  a: {experts: 8, top_k: 2, expert_ffn: 64}\n"
    path.write_text(f"layers: 2\nhidden: 64\nheads: 2\n{kinds}vocab: 100\n")
    shown = explain_fields.explain(str(path), "moe.top_k")
    assert (shown["value"], shown["line"], shown["place"]) == (2, 5, "kinds.a.top_k")


@pytest.mark.parametrize(
    "wrong", ["DP999", "DP", "tp", "model.yaml:topk", "nothing.txt:tp", "model.yaml:", "absent.yaml", ":", "a:b:c", ""]
)
def test_what_cannot_be_explained_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["explain", wrong]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
