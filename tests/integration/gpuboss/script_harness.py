"""The store's scripts driven directly, on a clock of the test's own, and its raw keys read back for an audit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import redis

from gpuboss.keys import PoolKeys
from gpuboss.scripts import Script, source

MIB = 1 << 20
TTL_MS = 15_000
START_MS = 1_700_000_000_000
NODE = "node-a"
OWNER = json.dumps({"boot_id": "b", "pid": 1, "pid_namespace": 2, "start_ticks": 3})

_DUMP = """
local out = {leases = {}, held = redis.call('SMEMBERS', KEYS[4]), queue = redis.call('ZRANGE', KEYS[3], 0, -1)}
local function pairs_of(key)
  local flat, found = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end
out.meta, out.nodes = pairs_of(KEYS[1]), pairs_of(KEYS[2])
for _, id in ipairs(cjson.decode(ARGV[2])) do out.leases[id] = pairs_of(ARGV[1] .. id) end
return cjson.encode(out)
"""


class ScriptStore:
    """One pool in a real server, with a virtual clock and a run id that the test changes to play a restart."""

    def __init__(self, server: redis.Redis, overrides: Mapping[str, str] | None = None) -> None:
        self.server = server
        self.keys = PoolKeys(uuid.uuid4().hex[:12])
        self.run_id = uuid.uuid4().hex
        self.now_ms = START_MS
        self._overrides = overrides or {}
        """Text of the scripts to replace: how a test switches a protection off."""
        self._loaded: dict[Script, str] = {}
        self._dump = server.register_script(_DUMP)
        self.ids: set[str] = set()

    def run(self, script: Script, *, run_id: str | None = None, **arguments: Any) -> dict[str, Any]:
        """The script's reply."""
        told = {
            "lease_prefix": self.keys.lease_prefix,
            "run_id": run_id or self.run_id,
            "ttl_ms": TTL_MS,
            "now": self.now_ms,
        } | arguments
        keys = self.keys.keys()
        reply: dict[str, Any] = json.loads(self.server.evalsha(self._sha(script), len(keys), *keys, json.dumps(told)))
        return reply

    def restart(self) -> None:
        """A new life of the server process, with the data it had."""
        self.run_id = uuid.uuid4().hex

    def wipe(self) -> None:
        """A new life without data."""
        self.restart()
        names = self._all_keys()
        if names:
            self.server.delete(*names)

    def copy(self) -> dict[str, bytes]:
        """What a snapshot file would hold."""
        names = self._all_keys()
        pipe = self.server.pipeline(transaction=False)
        for name in names:
            pipe.dump(name)
        return {name: data for name, data in zip(names, pipe.execute(), strict=True) if data}

    def roll_back(self, copy: dict[str, bytes]) -> None:
        """A new life with older data: a fail-over that lost the newest writes."""
        self.wipe()
        pipe = self.server.pipeline(transaction=False)
        for name, data in copy.items():
            pipe.restore(name, 0, data)
        pipe.execute()

    def sync(
        self, devices: Mapping[str, Mapping[str, Any]], rows: list[dict[str, Any]] | None = None, **more: Any
    ) -> dict[str, Any]:
        """`node_sync` of the one node; device fields that are left out are zero."""
        blank = {"total": 0, "reserve": 0, "foreign": 0, "residual": 0, "settles": False}
        full = {f"{NODE}/{name}": blank | dict(fields) for name, fields in devices.items()}
        told: dict[str, Any] = {"node": NODE, "seen_epoch": 0, "devices": full, "rows": rows or []}
        return self.run(Script.NODE_SYNC, **told | more)

    def acquire(self, lease_id: str, *options: Mapping[str, int], priority: int = 10, **more: Any) -> dict[str, Any]:
        """`acquire` by the one node."""
        self.ids.add(lease_id)
        named = [{f"{NODE}/{device}": size for device, size in option.items()} for option in options]
        told: dict[str, Any] = {
            "id": lease_id,
            "holder": f"job:{lease_id}",
            "kind": "job",
            "priority": priority,
            "node": NODE,
            "owner": OWNER,
        }
        return self.run(Script.ACQUIRE, **told | {"options": json.dumps(named)} | more)

    def hold(self, lease_id: str, *options: Mapping[str, int], **more: Any) -> dict[str, Any]:
        """`acquire` of what must be granted at once; its view."""
        lease: dict[str, Any] = self.acquire(lease_id, *options, **more)["lease"]
        assert lease["state"] == "granted", lease
        return lease

    def wait(self, lease_id: str, *options: Mapping[str, int], **more: Any) -> dict[str, Any]:
        """`acquire` of what must wait; its view."""
        lease: dict[str, Any] = self.acquire(lease_id, *options, **more)["lease"]
        assert lease["state"] == "queued", lease
        return lease

    def fenced(self, script: Script, lease: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """A command for a lease, by the fence of a view of it."""
        return self.run(script, id=lease["id"], epoch=lease["epoch"], seq=lease["seq"], **more)

    def release(self, lease: Mapping[str, Any]) -> None:
        """`release`, which must be right."""
        assert self.fenced(Script.RELEASE, lease)["state"] == "freed"

    def view(self, lease_id: str) -> dict[str, Any]:
        """What the store shows of a lease."""
        view: dict[str, Any] = self.run(Script.LOOK, ids=[lease_id])["leases"][0]
        return view

    def told(self, waiter: str) -> set[str]:
        """The leases that have notice for this waiter, or for a person ("")."""
        raw = self.raw()
        held = ((lease_id, raw["leases"][lease_id]) for lease_id in raw["held"])
        return {lease_id for lease_id, lease in held if lease.get("notice_by") == waiter and "notice_at" in lease}

    def events(self) -> list[tuple[str, str]]:
        """All that was said on the stream: (what, lease)."""
        found: Any = self.server.xrange(self.keys.events)
        return [(fields[b"what"].decode(), fields[b"lease"].decode()) for _, fields in found]

    def pass_time(self, seconds: float) -> None:
        """Let the clock go on, with ticks."""
        for _ in range(round(seconds)):
            self.now_ms += 1000
            self.run(Script.TICK)

    def faults(self) -> list[str]:
        """What the script `audit` finds."""
        return list(self.run(Script.AUDIT)["faults"])

    def state(self, lease_id: str) -> str:
        """The state of a lease, `unknown` when the store has none."""
        reply = self.run(Script.LOOK, ids=[lease_id])
        return reply["leases"][0]["state"] if reply["leases"] else "unknown"

    def raw(self) -> dict[str, Any]:
        """Every key of the pool, by a script of the test's own."""
        found: dict[str, Any] = json.loads(
            self._dump(keys=self.keys.keys(), args=[self.keys.lease_prefix, json.dumps(sorted(self.ids))])
        )
        # Lua does not tell an empty list from an empty object.
        return found | {"held": list(found["held"]), "queue": [member[16:] for member in found["queue"]]}

    def _sha(self, script: Script) -> str:
        if script not in self._loaded:
            text = source(script).text
            for old, new in self._overrides.items():
                text = text.replace(old, new)
            self._loaded[script] = self.server.script_load(text)
        return self._loaded[script]

    def _all_keys(self) -> list[str]:
        fixed = list(self.keys.keys())
        return fixed + [self.keys.lease_prefix + lease_id for lease_id in sorted(self.ids)]


def row_of(lease: Mapping[str, Any], observed: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """The node ledger's row of a granted lease, as a keeper would send it."""
    return {
        "id": lease["id"],
        "holder": lease["holder"],
        "kind": lease["kind"],
        "priority": lease["priority"],
        "owner": OWNER,
        "epoch": lease["epoch"],
        "seq": lease["seq"],
        "shares": lease["shares"],
        "observed": json.dumps({f"{NODE}/{device}": size for device, size in (observed or {}).items()}),
    } | more


def audit(raw: Mapping[str, Any]) -> dict[str, int]:
    """Effective free of each synced device, summed up in Python from the raw keys.

    Fails on books that contradict themselves.
    """
    epoch = int(raw["meta"]["epoch"])
    free: dict[str, int] = {}
    for text in raw["nodes"].values():
        record = json.loads(text)
        if record["epoch"] == epoch:
            for name, entry in record["devices"].items():
                free[name] = int(entry["total"] - entry["reserve"] - entry["foreign"] - entry["residual"])
    holding = {
        lease_id
        for lease_id, lease in raw["leases"].items()
        if lease and lease["state"] in ("granted", "active", "ending")
    }
    waiting = {lease_id for lease_id, lease in raw["leases"].items() if lease and lease["state"] == "queued"}
    assert holding == set(raw["held"])
    assert waiting == set(raw["queue"])
    for lease_id in holding:
        lease = raw["leases"][lease_id]
        observed = json.loads(lease.get("observed", "{}"))
        for name, size in json.loads(lease["shares"]).items():
            if name in free:
                free[name] -= int(max(size, observed.get(name, 0)))
    return free
