"""What the peers' policies have in common: their slots, their queue, and the moves of both. `peers.py` decides.

A peer's policy takes the same events as our scheduler and answers with the same actions. It knows no classes and no
bounds of overtaking; one slot per model. That callers give up, that the queue has a length and waiting an end, and that
a pinned model stays, holds for all alike, or nothing could be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from inference import actions, errors, events
from inference.events import DeviceRoom, Shares, Ticket
from inference.model import Model
from inference.placement import Rooms, groups_of, largest, usable
from inference.queue import QueueLimits
from inference.slot_state import HOLDS_MEMORY, LEAVING, SlotState

__all__ = ["Peer", "PeerSlot"]


@dataclass(slots=True, eq=False)
class PeerSlot:
    """One model's place."""

    model: Model
    state: SlotState = SlotState.IDLE
    shares: Shares = field(default_factory=dict)
    in_flight: dict[str, Ticket] = field(default_factory=dict)
    assigned: dict[str, Ticket] = field(default_factory=dict)
    """Tickets that wait for a place of this very slot, next first."""
    used_s: float = -math.inf
    """When it last took or finished a ticket."""
    keep_alive_s: float = 0.0
    """How long it stays after its last request, as that wished."""
    expiring: bool = False
    """To go as soon as it is idle."""

    @property
    def idle(self) -> bool:
        """Loaded, and nothing to do."""
        return self.state is SlotState.READY and not self.in_flight and not self.assigned

    @property
    def expires_s(self) -> float:
        """When its time is over if it stays idle."""
        return self.used_s + self.keep_alive_s


