"""A client's leases that are not active yet: wakes their waiters, and keeps their places.

`gpuboss.client` enters every request here before it asks the store, and takes it out when it is given up;
`gpuboss.watching` brings what the store says of them. A request that the store has forgotten is asked for again, under
its id and with its old place.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from gpuboss import errors
from gpuboss.lease_wire import lease_from
from gpuboss.leases import OVER, Lease, LeaseRequest, LeaseState
from gpuboss.scripts import Script
from gpuboss.store import Store

__all__ = ["Asking", "WaitingRoom"]

_log = logging.getLogger(__name__)


class Asking:
    """One open request."""

    __slots__ = ("arguments", "changed", "lease", "request", "view")

    def __init__(self, request: LeaseRequest, arguments: dict[str, Any]) -> None:
        self.request = request
        self.arguments = arguments
        """Of the script `acquire`."""
        self.view: dict[str, Any] = {}
        """What the store said of it last; empty before its first answer."""
        self.lease: Lease | None = None
        """The same as a value; None before, and for a lease the store only remembers to be over."""
        self.changed = asyncio.Event()
        """Set when it is queued no more."""

    @property
    def waits(self) -> bool:
        """Whether it is queued, or on its way there."""
        return not self.changed.is_set()

    def learn(self, view: dict[str, Any]) -> None:
        """Take in what the store says.

        Whoever was told of the grant uses it: that it is queued may be an answer from before that comes late, and where
        the store forgot the grant, the node's books decide. So a granted lease is not taken back here.
        """
        self.view = view
        queued = view["state"] == LeaseState.QUEUED
        if "holder" in view and not (queued and self.changed.is_set()):
            self.lease = lease_from(view)
        if not queued:
            self.changed.set()


class WaitingRoom:
    """All open requests of one client."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[str, Asking] = {}
        self._abandoned: set[str] = set()
        """Requests given up while the store did not answer: cancelled as soon as it does."""

    def enter(self, request: LeaseRequest, arguments: dict[str, Any]) -> Asking:
        """Begin to look after a request; the same one again for an id that is known."""
        return self._open.setdefault(request.request_id, Asking(request, arguments))

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

    def open_requests(self) -> list[str]:
        """Ids of the requests that are looked after."""
        return list(self._open)

    @property
    def is_waited_in(self) -> bool:
        """Whether somebody waits for a grant."""
        return any(asking.waits for asking in self._open.values())

    def learn(self, view: dict[str, Any]) -> None:
        """Take in what the store says of one request."""
        asking = self._open.get(view["id"])
        if asking is None:
            return
        asking.learn(view)
        if view["state"] == LeaseState.ACTIVE or LeaseState(view["state"]) in OVER:
            del self._open[view["id"]]

    async def ask_again(self, request_id: str) -> None:
        """The store forgot it: asked for anew, in its old place. Raises StoreUnavailable, NoEpoch.

        One that was granted before may have to wait again, while its holder goes on to use what it was granted:
        whether it may, the node's books decide.
        """
        asking = self._open.get(request_id)
        if asking is None or not asking.view:
            return
        place = {"order": asking.view["order"]}
        reply = await self._store.call_once(Script.ACQUIRE, asking.arguments | place)
        if reply["status"] == "refused":
            self.learn({"id": request_id, "state": LeaseState.REFUSED, "why": json.dumps(reply["shortage"])})
        else:
            self.learn(reply["lease"])

    async def cancel_abandoned(self) -> None:
        """Give up in the store what was abandoned here; what fails is tried again at the next look."""
        for request_id in list(self._abandoned):
            try:
                await self._store.call_once(Script.CANCEL, {"id": request_id})
                self._abandoned.discard(request_id)
            except errors.GpubossError as error:
                _log.debug("request %s is not cancelled yet: %s", request_id, error)
