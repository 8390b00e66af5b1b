"""Processes of a lease: which they are, and their end.

Called by the keeper (`gpuboss.sweep`, `gpuboss.node_watch`). Every engine and every child of it carries
`GPUBOSS_LEASE=<lease id>` in its environment, which tells whose it is even when its parents are dead. Linux reads
/proc; elsewhere only recorded pids and their process groups are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from gpuboss.identity import Liveness, ProcessIdentity

__all__ = ["LEASE_VARIABLE", "carriers", "end_processes", "family"]

LEASE_VARIABLE = "GPUBOSS_LEASE"
"""Set to the lease's id for every process that uses its memory."""

_PROC = Path("/proc")
_END_S = 1.0
"""How long killed processes are waited for before the next sweep looks again."""


def family(root: int) -> set[int]:
    """The process and everything below it, as far as it can be seen."""
    found: set[int] = set()
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(_children(pid))
    return found


def carriers(lease_ids: Collection[str]) -> dict[str, list[int]]:
    """Lease id -> pids of our own user's processes whose environment names it. Never this process."""
    wanted = {f"{LEASE_VARIABLE}={lease_id}".encode(): lease_id for lease_id in lease_ids}
    found: dict[str, list[int]] = {}
    for pid in _all_pids():
        try:
            words = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        for word in words:
            if (lease_id := wanted.get(word)) is not None:
                found.setdefault(lease_id, []).append(pid)
    return found


async def end_processes(lease_id: str, recorded: Iterable[ProcessIdentity]) -> bool:
    """Kill what is left of a lease: the recorded processes and all that carry its id. True once none of them is left.

    False when some are still there after a second (a driver may hold them, or they cannot be seen): their memory
    counts on, and the caller tries again.
    """
    processes = list(recorded)
    deadline = time.monotonic() + _END_S
    pause_s = 0.001
    while True:
        states = [(process.pid, process.is_alive()) for process in processes]
        visible = {pid for pid, state in states if state is Liveness.ALIVE} | set(
            carriers([lease_id]).get(lease_id, [])
        )
        if not visible and all(state is Liveness.DEAD for _, state in states):
            return True
        if time.monotonic() > deadline:
            return False
        for pid in visible:  # a pid of another namespace would be somebody else's here
            _kill(pid)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def _kill(pid: int) -> None:
    """SIGKILL to the process, and to its group where it leads one (its children, on systems without /proc)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            children += map(int, (task / "children").read_text().split())
    except OSError:  # ended meanwhile, or no /proc here
        pass
    return children


def _all_pids() -> list[int]:
    if not _PROC.is_dir():
        return []
    me = os.getpid()
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and int(entry.name) != me]
