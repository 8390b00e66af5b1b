"""What there is and what happens, for programs without an event loop: `gpuboss.devices`, `snapshot` and `watch`.

Called by programs and notebooks; calls `gpuboss.session`. Coroutines use `gpuboss.Client`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import TracebackType

from gpuboss.leases import DeviceUse, Snapshot
from gpuboss.session import Session, session_for
from gpuboss.settings import LedgerSettings
from gpuboss.watching import LedgerEvent, LedgerWatch

__all__ = ["LedgerEvents", "devices", "snapshot", "watch"]


def devices(settings: LedgerSettings | None = None) -> tuple[DeviceUse, ...]:
    """This node's devices and how much of each is used by whom, in index order.

    Raises what `gpuboss.hold` raises when there is no ledger to be had.
    """
    return snapshot(settings).devices


def snapshot(settings: LedgerSettings | None = None) -> Snapshot:
    """This node's devices and leases at one moment. Raises as `devices`."""
    session = session_for(settings)
    return session.run(session.client.snapshot())


def watch(settings: LedgerSettings | None = None) -> LedgerEvents:
    """What happens in the ledger from now on, on all its nodes: `for event in gpuboss.watch(): ...`.

    Every event after this call is heard, in order. `close` it, or use it in a `with` block, to hear no more. Raises as
    `devices`.
    """
    return LedgerEvents(session_for(settings))


class LedgerEvents(Iterator[LedgerEvent]):
    """What `watch` returns. Ends when it is closed, from whichever thread."""

    def __init__(self, session: Session) -> None:
        self._unread: queue.SimpleQueue[LedgerEvent | None] = queue.SimpleQueue()
        events = session.run(_started(session))
        self._hearing: Future[None] = session.begin(_hear(events, self._unread.put))
        self._hearing.add_done_callback(partial(_end, self._unread))

    def close(self) -> None:
        """Hear no more; what was heard and not read yet is dropped."""
        self._hearing.cancel()

    def __iter__(self) -> LedgerEvents:
        return self

    def __next__(self) -> LedgerEvent:
        event = self._unread.get() if not self._hearing.done() else None
        if event is None or self._hearing.cancelled():
            raise StopIteration
        return event

    def __enter__(self) -> LedgerEvents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_hearing"):
            self._hearing.cancel()


def _end(unread: queue.SimpleQueue[LedgerEvent | None], _: object) -> None:
    unread.put(None)


async def _hear(events: LedgerWatch, put: Callable[[LedgerEvent], None]) -> None:
    """Refers to nothing of whoever reads, so that one who has forgotten to close is noticed to be gone."""
    try:
        async for event in events:
            put(event)
    finally:
        events.close()


async def _started(session: Session) -> LedgerWatch:
    events = session.client.watch()
    try:
        await events.started()
    except BaseException:
        events.close()
        raise
    return events
