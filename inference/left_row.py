"""What a dead shim left: its engine's row in the node ledger, which the keeper takes out once all of it is dead.

Called by `engine_run.py` alone.
"""

from __future__ import annotations

import asyncio

import structlog

from gpuboss.errors import GpubossError
from gpuboss.node_ledger import NodeLedger
from inference.ledger import Ledger

__all__ = ["wait_row_gone"]

_log = structlog.get_logger(__name__)


async def wait_row_gone(ledger: Ledger, lease_id: str) -> None:
    """Have the keeper look until the lease's row is gone."""
    pause_s = 0.01
    while _stands(ledger, lease_id):
        await ledger.sweep()
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.5)


def _stands(ledger: Ledger, lease_id: str) -> bool:
    try:
        with NodeLedger(ledger.state.ledger_path) as books:
            return any(row.lease_id == lease_id for row in books.rows())
    except GpubossError as error:
        _log.warning("node_ledger_unread", lease=lease_id, error=error.message)
        return True
