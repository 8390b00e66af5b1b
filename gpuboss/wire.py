"""Values as JSON, between the store, the keeper and its clients.

Called by `gpuboss.client`, `gpuboss.keeper` and their parts.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import ProcessIdentity

__all__ = ["device_from_wire", "device_to_wire", "process_from_wire", "process_to_wire"]

Wire = dict[str, Any]


def process_to_wire(process: ProcessIdentity) -> Wire:
    """Field by field."""
    return {name: getattr(process, name) for name in ProcessIdentity.__slots__}


def process_from_wire(wire: Wire) -> ProcessIdentity:
    """The inverse; TypeError for other fields."""
    return ProcessIdentity(**wire)


def device_to_wire(device: Device) -> Wire:
    """Field by field."""
    return asdict(device)


def device_from_wire(wire: Wire) -> Device:
    """The inverse; TypeError for other fields."""
    return Device(**wire | {"kind": DeviceKind(wire["kind"])})
