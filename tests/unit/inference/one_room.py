"""A smaller world for the bounds of overtaking: room for one model, several in demand, one class, nothing goes wrong.

There it is plain what an overtaking is, so it can be counted without asking the scheduler: a grant on the loaded model
to a ticket submitted after one that leads the queue of a model which is not loaded. Exempt, as the rules say, are those
whom the load is owed to and grants while the slot works for somebody who has risen above the leader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from inference import actions
from inference.events import Purpose, Ticket
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from inference.slot_state import SlotState
from tests.unit.inference.scheduler_rules import HELD, a_device, a_model
from tests.unit.inference.scheduler_world import Caller, World


class OneRoom(World):
    """Raises `Broken` when somebody is overtaken too often or for too long."""

    def __init__(self, seed: int, *, scheduler: Callable[[QueueLimits], Scheduler] = Scheduler) -> None:
        super().__init__(seed, scheduler=scheduler)
        self.suffered: dict[str, list[float]] = {}
        """By leader, the moments it was overtaken."""

    def people(self) -> None:
        rng = self.rng
        self.limits = QueueLimits(
            max_waiting=10_000,
            max_wait_s=100_000,
            max_overtakes=rng.choice([0, 1, 4, 16]),
            max_overtaken_s=rng.choice([0.0, 3.0, 20.0]),
            aging_s=rng.choice([5.0, 60.0]),
            min_residency_s=rng.choice([None, 0.0, 1.0, 60.0]),
        )
        self.devices = [a_device("d0", 8)]
        self.models = {
            f"m{n}": a_model(f"m{n}", 6, parallel=rng.choice([1, 2, 4]), stay_warm_s=1000.0)
            for n in range(rng.randint(2, 4))
        }
        self.load_s = dict.fromkeys(self.models, rng.choice([0.1, 2.0]))
        self.work_s = rng.choice([0.05, 0.5])
        self.gap_s = rng.choice([0.05, 0.2])
        self.classes = (rng.choice([5, 10, 50]),)
        self.trouble = 0.0
        self.purposes = [Purpose.INFER]
        self.job_gap_s, self.slots_pass = None, False

    def granted(self, action: actions.Grant) -> None:
        slot, ticket = self.slots[action.slot_id], self.callers[action.ticket_id].ticket
        assert slot.model is not None
        owed = self.is_owed(slot, ticket)
        leaders = [leader for leader in self.leaders() if not owed and self.comes_after(ticket, leader)]
        exempt = [leader for leader in leaders if self.class_of_slot(slot) < self.class_of(leader)]
        super().granted(action)
        for leader in leaders:
            if leader not in exempt:
                self.overtaken(leader, ticket)

    def leaders(self) -> list[Ticket]:
        """The first ticket of every model that is not loaded."""
        cold = [name for name in self.models if name not in self.slots or self.slots[name].state not in HELD]
        lines = [self.waiting_for(name) for name in cold]
        return [line[0] for line in lines if line]

    def comes_after(self, ticket: Ticket, leader: Ticket) -> bool:
        return (self.class_of(ticket), ticket.submitted_at_s) > (self.class_of(leader), leader.submitted_at_s)

    def overtaken(self, leader: Ticket, by: Ticket) -> None:
        moments = self.suffered.setdefault(leader.id, [])
        moments.append(self.now)
        self.must(len(moments) <= self.limits.max_overtakes, f"{leader} is overtaken {len(moments)} times, by {by}")
        late = len(moments) > 1 and self.now - moments[0] >= self.limits.max_overtaken_s
        self.must(not late, f"{leader} is overtaken by {by} {self.now - moments[0]:.1f} s after the first time")


TICK_S = 1.0
"""How long a bound may be over before anything happens that lets the scheduler see it."""
LONGEST_STOP_S = 2.0
LONGEST_LOAD = 1.5
"""By how much a load may take longer than the last one."""


class Turns(OneRoom):
    """How long the first who waits for a model that is not loaded waits, at most.

    `max_overtaken_s`, the longest request and its load. Before that come those who came before: the work for them, and
    each load of another model, which only somebody who came before has begun, with a turn of its own: `max_overtaken_s`
    for whoever waited for it, and the longest request.
    """

    def people(self) -> None:
        super().people()
        if self.rng.random() < 0.3:  # many places and long answers: a place that is filled late holds the room for long
            self.models = {name: replace(model, parallel=16) for name, model in self.models.items()}
            self.work_s, self.gap_s = 4.0, 1.0
        self.longest_s = self.last_delay_s = 0.0
        self.turns: dict[str, int] = {}
        """By ticket that came first for a model that was not loaded, the loads of others that it waits for."""
        self.ahead_s: dict[str, float] = {}
        """By such a ticket, the work for those who came before it."""
        self.done_at: dict[str, float] = {}
        """By granted ticket, when its work will be over."""
        self.waits = self.most_turns = 0

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.last_delay_s = delay_s
        super().after(delay_s, what)

    def arrive(self, ticket: Ticket) -> Caller:
        cold = ticket.model_id not in self.slots or self.slots[ticket.model_id].state not in HELD
        if cold and not self.waiting_for(ticket.model_id):
            self.turns[ticket.id] = sum(
                name != ticket.model_id and (slot.state is SlotState.LOADING or bool(self.waiting_for(name)))
                for name, slot in self.slots.items()
                if slot.state in HELD
            )
            working = [self.done_at[ticket_id] for slot in self.slots.values() for ticket_id in slot.in_flight]
            self.ahead_s[ticket.id] = max(working, default=self.now) - self.now
        return super().arrive(ticket)

    def first(self) -> list[Ticket]:
        return [ticket for ticket_id in self.turns if (ticket := self.unanswered.get(ticket_id)) is not None]

    def start(self, action: actions.Start) -> None:
        leader = self.waiting_for(action.model_id)[0]
        for ticket in self.first():
            if ticket.model_id != action.model_id:
                self.must(not self.comes_after(leader, ticket), f"{action} for {leader}, who came after {ticket}")
                self.turns[ticket.id] += 1
        super().start(action)

    def granted(self, action: actions.Grant) -> None:
        ticket, slot = self.callers[action.ticket_id].ticket, self.slots[action.slot_id]
        assert slot.model is not None
        super().granted(action)  # its last deed is to say when the work will be over
        self.done_at[ticket.id] = self.now + self.last_delay_s
        self.longest_s = max(self.longest_s, self.last_delay_s)
        for one in self.first():
            if not self.comes_after(ticket, one):
                self.ahead_s[one.id] += self.last_delay_s / slot.model.parallel
        if ticket.id in self.turns:
            self.check_wait(ticket)

    def check_wait(self, ticket: Ticket) -> None:
        load_s = LONGEST_STOP_S + LONGEST_LOAD * self.load_s[ticket.model_id]
        turn_s = self.limits.max_overtaken_s + TICK_S + self.longest_s + load_s
        turns = self.turns[ticket.id] + 1
        bound_s = turns * turn_s + self.ahead_s[ticket.id]
        waited_s = self.now - ticket.submitted_at_s
        self.waits, self.most_turns = self.waits + 1, max(self.most_turns, turns)
        self.must(waited_s <= bound_s, f"{ticket} waited {waited_s:.1f} s of at most {bound_s:.1f}, {turns} turns")
