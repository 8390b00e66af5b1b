"""A world for the scheduler to act in: a ledger, slots that take their time, callers that lose patience.

`World(seed).run()` plays a random history on a virtual clock and raises `Broken` as soon as a rule of
`scheduler_rules.py` does not hold.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from inference import actions, events
from inference.errors import InferenceError, LoadFailed
from inference.events import Purpose, Ticket
from inference.fault import Fault
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from inference.slot_state import SlotState
from tests.unit.inference.scheduler_ledger import Job, Leases, Place
from tests.unit.inference.scheduler_rules import HELD, Broken, Slot, a_device, a_model
from tests.unit.inference.yielding_rules import YieldingRules


@dataclass
class Caller:
    """The truth about one ticket."""

    ticket: Ticket
    answer: str | None = None
    """`granted`, `refused` or `left`."""
    error: InferenceError | None = None
    done: bool = False


class World(Leases, YieldingRules):
    """One random history."""

    def __init__(self, seed: int, *, scheduler: Callable[[QueueLimits], Scheduler] = Scheduler) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.people()
        self.scheduler = scheduler(self.limits)
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.slots = {}
        self.callers: dict[str, Caller] = {}
        self.unanswered = {}
        self.class_served = {}
        self.granted_at = []
        self.pending: list[Place] = []
        self.jobs: dict[str, Job] = {}
        self.foreign = {device.id: 0 for device in self.devices}
        self.promised = {}
        self.demand_told = {}
        self.suffered = {}
        self.coming = {}
        self.calm = False
        self.handling = False
        self.inbox: list[events.Event] = []
        self.counts: dict[str, int] = {}

    def people(self) -> None:
        """Limits, devices, models and habits of this world."""
        rng = self.rng
        self.limits = QueueLimits(
            max_waiting=rng.choice([10, 512, 512]),
            max_wait_s=rng.choice([20.0, 100_000.0, 100_000.0]),
            max_overtakes=rng.choice([0, 2, 16]),
            max_overtaken_s=rng.choice([0.0, 5.0, 20.0]),
            aging_s=rng.choice([5.0, 60.0]),
            load_grace_s=rng.choice([0.0, 10.0]),
            min_residency_s=rng.choice([None, 0.0, 0.0, 4.0]),
        )
        host_only = rng.random() < 0.1
        self.devices = [
            a_device(f"d{n}", rng.choice([8, 8, 12, 24]), accelerator=not host_only)
            for n in range(1 if host_only else rng.choice([1, 1, 2, 3]))
        ]
        if rng.random() < 0.3:
            self.devices.append(a_device("cpu", 64, accelerator=False))
        self.models = {
            f"m{n}": a_model(
                f"m{n}",
                rng.choice([1, 2, 3, 3, 4, 4, 6, 6, 8, 8, 11, 20, 70]),
                parallel=rng.choice([1, 1, 2, 4]),
                stay_warm_s=rng.choice([0.0, 3.0, 30.0, 300.0]),
                pin=rng.random() < 0.08,
                preload=rng.random() < 0.1,
                replicas=rng.choice([1, 1, 1, 2, 3]),
            )
            for n in range(rng.randint(2, 7))
        }
        self.load_s = {name: rng.choice([0.1, 2.0, 15.0, 40.0]) for name in self.models}
        self.work_s = rng.choice([0.2, 2.0, 8.0])
        self.gap_s = rng.choice([0.2, 0.5, 2.0])
        self.classes = rng.choice([(10,), (10, 10, 20), (1, 5, 10, 20, 50), (3, 10, 30, 200, 1000)])
        self.trouble = rng.choice([0.0, 0.0, 0.05, 0.2])
        self.purposes = [Purpose.INFER] * 17 + [Purpose.LOAD] + [Purpose.PEEK] * 2
        self.job_gap_s = rng.choice([None, 1.0, 3.0, 10.0])
        self.slots_pass = rng.random() < 0.5

    # -- the clock ------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (self.now + delay_s, next(self.numbers), what))

    def advance(self, until: float) -> None:
        while self.agenda and self.agenda[0][0] <= until:
            self.now, _, what = heapq.heappop(self.agenda)
            what()
        self.now = until

    def run(self, busy_s: float = 40.0) -> World:
        """The whole history: a busy part, then a quiet one in which everybody must get an answer."""
        self.feed(events.DevicesRead(self.now, tuple(self.devices)))
        self.feed(events.ModelsChanged(self.now, dict(self.models)))
        self.after(0.0, self.tick)
        self.after(0.0, self.someone_comes)
        self.after(5.0, self.something_happens)
        self.after(1.0, self.a_job_comes)
        self.advance(self.now + self.rng.uniform(2.0, busy_s))
        self.calm = True
        self.foreign = dict.fromkeys(self.foreign, 0)
        for job in self.jobs.values():
            self.after(30.0, lambda job=job: self.job_gives_up(job))
        self.read()
        if self.rng.random() < 0.1:
            self.feed(events.ShutdownBegan(self.now))
        self.finish()
        return self

    def finish(self, patience_s: float = 7200.0) -> None:
        deadline = self.now + patience_s
        while self.unanswered or any(not caller.done for caller in self.callers.values()):
            if self.now > deadline:
                raise Broken(f"7: still waiting after {patience_s} quiet seconds: {self.unanswered}; {self.slots}")
            self.advance(self.now + 1.0)

    def tick(self) -> None:
        self.grant_leases()
        if self.jobs:
            self.read()
        self.feed(events.Tick(self.now))
        if self.rng.random() < 0.2:
            self.feed(events.Tick(self.now))
        self.after(1.0, self.tick)

    # -- who comes and what goes wrong ------------------------------------------------------------------------------

    def someone_comes(self) -> None:
        if self.calm:
            return
        rng = self.rng
        self.after(rng.expovariate(1 / self.gap_s), self.someone_comes)
        names = list(self.models)
        name = names[min(int(rng.expovariate(0.7)), len(names) - 1)] if rng.random() < 0.98 else "nobody"
        self.arrive(
            Ticket(
                id=f"t{next(self.numbers)}",
                model_id=name,
                priority=rng.choice(self.classes),
                submitted_at_s=self.now,
                stay_warm_s=rng.choice([None, None, 0.0, 5.0]),
                purpose=rng.choice(self.purposes),
                session_id=rng.choice([None, "s1", "s2"]),
            )
        )

    def arrive(self, ticket: Ticket) -> Caller:
        caller = self.callers[ticket.id] = Caller(ticket)
        self.unanswered[ticket.id] = ticket
        for slot in self.slots.values():
            if slot.model is not None and slot.model.id == ticket.model_id:
                slot.unwanted_since = -math.inf
        self.feed(events.Arrived(self.now, ticket))
        if caller.answer is None and self.rng.random() < self.trouble:
            self.after(self.rng.expovariate(0.2), lambda: self.leave(caller))
        return caller

    def leave(self, caller: Caller) -> None:
        if caller.answer is None and not self.calm:
            caller.answer, caller.done = "left", True
            self.no_longer_waits(caller.ticket, left=True)
            self.feed(events.Abandoned(self.now, caller.ticket.id))

    def something_happens(self) -> None:
        """Once in a while, something that callers did not cause."""
        if self.calm:
            return
        rng = self.rng
        self.after(rng.expovariate(0.3), self.something_happens)
        if rng.random() > 4 * self.trouble:
            return
        name = rng.choice([*self.models, *self.slots])
        slot = self.slots.get(name)
        match rng.randrange(7):
            case 0:
                self.feed(events.UnloadWanted(self.now, name))
            case 1 | 2:
                device = rng.choice(self.devices)
                room = self.free()[device.id] + self.foreign[device.id]
                self.foreign[device.id] = int(rng.random() * max(0, room))
                self.read()
                self.grant_leases()
            case 3:
                self.change_models(rng.choice(list(self.models)))
            case 4 if slot is not None and slot.state in {SlotState.READY, SlotState.DRAINING, SlotState.LOADING}:
                self.fail(name, slot)
            case 5 if slot is not None and slot.state is SlotState.READY:
                slot.state = SlotState.STOPPING
                self.feed(events.LeaseLost(self.now, name))
                self.go_later(name, slot)
            case _:
                for event in self.nonsense(name):
                    self.feed(event)

    def change_models(self, name: str) -> None:
        rng = self.rng
        if rng.random() < 0.2 and len(self.models) > 2:
            del self.models[name]
        elif rng.random() < 0.2:
            self.models[name] = replace(self.models[name], problem="truncated")
        else:
            self.models[name] = a_model(name, rng.choice([1, 2, 4, 8]), parallel=rng.choice([1, 2]))
        for slot in self.slots.values():
            if slot.model is not None and (new := self.models.get(slot.model.id)) is not None:
                slot.model = replace(slot.model, pin=new.pin, preload=new.preload, replicas=new.replicas)
        self.feed(events.ModelsChanged(self.now, dict(self.models)))

    def nonsense(self, name: str) -> list[events.Event]:
        """Events about what is unknown or over; they must change nothing."""
        done = next((caller.ticket.id for caller in self.callers.values() if caller.done), "none")
        return [
            events.Served(self.now, "none"),
            events.Served(self.now, done),
            events.Abandoned(self.now, done),
            events.SlotGone(self.now, "nobody"),
            events.SlotReady(self.now, "nobody", 1.0),
            events.LeaseGranted(self.now, "nobody", {}),
            events.UnloadWanted(self.now, "nobody"),
        ]

    # -- the ledger and the slots -----------------------------------------------------------------------------------

    def leased(self, name: str, life: int) -> None:
        slot = self.slots[name]
        if slot.life == life and slot.state in {*HELD, SlotState.QUEUED}:
            if slot.state is SlotState.QUEUED:
                slot.state, slot.last_class, slot.idle_since, slot.taken = (
                    SlotState.LOADING,
                    slot.lease_class,
                    self.now,
                    0,
                )
                slot.came_away = False
            slot.heard = True
            self.feed(events.LeaseGranted(self.now, name, slot.shares))
            fails = not self.calm and self.rng.random() < self.trouble
            load_s = self.load_s[slot.model.id] * self.rng.uniform(0.5, 1.5)
            self.after(load_s, lambda: self.loaded(name, life, load_s, fails))

    def loaded(self, name: str, life: int, load_s: float, fails: bool) -> None:
        slot = self.slots[name]
        if slot.life != life or slot.state is not SlotState.LOADING:
            return
        if fails:
            self.fail(name, slot)
            return
        slot.state, slot.ready_at, slot.load_s = SlotState.READY, self.now, load_s
        if slot.came_away:
            slot.came_away = False
        else:
            slot.idle_since = self.now
        self.feed(events.SlotReady(self.now, name, load_s))

    def fail(self, name: str, slot: Slot) -> None:
        was_ready = slot.state is not SlotState.LOADING
        self.end(slot, SlotState.FAILED)
        error = LoadFailed(f"{name} ended with status 1")
        fault = self.rng.choice([None, Fault.CRASH, Fault.CRASH, Fault.STALL, Fault.BAD_MODEL])
        self.feed(events.SlotFailed(self.now, name, error, was_ready=was_ready, fault=fault))
        self.grant_leases()

    def go_later(self, name: str, slot: Slot) -> None:
        life = slot.life
        self.after(self.rng.choice([0.0, 0.1, 2.0]), lambda: self.gone(name, life))

    def gone(self, name: str, life: int) -> None:
        slot = self.slots[name]
        if slot.life == life and slot.state is SlotState.STOPPING:
            self.end(slot, SlotState.IDLE)
            self.feed(events.SlotGone(self.now, name))
            self.grant_leases()

    def end(self, slot: Slot, state: SlotState) -> None:
        for ticket_id in list(slot.in_flight):
            # The caller gets the engine's death from the proxy and gives its place back a little later.
            del slot.in_flight[ticket_id]
            self.after(0.01, lambda ticket_id=ticket_id: self.close(ticket_id))
        if slot.yields_to is not None:
            self.promised.setdefault(slot.yields_to, []).append(slot.shares)
        slot.state, slot.leased, slot.shares = state, False, {}
        slot.notice, slot.acknowledged, slot.yields_to = None, False, None

    def close(self, ticket_id: str) -> None:
        caller = self.callers[ticket_id]
        if not caller.done:
            caller.done = True
            slot = next((one for one in self.slots.values() if ticket_id in one.in_flight), None)
            priority = slot.in_flight.pop(ticket_id) if slot is not None else None
            if slot is not None and priority is not None and caller.ticket.purpose is not Purpose.PEEK:
                slot.last_class, slot.idle_since = caller.ticket.priority, self.now
            self.feed(events.Served(self.now, ticket_id))

    # -- the shell ------------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        self.inbox.append(event)
        if self.handling:
            return
        self.handling = True
        while self.inbox:
            event = self.inbox.pop(0)
            decided = self.scheduler.handle(event)
            self.perform(decided)
            self.check_second_plan(event)
            if not self.inbox:
                self.check_heeded()
        self.handling = False

    def perform(self, decided: list[actions.Action]) -> None:
        self.check_evictions(decided)
        for action in decided:
            self.counts[type(action).__name__] = self.counts.get(type(action).__name__, 0) + 1
            match action:
                case actions.Grant():
                    self.granted(action)
                case actions.Refuse():
                    self.refused(action)
                case actions.Ask():
                    self.ask(action)
                case actions.Start():
                    self.start(action)
                case actions.Reprice():
                    self.reprice(action)
                case actions.Acknowledge():
                    self.slots[action.slot_id].acknowledged = True
                case actions.Drain():
                    self.must(self.slots[action.slot_id].state is SlotState.READY, f"2: {action}")
                    self.check_yield(action)
                    self.slots[action.slot_id].state = SlotState.DRAINING
                case actions.Stop():
                    self.stop(action)

    def granted(self, action: actions.Grant) -> None:
        caller, slot = self.callers[action.ticket_id], self.slots[action.slot_id]
        ticket = caller.ticket
        self.must(caller.answer is None, f"1: {action} to a ticket that was {caller.answer}")
        assert slot.model is not None
        self.must(slot.state is SlotState.READY and ticket.model_id == slot.model.id, f"1: {action} on {slot}")
        if ticket.purpose is not Purpose.LOAD:
            self.check_overtaking(slot, ticket)
        slot.taken += 1
        slot.in_flight[ticket.id] = self.class_of(ticket)
        if self.oldest(ticket.priority) is ticket:
            self.class_served[ticket.priority] = self.now
        works = [one for one in slot.in_flight if self.callers[one].ticket.purpose is not Purpose.LOAD]
        self.must(len(works) <= slot.model.parallel, f"1: {len(works)} in flight on {action.slot_id}")
        caller.answer = "granted"
        self.granted_at.append(self.now)
        self.no_longer_waits(ticket)
        work_s = 0.0 if ticket.purpose is Purpose.LOAD else self.rng.expovariate(1 / self.work_s)
        self.after(work_s, lambda: self.close(ticket.id))

    def refused(self, action: actions.Refuse) -> None:
        caller = self.callers[action.ticket_id]
        self.must(caller.answer is None, f"1: {action} to a ticket that was {caller.answer}")
        self.check_refusal(caller.ticket, action.error)
        caller.answer, caller.done, caller.error = "refused", True, action.error
        self.no_longer_waits(caller.ticket, left=True)

    def no_longer_waits(self, ticket: Ticket, *, left: bool = False) -> None:
        del self.unanswered[ticket.id]
        if left and not self.waiting_for(ticket.model_id):
            for slot in self.slots.values():
                if slot.state is SlotState.LOADING and slot.model is not None and slot.model.id == ticket.model_id:
                    slot.unwanted_since = self.now

    def ask(self, action: actions.Ask) -> None:
        slot = self.slots.setdefault(action.slot_id, Slot())
        self.must(slot.state in {SlotState.IDLE, SlotState.FAILED, SlotState.QUEUED}, f"2: {action} on {slot}")
        self.must(bool(self.waiting_for(action.model_id)), f"10: {action} for nobody")
        slot.options = action.options
        if slot.state is SlotState.QUEUED:
            self.reprice(actions.Reprice(action.slot_id, action.priority))
        else:
            slot.state, slot.model, slot.leased = SlotState.QUEUED, self.models[action.model_id], False
            self.queue_lease(action.slot_id, action.priority)
        self.after(0.0, self.grant_leases)

    def start(self, action: actions.Start) -> None:
        self.check_return(action)
        slot = self.slots.setdefault(action.slot_id, Slot())
        queued = slot.state is SlotState.QUEUED
        self.must(queued or slot.state in {SlotState.IDLE, SlotState.FAILED}, f"2: {action} on {slot}")
        granted = slot.shares if slot.leased else None  # a moment ago, and the scheduler is about to hear of it
        slot.state, slot.model = SlotState.LOADING, self.models[action.model_id]
        slot.options, slot.shares = action.options, granted or action.options[0]
        if not slot.came_away or self.waiting_for(action.model_id):
            slot.last_class, slot.idle_since, slot.came_away = self.class_of_load(action), self.now, False
        slot.taken, slot.unwanted_since = 0, -math.inf
        if queued:
            self.reprice(actions.Reprice(action.slot_id, action.priority))
        else:
            slot.leased = False
            self.queue_lease(action.slot_id, action.priority, action.ahead_of)
        self.after(0.0, self.grant_leases)

    def queue_lease(self, name: str, priority: int, ahead_of: tuple[str, ...] = ()) -> None:
        slot = self.slots[name]
        slot.life, slot.lease_class, slot.passed = next(self.numbers), priority, set()
        passed = [place.order for place in self.pending if place.slot_id in ahead_of and place.stands]
        order = min(passed, default=slot.life + 0.5) - 0.5
        self.pending.append(Place(priority, order, name, slot.life, slot))

    def reprice(self, action: actions.Reprice) -> None:
        slot = self.slots[action.slot_id]
        slot.lease_class = action.priority
        for place in self.pending:
            if place.slot is slot and place.life == slot.life:
                place.priority = action.priority

    def stop(self, action: actions.Stop) -> None:
        slot = self.slots[action.slot_id]
        self.must(
            slot.state in {SlotState.QUEUED, SlotState.LOADING, SlotState.READY, SlotState.DRAINING},
            f"2: {action} on {slot}",
        )
        self.check_yield(action)
        self.check_cut(action)
        if action.error is not None:
            self.counts["cut"] = self.counts.get("cut", 0) + 1
            slot.idle_since = self.now
            for ticket_id in slot.in_flight:
                self.after(0.01, lambda ticket_id=ticket_id: self.close(ticket_id))
        slot.state = SlotState.STOPPING
        self.go_later(action.slot_id, slot)
