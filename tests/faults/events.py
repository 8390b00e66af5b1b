"""What the store says on its stream, event by event, against the checker's books. Standard library only.

The base of `tests.faults.commands`. An event must have a cause: a command that means it, or time.
"""

from __future__ import annotations

import json
from typing import Any

from tests.faults.books import HELD, OVER, Books, Lease, Notice, Violation
from tests.faults.memory import Memory
from tests.faults.notice_rules import check_disturbed, check_nobody_idle, may_have
from tests.faults.queue_rules import check_overtaking, could_ever_fit, first_grantable, fits, forget_marks

__all__ = ["Events"]

Record = dict[str, Any]


class Events:
    """The books, and what may happen to them."""

    def __init__(self) -> None:
        self.books = Books()
        self.memory = Memory()
        self.counts: dict[str, int] = {}
        """How often what happened: a history in which nothing happens proves nothing."""
        self.noticed_ms: dict[str, tuple[int, int, int]] = {}
        """Lease -> when its holder was first told to yield, by a clock that never jumps; its grace; `_hurried` then."""
        self._hurried = 0
        """By how much the ledger's clock can have gone ahead of real time because the server's jumped."""
        self._mono = 0
        self._told: Record = {}
        self._reply: Record = {}
        self._events: list[Record] = []
        self._shown: dict[str, Record] = {}
        """Lease -> fields that the store has of it after the command."""
        self._may: dict[str, str] = {}
        """Lease -> the state that the command under way may put it in."""
        self._new: set[str] = set()
        """What the command under way granted."""
        self._expires = False
        """Whether the command under way lets time expire leases."""
        self._fences: dict[tuple[int, int], str] = {}
        """Every fence that was ever given, and to which lease."""
        self._latest = (0, 0)
        """The fence that was given last in this life of the store."""
        self._entered: dict[str, tuple[int, int]] = {}
        """Start of a node -> the highest fence that was ever entered in its book."""
        self._entered_as: dict[str, tuple[int, int]] = {}
        """Lease -> the fence with which its node let its holder in."""
        self.boots: dict[str, str] = {}
        """Node -> its present start."""
        self._passed: list[tuple[Lease, Lease]] = []
        """Who was granted by the command under way what others may be giving up for somebody else."""
        self._disturbed: dict[str, list[Lease]] = {}
        """Waiter -> whom one command told to yield to it."""

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # -----------------------------------------------------------------------------------------------------------------

    def _see_events(self) -> None:
        """All that the command under way caused, in its order."""
        for event in self._events:
            lease = self.books.leases.get(event["lease"])
            if lease is None:
                raise Violation(f"an event about a lease that nobody asked for: {event}")
            if event["what"] != "notice":
                self._flush_disturbed()
            match event["what"]:
                case "granted":
                    self._granted(lease, event)
                case "active":
                    self._active(lease, event)
                case "ending":
                    if lease.state not in ("granted", "active") or lease.ttl:
                        raise Violation(f"{lease.id} is {lease.state} and was put into ending")
                    self._must_have_expired(lease)
                    lease.was, lease.state, lease.deadline = lease.state, "ending", None
                case "freed" | "cancelled":
                    self._over(lease, event["what"])
                case "refused":
                    self._refused(lease)
                case "notice":
                    self._notice(lease)
                case "withdrawn":
                    self._withdrawn(lease)
                case "queued":
                    if lease.state != "queued":
                        raise Violation(f"{lease.id} is {lease.state}, and the stream says it waits")
                case what:
                    raise Violation(f"an event that the checker does not know: {what}")
            self._count(event["what"])
        self._flush_disturbed()
        self._see_replaced_notices()
        self._events = []
        passed, self._passed = self._passed, []
        for lease, waiter in passed:
            if waiter.state == "queued" and not self.books.emptied_for(waiter).isdisjoint(lease.shares):
                raise Violation(f"{lease.id} was granted {lease.shares}, which others give up for {waiter.id}")

    def _granted(self, lease: Lease, event: Record) -> None:
        books = self.books
        fence = (int(event["epoch"]), int(event["seq"]))
        if self._may.get(lease.id) == "revived" and lease.state == "granted" and lease.fence == fence:
            return
        if fence in self._fences:
            raise Violation(f"fence {fence} was given to {self._fences[fence]} and to {lease.id}")
        self._fences[fence] = lease.id
        if fence[0] != books.epoch or (fence[0] == self._latest[0] and fence < self._latest):
            raise Violation(f"{lease.id} got fence {fence} in epoch {books.epoch}, after {self._latest}")
        self._latest = fence
        if lease.state != "queued":
            raise Violation(f"{lease.id} is {lease.state} and was granted")
        shares = json.loads(self._shown[lease.id]["shares"])
        if shares not in lease.options:
            raise Violation(f"{lease.id} asked for one of {lease.options} and was granted {shares}")
        for name in shares:
            node = name.partition("/")[0]
            if node not in books.synced:
                raise Violation(f"{lease.id} was granted {name} of a node that has not synced in this epoch")
            entered = self._entered.get(self.boots.get(node, node), (0, 0))
            if fence <= entered:
                raise Violation(f"{lease.id} got fence {fence} on {node}, in whose book stood {entered} already")
        free = books.free()
        if not fits(books.wanted(lease, shares), free):
            raise Violation(f"{lease.id} was granted {shares}, and free was {free}")
        self._passed += [(lease, waiter) for waiter in check_overtaking(books, lease, shares, free)]
        lease.shares, lease.fence, lease.state, lease.revision = shares, fence, "granted", 0
        self._new.add(lease.id)
        books.renew(lease)

    def _active(self, lease: Lease, event: Record) -> None:
        if lease.fence != (int(event["epoch"]), int(event["seq"])):
            raise Violation(f"{lease.id} has fence {lease.fence}, and the stream says {event}")
        if self._may.get(lease.id) == "revived" and lease.state == "active":
            return
        if self._may.get(lease.id) != "active":
            raise Violation(f"{lease.id} is {lease.state} and became active by a command that does not mean it")
        lease.state = "active"

    def _over(self, lease: Lease, state: str) -> None:
        """It ends by a command that means it, or by time where that may end it; never while its holder lives."""
        if self._may.get(lease.id) != state:
            if not self._expires:
                raise Violation(f"{lease.id} is {lease.state} and was {state} by a command that does not mean it")
            self._must_have_expired(lease)
            if state != ("cancelled" if lease.state == "queued" else "freed" if lease.ttl else ""):
                raise Violation(f"time made {state} of {lease.id}, which is {lease.state}")
            if lease.ttl and lease.id in self.memory.alive:
                self.memory.disown(lease.id)
        # A store that was rolled back may have it waiting: then it holds nothing there, and its row brings it back.
        is_forgotten = lease.state == "queued" and self._may.get(lease.id) != state
        if lease.id in self.memory.alive and not is_forgotten:
            raise Violation(f"{lease.id} was {state} while its holder lives")
        if state == "freed":
            self._keep_until_read(lease)
        self._forget_marks_by(lease)
        self.books.give_up(lease)
        lease.state, lease.deadline, lease.notice = state, None, None

    def _keep_until_read(self, lease: Lease) -> None:
        """Where a driver measures, memory of the dead counts until its node has read the device again."""
        for name, size in lease.uses.items():
            entry = self.books.nodes.get(lease.node, {}).get(name)
            if entry and entry["settles"]:
                entry["residual"] += size

    def _refused(self, lease: Lease) -> None:
        caps, synced = self.books.caps(), self.books.synced
        could = any(could_ever_fit(option, caps) for option in lease.options)
        unknown = any(name.partition("/")[0] not in synced for option in lease.options for name in option)
        if lease.state != "queued" or could or unknown:
            raise Violation(f"{lease.id} ({lease.state}) wants one of {lease.options} and was refused: {caps}")
        lease.state, lease.deadline = "refused", None

    def _must_have_expired(self, lease: Lease) -> None:
        if not self._expires or lease.deadline is None or self.books.now < lease.deadline:
            raise Violation(f"{lease.id} was ended by time at {self.books.now}; it had until {lease.deadline}")

    # Notices ---------------------------------------------------------------------------------------------------------

    def _notice(self, lease: Lease) -> None:
        shown = self._shown[lease.id]
        by, priority = shown["notice_by"], int(shown["notice_priority"])
        outranks = shown["notice_outranks"] == "1"
        if lease.state not in HELD:
            raise Violation(f"{lease.id} is {lease.state} and was told to yield")
        if lease.notice and (lease.notice.outranks or not outranks):
            raise Violation(f"{lease.id} was told to yield twice: {shown}")
        if not by:
            if self._may.get(lease.id) != "notice":
                raise Violation(f"{lease.id} was told to yield by nobody")
        elif by not in self.books.leases:
            raise Violation(f"{lease.id} was told to yield to {by}, which nobody knows")
        else:
            self._disturbed.setdefault(by, []).append(lease)
            forget_marks(self.books.leases[by])
        grace = self._told.get("grace_ms") if not by else None
        was_told = lease.notice is not None
        lease.notice = Notice(by, priority, self.books.now, lease.grace if grace is None else grace, outranks=outranks)
        lease.notice.is_repeated = was_told
        if lease.ttl and lease.deadline is not None:
            lease.deadline = min(lease.deadline, lease.notice.at + lease.notice.grace)
        if outranks:
            self.noticed_ms.setdefault(lease.id, (self._mono, lease.notice.grace, self._hurried))

    def _flush_disturbed(self) -> None:
        disturbed, self._disturbed = self._disturbed, {}
        for by, told in disturbed.items():
            check_disturbed(self.books, self.books.leases[by], told)

    def _withdrawn(self, lease: Lease) -> None:
        notice = lease.notice
        if notice is None or notice.acked or not notice.by:
            raise Violation(f"{lease.id} has notice {notice and (notice.by, notice.acked)}, and it was taken back")
        self._forget_marks_by(lease)
        lease.notice = None
        self.noticed_ms.pop(lease.id, None)

    def _see_replaced_notices(self) -> None:
        """Another waiter took the place of the one for whom a holder was told to yield."""
        for lease_id, shown in self._shown.items():
            lease = self.books.leases.get(lease_id)
            notice = lease and lease.notice
            if not lease or not notice or shown.get("notice_by", notice.by) == notice.by:
                continue
            waiter, before = self.books.leases.get(shown["notice_by"]), self.books.leases.get(notice.by)
            if waiter is None or not may_have(waiter, lease):
                raise Violation(f"{lease.id} had to yield to {notice.by}, now to {shown['notice_by']}")
            for one in (waiter, before):
                if one:
                    forget_marks(one)
            notice.by, notice.priority, notice.is_past = waiter.id, int(shown["notice_priority"]), False
            notice.outranks = shown["notice_outranks"] == "1"
            self._count("notice for another")

    def _forget_marks_by(self, lease: Lease) -> None:
        waiter = lease.notice and self.books.leases.get(lease.notice.by)
        if waiter:
            forget_marks(waiter)

    # What must be so after time was let pass -------------------------------------------------------------------------

    def _check_rest(self) -> None:
        """Nothing is overdue, nobody who could be granted waits, nobody must yield in vain."""
        books = self.books
        for lease in books.leases.values():
            if lease.state in OVER:
                continue
            if lease.deadline is not None and lease.deadline <= books.now:
                raise Violation(f"{lease.id} is {lease.state}, had until {lease.deadline}, and it is {books.now}")
            notice = lease.notice
            if notice and notice.by and not notice.acked and books.leases[notice.by].state != "queued":
                raise Violation(f"{lease.id} must yield to {notice.by}, which does not wait any more")
        waiter = first_grantable(books, books.waiters(), books.free())
        if waiter is not None:
            raise Violation(f"{waiter.id} waits for one of {waiter.options}, and free is {books.free()}")
        check_nobody_idle(books, self._new)
