"""What was sent to the store and what it replied, each command against the checker's books. Standard library only.
only.

The base of `tests.faults.checker`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.faults.asker_commands import AskerCommands
from tests.faults.books import Violation
from tests.faults.holder_commands import HolderCommands
from tests.faults.node_commands import NodeCommands

__all__ = ["Commands"]

Record = dict[str, Any]


class Commands(AskerCommands, HolderCommands, NodeCommands):
    """One method for each script."""

    def __init__(self) -> None:
        super().__init__()
        self._scripts: dict[str, Callable[[], None]] = {
            "node_sync": self._node_sync,
            "acquire": self._acquire,
            "look": self._look,
            "resize": self._resize,
            "cancel": self._cancel,
            "activate": self._activate,
            "renew_many": self._renew_many,
            "release": self._release,
            "confirm_dead": self._confirm_dead,
            "preempt": self._preempt,
            "ack": self._ack,
            "tick": self._tick,
            "snapshot": self._snapshot,
            "audit": self._audit,
        }

    def _call(self, record: Record) -> None:
        books, reply, script = self.books, record["reply"], record["script"]
        self._told, self._reply, self._shown = record["told"], reply, record["leases"]
        self._events = record["events"]
        self._may, self._new, self._expires = {}, set(), script in ("tick", "node_sync")
        if script == "node_sync":
            self._enter_sync(record)
        else:
            in_epoch = record["sent"] == record["life"] == books.begun
            if in_epoch == (reply["status"] == "noepoch"):
                raise Violation(f"{script} was answered {reply} in epoch {books.epoch}, which began in {books.begun=}")
            if not in_epoch:
                if record["events"]:
                    raise Violation(f"{script} of another life of the store changed something: {record['events']}")
                self._count("noepoch")
                return
            books.pass_time(record["now"])
        if reply.get("epoch") != books.epoch:
            raise Violation(f"{script} was answered with epoch {reply.get('epoch')} in epoch {books.epoch}")
        self._scripts[script]()
        self._count(script)
