"""What a dead shim left: its engine's row in the node ledger, which the keeper takes out once all of it is dead.

Called by `engine_run.py` alone. Where the books cannot be written, as on a full disk, the row stays until they can be:
so long the memory is in use. Only a broker that ends does not wait for that; the keeper frees the lease with its row.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

import structlog

from gpuboss.errors import GpubossError
from gpuboss.node_ledger import NodeLedger
from inference.ledger import Ledger

__all__ = ["LeftRow"]

LAST_WAIT_S = 5.0
"""For the row, from the broker's end on."""
SWEEP_S = 1.0
"""For the keeper's answer, which it gives after its talk with the store, before the row is looked for again."""

_log = structlog.get_logger(__name__)


class LeftRow:
    """See the module. Of one engine."""

    def __init__(self, ledger: Ledger) -> None:
        self.given_up = False
        """It stood when the broker could not wait any longer: its lease is not ours to release."""
        self._ledger = ledger
        self._until_s = math.inf

    def hurry(self) -> None:
        """The broker ends: wait a little longer at most."""
        self._until_s = min(self._until_s, asyncio.get_running_loop().time() + LAST_WAIT_S)

    async def wait_gone(self, lease_id: str) -> None:
        """Have the keeper look until the lease's row is gone, or it is given up."""
        loop, pause_s = asyncio.get_running_loop(), 0.01
        while self._stands(lease_id):
            if loop.time() > self._until_s:
                self.given_up = True
                _log.warning("row_left_to_keeper", lease=lease_id, books=str(self._ledger.state.ledger_path))
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._ledger.sweep()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.5)

    def _stands(self, lease_id: str) -> bool:
        try:
            with NodeLedger(self._ledger.state.ledger_path) as books:
                return any(row.lease_id == lease_id for row in books.rows())
        except GpubossError as error:
            _log.warning("node_ledger_unread", lease=lease_id, error=error.message)
            return True
