"""The parts that work, and their life, as the HTTP face sees them: one object that every endpoint holds.

Built and wired by `app.py`; started and ended by the application's lifespan; `server.py` begins the end at a signal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.lease_desk import LeaseDesk
from gpuboss.ledger_rows import Ground, SharePeak
from inference.externals import Externals
from inference.pool import Pool


class Books(Protocol):
    """What is asked of the ledger beside the pool; `gpuboss.client.Client` is the real one."""

    async def peaks(self) -> Mapping[str, tuple[SharePeak, ...]]:
        """By lease, the most that its living holder was seen to use."""

    async def grounds(self, lease_id: str) -> tuple[Ground, ...]:
        """What the admission of a lease's holder rested on, device by device."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs while the broker does."""

    pool: Pool
    desk: LeaseDesk
    externals: Externals
    books: Books


OpenParts = Callable[[], AbstractAsyncContextManager[Parts]]
"""Gives parts that run while the context is open."""


class Broker:
    """Holds the running parts; knows whether it is on its way out."""

    def __init__(self, open_parts: OpenParts, *, log_dir: Path) -> None:
        self.log_dir = log_dir
        """Where the engines' logs lie."""
        self._open_parts = open_parts
        self._stack = AsyncExitStack()
        self._parts: Parts | None = None
        self._ending: asyncio.Task[None] | None = None
        self.started_at_s = time.time()
        """Wall clock; models carry it as `created`."""

    @property
    def pool(self) -> Pool:
        """The running pool. The server accepts no connection before there is one."""
        return self._running.pool

    @property
    def desk(self) -> LeaseDesk:
        """Where leases are asked for over HTTP."""
        return self._running.desk

    @property
    def externals(self) -> Externals:
        """The programs that run beside us."""
        return self._running.externals

    @property
    def books(self) -> Books:
        """What this node's ledger saw of each lease."""
        return self._running.books

    @property
    def stopping(self) -> bool:
        """True from the first word of a shutdown."""
        return self._ending is not None

    async def startup(self) -> None:
        """Open the parts.

        Raises:
            GpubossError, InferenceError: with the remedy.
        """
        self._parts = await self._stack.enter_async_context(self._open_parts())

    def begin_shutdown(self) -> None:
        """Refuse who waits and end the engines; callers being served have the pool's grace. Returns at once."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._stack.aclose(), name="broker-shutdown")

    async def shutdown(self) -> None:
        """The same, and wait until it is done."""
        self.begin_shutdown()
        assert self._ending is not None
        await self._ending

    @property
    def _running(self) -> Parts:
        assert self._parts is not None, "a request before startup"
        return self._parts
