"""The store as the keeper minds it: its own private server, restarted whenever it falls, or somebody else's.

Called by `gpuboss.keeper`; calls `gpuboss.server`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gpuboss import errors
from gpuboss.server import StoreServer, find_server
from gpuboss.state_dir import StateDir

__all__ = ["StoreKeeper"]

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_STEADY_S = 3.0
"""After so long a life a fallen server is restarted without a pause."""
_MOST_FAILED_STARTS = 3
_log = logging.getLogger(__name__)


class StoreKeeper:
    """Where the store is, and that it runs."""

    def __init__(self, state: StateDir, shared_url: str | None) -> None:
        """`shared_url`: a store that others run; None: a private one. StoreUnfit when there is no server to run."""
        self._server = None if shared_url else StoreServer(state, find_server())
        self.url = shared_url or (self._server.url if self._server else "")

    @property
    def pid(self) -> int | None:
        """The private server's process; None for a shared store."""
        return self._server.pid if self._server else None

    async def launch(self) -> None:
        """Start the server's process without waiting for it to answer."""
        if self._server:
            await self._server.launch()

    async def wait_ready(self) -> None:
        """Return when the server answers, started anew if need be. StoreUnavailable when it will not."""
        if self._server is None:
            return
        for failed in range(1, _MOST_FAILED_STARTS + 2):
            try:
                await self._server.wait_ready()
                return
            except errors.StoreUnavailable as error:
                _log.error("the store does not start (%d): %s", failed, error)
                if failed > _MOST_FAILED_STARTS:
                    raise
                if failed == _MOST_FAILED_STARTS:
                    _log.error("its files are set aside as %s; it begins empty", self._server.set_data_aside())
            await asyncio.sleep(_FIRST_PAUSE_S)
            await self._server.launch()

    async def mind(self, on_return: Callable[[], None]) -> None:
        """Restart the server whenever it falls, for ever; `on_return` is called when it is back."""
        if self._server is None:
            return
        pause_s = 0.0
        while True:
            since = time.monotonic()
            await self._server.wait_ended()
            pause_s = (
                0.0 if time.monotonic() - since > _STEADY_S else min(pause_s * 2 or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            )
            _log.error("the store (process %s) fell; it is started again in %g s", self._server.pid, pause_s)
            await asyncio.sleep(pause_s)
            await self._server.launch()
            await self.wait_ready()
            _log.info("the store is back as process %s", self._server.pid)
            on_return()

    async def stop(self) -> None:
        """End the private server."""
        if self._server:
            await self._server.stop()
