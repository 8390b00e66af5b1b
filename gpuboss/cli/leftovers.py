"""Ending what a command has started, all of it, before its memory is given to others.

Called by `gpuboss.cli.supervise` when the command's first process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

from gpuboss import processes
from gpuboss.cli.child import Child

__all__ = ["end_leftovers", "kill_all"]

_WEDGED_S = 10.0
"""What SIGKILL has not ended by then is left to the keeper."""
_KILL_AGAIN_S = 0.5
"""Between two rounds of SIGKILL: some may have forked meanwhile."""
_SLOWEST_LOOK_S = 0.1


async def end_leftovers(child: Child, lease_id: str, number: int, *, grace_s: float, hurry: asyncio.Event) -> set[int]:
    """End every process of the command's group and every one that carries the lease: `number`, then SIGKILL.

    `hurry` cuts the grace short. Returns the pids that survive SIGKILL: a driver holds them, or they are not ours.
    """
    left = _left(child, lease_id)
    _signal(left, number)
    now_s = time.monotonic()
    kill_at_s, wedged_at_s = now_s + grace_s, now_s + grace_s + _WEDGED_S
    pause_s = 0.001
    while left:
        now_s = time.monotonic()
        if hurry.is_set() and kill_at_s > now_s:
            wedged_at_s -= kill_at_s - now_s
            kill_at_s = now_s
            hurry.clear()
        if now_s > wedged_at_s:
            break
        if now_s >= kill_at_s:
            _signal(left, signal.SIGKILL)
            kill_at_s = now_s + _KILL_AGAIN_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await hurry.wait()
        pause_s = min(pause_s * 2, _SLOWEST_LOOK_S)
        left = _left(child, lease_id)
    return left


def kill_all(child: Child, lease_id: str) -> None:
    """SIGKILL to everything that belongs to the command, once."""
    child.signal(signal.SIGKILL)
    _signal(_left(child, lease_id), signal.SIGKILL)


def _left(child: Child, lease_id: str) -> set[int]:
    return child.members() | set(processes.carriers([lease_id]).get(lease_id, ()))


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            if number != signal.SIGKILL:
                os.kill(pid, signal.SIGCONT)  # one that is suspended would not hear it
