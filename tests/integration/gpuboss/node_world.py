"""A keeper's eyes and beats inside the test: a driver that says what the test wants, a real book, a real store."""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuboss.beats import Beats
from gpuboss.devices import Device, DeviceKind, Reading
from gpuboss.identity import ProcessIdentity
from gpuboss.lease_wire import ask_for, lease_from, snapshot_from
from gpuboss.leases import DeviceUse, HolderKind, Lease, LeaseRequest, new_request_id
from gpuboss.ledger_rows import LedgerRow
from gpuboss.node_ledger import NodeLedger
from gpuboss.node_watch import NodeWatch
from gpuboss.scripts import Script
from gpuboss.settings import Timings
from gpuboss.store import Store

GIB = 1 << 30
NODE = "n"
CARD = Device("GPU-a", DeviceKind.CUDA, "a card", 0, 100 * GIB, 0, measured=True)


class Driver:
    """The driver of one card. Figures in GiB."""

    def __init__(self) -> None:
        self.own = 1
        """What the driver itself uses."""
        self.by_pid: dict[int, int] = {}
        self.kept = 0
        """Of dead processes, not given back."""
        self.per_process = True
        self.well = threading.Event()
        self.well.set()
        self.calls = 0

    def devices(self) -> Sequence[Device]:
        return [CARD]

    def read(self, pids: Collection[int]) -> Sequence[Reading]:
        self.calls += 1
        at_s = time.monotonic()
        self.well.wait()
        used = (self.own + self.kept + sum(self.by_pid.values())) * GIB
        by_pid = {pid: size * GIB for pid, size in self.by_pid.items()} if self.per_process else {}
        return [Reading(CARD.id, used, by_pid, at_s, complete=self.per_process)]


class World:
    """One node with one card. `beat` is a keeper's; `keeper_restarts` begins a new one on the same book."""

    def __init__(self, directory: Path, store_url: str) -> None:
        self.driver = Driver()
        self.book = NodeLedger(directory / "node.sqlite")
        self.store = Store(store_url, Timings(), pool=uuid.uuid4().hex[:12])
        self.holders = directory / "holders"
        self.holders.mkdir()
        self.node = NodeWatch(NODE, [self.driver], self.book)
        self.keeper_restarts()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._seq = 0

    def keeper_restarts(self, **more: Any) -> None:
        self.node.close()
        self.node = NodeWatch(NODE, [self.driver], self.book)
        self.beats = Beats(self.node, self.store, Timings(), self.holders, lambda epoch: None, **more)

    async def beat(self) -> None:
        """Raises what a keeper would only log."""
        await self.beats.begin()
        await self.beats._audit()

    def process(self, size: int) -> subprocess.Popen[bytes]:
        """A process that uses so much of the card."""
        process = subprocess.Popen(["sleep", "600"])
        self._processes.append(process)
        self.driver.by_pid[process.pid] = size
        return process

    def dies(self, process: subprocess.Popen[bytes], *, keeps: int = 0) -> None:
        """It ends, and the driver keeps so much of what it had."""
        process.kill()
        process.wait()
        del self.driver.by_pid[process.pid]
        self.driver.kept += keeps

    def holder(self, size: int, process: subprocess.Popen[bytes] | None = None, **more: Any) -> LedgerRow:
        """Admit a process (or nobody: held by word) as a holder of the card, as the store had granted it."""
        self._seq += 1
        who: dict[str, Any] = {}
        if process is not None:
            identity = ProcessIdentity.of(process.pid)
            who = {name: getattr(identity, name) for name in ("pid", "start_ticks", "pid_namespace")}
        # The fence of a life of the store before this one: what runs is taken in, whatever the store knows.
        row = LedgerRow(f"lease-{self._seq}", 1, self._seq, f"job:{self._seq}", {CARD.id: size * GIB}, **who, **more)
        self.book.admit(row)
        return row

    async def use(self) -> DeviceUse:
        """What everybody is shown of the card."""
        (use,) = snapshot_from(await self.store.call(Script.SNAPSHOT, {"node": NODE}), [CARD]).devices
        return use

    async def leases(self) -> Mapping[str, Lease]:
        reply = await self.store.call(Script.SNAPSHOT, {"node": NODE})
        return {lease.id: lease for lease in snapshot_from(reply, [CARD]).leases}

    async def ask(self, size: int) -> Lease:
        """Ask for so much of the card, to be taken back at once; its state tells whether it was there."""
        request = LeaseRequest(new_request_id(), "job:asks", HolderKind.JOB, ({CARD.id: size * GIB},), 10)
        reply = await self.store.call(Script.ACQUIRE, ask_for(request, NODE, ProcessIdentity.current()))
        await self.store.call(Script.CANCEL, {"id": request.request_id})
        return lease_from(reply["lease"])

    async def close(self) -> None:
        self.driver.well.set()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.node.close()
        await self.store.close()
        self.book.close()
