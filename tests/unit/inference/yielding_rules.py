"""Rules 8 to 10 of `scheduler_rules.py`: what slots do at a notice from outside."""

from __future__ import annotations

from inference import actions
from inference.demand import Demand
from inference.events import Purpose, Ticket
from inference.slot_state import SlotState
from tests.unit.inference.scheduler_rules import CLASSES, GOING, Rules, Slot


class YieldingRules(Rules):
    """Checked when an order is performed, and after every event."""

    suffered: dict[Demand, list[float]]
    """By demand, the moments it was overtaken on a slot that was not exempt."""

    def risen(self, demand: Demand) -> int:
        better = [one for one in reversed(CLASSES) if 5 <= one < demand.priority]
        steps = int((self.now - demand.since_s) / self.limits.aging_s)
        return better[min(steps, len(better)) - 1] if steps and better else demand.priority

    def goes_first(self, ticket: Ticket, demand: Demand) -> bool:
        return (self.class_of(ticket), ticket.submitted_at_s) <= (self.risen(demand), demand.since_s)

    def works_for(self, model_id: str) -> list[Ticket]:
        return [ticket for ticket in self.waiting_for(model_id) if ticket.purpose is not Purpose.LOAD]

    def demand_on(self, slot: Slot) -> Demand | None:
        """By the scheduler's own book; who is in it, and since when, is not what is checked here."""
        told = slot.notice is not None and slot.notice.told_at <= self.now
        return self.scheduler._board.demands.get(slot.notice.by) if told and slot.notice else None

    def check_yield(self, action: actions.Drain | actions.Stop) -> None:
        """8, as far as it forbids."""
        slot, name = self.slots[action.slot_id], action.slot_id
        if not action.reason.startswith("yields to") or slot.state in GOING:
            return
        if slot.withdrawn_at == self.now:  # which the scheduler has not been told yet
            slot.yields_to, slot.came_away = self.scheduler._board.slots[name].yields_to, True
            return
        demand = self.demand_on(slot)
        self.must(demand is not None, f"8: {action} without a notice: {slot}")
        assert demand is not None
        assert slot.model is not None
        self.must(not slot.model.pin, f"8: pinned {name} yields: {action}")
        waiting = [ticket for ticket in self.works_for(slot.model.id) if self.class_of(ticket) < self.risen(demand)]
        if slot.state is SlotState.LOADING:
            wanted = [self.class_of(t) for t in self.waiting_for(slot.model.id) if t.purpose is not Purpose.PEEK]
            best = min(wanted or [ticket.priority for ticket in self.waiting_for(slot.model.id)], default=1001)
            self.must(self.outranks(slot, demand, best), f"8: {name} loads for class {best} and yields to {demand}")
        elif slot.in_flight:
            busy = self.class_of_slot(slot)
            self.must(self.outranks(slot, demand, busy), f"8: busy {name}, {slot}, yields to {demand}")
            self.must(not waiting, f"8: {name} yields to {demand} before {waiting}")
        else:
            self.must(demand.priority <= self.class_of_slot(slot), f"8: idle {name}, {slot}, yields to {demand}")
            first = not waiting or self.outranks(slot, demand, self.class_of_slot(slot))
            self.must(first, f"8: {name} yields before {waiting}")
        slot.yields_to, slot.came_away = demand.by, True

    def check_cut(self, action: actions.Stop) -> None:
        """8: requests in flight are cut short only after the grace, for somebody more important than all of them."""
        slot = self.slots[action.slot_id]
        if action.error is None:
            self.must(not slot.in_flight, f"2: {action} on {slot}")
            return
        demand = self.demand_on(slot)
        self.must(demand is not None and slot.notice is not None, f"8: {action} without a notice: {slot}")
        assert demand is not None
        assert slot.notice is not None
        self.must(self.now >= slot.notice.deadline, f"8: {action} before {slot.notice.deadline}")
        cut = all(self.outranks(slot, demand, priority) for priority in slot.in_flight.values())
        self.must(cut, f"8: {action}: {slot}")

    @staticmethod
    def outranks(slot: Slot, demand: Demand, priority: int) -> bool:
        """More important than work of this class, or let the slot pass."""
        let_pass = slot.notice is not None and slot.notice.by in slot.passed
        return demand.priority < priority or (let_pass and demand.priority == priority == slot.lease_class)

    def check_heeded(self) -> None:
        """8, as far as it demands: nobody stays who should have gone."""
        if self.scheduler._board.shutting_down:
            return
        for name, slot in self.slots.items():
            demand = self.demand_on(slot)
            if demand is None or slot.model is None or slot.model.pin:
                continue
            if slot.state is SlotState.READY and not self.works_for(slot.model.id):
                defends = self.class_of_slot(slot)
                idle = demand.priority == defends and not slot.in_flight
                # One that was repriced need not be known to have been let past.
                goes = idle or demand.priority < defends
                self.must(not goes, f"8: {name}, {slot}, does not yield to {demand}")
            if slot.state is SlotState.LOADING and not self.waiting_for(slot.model.id):
                self.must(False, f"8: {name} loads for nobody and does not yield to {demand}")

    def check_overtaking(self, slot: Slot, ticket: Ticket) -> None:
        """9, before the grant of a ticket that is not a LOAD."""
        demand = self.demand_on(slot)
        if demand is None or slot.model is None or slot.model.pin or self.goes_first(ticket, demand):
            return
        moments = self.suffered.setdefault(demand, [])
        if not self.is_owed(slot, ticket) and self.class_of_slot(slot) >= demand.priority:
            self.must(
                len(moments) < max(1, self.limits.max_overtakes) and self.limits.max_overtakes > 0,
                f"9: {demand} is overtaken by {ticket} after {len(moments)} times",
            )
            late = bool(moments) and self.now - moments[0] >= self.limits.max_overtaken_s
            self.must(not late, f"9: {demand} is overtaken by {ticket} too late")
        moments.append(self.now)

    def check_return(self, action: actions.Start) -> None:
        """10: what loads without a request is kept loaded, or came away for a job; and nobody goes for it."""
        slot, model = self.slots.get(action.slot_id), self.models[action.model_id]
        if not self.waiting_for(action.model_id):
            came_away = slot is not None and slot.came_away
            self.must(model.pin or model.preload or came_away, f"10: {action} for nobody")
            self.must(action.priority == 1000 or bool(action.ahead_of), f"10: {action} for nobody")
