"""A ledger of the test's own: settings, processes that use it, and the certainty that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuboss.devices import parse_devices
from gpuboss.leases import HolderKind, Lease, LeaseRequest, new_request_id
from gpuboss.settings import LedgerSettings, Timings
from gpuboss.state_dir import StateDir
from tests.support import wait_until

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
QUICK = Timings(beat_s=0.5, tick_s=0.25, ttl_s=6.0, renew_deadline_s=5.0, linger_s=0.3)

_HOLDER = """
import json, os, subprocess, sys, time
from gpuboss.identity import ProcessIdentity
from gpuboss.node_ledger import LedgerRow, NodeLedger

order = json.loads(sys.argv[1])
me = ProcessIdentity.current()
ledger = NodeLedger(order["ledger"])
ledger.admit(LedgerRow(order["id"], order["epoch"], order["seq"], order["holder"], order["shares"],
                       pid=me.pid, start_ticks=me.start_ticks, pid_namespace=me.pid_namespace))
engine = None
if order["engine"]:
    # Ignores SIGTERM, in a session of its own, with a child: nothing but the lease's name leads to them.
    words = [sys.executable, "-c", "import signal, subprocess, sys, time\\n"
             "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
             "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"]
    engine = subprocess.Popen(words, env=dict(os.environ, GPUBOSS_LEASE=order["id"]), start_new_session=True)
    who = ProcessIdentity.of(engine.pid)
    ledger.set_engine(order["id"], who.pid, who.start_ticks)
print(json.dumps({"engine": engine and engine.pid}), flush=True)
sys.stdin.read()  # until told to end
if engine:
    engine.kill()
    engine.wait()
ledger.remove(order["id"], order["epoch"], order["seq"])
"""

_USER = """
import asyncio, json, sys
from pathlib import Path
from gpuboss.client import Client
from gpuboss.leases import HolderKind, LeaseRequest, new_request_id
from gpuboss.settings import LedgerSettings

async def main():
    order = json.loads(sys.argv[1])
    client = await Client.connect(LedgerSettings.from_wire(order["settings"], Path(order["state_dir"])), name="user")
    states = []
    for options in order["requests"]:
        request = LeaseRequest(new_request_id(), "job:user", HolderKind.JOB, tuple(options), 10)
        states.append((await client.acquire(request)).state.value)
    print(json.dumps({"keeper": client._link.welcome.pid, "states": states}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await client.close()

asyncio.run(main())
"""


_PARENT = """
import asyncio, json, sys
from gpuboss.server import StoreServer, find_server
from gpuboss.state_dir import StateDir

async def main():
    order = json.loads(sys.argv[1])
    server = StoreServer(StateDir.resolve(order["state_dir"]), find_server(), guarded=order["guarded"])
    await server.launch()
    await server.wait_ready()
    print(json.dumps({"store": server.pid}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@dataclass
class Holder:
    """A process that has entered its lease in the node ledger, as a shim does."""

    process: subprocess.Popen[str]
    engine: int | None

    def end(self) -> None:
        """End as it should: engine dead, row removed."""
        self.process.communicate(timeout=20)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.communicate(timeout=20)


@dataclass
class LedgerUnderTest:
    """One state directory and everything that a test starts for it."""

    directory: Path
    settings: LedgerSettings
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def state(self) -> StateDir:
        return StateDir.resolve(self.directory)

    @property
    def log(self) -> str:
        """What the keeper has written."""
        path = self.state.log_dir / "keeper.log"
        return path.read_text() if path.exists() else ""

    @property
    def keeper_pid(self) -> int:
        """The process that wrote its name into the lock."""
        path = self.state.lock_path("keeper")
        # The next keeper empties the file before it writes its name.
        wait_until(lambda: path.read_text().endswith("}"), "the keeper's name in its lock")
        return int(json.loads(path.read_text())["pid"])

    @property
    def store_pid(self) -> int:
        """The private store's process."""
        return int(json.loads((self.state.root / "store.pid").read_text())["pid"])

    def run_holder(self, lease: Lease, *, engine: bool = False) -> Holder:
        """A process that holds a granted lease."""
        assert lease.fence is not None
        order = {
            "ledger": str(self.state.ledger_path),
            "id": lease.id,
            "epoch": lease.fence.epoch,
            "seq": lease.fence.seq,
        }
        order |= {"holder": lease.holder, "shares": dict(lease.shares), "engine": engine}
        process = self._run(_HOLDER, order)
        return Holder(process, _told(process)["engine"])

    def run_parent_of_store(self, *, guarded: bool) -> subprocess.Popen[str]:
        """A process that starts the private store as a keeper does; its first line of output tells the store's pid."""
        return self._run(_PARENT, {"state_dir": str(self.directory), "guarded": guarded})

    def run_user(
        self, *requests: list[dict[str, int]], settings: LedgerSettings | None = None
    ) -> subprocess.Popen[str]:
        """A process that connects and asks for leases; its first line of output tells what it got."""
        order = {
            "state_dir": str(self.directory),
            "settings": (settings or self.settings).to_wire(),
            "requests": requests,
        }
        return self._run(_USER, order)

    def processes(self) -> list[int]:
        """Every process that has this ledger's directory in its command line: keeper and store among them."""
        needle, me, found = str(self.directory).encode(), os.getpid(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != me:
                try:
                    words = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if needle in words:
                    found.append(int(entry.name))
        return found

    def clean_up(self) -> None:
        """End what the test started; keeper and store must then leave by themselves."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=20)
        try:
            wait_until(lambda: not self.processes(), f"keeper and store of {self.directory} to leave\n{self.log}")
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)

    def _run(self, program: str, order: dict[str, Any]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.started.append(process)
        return process


def told_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The first line a process prints, as JSON."""
    return _told(process)


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process ended without a word"
    found: dict[str, Any] = json.loads(line)
    return found


def ledger_in(directory: Path, devices: str = "sim0=100MiB,sim1=100MiB", **more: Any) -> LedgerUnderTest:
    """A ledger with declared devices and quick timings."""
    fields = {"state_dir": directory, "devices": parse_devices(devices), "reserve_bytes": 0, "timings": QUICK} | more
    return LedgerUnderTest(directory, LedgerSettings(**fields))


def ask(size: int = 100 * MIB, device: str = "sim0", *, holder: str = "job:test", priority: int = 10) -> LeaseRequest:
    """A request for one device."""
    return LeaseRequest(new_request_id(), holder, HolderKind.JOB, ({device: size},), priority)


def read_proc(pid: int, name: str) -> bytes:
    """A file of /proc/<pid>."""
    return Path(f"/proc/{pid}/{name}").read_bytes()


def descriptors() -> set[str]:
    """The numbers of this process's open descriptors."""
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def gone(pid: int) -> bool:
    """Whether there is no such process, or only its zombie."""
    try:
        return read_proc(pid, "stat").rpartition(b")")[2].split()[0] == b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
