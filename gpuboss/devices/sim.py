"""Declared devices that let any machine play a bigger one: for tests, demos and planning.

Nothing measures them: what is claimed counts as used while its holder lives. Called by `discover`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from gpuboss.devices import Device, DeviceKind, DeviceSpec, Probe, Reading


class SimProbe:
    """The declared devices of this host."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)

    def devices(self) -> Sequence[Device]:
        """The devices as declared."""
        return self._devices

    def read(self, pids: Collection[int]) -> Sequence[Reading]:  # noqa: ARG002 (the Probe's signature)
        """One empty reading per device: nothing measures them."""
        now = time.monotonic()
        return [Reading(device.id, None, {}, now) for device in self._devices]


def declared(specs: Sequence[DeviceSpec]) -> list[Probe]:
    """A probe for the specs of kind `sim`, if there are any; a device's index is its place in the whole list."""
    devices = [
        Device(spec.id, spec.kind, "simulated device", index, spec.total_bytes, spec.reserve_bytes, measured=False)
        for index, spec in enumerate(specs)
        if spec.kind is DeviceKind.SIM
    ]
    return [SimProbe(devices)] if devices else []
