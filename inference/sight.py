"""What one planning pass looks at more than once: the free room, and who could be evicted. Made only when asked for.

Made by `plan.py` for each pass, used by `plan.py` and `overtaking.py`; reads the board, calls `eviction.py`.
"""

from __future__ import annotations

import math

from inference.board import Board
from inference.eviction import UNWANTED, Activity, Candidate
from inference.placement import Rooms, reach
from inference.slot_state import LEAVING, SlotState
from inference.slot_view import SlotRecord


class Sight:
    """The board's room and candidates during one pass; the pass keeps them up to date with what it decides."""

    __slots__ = ("_board", "_candidates", "_reach_unpinned", "_resident", "_rooms", "_willing")

    def __init__(self, board: Board) -> None:
        self._board = board
        self._rooms: Rooms | None = None
        self._candidates: list[Candidate] | None = None
        self._willing: dict[tuple[int, bool], list[Candidate]] = {}
        self._resident: int | None = None
        self._reach_unpinned: float | None = None

    @property
    def rooms(self) -> Rooms:
        """Free bytes by device, less what this pass has given away."""
        if self._rooms is None:
            self._rooms = self._board.rooms()
        return self._rooms

    @property
    def candidates(self) -> list[Candidate]:
        """Every slot that is not pinned and not leaving already, in the order they would have to go."""
        if self._candidates is None:
            found = [self._candidate(slot) for slot in self._board.slots.values() if not slot.model.pin]
            self._candidates = sorted((one for one in found if one is not None), key=lambda one: one.rank)
        return self._candidates

    def willing(self, priority: int, *, overdue: bool) -> list[Candidate]:
        """The candidates that yield to a ticket of this class now."""
        found = self._willing.get((priority, overdue))
        if found is None:
            found = [one for one in self.candidates if one.yields_to(priority, overdue=overdue)]
            self._willing[priority, overdue] = found
        return found

    @property
    def resident(self) -> int:
        """The least important class of a candidate that is still there only because it was just loaded; -1 for none."""
        if self._resident is None:
            self._resident = max((one.priority for one in self.candidates if one.stays_on), default=-1)
        return self._resident

    @property
    def reach_unpinned(self) -> float:
        """The most bytes that would fit if only the pinned models were there; infinite when no model is pinned."""
        if self._reach_unpinned is None:
            self._reach_unpinned = self._find_reach_unpinned()
        return self._reach_unpinned

    def _find_reach_unpinned(self) -> float:
        board = self._board
        pinned = [slot for slot in board.slots.holders() if slot.model.pin and slot.state not in LEAVING]
        if not pinned:
            return math.inf
        rooms = {device.id: device.capacity_bytes for device in board.usable}
        for slot in pinned:
            for device, size in slot.shares.items():
                if device in rooms:
                    rooms[device] -= size
        return reach(rooms, board.groups)

    def forget_candidates(self) -> None:
        """A grant or a start has changed them."""
        self._candidates = self._resident = None
        self._willing.clear()

    def _candidate(self, slot: SlotRecord) -> Candidate | None:
        board = self._board
        priority, cost, resident = board.priority_of(slot), slot.cost_at(board.now_s), False
        if slot.state is SlotState.READY:
            activity = Activity.BUSY if slot.in_flight else Activity.IDLE
            resident = board.now_s < slot.resident_until_s(board.limits.min_residency_s)
        elif slot.state is not SlotState.LOADING:
            return None
        elif board.line.wants(slot.model.id):
            activity, cost = Activity.LOADING, math.inf
        elif board.is_orphaned(slot):
            activity = Activity.ORPHANED
        else:
            activity, priority, cost = Activity.UNWANTED, UNWANTED, 0.0
        return Candidate(slot.id, slot.shares, priority, activity, cost, resident)
