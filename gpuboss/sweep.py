"""Which leases and rows have no living holder. Pure: the caller says who lives.

Called by `gpuboss.beats` after every look at the node. Evidence alone counts: a process that cannot be seen from here
(another pid namespace) and has left no lock file (`gpuboss.holders`) is never taken for dead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.leases import Fence, LeaseState
from gpuboss.ledger_rows import LedgerRow

__all__ = ["StoredLease", "dead_leases", "dead_rows"]

Look = Callable[[ProcessIdentity], Liveness]
LookAtHolder = Callable[[str, ProcessIdentity], Liveness]
"""Whether the process lives that holds the lease of this id."""


@dataclass(frozen=True, slots=True)
class StoredLease:
    """A lease of this node as the store has it, as far as a keeper needs it."""

    id: str
    state: LeaseState
    fence: Fence | None
    """None for a waiter."""
    owner: ProcessIdentity
    """The process that asked for it."""


def dead_rows(rows: Iterable[LedgerRow], look: LookAtHolder) -> list[LedgerRow]:
    """Rows whose holding process is dead. What it started may still live.

    A lease held by word has no process that could die: its end is the store's to say.
    """
    return [row for row in rows if row.process is not None and look(row.lease_id, row.process) is Liveness.DEAD]


def dead_leases(
    leases: Sequence[StoredLease], rows: Collection[str], vanished: Collection[str], look: Look
) -> list[StoredLease]:
    """Leases that nobody holds or wants any more.

    `rows` are the lease ids that the node ledger has, `vanished` those it had and has no more.

    1. A row stands: it is in use, whatever the store says.
    2. The row has vanished, also one that the store was never told of: its holder ended.
    3. Active or ending without a row: the same, or nobody ever made one and its asker asks no more.
    4. Queued or granted: as long as the process that asked for it lives. Lock files say nothing of those who ask; one
       that asks no more and cannot be seen is left to the store's clock.
    """
    found = []
    for lease in leases:
        if lease.id in rows:  # 1
            continue
        over = lease.id in vanished or lease.state in (LeaseState.ACTIVE, LeaseState.ENDING)  # 2, 3
        if over or look(lease.owner) is Liveness.DEAD:  # 4
            found.append(lease)
    return found
