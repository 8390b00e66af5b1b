"""Who gives way to holders outside the pool, and when.

Called by `plan.py` at the beginning of each pass and at each grant; decides through the moves of `board.py`.

A demand is a lease of somebody outside (a training job, another broker) that waits in the ledger for memory of our
slots. The ledger gives notice to as few of them as it needs; each decides for itself. A slot that has notice, and is

1. idle, yields to the same or a more important class, at once;
2. busy with less important work, takes no more tickets, and is gone when that is done. What is still in flight when
   the grace is over ends with `Preempted`. Likewise with work of the same class, if the slot has its memory only
   because the demand, which was there before, could not use it yet and let the slot pass;
3. busy with work of the same class else, yields when it is idle next. Tickets that come after the demand may pass it as
   often and as long as they may pass a ticket (`max_overtakes`, `max_overtaken_s`), then none is let in any more. As
   there, a slot that has just loaded serves who waited for it, and one that works for somebody more important is not
   held;
4. loading, is cancelled if nobody waits for it, or only those whom case 2 would cut short; they wait on;
5. pinned, does not yield to leases: pinning says that the memory is not for others to plan with, be it for this pool's
   other models or for holders outside. (Its lease stands in class 0, so that the ledger seldom asks.) A person's wish
   is another thing, as is a lease that a person asks for over pinned models: whoever may say that a slot shall go may
   also say it of a pinned one;
6. leaving already, just goes on, but what is in flight may be cut short by case 2.

A slot defends itself with the class it has towards other models, or with that of a ticket that waits for it and was
there before the demand. (Among the tickets a demand ages as they do; whom it may cut short, its own class says.) Its
memory is promised to the demand from then on, and it comes back by itself when there is room again
(`returning.py`). A person's wish is served like the most important demand there can be, but nothing is
promised, and the slot stays out until somebody asks for its model.
"""

from __future__ import annotations

from gpuboss.priority import OVER_PINNED, name_of
from inference import refusals
from inference.board import Board
from inference.demand import Demand, Notice
from inference.overtaking import Overtaking
from inference.queue import Aged, Entry
from inference.slot_state import LEAVING, SlotState
from inference.slot_view import SlotRecord


class Yielding:
    """The demands during one planning pass."""

    __slots__ = ("_aged", "_board", "_overtaking")

    def __init__(self, board: Board, overtaking: Overtaking, aged: Aged) -> None:
        self._board = board
        self._overtaking = overtaking
        self._aged = aged

    def run(self) -> bool:
        """Let those go whose time has come; True if anybody's had."""
        went = [
            self._consider(slot, slot.notice, self._board.demands[slot.notice.by])
            for slot in self._board.slots.values()
            if slot.notice is not None
        ]
        return any(went)

    def forbids(self, slot: SlotRecord, entry: Entry) -> bool:
        """May the ready slot not take this ticket now, for somebody outside has been passed long enough (case 3)?"""
        demand = self._demand_on(slot)
        if demand is None or not self._comes_before(demand, entry):
            return False
        now_s, limits = self._board.now_s, self._board.limits
        if slot.owes(entry, now_s, limits.max_overtaken_s) or self._defends(slot, demand) < demand.priority:
            return False
        return demand.overdue(now_s, limits)

    def granted(self, slot: SlotRecord, entry: Entry) -> None:
        """Count a grant against whom it overtakes."""
        demand = self._demand_on(slot)
        if demand is not None and self._comes_before(demand, entry):
            demand.count(self._board.now_s)

    def _comes_before(self, demand: Demand, entry: Entry) -> bool:
        return demand.comes_before(entry, self._board.now_s, self._board.limits.aging_s)

    def _demand_on(self, slot: SlotRecord) -> Demand | None:
        """Whom the slot would yield to; None where it has no notice, or need not heed it (case 5)."""
        if slot.notice is None:
            return None
        demand = self._board.demands[slot.notice.by]
        return None if slot.model.pin and demand.priority != OVER_PINNED else demand

    def _consider(self, slot: SlotRecord, notice: Notice, demand: Demand) -> bool:
        if self._demand_on(slot) is None:
            return False
        match slot.state:
            case SlotState.READY if self._yields(slot, demand):
                self._give_way(slot, demand)
                return True
            case SlotState.LOADING if self._load_yields(slot, demand):
                self._give_way(slot, demand)
                return True
            case SlotState.DRAINING if self._board.now_s >= notice.deadline_s and self._may_cut(slot, demand):
                reason = f"the grace that {_named(demand)} gives is over"
                self._board.cut_short(slot, reason, refusals.preempted(slot.model.id, demand))
                return True
            case _:
                return False

    def _yields(self, slot: SlotRecord, demand: Demand) -> bool:
        """Cases 1 to 3."""
        defends = self._defends(slot, demand)
        if self._outranks(demand, slot, defends):
            return True
        return demand.priority == defends and not slot.in_flight and not self._takes_one(slot)

    def _load_yields(self, slot: SlotRecord, demand: Demand) -> bool:
        """Case 4."""
        line = self._board.line
        if not line.wants(slot.model.id):
            return True
        return self._outranks(demand, slot, line.leader(slot.model.id, self._aged).priority)

    def _defends(self, slot: SlotRecord, demand: Demand) -> int:
        priority = self._board.priority_of(slot)
        first = self._board.line.next_for_ready(slot.model.id, self._aged)
        return priority if first is None or self._comes_before(demand, first) else min(priority, first.priority)

    def _takes_one(self, slot: SlotRecord) -> bool:
        """Is there a ticket that the idle slot is granted in this very pass?"""
        entry = self._board.line.next_for_ready(slot.model.id, self._aged)
        others = (other for other in self._board.slots.of(slot.model.id) if other is not slot)
        if entry is None or any(other.has_place and other.notice is None for other in others):
            return False
        return not (self._overtaking.forbids(slot, entry) or self.forbids(slot, entry))

    def _may_cut(self, slot: SlotRecord, demand: Demand) -> bool:
        return all(self._outranks(demand, slot, entry.priority) for entry in slot.in_flight.values())

    @staticmethod
    def _outranks(demand: Demand, slot: SlotRecord, priority: int) -> bool:
        """Case 2: does work of this class on the slot yield to the demand although it is not done?"""
        if demand.priority == priority == slot.lease_priority:
            return slot.notice is not None and slot.notice.outranks
        return demand.priority < priority

    def _give_way(self, slot: SlotRecord, demand: Demand) -> None:
        self._board.give_way(slot, demand, f"yields to {_named(demand)}")


def heed(board: Board, slot: SlotRecord) -> None:
    """A notice has just come: one that is leaving already (case 6) says so at once."""
    if slot.state in LEAVING and slot.notice is not None:
        board.acknowledge(slot)


def _named(demand: Demand) -> str:
    return "a person" if not demand.by else f"{demand.holder} (class {name_of(demand.priority)})"
