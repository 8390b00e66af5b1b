"""What the store must contain, as the checker knows it from what was said and heard. Standard library only.

Changed by `tests.faults.commands` and `tests.faults.events` as the trace goes on, and compared with what the store
shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["HELD", "LONGEST_STEP_MS", "OVER", "Books", "Lease", "Notice", "Violation"]

HELD = frozenset({"granted", "active", "ending"})
OVER = frozenset({"freed", "refused", "cancelled"})
LONGEST_STEP_MS = 2000
"""The ledger's clock follows the server's in steps of 0 to this."""
KEPT_MS = 20_000
"""How long memory that was given up for a waiter is kept for it alone."""

Option = Mapping[str, int]


class Violation(AssertionError):
    """A promise was broken."""


class Notice:
    """Somebody was told to yield."""

    __slots__ = ("acked", "at", "by", "grace", "is_past", "is_repeated", "outranks", "priority")

    def __init__(self, by: str, priority: int, at: int, grace: int, *, outranks: bool) -> None:
        self.by = by
        """The waiter's lease, empty for a person."""
        self.priority = priority
        self.at = at
        """On the ledger's clock."""
        self.grace = grace
        """Until its holder may be ended, in ms."""
        self.outranks = outranks
        """Else it is a slot, which need not yield before it is idle."""
        self.acked = False
        self.is_past = False
        """Who it was for has asked for something else since."""
        self.is_repeated = False
        """Its holder had notice already, but only to yield when idle."""

    def copy(self) -> Notice:
        """One that changes by itself."""
        twin = Notice(self.by, self.priority, self.at, self.grace, outranks=self.outranks)
        twin.acked, twin.is_past, twin.is_repeated = self.acked, self.is_past, self.is_repeated
        return twin


