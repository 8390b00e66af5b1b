"""What every command has to do with a lease: renew it, compare what the store shows of it. Standard library only.

The base of `asker_commands`, `holder_commands` and `node_commands`; its own base, `tests.faults.events`, sees what the
store said on its stream.
"""

from __future__ import annotations

import json
from typing import Any

from tests.faults.books import HELD, OVER, Lease, Violation
from tests.faults.events import Events

__all__ = ["Views"]

Record = dict[str, Any]


class Views(Events):
    """Replies against the checker's books."""

    def _touch(self, lease: Lease) -> None:
        """Its asker wants it still: a waiter, or one that is granted and not begun."""
        if lease.state == "queued":
            self.books.renew(lease)
        elif lease.ttl:
            return
        elif lease.state == "granted" or (lease.state == "ending" and lease.was == "granted"):
            self._revive(lease)

    def _revive(self, lease: Lease) -> None:
        """Its holder, or who is about to be that, lives; the stream may tell."""
        if lease.state == "ending":
            lease.state = lease.was
            self._may[lease.id] = "revived"
            self._count("revived")
        self.books.renew(lease)

    def _of_fence(self, *, over_is_stale: bool = False) -> Lease | None:
        """The lease that the command means; None, and nothing may have changed, when its fence is not the lease's."""
        told, reply = self._told, self._reply
        lease = self.books.leases.get(told["id"])
        if lease is not None and lease.state in OVER and not over_is_stale:
            if reply["status"] != "ok" or self._events:
                raise Violation(f"{lease.id} is {lease.state}; the store says {reply} and did {self._events}")
            return lease
        if lease is None or lease.state not in HELD or lease.fence != (told["epoch"], told["seq"]):
            self._must_be_inert()
            return None
        if reply["status"] != "ok":
            raise Violation(f"{told} is about {lease.id}, which is {lease.state}; the store says {reply}")
        return lease

    def _must_be_inert(self) -> None:
        if self._reply["status"] != "stale" or self._events:
            raise Violation(f"the stale {self._told} was answered {self._reply} and did {self._events}")
        self._count("stale")

    def _remember_over(self, state: str) -> None:
        """A lease that the store does not know is over from now on, so that no late command brings it back."""
        self.books.leases[self._told["id"]] = Lease(self._told["id"], state)
        if [event["what"] for event in self._events] != [state] or self._reply["state"] != state:
            raise Violation(f"{self._told} was answered {self._reply}, and did {self._events}")

    def _compare(self, view: Record) -> None:
        """What the store shows of a lease against the books."""
        lease = self.books.leases.get(view["id"])
        if lease is None or lease.state != view["state"]:
            raise Violation(f"{view['id']} is {lease and lease.state}; the store says {view}")
        if "holder" not in view:
            return
        fence = (view["epoch"], view["seq"]) if "epoch" in view else None
        if lease.fence != fence or (lease.state in HELD and json.loads(view["shares"]) != lease.shares):
            raise Violation(f"{lease.id} has fence {lease.fence} and {lease.shares}; the store says {view}")
        if lease.priority != view["priority"] or lease.order != view["order"]:
            raise Violation(f"{lease.id} has priority {lease.priority}, order {lease.order}; the store says {view}")
        shown, notice = view.get("notice"), lease.notice if lease.state in HELD else None
        if (shown is None) != (notice is None):
            raise Violation(f"{lease.id} has notice {notice and notice.by}; the store says {view}")
        if shown and notice and (shown["by"], shown["acked"]) != (notice.by, notice.acked):
            raise Violation(f"{lease.id} has notice by {notice.by}, {notice.acked=}; the store says {shown}")
