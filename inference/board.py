"""The moves that change what the scheduler knows; every move notes the action that makes it come true.

Made by `scheduler.py` (facts) and `plan.py` (decisions) and nobody else. The state is in `state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from heapq import heappop, heappush

from gpuboss.priority import LEAST_IMPORTANT, OVER_PINNED
from inference import actions
from inference.claim import Claim
from inference.demand import Demand, Notice
from inference.errors import InferenceError
from inference.events import DevicesRead, Noticed, Shares, SlotAdopted, Ticket
from inference.model import Model
from inference.placement import groups_of, largest, usable
from inference.places import Place
from inference.queue import Entry, QueueLimits
from inference.slot_state import HAS_LIFE, SlotState
from inference.slot_view import SlotRecord
from inference.state import State


class Board(State):
    """The state of a scheduler, to be written by it."""

    def __init__(self, limits: QueueLimits) -> None:
        super().__init__(limits)
        self._actions: list[actions.Action] = []

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
            self.groups, self.largest_bytes = groups_of(self.usable), largest(self.usable)
            hosts = [device for device in read.devices if not device.accelerator and device not in self.usable]
            self.host = hosts[0] if hosts else None
            self.version += 1
        for slot in self.slots.values():
            coming = read.coming.get(slot.id, {}) if slot.state is SlotState.QUEUED else {}
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
        priority = told.priority if told.by else OVER_PINNED
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
        self._actions.append(actions.Acknowledge(slot.id))

    def _forget_demands(self, ids: set[str]) -> None:
        """Forget those of them that no slot has notice of or leaves for, and that nothing is promised to."""
        for slot in self.slots.values():
            ids = ids - {slot.yields_to, slot.notice.by if slot.notice is not None else None}
        for by in ids:
            if by not in self.promised:
                self.demands.pop(by, None)

    def know_models(self, models: Mapping[str, Model]) -> None:
        """Other models, or other facts about them. Slots that hold nothing for a model that is gone are forgotten."""
        before, self.models = self.models, dict(models)
        self.version += 1
        for model_id in before:
            if model_id not in models:
                self.habits.forget(model_id)
            if model_id not in models or models[model_id].is_other_than(before[model_id]):
                self.breakers.pop(model_id, None)  # what was wrong with it may have been mended
        for slot in [slot for slot in self.slots.values() if slot.model.id not in models]:
            if slot.state not in HAS_LIFE:
                self.slots.forget(slot)

    # -- moves of tickets -----------------------------------------------------------------------------------------

    def line_up(self, ticket: Ticket) -> None:
        """Put a ticket in line: at the place that was kept for its client, if there is one."""
        place = self.places.take(ticket, self.now_s)
        entry = self.line.add(ticket, place.submitted_at_s if place is not None else None)
        if place is not None and place.since_s is not None and ticket.model_id not in self.claims:
            self.claims[ticket.model_id] = Claim(
                ticket.model_id, entry, ticket.id, overtakes=place.overtakes, since_s=place.since_s
            )

    def grant(self, slot: SlotRecord, entry: Entry) -> None:
        """Let the ticket use the ready slot."""
        ticket_id = entry.ticket.id
        self.line.granted(ticket_id, self.now_s)
        slot.in_flight[ticket_id], slot.granted_at_s[ticket_id] = entry, self.now_s
        slot.taken += 1
        if entry.ticket.session_id is not None:
            for other in self.slots.of(slot.model.id):
                other.sessions.pop(entry.ticket.session_id, None)
            slot.remember_session(entry.ticket.session_id)
        self.running[ticket_id] = slot
        if self.granted_at_s is not None:
            self.between_grants_s += 0.1 * (self.now_s - self.granted_at_s - self.between_grants_s)
        self.granted_at_s = self.now_s
        self._actions.append(actions.Grant(ticket_id, slot.id))

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
        if entry is None:
            return
        self._perhaps_unwanted(entry.ticket.model_id)

    def _perhaps_unwanted(self, model_id: str) -> None:
        """One ticket fewer waits for the model."""
        if not self.line.wants(model_id):
            self.claims.pop(model_id, None)
            for slot in self.slots.of(model_id):
                if slot.state is SlotState.LOADING:
                    slot.unwanted_since_s = self.now_s

    def end_claims(self) -> None:
        """Those of models that are ready, or not known, or that nobody waits for who may have a turn."""
        for model_id in list(self.claims):
            ready = any(slot.state is SlotState.READY for slot in self.slots.of(model_id))
            if ready or model_id not in self.models or not self.line.wants(model_id):
                del self.claims[model_id]

    def keep_place(self, ticket_id: str) -> None:
        """The waiting ticket is about to leave unserved: its client may be back."""
        entry = self.line.entry(ticket_id)
        if entry is None or self.limits.keep_place_s <= 0:
            return
        # Whoever comes back again and again without having been served is not waiting, but keeping a place.
        oldest_s = 2 * self.limits.max_wait_s + self.limits.keep_place_s
        if self.now_s - entry.submitted_at_s > oldest_s:
            return
        place = Place(entry.submitted_at_s, self.now_s + self.limits.keep_place_s)
        claim = self.claims.get(entry.ticket.model_id)
        if claim is not None and claim.leader.ticket.id == ticket_id:
            place = replace(place, overtakes=claim.overtakes, since_s=claim.since_s)
        self.places.keep(entry.ticket, place)

    def rest(self, client_id: str, cooldown_s: float) -> None:
        """Nothing of the client has its turn for so long."""
        until_s = max(self.now_s + cooldown_s, self.resting.get(client_id, -math.inf))
        self.resting[client_id] = until_s
        heappush(self.wakings, (until_s, client_id))
        for model_id in self.line.rest(client_id):
            self._perhaps_unwanted(model_id)

    def wake_the_rested(self) -> None:
        """Whoever has rested long enough has its turns again."""
        while self.wakings and self.wakings[0][0] <= self.now_s:
            _, client_id = heappop(self.wakings)
            if self.resting.get(client_id, math.inf) <= self.now_s:  # it did not rest once more meanwhile
                del self.resting[client_id]
                self.line.wake(client_id)

    # -- moves of slots -------------------------------------------------------------------------------------------

    def ask(self, model: Model, options: tuple[Shares, ...], priority: int) -> None:
        """Queue a lease for the model in the ledger, for others hold the memory; asked again, other options."""
        slot = self.slots.for_load(model)
        slot.asked, slot.lease_priority = options, priority
        if slot.state is not SlotState.QUEUED:
            slot.model = model
            self._move(slot, SlotState.QUEUED)
        self._actions.append(actions.Ask(slot.id, model.id, self._with_host(model, options), priority))

    def start(self, model: Model, options: tuple[Shares, ...], priority: int) -> None:
        """Load the model; of `options` the first counts as claimed until the lease says otherwise."""
        self._start(self.slots.for_load(model), model, options, priority)

    def _start(self, slot: SlotRecord, model: Model, options: tuple[Shares, ...], priority: int) -> None:
        slot.model = model
        wanted = self._with_host(model, options)
        slot.shares, slot.leased = wanted[0], False
        self._load(slot, priority)
        queued = self.queued_for(slot)
        slot.lease_priority = min([priority, *(other.lease_priority for other in queued)])
        ahead_of = tuple(other.id for other in queued)
        self._actions.append(actions.Start(slot.id, model.id, wanted, slot.lease_priority, ahead_of))

    def queued_for(self, slot: SlotRecord) -> list[SlotRecord]:
        """The slots that are queued for others' memory of the loading slot's devices."""
        return [
            other
            for other in self.slots.queued.values()
            if any(option.keys() & slot.shares.keys() for option in other.asked)
        ]

    def reprice_load(self, slot: SlotRecord, priority: int) -> None:
        """Give the lease of a load this class, or that of slots it must not wait behind (see `start`)."""
        self.reprice(slot, min([priority, *(other.lease_priority for other in self.queued_for(slot))]))

    def bring_back(self, slot: SlotRecord, options: tuple[Shares, ...]) -> None:
        """Load a slot that left for somebody outside, as if it had not: its class goes on falling, its time runs."""
        priority, idle_since_s, returns = slot.priority, slot.idle_since_s, slot.returns
        self._start(slot, self.models[slot.model.id], options, LEAST_IMPORTANT)
        slot.priority, slot.idle_since_s, slot.returns = priority, idle_since_s, returns

    def adopt(self, event: SlotAdopted) -> None:
        """The slot is ready, as an earlier broker left it; one that never was made is made."""
        model = self.models[event.model_id]
        slot = self.slots.get(event.slot_id) or self.slots.new(event.slot_id, model)
        slot.model, slot.shares, slot.leased, slot.last_load_s = model, event.shares, True, event.load_s
        slot.priority, slot.taken, slot.ready_at_s = event.priority, 0, self.now_s
        slot.idle_since_s = slot.last_used_s = self.now_s
        slot.stay_warm(self.now_s)
        slot.lease_priority, slot.repriced = event.priority, True
        self._move(slot, SlotState.READY)

    def reprice(self, slot: SlotRecord, priority: int) -> None:
        """Give the slot's lease this class, if it has another."""
        if slot.lease_priority != priority:
            slot.lease_priority, slot.repriced = priority, True
            self._actions.append(actions.Reprice(slot.id, priority))

    def drain(self, slot: SlotRecord, reason: str, *, beneficiary: str | None = None) -> None:
        """Let no more tickets on the ready slot, and stop it as soon as none is in flight."""
        self._move(slot, SlotState.DRAINING)
        slot.beneficiary = beneficiary
        self._actions.append(actions.Drain(slot.id, reason))
        if not slot.in_flight:
            self.stop(slot, reason)

    def stop(self, slot: SlotRecord, reason: str, *, beneficiary: str | None = None) -> None:
        """End the slot's engine or load, with nothing in flight."""
        self._move(slot, SlotState.STOPPING)
        slot.beneficiary = beneficiary or slot.beneficiary
        self._actions.append(actions.Stop(slot.id, reason))

    def cut_short(self, slot: SlotRecord, reason: str, error: InferenceError) -> None:
        """End the slot's engine; what is in flight ends with this error. It was used until now."""
        self._move(slot, SlotState.STOPPING)
        slot.idle_since_s = slot.last_used_s = self.now_s
        slot.stay_warm(self.now_s)
        self._actions.append(actions.Stop(slot.id, reason, error))

    def remove(self, slot: SlotRecord, reason: str, *, beneficiary: str | None = None) -> None:
        """Get the slot out of memory, whatever it is doing; one that is leaving already just goes on."""
        if slot.state is SlotState.READY:
            self.drain(slot, reason, beneficiary=beneficiary)
        elif slot.state in (SlotState.LOADING, SlotState.QUEUED):
            self.stop(slot, reason, beneficiary=beneficiary)

    def lost(self, slot: SlotRecord) -> None:
        """The slot's lease is gone and it is being stopped without our order."""
        self._move(slot, SlotState.STOPPING)

    def wedged(self, slot: SlotRecord) -> None:
        """Nothing ends the slot's processes. What it was leaving for does not get its memory."""
        slot.yields_to = slot.beneficiary = None
        self._move(slot, SlotState.WEDGED)

    def leased(self, slot: SlotRecord, shares: Shares) -> None:
        """The slot has its memory, which may be another of the options than the first."""
        if slot.state is SlotState.QUEUED:
            self._load(slot, slot.lease_priority)
        slot.leased, slot.moved_at_s = True, self.now_s
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
        slot.wished_until_s = -math.inf
        slot.stay_warm(self.now_s)

    def gone(self, slot: SlotRecord, state: SlotState) -> None:
        """The slot's memory is free again; tickets it still had in flight are answered by those who hold them."""
        if slot.yields_to is not None:
            promised = self.promised.setdefault(slot.yields_to, {})
            for device, size in slot.shares.items():
                promised[device] = promised.get(device, 0) + size
        self._move(slot, state)
        slot.shares, slot.leased, slot.beneficiary, slot.short_since_s = {}, False, None, None
        slot.repriced, slot.unwanted_since_s = False, None
        slot.yields_to, slot.asked, slot.coming = None, (), {}
        slot.sessions.clear()
        self.withdraw_notice(slot)
        for ticket_id in slot.in_flight:
            del self.running[ticket_id]
        slot.in_flight.clear()
        slot.granted_at_s.clear()
        if slot.model.id not in self.models:
            self.slots.forget(slot)

    def _with_host(self, model: Model, options: tuple[Shares, ...]) -> tuple[Shares, ...]:
        """The options with what the model keeps in host memory beside the accelerators."""
        host_bytes = self.host_bytes_of(model.id)
        if not host_bytes or self.host is None:
            return options
        return tuple({**option, self.host.id: host_bytes} for option in options)

    def _load(self, slot: SlotRecord, priority: int) -> None:
        slot.short_since_s, slot.asked, slot.coming, slot.returns = None, (), {}, False
        slot.priority, slot.idle_since_s, slot.taken = priority, self.now_s, 0
        slot.lease_priority = priority
        slot.unwanted_since_s = None
        self._move(slot, SlotState.LOADING)
        self.claims.pop(slot.model.id, None)

    def _move(self, slot: SlotRecord, state: SlotState) -> None:
        self.slots.move(slot, state, self.now_s)
        self.version += 1
