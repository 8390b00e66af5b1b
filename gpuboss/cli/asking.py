"""The wait of `gpuboss run`, and what is shown of it meanwhile.

Called by `gpuboss.cli.supervise`; `gpuboss.taking` does the asking, as for `gpuboss.hold`.
"""

from __future__ import annotations

import asyncio
import time

from gpuboss import errors, taking
from gpuboss.cli import words
from gpuboss.cli.progress import Progress
from gpuboss.client import Client
from gpuboss.leases import Lease, LeaseState
from gpuboss.taking import Wish

__all__ = ["obtain"]

_PATIENCE_S = 0.2
"""Nobody is told of shorter waits."""
_TELL_S = 1.0
"""Between two looks at why we wait."""


async def obtain(client: Client, wish: Wish, progress: Progress) -> Lease:
    """A lease that this process holds; while it is waited for, `progress` shows why.

    Raises what `taking.take` raises. Whatever it raises, also when it is cancelled, nothing is left of what was asked.
    """
    began_s = time.monotonic()
    telling = asyncio.create_task(_tell(client, wish, progress), name="gpuboss-progress")
    try:
        lease = await taking.take(client, wish)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        progress.clear()
    if progress.told_to_wait:
        held, waited = words.shares(lease.shares, client.devices), words.duration(time.monotonic() - began_s)
        progress.say(f"{wish.holder} has {held}, after {waited}")
    return lease


async def _tell(client: Client, wish: Wish, progress: Progress) -> None:
    """Show why we wait, until cancelled."""
    await asyncio.sleep(_PATIENCE_S)
    while True:
        try:
            snapshot = await client.snapshot()
            for lease in snapshot.leases:
                if lease.owner == client.owner and lease.state is LeaseState.QUEUED:
                    options = wish.request(client.devices, snapshot.devices).options
                    progress.waiting(words.waiting(snapshot, lease, options), place=lease.position)
        except errors.GpubossError as error:  # such as a store that is away
            progress.waiting(error.message, place=None)
        await asyncio.sleep(_TELL_S)
