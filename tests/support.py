"""Waiting for conditions, never for time. Used by every tier."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


def wait_until(predicate: Callable[[], object], what: str, *, timeout_s: float = 20.0) -> None:
    """Return when `predicate()` is true; fail naming `what` after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    pause = 0.002
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


async def until(predicate: Callable[[], object | Awaitable[object]], what: str, *, timeout_s: float = 20.0) -> None:
    """Async `wait_until`; the predicate may be a coroutine function."""
    deadline = time.monotonic() + timeout_s
    pause = 0.002
    while True:
        result = predicate()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain: {what}")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.1)
