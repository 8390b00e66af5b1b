"""The pool's life as the HTTP face sees it: one object that every endpoint holds.

Built and wired by `app.py`; started and ended by the application's lifespan; `server.py` begins the end at a signal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

from inference.pool import Pool

OpenPool = Callable[[], AbstractAsyncContextManager[Pool]]
"""Gives a pool that runs while the context is open."""


class Broker:
    """Holds the running pool; knows whether it is on its way out."""

    def __init__(self, open_pool: OpenPool, *, log_dir: Path) -> None:
        self.log_dir = log_dir
        """Where the engines' logs lie."""
        self._open_pool = open_pool
        self._stack = AsyncExitStack()
        self._pool: Pool | None = None
        self._ending: asyncio.Task[None] | None = None
        self.started_at_s = time.time()
        """Wall clock; models carry it as `created`."""

    @property
    def pool(self) -> Pool:
        """The running pool. The server accepts no connection before there is one."""
        assert self._pool is not None, "a request before startup"
        return self._pool

    @property
    def stopping(self) -> bool:
        """True from the first word of a shutdown."""
        return self._ending is not None

    async def startup(self) -> None:
        """Open the pool.

        Raises:
            GpubossError, InferenceError: with the remedy.
        """
        self._pool = await self._stack.enter_async_context(self._open_pool())

    def begin_shutdown(self) -> None:
        """Refuse who waits and end the engines; callers being served have the pool's grace. Returns at once."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._stack.aclose(), name="broker-shutdown")

    async def shutdown(self) -> None:
        """The same, and wait until it is done."""
        self.begin_shutdown()
        assert self._ending is not None
        await self._ending
