"""Priority classes and the numbers behind them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboss.priority import CLASSES, NORMAL, name_of, parse_priority


def test_classes_are_ordered_from_most_to_least_important() -> None:
    assert list(CLASSES) == ["urgent", "high", "normal", "low", "batch"]
    assert list(CLASSES.values()) == sorted(CLASSES.values())
    assert CLASSES["normal"] == NORMAL == 10


@given(st.integers(min_value=0, max_value=1000))
def test_every_priority_survives_its_name(priority: int) -> None:
    assert parse_priority(name_of(priority)) == parse_priority(priority) == priority


def test_names_are_read_in_any_case() -> None:
    assert parse_priority(" Urgent ") == 1


@pytest.mark.parametrize("value", ["", "importnat", "-1", -1, 1001, "1001", "5.0", True, "٣", "99999"])
def test_what_is_no_priority_is_refused_with_the_classes(value: str | int) -> None:
    with pytest.raises(ValueError, match=r"urgent \(1\), high \(5\), normal \(10\).*0-1000"):
        parse_priority(value)
