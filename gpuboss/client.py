"""The ledger as a program uses it: ask for memory on devices, wait for it, give it back, look.

Called by the broker's slots and by the command line. A client holds a connection to its host's keeper
(`gpuboss.keeper_link`), which starts one if need be, and a few to the lease store (`gpuboss.store`). Nothing here
renews a lease: the keeper does that for holders that live.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from types import TracebackType
from typing import Any

from gpuboss import errors
from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import ProcessIdentity
from gpuboss.keeper_link import KeeperLink
from gpuboss.lease_wire import ask_for, explain_shortage, snapshot_from
from gpuboss.leases import Fence, Lease, LeaseRequest, LeaseState, Snapshot
from gpuboss.scripts import Script
from gpuboss.settings import LedgerSettings
from gpuboss.state_dir import StateDir
from gpuboss.store import Store
from gpuboss.waiting import Asking, WaitingRoom

__all__ = ["Client", "LedgerSettings"]

_FAREWELL_S = 1.0
"""How long `close` tries to give up what is still asked for; after that the keeper and the store's clock do."""
_log = logging.getLogger(__name__)


class Client:
    """One process's use of the ledger; safe for many tasks of one event loop. `connect` makes one, `close` ends it."""

    def __init__(self, state: StateDir, link: KeeperLink, store: Store) -> None:
        """For `connect`."""
        self.state = state
        """Where the ledger keeps its files on this host."""
        self.devices: tuple[Device, ...] = link.welcome.devices
        """The node's devices, in index order."""
        self._link = link
        self._store = store
        self._node = link.welcome.node
        self._owner = ProcessIdentity.current()
        self._room = WaitingRoom(store, link.welcome.timings)
        link.on_epoch = self._hurry
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, settings: LedgerSettings, *, name: str) -> Client:
        """Connect to the ledger; its keeper is started if there is none. `name` shows who we are in its log.

        Raises StateDirError, LedgerConflict (other devices or another store than the ledger has), DeviceError,
        StoreUnfit, StoreUnavailable.
        """
        state = StateDir.resolve(settings.state_dir)
        link = KeeperLink(state, settings, name)
        await link.open()
        store = Store(link.welcome.store_url, link.welcome.timings)
        client = cls(state, link, store)
        try:
            await client._room.start()
        except BaseException:
            await client.close()
            raise
        client._serving = asyncio.create_task(client._room.main_loop(), name=f"gpuboss-client {name}")
        return client

    @property
    def store_up(self) -> bool:
        """Whether the lease store answered last. What runs does not need it; new leases do."""
        return self._store.up

    async def acquire(self, request: LeaseRequest) -> Lease:
        """Ask for a lease: it comes back granted, or queued (then `wait_granted`). Asking again gives the same lease.

        Raises LeaseRefused when no option fits even the empty devices; StaleFence when the request is over already;
        StoreUnavailable when the store did not answer within the renew deadline (10 s): then the request is given up.
        """
        asking = self._room.enter(ask_for(request, self._node, self._owner))
        try:
            reply = await self._store.call(Script.ACQUIRE, asking.arguments)
        except BaseException:
            # Cancelled, or no answer: it may be granted all the same, to nobody.
            self._room.abandon(request.request_id)
            raise
        if reply["status"] == "refused":
            self._room.leave(request.request_id)
            raise errors.LeaseRefused(f"{request.holder} can never be granted {explain_shortage(reply['shortage'])}")
        asking.learn(reply["lease"])
        return self._outcome(asking)

    async def wait_granted(self, lease: Lease) -> Lease:
        """Wait until a queued lease is granted. It keeps its place when the store restarts.

        Raises LeaseRefused when its devices have become too small for it, StaleFence when it was given up meanwhile.
        Whoever stops waiting still has the lease, and must `cancel` it.
        """
        asking = self._room.find(lease.id)
        if asking is None:
            if lease.state is LeaseState.QUEUED:
                raise errors.StaleFence(f"lease {lease.id} of {lease.holder} is not waited for any more")
            return lease
        await asking.changed.wait()
        return self._outcome(asking)

    async def cancel(self, lease: Lease) -> None:
        """Give up a lease that is queued, or granted and unused; harmless when it is over.

        Where the store does not answer, it is done as soon as it does.
        """
        self._room.leave(lease.id)
        try:
            reply = await self._store.call(Script.CANCEL, {"id": lease.id})
        except errors.StoreUnavailable as error:
            _log.warning("lease %s of %s is given up later: %s", lease.id, lease.holder, error)
            self._room.abandon(lease.id)
            return
        except asyncio.CancelledError:
            self._room.abandon(lease.id)
            raise
        if reply["state"] == LeaseState.ACTIVE:
            # Its holder was seen in the node's books. If it has gone from there, the keeper frees the lease.
            await self._link.sweep()

    async def release(self, lease: Lease) -> None:
        """Give back a lease whose processes are dead and whose row in the node ledger is gone. Harmless when repeated.

        Where the store does not answer, the keeper frees the lease later: it sees that the row is gone.
        """
        asking = self._room.leave(lease.id)
        known = asking.lease.fence if asking is not None and asking.lease is not None else None
        fence = known or lease.fence
        if fence is None:
            await self.cancel(lease)
            return
        try:
            reply = await self._free(lease.id, fence)
            if reply["status"] == "stale":
                # A store that had forgotten it granted it anew meanwhile: the same request, under another fence.
                await self._free(lease.id, Fence(reply["lease"]["epoch"], reply["lease"]["seq"]))
        except errors.StoreUnavailable as error:
            _log.warning("lease %s of %s is freed by the keeper: %s", lease.id, lease.holder, error)
            return
        if self._must_settle(lease):
            await self._link.sweep()

    async def snapshot(self) -> Snapshot:
        """The node's devices and leases at one moment. Raises StoreUnavailable."""
        return snapshot_from(await self._store.call(Script.SNAPSHOT, {"node": self._node}), self.devices)

    async def sweep(self) -> None:
        """Have the keeper look for deaths now; returns when what is left of dead holders is ended and freed."""
        await self._link.sweep()

    async def close(self) -> None:
        """Give up what is still waited for and leave. Active leases stay: they are their holders'."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
            self._serving = None
        for request_id in self._room.open_requests():
            with contextlib.suppress(errors.GpubossError):
                await self._store.call(Script.CANCEL, {"id": request_id}, within_s=_FAREWELL_S)
            self._room.leave(request_id)
        await self._link.close()
        await self._store.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _hurry(self) -> None:
        self._store.hurry()
        self._room.hurry()

    def _outcome(self, asking: Asking) -> Lease:
        """The lease as it stands, unless it is over."""
        lease_id, state = asking.view["id"], LeaseState(asking.view["state"])
        match state:
            case LeaseState.REFUSED:
                self._room.leave(lease_id)
                raise errors.LeaseRefused(
                    f"lease {lease_id} can never be granted {explain_shortage(_why(asking.view))}"
                )
            case LeaseState.CANCELLED | LeaseState.FREED:
                self._room.leave(lease_id)
                raise errors.StaleFence(f"lease {lease_id} is {state}: ask for a new one under a new request id")
            case _:
                assert asking.lease is not None
                return asking.lease

    async def _free(self, lease_id: str, fence: Fence) -> dict[str, Any]:
        return await self._store.call(Script.RELEASE, {"id": lease_id, "epoch": fence.epoch, "seq": fence.seq})

    def _must_settle(self, lease: Lease) -> bool:
        """Whether the lease's memory is given back by a driver, in its own time."""
        return any(
            device.measured and device.kind is not DeviceKind.CPU
            for device in self.devices
            if device.id in lease.shares
        )


def _why(view: dict[str, Any]) -> Any:
    return json.loads(view["why"])
