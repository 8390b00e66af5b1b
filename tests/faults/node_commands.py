"""What keepers send to the store, and what it replies, against the checker's books. Standard library only.

A base of `tests.faults.commands`.
"""

from __future__ import annotations

import json
from typing import Any

from tests.faults.books import HELD, OVER, Lease, Violation
from tests.faults.views import Views

__all__ = ["NodeCommands"]

Record = dict[str, Any]


class NodeCommands(Views):
    """`node_sync`, `confirm_dead`, `tick`, `snapshot`, `audit`."""

    def _enter_sync(self, record: Record) -> None:
        """A sync begins an epoch in a new life of the store, or where the store has fallen behind what its node saw."""
        books, epoch = self.books, record["reply"]["epoch"]
        before, seen = books.epoch or 0, record["told"]["seen_epoch"]
        books.pass_time(record["now"])
        # An epoch it has seen and never synced in here was another life's of the same name: the clock had gone back.
        seen_elsewhere = before == seen and record["told"]["node"] not in books.synced
        if books.begun == record["life"] and before >= seen and not seen_elsewhere:
            return
        if epoch <= max(before, seen) or epoch < record["now"]:
            raise Violation(f"epoch {epoch} began at {record['now']}, after {before}, and its node had seen {seen}")
        if not self._events or self._events[0]["what"] != "epoch":
            raise Violation("an epoch began and nobody was told")
        self._events = self._events[1:]
        books.epoch, books.begun, books.synced = epoch, record["life"], set()
        self._latest = (0, 0)

    def _node_sync(self) -> None:
        told, reply, books = self._told, self._reply, self.books
        gone, over = [], []
        for row in told["rows"]:
            lease = books.leases.get(row["id"])
            if lease and lease.state in OVER:
                if not row.get("insist"):
                    over.append(row["id"])
                elif row.get("lease_ttl_ms"):
                    gone.append(row["id"])
        if over or reply["status"] != "ok":
            if reply["status"] != "over" or sorted(reply["ids"]) != sorted(over) or self._events:
                raise Violation(f"rows of {over}, whose leases are over, were answered {reply} {self._events}")
            return
        if sorted(reply.get("over", ())) != sorted(gone):
            raise Violation(f"rows of {gone} are over for good; the store says {reply}")
        is_new = told["node"] not in books.synced
        books.synced.add(told["node"])
        books.nodes[told["node"]] = {name: dict(entry) for name, entry in told["devices"].items()}
        for row in told["rows"]:
            if row["id"] not in gone:
                self._assert_row(row, told["node"], is_new=is_new)
        self._see_events()
        self._check_rest()
        shown = {(view["id"], view["state"], view.get("epoch"), view.get("seq")) for view in reply["leases"]}
        here = {
            (lease.id, lease.state, *(lease.fence or (None, None)))
            for lease in books.leases.values()
            if lease.node == told["node"] and lease.state not in OVER
        }
        if shown != here:
            raise Violation(f"{told['node']} has the leases {here}; the store says {shown}")

    def _assert_row(self, row: Record, node: str, *, is_new: bool) -> None:
        """What runs is active, with the fence and the shares it runs with."""
        books, fence = self.books, (row["epoch"], row["seq"])
        if self._fences.get(fence) != row["id"]:
            raise Violation(f"a row of {row['id']} with fence {fence}, which belongs to {self._fences.get(fence)}")
        shares = json.loads(row["shares"])
        lease = books.leases.get(row["id"])
        is_same = lease is not None and lease.state in HELD and lease.fence == fence
        if lease is None or not lease.node:
            lease = books.leases[row["id"]] = Lease(row["id"], lease.state if lease else "")
            lease.node, lease.owner, lease.kind, lease.priority = node, row["owner"], row["kind"], row["priority"]
            lease.preemptible = row.get("preemptible", False) or row["kind"] == "slot"
            lease.grace, lease.ttl = row.get("grace_ms", 0), row.get("lease_ttl_ms", 0)
            lease.order = row.get("order", 0)
        epoch, at = lease.resized
        if is_same and epoch == books.epoch and books.now - at < books.waiting_ttl:
            shares = dict(lease.shares)  # the row may have been read before that
        if lease.state != "active":
            self._may[lease.id] = "active"
        lease.fence, lease.shares, lease.observed = fence, shares, json.loads(row["observed"])
        lease.adopts = {}
        if not lease.ttl or is_new or not is_same or lease.deadline is None:
            was, lease.state = lease.state, "active"
            books.renew(lease)
            lease.state = was

    def _confirm_dead(self) -> None:
        freed = []
        for dead in self._told["leases"]:
            lease = self.books.leases.get(dead["id"])
            if lease is None or lease.state in OVER or dead.get("state", lease.state) != lease.state:
                continue
            fence = (dead["epoch"], dead["seq"]) if "epoch" in dead else None
            if fence == lease.fence:
                self._may[lease.id] = "cancelled" if lease.state == "queued" else "freed"
                freed.append(lease.id)
        self._see_events()
        if sorted(self._reply["freed"]) != sorted(freed):
            raise Violation(f"dead are {freed}; the store says {self._reply}")

    def _tick(self) -> None:
        self._see_events()
        self._check_rest()

    def _snapshot(self) -> None:
        told, reply, books = self._told, self._reply, self.books
        if told["node"] not in books.synced:
            if reply["status"] != "unsynced":
                raise Violation(f"{told['node']} has not synced, and was shown {reply}")
            return
        here = [lease for lease in books.leases.values() if lease.node == told["node"] and lease.state not in OVER]
        if sorted(view["id"] for view in reply["leases"]) != sorted(lease.id for lease in here):
            raise Violation(f"{told['node']} has {[lease.id for lease in here]}; the store says {reply['leases']}")
        for view in reply["leases"]:
            self._compare(view)
        free = {name: size for name, size in books.free().items() if name.partition("/")[0] == told["node"]}
        shown = {name: use["free"] for name, use in reply["devices"].items()}
        if shown != free:
            raise Violation(f"free is {free}; the store says {shown}")

    def _audit(self) -> None:
        if self._reply["faults"]:
            raise Violation(f"the store contradicts itself: {self._reply['faults']}")
        shown = {name: use["free"] for name, use in self._reply["devices"].items()}
        if shown != self.books.free():
            raise Violation(f"free is {self.books.free()}; the store's audit says {shown}")
