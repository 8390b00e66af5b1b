"""The devices whose memory is leased, and what their drivers say about it.

Called by the keeper (which probes) and by every client (which names devices). One module per kind of device implements
`Probe`; `discover` puts together what this host has:

- `nvml`   NVIDIA cards, by GPU UUID, measured per process
- `amd`    AMD cards, through sysfs, measured as a whole
- `apple`  Apple silicon's unified memory, measured as a whole
- `cpu`    this host's RAM, measured per process
- `sim`    declared devices, which play a bigger machine and are not measured
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from gpuboss.errors import DeviceError
from gpuboss.units import MIB, format_bytes, parse_memory

__all__ = [
    "DEFAULT_RESERVE_BYTES",
    "DEVICES_VARIABLE",
    "Device",
    "DeviceKind",
    "DeviceSpec",
    "Probe",
    "Reading",
    "devices_from_environment",
    "discover",
    "parse_devices",
]

DEFAULT_RESERVE_BYTES = 512 * MIB
"""What nobody may lease of a discovered device, unless told otherwise."""
DEVICES_VARIABLE = "GPUBOSS_DEVICES"
"""Environment variable that declares devices: `sim0=8GiB,sim1=24GiB`."""


class DeviceKind(enum.StrEnum):
    """What sort of memory a device has."""

    CUDA = "cuda"
    """An NVIDIA card."""
    ROCM = "rocm"
    """An AMD card."""
    METAL = "metal"
    """Apple silicon's unified memory, as far as the GPU may use it."""
    CPU = "cpu"
    """This host's RAM, or the part its container may use."""
    SIM = "sim"
    """Declared, not real: what is claimed counts as used while its holder lives."""


@dataclass(frozen=True, slots=True)
class Device:
    """Memory that can be leased."""

    id: str
    """Its name for ever: the GPU's UUID, `cpu`, or the declared name."""
    kind: DeviceKind
    name: str
    """The product's name, for people."""
    index: int
    """Its place among the node's devices; shares of one model are laid in this order."""
    total_bytes: int
    reserve_bytes: int
    """The owner's share, which nobody may lease."""
    measured: bool
    """Whether a driver says what is in use."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a driver said about one device at one moment."""

    device_id: str
    used_bytes: int | None
    """In use by all processes; None where nothing measures it."""
    by_pid: Mapping[int, int]
    """Pid -> bytes, for the processes of which the driver gives a figure; the others are in `used_bytes` alone."""
    at_s: float
    """`time.monotonic()` when the driver was asked."""
    complete: bool = True
    """Whether a process that is not in `by_pid` uses nothing; False where figures per process are missing or none."""
    without_figure: tuple[int, ...] = ()
    """Pids of processes that use the device, of which the driver gives no figure."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device as a person declares it, in the environment or the configuration."""

    id: str
    kind: DeviceKind
    total_bytes: int
    """For `cpu`: how much of the host's RAM may be leased."""
    reserve_bytes: int = 0
    """Kept back from what is declared."""


class Probe(Protocol):
    """Knows the devices of one kind on this host."""

    def devices(self) -> Sequence[Device]:
        """The devices, always the same ones in the same order."""
        ...

    def read(self, pids: Collection[int]) -> Sequence[Reading]:
        """One reading per device; `pids` are those of interest, where a driver must be asked about each by itself.

        Raises DeviceError when the driver does not answer.
        """
        ...


def discover(specs: Sequence[DeviceSpec] | None = None, reserve_bytes: int = DEFAULT_RESERVE_BYTES) -> list[Probe]:
    """The probes of this host's devices: the declared ones if any are, else accelerators and `cpu`.

    `reserve_bytes` is kept back on every discovered device. Raises DeviceError for a declared device that is not there.
    """
    from gpuboss.devices import amd, apple, cpu, nvml, sim

    if specs is not None:
        specs = check_specs(specs)
        return [*sim.declared(specs), *cpu.declared(specs)]
    probes: list[Probe] = []
    for find in (nvml.find, amd.find):
        if probe := find(first_index=_count(probes), reserve_bytes=reserve_bytes):
            probes.append(probe)
    memory: cpu.HostMemory | None = None
    if metal := apple.find(first_index=_count(probes), reserve_bytes=reserve_bytes):
        probes.append(metal)
        memory = metal.rest()
    return [*probes, cpu.CpuProbe(index=_count(probes), reserve_bytes=reserve_bytes, memory=memory)]


def parse_devices(text: str) -> tuple[DeviceSpec, ...]:
    """Devices from `sim0=8GiB,sim1=24GiB,cpu=16GiB`; DeviceError, with an example, for anything else."""
    specs: list[DeviceSpec] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise DeviceError(f'device {part!r} is not understood: write it like "sim0=8GiB,sim1=24GiB"')
        try:
            specs.append(DeviceSpec(name, DeviceKind.CPU if name == "cpu" else DeviceKind.SIM, parse_memory(size)))
        except ValueError as error:
            raise DeviceError(f"device {name!r}: {error}") from error
    return check_specs(specs)


def check_specs(specs: Sequence[DeviceSpec]) -> tuple[DeviceSpec, ...]:
    """The same, or DeviceError when there are none, one is there twice or empty, or is of a kind that is found."""
    if not specs:
        raise DeviceError(
            'no device is declared: write them like "sim0=8GiB,sim1=24GiB", or leave them out to have them found'
        )
    for number, spec in enumerate(specs):
        if any(spec.id == other.id for other in specs[:number]):
            raise DeviceError(f"device {spec.id!r} is declared twice")
        if spec.kind not in (DeviceKind.SIM, DeviceKind.CPU) or (spec.id == "cpu") != (spec.kind is DeviceKind.CPU):
            raise DeviceError(
                f'device {spec.id!r} of kind {spec.kind}: only "cpu" and devices of kind sim are declared, others found'
            )
        if not 0 <= spec.reserve_bytes < spec.total_bytes:
            raise DeviceError(
                f"device {spec.id!r} has {format_bytes(spec.total_bytes)}, of which {format_bytes(spec.reserve_bytes)} "
                "are kept back: nothing is left to lease"
            )
    return tuple(specs)


def devices_from_environment() -> tuple[DeviceSpec, ...] | None:
    """What `GPUBOSS_DEVICES` declares; None when it is not set, so that devices are discovered."""
    text = os.environ.get(DEVICES_VARIABLE, "").strip()
    return parse_devices(text) if text else None


def _count(probes: Sequence[Probe]) -> int:
    return sum(len(probe.devices()) for probe in probes)


class _CallableModule(ModuleType):
    """`gpuboss.devices` is this package and a function of the library, whichever was asked for first."""

    def __call__(self, settings: Any = None) -> Any:
        """See `gpuboss.looking.devices`."""
        from gpuboss import looking

        return looking.devices(settings)


sys.modules[__name__].__class__ = _CallableModule