class Peer:
    """A policy; subclasses say in `plan` what is to be done now."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.now_s = 0.0
        self.slots: dict[str, PeerSlot] = {}
        """The slots that are not IDLE, by model."""
        self.line: dict[str, Ticket] = {}
        """Who waits and is not assigned to a slot, next first."""
        self.models: Mapping[str, Model] = {}
        self.devices: tuple[DeviceRoom, ...] = ()
        """Those that models may be put on."""
        self._groups: tuple[tuple[str, ...], ...] = ()
        self._free: Rooms | None = None
        self._where: dict[str, PeerSlot] = {}
        """The slot of every ticket that is assigned or in flight."""
        self._assigned = 0
        self._decided: list[actions.Action] = []

    # -- as the world sees it -----------------------------------------------------------------------------------------

    @property
    def waiting_count(self) -> int:
        """Tickets in the queue."""
        return len(self.line) + self._assigned

    def handle(self, event: events.Event) -> list[actions.Action]:
        """Take note of the event and say what is to be done now."""
        self.now_s = event.at_s
        self._note(event)
        self.plan()
        decided, self._decided = self._decided, []
        return decided

    def plan(self) -> None:
        """Decide, by the moves below."""
        raise NotImplementedError

    # -- facts --------------------------------------------------------------------------------------------------------

    def _note(self, event: events.Event) -> None:
        match event:
            case events.Arrived():
                self._arrived(event.ticket)
            case events.Abandoned():
                self._forget(event.ticket_id)
            case events.Served():
                self._served(event.ticket_id)
            case events.LeaseGranted():
                self.slots[event.slot_id].shares = event.shares
                self._free = None
            case events.SlotReady():
                slot = self.slots[event.slot_id]
                slot.state, slot.used_s = SlotState.READY, self.now_s
                self._serve(slot)
            case events.SlotGone():
                self.slots.pop(event.slot_id, None)
                self._free = None
            case events.DevicesRead():
                self.devices = usable(event.devices)
                self._groups = groups_of(self.devices)
                self._free = None
            case events.ModelsChanged():
                self.models = dict(event.models)
            case events.Tick():
                self._expire()
            case _:
                pass

    def _arrived(self, ticket: Ticket) -> None:
        model = self.models.get(ticket.model_id)
        if model is None:
            self.refuse(ticket, errors.ModelNotFound(f"model '{ticket.model_id}' is not known"))
        elif model.claim_bytes > largest(self.devices):
            self.refuse(ticket, errors.WillNeverFit(f"model '{model.id}' is larger than the devices are"))
        elif self.waiting_count >= self.limits.max_waiting and not self._free_place(ticket):
            self.refuse(ticket, errors.QueueFull(f"{self.waiting_count} requests are waiting"))
        else:
            self.line[ticket.id] = ticket

    def _free_place(self, ticket: Ticket) -> bool:
        slot = self.slots.get(ticket.model_id)
        return not self.line and slot is not None and self.has_place(slot)

    def _served(self, ticket_id: str) -> None:
        slot = self._where.pop(ticket_id, None)
        if slot is None:
            return
        ticket = slot.in_flight.pop(ticket_id)
        slot.used_s = self.now_s
        slot.keep_alive_s = slot.model.stay_warm_s if ticket.stay_warm_s is None else ticket.stay_warm_s
        self._serve(slot)

    def _forget(self, ticket_id: str) -> Ticket | None:
        """It waits no more."""
        slot = self._where.get(ticket_id)
        if slot is not None and ticket_id in slot.assigned:
            self._assigned -= 1
            del self._where[ticket_id]
            return slot.assigned.pop(ticket_id)
        return self.line.pop(ticket_id, None)

    def _expire(self) -> None:
        """Waiting ends for those who waited too long, and staying warm for slots."""
        for ticket in [*self._late(self.line.values()), *self._late_assigned()]:
            self._forget(ticket.id)
            self.refuse(ticket, errors.QueueTimeout(f"waited {self.limits.max_wait_s:g} s"))
        for slot in list(self.slots.values()):
            if slot.idle and not slot.model.pin and slot.expires_s <= self.now_s and self.expires_by_itself(slot):
                self.evict(slot, "has been idle for as long as it was to stay warm")

    def _late(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        late: list[Ticket] = []
        for ticket in tickets:  # oldest first
            if self.now_s - ticket.submitted_at_s < self.limits.max_wait_s:
                break
            late.append(ticket)
        return late

    def _late_assigned(self) -> Iterator[Ticket]:
        if self._assigned:
            for slot in self.slots.values():
                yield from self._late(slot.assigned.values())

    # -- what subclasses may differ in --------------------------------------------------------------------------------

    def expires_by_itself(self, slot: PeerSlot) -> bool:  # noqa: ARG002 - some tell slots apart
        """Does an idle slot leave when its time is over, though nobody wants the room?"""
        return True

    # -- looking ------------------------------------------------------------------------------------------------------

    def has_place(self, slot: PeerSlot) -> bool:
        """Can it take one more ticket now?"""
        return slot.state is SlotState.READY and not slot.expiring and len(slot.in_flight) < slot.model.parallel

    def idle_slots(self) -> list[PeerSlot]:
        """Those that could go at once."""
        return [slot for slot in self.slots.values() if slot.idle and not slot.model.pin]

    def rooms(self) -> Rooms:
        """Free bytes now; what is leaving counts as on its way back."""
        if self._free is None:
            self._free = rooms = Rooms(self.devices, self._groups)
            for slot in self.slots.values():
                if slot.state in HOLDS_MEMORY:
                    rooms.take(slot.shares)
                    if slot.state in LEAVING:
                        rooms.expect(slot.shares)
        return self._free

    # -- moves --------------------------------------------------------------------------------------------------------

    def refuse(self, ticket: Ticket, error: errors.InferenceError) -> None:
        """Send a ticket away that is not in line, or not any more."""
        self._decided.append(actions.Refuse(ticket.id, error))

    def assign(self, ticket: Ticket, slot: PeerSlot) -> None:
        """From the line to the slot's own, and in if there is a place."""
        del self.line[ticket.id]
        slot.assigned[ticket.id] = ticket
        self._where[ticket.id] = slot
        self._assigned += 1
        self._serve(slot)

    def _serve(self, slot: PeerSlot) -> None:
        """Let in whom the slot has places for, of those assigned to it."""
        while slot.assigned and slot.state is SlotState.READY and len(slot.in_flight) < slot.model.parallel:
            ticket = next(iter(slot.assigned.values()))
            del slot.assigned[ticket.id]
            self._assigned -= 1
            slot.in_flight[ticket.id] = ticket
            slot.used_s = self.now_s
            self._decided.append(actions.Grant(ticket.id, slot.model.id))

    def load(self, model: Model, candidates: Iterable[PeerSlot] = (), *, at_least: int = 0) -> bool:
        """Start the model; where there is no room, send candidates away, in their order, as few as will do.

        `at_least` so many go in any case. If they do not suffice, nobody goes, and it is False.
        """
        rooms, gone = self.rooms(), []
        ways = rooms.place(model.claim_bytes) if not at_least else ()
        for candidate in () if ways else candidates:
            rooms.expect(candidate.shares)
            gone.append(candidate)
            ways = rooms.place(model.claim_bytes) if len(gone) >= at_least else ()
            if ways:
                break
        if gone:
            self._free = None
        if not ways:
            return False
        self._free = None
        needed = [one for index, one in enumerate(gone) if index < at_least or one.shares.keys() & ways[0].keys()]
        slot = PeerSlot(model, SlotState.LOADING, ways[0], keep_alive_s=model.stay_warm_s)
        self.slots[model.id] = slot
        self._decided.append(actions.Start(model.id, model.id, ways[:1], 0))
        for victim in needed:
            self.evict(victim, f"makes room for '{model.id}'")
        return True

    def evict(self, slot: PeerSlot, reason: str) -> None:
        """Send an idle slot away."""
        slot.state = SlotState.STOPPING
        self._free = None
        self._decided.append(actions.Drain(slot.model.id, reason))
        self._decided.append(actions.Stop(slot.model.id, reason))
