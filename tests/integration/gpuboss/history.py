"""Random histories of one node's ledger on a real store and a virtual clock, with faults, and what must always hold.

The scripts are driven directly; keeper and holders are played here, so that every order of their steps can happen. The
node ledger is a dictionary that checks physical room, as the real one does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.leases import Fence, LeaseState
from gpuboss.scripts import Script
from gpuboss.sweep import StoredLease, dead_leases
from tests.integration.gpuboss.script_harness import MIB, NODE, ScriptStore, audit, row_of

CAPS = {"sim0": 100 * MIB, "sim1": 60 * MIB, "sim2": 40 * MIB}
_OWNERS = 3
_HELD = ("granted", "active", "ending")


class Violation(AssertionError):
    """Something that must never happen did."""


class History:
    """One run. `storm`: with faults of store, clock and holders."""

    def __init__(self, store: ScriptStore, seed: int, *, storm: bool) -> None:
        self.store = store
        self.chance = random.Random(seed)
        self.storm = storm
        self.rows: dict[str, dict[str, Any]] = {}
        self.known: dict[str, dict[str, Any]] = {}
        """What each asker knows of its lease."""
        self.owner_of: dict[str, int] = {}
        self.dead: set[int] = set()
        self.fences: dict[tuple[int, int], str] = {}
        self.past: list[tuple[Script, dict[str, Any], str]] = []
        self.copy: dict[str, bytes] | None = None
        self.seen_epoch = 0
        self.read_rows: dict[str, dict[str, Any]] | None = None
        self.vanished: set[str] = set()
        self.to_bury: list[StoredLease] = []
        self.told: tuple[str, set[str]] = ("", set())
        """The rows that the store was told of last, and in which of its lives."""
        self.counts: dict[str, int] = {}
        self.ids = iter(range(10_000))

    def run(self, steps: int) -> None:
        """Take the steps, check after each, and see that the ledger comes to rest afterwards."""
        moves: list[tuple[int, Callable[[], None]]] = [
            *(
                (8, self._ask),
                (6, self._start),
                (5, self._end),
                (2, self._give_up),
                (6, self._look_all),
                (4, self._repeat),
            ),
            *((5, self._read), (5, self._sync), (3, self._bury), (3, self._tick), (1, self._die)),
        ]
        if self.storm:
            moves += [(1, self._wipe), (1, self._restart), (1, self._save), (1, self._roll_back)]
            moves += [(1, self._hang), (1, self._jump)]
        self._read()
        self._sync()
        for _ in range(steps):
            (move,) = self.chance.choices([move for _, move in moves], [weight for weight, _ in moves])
            move()
            self._check()
        self._settle()

    # Askers and holders --------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        lease_id = f"l{next(self.ids)}"
        self.owner_of[lease_id] = self.chance.choice([owner for owner in range(_OWNERS * 4) if owner not in self.dead])
        options = [self._option() for _ in range(self.chance.randint(1, 2))]
        named = [{f"{NODE}/{device}": size for device, size in option.items()} for option in options]
        told = {
            "id": lease_id,
            "holder": f"job:{lease_id}",
            "kind": "job",
            "priority": self.chance.choice([1, 10, 10, 50]),
        }
        told |= {
            "node": NODE,
            "owner": json.dumps(_owner_fields(self.owner_of[lease_id])),
            "options": json.dumps(named),
        }
        self.store.ids.add(lease_id)
        self._hear(self._send(Script.ACQUIRE, told))

    def _option(self) -> dict[str, int]:
        devices = self.chance.sample(sorted(CAPS), self.chance.choice([1, 1, 2]))
        return {device: self.chance.randint(1, CAPS[device] // MIB) * MIB for device in devices}

    def _start(self) -> None:
        ready = [view for view in self.known.values() if view["state"] == "granted" and view["id"] not in self.rows]
        ready = [view for view in ready if self.owner_of[view["id"]] not in self.dead]
        if not ready:
            return
        view = self.chance.choice(ready)
        used = self._used()
        fits = all(
            used.get(name, 0) + size <= CAPS[name.partition("/")[2]]
            for name, size in json.loads(view["shares"]).items()
        )
        if fits:
            self.rows[view["id"]] = row_of(view)
            self._count("started")
        else:
            self._count("refused by the node")
            if not self.storm:
                raise Violation(f"a grant without room, and no fault to excuse it: {view}")
            self._send(Script.CANCEL, {"id": view["id"]})
            del self.known[view["id"]]

    def _end(self) -> None:
        if not self.rows:
            return
        row = self.rows.pop(self.chance.choice(sorted(self.rows)))
        self.known.pop(row["id"], None)
        if self.chance.random() < 0.7:  # else the release is lost, and the keeper finds out
            self._send(Script.RELEASE, {"id": row["id"], "epoch": row["epoch"], "seq": row["seq"]})

    def _give_up(self) -> None:
        idle = [lease_id for lease_id in self.known if lease_id not in self.rows]
        if idle:
            lease_id = self.chance.choice(sorted(idle))
            del self.known[lease_id]
            self._send(Script.CANCEL, {"id": lease_id})

    def _look_all(self) -> None:
        wanted = [lease_id for lease_id in self.known if self.owner_of[lease_id] not in self.dead]
        reply = self._send(Script.LOOK, {"ids": wanted})
        for view in reply.get("leases") or ():
            self._hear({"status": "ok", "lease": view})
        for lease_id in reply.get("unknown") or ():
            asked = next(told for script, told, _ in self.past if script is Script.ACQUIRE and told["id"] == lease_id)
            self._hear(self._send(Script.ACQUIRE, asked | {"order": self.known[lease_id]["order"]}))

    def _die(self) -> None:
        """An owner dies, and with it what it started."""
        owner = self.chance.randrange(_OWNERS * 4)
        self.dead.add(owner)
        if len(self.dead) > _OWNERS:
            self.dead.discard(owner)
            return
        for lease_id in [lease_id for lease_id in self.rows if self.owner_of[lease_id] == owner]:
            del self.rows[lease_id]
        for lease_id in [lease_id for lease_id in self.known if self.owner_of[lease_id] == owner]:
            del self.known[lease_id]

    def _hear(self, reply: dict[str, Any]) -> None:
        """Its asker learns of a reply, unless the reply is lost."""
        if reply["status"] != "ok" or self.chance.random() < 0.1:
            return
        view = reply["lease"]
        if view["state"] in ("queued", "granted"):
            self.known[view["id"]] = view
        elif view["state"] != "active":
            self.known.pop(view["id"], None)

    def _repeat(self) -> None:
        """A command comes a second time: at once, much later, or out of a life of the store that is over."""
        if not self.past:
            return
        script, told, run_id = self.chance.choice([*self.past[-15:], self.chance.choice(self.past)])
        # A command carries the run id of the connection it goes out on, so one of an earlier life cannot reach a server
        # that no node has synced with yet; one that is synced turns it away.
        synced = self.store.server.hget(self.store.keys.meta, "run_id") == self.store.run_id.encode()
        late = synced and self.chance.random() < 0.3
        reply = self.store.run(script, run_id=run_id if late else None, **told)
        if late and run_id != self.store.run_id and reply["status"] != "noepoch":
            raise Violation(f"a command of an earlier life was done: {script} {told}")
        self._count("repeated")

    # The keeper: what it read, what it then tells, whom it then buries ----------------------------------------------

    def _read(self) -> None:
        before = set(self.read_rows or ())
        self.read_rows = dict(self.rows)
        self.vanished = (self.vanished | before) - set(self.rows)

    def _sync(self) -> None:
        if self.read_rows is None:
            return
        devices = {
            f"{NODE}/{name}": {"total": cap, "reserve": 0, "foreign": 0, "residual": 0} for name, cap in CAPS.items()
        }
        told = {"node": NODE, "seen_epoch": self.seen_epoch, "devices": devices, "rows": list(self.read_rows.values())}
        reply = self.store.run(Script.NODE_SYNC, **told)
        if reply["status"] == "over":
            self._read()
            insist = [row | {"insist": row["id"] in reply["ids"]} for row in self.read_rows.values()]
            reply = self.store.run(Script.NODE_SYNC, **told | {"rows": insist})
        if reply["status"] != "ok":
            raise Violation(f"the node could not sync: {reply}")
        if reply["epoch"] < self.seen_epoch:
            raise Violation(f"the epoch went back from {self.seen_epoch} to {reply['epoch']}")
        self.seen_epoch = reply["epoch"]
        self.told = (self.store.run_id, set(self.read_rows))
        leases = [_stored(found) for found in reply["leases"] or ()]
        self.to_bury = dead_leases(leases, self.read_rows, self.vanished, self._liveness)

    def _bury(self) -> None:
        dead, self.to_bury = self.to_bury, []
        told = [
            {"id": lease.id} | ({"epoch": lease.fence.epoch, "seq": lease.fence.seq} if lease.fence else {})
            for lease in dead
        ]
        self.store.run(Script.CONFIRM_DEAD, leases=told)

    def _tick(self) -> None:
        self.store.now_ms += self.chance.randint(0, 2000)
        self.store.run(Script.TICK)

    def _liveness(self, owner: ProcessIdentity) -> Liveness:
        return Liveness.DEAD if owner.pid in self.dead else Liveness.ALIVE

    # Faults ---------------------------------------------------------------------------------------------------------

    def _wipe(self) -> None:
        self.store.wipe()
        self._count("wiped")

    def _restart(self) -> None:
        self.store.restart()
        self._count("restarted")

    def _save(self) -> None:
        self.copy = self.store.copy()

    def _roll_back(self) -> None:
        if self.copy is not None:
            self.store.roll_back(self.copy)
            self._count("rolled back")

    def _hang(self) -> None:
        """Nobody renews for a while."""
        for _ in range(self.chance.randint(1, 12)):
            self.store.now_ms += 2000
            self.store.run(Script.TICK)

    def _jump(self) -> None:
        self.store.now_ms += self.chance.choice([-3_600_000, 3_600_000])
        self._count("jumped")

    # What must hold -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        used = self._used()
        for name, size in used.items():
            if size > CAPS[name.partition("/")[2]]:
                raise Violation(f"{name} is physically overfull: {size}")
        raw = self.store.raw()
        if not raw["meta"]:
            return
        free = audit(raw)
        life, told = self.told
        for lease_id in told & set(self.rows) if life == self.store.run_id else ():
            if raw["leases"][lease_id].get("state") not in _HELD:
                raise Violation(f"{lease_id} runs and was freed: {raw['leases'][lease_id]}")
        for lease_id, lease in raw["leases"].items():
            if not lease or "epoch" not in lease:
                continue
            fence = (int(lease["epoch"]), int(lease["seq"]))
            fresh = fence not in self.fences
            if self.fences.setdefault(fence, lease_id) != lease_id:
                raise Violation(f"fence {fence} was given to {self.fences[fence]} and to {lease_id}")
            if fresh and lease["state"] == "granted" and raw["meta"].get("run_id") == self.store.run_id:
                self._count("granted")
                if any(free.get(name, 0) < 0 for name in json.loads(lease["shares"])):
                    raise Violation(f"{lease_id} was granted without room: {free}")
        if not self.storm and any(size < 0 for size in free.values()):
            raise Violation(f"overfull in the books: {free}")

    def _settle(self) -> None:
        """Everybody ends; with beats and time alone the ledger must become empty."""
        self.rows.clear()
        self.known.clear()
        for _ in range(20):
            self._read()
            self._sync()
            self._bury()
            self.store.now_ms += 2000
            self.store.run(Script.TICK)
            self._check()
        raw = self.store.raw()
        left = [lease_id for lease_id, lease in raw["leases"].items() if lease and lease["state"] in (*_HELD, "queued")]
        if left:
            raise Violation(f"leases without a process: {left}")

    def _used(self) -> dict[str, int]:
        used: dict[str, int] = {}
        for row in self.rows.values():
            for name, size in json.loads(row["shares"]).items():
                used[name] = used.get(name, 0) + size
        return used

    def _send(self, script: Script, told: dict[str, Any]) -> dict[str, Any]:
        self.past.append((script, told, self.store.run_id))
        return self.store.run(script, **told)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def _owner_fields(owner: int) -> dict[str, Any]:
    return {"boot_id": "b", "pid": owner, "pid_namespace": 0, "start_ticks": 0}


def _stored(found: dict[str, Any]) -> StoredLease:
    fence = Fence(found["epoch"], found["seq"]) if "epoch" in found else None
    return StoredLease(found["id"], LeaseState(found["state"]), fence, ProcessIdentity(**json.loads(found["owner"])))
