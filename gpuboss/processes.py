"""Processes of a lease: which they are, and their end.

Called by the keeper (`gpuboss.beats`, `gpuboss.node_watch`). Every engine and every child of it carries
`GPUBOSS_LEASE=<lease id>` in its environment, which tells whose it is even when its parents are dead. Linux reads
/proc; elsewhere only recorded pids and their process groups are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from gpuboss.identity import Liveness, ProcessIdentity

__all__ = ["LEASE_VARIABLE", "carriers", "end_processes", "family", "living", "name_of"]

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


def living(pids: Iterable[int]) -> dict[int, str]:
    """Pid -> name of those that run (a zombie does not), empty where the system does not say."""
    return {pid: name for pid in pids if (name := name_of(pid)) is not None}


def name_of(pid: int) -> str | None:
    """What the system calls a process; None for one that is gone or a zombie."""
    try:
        words = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "" if _answers(pid) else None
    name, _, rest = words.partition("(")[2].rpartition(")")
    fields = rest.split()
    if not fields or (fields[0] in "ZXx" and int(fields[17]) <= 1):  # as in `identity`
        return None
    return name


async def end_processes(
    lease_id: str,
    recorded: Iterable[ProcessIdentity],
    look: Callable[[ProcessIdentity], Liveness] = ProcessIdentity.is_alive,
) -> bool:
    """Kill what is left of a lease: the recorded processes and all that carry its id. True once none of them is left.

    False when some are still there after a second (a driver may hold them, they are another user's, or they cannot be
    seen): their memory counts on, and the caller tries again.
    """
    processes = list(recorded)
    deadline = time.monotonic() + _END_S
    pause_s = 0.001
    while True:
        states = [(process.pid, look(process)) for process in processes]
        carrying = set(carriers([lease_id]).get(lease_id, []))
        visible = carrying | {process.pid for process in processes if process.is_alive() is Liveness.ALIVE}
        if not visible and all(state is Liveness.DEAD for _, state in states):
            return True
        if time.monotonic() > deadline:
            return False
        # A pid of another namespace would be somebody else's here, so only those that are seen are killed.
        killed = [_kill(pid) for pid in visible]
        if visible and not any(killed):
            return False  # nobody here is ours to end
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def _kill(pid: int) -> bool:
    """SIGKILL to the process, and to its group where it leads one (its children, on systems without /proc).

    False when it is another user's.
    """
    with contextlib.suppress(ProcessLookupError):
        try:
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
        except PermissionError:
            return False
    return True


def _answers(pid: int) -> bool:
    """Whether there is a process of this number that we may not look at (or no /proc to look at it)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _PROC.is_dir()


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
