"""A client's eyes and ears on the store: what happens to the leases it asked for, holds or wants to hear of.

Run by `gpuboss.client`. One task hears the store's stream of events, but only while somebody waits for something it may
say; another looks at every open request and every watched lease once per tick, whatever was said or missed. So nothing
is lost, and a holder that waits for nothing costs one look per tick.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from gpuboss import errors
from gpuboss.lease_wire import lease_from
from gpuboss.leases import OVER, Lease, LeaseState
from gpuboss.scripts import Script
from gpuboss.settings import Timings
from gpuboss.store import MISSED, Event, Store
from gpuboss.waiting import WaitingRoom

__all__ = ["EventSource", "LedgerEvent", "LedgerWatch", "Lookout", "Tell"]

_RETRY_S = 0.05
_MOST_UNREAD = 10_000
"""Events kept for a watcher that does not read them; as many as the store keeps."""
_log = logging.getLogger(__name__)

Tell = Callable[[Lease], None]


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """Something that happened in the ledger."""

    what: str
    """The state that a lease entered (queued, granted, active, ending, freed, refused, cancelled); notice: it was told
    to yield; withdrawn: it need not any more; epoch: the store began a new life; missed: some events were not heard, so
    whoever keeps a picture of the ledger takes a new snapshot."""
    lease_id: str
    """Empty for `epoch` and `missed`."""
    holder: str
    """The lease's, e.g. "job:sft-12"; empty where it is not known."""
    node: str
    """The node that asked, by its name in the store."""
    at_ms: int
    """The store's wall clock, ms since 1970; 0 for `missed`."""


class EventSource(Protocol):
    """Who tells watches what happens."""

    listening: asyncio.Event
    """Set while every event is heard."""

    def admit(self, watch: LedgerWatch) -> None:
        """Tell this watch of every event."""

    def dismiss(self, watch: LedgerWatch) -> None:
        """Tell it no more."""


