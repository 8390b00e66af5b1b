"""What `gpuboss adopt` claims for a process, from what the drivers say."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from gpuboss.cli import adopt
from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import DeviceUse, ForeignUse, Snapshot

GIB = 1 << 30
GPUS = [Device(f"GPU-{n}", DeviceKind.CUDA, "NVIDIA", n, 24 * GIB, 0, measured=True) for n in range(2)]
CPU = Device("cpu", DeviceKind.CPU, "host RAM", 2, 64 * GIB, 0, measured=True)


def use(device: Device, *strangers: tuple[int, int | None]) -> DeviceUse:
    pids = tuple(ForeignUse(pid, "python", size) for pid, size in strangers)
    return DeviceUse(device, 0, 0, 0, 0, 0, foreign_pids=pids)


SNAPSHOT = Snapshot(
    1, (use(GPUS[0], (7, 3 * GIB), (8, 2 * GIB), (9, GIB)), use(GPUS[1], (8, None)), use(CPU, (7, 5 * GIB))), ()
)
CLIENT: Any = SimpleNamespace(devices=(*GPUS, CPU))


def told(vram: int | None = None, device: list[str] | None = None) -> argparse.Namespace:
    return argparse.Namespace(pid=7, vram=vram, device=device)


def test_what_it_and_its_children_use_of_the_gpus() -> None:
    assert adopt._used(SNAPSHOT, {7, 8}, None) == {"GPU-0": 5 * GIB}, "host memory only where it is asked for"
    assert adopt._used(SNAPSHOT, {7, 8}, ["cpu"]) == {"cpu": 5 * GIB}
    assert adopt._used(SNAPSHOT, {1}, None) == {}


@pytest.mark.parametrize(
    ("vram", "device", "used", "shares"),
    [
        (None, None, {"GPU-0": 5}, {"GPU-0": 5}),
        (8, None, {"GPU-0": 5}, {"GPU-0": 8}),
        (2, None, {"GPU-0": 5}, {"GPU-0": 5}),
        (8, ["gpu1"], {}, {"GPU-1": 8}),
        (8, ["gpu1"], {"GPU-0": 5}, {"GPU-0": 5, "GPU-1": 8}),
    ],
)
def test_what_is_claimed(
    vram: int | None, device: list[str] | None, used: dict[str, int], shares: dict[str, int]
) -> None:
    assert adopt._shares(told(vram, device), CLIENT, used) == shares


def test_what_nobody_can_know_must_be_said() -> None:
    with pytest.raises(ValueError, match="uses no memory of a GPU"):
        adopt._shares(told(), CLIENT, {})
    with pytest.raises(ValueError, match="one of gpu0, gpu1"):
        adopt._shares(told(vram=8), CLIENT, {})
    alone: Any = SimpleNamespace(devices=(GPUS[0], CPU))
    assert adopt._shares(told(vram=8), alone, {}) == {"GPU-0": 8}
