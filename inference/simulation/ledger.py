"""The memory of a simulated world: who holds how much of which device, and who waits for it.

Called by `world.py`; calls nothing. As the real ledger does (docs/leases.md), it grants in order of class and then of
asking, all devices of one option or none; one that is blocked earmarks its first option, which only the devices it does
not name stay open beside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from inference.events import DeviceRoom, Shares

__all__ = ["Place", "VirtualLedger"]


@dataclass(slots=True, eq=False)
class Place:
    """A lease that waits, and what it got."""

    slot_id: str
    options: tuple[Shares, ...]
    priority: int
    order: float
    shares: Shares = field(default_factory=dict)
    """What it was granted."""


class VirtualLedger:
    """Every device's memory."""

    def __init__(self, devices: Iterable[DeviceRoom]) -> None:
        self._free = {device.id: device.capacity_bytes - device.others_bytes for device in devices}
        self._held: dict[str, Shares] = {}
        self._waiting: dict[str, Place] = {}
        self._orders = itertools.count(1)
        self.stirred = False
        """May somebody be granted who was not a moment ago?"""

    def queue(self, slot_id: str, options: tuple[Shares, ...], priority: int, ahead_of: Iterable[str] = ()) -> None:
        """Ask for one of the options, ahead of those slots; asked again, other options in the same place."""
        self.stirred = True
        place = self._waiting.get(slot_id)
        if place is not None:
            place.options, place.priority = options, priority
            return
        passed = [self._waiting[other].order for other in ahead_of if other in self._waiting]
        order = min(passed) - 0.5 if passed else float(next(self._orders))
        self._waiting[slot_id] = Place(slot_id, options, priority, order)

    def reprice(self, slot_id: str, priority: int) -> None:
        """Give a lease that waits another class."""
        if slot_id in self._waiting:
            self._waiting[slot_id].priority = priority
            self.stirred = True

    def hold(self, slot_id: str, shares: Shares) -> None:
        """Have the slot hold this much."""
        self._held[slot_id] = shares
        for device, size in shares.items():
            if device in self._free:
                self._free[device] -= size

    def holds(self, slot_id: str) -> bool:
        """Has its lease been granted?"""
        return slot_id in self._held

    def withdraw(self, slot_id: str) -> None:
        """Wait no more."""
        if self._waiting.pop(slot_id, None) is not None:
            self.stirred = True

    def release(self, slot_id: str) -> None:
        """Give back what the slot holds."""
        for device, size in self._held.pop(slot_id, {}).items():
            if device in self._free:
                self._free[device] += size
        self.stirred = True

    def grant_next(self) -> Place | None:
        """The first in order that has room now; it holds what it got. None when nobody has."""
        self.stirred = False
        earmarked: dict[str, int] = {}
        for place in sorted(self._waiting.values(), key=lambda one: (one.priority, one.order)):
            for option in place.options:
                if all(self._free.get(device, 0) - earmarked.get(device, 0) >= size for device, size in option.items()):
                    del self._waiting[place.slot_id]
                    place.shares = option
                    self.hold(place.slot_id, option)
                    return place
            for device, size in place.options[0].items():
                earmarked[device] = earmarked.get(device, 0) + size
        return None
