"""Sizes and durations as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuboss.units import GIB, KIB, MIB, TIB, format_bytes, parse_bytes, parse_duration, parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * GIB),
        ("512MiB", 512 * MIB),
        ("1.5GiB", GIB + 512 * MIB),
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        (" 64 MiB ", 64 * MIB),
        ("0.5KiB", 512),
        ("7B", 7),
        ("4096", 4096),
        (4096, 4096),
        (0, 0),
        ("0", 0),
        ("2TiB", 2 * TIB),
        ("0.0000000001GiB", 0),
    ],
)
def test_sizes_people_write_are_understood(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("value", "meant"), [("20", "20GiB"), (20, "20GiB"), ("1.5KiB", "1.5GiB"), (1048575, "1048575GiB")]
)
def test_an_amount_of_memory_without_its_unit_is_found_out(value: str | int, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {meant}"):
        parse_memory(value)
    assert parse_memory("1MiB") == parse_memory(MIB) == MIB
    assert parse_memory("0") == 0


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "GiB",
            "-1GiB",
            "- 1GiB",
            "+1GiB",
            "nan",
            "inf",
            "NaNGiB",
            "1e9",
            "1.5",
            "1.GiB",
            ".5GiB",
            "1..5GiB",
            "1,5GiB",
        ),
        *(
            "5 potatoes",
            "5G",
            "0x10",
            "5GiBGiB",
            "1 2GiB",
            "1_000",
            "²GiB",
            "٣GiB",
            "9" * 400 + "GiB",
            "2000000TiB",
            -1,
            1 << 61,
            True,
        ),
        *(1.5, None, float("nan")),
    ],
)
def test_a_size_that_is_none_is_refused_with_examples(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"20GiB.*512MiB"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_size_survives_being_printed_and_read_back_to_a_twentieth_of_its_unit(size: int) -> None:
    unit = next((scale for scale in (TIB, GIB, MIB, KIB) if size >= scale), 1)
    assert abs(parse_bytes(format_bytes(size)) - size) <= (unit // 20 + 1 if unit > 1 else 0)


@given(st.integers(min_value=0, max_value=10230), st.sampled_from([KIB, MIB, GIB]))
def test_whole_units_survive_exactly(count: int, unit: int) -> None:
    assert parse_bytes(format_bytes(count * unit)) == count * unit or count > 1023


@given(st.integers(min_value=-(1 << 60), max_value=1 << 60))
def test_a_printed_size_is_never_more_than_1023_of_its_unit(size: int) -> None:
    text = format_bytes(size).lstrip("-")
    number = float(text.rstrip("TGMKiB"))
    assert number < 1024 or text.endswith("TiB")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (GIB - 1, "1GiB"), (-2 * GIB, "-2GiB"), (3 * GIB // 2, "1.5GiB")],
)
def test_sizes_are_printed_short(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("2h", timedelta(hours=2)),
        ("30s", timedelta(seconds=30)),
        ("250ms", timedelta(milliseconds=250)),
        ("1.5h", timedelta(minutes=90)),
        ("5m", timedelta(minutes=5)),
        ("5min", timedelta(minutes=5)),
        ("3d", timedelta(days=3)),
        ("45", timedelta(seconds=45)),
        (0.5, timedelta(milliseconds=500)),
        (0, timedelta(0)),
    ],
)
def test_durations_people_write_are_understood(text: str | float, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize(
    "text", ["", "h", "-1s", "nan", "inf", "2 hours ago", "1.s", -1, float("nan"), float("inf"), "99999d", True, None]
)
def test_a_duration_that_is_none_is_refused_with_examples(text: str | float) -> None:
    with pytest.raises(ValueError, match=r"30s.*2h"):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=10**8))
def test_whole_seconds_mean_themselves(seconds: int) -> None:
    assert parse_duration(seconds) == parse_duration(f"{seconds}s") == timedelta(seconds=seconds)
