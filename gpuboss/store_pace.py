"""How fast a store that failed is tried again: one try at a time for the whole process, however many tasks want it.

Called by `gpuboss.store_link`. The pause between two tries grows from 5 to 250 ms, so that a store which returns is
found within a fraction of a second, and one that stays away costs four tries per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

from redis import exceptions as redis_errors

__all__ = ["Pace"]

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25


class Pace:
    """The process's patience with one store."""

    def __init__(self) -> None:
        self._failures = 0
        self._failed_s = 0.0
        self._reason = ""
        self._pause_s = 0.0
        self._turn = asyncio.Lock()
        self._hurried = asyncio.Event()

    def failed(self, reason: str) -> None:
        """A try came to nothing."""
        longest = min(_FIRST_PAUSE_S * 2 ** min(self._failures, 16), _LONGEST_PAUSE_S)
        # Spread, so that a store which returns does not meet all its hosts at once; it guards nothing.
        self._pause_s = longest * random.uniform(0.8, 1.2)  # noqa: S311
        self._failures += 1
        self._failed_s = time.monotonic()
        self._reason = reason

    def succeeded(self) -> None:
        """The store did what it was asked to."""
        if self._failures:
            self._failures = 0
            self.hurry()

    def hurry(self) -> None:
        """The store is said to be back: who pauses goes on at once."""
        self._hurried.set()
        self._hurried = asyncio.Event()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The time for one try. Who waited while another's failed shares its outcome: raises ConnectionError."""
        if not self._failures:
            yield
            return
        came_s = time.monotonic()
        async with self._turn:
            if self._failures and self._failed_s > came_s:
                raise redis_errors.ConnectionError(self._reason)
            if self._failures:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._failed_s + self._pause_s - time.monotonic()):
                        await self._hurried.wait()
            yield
