"""Rates against rows copied from published tables (every third row of the GEMM tables, all training attention).

The constants were fitted to these tables (benchmarks/fit_gemm.py, fit_attention.py): what is stated here is how well
the form of the laws holds them, in sample, not how well they tell of a device that was not measured.
"""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from distplan.hardware.accelerator import load_accelerator
from distplan.hardware.rates import Rates, attention_seconds, gemm_seconds, rates_for

DATA = Path(__file__).parents[1] / "data"


def rows(name: str) -> list[dict[str, str]]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def column(chosen: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in chosen])


GEMM_ROWS, ATTENTION_ROWS = rows("rates_gemm.csv.gz"), rows("rates_attention.csv.gz")


def gemm_errors(accelerator: str, dtype: str, accumulate: bool = False, groups: bool = False) -> np.ndarray:
    chosen = [
        row
        for row in GEMM_ROWS
        if row["accelerator"] == accelerator
        and row["dtype"] == dtype
        and (row["accumulate_fp32"] == "1") == accumulate
        and (int(row["groups"]) > 1) == groups
        and (groups or min(int(row[size]) for size in "mnk") >= 1024)
    ]
    predicted = gemm_seconds(
        rates_for(load_accelerator(accelerator)),
        *(column(chosen, size) for size in "mnk"),
        dtype,
        groups=column(chosen, "groups"),
        accumulate=4.0 * accumulate,
    )
    return predicted / column(chosen, "seconds") - 1.0


@pytest.mark.parametrize(
    "accelerator", ["a100-sxm4-80gb", "a100-pcie-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "gb200"]
)
def test_large_bf16_products_are_within_8_percent_of_the_table(accelerator: str) -> None:
    errors = gemm_errors(accelerator, "bf16")
    assert len(errors) >= 30
    assert np.median(np.abs(errors)) < 0.08
    assert abs(np.median(errors)) < 0.05


@pytest.mark.parametrize("accelerator", ["b300-sxm-270gb", "gb300", "l40s", "rtxpro6000-server"])
def test_large_bf16_products_of_other_measured_devices_are_within_10_percent(accelerator: str) -> None:
    assert np.median(np.abs(gemm_errors(accelerator, "bf16"))) < 0.10


@pytest.mark.parametrize("accelerator", ["h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "gb200"])
def test_large_fp8_linear_layers_with_their_cast_are_within_8_percent_of_the_table(accelerator: str) -> None:
    assert np.median(np.abs(gemm_errors(accelerator, "fp8"))) < 0.08


def test_weight_gradients_that_add_into_fp32_and_grouped_products_are_within_10_percent_on_a100() -> None:
    assert np.median(np.abs(gemm_errors("a100-pcie-80gb", "bf16", accumulate=True))) < 0.10
    assert np.median(np.abs(gemm_errors("a100-pcie-80gb", "bf16", groups=True))) < 0.10


def attention_predicted(rates: Rates, row: dict[str, str]) -> float:
    batch, heads, head_dim, length = (float(row[name]) for name in ("batch", "heads", "head_dim", "length"))
    full = 4.0 * batch * heads * length * length * head_dim
    directions = {"forward": (False,), "backward": (True,), "both": (False, True)}[row["work"]]
    causal = row["causal"] == "1"
    return sum(
        float(attention_seconds(rates, full, head_dim, length, length, causal, backward)) for backward in directions
    )


def attention_errors(accelerator: str) -> np.ndarray:
    chosen = [row for row in ATTENTION_ROWS if row["accelerator"] == accelerator]
    rates = rates_for(load_accelerator(accelerator))
    return np.array([attention_predicted(rates, row) / float(row["seconds"]) - 1.0 for row in chosen])


@pytest.mark.parametrize("accelerator", ["a100-sxm4-80gb", "a100-pcie-80gb", "h100-sxm5-80gb", "b200-sxm-180gb"])
def test_flash_attention_in_training_is_within_10_percent_of_published_kernels(accelerator: str) -> None:
    errors = attention_errors(accelerator)
    assert len(errors) >= 10
    assert np.median(np.abs(errors)) < 0.10


def test_the_only_row_of_attention_on_h200_is_the_one_that_its_constants_were_fitted_to() -> None:
    """In sample: nothing is known of H200's attention beyond this one row (ml-engineering's benchmark)."""
    (error,) = attention_errors("h200-sxm-141gb")
    assert abs(error) < 0.10


def test_one_precision_twice_as_dense_is_not_twice_as_fast_where_the_table_says_so() -> None:
    """fp8 linear layers pay for a cast: Hopper's table of 1024^3 products is slower in fp8 than in bf16."""
    rates = rates_for(load_accelerator("h200-sxm-141gb"))
    assert gemm_seconds(rates, 1024, 1024, 1024, "fp8") > gemm_seconds(rates, 1024, 1024, 1024, "bf16")
    assert gemm_seconds(rates, 8192, 8192, 8192, "fp8") < 0.7 * gemm_seconds(rates, 8192, 8192, 8192, "bf16")