class Lease:
    """One lease; made from what was asked for or from a row that a node asserted."""

    __slots__ = (
        *("adopts", "deadline", "fence", "fitting", "given", "grace", "id", "kept", "kind", "marks", "node", "notice"),
        *("observed", "options", "order", "owner", "preemptible", "priority", "resized", "resized_to", "revision"),
        *("shares", "state", "ttl", "was"),
    )

    def __init__(self, lease_id: str, state: str) -> None:
        self.id = lease_id
        self.state = state
        self.was = ""
        """What it was before it was ending."""
        self.node = ""
        self.owner = ""
        self.kind = ""
        self.priority = 0
        self.order = 0
        self.options: list[Option] = []
        self.shares: Option = {}
        self.observed: Option = {}
        self.adopts: Option = {}
        self.fence: tuple[int, int] | None = None
        self.deadline: int | None = None
        """On the ledger's clock."""
        self.ttl = 0
        """Of a lease that its holder itself renews, in ms; else 0."""
        self.preemptible = False
        self.grace = 0
        self.notice: Notice | None = None
        self.revision = 0
        self.resized_to = ""
        """The options that it was given while it waited, as they were sent."""
        self.resized: tuple[int, int] = (0, 0)
        """In which epoch a holder was given other shares, and when, on the ledger's clock."""
        self.kept = 0
        """Until when memory that was given up for it is kept for it, on the ledger's clock."""
        self.given: frozenset[str] = frozenset()
        """On which devices."""
        self.fitting: list[int] = []
        """Which of its options could ever fit, when `marks` was last made from them."""
        self.marks: list[int] = []
        """Those of them that nobody behind it was granted a device of: it may have earmarked these."""

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands in the queue."""
        return (self.priority, self.order)

    @property
    def uses(self) -> Option:
        """What comes back when it ends."""
        return {name: max(size, self.observed.get(name, 0)) for name, size in self.shares.items()}

    def copy(self) -> Lease:
        """One that changes by itself."""
        twin = Lease(self.id, self.state)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.notice = self.notice and self.notice.copy()
        return twin


class Books:
    """Leases, devices and the clock."""

    waiting_ttl = 15_000
    """How long a lease that nobody renews stands, in ms."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.nodes: dict[str, dict[str, dict[str, Any]]] = {}
        """What each node said last of its devices."""
        self.synced: set[str] = set()
        """Nodes that synced in this epoch."""
        self.epoch: int | None = None
        self.begun = 0
        """In which life of the server the epoch began."""
        self.clock: int | None = None
        self.seen = 0
        """The server's clock at the last script."""

    def copy(self) -> Books:
        """What a snapshot file remembers."""
        twin = Books()
        twin.leases = {lease_id: lease.copy() for lease_id, lease in self.leases.items()}
        twin.nodes = {
            node: {name: dict(entry) for name, entry in devices.items()} for node, devices in self.nodes.items()
        }
        twin.synced = set(self.synced)
        twin.epoch, twin.begun, twin.clock, twin.seen = self.epoch, self.begun, self.clock, self.seen
        return twin

    @property
    def now(self) -> int:
        """The ledger's clock."""
        if self.clock is None:
            raise Violation("a store without a clock answered")
        return self.clock

    def pass_time(self, server_ms: int) -> None:
        """A script ran when the server's clock said so."""
        if self.clock is None:
            self.clock = server_ms
        else:
            self.clock += min(max(server_ms - self.seen, 0), LONGEST_STEP_MS)
        self.seen = server_ms

    def waiters(self) -> list[Lease]:
        """In queue order."""
        return sorted((lease for lease in self.leases.values() if lease.state == "queued"), key=lambda one: one.place)

    def held(self) -> Iterable[Lease]:
        """Leases that count."""
        return (lease for lease in self.leases.values() if lease.state in HELD)

    def entries(self) -> dict[str, dict[str, Any]]:
        """What synced nodes said of their devices."""
        return {name: entry for node in self.synced for name, entry in self.nodes[node].items()}

    def caps(self) -> dict[str, int]:
        """What each device of a synced node could give if nobody used it."""
        return {name: entry["total"] - entry["reserve"] for name, entry in self.entries().items()}

    def free(self) -> dict[str, int]:
        """Effective free of each device of a synced node."""
        entries = self.entries()
        free = {
            name: entry["total"] - entry["reserve"] - entry["foreign"] - entry["residual"]
            for name, entry in entries.items()
        }
        adopted: dict[str, int] = {}
        for lease in self.leases.values():
            if lease.state in HELD:
                observed = lease.observed
                for name, size in lease.shares.items():
                    if name in free:
                        free[name] -= max(size, observed.get(name, 0)) if observed else size
                        if lease.adopts:
                            adopted[name] = adopted.get(name, 0) + min(size, lease.adopts.get(name, 0))
        for name, size in adopted.items():
            free[name] += min(size, entries[name]["foreign"])
        return free

    def wanted(self, lease: Lease, option: Option) -> Option:
        """What an option takes of what is free: not what its holder uses already, which counts as foreign till then."""
        if not lease.adopts:
            return option
        left = {name: entry["foreign"] for name, entry in self.entries().items()}
        for other in self.held():
            for name, size in other.adopts.items():
                if name in left:
                    left[name] -= min(size, other.shares.get(name, 0))
        return {
            name: size - max(0, min(size, lease.adopts.get(name, 0), left.get(name, 0)))
            for name, size in option.items()
        }

    def renew(self, lease: Lease) -> None:
        """Somebody wants it still. One with notice that its holder itself renews is not renewed beyond its grace."""
        by_word = lease.ttl if lease.state in HELD else 0
        lease.deadline = self.now + (by_word or self.waiting_ttl)
        if by_word and lease.notice and lease.notice.outranks:
            lease.deadline = min(lease.deadline, lease.notice.at + lease.notice.grace)

    def give_up(self, lease: Lease) -> None:
        """A holder with notice ended: what it had is kept for whom it yielded to, until a driver has had time."""
        waiter = lease.notice and self.leases.get(lease.notice.by)
        if waiter and waiter.state == "queued" and lease.notice and not lease.notice.is_past:
            waiter.given = (waiter.given if waiter.kept > self.now else frozenset()) | lease.shares.keys()
            waiter.kept = self.now + KEPT_MS

    def emptied_for(self, waiter: Lease) -> set[str]:
        """Devices on which holders yield for what this waiter asks for now, or just did."""
        told = [holder for holder in self.noticed_for(waiter) if holder.notice and not holder.notice.is_past]
        names = {name for holder in told for name in holder.shares}
        return names | waiter.given if waiter.kept > self.now else names

    def noticed_for(self, waiter: Lease) -> list[Lease]:
        """Holders that must yield to this waiter."""
        return [lease for lease in self.held() if lease.notice and lease.notice.by == waiter.id]
