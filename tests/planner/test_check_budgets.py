"""Shares as people write them: 5%, 5 %, 0.05; what could be either is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distplan.hardware.errors import UnitError
from distplan.planner.check_budgets import parse_share


@given(st.floats(0.0, 100.0).map(lambda x: round(x, 4)))
def test_a_share_is_the_same_in_percent_and_as_a_number(percent: float) -> None:
    assert parse_share(f"{percent}%") == pytest.approx(percent / 100.0)
    assert parse_share(f"{percent} %") == parse_share(f"{percent}%")


@pytest.mark.parametrize("text", ["5", "-1%", "nan", "inf", "%", "", "1e400", "five"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_share(text)
