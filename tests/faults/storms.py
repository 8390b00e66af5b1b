"""Pre-emption storms: a full node, and one wave after the other of more important waiters.

Called by `test_fairness.py` and `python -m tests.faults`. Holders that must yield do so at once, or late, or not at
all until they are ended when their grace is over; whoever had to go asks again at once for the same. The checker sees
who is told, and when; here is what needs a longer memory: nobody comes again and displaces in turn the lease that it
had to go for, and every storm comes to rest.
"""

from __future__ import annotations

import json
import random
from typing import Any

from gpuboss.scripts import Script
from tests.faults.books import HELD, Lease, Violation
from tests.faults.checker import Checker
from tests.faults.history import BrokenHistory
from tests.faults.recording import Recorder
from tests.faults.server import ServerError
from tests.faults.store import ScriptServer, VirtualStore

__all__ = ["weather_storm"]

_DEVICES = {"n0/gpu0": 80, "n0/gpu1": 80, "n0/gpu2": 40}
_CLASSES = (1, 5, 10, 20, 50)
_TICK_MS = 500
_LONGEST_S = 120
Json = dict[str, Any]


class _Storm(Recorder):
    """One node in a storm."""

    def __init__(self, server: ScriptServer, seed: int) -> None:
        self.checker = Checker()
        self.records = 0
        super().__init__(VirtualStore(server), self._note, calm=True)
        self.chance = random.Random(seed)
        self.numbers = 0
        self.asked: dict[str, Json] = {}
        """What each lease asked for."""
        self.person: dict[str, str] = {}
        """Lease -> who is behind it; one who must go asks again under a new name."""
        self.displaced: dict[str, set[str]] = {}
        """Lease -> who had to go for it."""
        self.tempers: dict[str, int] = {}
        """Lease -> how long it takes to yield, in ms from its notice; more than its grace: it must be ended."""
        self.due: dict[str, int] = {}
        """Lease with notice -> when it will yield."""

    def _note(self, record: Json) -> None:
        self.records += 1
        self.checker.see(record)
        for event in record.get("events", ()):
            lease = self.checker.books.leases.get(event["lease"])
            if event["what"] == "granted":
                fence = [int(event["epoch"]), int(event["seq"])]
                self.see({"t": "enter", "lease": event["lease"], "node": "n0", "fence": fence})
                self.see({"t": "start", "lease": event["lease"], "uses": lease.shares if lease else {}})
            elif event["what"] == "notice" and lease is not None and lease.notice is not None:
                self._told_to_yield(lease, lease.notice.by)
            elif event["what"] == "withdrawn":
                self.due.pop(event["lease"], None)

    def _told_to_yield(self, lease: Lease, by: str) -> None:
        self.due[lease.id] = self.mono_ms + self.tempers[lease.id]
        if self.person[by] in self.displaced.get(lease.id, ()):
            raise Violation(
                f"{self.person[by]} had to go for {lease.id}, and now {lease.id} must go for {self.person[by]}"
            )
        self.displaced.setdefault(by, set()).add(self.person[lease.id])

    def begin(self) -> None:
        """The node says what it has."""
        self.see({"t": "boot", "node": "n0", "boot": "n0-boot1"})
        for name, size in _DEVICES.items():
            self.see({"t": "device", "device": name, "cap": size})
        self.sync()

    def sync(self) -> None:
        """The keeper's beat: it renews who holds."""
        rows = [self._row(lease) for lease in self.checker.books.held()]
        entry = {"reserve": 0, "foreign": 0, "residual": 0, "settles": False}
        devices = {name: entry | {"total": size} for name, size in _DEVICES.items()}
        self.deliver(
            Script.NODE_SYNC,
            {"node": "n0", "seen_epoch": self.checker.books.epoch or 0, "devices": devices, "rows": rows},
        )

    def _row(self, lease: Lease) -> Json:
        told = self.asked[lease.id]
        assert lease.fence is not None
        return {
            name: told[name] for name in ("id", "holder", "kind", "priority", "owner", "preemptible", "grace_ms")
        } | {
            "epoch": lease.fence[0],
            "seq": lease.fence[1],
            "shares": json.dumps(lease.shares),
            "observed": "{}",
            "insist": False,
            "order": lease.order,
            "lease_ttl_ms": 0,
        }

    def ask(self, person: str, told: Json) -> None:
        """Somebody asks, for the first time or again."""
        self.numbers += 1
        lease_id = f"s{self.numbers}"
        self.person[lease_id] = person
        full = told | {"id": lease_id, "holder": f"job:{lease_id}", "node": "n0"}
        self.asked[lease_id] = full
        self.tempers[lease_id] = int(full["grace_ms"] * self.chance.choice((0.0, 0.3, 0.9, 9.0)))
        self.deliver(Script.ACQUIRE, full)

    def newcomer(self, classes: tuple[int, ...], *, preemptible: bool) -> None:
        """Somebody new; jobs alone, for a slot and its equal take turns, which looks the same."""
        chance = self.chance
        chosen = chance.sample(list(_DEVICES), chance.choice((1, 1, 2)))
        told = {
            "kind": "job",
            "priority": chance.choice(classes),
            "owner": json.dumps({"pid": self.numbers}),
            "preemptible": preemptible,
            "grace_ms": chance.choice((1000, 2000, 5000)),
            "options": json.dumps([{name: chance.randint(10, _DEVICES[name]) for name in chosen}]),
        }
        self.ask(f"p{self.numbers}", told)

    def tick(self) -> None:
        """Half a second: holders that must yield do so, or are ended; everybody else is renewed."""
        self.wait(_TICK_MS)
        for lease_id in list(self.due):
            lease, due = self.checker.books.leases[lease_id], self.due.pop(lease_id, None)
            if due is None or lease.state not in HELD or lease.notice is None:
                continue
            grace_over = self.mono_ms >= due - self.tempers[lease_id] + lease.notice.grace
            if self.mono_ms < due and not grace_over:
                self.due[lease_id] = due
            else:
                self.end(lease, "yielded" if self.mono_ms >= due else "forced")
                self.ask(self.person[lease_id], {k: v for k, v in self.asked[lease_id].items() if k != "id"})
        self.deliver(Script.LOOK, {"ids": [lease.id for lease in self.checker.books.waiters()]})
        self.sync()

    def end(self, lease: Lease, why: str) -> None:
        """A holder ends."""
        self.stopped(lease.id, why)
        assert lease.fence is not None
        self.deliver(Script.RELEASE, {"id": lease.id, "epoch": lease.fence[0], "seq": lease.fence[1]})


