"""What the scheduler knows, and the moves that change it; every move notes the action that makes it come true.

Written by `scheduler.py` (facts) and `plan.py` (decisions) and nobody else. Calls `queue.py`, `placement.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from inference import actions
from inference.claim import Claim
from inference.errors import InferenceError
from inference.events import DeviceRoom, Shares, Ticket
from inference.model import Model
from inference.placement import Rooms, largest, usable
from inference.queue import Entry, QueueLimits, WaitingLine
from inference.slot_state import HOLDS_MEMORY, LEAVING, SlotState
from inference.slot_view import SlotRecord

_PACE_UNKNOWN_S = 5.0
"""Assumed between two grants before any was measured."""
_PACE_LONGEST_S = 60.0


class Board:
    """The whole state of the scheduler."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.now_s = -math.inf
        """The latest moment any event told."""
        self.models: Mapping[str, Model] = {}
        self.devices: tuple[DeviceRoom, ...] = ()
        self.usable: tuple[DeviceRoom, ...] = ()
        """Those of them that models may be put on."""
        self.largest_bytes = 0
        """The largest model they could hold when empty."""
        self.slots: dict[str, SlotRecord] = {}
        """Every slot that is or was loaded, by model id."""
        self.line = WaitingLine(limits.aging_s)
        self.claims: dict[str, Claim] = {}
        """The claims of models that wait for room, by model id."""
        self.running: dict[str, SlotRecord] = {}
        """The slot of every ticket in flight."""
        self.version = 0
        """Grows whenever it changes who holds how much of what."""
        self.shutting_down = False
        self._actions: list[actions.Action] = []
        self._granted_at_s: float | None = None
        self._pace_s = _PACE_UNKNOWN_S

    # -- looking ------------------------------------------------------------------------------------------------

    def holders(self) -> Iterator[SlotRecord]:
        """The slots whose claims count."""
        return (slot for slot in self.slots.values() if slot.state in HOLDS_MEMORY)

    def rooms(self) -> Rooms:
        """Free bytes now, with every claim counted."""
        rooms = Rooms(self.usable)
        for slot in self.slots.values():
            if slot.state in HOLDS_MEMORY:
                rooms.take(slot.shares)
                if slot.state in LEAVING:
                    rooms.expect(slot.shares)
        return rooms

    def priority_of(self, slot: SlotRecord) -> int:
        """The class the slot defends itself with now."""
        return slot.priority_at(self.now_s, self.limits.aging_s)

    def pace_s(self, places: int) -> float:
        """Seconds in which, at the measured pace of grants, that many places of the queue become free; 1 to 60."""
        return min(_PACE_LONGEST_S, max(1.0, places * self._pace_s))

    def take_actions(self) -> list[actions.Action]:
        """What was decided since the last call, in order."""
        taken, self._actions = self._actions, []
        return taken

    # -- facts from outside ---------------------------------------------------------------------------------------

    def read_devices(self, devices: tuple[DeviceRoom, ...]) -> None:
        """New figures for the devices."""
        if devices != self.devices:
            self.devices = devices
            self.usable = usable(devices)
            self.largest_bytes = largest(self.usable)
            self.version += 1

    def know_models(self, models: Mapping[str, Model]) -> None:
        """Other models, or other facts about them. Slots that hold nothing for a model that is gone are forgotten."""
        self.models = dict(models)
        self.version += 1
        for model_id in [model_id for model_id in self.slots if model_id not in models]:
            if self.slots[model_id].state not in HOLDS_MEMORY:
                del self.slots[model_id]

    # -- moves of tickets -----------------------------------------------------------------------------------------

    def grant(self, slot: SlotRecord, entry: Entry) -> None:
        """Let the ticket use the ready slot."""
        ticket_id = entry.ticket.id
        self.line.granted(ticket_id, self.now_s)
        slot.in_flight[ticket_id] = entry
        slot.taken += 1
        self.running[ticket_id] = slot
        if self._granted_at_s is not None:
            self._pace_s += 0.1 * (self.now_s - self._granted_at_s - self._pace_s)
        self._granted_at_s = self.now_s
        self._actions.append(actions.Grant(ticket_id, slot.model.id))

    def refuse(self, entry: Entry, error: InferenceError) -> None:
        """Send a waiting ticket away."""
        self.withdraw(entry.ticket.id)
        self._actions.append(actions.Refuse(entry.ticket.id, error))

    def turn_away(self, ticket: Ticket, error: InferenceError) -> None:
        """Send a ticket away that never joined the line."""
        self._actions.append(actions.Refuse(ticket.id, error))

    def withdraw(self, ticket_id: str) -> None:
        """Take the ticket out of line, if it is there; a claim nobody is left to make ends."""
        entry = self.line.remove(ticket_id)
        if entry is not None and not self.line.wants(entry.ticket.model_id):
            self.claims.pop(entry.ticket.model_id, None)

    # -- moves of slots -------------------------------------------------------------------------------------------

    def start(self, model: Model, options: tuple[Shares, ...], priority: int) -> None:
        """Load the model; of `options` the first counts as claimed until the lease says otherwise."""
        slot = self.slots.get(model.id)
        if slot is None:
            slot = self.slots[model.id] = SlotRecord(model)
        slot.model = model
        slot.shares, slot.leased, slot.short_since_s = options[0], False, None
        slot.priority, slot.idle_since_s, slot.taken = priority, self.now_s, 0
        self._move(slot, SlotState.LOADING)
        self.claims.pop(model.id, None)
        self._actions.append(actions.Start(model.id, options, priority))

    def drain(self, slot: SlotRecord, reason: str, *, beneficiary: str | None = None) -> None:
        """Let no more tickets on the ready slot, and stop it as soon as none is in flight."""
        self._move(slot, SlotState.DRAINING)
        slot.beneficiary = beneficiary
        self._actions.append(actions.Drain(slot.model.id, reason))
        if not slot.in_flight:
            self.stop(slot, reason)

    def stop(self, slot: SlotRecord, reason: str, *, beneficiary: str | None = None) -> None:
        """End the slot's engine or load."""
        self._move(slot, SlotState.STOPPING)
        slot.beneficiary = beneficiary or slot.beneficiary
        self._actions.append(actions.Stop(slot.model.id, reason))

    def remove(self, slot: SlotRecord, reason: str, *, beneficiary: str | None = None) -> None:
        """Get the slot out of memory, whatever it is doing; one that is leaving already just goes on."""
        if slot.state is SlotState.READY:
            self.drain(slot, reason, beneficiary=beneficiary)
        elif slot.state is SlotState.LOADING:
            self.stop(slot, reason, beneficiary=beneficiary)

    def lost(self, slot: SlotRecord) -> None:
        """The slot's lease is gone and it is being stopped without our order."""
        self._move(slot, SlotState.STOPPING)

    def leased(self, slot: SlotRecord, shares: Shares) -> None:
        """The slot has its memory, which may be another of the options than the first."""
        slot.leased = True
        if shares != slot.shares:
            slot.shares = shares
            self.version += 1

    def ready(self, slot: SlotRecord, load_s: float) -> None:
        """The slot's engine answers."""
        self._move(slot, SlotState.READY)
        slot.leased = True
        slot.last_load_s = load_s
        slot.ready_at_s = slot.idle_since_s = self.now_s
        slot.warm_until_s = self.now_s + slot.model.stay_warm_s

    def gone(self, slot: SlotRecord, state: SlotState) -> None:
        """The slot's memory is free again; tickets it still had in flight are answered by those who hold them."""
        self._move(slot, state)
        slot.shares, slot.leased, slot.beneficiary, slot.short_since_s = {}, False, None, None
        for ticket_id in slot.in_flight:
            del self.running[ticket_id]
        slot.in_flight.clear()
        if slot.model.id not in self.models:
            del self.slots[slot.model.id]

    def _move(self, slot: SlotRecord, state: SlotState) -> None:
        slot.state = state
        self.version += 1
