"""Values as JSON, between the store, the keeper and its clients.

Called by `gpuboss.client`, `gpuboss.keeper` and their parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.ledger_rows import Ground

__all__ = [
    *("device_from_wire", "device_to_wire", "grounds_from_wire", "grounds_to_wire"),
    *("process_from_wire", "process_to_wire"),
]

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


def grounds_to_wire(grounds: Iterable[Ground]) -> str:
    """As JSON text, which the store keeps and does not read."""
    told = [{name: getattr(ground, name) for name in Ground.__slots__} for ground in grounds]
    return json.dumps(told, separators=(",", ":"))


def grounds_from_wire(text: str) -> tuple[Ground, ...]:
    """The inverse; TypeError for other fields."""
    return tuple(Ground(**told) for told in json.loads(text))