class LedgerWatch:
    """Events as they come: `async for event in client.watch()`. What happens after `started()` is heard, in order."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._unread: asyncio.Queue[LedgerEvent] = asyncio.Queue()
        self._overflowed = False
        source.admit(self)

    async def started(self) -> None:
        """Return when every event from now on will be heard. Take a snapshot after it to have the whole picture."""
        await self._source.listening.wait()

    def close(self) -> None:
        """Hear no more."""
        self._source.dismiss(self)

    def tell(self, event: LedgerEvent) -> None:
        """Called by the source."""
        if self._unread.qsize() >= _MOST_UNREAD:
            self._overflowed = True
            return
        if self._overflowed:
            self._overflowed = False
            self._unread.put_nowait(_missed())
        self._unread.put_nowait(event)

    def __aiter__(self) -> LedgerWatch:
        return self

    async def __anext__(self) -> LedgerEvent:
        return await self._unread.get()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    async def __aenter__(self) -> LedgerWatch:
        await self.started()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class _Watched:
    """One lease somebody wants to hear of."""

    __slots__ = ("at_once", "lease", "on_lost", "on_notice")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        """As it was told last."""
        self.on_notice: Tell | None = None
        self.on_lost: Tell | None = None
        self.at_once = False
        """Whether notices are to be heard when they are said."""


class Lookout:
    """See the module."""

    def __init__(
        self, store: Store, timings: Timings, room: WaitingRoom, still_held: Callable[[Lease], Awaitable[bool]]
    ) -> None:
        """`still_held`: whether the node's books have this lease with this fence."""
        self.listening = asyncio.Event()
        """Set while every event is heard."""
        self._store = store
        self._timings = timings
        self._room = room
        self._still_held = still_held
        self._watched: dict[str, _Watched] = {}
        self._watches: list[LedgerWatch] = []
        self._wanted = asyncio.Event()
        """Set while somebody waits for what the stream may say."""
        self._look_now = asyncio.Event()
        self._looked_s = time.monotonic()
        self.overslept_s = -math.inf
        """`time.monotonic()` when this process was last found to have been suspended for so long that its waiters have
        been given up."""
        self._place: str | None = None

    # -- who wants to hear what --------------------------------------------------------------------------------------

    def on_notice(self, lease: Lease, tell: Tell, *, at_once: bool) -> None:
        """Have `tell` called when this lease is told to yield, and when it need not any more."""
        watched = self._watched.setdefault(lease.id, _Watched(lease))
        watched.on_notice, watched.at_once = tell, at_once
        if at_once:
            self.reconsider()
        if lease.notice is not None:
            tell(lease)

    def on_lost(self, lease: Lease, tell: Tell) -> None:
        """Have `tell` called, once, when this lease is over or another's. From any thread."""
        self._watched.setdefault(lease.id, _Watched(lease)).on_lost = tell

    def forget(self, lease_id: str) -> None:
        """Nobody wants to hear of this lease any more."""
        self.drop(lease_id)
        self.reconsider()

    def drop(self, lease_id: str) -> None:
        """As `forget`, from any thread; the next look finds whether there is still a reason to listen."""
        self._watched.pop(lease_id, None)

    def admit(self, watch: LedgerWatch) -> None:
        """Tell this watch of every event."""
        self._watches.append(watch)
        self.reconsider()

    def dismiss(self, watch: LedgerWatch) -> None:
        """Tell it no more."""
        if watch in self._watches:
            self._watches.remove(watch)
            self.reconsider()

    def reconsider(self) -> None:
        """Listen while there is a reason to: called when one has come or gone."""
        if self._watches or self._room.is_waited_in or any(one.at_once for one in list(self._watched.values())):
            self._wanted.set()
        else:
            self._wanted.clear()

    def hurry(self) -> None:
        """Look at everything now: the store began a new life, or the keeper did."""
        self._place = None
        self._look_now.set()

    def look_now(self) -> None:
        """Look at everything now."""
        self._look_now.set()

    # -- the tasks -----------------------------------------------------------------------------------------------------

    async def main_loop(self) -> None:
        """Listen and look until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name="gpuboss-events")
            tasks.create_task(self._keep_looking(), name="gpuboss-looks")

    async def _listen(self) -> None:
        while True:
            if not self._wanted.is_set():
                self.listening.clear()
                self._place = None
                await self._wanted.wait()
            try:
                if self._place is None:
                    await self._begin()
                else:
                    await self._hear()
            except errors.StoreUnavailable:
                await asyncio.sleep(_RETRY_S)

    async def _begin(self) -> None:
        """Find the place of now; what was said before it is made up for by a look."""
        was_listening = self.listening.is_set()
        self._place, _ = await self._store.read_events(None, 0)
        if was_listening:
            self._tell_watches([_missed()])
        self.listening.set()
        self._look_now.set()

    async def _hear(self) -> None:
        place = self._place
        read_on, events = await self._store.read_events(place, self._timings.tick_s)
        if self._place != place:  # a new life began meanwhile
            return
        self._place = read_on
        self._tell_watches([_public(event) for event in events])
        if any(event.what == MISSED for event in events):
            self._look_now.set()
        told = {event.lease_id for event in events}
        await self._look(sorted(told & {*self._room.open_requests(), *self._watched}))

    async def _keep_looking(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timings.tick_s):
                    await self._look_now.wait()
            self._look_now.clear()
            await self._look(sorted({*self._room.open_requests(), *self._watched}))
            await self._room.cancel_abandoned()
            self.reconsider()

    def _tell_watches(self, events: Iterable[LedgerEvent]) -> None:
        for event in events:
            for watch in list(self._watches):
                watch.tell(event)

    async def _look(self, ids: list[str]) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s > self._timings.ttl_s:
            self.overslept_s = now_s
        self._looked_s = now_s
        if not ids:
            return
        try:
            reply = await self._store.call_once(Script.LOOK, {"ids": ids})
            for view in reply["leases"] or ():
                self._room.learn(view)
                await self._learn(view)
            for lease_id in reply["unknown"] or ():
                # A watched lease that the store forgot is in its node's books, from which the keeper tells it.
                await self._room.ask_again(lease_id)
        except errors.GpubossError as error:
            _log.debug("a look failed, the next one makes up for it: %s", error)
        self.reconsider()

    async def _learn(self, view: dict[str, Any]) -> None:
        watched = self._watched.get(view["id"])
        if watched is None:
            return
        if await self._is_lost(watched, view):
            if self._watched.pop(view["id"], None) is watched and watched.on_lost is not None:
                _call(watched.on_lost, watched.lease)
            return
        if "holder" not in view or LeaseState(view["state"]) in OVER:
            return
        now = lease_from(view)
        before, watched.lease = watched.lease, now
        # What is left of the grace runs down all the time: only who wants it since when is news.
        if _asker(now) != _asker(before) and watched.on_notice is not None:
            _call(watched.on_notice, now)

    async def _is_lost(self, watched: _Watched, view: dict[str, Any]) -> bool:
        """Whether it is over or another's, and not only by a store that is wrong: the node's books know what runs."""
        fence = watched.lease.fence
        over = LeaseState(view["state"]) in OVER
        other = fence is not None and (view.get("epoch"), view.get("seq")) not in (
            (fence.epoch, fence.seq),
            (None, None),
        )
        if not (over or other):
            return False
        return watched.lease.ttl_s is not None or not await self._still_held(watched.lease)


def _asker(lease: Lease) -> tuple[str, str, int, bool] | None:
    notice = lease.notice
    return None if notice is None else (notice.by, notice.holder, notice.priority, notice.outranks)


def _call(tell: Tell, lease: Lease) -> None:
    try:
        tell(lease)
    except Exception:
        _log.exception("a callback for lease %s of %s failed", lease.id, lease.holder)


def _missed() -> LedgerEvent:
    return LedgerEvent(MISSED, "", "", "", 0)


def _public(event: Event) -> LedgerEvent:
    return LedgerEvent(event.what, event.lease_id, event.holder, event.node, event.at_ms)
