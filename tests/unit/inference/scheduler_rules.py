"""What must hold of the scheduler's decisions, checked against the truth of a world (`scheduler_world.py`).

1. Every ticket is granted or refused exactly once, or leaves by itself; only ready slots are granted, up to `parallel`.
2. Orders fit the slot: Start when nothing is held, Drain when ready, Stop when loading, ready or draining.
3. What is started has room once everything that leaves is gone; nothing is promised twice.
4. Nobody pinned is evicted; a loading slot only if nobody waits for it; an idle one only for the same or a more
   important class; a busy one only for a strictly more important class.
5. An eviction comes after the start it is for, and that start needs all of its victims.
6. Planning again without an event decides nothing.
7. Once the world is quiet, everybody gets an answer, and refusals for want of room are true.
8. A slot yields to a notice from outside when it is idle, to the same or a more important class; when it is busy, to a
   more important class (or one that let it pass), and what it does is cut short only when the grace is over. And then
   it does yield. A load yields when nobody more important wants it. Pinned ones do not. What is given up is promised to
   who waits for it.
9. Who waits outside is overtaken on the slots that have notice as often and as long as a ticket may be.
10. What loads without a request is pinned, to preload, or yielded to somebody outside before; nobody goes for it.

Ageing, fading and fitting are written down here a second time, naively: a mistake must be made twice to pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from inference import actions, errors, events
from inference.events import DeviceRoom, Purpose, Shares, Ticket
from inference.model import Category, Model
from inference.placement import MARGIN_BYTES, Groups
from inference.plan import Plan
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from inference.slot_state import SlotState

GIB = 1 << 30
CLASSES = (1, 5, 10, 20, 50, 1000)
HELD = {SlotState.LOADING, SlotState.READY, SlotState.DRAINING, SlotState.STOPPING}
GOING = {SlotState.DRAINING, SlotState.STOPPING}


class Broken(AssertionError):
    """An invariant does not hold."""


def a_model(name: str, gib: float, **more: object) -> Model:
    values: dict[str, object] = {
        "id": name,
        "category": Category.LLM,
        "backend": "llama-server",
        "path": Path(f"/models/{name}.gguf"),
        "claim_bytes": int(gib * GIB),
        "claim_basis": f"vram: {gib}GiB in the manifest",
        "file_bytes": int(gib * GIB),
        "context": 2048,
    }
    return Model(**(values | more))  # type: ignore[arg-type]


def a_device(name: str, gib: float, *, others: float = 0, leased: float = 0, accelerator: bool = True) -> DeviceRoom:
    """Of `gib` GiB, `others` are in use; `leased` of them are other holders' leases."""
    return DeviceRoom(name, int((gib + 1) * GIB), GIB, int(others * GIB), accelerator, int(leased * GIB))


def one_node(rooms: Iterable[str]) -> Groups:
    """All these devices are accelerators of one node."""
    devices = tuple(rooms)
    return (devices,) if len(devices) > 1 else ()


@dataclass(frozen=True)
class Notice:
    """What the ledger told a slot, or is about to."""

    by: str
    priority: int
    deadline: float
    given_at: float
    outranks: bool
    told_at: float = math.inf


@dataclass
class Slot:
    """The truth about one slot."""

    state: SlotState = SlotState.IDLE
    model: Model | None = None
    options: tuple[Shares, ...] = ()
    shares: Shares = field(default_factory=dict)
    leased: bool = False
    heard: bool = False
    """Does the scheduler know which shares it was granted? Before that, it counts with the first option."""
    priority: int = 0
    life: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    """Ticket id to class at grant."""
    last_class: int = 1000
    idle_since: float = 0.0
    taken: int = 0
    """Grants of the present life."""
    lease_class: int = 1000
    passed: set[str] = field(default_factory=set)
    """Jobs that were there before it, and let it pass."""
    notice: Notice | None = None
    withdrawn_at: float = -math.inf
    """When its last notice was withdrawn; the scheduler hears of it a moment later."""
    acknowledged: bool = False
    yields_to: str | None = None
    """The job its memory is promised to while it leaves."""
    came_away: bool = False
    """It left for a job and was not loaded since."""
    ready_at: float = -math.inf
    load_s: float = 0.0
    unwanted_since: float = -math.inf
    """While it loads and nobody waits for its model: since when, if somebody had."""


