"""NVIDIA cards through their driver's library: memory as a whole and per process.

Called by `discover`. Only tested against a recorded driver, never on a card by this project's own tests. Needs the
package `nvidia-ml-py` (extra `nvidia`); without it, or without a driver, the host counts as one without NVIDIA cards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpuboss import identity
from gpuboss.devices import Device, DeviceKind, Probe, Reading
from gpuboss.errors import DeviceError

_log = logging.getLogger(__name__)

_HOST_PID_NAMESPACE = 0xEFFFFFFC
"""Linux' number for the pid namespace that is no container's."""


class NvmlProbe:
    """The cards of this host, by UUID. `nvml` is the module `pynvml`, already initialised."""

    def __init__(self, nvml: Any, *, first_index: int, reserve_bytes: int, sees_pids: bool) -> None:
        self._nvml = nvml
        self._sees_pids = sees_pids
        self._cards: list[tuple[Any, Device]] = []
        with _Asking(nvml):
            for handle in self._handles():
                uuid, name = (_plain(text) for text in (nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)))
                total = self._total_bytes(handle)
                if total == 0:
                    _log.warning("%s %s has no memory of its own: what it uses is leased as cpu", name, uuid)
                    continue
                index = first_index + len(self._cards)
                device = Device(uuid, DeviceKind.CUDA, name, index, total, reserve_bytes, measured=True)
                self._cards.append((handle, device))

    def devices(self) -> Sequence[Device]:
        """The cards in the driver's order (by place on the bus)."""
        return tuple(device for _, device in self._cards)

    def read(self, pids: Collection[int]) -> Sequence[Reading]:  # noqa: ARG002 (the driver lists its processes itself)
        """What each card has in use, and by which process where the driver says so."""
        with _Asking(self._nvml):
            return [self._read(handle, device) for handle, device in self._cards]

    def _read(self, handle: Any, device: Device) -> Reading:
        at_s = time.monotonic()
        used = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        by_pid: dict[int, int] = {}
        processes = self._processes(handle) if self._sees_pids else None
        silent: set[int] = set()
        for process in processes or ():
            if process.usedGpuMemory is None:  # how the package says "the driver does not tell"
                silent.add(int(process.pid))
            else:
                # A process that computes and draws is in both lists with the same figure.
                by_pid[int(process.pid)] = max(int(process.usedGpuMemory), by_pid.get(int(process.pid), 0))
        complete = processes is not None and not silent
        return Reading(device.id, used, by_pid, at_s, complete=complete, without_figure=tuple(sorted(silent)))

    def _handles(self) -> Iterator[Any]:
        """Every card, or the parts of one that is split (MIG), which are devices of their own."""
        nvml = self._nvml
        for number in range(nvml.nvmlDeviceGetCount()):
            card = nvml.nvmlDeviceGetHandleByIndex(number)
            try:
                split, _ = nvml.nvmlDeviceGetMigMode(card)
            except nvml.NVMLError_NotSupported:
                split = 0
            if not split:
                yield card
                continue
            for part in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
                try:
                    yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, part)
                except nvml.NVMLError_NotFound:
                    continue

    def _total_bytes(self, handle: Any) -> int:
        """Its own memory; 0 for a processor with built-in graphics that uses the host's (DGX Spark)."""
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total)
        except self._nvml.NVMLError_NotSupported:
            return 0

    def _processes(self, handle: Any) -> list[Any] | None:
        """The processes on a card; None where we may not know them."""
        found: list[Any] = []
        for ask in (self._nvml.nvmlDeviceGetComputeRunningProcesses, self._nvml.nvmlDeviceGetGraphicsRunningProcesses):
            try:
                found.extend(ask(handle))
            except self._nvml.NVMLError_NotSupported:
                continue  # cards without graphics
            except self._nvml.NVMLError_NoPermission:
                return None
        return found


class _Asking:
    """Turns the driver's errors into DeviceError, with what to do."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._nvml.NVMLError):
            raise DeviceError(
                f"the NVIDIA driver does not answer ({error}): see what `nvidia-smi` says, "
                "or declare devices (GPUBOSS_DEVICES) to go on without measuring"
            ) from error


def find(*, first_index: int, reserve_bytes: int, driver: Any = None) -> Probe | None:
    """The NVIDIA cards of this host; None when there are none. DeviceError when a driver is there but broken.

    `driver` stands for the module `pynvml` in tests.
    """
    nvml = driver or _pynvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return None
    except nvml.NVMLError as error:
        raise DeviceError(
            f"the NVIDIA driver does not start ({error}): see what `nvidia-smi` says, "
            "or declare devices (GPUBOSS_DEVICES) to go on without it"
        ) from error
    probe = NvmlProbe(nvml, first_index=first_index, reserve_bytes=reserve_bytes, sees_pids=_driver_sees_our_pids())
    return probe if probe.devices() else None


def _driver_sees_our_pids() -> bool:
    """Whether the driver's pids are ours: not so in a container, nor on WSL2, which gives no figures."""
    try:
        version = Path("/proc/version").read_text(encoding="utf-8")
    except OSError:
        version = ""
    return identity.pid_namespace() in (0, _HOST_PID_NAMESPACE) and "microsoft" not in version.lower()


def _pynvml() -> Any:
    """The driver's library, or None where the package is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _plain(text: str | bytes) -> str:
    """Old versions of the package give bytes."""
    return text.decode() if isinstance(text, bytes) else text
