"""A thousand waiters in three classes, with gangs of any devices, until the last of them was served.

Called by `test_fairness.py` and `python -m tests.faults`. The checker sees every grant; here is only what it does not
know: that all are served, and that within a class those who wanted the same were served in their order.
"""

from __future__ import annotations

import json
import random
from typing import Any

from gpuboss.scripts import Script
from tests.faults.books import Violation
from tests.faults.checker import Checker
from tests.faults.recording import Recorder
from tests.faults.store import ScriptServer, VirtualStore

__all__ = ["serve_all"]

_DEVICES = [f"n0/gpu{index}" for index in range(8)]
_SIZE = 80
_CLASSES = (5, 10, 50)
Json = dict[str, Any]


class _Crowd(Recorder):
    """Waiters and holders of one node."""

    def __init__(self, server: ScriptServer, seed: int, *, yielding: bool) -> None:
        self.checker = Checker()
        self.order: list[str] = []
        """As they were granted."""
        super().__init__(VirtualStore(server), self._note, calm=True)
        self.chance = random.Random(seed)
        self.yielding = yielding
        """Whether some of them are pre-emptible, and so may be let past."""
        self.wants: dict[str, Json] = {}

    def _note(self, record: Json) -> None:
        self.checker.see(record)
        self.order += [event["lease"] for event in record.get("events", ()) if event["what"] == "granted"]

    def begin(self) -> None:
        """The node says what it has, and somebody takes all of it."""
        self.see({"t": "boot", "node": "n0", "boot": "n0-boot1"})
        for name in _DEVICES:
            self.see({"t": "device", "device": name, "cap": _SIZE})
        devices = {
            name: {"total": _SIZE, "reserve": 0, "foreign": 0, "residual": 0, "settles": False} for name in _DEVICES
        }
        self.deliver(Script.NODE_SYNC, {"node": "n0", "seen_epoch": 0, "devices": devices, "rows": []})
        self.ask("first", dict.fromkeys(_DEVICES, _SIZE), 1, preemptible=False)

    def ask(self, lease_id: str, *options: Any, preemptible: bool) -> None:
        """One more waiter."""
        *sets, priority = options
        told = {
            "id": lease_id,
            "holder": f"job:{lease_id}",
            "kind": "job",
            "priority": priority,
            "node": "n0",
            "owner": "{}",
            "preemptible": preemptible,
            "grace_ms": 2000,
            "options": json.dumps(sets),
        }
        self.wants[lease_id] = told
        self.deliver(Script.ACQUIRE, told)

    def gang(self) -> list[dict[str, int]]:
        """One or two sets of one to four devices."""
        chance = self.chance
        return [
            {name: chance.randint(1, _SIZE) for name in chance.sample(_DEVICES, chance.choice((1, 1, 1, 2, 2, 3, 4)))}
            for _ in range(chance.choice((1, 1, 2)))
        ]

    def held(self) -> list[str]:
        """Who holds now; as the checker knows it."""
        return [lease.id for lease in self.checker.books.held()]

    def release(self, lease_id: str) -> None:
        """It ends."""
        fence = self.checker.books.leases[lease_id].fence
        assert fence is not None
        self.deliver(Script.RELEASE, {"id": lease_id, "epoch": fence[0], "seq": fence[1]})


def serve_all(server: ScriptServer, seed: int, *, waiters: int = 1000, yielding: bool = False) -> dict[str, int]:
    """Play it; how often what happened. Violation when an overtaking is not allowed, or somebody is never served."""
    crowd = _Crowd(server, seed, yielding=yielding)
    crowd.begin()
    for number in range(waiters):
        preemptible = yielding and crowd.chance.random() < 0.5
        crowd.ask(f"w{number}", *crowd.gang(), crowd.chance.choice(_CLASSES), preemptible=preemptible)
    rounds = 0
    while held := crowd.held():
        crowd.wait(500)
        crowd.release("first" if rounds == 0 else crowd.chance.choice(held))
        rounds += 1
        if rounds % 25 == 0:
            waiting = [lease.id for lease in crowd.checker.books.waiters()]
            crowd.deliver(Script.LOOK, {"ids": waiting + crowd.held()})
            crowd.deliver(Script.TICK, {})
    left = [lease.id for lease in crowd.checker.books.waiters()]
    if left:
        raise Violation(f"nobody holds anything, and these were never served: {left[:5]}")
    counts = crowd.checker.counts
    if counts["granted"] != waiters + 1:
        raise Violation(f"{counts['granted']} grants for {waiters + 1} leases")
    for name in _DEVICES:
        _check_line(crowd, name)
    return counts


def _check_line(crowd: _Crowd, name: str) -> None:
    """Of those who wanted nothing but this device, and all were there from the start, none went before its turn."""
    line = [
        crowd.wants[lease_id]
        for lease_id in crowd.order
        if [list(option) for option in json.loads(crowd.wants[lease_id]["options"])] == [[name]]
    ]
    turns = [(told["priority"], int(told["id"][1:])) for told in line if not told["preemptible"]]
    if turns != sorted(turns):
        raise Violation(f"those who wanted {name} alone were served in this order: {turns}")
