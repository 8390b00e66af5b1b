"""This host's RAM as a device: for engines that compute on the CPU, and for the part of a model kept out of GPU memory.

Its size is the machine's RAM, or the container's limit where that is smaller, or what was declared. Use is measured per
process (resident set). Called by `discover`. Linux reads /proc and the control groups; macOS is asked through `apple`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from gpuboss.devices import Device, DeviceKind, DeviceSpec, Probe, Reading, apple
from gpuboss.devices.linux_memory import LinuxMemory
from gpuboss.errors import DeviceError
from gpuboss.units import format_bytes


class HostMemory(Protocol):
    """What the operating system says about RAM."""

    def total_bytes(self) -> int:
        """RAM that may be used."""
        ...

    def available_bytes(self) -> int:
        """RAM that could still be given out without swapping."""
        ...

    def resident(self, pid: int) -> tuple[int, int] | None:
        """(resident bytes, the part of them that is mapped files); None when there is no such process."""
        ...


class CpuProbe:
    """RAM of this host as one device with the id `cpu`."""

    def __init__(
        self,
        *,
        index: int = 0,
        reserve_bytes: int = 0,
        total_bytes: int | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        """`total_bytes` makes the device smaller than the host. DeviceError when the host has less."""
        self._memory = memory or _this_host()
        present = self._memory.total_bytes()
        if total_bytes is not None and total_bytes > present:
            raise DeviceError(
                f"device cpu is declared with {format_bytes(total_bytes)}, "
                f"but this host (or its container) has {format_bytes(present)} of RAM"
            )
        total = present if total_bytes is None else total_bytes
        self._device = Device("cpu", DeviceKind.CPU, "host RAM", index, total, reserve_bytes, measured=True)

    def devices(self) -> Sequence[Device]:
        """The one device `cpu`."""
        return (self._device,)

    def read(self, pids: Collection[int]) -> Sequence[Reading]:
        """The resident set of each of `pids` that runs, and what all processes leave of the device.

        Mapped files (weights) of `pids` count as used, though the kernel calls them available: an engine that maps its
        weights needs them in RAM. Use outside a device that is smaller than the host counts only as far as it cuts in.
        """
        at_s = time.monotonic()
        by_pid: dict[int, int] = {}
        mapped = 0
        for pid in pids:
            if (found := self._memory.resident(pid)) is not None:
                by_pid[pid], mapped_here = found
                mapped += mapped_here
        used = max(0, self._device.total_bytes - self._memory.available_bytes() + mapped)
        return (Reading(self._device.id, used, by_pid, at_s),)


def declared(specs: Sequence[DeviceSpec]) -> list[Probe]:
    """A probe for the spec of kind `cpu`, if there is one; its index is its place in the whole list."""
    return [
        CpuProbe(index=index, reserve_bytes=spec.reserve_bytes, total_bytes=spec.total_bytes)
        for index, spec in enumerate(specs)
        if spec.kind is DeviceKind.CPU
    ]


def _this_host() -> HostMemory:
    return apple.MacMemory() if sys.platform == "darwin" else LinuxMemory()
