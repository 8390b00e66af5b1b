"""Devices as people write them."""

from __future__ import annotations

import pytest

from gpuboss.units import GIB
from inference.simulation.devices import parse_devices


def test_devices_have_names_and_sizes() -> None:
    devices = parse_devices("gpu0=24GiB, big=80GiB")
    assert [(device.id, device.capacity_bytes, device.node) for device in devices] == [
        ("gpu0", 24 * GIB, ""), ("big", 80 * GIB, "")
    ]  # fmt: skip


def test_many_are_counted() -> None:
    devices = parse_devices("100x8x80GiB")
    assert len(devices) == 800
    assert len({device.id for device in devices}) == 800
    assert len({device.node for device in devices}) == 100
    assert [device.id for device in parse_devices("2x24GiB")] == ["gpu0", "gpu1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no devices"),
        ("24GiB", "names no devices"),
        ("1x2x3x4GiB", "names no devices"),
        ("gpu0", "names no devices"),
        ("٣x24GiB", "names no devices"),
        ("gpu0=24GiB,gpu1", "'gpu1' is no device"),
        ("gpu0=24GiB,gpu0=8GiB", "two devices are called 'gpu0'"),
        ("gpu0=24Gubs", "memory size '24Gubs' is not understood"),
        ("gpu0=24", "did you mean 24GiB"),
        ("0x8x80GiB", "0 devices are not between 1 and"),
    ],
)
def test_what_is_no_device_is_told_with_an_example(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"device|memory") as caught:
        parse_devices(text)
    assert said in str(caught.value)
