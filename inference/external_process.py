"""Which process an external program is, and what it uses. Looks at the system and at the node's books; changes nothing.

Used by `external.py`, and for leases over HTTP by `coordinator`, in threads: a scan of all processes takes
milliseconds, the books may be busy.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil

from gpuboss import processes
from gpuboss.devices import DeviceKind
from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.leases import Lease, Snapshot
from gpuboss.ledger_rows import LedgerRow
from gpuboss.node_ledger import NodeLedger
from gpuboss.state_dir import StateDir

__all__ = ["find", "find_in_container", "lease_of", "observed", "use_of"]

_PROC = Path("/proc")


def find(
    pattern: re.Pattern[str], known: ProcessIdentity | None = None, *, but: str | None = None
) -> ProcessIdentity | None:
    """The program's process: `known` while that lives, else the one that started first of those that match.

    Of a parent and its child that both match, that is the parent. Never this broker, nor one whose command line has
    `but` in it.
    """
    if known is not None and known.is_alive() is Liveness.ALIVE:
        return known

    def matches(process: psutil.Process) -> bool:
        line = " ".join(process.cmdline())
        return pattern.search(line) is not None and (but is None or but not in line)

    return _first(matches)


def find_in_container(container_id: str) -> ProcessIdentity | None:
    """The first process of a container, which ends with it. Its control group has the container's id in its name."""
    return _first(lambda process: container_id in (_PROC / str(process.pid) / "cgroup").read_text())


def _first(is_meant: Callable[[psutil.Process], bool]) -> ProcessIdentity | None:
    """Of the processes that are meant, the one that started first."""
    found: list[tuple[float, int]] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and is_meant(process):
                found.append((process.create_time(), process.pid))
    for _, pid in sorted(found):
        with contextlib.suppress(ProcessLookupError):
            return ProcessIdentity.of(pid)
    return None


def lease_of(process: ProcessIdentity, state: StateDir) -> LedgerRow | None:
    """The row under which it, or a process above or below it, runs already."""
    near = processes.family(process.pid)
    with contextlib.suppress(psutil.Error):
        near |= {parent.pid for parent in psutil.Process(process.pid).parents()}
    with NodeLedger(state.ledger_path) as books:
        rows = books.rows()
    for row in rows:
        if row.pid_namespace == process.pid_namespace and {row.pid, row.engine_pid} & near:
            return row
    carried = processes.carriers([row.lease_id for row in rows])
    return next((row for row in rows if set(carried.get(row.lease_id, ())) & near), None)


def use_of(process: ProcessIdentity, snapshot: Snapshot, host_memory: bool) -> dict[str, int]:
    """Bytes by device that it uses without a lease, as far as drivers tell; of host memory only where that is meant."""
    near = processes.family(process.pid)
    found: dict[str, int] = {}
    for use in snapshot.devices:
        if use.device.kind is DeviceKind.CPU:
            size = _resident(near) if host_memory else 0
        else:
            size = sum(stranger.bytes or 0 for stranger in use.foreign_pids if stranger.pid in near)
        if size:
            found[use.device.id] = size
    return found


def observed(lease: Lease, state: StateDir) -> int | None:
    """What its processes use of its devices, by the keeper's last reading; None where nobody measures it."""
    with NodeLedger(state.ledger_path) as books:
        priors = books.priors()
    sizes = [priors[device].observed.get(lease.id) for device in lease.shares if device in priors]
    told = [size for size in sizes if size is not None]
    return sum(told) if told else None


def _resident(pids: set[int]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            total += psutil.Process(pid).memory_info().rss
    return total