def weather_storm(server: ScriptServer, seed: int) -> dict[str, int]:
    """Play it; how often what happened. Raises BrokenHistory."""
    storm = _Storm(server, seed)
    try:
        return _weather(storm)
    except Violation as violation:
        raise BrokenHistory(seed, storm.records, str(violation)) from violation
    except ServerError as error:
        raise BrokenHistory(seed, storm.records, f"a script failed: {error}") from error


def _weather(storm: _Storm) -> dict[str, int]:
    storm.begin()
    for _ in range(6):
        storm.newcomer((10, 20, 50), preemptible=storm.chance.random() < 0.8)
    for _ in range(3):
        for _ in range(storm.chance.randint(1, 3)):
            storm.newcomer(_CLASSES, preemptible=storm.chance.random() < 0.5)
        for _ in range(storm.chance.randint(1, 6)):
            storm.tick()
    for _ in range(_LONGEST_S * 1000 // _TICK_MS):
        held = list(storm.checker.books.held())
        if not held:
            break
        if not storm.due:  # nobody yields: somebody is done
            storm.end(storm.chance.choice(held), "ended")
        storm.tick()
    left = [lease.id for lease in storm.checker.books.leases.values() if lease.state in (*HELD, "queued")]
    if left:
        raise Violation(f"the storm does not come to rest: {left}")
    return storm.checker.counts
