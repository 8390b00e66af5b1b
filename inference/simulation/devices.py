"""Devices to simulate, as people write them: "gpu0=24GiB,gpu1=24GiB", or "100x8x80GiB" for 100 nodes of 8 each.

Called by `coordinator/cli/simulate.py` and `benchmarks/simulation.py`.
"""

from __future__ import annotations

from gpuboss.units import parse_memory
from inference.events import DeviceRoom

__all__ = ["parse_devices"]

_MOST = 100_000
_HELP = 'write them like "gpu0=24GiB,gpu1=24GiB", or NODESxGPUSxMEMORY like "4x8x80GiB", or GPUSxMEMORY like "2x24GiB"'


def parse_devices(text: str) -> tuple[DeviceRoom, ...]:
    """All of what is written is there for models: nothing is reserved. Raises ValueError, with examples."""
    devices = _named(text) if "=" in text else _counted(text)
    ids = [device.id for device in devices]
    twice = next((name for name in ids if ids.count(name) > 1), None) if len(ids) < 1000 else None
    if twice is not None:
        raise ValueError(f"two devices are called {twice!r}")
    return tuple(devices)


def _named(text: str) -> list[DeviceRoom]:
    devices = []
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not (name and equals):
            raise ValueError(f"{part.strip()!r} is no device: {_HELP}")
        devices.append(_device(name, size))
    return devices


def _counted(text: str) -> list[DeviceRoom]:
    *counts, size = text.lower().split("x")
    if not 1 <= len(counts) <= 2 or not all(count.isascii() and count.isdecimal() for count in counts):
        raise ValueError(f"{text!r} names no devices: {_HELP}")
    nodes, each = (1, int(counts[0])) if len(counts) == 1 else (int(counts[0]), int(counts[1]))
    if not 1 <= nodes * each <= _MOST:
        raise ValueError(f"{nodes * each} devices are not between 1 and {_MOST}")
    if nodes == 1:
        return [_device(f"gpu{index}", size) for index in range(each)]
    return [
        _device(f"node{node}/gpu{index}", size, node=f"node{node}") for node in range(nodes) for index in range(each)
    ]


def _device(name: str, size: str, *, node: str = "") -> DeviceRoom:
    size_bytes = parse_memory(size)
    if not size_bytes:
        raise ValueError(f"device {name!r} has no memory: {_HELP}")
    return DeviceRoom(name, size_bytes, reserve_bytes=0, others_bytes=0, accelerator=True, node=node)
