"""A host on which only the test's processes run: what they really have resident, read as the device `cpu`.

The reading of each process, the book, the store and the keeper's beats are real. Only the host's sum is the test's own,
added up of the same real processes, so that what else runs on this machine changes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from gpuboss.beats import Beats
from gpuboss.devices.cpu import CpuProbe
from gpuboss.devices.linux_memory import LinuxMemory
from gpuboss.identity import ProcessIdentity
from gpuboss.lease_wire import ask_for, lease_from, snapshot_from
from gpuboss.leases import DeviceUse, HolderKind, Lease, LeaseRequest, LeaseState, new_request_id
from gpuboss.ledger_rows import LedgerRow
from gpuboss.node_ledger import NodeLedger
from gpuboss.node_watch import NodeWatch
from gpuboss.scripts import Script
from gpuboss.settings import Timings
from gpuboss.store import Store

MIB = 1 << 20
NODE = "n"
TOTAL = 1000 * MIB
RESERVE = 100 * MIB

_PROGRAM = """
import os, subprocess, sys
held = []
for line in sys.stdin:
    word, size = line.split()
    if word == "grow":
        held.append(bytearray(os.urandom(1 << 16)) * (int(size) << 4))
        print(flush=True)
    elif word == "shrink":
        held.clear()
        print(flush=True)
    elif word == "child":  # in a session of its own, with our words as its own
        code = "import os, time; held = bytearray(os.urandom(1 << 16)) * (%s << 4); print(flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code % size], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        print(child.pid, flush=True)
"""


class Household:
    """The host's memory, of which only these processes (and a file in shared memory) use anything."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.shared: Path | None = None
        self._real = LinuxMemory()

    def total_bytes(self) -> int:
        return TOTAL

    def available_bytes(self) -> int:
        private = [resident - mapped for resident, mapped in filter(None, map(self._real.resident, self.pids))]
        left = self.shared.stat().st_blocks * 512 if self.shared is not None and self.shared.exists() else 0
        return TOTAL - sum(private) - left

    def resident(self, pid: int) -> tuple[int, int] | None:
        return self._real.resident(pid)


class Program:
    """A process that takes memory when it is told to."""

    def __init__(self, household: Household, lease_id: str) -> None:
        environment = dict(os.environ, GPUBOSS_LEASE=lease_id) if lease_id else dict(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._household = household
        self.children: list[int] = []
        household.pids.append(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def grow(self, mib: int) -> None:
        """Take so much more, really resident."""
        self._tell(f"grow {mib}")

    def shrink(self) -> None:
        """Give back what was taken."""
        self._tell("shrink 0")

    def bear(self, mib: int) -> int:
        """Start a child that holds so much and does not end with us; its pid."""
        child = int(self._tell(f"child {mib}"))
        self.children.append(child)
        self._household.pids.append(child)
        return child

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, words: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


class HostWorld:
    """One node with one device, `cpu`. `beat` is a keeper's."""

    def __init__(self, directory: Path, store_url: str) -> None:
        self.household = Household()
        self.book = NodeLedger(directory / "node.sqlite")
        self.store = Store(store_url, Timings(), pool=uuid.uuid4().hex[:12])
        (directory / "holders").mkdir()
        probe = CpuProbe(memory=self.household, reserve_bytes=RESERVE)
        self.devices = probe.devices()
        self.node = NodeWatch(NODE, [probe], self.book)
        self.beats = Beats(self.node, self.store, Timings(), directory / "holders", lambda epoch: None)
        self._programs: list[Program] = []

    async def beat(self) -> None:
        """Raises what a keeper would only log."""
        await self.beats.begin()

    def program(self, lease_id: str = "") -> Program:
        made = Program(self.household, lease_id)
        self._programs.append(made)
        return made

    async def hold(self, mib: int, *, uses: int, holder: str = "slot:robin") -> tuple[Lease, Program]:
        """A lease, granted and entered, whose process uses so much. As a shim does it."""
        lease = await self.ask(mib, holder=holder)
        assert lease.state is LeaseState.GRANTED
        program = self.program(lease.id)
        self.enter(lease, program)
        program.grow(uses)
        await self.beat()
        return lease, program

    def enter(self, lease: Lease, program: Program) -> None:
        """Into the book; raises ActivationRefused."""
        assert lease.fence is not None
        who = ProcessIdentity.of(program.pid)
        self.book.admit(
            LedgerRow(
                *(lease.id, lease.fence.epoch, lease.fence.seq, lease.holder, lease.shares),
                *(who.pid, who.start_ticks, who.pid_namespace),
            )
        )

    async def release(self, lease: Lease) -> None:
        """Give a lease back, whatever its process does."""
        assert lease.fence is not None
        self.book.remove(lease.id, lease.fence.epoch, lease.fence.seq)
        told = {"id": lease.id, "epoch": lease.fence.epoch, "seq": lease.fence.seq}
        await self.store.call(Script.RELEASE, told)

    async def ask(self, mib: int, *, holder: str = "job:asks") -> Lease:
        request = LeaseRequest(new_request_id(), holder, HolderKind.JOB, ({"cpu": mib * MIB},), 10)
        reply = await self.store.call(Script.ACQUIRE, ask_for(request, NODE, ProcessIdentity.current()))
        return lease_from(reply["lease"])

    async def find(self, lease: Lease) -> Lease:
        reply = await self.store.call(Script.LOOK, {"ids": [lease.id]})
        return lease_from(reply["leases"][0])

    async def use(self) -> DeviceUse:
        (use,) = snapshot_from(await self.store.call(Script.SNAPSHOT, {"node": NODE}), self.devices).devices
        return use

    async def close(self) -> None:
        for program in self._programs:
            program.kill()
        self.node.close()
        await self.store.close()
        self.book.close()
