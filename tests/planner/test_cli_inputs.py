"""What a user types on the command line, read or refused with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from distplan.costmodel.strategy import STRUCTURE, Strategy
from distplan.hardware.errors import DistplanError
from distplan.hardware.units import parse_bytes
from distplan.planner.cli import run
from distplan.planner.cli_options import ALIASES, DIMENSIONS, canonical
from distplan.planner.inputs import dimension, gpu_counts, one_number, quantity, whole_numbers, words
from distplan.planner.strategy_from import strategy_from


@pytest.mark.parametrize(
    ("text", "node", "counts"),
    [
        ("64", 8, (64,)),
        ("8,16,32", 8, (8, 16, 32)),
        ("32,8,8", 8, (8, 32)),
        ("16..40", 8, (16, 24, 32, 40)),
        ("10..30", 8, (16, 24)),  # whole nodes only
        ("1..16", 8, (1, 2, 4, 8, 16)),  # below a node 1, 2, 4
        ("3..5", 8, (4,)),
        ("1..8", 4, (1, 2, 4, 8)),
        ("72..216", 72, (72, 144, 216)),
        ("1_024", 8, (1024,)),
    ],
)
def test_gpu_counts(text: str, node: int, counts: tuple[int, ...]) -> None:
    assert gpu_counts(text, node=node) == counts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "at least 1"),
        ("-8", "at least 1"),
        ("64..8", "write 8..64"),
        ("9..15", "no whole number of nodes"),
        ("eight", "a whole number"),
        ("8.5", "a whole number"),
        ("", "a value is missing"),
        ("8,", "a value is missing"),
        ("1e9", "a whole number"),
        ("9" * 30, "a whole number"),
        ("999999999", "at most"),
        ("8..1000000", "too many"),
        ("٨", "a whole number"),
    ],
)
def test_a_count_that_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(DistplanError, match=says) as caught:
        gpu_counts(text, node=8)
    assert str(caught.value).startswith("--gpus")


def test_lists_and_ranges_keep_their_order_once() -> None:
    assert whole_numbers("--tp", "8,1..4,2") == (8, 1, 2, 3, 4)


def test_one_number_refuses_several() -> None:
    with pytest.raises(DistplanError, match="one value"):
        one_number("--seq-len", "4096,8192")


def test_words_fold_case_and_dashes_and_suggest() -> None:
    assert words("--cp-kind", "ALL-GATHER,ring", STRUCTURE["cp_kind"]) == ("all_gather", "ring")
    with pytest.raises(DistplanError, match="did you mean ulysses"):
        words("--cp-kind", "ulises", STRUCTURE["cp_kind"])


@pytest.mark.parametrize("field", DIMENSIONS)
def test_every_dimension_takes_its_own_legal_values(field: str) -> None:
    legal = STRUCTURE.get(field, ("1", "8"))
    values = dimension(field, f"--{field}", ",".join(legal))
    assert [str(value) for value in values] == list(legal)


def test_zero_is_a_number_between_0_and_3() -> None:
    assert dimension("zero", "--zero", "1..3") == (1, 2, 3)
    with pytest.raises(DistplanError, match="at most 3"):
        dimension("zero", "--zero", "4")


def test_a_size_needs_a_unit_and_the_option_is_named() -> None:
    assert quantity("--reserve", "10GiB", parse_bytes) == 10 * 2**30
    assert quantity("--reserve", None, parse_bytes) is None
    with pytest.raises(DistplanError, match=r"--reserve .*unit"):
        quantity("--reserve", "10", parse_bytes)


def test_no_alias_hides_an_option() -> None:
    options = {canonical(name) for name in DIMENSIONS}
    assert not options & set(ALIASES)
    assert canonical("tensor_model_parallel_size") == "tp"
    assert canonical("sequence-parallel") == "sp"


def test_one_strategy_from_a_few_options() -> None:
    made = strategy_from({"tp": (8,), "pp": (4,), "vpp": (5,)}, gpus=64)
    assert made == Strategy(tp=8, pp=4, vpp=5, dp_shard=2, sp=True, schedule="interleaved")
    assert strategy_from({"cp": (2,), "dp": (4,), "dp_replicate": (2,)}, gpus=None) == Strategy(
        cp=2, cp_kind="ring", dp_replicate=2, dp_shard=2
    )


@pytest.mark.parametrize(
    ("given", "gpus", "says"),
    [
        ({"tp": (7,)}, 64, "63 or 70"),
        ({"tp": (128,)}, 64, "; 128 would be"),
        ({"tp": (4, 8)}, 64, "takes one value"),
        ({"tp": (8,), "dp_shard": (4,)}, 64, "multiply to 32"),
        ({"dp": (3,), "dp_replicate": (2,)}, None, "--dp 3 is not a multiple of 2"),
        ({"dp": (4,), "dp_shard": (2,)}, None, "is 2"),
    ],
)
def test_degrees_that_do_not_fit_together_are_refused(
    given: dict[str, tuple[int, ...]], gpus: int | None, says: str
) -> None:
    with pytest.raises(DistplanError, match=says):
        strategy_from(given, gpus=gpus)


def test_a_strategy_file_is_told_from_a_model_and_from_one_that_lost_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    assert run(["search", "llama-3.2-1b", "--gpus", "1", "--tp", "1", "-q", "-o", str(plan)]) == 0
    capsys.readouterr()
    assert run(["search", str(plan), "--gpus", "8"]) == 2
    assert "distplan estimate" in capsys.readouterr().err
    plan.write_text("\n".join(line for line in plan.read_text().splitlines() if not line.startswith("format_version")))
    assert run(["estimate", str(plan)]) == 2
    assert "format_version" in capsys.readouterr().err


def test_a_rule_about_widths_names_experts_only_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "llama-3.1-8b", "--gpus", "3", "--tp", "3"]) == 3
    assert "experts" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["search", "estimate", "limits", "crossover", "sweep"])
def test_an_empty_name_of_hardware_is_not_the_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "llama-3.1-8b", "--gpus", "8", "--hardware", ""]) == 2
    assert "unknown hardware ''" in capsys.readouterr().err
