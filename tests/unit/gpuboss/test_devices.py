"""Declaring devices, and putting together what a host has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from gpuboss import devices
from gpuboss.devices import Device, DeviceKind, DeviceSpec, Probe, apple, check_specs, discover, nvml, parse_devices
from gpuboss.devices.sim import SimProbe
from gpuboss.errors import DeviceError
from gpuboss.units import GIB, MIB


def all_devices(probes: Sequence[Probe]) -> list[Device]:
    return [device for probe in probes for device in probe.devices()]


def test_devices_are_declared_in_one_line() -> None:
    assert parse_devices("sim0=8GiB, sim1=24GiB,cpu=2GiB,") == (
        DeviceSpec("sim0", DeviceKind.SIM, 8 * GIB),
        DeviceSpec("sim1", DeviceKind.SIM, 24 * GIB),
        DeviceSpec("cpu", DeviceKind.CPU, 2 * GIB),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no device is declared"),
        (",", "no device is declared"),
        ("sim0", "device 'sim0' is not understood: write it like \"sim0=8GiB,sim1=24GiB\""),
        ("=8GiB", "is not understood"),
        ("sim0=lots", r"device 'sim0': memory size 'lots' is not understood.*20GiB"),
        ("sim0=8GiB,sim0=8GiB", "'sim0' is declared twice"),
        ("sim0=0", "nothing is left to lease"),
    ],
)
def test_a_line_that_declares_nothing_sensible_is_refused_with_an_example(text: str, words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        parse_devices(text)


@pytest.mark.parametrize(
    "spec",
    [
        DeviceSpec("gpu0", DeviceKind.CUDA, GIB),
        DeviceSpec("cpu", DeviceKind.SIM, GIB),
        DeviceSpec("ram", DeviceKind.CPU, GIB),
    ],
)
def test_only_cpu_and_simulated_devices_are_declared(spec: DeviceSpec) -> None:
    with pytest.raises(DeviceError, match='only "cpu" and devices of kind sim are declared'):
        check_specs([spec])


def test_a_reserve_that_leaves_nothing_is_refused_with_numbers() -> None:
    with pytest.raises(DeviceError, match="has 1GiB, of which 1GiB are kept back"):
        check_specs([DeviceSpec("sim0", DeviceKind.SIM, GIB, GIB)])


def test_the_environment_declares_or_leaves_it_to_discovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUBOSS_DEVICES", raising=False)
    assert devices.devices_from_environment() is None
    monkeypatch.setenv("GPUBOSS_DEVICES", " ")
    assert devices.devices_from_environment() is None
    monkeypatch.setenv("GPUBOSS_DEVICES", "sim0=8GiB")
    assert devices.devices_from_environment() == (DeviceSpec("sim0", DeviceKind.SIM, 8 * GIB),)


def test_declared_devices_replace_the_hosts_own_and_keep_their_order() -> None:
    found = all_devices(discover(parse_devices("sim0=8GiB,cpu=64MiB,sim1=24GiB")))
    assert sorted((device.index, device.id, device.kind, device.measured) for device in found) == [
        (0, "sim0", DeviceKind.SIM, False),
        (1, "cpu", DeviceKind.CPU, True),
        (2, "sim1", DeviceKind.SIM, False),
    ]
    assert {device.reserve_bytes for device in found} == {0}


def test_simulated_devices_are_not_measured() -> None:
    (probe,) = discover(parse_devices("sim0=8GiB,sim1=1GiB"))
    readings = probe.read([os.getpid()])
    assert [reading.device_id for reading in readings] == ["sim0", "sim1"]
    assert all(reading.used_bytes is None and not reading.by_pid for reading in readings)


def test_a_cpu_larger_than_the_host_is_refused_with_both_numbers() -> None:
    with pytest.raises(DeviceError, match=r"declared with 1048576TiB, but this host .* has "):
        discover([DeviceSpec("cpu", DeviceKind.CPU, 1 << 60)])


def test_a_host_without_accelerators_has_its_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_pynvml", lambda: None)
    monkeypatch.setattr(devices.amd, "find", lambda **_: None)
    (cpu,) = all_devices(discover(reserve_bytes=300 * MIB))
    assert (cpu.id, cpu.index, cpu.reserve_bytes, cpu.measured) == ("cpu", 0, 300 * MIB, True)
    assert cpu.total_bytes > 300 * MIB


def test_accelerators_come_first_and_cpu_last_with_indices_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(kind: DeviceKind, names: Sequence[str]) -> Any:
        def find(*, first_index: int, reserve_bytes: int) -> SimProbe:
            numbered = enumerate(names, first_index)
            return SimProbe([Device(name, kind, name, n, GIB, reserve_bytes, measured=True) for n, name in numbered])

        return find

    monkeypatch.setattr(nvml, "find", found(DeviceKind.CUDA, ["GPU-a", "GPU-b"]))
    monkeypatch.setattr(devices.amd, "find", found(DeviceKind.ROCM, ["GPU-c"]))
    monkeypatch.setattr(apple, "find", lambda **_: None)
    assert [(device.index, device.id) for device in all_devices(discover())] == [
        (0, "GPU-a"),
        (1, "GPU-b"),
        (2, "GPU-c"),
        (3, "cpu"),
    ]
