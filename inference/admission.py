"""One ticket's way through the queue, as the API holds it. Made by `pool.py`, settled by the scheduler's decisions.

admission = pool.submit(ticket)
try:
    grant = admission.grant_now() or await admission.granted()
    ...                                     # use grant.engine
finally:
    admission.close()                       # always, exactly once counts
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from inference.errors import InferenceError
from inference.events import Ticket
from inference.model import Model
from inference.proxy import EngineClient
from inference.slot_state import SlotState


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to use a slot's engine until the admission is closed."""

    model: Model
    slot_id: str
    node: str
    engine: EngineClient
    queue_s: float
    """Seconds from submission to this grant, loading included."""
    load_s: float
    """Seconds of them that a load of this model took; 0 when it was warm."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a waiting ticket stands."""

    position: int
    """1 is next."""
    waiting: int
    """Tickets in the whole queue."""
    state: SlotState
    """Of the slot it waits for."""
    load_fraction: float | None
    """How far that slot's load is, 0 to 1; None when it does not load or does not say."""
    eta_s: float | None = None
    """Seconds until its turn; None where nobody can tell."""


class Admission:
    """Handle of one submitted ticket; settled once by `grant` or `refuse`, ended once by `close`."""

    __slots__ = ("_close", "_error", "_grant", "_progress", "_waiter", "ticket")

    def __init__(self, ticket: Ticket, *, close: Callable[[Admission], None], progress: Callable[[str], Progress]):
        self.ticket = ticket
        self._close: Callable[[Admission], None] | None = close
        self._progress = progress
        self._grant: Grant | None = None
        self._error: InferenceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def settled(self) -> bool:
        """True once the ticket was granted or refused."""
        return self._grant is not None or self._error is not None

    @property
    def was_granted(self) -> bool:
        """True once the ticket had its engine."""
        return self._grant is not None

    def grant_now(self) -> Grant | None:
        """The grant, or None while the ticket waits.

        Raises:
            InferenceError: the ticket was refused.
        """
        if self._error is not None:
            raise self._error
        return self._grant

    async def granted(self) -> Grant:
        """Wait for the grant.

        Raises:
            InferenceError: the ticket was refused.
        """
        if not self.settled:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        grant = self.grant_now()
        assert grant is not None, "settled without a grant or an error"
        return grant

    def progress(self) -> Progress:
        """Where the ticket stands now."""
        return self._progress(self.ticket.id)

    def close(self) -> None:
        """Leave the queue, or give the engine back; further calls do nothing."""
        close, self._close = self._close, None
        if close is not None:
            close(self)

    def grant(self, grant: Grant) -> None:
        """Settle with a grant. For the pool."""
        self._grant = grant
        self._wake()

    def refuse(self, error: InferenceError) -> None:
        """Settle with an error. For the pool."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
