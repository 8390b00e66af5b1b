"""Processes in a pid namespace of their own, as in a container that shares this host's directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from gpuboss.leases import Lease
from tests.integration.gpuboss.keeper_harness import ROOT, LedgerUnderTest, told_by

_UNSHARE = (
    *("unshare", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))),
    *("--pid", "--fork", "--mount-proc", "--kill-child"),
)

_CONTAINER = """
import json, os, signal, subprocess, sys
from gpuboss.holders import HolderLock
from gpuboss.identity import ProcessIdentity
from gpuboss.node_ledger import LedgerRow, NodeLedger

order = json.loads(sys.argv[1])
assert os.getpid() == 1, "not in a pid namespace of our own"
reader, writer = os.pipe()
holder = os.fork()
if holder == 0:
    lock = HolderLock(order["lock"]) if order["lock"] else None
    if lock:
        lock.take()
    me = ProcessIdentity.current()
    ledger = NodeLedger(order["ledger"])
    ledger.admit(LedgerRow(order["id"], order["epoch"], order["seq"], order["holder"], order["shares"],
                           pid=me.pid, start_ticks=me.start_ticks, pid_namespace=me.pid_namespace))
    child = subprocess.Popen(["sleep", "600"], pass_fds=(lock.fd,) if lock else ())
    told = {"holder": me.pid, "child": child.pid, "namespace": me.pid_namespace}
    os.write(writer, json.dumps(told).encode() + b"\\n")
    signal.pause()
told = os.read(reader, 1000)
found = json.loads(told)
sys.stdout.write(told.decode())
sys.stdout.flush()
for line in sys.stdin:
    os.kill(found[line.strip()], signal.SIGKILL)
    if line.strip() == "holder":
        os.waitpid(holder, 0)
    print("{}", flush=True)
"""


def why_not() -> str | None:
    """Why there can be no pid namespace here; None when there can."""
    try:
        done = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no pid namespace can be made here: {error}"
    return None if done.returncode == 0 else f"no pid namespace can be made here: {done.stderr.strip()}"


@dataclass
class Container:
    """A pid namespace with a holder in it, and a child of the holder."""

    process: subprocess.Popen[str]
    namespace: int

    def kill(self, who: str) -> None:
        """kill -9 of "holder" or "child", by the first process inside, who sees them."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{who}\n")
        self.process.stdin.flush()
        told_by(self.process)

    def end(self) -> None:
        """Everything in it is killed."""
        self.process.kill()
        self.process.communicate(timeout=20)


def run_container(ledger: LedgerUnderTest, lease: Lease, *, lock: bool = True) -> Container:
    """A holder of a granted lease; with `lock`, it and its child hold its lock file."""
    assert lease.fence is not None
    order = {
        "ledger": str(ledger.state.ledger_path),
        "lock": str(ledger.state.holders_dir / lease.id) if lock else None,
        "id": lease.id,
        "epoch": lease.fence.epoch,
        "seq": lease.fence.seq,
        "holder": lease.holder,
        "shares": dict(lease.shares),
    }
    process = run_elsewhere(ledger, _CONTAINER, order)
    return Container(process, told_by(process)["namespace"])


def run_elsewhere(ledger: LedgerUnderTest, program: str, order: dict[str, Any]) -> subprocess.Popen[str]:
    """A Python program as the first process of a pid namespace."""
    process = subprocess.Popen(
        [*_UNSHARE, sys.executable, "-c", program, json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    ledger.started.append(process)
    return process
