"""A scheduler on a bench: events go in by hand, decisions come out as short words such as `start b`, `drain a`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from inference import actions, events
from inference.errors import InferenceError, LoadFailed
from inference.events import DeviceRoom, Purpose, Shares, Ticket
from inference.fault import Fault
from inference.model import Model
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from tests.unit.inference.scheduler_rules import a_device


class Bench:
    """One device of 10 GiB unless told otherwise. Tickets are named after their model: a1, a2, b3, in order."""

    def __init__(self, *models: Model, devices: tuple[DeviceRoom, ...] = (), limits: QueueLimits | None = None) -> None:
        self.now = 0.0
        limits = limits or QueueLimits(load_grace_s=0.0)
        if limits.min_residency_s is None:  # most tests are about something else
            limits = replace(limits, min_residency_s=0.0)
        self.scheduler = Scheduler(limits)
        self.errors: dict[str, InferenceError] = {}
        self.starts: dict[str, actions.Start] = {}
        self.asks: dict[str, actions.Ask] = {}
        self.reasons: dict[str, str] = {}
        self.flying: list[str] = []
        """Granted tickets that were not served yet."""
        self.lease_class: dict[str, int] = {}
        """By model, the class its lease was last given."""
        self.acknowledged: list[str] = []
        """Models whose slots said that they yield."""
        self.cut: dict[str, InferenceError] = {}
        """By model, how the requests ended that were in flight at its stop."""
        self._count = 0
        self.tell(events.DevicesRead(self.now, devices or (a_device("d0", 10),)))
        self.first = self.tell(events.ModelsChanged(self.now, {model.id: model for model in models}))
        self.first += self.tell(events.Tick(self.now))

    def tell(self, event: events.Event) -> list[str]:
        words = [self._word(action) for action in self.scheduler.handle(event)]
        return [word for word in words if word is not None]

    def _word(self, action: actions.Action) -> str | None:
        match action:
            case actions.Ask(model_id):
                self.asks[model_id] = action
                self.lease_class[model_id] = action.priority
                return f"ask {model_id}"
            case actions.Start(model_id):
                self.starts[model_id] = action
                self.lease_class[model_id] = action.priority
                return f"start {model_id}"
            case actions.Reprice(model_id, priority):
                self.lease_class[model_id] = priority
                return None
            case actions.Acknowledge(model_id):
                self.acknowledged.append(model_id)
                return None
            case actions.Drain(model_id, reason):
                self.reasons[model_id] = reason
                return f"drain {model_id}"
            case actions.Stop(model_id, reason, error):
                self.reasons.setdefault(model_id, reason)
                if error is not None:
                    self.cut[model_id] = error
                return f"stop {model_id}" if error is None else f"cut {model_id}"
            case actions.Grant(ticket_id):
                self.flying.append(ticket_id)
                return f"grant {ticket_id}"
            case actions.Refuse(ticket_id, error):
                self.errors[ticket_id] = error
                return f"refuse {ticket_id} {type(error).__name__}"

    def ask(
        self,
        model_id: str,
        priority: int = 10,
        *,
        purpose: Purpose = Purpose.INFER,
        stay_warm_s: float | None = None,
        submitted_at_s: float | None = None,
        client: str | None = None,
        session: str | None = None,
        cooldown_s: float | None = None,
    ) -> list[str]:
        self._count += 1
        ticket = Ticket(
            id=f"{model_id}{self._count}",
            model_id=model_id,
            priority=priority,
            submitted_at_s=self.now if submitted_at_s is None else submitted_at_s,
            client_id=client,
            stay_warm_s=stay_warm_s,
            purpose=purpose,
            session_id=session,
            cooldown_s=cooldown_s,
        )
        return self.tell(events.Arrived(self.now, ticket))

    def up(self, slot_id: str, load_s: float = 1.0) -> list[str]:
        """The slot's lease is granted and its engine answers."""
        shares = self.starts[slot_id].options[0]
        return self.tell(events.LeaseGranted(self.now, slot_id, shares)) + self.tell(
            events.SlotReady(self.now, slot_id, load_s)
        )

    def up_from_queue(self, model_id: str, load_s: float = 1.0) -> list[str]:
        """The lease the model's slot had queued for is granted, and its engine answers."""
        shares = self.asks[model_id].options[0]
        return self.tell(events.LeaseGranted(self.now, model_id, shares)) + self.tell(
            events.SlotReady(self.now, model_id, load_s)
        )

    def served(self, ticket_id: str) -> list[str]:
        if ticket_id in self.flying:
            self.flying.remove(ticket_id)
        return self.tell(events.Served(self.now, ticket_id))

    def abandoned(self, ticket_id: str) -> list[str]:
        return self.tell(events.Abandoned(self.now, ticket_id))

    def gone(self, model_id: str) -> list[str]:
        return self.tell(events.SlotGone(self.now, model_id))

    def failed(self, model_id: str, *, was_ready: bool, fault: Fault | None = None) -> list[str]:
        error = LoadFailed(f"{model_id} ended with status 1")
        return self.tell(events.SlotFailed(self.now, model_id, error, was_ready, fault))

    def devices(
        self,
        *devices: DeviceRoom,
        waiting: Collection[str] = (),
        coming: Mapping[str, Shares] | None = None,
        asked_at_s: float = math.inf,
    ) -> list[str]:
        return self.tell(events.DevicesRead(self.now, devices, frozenset(waiting), coming or {}, asked_at_s))

    def noticed(
        self, model_id: str, priority: int = 10, *, by: str = "job", grace_s: float = 30.0, outranks: bool = False
    ) -> list[str]:
        """The ledger asks the model's slot to yield to a job."""
        holder = f"job:{by}" if by else "a person"
        return self.tell(events.Noticed(self.now, model_id, by, holder, priority, self.now + grace_s, outranks))

    def withdrawn(self, model_id: str) -> list[str]:
        return self.tell(events.Withdrawn(self.now, model_id))

    def after(self, seconds: float) -> list[str]:
        """That much later, at a tick."""
        self.now += seconds
        return self.tell(events.Tick(self.now))

    def loaded(self, model_id: str) -> None:
        """Get the model loaded and idle, by a request that is served at once."""
        assert self.ask(model_id)[-1:] == [f"start {model_id}"]
        ticket_id = f"{model_id}{self._count}"
        assert self.up(model_id) == [f"grant {ticket_id}"]
        assert self.served(ticket_id) == []

    def state(self, model_id: str) -> str:
        return self.scheduler.slot_view(model_id).state.value
