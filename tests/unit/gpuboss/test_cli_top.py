"""The picture of `gpuboss top`."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpuboss.cli import top
from gpuboss.cli.top import picture, segments
from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import DeviceUse, Snapshot
from tests.unit.gpuboss.test_cli_words import lease

GIB = 1 << 30
SIZES = st.integers(min_value=0, max_value=100 * GIB)


def use(total: int, reserve: int = 0, **more: int | None) -> DeviceUse:
    fields = {"claimed_bytes": 0, "observed_bytes": 0, "foreign_bytes": 0, "residual_bytes": 0, "free_bytes": 0} | more
    device = Device("GPU-0", DeviceKind.CUDA, "NVIDIA", 0, total, reserve, measured=True)
    return DeviceUse(device, **fields)  # type: ignore[arg-type]


@given(
    total=st.integers(min_value=1, max_value=80 * GIB),
    sizes=st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES),
    width=st.integers(min_value=1, max_value=200),
)
def test_a_bar_is_always_exactly_as_wide_as_it_is(total: int, sizes: tuple[int, ...], width: int) -> None:
    claimed, observed, foreign, residual, reserve = sizes
    shown = use(
        total,
        reserve,
        claimed_bytes=claimed,
        observed_bytes=observed,
        foreign_bytes=foreign,
        residual_bytes=residual,
    )
    parts = segments(shown, width)
    assert sum(count for _, count in parts) == width
    assert all(count >= 0 for _, count in parts)


def test_the_parts_of_a_bar() -> None:
    shown = use(
        100 * GIB,
        10 * GIB,
        claimed_bytes=40 * GIB,
        observed_bytes=30 * GIB,
        foreign_bytes=20 * GIB,
        residual_bytes=5 * GIB,
    )
    assert segments(shown, 20) == [
        ("used", 6),
        ("leased", 2),
        ("others", 4),
        ("leftover", 1),
        ("reserve", 2),
        ("free", 5),
    ]


def test_what_is_not_measured_counts_as_used() -> None:
    assert segments(use(10 * GIB, claimed_bytes=5 * GIB, observed_bytes=None), 10)[:2] == [("used", 5), ("leased", 0)]


def test_the_whole_picture() -> None:
    device = use(24 * GIB, claimed_bytes=10 * GIB, observed_bytes=6 * GIB, free_bytes=14 * GIB)
    snapshot = Snapshot(1, (device,), (lease("job:a", {"GPU-0": 10}), lease("job:b", position=1)))
    text = _drawn(snapshot, 120)
    assert "1 held, 1 waiting" in text
    assert "gpu0 " + "█" * 10 + "▒" * 7 + "·" * 23 in text
    assert "42% 14GiB of 24GiB free, leased 10GiB, in use 6GiB" in text
    assert "gpu0 10GiB" in text
    assert "queued (1)" in text


@pytest.mark.parametrize(("width", "length"), [(60, 20), (80, 20), (130, 27), (200, 40)])
def test_a_narrow_terminal_has_whole_bars_ids_and_pids(width: int, length: int) -> None:
    more = {"observed_bytes": 6 * GIB, "foreign_bytes": 4 * GIB, "residual_bytes": 3 * GIB, "quarantined_bytes": GIB}
    device = use(24 * GIB, claimed_bytes=10 * GIB, free_bytes=7 * GIB, **more)
    held = lease("service:a-name-that-is-quite-long", {"GPU-0": 10}, id="0123456789abcdef", preemptible=True)
    text = _drawn(Snapshot(1, (device,), (held,)), width, {held.id: 1234567})
    (bar,) = (line.split()[1] for line in text.splitlines() if line.startswith("gpu0 "))
    assert set(bar) == set("█▒#!·"), "every part has a character of its own, and nothing is cut off"
    assert len(bar) == length
    assert {"0123456789ab", "1234567"} <= set(text.split())
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text


def test_the_characters_alone_tell_the_parts_of_a_bar_apart() -> None:
    assert len({character for _, character in top._STYLES.values()}) == len(top._STYLES)


def _drawn(snapshot: Snapshot, width: int, pids: Mapping[str, int | None] | None = None) -> str:
    shown = io.StringIO()
    Console(file=shown, width=width, markup=False, highlight=False).print(picture(snapshot, pids or {}, width))
    return shown.getvalue()
