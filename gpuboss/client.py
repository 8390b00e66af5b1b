"""The ledger as a program uses it: ask for memory on devices, wait for it, use it, give it back, look.

Called by the broker, by the command line, and by `gpuboss.session` for `gpuboss.hold`. A client holds a connection to
its host's keeper (`gpuboss.keeper_link`), which starts one if need be, and a few to the lease store (`gpuboss.store`).
Nothing here renews a lease by itself: the keeper does that for holders that live.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from gpuboss import errors
from gpuboss.entries import Entries
from gpuboss.identity import ProcessIdentity
from gpuboss.keeper_link import KeeperLink
from gpuboss.lease_calls import LeaseCalls, Renewed, fenced, stale
from gpuboss.lease_wire import ask_for, explain_shortage, lease_from, options_told
from gpuboss.leases import OVER, Fence, Lease, LeaseRequest, LeaseState, Shares
from gpuboss.ledger_rows import Ground, SharePeak
from gpuboss.scripts import Script
from gpuboss.settings import LedgerSettings, Timings
from gpuboss.state_dir import StateDir
from gpuboss.store import Reply, Store
from gpuboss.waiting import Asking, WaitingRoom
from gpuboss.watching import LedgerEvent, LedgerWatch, Lookout, Tell
from gpuboss.wire import process_to_wire

__all__ = ["Client", "LedgerEvent", "LedgerSettings", "LedgerWatch", "Renewed"]

_T = TypeVar("_T")
_FAREWELL_S = 1.0
"""How long `close` tries to give up what is still asked for; after that the keeper and the store's clock do."""
_SETTLE_S = 5.0
"""How long memory of an ended holder may take to be seen as free again."""
_SETTLE_PAUSE_S = 0.05
_log = logging.getLogger(__name__)


