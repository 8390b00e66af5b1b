"""The lease store's scripts on a server of their own, called as directly as a client can: no retries, no events."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from gpuboss.keys import PoolKeys
from gpuboss.scripts import Script, source
from gpuboss.server import find_server

NODE = "bench"
GIB = 1 << 30
_OWNER = json.dumps({"boot_id": "bench", "pid": 1, "pid_namespace": 1, "start_ticks": 1})
_CLASSES = (1, 10, 50)


@contextlib.contextmanager
def private_server(directory: Path) -> Iterator[redis.Redis]:
    """A server on a unix socket with the append-only file that the private store has."""
    socket = directory / "store.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--dir", str(directory), "--save", "", "--appendonly", "yes"]
    with subprocess.Popen([find_server(), *options], stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 10
            while not socket.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            with redis.Redis(unix_socket_path=str(socket)) as connection:
                yield connection
        finally:
            process.kill()


class Bench:
    """One pool of its own."""

    def __init__(self, server: redis.Redis) -> None:
        self._server = server
        self._keys = PoolKeys(uuid.uuid4().hex[:12])
        self._common = {"lease_prefix": self._keys.lease_prefix, "run_id": "bench", "ttl_ms": 3_600_000}
        self._bare = server.script_load("return 1")
        self._sha = {script: server.script_load(source(script).text) for script in Script}
        self._devices: list[str] = []
        self._chance = random.Random(1)  # the same load in every run

    def sync(self, devices: int) -> dict[str, Any]:
        """Tell the store the node's devices, 24 GiB each."""
        self._devices = [f"{NODE}/gpu{number}" for number in range(devices)]
        device = {"total": 24 * GIB, "reserve": 0, "foreign": 0, "residual": 0, "settles": False}
        told = dict.fromkeys(self._devices, device)
        return self._run(Script.NODE_SYNC, node=NODE, seen_epoch=0, devices=told, rows=[])

    def fill(self, waiters: int) -> None:
        """One holder per device that leaves too little for anybody, then waiters of three classes, some for gangs."""
        for name in self._devices:
            self.acquire(uuid.uuid4().hex, {name: 23 * GIB}, priority=0)
        for _ in range(waiters):
            gang = self._chance.sample(self._devices, min(len(self._devices), self._chance.choice([1, 1, 2, 4])))
            self.acquire(uuid.uuid4().hex, dict.fromkeys(gang, 20 * GIB), priority=self._chance.choice(_CLASSES))

    def bare_and_pair(self, rounds: int) -> tuple[float, float]:
        """Medians in seconds of a script that does nothing and of acquire and release together, interleaved."""
        keys = self._keys.keys()
        bare, pair = [], []
        for _ in range(rounds):
            bare.append(_timed(lambda: self._server.evalsha(self._bare, len(keys), *keys, "{}")))
            pair.append(_timed(self._pair))
        return statistics.median(bare), statistics.median(pair)

    def under_load(self, rounds: int) -> dict[str, float]:
        """Median seconds of each operation while all wait. `acquire`: one waiter more, which then leaves."""
        operations: dict[str, Callable[[], object]] = {
            "tick": lambda: self._run(Script.TICK),
            "node_sync": lambda: self.sync(len(self._devices)),
        }
        found = {name: statistics.median(_timed(run) for _ in range(rounds)) for name, run in operations.items()}
        asked = []
        for _ in range(rounds):
            lease = uuid.uuid4().hex
            asked.append(_timed(lambda: self.acquire(lease, {self._devices[0]: 20 * GIB}, priority=50)))  # noqa: B023 (used at once)
            self._run(Script.CANCEL, id=lease)
        return found | {"acquire": statistics.median(asked)}

    def acquire(self, lease: str, shares: dict[str, int], *, priority: int) -> dict[str, Any]:
        """Ask for one option."""
        return self._run(
            Script.ACQUIRE,
            id=lease,
            holder="job:bench",
            kind="job",
            priority=priority,
            node=NODE,
            owner=_OWNER,
            options=json.dumps([shares]),
        )

    def forget(self) -> None:
        """Remove the pool."""
        for key in self._server.scan_iter(match=f"{{gb:{self._keys.pool}}}:*", count=5000):
            self._server.delete(key)

    def _pair(self) -> None:
        lease = self.acquire(uuid.uuid4().hex, {self._devices[0]: GIB}, priority=10)["lease"]
        self._run(Script.RELEASE, id=lease["id"], epoch=lease["epoch"], seq=lease["seq"])

    def _run(self, script: Script, **arguments: Any) -> dict[str, Any]:
        keys = self._keys.keys()
        told = json.dumps(self._common | arguments)
        reply: dict[str, Any] = json.loads(self._server.evalsha(self._sha[script], len(keys), *keys, told))
        if reply["status"] != "ok":
            raise RuntimeError(f"{script.value}: {reply}")
        return reply


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
