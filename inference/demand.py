"""Somebody outside who waits for memory that slots hold, and what they suffered. Kept on the board, one per waiter.

Written by `board.py` and `yielding.py`, which says what the words mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.claim import worn_out
from inference.queue import Entry, QueueLimits, risen


@dataclass(slots=True, eq=False)
class Demand:
    """A lease that waits in the ledger, or a person's wish, for whose sake slots got notice."""

    by: str
    """The lease's id; empty for a person."""
    holder: str
    """For people."""
    priority: int
    """The waiting lease's class; of a person's wish, `OVER_PINNED`."""
    since_s: float
    """When it was first heard of: its place among the tickets of its class."""
    overtakes: int = 0
    """Tickets that came after it and were granted on a slot that has notice."""
    overtaken_since_s: float | None = None
    """Moment of the first such overtaking."""

    def comes_before(self, entry: Entry, now_s: float, aging_s: float) -> bool:
        """Is this demand more important than the ticket, or of its class and there before it, whatever place it kept?

        It ages as tickets do, or those that wait for a long request to end would rise above it, one after the other.
        """
        aged = risen(self.priority, int((now_s - self.since_s) / aging_s))
        return (aged, self.since_s) < (entry.priority, entry.ticket.submitted_at_s)

    def count(self, now_s: float) -> None:
        """A slot that has notice took a ticket that came after."""
        self.overtakes += 1
        self.overtaken_since_s = now_s if self.overtaken_since_s is None else self.overtaken_since_s

    def overdue(self, now_s: float, limits: QueueLimits) -> bool:
        """Has it been overtaken often or long enough?"""
        return worn_out(self.overtakes, self.overtaken_since_s, now_s, limits)


@dataclass(frozen=True, slots=True)
class Notice:
    """What one slot was told."""

    by: str
    """The demand's id."""
    deadline_s: float
    """When the grace is over, monotonic."""
    outranks: bool
    """The demand, if of the class of the slot's lease, was there first and let the slot pass."""
