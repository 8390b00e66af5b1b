"""What the scheduler knows: the whole state of a pool, and ways to look at it.

`board.py` has the moves that change it; `refusals.py`, `explain.py` and `forecast.py` only look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Self

from inference import breaker
from inference.breaker import Breaker
from inference.claim import Claim
from inference.demand import Demand
from inference.events import DeviceRoom, Shares
from inference.habits import Habits
from inference.model import Model
from inference.placement import Groups, Rooms
from inference.places import KeptPlaces
from inference.queue import QueueLimits, WaitingLine
from inference.raised import raised
from inference.slot_state import HOLDS_MEMORY, LEAVING
from inference.slot_view import SlotRecord
from inference.slots import Slots

_PACE_UNKNOWN_S = 5.0
"""Assumed between two grants before any was measured."""
_PACE_LONGEST_S = 60.0


class State:
    """See the module."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.now_s = -math.inf
        """The latest moment any event told."""
        self.models: Mapping[str, Model] = {}
        self.devices: tuple[DeviceRoom, ...] = ()
        self.usable: tuple[DeviceRoom, ...] = ()
        """Those of them that models may be put on."""
        self.groups: Groups = ()
        """Over which of them a model may be split."""
        self.largest_bytes = 0
        """The largest model they could hold when empty."""
        self.host: DeviceRoom | None = None
        """Host memory where models are put on accelerators."""
        self.slots = Slots()
        self.line = WaitingLine(limits.aging_s)
        self.places = KeptPlaces()
        """Those of callers who left unserved."""
        self.resting: dict[str, float] = {}
        """Clients that rest between two requests, and until when."""
        self.wakings: list[tuple[float, str]] = []
        """The same as a heap; who rested once more is in it twice."""
        self.habits = Habits()
        """What was measured of every model."""
        self.breakers: dict[str, Breaker] = {}
        """Of models whose engines failed."""
        self.claims: dict[str, Claim] = {}
        """The claims of models that wait for room, by model id."""
        self.demands: dict[str, Demand] = {}
        """Who waits outside for memory of slots that hold it or are leaving for them, by id."""
        self.promised: dict[str, dict[str, int]] = {}
        """By demand, the bytes that slots gave up for it and that it does not hold yet, by device."""
        self.running: dict[str, SlotRecord] = {}
        """The slot of every ticket in flight."""
        self.version = 0
        """Grows whenever it changes who holds how much of what."""
        self.shutting_down = False
        self.granted_at_s: float | None = None
        """When somebody last had its turn."""
        self.between_grants_s = _PACE_UNKNOWN_S
        """Seconds between two grants, lately."""
        self._rooms: Rooms | None = None
        self._rooms_version = -1
        """What `version` was when they were counted."""

    # -- looking ------------------------------------------------------------------------------------------------

    def claim_of(self, model_id: str) -> int:
        """Bytes a known model's next lease claims on accelerators, or where there is none on the host."""
        return self.as_raised(model_id).claim_bytes

    def as_raised(self, model_id: str) -> Model:
        """A known model with what it claims now, which is more once it ran out of memory with its claim."""
        model, known = self.models[model_id], self.breakers.get(model_id)
        return raised(model) if known is not None and known.raise_claim else model

    def host_bytes_of(self, model_id: str) -> int:
        """What a known model keeps in host memory beside the accelerators; 0 where there is no such device."""
        return self.as_raised(model_id).host_bytes if self.host is not None else 0

    def host_room(self) -> int:
        """Bytes of host memory beside the accelerators that are free, or on their way back."""
        if self.host is None:
            return 0
        taken = sum(slot.shares.get(self.host.id, 0) for slot in self.slots.holders() if slot.state not in LEAVING)
        return self.host.capacity_bytes - self.host.others_bytes - taken

    def breaker_state(self, model_id: str) -> breaker.State:
        """May the model's engine be started now?"""
        known = self.breakers.get(model_id)
        return breaker.MayStart() if known is None else known.state(self.now_s)

    def is_orphaned(self, slot: SlotRecord) -> bool:
        """Did those whom the slot loads for leave a moment ago only? They may be back."""
        return slot.unwanted_since_s is not None and self.now_s - slot.unwanted_since_s < self.limits.load_grace_s

    def rooms(self) -> Rooms:
        """Free bytes now, with every claim counted; what is promised to somebody outside is not free."""
        if self._rooms is None or self._rooms_version != self.version:
            self._rooms, self._rooms_version = self._count_rooms(), self.version
        return self._rooms.copy()

    def _count_rooms(self) -> Rooms:
        rooms = Rooms(self.usable, self.groups)
        for slot in self.slots.values():
            if slot.state in HOLDS_MEMORY:
                rooms.take(slot.shares)
                if slot.state in LEAVING and slot.yields_to is None:
                    rooms.expect(slot.shares)
            elif slot.coming:
                rooms.take(_kept_for(slot))
        for shares in self.promised.values():
            rooms.take(shares)
        return rooms

    def held_outside(self) -> dict[str, int]:
        """Bytes by device that other holders lease, or that are promised to them."""
        held = {device.id: device.leased_bytes for device in self.usable}
        leaving = [slot.shares for slot in self.slots.holders() if slot.yields_to is not None]
        for shares in (*leaving, *self.promised.values()):
            for device, size in shares.items():
                if device in held:
                    held[device] += size
        return held

    def priority_of(self, slot: SlotRecord) -> int:
        """The class the slot defends itself with now."""
        return slot.priority_at(self.now_s, self.limits.aging_s)

    def pace_s(self, places: int) -> float:
        """Seconds in which, at the measured pace of grants, that many places of the queue become free; 1 to 60."""
        return min(_PACE_LONGEST_S, max(1.0, places * self.between_grants_s))

    # -- a twin ---------------------------------------------------------------------------------------------------

    def copy(self) -> Self:
        """The same state, to be changed apart: what would be decided is decided there."""
        twin = type(self)(self.limits)
        for name in _SHARED:
            setattr(twin, name, getattr(self, name))
        twin.resting, twin.wakings = dict(self.resting), list(self.wakings)
        twin.slots, twin.line = self.slots.copy(), self.line.copy()
        twin.places, twin.habits = self.places.copy(), self.habits.copy()
        twin.breakers = deepcopy(self.breakers)
        twin.claims = {model_id: replace(claim) for model_id, claim in self.claims.items()}
        twin.demands = {by: replace(demand) for by, demand in self.demands.items()}
        twin.promised = {by: dict(shares) for by, shares in self.promised.items()}
        twin.running = {ticket_id: twin.slots[slot.id] for ticket_id, slot in self.running.items()}
        return twin


_SHARED = (
    *("now_s", "models", "devices", "usable", "groups", "largest_bytes", "host", "version", "shutting_down"),
    *("granted_at_s", "between_grants_s"),
)
"""What a twin may share: values."""


def _kept_for(slot: SlotRecord) -> Shares:
    """What a queued slot that others are told to make room for needs besides what they give."""
    option = max(slot.asked, key=lambda option: sum(slot.coming.get(device, 0) for device in option))
    return {device: max(0, size - slot.coming.get(device, 0)) for device, size in option.items()}
