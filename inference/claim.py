"""What a ticket that waits for room has suffered, and from whom it wants that room. Kept on the board, one per model.

Written by `overtaking.py`, which says what the words mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.events import Shares
from inference.queue import Entry, QueueLimits, WaitingLine


@dataclass(slots=True, eq=False)
class Claim:
    """The claim of the ticket that leads the queue of a model which is not loaded."""

    model_id: str
    leader: Entry
    """With the class it has risen to."""
    owner: str
    """Id of the ticket whose overtakings are counted: the one that led when they began."""
    overtakes: int = 0
    since_s: float | None = None
    """Moment of the first overtaking, or since when rivals stay only because they were just loaded; None before it."""
    rivals: frozenset[str] = frozenset()
    """The slots that would have to go; empty when no set of them would do."""
    shares: Shares | None = None
    """Where the model would go once the rivals are gone."""
    version: int = -1
    """Layout (`Board.version`) the rivals were found for."""

    def lead(self, entry: Entry, line: WaitingLine) -> None:
        """Note who leads now. Overtakings of a ticket that left pass to the next if it was there when they began."""
        self.leader = entry
        if self.since_s is None:
            self.owner = entry.ticket.id
        elif self.owner not in line:
            self.owner = entry.ticket.id
            if entry.submitted_at_s > self.since_s:
                self.overtakes, self.since_s = 0, None

    def count(self, granted: Entry, now_s: float) -> None:
        """A rival took this ticket."""
        if granted.passes(self.leader):
            self.overtakes += 1
            self.since_s = now_s if self.since_s is None else self.since_s

    def wait(self, now_s: float) -> None:
        """A rival stays only because it was just loaded."""
        self.since_s = now_s if self.since_s is None else self.since_s

    def overdue(self, now_s: float, limits: QueueLimits) -> bool:
        """Has the leader been overtaken often or long enough?"""
        return worn_out(self.overtakes, self.since_s, now_s, limits)


def worn_out(overtakes: int, since_s: float | None, now_s: float, limits: QueueLimits) -> bool:
    """Has somebody been overtaken often or, `since_s` being the first time, long enough?"""
    if overtakes >= limits.max_overtakes:
        return True
    return since_s is not None and now_s - since_s >= limits.max_overtaken_s
