"""Reads the trace of a fault history and says which promise was broken, if any. Standard library only.

Run by `tests.faults.campaign` record by record, or by itself: `python -m tests.faults.checker TRACE.jsonl`. It knows
nothing of the code under test: only what was sent to the store, what came back, what the store's stream said, and what
holders physically did, by a virtual clock. From these it keeps its own books (`tests.faults.books`), its own physical
memory (`tests.faults.memory`) and its own rules (`queue_rules`, `notice_rules`).

The trace: a list of dictionaries, each with `t`:

    begin    calm (no fault will be played), ttl_ms
    device   device, cap: what its leases may use from now on
    boot     node, boot: it starts, with an empty book
    call     script, told, reply, events (of the stream), leases (fields of leases that events or notices are about),
             now (the server's clock), mono (a clock that never jumps), life (of the server), sent (in which life),
             heard (whether the caller got the reply)
    store    what (wipe, restart, save, roll_back), life
    net      what (lost, late, reply lost, twice): becomes of the command that is sent next
    jump     the server's clock jumps
    enter    lease, node, fence: its node lets its holder in
    start    lease, uses: its holder begins to use memory
    use      lease, uses: it uses more or less
    stop     lease, why, mono, lingers: its holder died; its memory is back, but for the devices in `lingers`
    back     lease, device: there too
    refused  lease, settling: its node's own books had no room; settling: for memory that nobody has seen to be back
    foreign  lease: over by its own terms; what it uses still is nobody's
    end      everybody is gone: nothing may be left
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.faults.books import LONGEST_STEP_MS, OVER, Books, Violation
from tests.faults.commands import Commands

__all__ = ["Checker", "FenceChecker", "MemoryChecker", "Violation", "check"]

Record = dict[str, Any]


def check(trace: Iterable[Record]) -> None:
    """Violation, with the number of the record in which it shows."""
    checker = Checker()
    for number, record in enumerate(trace):
        try:
            checker.see(record)
        except Violation as violation:
            raise Violation(f"record {number}: {violation}") from violation


class Checker(Commands):
    """Sees a trace, record by record."""

    def __init__(self) -> None:
        super().__init__()
        self._saved = Books()
        self._calm = False

    def see(self, record: Record) -> None:
        """One record; Violation if it cannot be."""
        match record["t"]:
            case "call":
                self._mono = record["mono"]
                self._call(record)
            case "enter":
                self.memory.enter(record["lease"])
                boot, fence = self.boots[record["node"]], (record["fence"][0], record["fence"][1])
                self._entered[boot] = max(self._entered.get(boot, (0, 0)), fence)
                self._entered_as[record["lease"]] = fence
            case "start":
                self._count("started")
                self.memory.start(record["lease"], record["uses"])
            case "use":
                self._count("resized in use")
                self.memory.use(record["lease"], record["uses"])
            case "stop":
                self._stop(record)
            case "back":
                self.memory.back(record["lease"], record["device"])
            case "foreign":
                self._count("foreign")
                self.memory.disown(record["lease"])
            case "refused":
                self._count("refused by the node")
                if self._calm:
                    raise Violation(
                        f"{record['lease']} was granted room that its node does not have, and nothing went wrong"
                    )
            case "net":
                self._count(record["what"])
            case "device":
                self._count("device")
                self.memory.caps[record["device"]] = record["cap"]
            case "boot":
                self._count("boot")
                self.boots[record["node"]] = record["boot"]
            case "jump":
                self._count("jumped")
                self._hurried += LONGEST_STEP_MS
            case "store":
                self._store(record["what"])
            case "begin":
                self._calm = record["calm"]
                self.books.waiting_ttl = record["ttl_ms"]
            case "end":
                left = [lease.id for lease in self.books.leases.values() if lease.state not in OVER]
                if left:
                    raise Violation(f"nobody is there any more, and these leases are left: {left}")

    def _store(self, what: str) -> None:
        self._count(what)
        if what == "save":
            self._saved = self.books.copy()
        elif what == "wipe":
            self.books = Books()
        elif what == "roll_back":
            self.books = self._saved.copy()

    def _stop(self, record: Record) -> None:
        """A holder died. One that was ended because it did not yield had notice, and all of its grace."""
        lease_id = record["lease"]
        if record["why"] == "forced":
            since, grace, hurried = self.noticed_ms.get(lease_id, (record["mono"], 1, self._hurried))
            if record["mono"] - since < grace - (self._hurried - hurried):
                raise Violation(
                    f"{lease_id} was ended {record['mono'] - since} ms after its notice; its grace is {grace}"
                )
            self._count("forced")
        self.memory.stop(lease_id, record["lingers"])


class MemoryChecker(Checker):
    """Sees physical memory only, and the store with it not at all."""

    def _call(self, record: Record) -> None:
        self._count(record["script"])

    def see(self, record: Record) -> None:
        """As above; nobody asks what is left in the store, or whether a node refused rightly."""
        if record["t"] not in ("end", "refused"):
            super().see(record)

    def _stop(self, record: Record) -> None:
        self.memory.stop(record["lease"], record["lingers"])


class FenceChecker(Checker):
    """Sees grants only: no fence may be given twice."""

    def see(self, record: Record) -> None:
        """As above, for grants."""
        for event in record["events"] if record["t"] == "call" else ():
            if event["what"] == "granted":
                fence = (int(event["epoch"]), int(event["seq"]))
                if self._fences.setdefault(fence, event["lease"]) != event["lease"]:
                    raise Violation(f"fence {fence} was given to {self._fences[fence]} and to {event['lease']}")


def main(path: str) -> int:
    """Check a file of JSON lines."""
    check(json.loads(line) for line in Path(path).read_text("utf-8").splitlines())
    print("no promise was broken")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
