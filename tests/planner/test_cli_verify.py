"""`distplan verify` and `distplan spmd`: what a person sees, and what the shell gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distplan.costmodel import interpret_step
from distplan.costmodel import verify as proof
from distplan.planner.cli import run

SMALL = ["verify", "llama-3.1-8b", "--tp", "2", "--dp-shard", "2"]
PRODUCT = ["spmd", "mk,kn->mn", "--mesh", "x=2,y=4"]


@pytest.fixture(autouse=True)
def quiet_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def test_an_equivalent_strategy_exits_0_and_counts_what_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SMALL) == 0
    out = capsys.readouterr().out
    assert "equivalent to one device" in out and "NOT" not in out
    for word in ("loss", "gradient", "weight", "reduce_scatter", "needed"):
        assert word in out


def test_json_holds_every_tensor_and_every_collective(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["passed"] is True and shown["ranks"] == 4
    assert {t["what"] for t in shown["tensors"]} == {"loss", "output", "input gradient", "gradient", "weight"}
    assert {c["result"] for c in shown["collectives"]} == {"needed", "not sent here"}


def test_a_strategy_that_is_not_equivalent_exits_4_and_names_a_tensor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = interpret_step.update

    def wrong(optimizer: str, weight: proof.Array, *rest: object) -> proof.Array:
        return honest(optimizer, weight, *rest) + (weight.ndim > 2) * 0.1  # type: ignore[arg-type]

    monkeypatch.setattr(interpret_step, "update", wrong)
    assert run(SMALL) == 4
    shown = capsys.readouterr()
    assert "NOT equivalent" in shown.out
    assert "differ from the single device's, first" in shown.err


def test_a_strategy_file_is_verified_alone_or_with_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "llama-3.2-1b", "--tp", "2", "-o", "strategy.yaml", "-q"]) == 0
    assert run(["verify", "strategy.yaml"]) == 0
    assert run(["verify", "gpt2", "strategy.yaml"]) == 0
    assert "gpt2 on megatron" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*PRODUCT, "--x", "q:x"], "operand x has no dim q; it has m, k"),
        ([*PRODUCT, "--x", "m:w"], "the mesh has no axis w"),
        ([*PRODUCT, "--x", "m:x,k:x"], "axis x is used twice"),
        ([*PRODUCT, "--z", "m:x"], "the notation has 2 operands"),
        (["spmd", "mk,kn->mn"], "--mesh is missing"),
        (["spmd", "mk,kn->mq", "--mesh", "x=2"], "no operand has the letter q"),
        (["spmd", "mk,kn", "--mesh", "x=2"], "an einsum such as"),
        (["spmd", "mk,kn->mn", "--mesh", "x"], "an axis and its degree"),
        (["spmd", "--mesh", "x=2"], "what is inferred?"),
        (["spmd", "--op", "softmx", "--mesh", "x=2", "--shapes", "4x4"], "did you mean"),
        (["spmd", "--op", "softmax", "--mesh", "x=2"], "--shapes is missing"),
    ],
)
def test_a_question_that_cannot_be_answered_says_what_would_be_right(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_column_and_a_row_sharded_product(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PRODUCT, "--x", "m:x", "--y", "n:y", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["result"] == "[m_x, n_y]"
    assert [(c["for"], c["kind"], c["axes"]) for c in shown["communication"]] == [
        ("dx: its sum", "all_reduce", "y"), ("dy: its sum", "all_reduce", "x"),
    ]  # fmt: skip
    assert shown["proof"]["passed"] is True


def test_a_contracted_letter_leaves_the_result_partial(capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's row-parallel product: k is sharded in both, so the result is a sum over x."""
    assert run([*PRODUCT, "--x", "k:x", "--y", "k:x", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["partial"] == ["x"]
    assert shown["communication"] == []


def test_bytes_are_those_of_the_block_that_a_rank_gives(capsys: pytest.CaptureFixture[str]) -> None:
    """y [256, 512] has 256·512/2 elements per rank, in bf16: 131,072 bytes."""
    arguments = [*PRODUCT, "--shapes", "64x256,256x512", "--x", "m:x", "--y", "n:x", "--format", "json"]
    assert run(arguments) == 0
    first = json.loads(capsys.readouterr().out)["communication"][0]
    assert (first["kind"], first["axes"], first["bytes"]) == ("all_gather", "x", 131072.0)


def test_the_paddle_dialect_answers_with_dims_mappings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PRODUCT, "--x", "k:x", "--y", "n:y", "--dialect", "paddle"]) == 0
    out = capsys.readouterr().out
    assert "dims_mapping=[0, 1]" in out and "partial on [0]" in out and "equals" in out


def test_every_step_of_an_inference_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PRODUCT, "--x", "m:x"]) == 0
    out = capsys.readouterr().out
    titles = ("Where the operands are", "Merge", "needs", "Result", "Communication", "Proof")
    assert all(f"{number}. " in out and title in out for number, title in enumerate(titles, 1))
