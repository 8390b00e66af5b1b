"""A shim with a node ledger and engines made of a few lines of Python."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from gpuboss.devices import Device, DeviceKind
from gpuboss.node_ledger import LedgerRow, NodeLedger
from inference.process import LaunchOrder, LeaseOrder

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
