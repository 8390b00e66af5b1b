"""Apple silicon: one memory for GPU and CPU, of which the system lets the GPU use a part.

Called by `discover` and, for RAM on macOS, by `cpu`. Only tested against recorded output of `sysctl`, `vm_stat` and
`ps`, never on a Mac by this project's own tests.

The GPU's part is the device `metal`; `cpu` is what is left, so that the two never promise the same byte twice. The
GPU's use is not known per process: a reading says how much of the part is gone, whoever took it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence

from gpuboss.devices import Device, DeviceKind, Reading
from gpuboss.errors import DeviceError
from gpuboss.units import GIB, MIB

Runner = Callable[[Sequence[str]], str | None]
"""Runs a command and gives its output; None when it failed. Tests put recorded output in its place."""


def run(command: Sequence[str]) -> str | None:
    """The output of a system tool; None when it is not there or failed."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class MacMemory:
    """RAM of a Mac; `kept_bytes` of it belong to the GPU's device and are left out."""

    def __init__(self, runner: Runner = run, *, kept_bytes: int = 0) -> None:
        self._run = runner
        self._kept_bytes = kept_bytes

    def total_bytes(self) -> int:
        """RAM without the GPU's part."""
        return _number(self._run, "hw.memsize") - self._kept_bytes

    def available_bytes(self) -> int:
        """RAM that could be given out: free, speculative, inactive and purgeable pages."""
        text = self._run(["vm_stat"])
        size = re.search(r"page size of (\d+) bytes", text or "")
        if text is None or size is None:
            raise DeviceError("vm_stat gives no figures: declare devices (GPUBOSS_DEVICES) to go on without measuring")
        pages = dict(re.findall(r"^Pages ([a-z ]+):\s+(\d+)\.$", text, re.MULTILINE))
        return sum(int(pages.get(name, 0)) for name in ("free", "speculative", "inactive", "purgeable")) * int(size[1])

    def resident(self, pid: int) -> tuple[int, int] | None:
        """(resident bytes, 0: mapped files are not told apart); None when there is no such process."""
        text = (self._run(["ps", "-o", "rss=", "-p", str(pid)]) or "").strip()
        return (int(text) * 1024, 0) if text.isdigit() else None


class AppleProbe:
    """The GPU's part of a Mac's memory as one device with the id `metal`."""

    def __init__(self, *, index: int, reserve_bytes: int, runner: Runner = run) -> None:
        self._run = runner
        self._memory = MacMemory(runner)
        name = (runner(["sysctl", "-n", "machdep.cpu.brand_string"]) or "").strip() or "Apple GPU"
        total = working_set_bytes(self._memory.total_bytes(), wired_limit_mb=_optional(runner, "iogpu.wired_limit_mb"))
        self._device = Device("metal", DeviceKind.METAL, name, index, total, reserve_bytes, measured=True)

    def devices(self) -> Sequence[Device]:
        """The one device `metal`."""
        return (self._device,)

    def rest(self) -> MacMemory:
        """What is left of RAM for the device `cpu`."""
        return MacMemory(self._run, kept_bytes=self._device.total_bytes)

    def read(self, pids: Collection[int]) -> Sequence[Reading]:  # noqa: ARG002 (no figures per process)
        """How much of the part is gone, because RAM is: by whom is not known."""
        at_s = time.monotonic()
        used = max(0, self._device.total_bytes - self._memory.available_bytes())
        return (Reading(self._device.id, used, {}, at_s, complete=False),)


def find(*, first_index: int, reserve_bytes: int, runner: Runner = run) -> AppleProbe | None:
    """The GPU of this Mac; None on other machines and on Macs without Apple silicon."""
    if sys.platform != "darwin" or _optional(runner, "hw.optional.arm64") != 1:
        return None
    return AppleProbe(index=first_index, reserve_bytes=reserve_bytes, runner=runner)


def working_set_bytes(ram_bytes: int, *, wired_limit_mb: int = 0) -> int:
    """How much the GPU may use: the owner's `iogpu.wired_limit_mb`, else what Metal recommends for this much RAM."""
    if wired_limit_mb > 0:
        return min(wired_limit_mb * MIB, ram_bytes)
    return ram_bytes * 3 // 4 if ram_bytes >= 36 * GIB else ram_bytes * 2 // 3


def _number(runner: Runner, name: str) -> int:
    text = (runner(["sysctl", "-n", name]) or "").strip()
    if not text.isdigit():
        raise DeviceError(f"sysctl {name} says {text!r}: declare devices (GPUBOSS_DEVICES) to go on without measuring")
    return int(text)


def _optional(runner: Runner, name: str) -> int:
    text = (runner(["sysctl", "-n", name]) or "").strip()
    return int(text) if text.isdigit() else 0
