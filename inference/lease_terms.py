"""One slot's lease as it stands, and changes to it that are on their way: what it asks for, its class, its yielding.

Used by `engine_run.py`. The scheduler decides at once and does not wait for the ledger; so what is wanted is kept here,
and one task tells the ledger, one thing after the other, always the latest.
"""

from __future__ import annotations

import asyncio

import structlog

from gpuboss import errors
from gpuboss.leases import Lease
from inference.events import Shares
from inference.ledger import Ledger

__all__ = ["LeaseTerms"]

RETRY_S = 1.0

_log = structlog.get_logger(__name__)


class LeaseTerms:
    """See the module. Belongs to one event loop."""

    def __init__(self, ledger: Ledger, model_id: str) -> None:
        self.lease: Lease | None = None
        """As it was told last; None while there is none."""
        self._ledger = ledger
        self._model_id = model_id
        self._options: tuple[Shares, ...] | None = None
        """What it shall ask for while it is queued."""
        self._priority: int | None = None
        """What class it shall have."""
        self._told: tuple[tuple[Shares, ...] | None, int | None] = (None, None)
        self._yielding = False
        self._teller: asyncio.Task[None] | None = None

    def asked(self, options: tuple[Shares, ...], priority: int) -> None:
        """The lease was asked for with these terms; others that are wanted by now follow."""
        self._told = (options, priority)
        self._options = options if self._options is None else self._options
        self._priority = priority if self._priority is None else self._priority
        self._tell()

    def granted(self, lease: Lease) -> None:
        """The lease is held; what could not be told while it became so is told now."""
        self.lease = lease
        self._tell()

    def want(self, options: tuple[Shares, ...] | None, priority: int) -> None:
        """Have the lease ask for these options (None: as before) in this class."""
        self._options, self._priority = options or self._options, priority
        self._tell()

    def acknowledge(self) -> None:
        """Have the ledger told that the holder yields."""
        self._yielding = True
        self._tell()

    async def close(self) -> None:
        """Tell nothing more."""
        if self._teller is not None:
            self._teller.cancel()
            await asyncio.wait({self._teller})

    def _tell(self) -> None:
        if self.lease is not None and (self._teller is None or self._teller.done()):
            self._teller = asyncio.get_running_loop().create_task(self._tell_all(), name=f"lease of {self._model_id}")

    async def _tell_all(self) -> None:
        while (lease := self.lease) is not None and (self._yielding or self._wanted != self._told):
            try:
                if self._yielding:
                    await self._ledger.ack(lease)
                    self._yielding = False
                else:
                    await self._change(lease)
            except errors.StoreUnavailable:
                await asyncio.sleep(RETRY_S)
            except errors.GpubossError as error:
                _log.debug("lease_not_changed", model=self._model_id, error=error.message)
                if lease is self.lease and lease.fence is None:
                    return  # it is granted this moment, and `granted` goes on
                self._told, self._yielding = self._wanted, False  # it is over, which its owner hears elsewhere

    @property
    def _wanted(self) -> tuple[tuple[Shares, ...] | None, int | None]:
        return self._options, self._priority

    async def _change(self, lease: Lease) -> None:
        wanted = options, priority = self._wanted
        # What is held has its shares; only its class may change.
        if lease.fence is not None or options == self._told[0]:
            options = None
        changed = await self._ledger.resize(lease, options, priority)
        self._told = wanted
        if lease is self.lease:  # it was not granted meanwhile
            self.lease = changed
