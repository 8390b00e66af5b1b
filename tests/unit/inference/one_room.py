"""A smaller world for the bounds of overtaking: room for one model, several in demand, one class, nothing goes wrong.

There it is plain what an overtaking is, so it can be counted without asking the scheduler: a grant on the loaded model
to a ticket submitted after one that leads the queue of a model which is not loaded. Exempt, as the rules say, are those
whom the load is owed to and grants while the slot works for somebody who has risen above the leader.
"""

from __future__ import annotations

from collections.abc import Callable

from inference import actions
from inference.events import Purpose, Ticket
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from tests.unit.inference.scheduler_rules import HELD, a_device, a_model
from tests.unit.inference.scheduler_world import Caller, World


class OneRoom(World):
    """Raises `Broken` when somebody is overtaken too often or for too long."""

    def __init__(self, seed: int, *, scheduler: Callable[[QueueLimits], Scheduler] = Scheduler) -> None:
        super().__init__(seed, scheduler=scheduler)
        self.suffered: dict[str, list[float]] = {}
        self.first: set[str] = set()
        """Tickets that came first for a model that was not loaded."""
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


class TwoModels(OneRoom):
    """Two models and room for one: how long the first who waits for the other one waits, at most.

    The bound of overtaking; then what runs when it is over, and the load. Besides, where the loaded model was only
    being loaded when the ticket came: that load, and those whom it is owed to.
    """

    def people(self) -> None:
        super().people()
        self.models = {name: self.models[name] for name in ("m0", "m1")}
        self.load_s = dict.fromkeys(self.models, self.rng.choice([0.1, 2.0]))
        self.longest = 0.0
        self.waits = 0

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.longest = max(self.longest, delay_s if delay_s < self.work_s * 30 else 0.0)
        super().after(delay_s, what)

    def arrive(self, ticket: Ticket) -> Caller:
        cold = ticket.model_id not in self.slots or self.slots[ticket.model_id].state not in HELD
        if cold and not self.waiting_for(ticket.model_id):
            self.first.add(ticket.id)
        return super().arrive(ticket)

    def granted(self, action: actions.Grant) -> None:
        ticket = self.callers[action.ticket_id].ticket
        super().granted(action)
        if ticket.id in self.first:
            self.waits += 1
            load_s = 1.5 * self.load_s[ticket.model_id]
            bound_s = self.limits.max_overtaken_s + 2 * self.longest + 2 * load_s + 2.0 + 1.0
            waited_s = self.now - ticket.submitted_at_s
            self.must(waited_s <= bound_s, f"{ticket} waited {waited_s:.1f} s of at most {bound_s:.1f}")
