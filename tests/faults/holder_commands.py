"""What holders send to the store, and what it replies, against the checker's books. Standard library only.

A base of `tests.faults.commands`.
"""

from __future__ import annotations

from tests.faults.books import HELD, OVER, Violation
from tests.faults.views import Views

__all__ = ["HolderCommands"]


class HolderCommands(Views):
    """`activate`, `renew_many`, `ack`, `preempt`, `release`."""

    def _activate(self) -> None:
        lease = self._of_fence()
        if lease is not None:
            if lease.state in HELD - {"active"}:
                self._may[lease.id] = "active"
                was, lease.state = lease.state, "active"
                self.books.renew(lease)
                lease.state = was
            self._see_events()
            self._compare(self._reply["lease"])

    def _renew_many(self) -> None:
        renewed, stale, unknown = [], [], []
        for told in self._told["leases"]:
            lease = self.books.leases.get(told["id"])
            if lease is None:
                unknown.append(told["id"])
            elif lease.state not in HELD or lease.fence != (told["epoch"], told["seq"]):
                stale.append(told["id"])
            else:
                renewed.append(lease.id)
                self._revive(lease)
        self._see_events()
        said = self._reply
        if (
            [view["id"] for view in said["renewed"]] != renewed
            or [*said["stale"]] != stale
            or [*said["unknown"]] != unknown
        ):
            raise Violation(f"{renewed} could be renewed, {stale} are stale, {unknown} unknown; the store says {said}")
        for view in said["renewed"]:
            self._compare(view)
        self.counts["stale"] = self.counts.get("stale", 0) + len(stale)

    def _ack(self) -> None:
        lease = self._of_fence(over_is_stale=True)
        if lease is not None:
            if lease.notice:
                lease.notice.acked = True
            self._see_events()
            self._compare(self._reply["lease"])

    def _preempt(self) -> None:
        lease, status = self.books.leases.get(self._told["id"]), self._reply["status"]
        right = "stale" if lease is None else "ok" if lease.state in HELD else "over"
        if status != right:
            raise Violation(f"{self._told} was answered {self._reply}: {right} would be right")
        if lease is None or lease.state not in HELD:
            return
        self._may[lease.id] = "notice"
        if lease.notice:
            grace = lease.notice.grace
            if "grace_ms" in self._told:
                from_now = self.books.now - lease.notice.at + self._told["grace_ms"]
                grace = min(grace, from_now) if lease.notice.outranks else self._told["grace_ms"]
            lease.notice.by, lease.notice.priority, lease.notice.grace = "", 0, grace
            if lease.id in self.noticed_ms:
                since, _, hurried = self.noticed_ms[lease.id]
                self.noticed_ms[lease.id] = (since, grace, hurried)
            if lease.ttl and lease.deadline is not None:
                lease.deadline = min(lease.deadline, lease.notice.at + grace)
            if lease.notice.outranks:
                self._shown.pop(lease.id, None)
        self._see_events()
        self._compare(self._reply["lease"])

    def _release(self) -> None:
        if self._told["id"] not in self.books.leases:
            self._remember_over("freed")
            return
        lease = self.books.leases[self._told["id"]]
        if lease.state == "queued":
            self._may[lease.id] = "cancelled"
            if (self._told["epoch"], self._told["seq"]) != self._entered_as.get(lease.id):
                self.memory.disown(lease.id)  # a lie that only a store could tell which had not forgotten the fence
        elif self._of_fence() is None:
            return
        elif lease.state in HELD:
            self._may[lease.id] = "freed"
        self._see_events()
        if self._reply["status"] != "ok" or self._reply["state"] != lease.state or lease.state not in OVER:
            raise Violation(f"{lease.id} was released; the store says {self._reply}, it is {lease.state}")
