"""What the scheduler knows, and the moves that change it; every move notes the action that makes it come true.

Written by `scheduler.py` (facts) and `plan.py` (decisions) and nobody else. Calls `queue.py`, `placement.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from gpuboss.priority import LEAST_IMPORTANT
from inference import actions
from inference.claim import Claim
from inference.demand import A_PERSON, Demand, Notice
from inference.errors import InferenceError
from inference.events import DeviceRoom, DevicesRead, Noticed, Shares, Ticket
from inference.model import Model
from inference.placement import Rooms, largest, usable
from inference.queue import Entry, QueueLimits, WaitingLine
from inference.slot_state import HAS_LIFE, HOLDS_MEMORY, LEAVING, SlotState
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
        self.demands: dict[str, Demand] = {}
        """Who waits outside for memory of slots that hold it or are leaving for them, by id."""
        self.promised: dict[str, dict[str, int]] = {}
        """By demand, the bytes that slots gave up for it and that it does not hold yet, by device."""
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
        """Free bytes now, with every claim counted; what is promised to somebody outside is not free."""
        rooms = Rooms(self.usable)
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
        leaving = [slot.shares for slot in self.holders() if slot.yields_to is not None]
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
        return min(_PACE_LONGEST_S, max(1.0, places * self._pace_s))

    def take_actions(self) -> list[actions.Action]:
        """What was decided since the last call, in order."""
        taken, self._actions = self._actions, []
        return taken

    # -- facts from outside ---------------------------------------------------------------------------------------

    def read_devices(self, read: DevicesRead) -> None:
        """New figures for the devices. Who waits outside no more holds what was promised, or gave it up."""
        if read.devices != self.devices:
            self.devices = read.devices
            self.usable = usable(read.devices)
            self.largest_bytes = largest(self.usable)
            self.version += 1
        for slot in self.slots.values():
            coming = read.coming.get(slot.model.id, {}) if slot.state is SlotState.QUEUED else {}
            if coming != slot.coming:
                slot.coming = coming
                self.version += 1
        over = {
            by for by, demand in self.demands.items() if by not in read.waiting and demand.since_s < read.asked_at_s
        }
        for by in over:
            self.version += self.promised.pop(by, None) is not None
        for slot in self.slots.values():
            if slot.yields_to in over:
                slot.yields_to = None
                self.version += 1
        self._forget_demands(over)

    # -- demands from outside -------------------------------------------------------------------------------------

    def notice(self, slot: SlotRecord, told: Noticed) -> None:
        """The slot is asked to yield."""
        priority = told.priority if told.by else A_PERSON
        demand = self.demands.get(told.by)
        if demand is None:
            demand = self.demands[told.by] = Demand(told.by, told.holder, priority, self.now_s)
        demand.priority = priority
        # Said of a lease that had another class a moment ago, it may be said because of that class.
        outranks = told.outranks and not slot.repriced
        before, slot.notice = slot.notice, Notice(told.by, told.deadline_s, outranks)
        if before is not None and before.by != told.by:
            self._forget_demands({before.by})

    def withdraw_notice(self, slot: SlotRecord) -> None:
        """The slot is not asked any more."""
        if slot.notice is not None:
            by, slot.notice = slot.notice.by, None
            self._forget_demands({by})

    def give_way(self, slot: SlotRecord, demand: Demand, reason: str) -> None:
        """Leave for the demand; the memory is promised to it."""
        if demand.by:
            slot.yields_to, slot.returns = demand.by, True
        else:
            slot.stays_out = True  # a person wants it gone: that it came back at once would not be their wish
        self.remove(slot, reason)
        self.acknowledge(slot)

    def acknowledge(self, slot: SlotRecord) -> None:
        """Say that the slot is yielding."""
        self._actions.append(actions.Acknowledge(slot.model.id))

    def _forget_demands(self, ids: set[str]) -> None:
        """Forget those of them that no slot has notice of or leaves for, and that nothing is promised to."""
        for slot in self.slots.values():
            ids = ids - {slot.yields_to, slot.notice.by if slot.notice is not None else None}
        for by in ids:
            if by not in self.promised:
                self.demands.pop(by, None)

    def know_models(self, models: Mapping[str, Model]) -> None:
        """Other models, or other facts about them. Slots that hold nothing for a model that is gone are forgotten."""
        self.models = dict(models)
        self.version += 1
        for model_id in [model_id for model_id in self.slots if model_id not in models]:
            if self.slots[model_id].state not in HAS_LIFE:
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

    def ask(self, model: Model, options: tuple[Shares, ...], priority: int) -> None:
        """Queue the model's lease in the ledger, for others hold the memory; asked again, other options."""
        slot = self._slot_of(model)
        slot.asked, slot.lease_priority = options, priority
        if slot.state is not SlotState.QUEUED:
            slot.model = model
            self._move(slot, SlotState.QUEUED)
        self._actions.append(actions.Ask(model.id, options, priority))

    def start(self, model: Model, options: tuple[Shares, ...], priority: int) -> None:
        """Load the model; of `options` the first counts as claimed until the lease says otherwise."""
        slot = self._slot_of(model)
        slot.model = model
        slot.shares, slot.leased = options[0], False
        self._load(slot, priority)
        queued = self.queued_for(slot)
        slot.lease_priority = min([priority, *(other.lease_priority for other in queued)])
        ahead_of = tuple(other.model.id for other in queued)
        self._actions.append(actions.Start(model.id, options, slot.lease_priority, ahead_of))

    def queued_for(self, slot: SlotRecord) -> list[SlotRecord]:
        """The slots that are queued for others' memory of the loading slot's devices."""
        return [
            other
            for other in self.slots.values()
            if other.state is SlotState.QUEUED and any(option.keys() & slot.shares.keys() for option in other.asked)
        ]

    def reprice_load(self, slot: SlotRecord, priority: int) -> None:
        """Give the lease of a load this class, or that of slots it must not wait behind (see `start`)."""
        self.reprice(slot, min([priority, *(other.lease_priority for other in self.queued_for(slot))]))

    def bring_back(self, model: Model, options: tuple[Shares, ...]) -> None:
        """Load a model that left for somebody outside, as if it had not: its class goes on falling, its time runs."""
        slot = self.slots[model.id]
        priority, idle_since_s, returns = slot.priority, slot.idle_since_s, slot.returns
        self.start(model, options, LEAST_IMPORTANT)
        slot.priority, slot.idle_since_s, slot.returns = priority, idle_since_s, returns

    def reprice(self, slot: SlotRecord, priority: int) -> None:
        """Give the slot's lease this class, if it has another."""
        if slot.lease_priority != priority:
            slot.lease_priority, slot.repriced = priority, True
            self._actions.append(actions.Reprice(slot.model.id, priority))

    def drain(self, slot: SlotRecord, reason: str, *, beneficiary: str | None = None) -> None:
        """Let no more tickets on the ready slot, and stop it as soon as none is in flight."""
        self._move(slot, SlotState.DRAINING)
        slot.beneficiary = beneficiary
        self._actions.append(actions.Drain(slot.model.id, reason))
        if not slot.in_flight:
            self.stop(slot, reason)

    def stop(self, slot: SlotRecord, reason: str, *, beneficiary: str | None = None) -> None:
        """End the slot's engine or load, with nothing in flight."""
        self._move(slot, SlotState.STOPPING)
        slot.beneficiary = beneficiary or slot.beneficiary
        self._actions.append(actions.Stop(slot.model.id, reason))

    def cut_short(self, slot: SlotRecord, reason: str, error: InferenceError) -> None:
        """End the slot's engine; what is in flight ends with this error. It was used until now."""
        self._move(slot, SlotState.STOPPING)
        slot.idle_since_s = slot.last_used_s = self.now_s
        slot.warm_until_s = max(slot.warm_until_s, self.now_s + slot.model.stay_warm_s)
        self._actions.append(actions.Stop(slot.model.id, reason, error))

    def remove(self, slot: SlotRecord, reason: str, *, beneficiary: str | None = None) -> None:
        """Get the slot out of memory, whatever it is doing; one that is leaving already just goes on."""
        if slot.state is SlotState.READY:
            self.drain(slot, reason, beneficiary=beneficiary)
        elif slot.state in (SlotState.LOADING, SlotState.QUEUED):
            self.stop(slot, reason, beneficiary=beneficiary)

    def lost(self, slot: SlotRecord) -> None:
        """The slot's lease is gone and it is being stopped without our order."""
        self._move(slot, SlotState.STOPPING)

    def leased(self, slot: SlotRecord, shares: Shares) -> None:
        """The slot has its memory, which may be another of the options than the first."""
        if slot.state is SlotState.QUEUED:
            self._load(slot, slot.lease_priority)
        slot.leased = True
        if shares != slot.shares:
            slot.shares = shares
            self.version += 1

    def ready(self, slot: SlotRecord, load_s: float) -> None:
        """The slot's engine answers."""
        self._move(slot, SlotState.READY)
        slot.leased = True
        slot.last_load_s = load_s
        slot.ready_at_s = self.now_s
        if slot.returns:  # nobody asked for it: what was left of its time has to do
            slot.returns = False
            return
        slot.idle_since_s = self.now_s
        slot.warm_until_s = self.now_s + slot.model.stay_warm_s

    def gone(self, slot: SlotRecord, state: SlotState) -> None:
        """The slot's memory is free again; tickets it still had in flight are answered by those who hold them."""
        if slot.yields_to is not None:
            promised = self.promised.setdefault(slot.yields_to, {})
            for device, size in slot.shares.items():
                promised[device] = promised.get(device, 0) + size
        self._move(slot, state)
        slot.shares, slot.leased, slot.beneficiary, slot.short_since_s = {}, False, None, None
        slot.repriced = False
        slot.yields_to, slot.asked, slot.coming = None, (), {}
        self.withdraw_notice(slot)
        for ticket_id in slot.in_flight:
            del self.running[ticket_id]
        slot.in_flight.clear()
        if slot.model.id not in self.models:
            del self.slots[slot.model.id]

    def _slot_of(self, model: Model) -> SlotRecord:
        slot = self.slots.get(model.id)
        if slot is None:
            slot = self.slots[model.id] = SlotRecord(model)
        return slot

    def _load(self, slot: SlotRecord, priority: int) -> None:
        slot.short_since_s, slot.asked, slot.coming, slot.returns = None, (), {}, False
        slot.priority, slot.idle_since_s, slot.taken = priority, self.now_s, 0
        slot.lease_priority = priority
        self._move(slot, SlotState.LOADING)
        self.claims.pop(slot.model.id, None)

    def _move(self, slot: SlotRecord, state: SlotState) -> None:
        slot.state = state
        self.version += 1


def _kept_for(slot: SlotRecord) -> Shares:
    """What a queued slot that others are told to make room for needs besides what they give."""
    option = max(slot.asked, key=lambda option: sum(slot.coming.get(device, 0) for device in option))
    return {device: max(0, size - slot.coming.get(device, 0)) for device, size in option.items()}
