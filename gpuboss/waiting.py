"""A client's leases that are not active yet: wakes their waiters, and keeps their places.

Run by `gpuboss.client`, which enters every request here before it asks the store and takes it out when it is given up.
One task reads the store's stream of events; whatever was said or missed, it looks at every open request once per tick.
A request that the store has forgotten is asked for again, under its id and with its old place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from typing import Any

from gpuboss import errors
from gpuboss.lease_wire import lease_from
from gpuboss.leases import OVER, Lease, LeaseState
from gpuboss.scripts import Script
from gpuboss.settings import Timings
from gpuboss.store import Store

__all__ = ["Asking", "WaitingRoom"]

_RETRY_S = 0.05
_log = logging.getLogger(__name__)


class Asking:
    """One open request."""

    __slots__ = ("arguments", "changed", "lease", "view")

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        """Of the script `acquire`."""
        self.view: dict[str, Any] = {}
        """What the store said of it last; empty before its first answer."""
        self.lease: Lease | None = None
        """The same as a value; None before, and for a lease the store only remembers to be over."""
        self.changed = asyncio.Event()
        """Set when it is queued no more."""

    def learn(self, view: dict[str, Any]) -> None:
        """Take in what the store says."""
        self.view = view
        if "holder" in view:
            self.lease = lease_from(view)
        if view["state"] != LeaseState.QUEUED:
            self.changed.set()


class WaitingRoom:
    """All open requests of one client; one task serves them."""

    def __init__(self, store: Store, timings: Timings) -> None:
        self._store = store
        self._timings = timings
        self._open: dict[str, Asking] = {}
        self._abandoned: set[str] = set()
        """Requests given up while the store did not answer: cancelled as soon as it does."""
        self._place: str | None = None
        self._look_at_all = asyncio.Event()

    def enter(self, arguments: dict[str, Any]) -> Asking:
        """Begin to look after a request; the same one again for an id that is known."""
        return self._open.setdefault(arguments["id"], Asking(arguments))

    def find(self, request_id: str) -> Asking | None:
        """The open request of this id."""
        return self._open.get(request_id)

    def leave(self, request_id: str) -> Asking | None:
        """Stop looking after a request; what was known of it."""
        return self._open.pop(request_id, None)

    def abandon(self, request_id: str) -> None:
        """Stop looking after a request, and have it cancelled whether or not it reached the store."""
        self._open.pop(request_id, None)
        self._abandoned.add(request_id)
        self._look_at_all.set()

    def open_requests(self) -> list[str]:
        """Ids of the requests that are looked after."""
        return list(self._open)

    def hurry(self) -> None:
        """Look at everything now: the store began a new life, or the keeper did."""
        self._look_at_all.set()

    async def start(self) -> None:
        """Find the place on the stream to read on from, before the first request is made."""
        self._place, _ = await self._store.read_events(None, 0)

    async def main_loop(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve_stream(), name="gpuboss-events")
            tasks.create_task(self._serve_hurried(), name="gpuboss-looks")

    async def _serve_stream(self) -> None:
        next_look_s = time.monotonic() + self._timings.tick_s
        while True:
            told: set[str] = set()
            try:
                block_s = max(0.001, next_look_s - time.monotonic())
                self._place, events = await self._store.read_events(self._place, block_s)
                told = {event.lease_id for event in events if event.lease_id in self._open}
            except errors.StoreUnavailable:
                self._place = None  # what was said meanwhile is missed; the look makes up for it
                await asyncio.sleep(_RETRY_S)
            if time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + self._timings.tick_s
                self._look_at_all.set()
            elif told:
                await self._look(told)

    async def _serve_hurried(self) -> None:
        while True:
            await self._look_at_all.wait()
            self._look_at_all.clear()
            await self._look(self._open)
            for request_id in list(self._abandoned):
                await self._cancel(request_id)

    async def _look(self, ids: Iterable[str]) -> None:
        wanted = list(ids)
        if not wanted:
            return
        try:
            reply = await self._store.call_once(Script.LOOK, {"ids": wanted})
            for view in reply["leases"] or ():
                self._learn(view)
            for request_id in reply["unknown"] or ():
                await self._ask_again(request_id)
        except errors.GpubossError as error:
            _log.debug("a look failed, the next one makes up for it: %s", error)

    def _learn(self, view: dict[str, Any]) -> None:
        asking = self._open.get(view["id"])
        if asking is None:
            return
        asking.learn(view)
        if view["state"] == LeaseState.ACTIVE or LeaseState(view["state"]) in OVER:
            del self._open[view["id"]]

    async def _ask_again(self, request_id: str) -> None:
        """The store forgot it: asked for anew, in its old place.

        One that was granted before may have to wait again, while its holder goes on to use what it was granted:
        whether it may, the node's books decide.
        """
        asking = self._open.get(request_id)
        if asking is None or not asking.view:
            return
        place = {"order": asking.view["order"]}
        reply = await self._store.call_once(Script.ACQUIRE, asking.arguments | place)
        if reply["status"] == "refused":
            self._learn({"id": request_id, "state": LeaseState.REFUSED, "why": json.dumps(reply["shortage"])})
        else:
            self._learn(reply["lease"])

    async def _cancel(self, request_id: str) -> None:
        try:
            await self._store.call_once(Script.CANCEL, {"id": request_id})
            self._abandoned.discard(request_id)
        except errors.GpubossError as error:
            _log.debug("request %s is not cancelled yet: %s", request_id, error)