class Rules:
    """The checks. A world holds the truth they are made against."""

    now: float
    limits: QueueLimits
    scheduler: Scheduler
    devices: list[DeviceRoom]
    models: dict[str, Model]
    slots: dict[str, Slot]
    unanswered: dict[str, Ticket]
    """Who waits, by ticket id, oldest first."""
    class_served: dict[int, float]
    """By class, when its oldest ticket was last granted."""
    granted_at: list[float]
    """The moments of all grants."""
    promised: dict[str, list[Shares]]
    """By job that waits, what slots that are gone gave up for it."""
    demand_told: dict[str, float]
    """By job, when the scheduler was first told of it."""

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            raise Broken(f"at {self.now:.2f}: {what}")

    # -- the rules, naively -----------------------------------------------------------------------------------------

    def waiting_for(self, model_id: str) -> list[Ticket]:
        return [ticket for ticket in self.unanswered.values() if ticket.model_id == model_id]

    def oldest(self, priority: int) -> Ticket:
        return next(ticket for ticket in self.unanswered.values() if ticket.priority == priority)

    def class_of(self, ticket: Ticket) -> int:
        """The class the ticket has risen to."""
        if self.oldest(ticket.priority) is not ticket:
            return ticket.priority
        since = max(ticket.submitted_at_s, self.class_served.get(ticket.priority, 0.0))
        steps = int((self.now - since) / self.limits.aging_s)
        better = [one for one in reversed(CLASSES) if 5 <= one < ticket.priority]
        return better[min(steps, len(better)) - 1] if steps and better else ticket.priority

    def is_owed(self, slot: Slot, ticket: Ticket) -> bool:
        """Did it wait for that load, and is it of the first batch after it, or that no longer ago than is allowed?"""
        assert slot.model is not None
        first, since_s = slot.taken < slot.model.parallel, self.now - slot.ready_at
        return ticket.submitted_at_s < slot.ready_at and (first or since_s < self.limits.max_overtaken_s)

    def class_of_slot(self, slot: Slot) -> int:
        """The class an idle slot has fallen to, or a busy one works for."""
        steps = int((self.now - slot.idle_since) / self.limits.aging_s)
        worse = [one for one in CLASSES if one > slot.last_class]
        last = worse[min(steps, len(worse)) - 1] if steps and worse else slot.last_class
        return min([last, *slot.in_flight.values()])

    def room(self) -> dict[str, int]:
        """Free bytes once everything that leaves is gone, with every promise counted."""
        usable = [device for device in self.devices if device.accelerator] or self.devices
        room = {device.id: device.capacity_bytes - device.others_bytes for device in usable}
        taken = [
            slot.options[0] if slot.leased and not slot.heard else slot.shares
            for slot in self.slots.values()
            if slot.state in HELD - GOING or slot.yields_to is not None
        ]
        for shares in (*taken, *(shares for many in self.promised.values() for shares in many)):
            for device, size in shares.items():
                if device in room:
                    room[device] -= size
        return room

    def fits(self, need: int, room: dict[str, int]) -> bool:
        if any(size >= need for size in room.values()):
            return True
        split = sum(max(0, size - MARGIN_BYTES) for size in room.values())
        return self.devices[0].accelerator and len(room) > 1 and split >= need

    # -- checks -------------------------------------------------------------------------------------------------

    def check_refusal(self, ticket: Ticket, error: errors.InferenceError) -> None:
        """7."""
        waiting = [other for other in self.waiting_for(ticket.model_id) if other.purpose is not Purpose.PEEK]
        usable = [device for device in self.devices if device.accelerator] or self.devices
        empty = {device.id: device.capacity_bytes for device in usable}
        if isinstance(error, errors.NoRoom):
            for slot in self.slots.values():
                if slot.state in HELD - GOING and slot.model is not None and slot.model.pin:
                    for device, size in slot.shares.items():
                        empty[device] -= size
            pins_fill_it = not self.fits(self.models[ticket.model_id].claim_bytes, empty)
            self.must(pins_fill_it or not waiting, f"7: {ticket} is refused: {error}")
        if isinstance(error, errors.WillNeverFit):
            self.must(
                not self.fits(self.models[ticket.model_id].claim_bytes, empty), f"7: {ticket} is refused: {error}"
            )

    def check_evictions(self, decided: list[actions.Action]) -> None:
        """3, 4 and 5, for a plan that has not been performed yet."""
        room = self.room()
        answered = {one.ticket_id for one in decided if isinstance(one, actions.Grant | actions.Refuse)}
        gone: set[str] = set()
        for at, action in enumerate(decided):
            if isinstance(action, actions.Drain | actions.Stop):
                before = [one.model_id for one in decided[:at] if isinstance(one, actions.Start)]
                if "makes room" in action.reason:
                    self.must(any(f"'{name}'" in action.reason for name in before), f"5: {action} without its start")
                elif action.reason.startswith("yields to"):
                    gone.add(action.slot_id)
                elif action.slot_id not in gone and self.slots[action.slot_id].state not in GOING:
                    gone.add(action.slot_id)
                    for device, size in self.slots[action.slot_id].shares.items():
                        room[device] = room.get(device, 0) + size
            if not isinstance(action, actions.Start):
                continue
            victims = {
                one.slot_id
                for one in decided[at:]
                if isinstance(one, actions.Drain | actions.Stop) and f"makes room for '{action.model_id}'" in one.reason
            }
            self.must(all(size >= 0 for option in action.options for size in option.values()), f"3: {action}")
            need = self.models[action.model_id].claim_bytes
            self.must(all(sum(option.values()) == need for option in action.options), f"3: {action}")
            if self.is_further(action):
                self.must(action.priority == 1000 or bool(action.ahead_of), f"11: {action} for a further slot")
                victims = set()
            self.check_victims(action, victims, room, answered)
            for victim in victims:
                gone.add(victim)
                for device, size in self.slots[victim].shares.items():
                    room[device] = room.get(device, 0) + size
            for device, size in action.options[0].items():
                room[device] -= size
                self.must(room[device] >= 0, f"3: {action} is promised {-room[device]} bytes too many on {device}")

    def class_of_load(self, action: actions.Start | actions.Ask) -> int:
        """Of whom the model is loaded for; what its lease has besides, it has for what it goes ahead of."""
        if not getattr(action, "ahead_of", ()):
            return action.priority
        waiting = self.waiting_for(action.model_id)
        serious = [self.class_of(ticket) for ticket in waiting if ticket.purpose is not Purpose.PEEK]
        return min(serious or [ticket.priority for ticket in waiting], default=1000)

    def check_victims(self, start: actions.Start, victims: set[str], room: dict[str, int], answered: set[str]) -> None:
        """4 and 5, for one start."""
        priority = self.class_of_load(start)
        holders = {name: self.slots[name] for name in victims}
        for name, slot in holders.items():
            assert slot.model is not None
            self.must(not slot.model.pin, f"4: pinned {name} goes for {start}")
            if slot.state is SlotState.LOADING:
                waiting = [ticket for ticket in self.waiting_for(slot.model.id) if ticket.id not in answered]
                self.must(not waiting, f"4: {name} is loading for {waiting} and goes for {start}")
                missed = self.now - slot.unwanted_since < self.limits.load_grace_s
                self.must(not missed or priority < slot.last_class, f"4: {name} was wanted just now, goes for {start}")
            elif slot.in_flight:
                self.must(priority < self.class_of_slot(slot), f"4: busy {name}, {slot}, goes for {start}")
            else:
                self.must(priority <= self.class_of_slot(slot), f"4: idle {name}, {slot}, goes for {start}")
                self.check_residency(start, name, slot, priority)
        if any(claim.overdue(self.now, self.limits) for claim in self.scheduler._board.claims.values()):
            return  # room is kept for an overdue claim, which the sums below do not know
        need = self.models[start.model_id].claim_bytes
        for spared in victims:
            without = dict(room)
            for victim in victims - {spared}:
                for device, size in self.slots[victim].shares.items():
                    without[device] = without.get(device, 0) + size
            self.must(not self.fits(need, without), f"5: {spared} goes in vain for {start}")

    def check_residency(self, start: actions.Start, name: str, slot: Slot, priority: int) -> None:
        """4: what was just loaded goes for its equals only once somebody waited for it for as long as is allowed."""
        stays_s = self.limits.min_residency_s
        stays_s = 3 * slot.load_s if stays_s is None else stays_s
        if priority == self.class_of_slot(slot) and self.now < slot.ready_at + stays_s:
            first = min(ticket.submitted_at_s for ticket in self.waiting_for(start.model_id))
            long = self.now - first >= self.limits.max_overtaken_s
            often = sum(moment >= first for moment in self.granted_at) >= self.limits.max_overtakes
            self.must(long or often, f"4: {name}, {slot}, was just loaded, goes for {start}")

    def is_further(self, start: actions.Start) -> bool:
        """Is it one more slot for a model that has one?"""
        return any(
            slot.state is SlotState.READY and slot.model is not None and slot.model.id == start.model_id
            for slot in self.slots.values()
        )

    def check_second_plan(self, event: events.Event) -> None:
        """6."""
        board = self.scheduler._board
        if not board.shutting_down:
            Plan(board).run()
        self.must(not (again := board.take_actions()), f"6: after {event} a second plan decides {again}")
        for claim in board.claims.values() if not board.shutting_down else ():
            ready = any(slot.state is SlotState.READY for slot in board.slots.of(claim.model_id))
            stands = claim.model_id in board.models and board.line.wants(claim.model_id) and not ready
            self.must(stands, f"12: {claim} outlived its reason")
        if isinstance(event, events.Tick):
            self.must(not (again := self.scheduler.handle(event)), f"6: a second {event} decides {again}")
