"""A shim with a node ledger and engines made of a few lines of Python, and brokers to be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

import inference
from gpuboss.devices import Device, DeviceKind
from gpuboss.node_ledger import LedgerRow, NodeLedger
from gpuboss.wire import process_from_wire
from inference import process
from inference.process import LaunchOrder, LeaseOrder, ReadyOrder
from inference.takeover import Address

SLEEP = "import time; time.sleep(600)"

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:                      # a daemon: another session, another parent
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
        time.sleep(600)
    os._exit(0)
os.wait()
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
time.sleep(600)
"""
"""Ignores SIGTERM and leaves a daemon; both write their pid into the file named as argument."""


@dataclass
class Kit:
    """One node: its ledger, and orders that fit it."""

    root: Path
    ledger: Path = field(init=False)
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = self.root / "node.sqlite"
        self.log = self.root / "engine.log"
        with NodeLedger(self.ledger) as books:
            books.put_devices([Device("sim0", DeviceKind.SIM, "sim0", 0, 1 << 30, 0, measured=False)])

    def order(self, code: str, *args: str, size: int = 1 << 20, **env: str) -> LaunchOrder:
        """An order for an engine that is this Python code."""
        lease = uuid.uuid4().hex
        return LaunchOrder(
            argv=(sys.executable, "-I", "-S", "-c", code, *args),
            env={"GPUBOSS_LEASE": lease, **env},
            cwd=str(self.root),
            log=str(self.log),
            socket=str(self.root / "engine.sock"),
            lease=LeaseOrder(
                lease, epoch=1, seq=1, holder="slot:test", shares={"sim0": size}, terms='{"grace_ms":30000}'
            ),
        )

    def ready(self, lease: str, *, grace_s: float = 30.0, **told: object) -> ReadyOrder:
        """The order by which the engine that has this lease outlives its broker."""
        orphans = self.root / "orphans"
        orphans.mkdir(mode=0o700, exist_ok=True)
        return ReadyOrder(str(orphans / f"{lease}.json"), str(self.root / f"{lease[:8]}.sock"), grace_s, told)

    def broker(self, launch: LaunchOrder, *orders: object) -> Predecessor:
        """A process that launches an engine and gives its shim these orders."""
        named = [{"op": "launch", **asdict(launch)}]
        for order in orders:
            fields = asdict(order) if isinstance(order, ReadyOrder) else order
            named.append({"op": "ready", **fields} if isinstance(order, ReadyOrder) else fields)  # type: ignore[dict-item]
        return Predecessor(self, launch, named)

    def rows(self) -> list[LedgerRow]:
        """What the node ledger holds."""
        with NodeLedger(self.ledger) as books:
            return books.rows()


def carriers(lease: str) -> list[int]:
    """Pids of living processes that belong to the lease by their environment: nothing can hide from that."""
    word = f"GPUBOSS_LEASE={lease}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and word in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


_BROKER = """
import json, subprocess, sys
shim = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}, start_new_session=True)
def say(order):
    shim.stdin.write(json.dumps(order).encode() + b"\\n")
    shim.stdin.flush()
orders = json.loads(sys.argv[1])
say(orders.pop(0))
print(json.dumps({"shim": shim.pid, "engine": json.loads(shim.stdout.readline())["pid"]}), flush=True)
for order in orders:
    say(order)
print(flush=True)
sys.stdin.read()
"""


class Predecessor:
    """A broker of one engine, to be killed."""

    def __init__(self, kit: Kit, launch: LaunchOrder, orders: list[Any]) -> None:
        self.lease = launch.lease.id
        self._ready = kit.ready(self.lease)
        package = str(Path(inference.__file__).parents[1])
        shim = (sys.executable, "-I", "-S", "-c", process._MAIN, str(kit.ledger), package)
        with (kit.root / "broker.err").open("ab") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BROKER, json.dumps(orders), *shim],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
            )
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.shim: int = told["shim"]
        self.engine: int = told["engine"]
        self._process.stdout.readline()  # by now every order is on its way

    @property
    def file(self) -> Path:
        """By which its engine is found."""
        return Path(self._ready.file)

    @property
    def door(self) -> Path:
        """Where its shim waits."""
        return Path(self._ready.socket)

    def record(self) -> dict[str, Any]:
        """What stands in the file."""
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found

    def address(self, **changes: Any) -> Address:
        """What a successor needs."""
        record = self.record()
        found = Address(process_from_wire(record["shim"]), Path(record["socket"]), record["secret"], record["protocol"])
        return replace(found, **changes)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.communicate()

    def nothing_left(self) -> bool:
        """No process, no file, no socket of it."""
        gone = not alive(self.shim) and not carriers(self.lease)
        return gone and not self.file.exists() and not self.door.exists()


def alive(pid: int) -> bool:
    """Is there such a process, and not only its remains?"""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
