"""The bounds of the warm bump: how often tickets for loaded models may pass one whose model is not loaded.

Called by `plan.py`; calls `eviction.py` for who would have to go, and `placement.py`.

A claim belongs to the ticket that leads the queue of such a model while it waits for room. Its rivals are the slots
that would have to go for it. A grant on a rival to a ticket that comes after the leader (of a less important class, or
of the same and submitted later, whatever place was kept for it) is an overtaking. After `max_overtakes` of them, or
`max_overtaken_s` from the first (or from when it waits for a rival only because that was just loaded), the claim is
overdue: its rivals take no further ticket that comes after the leader until that had its turn, and `min_residency_s`
protects them no more. But

1. no rival is held while one of them works in a class that keeps it from yielding: the others would idle in vain; and
2. a slot that has just loaded takes one batch of those who waited for it, or its load would have been in vain; and more
   of them for `max_overtaken_s`. With more waiting, turns get longer, and swaps fewer. Who comes later is no exception.

The turn of a leader ends its claim; the ticket that leads next starts with none.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference.board import Board
from inference.breaker import MayStart
from inference.claim import Claim
from inference.eviction import Candidate, choose
from inference.placement import once_gone, place, reach
from inference.queue import Entry
from inference.sight import Sight
from inference.slot_view import SlotRecord


class Overtaking:
    """The claims during one planning pass."""

    __slots__ = ("_board", "_held", "_holding", "_sight")

    def __init__(self, board: Board, sight: Sight) -> None:
        self._board = board
        self._sight = sight
        self._held: dict[str, Entry] = {}
        """By rival, the first of the overdue leaders it is held for."""
        self._holding: list[tuple[Claim, frozenset[str]]] = []
        """The claims that hold somebody, and whom."""

    def hold_rivals(self) -> None:
        """Find out, before anything is granted, whom overdue claims hold."""
        for claim in self._board.claims.values():
            self._hold_if_overdue(claim)

    @property
    def unsettled(self) -> bool:
        """Have decisions of this pass ended a hold? A turn did, or a rival's taking work of a class that keeps it."""
        return any(claim.rivals != rivals or not self.stands(claim) for claim, rivals in self._holding)

    def forbids(self, slot: SlotRecord, entry: Entry) -> bool:
        """May the ready slot not take this ticket now?"""
        leader = self._held.get(slot.id)
        if leader is None or not entry.passes(leader):
            return False
        board = self._board
        return not slot.owes(entry, board.now_s, board.limits.max_overtaken_s)  # case 2

    def granted(self, slot: SlotRecord, entry: Entry) -> None:
        """Count a grant against those it overtakes."""
        for claim in self._board.claims.values():
            if slot.id in claim.rivals:
                claim.count(entry, self._board.now_s)
                self._hold_if_overdue(claim)

    def stands(self, claim: Claim) -> bool:
        """Do its rivals suffice, and will they yield once they are idle (case 1)?"""
        if claim.version != self._board.version or not claim.rivals:
            return False
        slots, priority = self._board.slots, claim.leader.priority
        return all(self._board.priority_of(slots[rival]) >= priority for rival in claim.rivals)

    def find_rivals(self, claim: Claim, *, search: bool = True) -> bool:
        """Make the claim stand, if it can; without `search`, only if it does with the rivals it has.

        It keeps those while they will do: changing its mind, it would hold everybody a little. Where nobody will do
        (too important, or another claim's turn comes first), it counts what those take who would otherwise have to go.
        """
        rooms, everyone = self._sight.rooms, self._sight.candidates
        need, priority = self._board.claim_of(claim.model_id), claim.leader.priority
        groups = rooms.groups
        present = [candidate for candidate in everyone if candidate.slot_id in claim.rivals]
        found: Sequence[Candidate] = [candidate for candidate in present if candidate.will_yield_to(priority)]
        free = rooms.total()
        if need > reach(once_gone(free, found), groups):
            willing = [candidate for candidate in everyone if candidate.will_yield_to(priority)] if search else ()
            found = choose(need, free, willing, groups) or ()
        stands = bool(found)
        if not stands:
            free = rooms.total(kept=True)
            enough = need <= reach(once_gone(free, present), groups)
            found = present if enough else choose(need, free, everyone, groups) or ()
        ways = place(need, once_gone(free, found), groups) if found else ()
        claim.rivals = frozenset(candidate.slot_id for candidate in found)
        claim.shares = ways[0] if ways else None
        claim.version = self._board.version
        return stands

    def _hold_if_overdue(self, claim: Claim) -> None:
        if not claim.overdue(self._board.now_s, self._board.limits) or not self._may_load(claim.model_id):
            return
        if self.stands(claim) or (claim.version != self._board.version and self.find_rivals(claim)):
            self._holding.append((claim, claim.rivals))
            for rival in claim.rivals:
                self._held[rival] = min(self._held.get(rival, claim.leader), claim.leader)

    def _may_load(self, model_id: str) -> bool:
        """Could it be loaded if its rivals went? Not while its engine rests after a failure, or its slot leaves."""
        board = self._board
        if any(slot.settled for slot in board.slots.of(model_id)):
            return False
        return isinstance(board.breaker_state(model_id), MayStart)