class Client(LeaseCalls):
    """One process's use of the ledger; safe for many tasks of one event loop. `connect` makes one, `close` ends it."""

    def __init__(self, state: StateDir, link: KeeperLink, store: Store, *, has_loop: bool = False) -> None:
        """For `connect`."""
        super().__init__(store, link.welcome.node, link.welcome.devices)
        self.state = state
        """Where the ledger keeps its files on this host."""
        self.owner = ProcessIdentity.current()
        """This process, as whose requests these are."""
        self.entries = Entries(state)
        """What this process has entered in the node's books."""
        self._link = link
        self._apart = None if has_loop else concurrent.futures.ThreadPoolExecutor(1, "gpuboss-books")
        self._room = WaitingRoom(store)
        self._lookout = Lookout(store, link.welcome.timings, self._room, self._stands_in_books)
        self._errands: set[asyncio.Task[None]] = set()
        link.on_epoch = self._hurry
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, settings: LedgerSettings, *, name: str, has_loop: bool = False) -> Client:
        """Connect to the ledger; its keeper is started if there is none. `name` shows who we are in its log.

        `has_loop`: the event loop is the client's own, and may wait for the node's books.

        Raises StateDirError, LedgerConflict (other devices or another store than the ledger has), DeviceError,
        StoreUnfit, StoreUnavailable.
        """
        state = StateDir.resolve(settings.state_dir)
        link = KeeperLink(state, settings, name)
        await link.open()
        try:
            store = Store(link.welcome.store_url, link.welcome.timings)
            client = cls(state, link, store, has_loop=has_loop)
        except BaseException:
            await link.close()
            raise
        client._serving = asyncio.create_task(client._lookout.main_loop(), name=f"gpuboss-client {name}")
        return client

    @property
    def store_up(self) -> bool:
        """Whether the lease store answered last. What runs does not need it; new leases do."""
        return self._store.up

    @property
    def store_url(self) -> str:
        """Where the store is, credentials included: not for people to see."""
        return self._link.welcome.store_url

    @property
    def timings(self) -> Timings:
        """The ledger's, as its keeper told them."""
        return self._link.welcome.timings

    # -- asking --------------------------------------------------------------------------------------------------------

    async def acquire(self, request: LeaseRequest, *, order: int | None = None) -> Lease:
        """Ask for a lease: it comes back granted, or queued (then `wait_granted`). Asking again gives the same lease.

        `order` is the place of an earlier lease, to be kept.

        Raises LeaseRefused when no option fits even the empty devices; StaleFence when the request is over already;
        StoreUnavailable when the store did not answer within the renew deadline (10 s): then the request is given up.
        """
        asking = self._room.enter(request, self.arguments_of(request) | ({} if order is None else {"order": order}))
        try:
            reply = await self._store.call(Script.ACQUIRE, asking.arguments)
        except BaseException:
            # Cancelled, or no answer: it may be granted all the same, to nobody.
            self._room.abandon(request.request_id)
            self._lookout.look_now()
            raise
        if reply["status"] == "refused":
            self._room.leave(request.request_id)
            raise refusal(request, reply)
        asking.learn(reply["lease"])
        self._lookout.reconsider()
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
        self._forget(lease.id)
        try:
            reply = await self._store.call(Script.CANCEL, {"id": lease.id})
        except errors.StoreUnavailable as error:
            _log.warning("lease %s of %s is given up later: %s", lease.id, lease.holder, error)
            self.abandon(lease.id)
            return
        except asyncio.CancelledError:
            self.abandon(lease.id)
            raise
        if reply["state"] == LeaseState.ACTIVE:
            # Its holder was seen in the node's books. If it has gone from there, the keeper frees the lease.
            await self._let_settle()

    def abandon(self, lease_id: str) -> None:
        """As `cancel`, without waiting for it to be done."""
        self._room.abandon(lease_id)
        self._forget(lease_id)
        self._lookout.look_now()

    def overslept_since(self, moment_s: float) -> bool:
        """Whether this process was suspended after `moment_s` (`time.monotonic()`), for so long that its waiters were
        taken for gone.
        """
        return self._lookout.overslept_s > moment_s

    # -- holding -------------------------------------------------------------------------------------------------------

    async def activate(self, lease: Lease, process: ProcessIdentity | None = None, *, by_word: bool = False) -> Lease:
        """Enter the process that is about to use a granted lease's memory into the node's books; this one by default.

        `by_word`: no process is known (a program elsewhere that renews its lease itself). Memory of an ended holder
        that a driver has not given back yet is waited for (5 s). Where the store does not answer, the books are enough.

        Raises ActivationRefused when the memory is not there, whatever the store granted: nothing is entered, and the
        lease is still to be given back. StaleFence when the lease is over. LedgerBusy, LedgerDamaged,
        StateDirError, LockHeld when another process holds it.
        """
        if lease.fence is None:
            raise errors.StaleFence(f"lease {lease.id} of {lease.holder} is {lease.state}: it cannot be used yet")
        await self.enter(lease, None if by_word else process or self.owner, own=not by_word and process is None)
        try:
            reply = await self._store.call(Script.ACTIVATE, fenced(lease))
        except errors.StoreUnavailable as error:
            _log.warning("lease %s of %s is entered, the store hears of it later: %s", lease.id, lease.holder, error)
            return lease
        except BaseException:
            await asyncio.shield(self._do(self.entries.leave, lease.id))
            raise
        view = reply.get("lease")
        if view is not None and LeaseState(view["state"]) in OVER:
            await self._do(self.entries.leave, lease.id)
            raise stale(lease, view)
        if reply["status"] == "stale":
            # A store that had forgotten it. It is in the books now, and these the keeper tells.
            return lease
        self._room.learn(reply["lease"])
        return lease_from(reply["lease"])

    async def take_over(self, lease_id: str, fence: Fence) -> Lease:
        """Answer from now on for a lease whose asker died and whose holder, another process, lives on.

        It keeps its fence, its class and its notice; repeating it changes nothing. Raises StaleFence when the lease is
        over or another's, or its holder is out of the node's books; StoreUnavailable; LedgerBusy, LedgerDamaged,
        StateDirError. After StoreUnavailable the keeper tells the store of it, for the books know already.
        """
        await self._do(self.entries.take_over, lease_id, fence, self.owner)
        owner = json.dumps(process_to_wire(self.owner))
        told: Reply = {"id": lease_id, "epoch": fence.epoch, "seq": fence.seq, "owner": owner}
        reply = await self._store.call(Script.TAKE_OVER, told)
        if reply["status"] == "stale" and "lease" not in reply:
            await self._link.sweep()  # the keeper tells the store of what its books have
            reply = await self._store.call(Script.TAKE_OVER, told)
        if reply["status"] == "stale":
            state = reply["lease"]["state"] if "lease" in reply else "unknown to the store"
            raise errors.StaleFence(f"lease {lease_id} is {state}, or granted anew to another: it is not taken over")
        return lease_from(reply["lease"])

    async def enter(self, lease: Lease, process: ProcessIdentity | None, *, own: bool) -> None:
        """The first half of `activate`: the node's books. The keeper tells the store of it at its next beat."""
        asking = self._room.find(lease.id)
        adopts = asking.request.adopts if asking is not None else {}

        async def enter() -> None:
            entering = asyncio.ensure_future(self._do(self.entries.enter, lease, process, own=own, adopts=adopts))
            try:
                await asyncio.shield(entering)
            except asyncio.CancelledError:
                # It may be entered all the same; nobody would take it out again.
                with contextlib.suppress(errors.GpubossError):
                    await entering
                    await self._do(self.entries.leave, lease.id)
                raise

        await self._until_settled(enter)

    async def _until_settled(self, claim: Callable[[], Awaitable[None]]) -> None:
        """Claim memory in the node's books: what ended holders had and a driver has not given back is waited for."""
        deadline_s = time.monotonic() + _SETTLE_S
        asked = False
        while True:
            try:
                return await claim()
            except errors.ActivationRefused as error:
                # The keeper may know of somebody's end what the books do not say yet.
                if (asked and error.settling_bytes <= 0) or time.monotonic() > deadline_s:
                    raise
                asked = True
            await self._link.sweep()
            await asyncio.sleep(_SETTLE_PAUSE_S)

    async def renew(self, lease: Lease) -> Lease:
        """Say that the holder of a lease lives. Needed only for leases with a time to live.

        Raises StaleFence when it is over or another's, StoreUnavailable.
        """
        renewed = await self.renew_many([lease])
        if renewed.unknown:
            await self._link.sweep()  # the keeper tells the store of what its books have
            renewed = await self.renew_many([lease])
        if not renewed.leases:
            raise errors.StaleFence(f"lease {lease.id} of {lease.holder} is over, or granted anew under another fence")
        return renewed.leases[0]

    async def resize(self, lease: Lease, options: Sequence[Shares] | None = None, priority: int | None = None) -> Lease:
        """Change what a lease asks for, or holds, and how important it is.

        A waiter may get any other options and keeps its place. A holder keeps its devices (`options` is one option with
        exactly these): it may shrink, or grow where there is room now.

        Raises LeaseRefused with the numbers when it does not fit; then nothing has changed. StaleFence when the lease
        is over or another's, or was resized by somebody else meanwhile. StoreUnavailable.
        """
        if lease.fence is None:
            resized = await self._resize_in_store(lease, options, priority)
            if options is not None and (asking := self._room.find(lease.id)) is not None:
                asking.arguments["options"] = options_told(options, self.node)
            return resized
        if options is not None and (len(options) != 1 or options[0].keys() != lease.shares.keys()):
            raise ValueError(f"lease {lease.id} holds {sorted(lease.shares)}: a holder keeps its devices")
        shares = dict(options[0]) if options else dict(lease.shares)
        shrinks = all(size <= lease.shares[device] for device, size in shares.items())
        # Claimed nowhere before it is granted everywhere: the books give first what the store may then grant to others,
        # and claim last what the store has granted.
        if shrinks:
            await self._do(self.entries.resize, lease, shares)
        resized = await self._resize_in_store(lease, [shares] if options else None, priority)
        try:
            await self._until_settled(lambda: self._do(self.entries.resize, resized, shares))
        except errors.ActivationRefused as error:
            await self._resize_in_store(resized, [lease.shares], lease.priority)
            raise errors.LeaseRefused(f"lease {lease.id} of {lease.holder} cannot grow: {error.message}") from error
        return resized

    async def release(self, lease: Lease) -> None:
        """Give back a lease whose processes are dead, or use its memory no more. Harmless when repeated.

        Its row in the node ledger goes first where this client entered it; else it must be gone already. Where the
        store does not answer, the keeper frees the lease later: it sees that the row is gone. Raises LedgerBusy,
        LedgerDamaged, StateDirError.
        """
        await self._do(self.entries.leave, lease.id)
        asking = self._forget(lease.id)
        known = asking.lease.fence if asking is not None and asking.lease is not None else None
        fence = known or lease.fence
        if fence is None:
            await self.cancel(lease)
            return
        try:
            reply = await self._free(lease.id, fence)
            if reply["status"] == "stale" and "epoch" in reply["lease"]:
                # A store that had forgotten it granted it anew meanwhile: the same request, under another fence.
                await self._free(lease.id, Fence(reply["lease"]["epoch"], reply["lease"]["seq"]))
        except errors.StoreUnavailable as error:
            _log.warning("lease %s of %s is freed by the keeper: %s", lease.id, lease.holder, error)
            return
        if self.must_settle(lease.shares):
            await self._let_settle()

    # -- looking -------------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Have the keeper look for deaths now; returns when what is left of dead holders is ended and freed."""
        await self._link.sweep()

    def ask_to_sweep(self) -> None:
        """As `sweep`, without waiting for it to be done."""
        task = asyncio.create_task(self._link.sweep(), name="gpuboss-sweep")
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def grounds(self, lease_id: str) -> tuple[Ground, ...]:
        """What the admission of a lease's holder rested on, device by device; empty where none is in this node's books.

        Known from the moment it is entered, a beat before `Lease.grounds` is. Raises LedgerBusy, LedgerDamaged.
        """
        return await self._do(self.entries.grounds, lease_id)

    async def peaks(self) -> Mapping[str, tuple[SharePeak, ...]]:
        """Lease id -> the most its living holder was seen to use on this node, of the devices that are measured.

        Raises LedgerBusy, LedgerDamaged.
        """
        return await self._do(self.entries.peaks)

    def watch(self) -> LedgerWatch:
        """What happens in the ledger from now on, on all its nodes, event by event; see `LedgerWatch`."""
        return LedgerWatch(self._lookout)

    def on_notice(self, lease: Lease, callback: Tell, *, at_once: bool = True) -> None:
        """Have `callback` called with the lease when it is told to yield (`lease.notice` says for whom), and again when
        it need not any more (`lease.notice` is None). No notice is lost. It ends with the lease's release.

        Not `at_once`: at the next look, up to a tick later (1 s); that costs less, and works from any thread.
        """
        self._lookout.on_notice(lease, callback, at_once=at_once)

    def on_lost(self, lease: Lease, callback: Tell) -> None:
        """Have `callback` called, once, when the lease is over or another's without having been released here.

        From any thread, as `stop_watching`.
        """
        self._lookout.on_lost(lease, callback)

    def stop_watching(self, lease_id: str) -> None:
        """Call nobody any more for this lease."""
        self._lookout.drop(lease_id)

    # -- the end -------------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """The descriptor by whose end the keeper sees this process's; -1 while there is none."""
        return self._link.fileno()

    async def close(self) -> None:
        """Give up what is still waited for and leave. Active leases stay: they are their holders'."""
        for task in [*self._errands, *filter(None, [self._serving])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._serving = None
        await asyncio.gather(*map(self._bid_farewell, self._room.open_requests()))
        await self._link.close()
        await self._store.close()
        with contextlib.suppress(RuntimeError):  # closed before
            await self._do(self.entries.close)
        if self._apart is not None:
            self._apart.shutdown()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def arguments_of(self, request: LeaseRequest) -> Reply:
        """What the script `acquire` takes."""
        return ask_for(request, self.node, self.owner)

    def must_settle(self, shares: Shares) -> bool:
        """Whether this memory is free only when a reading shows it back."""
        return any(device.measured for device in self.devices if device.id in shares)

    def _hurry(self) -> None:
        self._store.hurry()
        self._lookout.hurry()

    async def _bid_farewell(self, request_id: str) -> None:
        with contextlib.suppress(errors.GpubossError):
            await self._store.call(Script.CANCEL, {"id": request_id}, within_s=_FAREWELL_S)
        self._room.leave(request_id)

    async def _let_settle(self) -> None:
        """Have the keeper read the devices; one that does not answer, for its store does not, will do so later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await self._link.sweep()

    def _forget(self, lease_id: str) -> Asking | None:
        self._lookout.forget(lease_id)
        asking = self._room.leave(lease_id)
        self._lookout.reconsider()
        return asking

    def _outcome(self, asking: Asking) -> Lease:
        """The lease as it stands, unless it is over."""
        lease_id, state = asking.view["id"], LeaseState(asking.view["state"])
        match state:
            case LeaseState.REFUSED:
                self._room.leave(lease_id)
                why = explain_shortage(json.loads(asking.view["why"]))
                raise errors.LeaseRefused(f"lease {lease_id} can never be granted {why}")
            case LeaseState.CANCELLED | LeaseState.FREED:
                self._room.leave(lease_id)
                raise errors.StaleFence(f"lease {lease_id} is {state}: ask for a new one under a new request id")
            case _:
                assert asking.lease is not None
                return asking.lease

    async def _resize_in_store(self, lease: Lease, options: Sequence[Shares] | None, priority: int | None) -> Lease:
        told: Reply = {"id": lease.id} if lease.fence is None else {**fenced(lease), "revision": lease.revision}
        if options is not None:
            told["options"] = options_told(options, self.node)
        if priority is not None:
            told["priority"] = priority
        reply = await self._store.call(Script.RESIZE, told)
        if reply["status"] == "refused":
            why = explain_shortage(reply["shortage"])
            raise errors.LeaseRefused(f"lease {lease.id} of {lease.holder} cannot be given {why}")
        if reply["status"] == "stale":
            raise stale(lease, reply.get("lease"))
        view = reply["lease"]
        self._room.learn(view)
        return lease_from(view)

    async def _free(self, lease_id: str, fence: Fence) -> Reply:
        return await self._store.call(Script.RELEASE, {"id": lease_id, "epoch": fence.epoch, "seq": fence.seq})

    async def _stands_in_books(self, lease: Lease) -> bool:
        try:
            return await self._do(self.entries.has_row, lease)
        except errors.GpubossError as error:
            _log.warning("whether lease %s of %s is lost cannot be told yet: %s", lease.id, lease.holder, error)
            return True

    async def _do(self, act: Callable[..., _T], /, *arguments: Any, **more: Any) -> _T:
        """Something with the node's books, which may wait for other processes: not in an event loop others share."""
        if self._apart is None:
            return act(*arguments, **more)
        return await asyncio.get_running_loop().run_in_executor(self._apart, lambda: act(*arguments, **more))


def refusal(request: LeaseRequest, reply: Reply) -> errors.LeaseRefused:
    """The script `acquire` refused: why, in numbers."""
    return errors.LeaseRefused(f"{request.holder} can never be granted {explain_shortage(reply['shortage'])}")
