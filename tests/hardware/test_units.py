"""Quantities carry units at the edge; inside they are bytes, seconds, FLOPs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distplan.hardware import units
from distplan.hardware.errors import UnitError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "80 GiB", 80 * 2**30),
        (units.parse_bytes, "80GB", 80e9),
        (units.parse_bytes, " 192 MiB ", 192 * 2**20),
        (units.parse_bytes, "1_024 B", 1024),
        (units.parse_bytes_per_second, "400 Gbit/s", 50e9),  # 8 bits a byte
        (units.parse_bytes_per_second, "400Gb/s", 50e9),
        (units.parse_bytes_per_second, "400 Gbps", 50e9),
        (units.parse_bytes_per_second, "3.35 TB/s", 3.35e12),
        (units.parse_flops_per_second, "989 TFLOP/s", 989e12),
        (units.parse_flops_per_second, "1.5 PFLOPS", 1.5e15),
        (units.parse_flops_per_second, "624 TOP/s", 624e12),
        (units.parse_seconds, "8.4 us", 8.4e-6),
        (units.parse_seconds, "12.3s", 12.3),
        (units.parse_seconds, "2 h", 7200),
        (units.parse_watts, "700 W", 700),
        (units.parse_dollars_per_hour, "2.95 USD/h", 2.95),
    ],
)
def test_a_quantity_becomes_base_units(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "value", "said"),
    [
        (units.parse_bytes, 80, "80 has no unit; expected a number of bytes such as 80 GiB"),
        (units.parse_bytes, "80", "has no unit"),
        (units.parse_bytes, "80 TFLOP/s", "which is not a number of bytes"),
        (units.parse_bytes, "80 gb", "could be GB"),
        (units.parse_bytes, "-3 GiB", "is negative"),
        (units.parse_bytes, "1e30 GB", "out of range"),
        (units.parse_bytes, "80 bananas", "bananas"),
        (units.parse_bytes, "", "write it like"),
        (units.parse_bytes, True, "write it like"),
        (units.parse_bytes, None, "write it like"),
        (units.parse_bytes, ["80 GiB"], "write it like"),
        (units.parse_bytes_per_second, "0 GB/s", "out of range"),
        (units.parse_bytes_per_second, "80 GiB", "which is not a data rate"),
        (units.parse_seconds, "nan s", "write it like"),
        (units.parse_flops_per_second, "1e400 TFLOP/s", "out of range"),
    ],
)
def test_a_wrong_quantity_says_what_is_wrong(parse, value, said):
    with pytest.raises(UnitError, match=said.replace("/", "/")):
        parse(value)


@given(st.floats(1.0, 1e15))
def test_a_printed_size_reads_back_within_its_digits(value):
    assert units.parse_bytes(units.format_bytes(value).replace(",", "")) == pytest.approx(value, rel=6e-3)
    assert units.parse_bytes(units.format_traffic(value).replace(",", "")) == pytest.approx(value, rel=6e-3)


def test_zero_prints_with_a_unit():
    assert units.format_bytes(0.0) == "0.00 B"
    assert units.format_seconds(0.0) == "0.00 ns"
