"""Where it goes: which devices a model's memory is claimed on, and how many bytes on each.

Called by `plan.py` and `eviction.py`; calls nothing. All sizes are bytes.

1. Whole on one accelerator. Of those with room, the one with the least: big holes stay for big models.
2. Over several accelerators of one node, the fewest that hold it: those with most room, shares in proportion to it, in
   index order, each keeping `MARGIN_BYTES` free for what a split model's engine needs beyond its share.
3. Host memory counts only where no accelerator is configured, and is never split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from inference.events import DeviceRoom, Shares

MARGIN_BYTES = 512 * 1024 * 1024
"""What stays unclaimed on every device of a split model."""


Groups = tuple[tuple[str, ...], ...]
"""Sets of devices; over those of one of them a model may be split."""


class HasShares(Protocol):
    """Anything that holds memory."""

    @property
    def shares(self) -> Shares:
        """Bytes by device."""


def usable(devices: Sequence[DeviceRoom]) -> tuple[DeviceRoom, ...]:
    """The devices models may be put on: the accelerators, or where there is none, host memory."""
    accelerators = tuple(device for device in devices if device.accelerator)
    return accelerators or tuple(devices)


def groups_of(devices: Sequence[DeviceRoom]) -> Groups:
    """The sets of (usable) devices that a model may be split over: several accelerators of one node."""
    nodes: dict[str, list[str]] = {}
    for device in devices:
        if device.accelerator:
            nodes.setdefault(device.node, []).append(device.id)
    return tuple(tuple(members) for members in nodes.values() if len(members) > 1)


def largest(devices: Sequence[DeviceRoom]) -> int:
    """Bytes of the largest model that the (usable) devices could hold if they were empty."""
    return reach({device.id: device.capacity_bytes for device in devices}, groups_of(devices))


def place(need: int, rooms: Mapping[str, int], groups: Groups) -> tuple[Shares, ...]:
    """The ways to put `need` bytes into `rooms` (free bytes by device, in index order), best first; () when none."""
    if max(rooms.values(), default=-1) >= need:
        whole = sorted((room, index, device) for index, (device, room) in enumerate(rooms.items()) if room >= need)
        return tuple({device: need} for _, _, device in whole)
    together = [{device: rooms[device] for device in group} for group in groups]
    found = [_split(need, members) for members in together if spread(members.values()) >= need]
    return tuple(sorted(found, key=len))


def reach(rooms: Mapping[str, int], groups: Groups) -> int:
    """The most bytes that `place` finds a way for."""
    together = [spread([rooms[device] for device in group]) for group in groups]
    return max([0, *rooms.values(), *together])


def once_gone(rooms: Mapping[str, int], victims: Iterable[HasShares]) -> dict[str, int]:
    """Free bytes by device once these are gone too."""
    after = dict(rooms)
    for victim in victims:
        for device, size in victim.shares.items():
            if device in after:
                after[device] += size
    return after


def spread(rooms: Iterable[int]) -> int:
    """Bytes that devices with so much room could hold together."""
    return sum([room - MARGIN_BYTES for room in rooms if room > MARGIN_BYTES])


def _split(need: int, rooms: Mapping[str, int]) -> Shares:
    by_room = sorted(rooms, key=lambda device: -rooms[device])
    chosen: dict[str, int] = {}
    for device in by_room:
        chosen[device] = rooms[device] - MARGIN_BYTES
        if sum(chosen.values()) >= need:
            break
    held = sum(chosen.values())
    shares = {device: need * chosen[device] // held for device in rooms if device in chosen}
    # Rounding left less than one byte per device; where anything is left, every share is below its device's room.
    for device in list(shares)[: need - sum(shares.values())]:
        shares[device] += 1
    return shares


class Rooms:
    """Free bytes of every usable device while one plan is made: starts take from it, victims give to it."""

    __slots__ = ("_coming", "_free", "_kept", "_reach", "_total", "groups")

    def __init__(self, devices: Sequence[DeviceRoom], groups: Groups) -> None:
        """`devices` are the usable ones, empty of slots, and `groups` is `groups_of` them."""
        self._free = {device.id: device.capacity_bytes - device.others_bytes for device in devices}
        self._coming = dict.fromkeys(self._free, 0)
        self._kept = dict.fromkeys(self._free, 0)
        self._total: dict[str, int] | None = None
        self._reach: int | None = None
        self.groups = groups

    def copy(self) -> Rooms:
        """The same, to be changed apart."""
        twin = Rooms((), self.groups)
        twin._free, twin._coming, twin._kept = dict(self._free), dict(self._coming), dict(self._kept)
        twin._total, twin._reach = self._total, self._reach
        return twin

    def take(self, shares: Shares) -> None:
        """Somebody claims these bytes."""
        self._total = self._reach = None
        for device, size in shares.items():
            if device in self._free:
                self._free[device] -= size

    def expect(self, shares: Shares) -> None:
        """These claimed bytes are on their way back: their slot is leaving."""
        self._total = self._reach = None
        for device, size in shares.items():
            if device in self._coming:
                self._coming[device] += size

    def keep(self, shares: Shares) -> None:
        """Nobody else may claim these bytes: the turn of one who has waited long enough comes next."""
        self.take(shares)
        for device, size in shares.items():
            if device in self._kept:
                self._kept[device] += size

    def close(self, devices: Iterable[str]) -> None:
        """Nothing may be put on these devices."""
        self._total = self._reach = None
        for device in devices:
            if device in self._free:
                self._free[device] = self._coming[device] = 0

    def total(self, *, kept: bool = False) -> Mapping[str, int]:
        """Free bytes by device once everything that leaves is gone; negative where claims wait for more than that.

        With `kept`, the room that is kept for somebody is counted as free.
        """
        if self._total is None:
            coming = self._coming
            self._total = {device: room + coming[device] for device, room in self._free.items()}
        return {device: room + self._kept[device] for device, room in self._total.items()} if kept else self._total

    def place(self, need: int) -> tuple[Shares, ...]:
        """The ways to put `need` bytes into what is free now, else into what will be free; () when none."""
        if self._reach is None:
            self._reach = reach(self.total(), self.groups)
        if need > self._reach:
            return ()
        return place(need, self._free, self.groups) or place(need, self.total(), self.groups)

    def overdrawn(self, shares: Shares) -> bool:
        """Is more claimed on one of these devices than it will have free? (Kept room is not claimed yet.)"""
        rooms = self.total(kept=True)
        return any(rooms[device] < 0 for device in shares if device in rooms)
