"""What askers send to the store, and what it replies, against the checker's books. Standard library only.

A base of `tests.faults.commands`.
"""

from __future__ import annotations

import json
from typing import Any

from tests.faults.books import OVER, Lease, Violation
from tests.faults.queue_rules import check_overtaking, could_ever_fit, forget_marks
from tests.faults.views import Views

__all__ = ["AskerCommands"]

Record = dict[str, Any]
_LAST = 1 << 60
"""A place behind everybody of the same class."""


class AskerCommands(Views):
    """`acquire`, `look`, `resize`, `cancel`."""

    def _acquire(self) -> None:
        told, reply, books = self._told, self._reply, self.books
        known = books.leases.get(told["id"])
        if known is not None:
            if reply["status"] != "ok":
                raise Violation(f"{known.id} is {known.state}, and asking for it again was answered {reply}")
            self._touch(known)
        else:
            options = json.loads(told["options"])
            if not self._is_possible(options):
                return
            self._queue(told, options, reply["lease"]["order"])
        self._see_events()
        self._compare(reply["lease"])

    def _is_possible(self, options: list[Any]) -> bool:
        """Whether these may be asked for; the reply must say the same."""
        caps, synced = self.books.caps(), self.books.synced
        silent = any(name.partition("/")[0] not in synced for option in options for name in option)
        possible = any(could_ever_fit(option, caps) for option in options)
        right = "unsynced" if silent else "ok" if possible else "refused"
        if self._reply["status"] != right or (right != "ok" and self._events):
            raise Violation(f"{options} were answered {self._reply}: {right} would be right, the devices give {caps}")
        return right == "ok"

    def _queue(self, told: Record, options: list[Any], order: int) -> None:
        lease = Lease(told["id"], "queued")
        lease.options, lease.order = options, order
        lease.node, lease.owner, lease.kind, lease.priority = (
            told["node"],
            told["owner"],
            told["kind"],
            told["priority"],
        )
        lease.preemptible = told.get("preemptible", False) or told["kind"] == "slot"
        lease.grace, lease.ttl = told.get("grace_ms", 30_000), told.get("lease_ttl_ms", 0)
        lease.adopts = json.loads(told.get("adopts", "{}"))
        if "order" in told and told["order"] != order:
            raise Violation(f"{lease.id} had place {told['order']} and came back at {order}")
        ahead = [other.id for other in self.books.leases.values() if other.state == "queued" and other.order >= order]
        if "order" not in told and ahead:
            raise Violation(f"{lease.id} arrived last and got place {order}, before {ahead}")
        self.books.leases[lease.id] = lease
        self.books.renew(lease)

    def _look(self) -> None:
        known = [lease_id for lease_id in self._told["ids"] if lease_id in self.books.leases]
        for lease_id in known:
            self._touch(self.books.leases[lease_id])
        self._see_events()
        views = list(self._reply["leases"])
        if [view["id"] for view in views] != known:
            raise Violation(f"of {self._told['ids']} the store has {known}, and showed {views}")
        for view in views:
            self._compare(view)

    def _resize(self) -> None:
        told, reply, books = self._told, self._reply, self.books
        lease = books.leases.get(told["id"])
        if lease is None or lease.state in OVER:
            self._must_be_inert()
            return
        options = json.loads(told["options"]) if "options" in told else None
        if lease.state == "queued":
            if options is not None:
                if not self._is_possible(options):
                    return
                if options != lease.options:
                    lease.options, lease.resized_to = options, told["options"]
                    lease.kept = 0
                    for holder in books.noticed_for(lease):
                        if holder.notice:
                            holder.notice.is_past = True
                    forget_marks(lease)
            lease.priority = told.get("priority", lease.priority)
            self._touch(lease)
            self._see_events()
        else:
            if "epoch" not in told and told.get("options") == lease.resized_to and "priority" not in told:
                # It came a second time, and the first had it granted.
                if reply["status"] != "ok" or self._events:
                    raise Violation(f"the repeated {told} was answered {reply} and did {self._events}")
                self._compare(reply["lease"])
                return
            changes = options is not None and options[0] != lease.shares
            stale = changes and told.get("revision", lease.revision) != lease.revision
            if stale or (told.get("epoch"), told.get("seq")) != lease.fence:
                self._must_be_inert()
                return
            if reply["status"] == "refused":
                self._see_events()
                return
            self._change_shares(lease, options[0] if options is not None and changes else None)
        if reply["status"] != "ok":
            raise Violation(f"{lease.id} was resized; the store says {reply}")
        self._compare(reply["lease"])

    def _change_shares(self, lease: Lease, shares: dict[str, int] | None) -> None:
        """A holder has more or less from now on; whoever waits for what it wants more of has it first."""
        books, priority = self.books, self._told.get("priority", lease.priority)
        claims = {name: size for name, size in (shares or {}).items() if size > lease.shares.get(name, 0)}
        uses = lease.uses  # what it uses beyond its claim counts already
        grown = {name: size for name, size in claims.items() if size > uses.get(name, 0)}
        if claims:
            self._see_events()
            free = books.free()
            lease.priority = priority
            as_waiter = lease.copy()
            as_waiter.order = _LAST
            if grown:
                self._passed += [(as_waiter, waiter) for waiter in check_overtaking(books, as_waiter, grown, free)]
        if shares is not None:
            if shares.keys() != lease.shares.keys():
                raise Violation(f"{lease.id} has {lease.shares} and was resized to other devices: {shares}")
            lease.shares = shares
            lease.revision += 1
            lease.resized = (books.epoch or 0, books.now)
        lease.priority = priority
        uses, free = lease.uses, books.free()
        short = {name: size for name, size in claims.items() if free[name] + uses[name] < size}
        if short:
            raise Violation(f"{lease.id} now claims {short}, and free without it was {free}")
        self._see_events()

    def _cancel(self) -> None:
        lease = self.books.leases.get(self._told["id"])
        if lease is None:
            self._remember_over("cancelled")
            return
        if lease.state in ("queued", "granted") or (lease.state == "ending" and lease.was == "granted"):
            self._may[lease.id] = "cancelled"
        self._see_events()
        if self._reply["state"] != lease.state:
            raise Violation(f"{lease.id} was cancelled; the store says {self._reply}, it is {lease.state}")
