"""Leases for programs that speak HTTP: asked for here, waited for over several requests, held by a pid or by word.

Called by `api/leases.py`; calls `gpuboss.client`. What is queued has an errand here: a task that waits for the grant
and enters it in the node's books the moment it comes, whether or not a caller is there to hear of it. What is held is
the ledger's, and outlives this broker.

A lease is held either

1. by a process of this host: the keeper renews it while that lives, and it is freed when it dies. What the process
   uses already is its own; or
2. by word: its caller renews it within `ttl_s`, or it is freed (2 s after that at most). Nobody is killed for it; what
   is used after that counts as foreign.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from coordinator.errors import LeaseDiffers, LeaseElsewhere, LeaseOver, LeaseUnknown
from gpuboss import errors
from gpuboss.devices import Device, DeviceKind
from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.leases import (
    OVER,
    HolderKind,
    Lease,
    LeaseRequest,
    LeaseState,
    Shares,
    Snapshot,
    job_holder,
    new_request_id,
)
from gpuboss.node_ledger import NodeLedger
from gpuboss.sizing import options_for
from gpuboss.state_dir import StateDir
from gpuboss.units import format_bytes
from inference import external_process

__all__ = ["PREFIX", "LeaseDesk", "LeaseLedger", "LeaseWish", "Standing"]

PREFIX = "http-"
"""Every id of a lease that was asked for here begins so; no others are renewed or given back over HTTP."""
DEFAULT_TTL_S = 60.0
"""For leases without a pid, and for how long a waiter keeps its place between two requests."""
LOOK_S = 1.0
"""Between two looks whether the process that is to hold a lease still lives."""
SETTLE_S = 30.0
"""How long the node's books may refuse what the store granted before the lease is given up."""
EXPIRED = "expired"
"""The ledger's reason for the end of a lease that was not renewed."""
FAREWELL_S = 2.0
"""How long those who wait may take to leave the queue when the broker ends; then it is left to the keeper."""
_AGAIN_S = 0.2
_OTHER_ID = "give it back first, or ask by another request_id"

_log = structlog.get_logger(__name__)


class LeaseLedger(Protocol):
    """What the desk needs of the ledger; `gpuboss.client.Client` is the real one, which says what raises what."""

    @property
    def state(self) -> StateDir:
        """Where the books are."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this node."""

    async def acquire(self, request: LeaseRequest) -> Lease:
        """Ask for memory."""

    async def wait_granted(self, lease: Lease) -> Lease:
        """Wait for a queued lease."""

    async def activate(self, lease: Lease, process: ProcessIdentity | None = None, *, by_word: bool = False) -> Lease:
        """Enter its holder in the node's books."""

    async def renew(self, lease: Lease) -> Lease:
        """Say that its holder lives."""

    async def resize(self, lease: Lease, options: Sequence[Shares] | None = None, priority: int | None = None) -> Lease:
        """Change what it asks for."""

    async def cancel(self, lease: Lease) -> None:
        """Give up a lease that was never used."""

    async def release(self, lease: Lease) -> None:
        """Give back a lease."""

    async def find(self, lease_id: str) -> Lease | None:
        """A lease as it stands."""

    async def snapshot(self) -> Snapshot:
        """The whole ledger."""

    async def sweep(self) -> None:
        """Have the keeper look now."""


@dataclass(frozen=True, slots=True)
class LeaseWish:
    """What a caller asks for, checked."""

    vram_bytes: int | None
    """On each device; None: all of each."""
    gpus: int = 1
    only: tuple[str, ...] | None = None
    """The devices to choose from; None: every accelerator."""
    priority: int = 10
    preemptible: bool = False
    grace_s: float = 30.0
    name: str = "http"
    process: ProcessIdentity | None = None
    """Who will use the memory; None: it is held by word."""
    ttl_s: float | None = DEFAULT_TTL_S
    """None where there is a process."""
    request_id: str | None = None
    """The caller's own, to come back with."""
    wait_s: float = 0.0
    """How long the caller waits for it now."""

    def options(self, devices: Sequence[Device], snapshot: Snapshot, seen: Collection[str] = ()) -> tuple[Shares, ...]:
        """Where it may be granted, best first; raises LeaseRefused. `seen`: the devices its process uses already."""
        only = self.only or (tuple(seen) if len(seen) >= self.gpus else None)
        try:
            return options_for(
                devices,
                snapshot.devices,
                vram_bytes=self.vram_bytes,
                exclusive=self.vram_bytes is None,
                gpus=self.gpus,
                only=only,
            )
        except errors.LeaseRefused as error:
            remedy = "Ask for less or for others, or change `devices` or `reserve` in model-boss.yaml"
            raise errors.LeaseRefused(f"{error.message}. {remedy}") from None

    @property
    def size(self) -> tuple[object, ...]:
        """What may differ when a waiter asks again; it keeps its place."""
        return self.vram_bytes, self.gpus, self.only, self.priority


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a caller's lease is."""

    lease: Lease
    held: bool
    """It stands in the node's books: the memory may be used."""


@dataclass(eq=False)
class _Errand:
    """One lease on its way to being held."""

    id: str
    wish: LeaseWish
    lease: Lease | None = None
    """As it was told last; None before the store's first answer."""
    error: errors.GpubossError | LeaseOver | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """The store has said something."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """It is held, or there is an error."""
    task: asyncio.Task[None] | None = None
    callers: int = 0
    """Requests that wait for it now."""
    patience: asyncio.TimerHandle | None = None
    """Ends it when nobody comes back."""

    def tell(self, lease: Lease) -> None:
        self.lease = lease
        self.answered.set()

    def fail(self, error: errors.GpubossError | LeaseOver) -> None:
        self.error = error
        self.answered.set()
        self.settled.set()


class LeaseDesk:
    """All leases that were asked for over HTTP. Belongs to one event loop."""

    def __init__(self, ledger: LeaseLedger) -> None:
        self._ledger = ledger
        self._errands: dict[str, _Errand] = {}
        self._ending: set[asyncio.Task[None]] = set()

    # -- what callers ask ---------------------------------------------------------------------------------------------

    async def ask(self, wish: LeaseWish) -> Standing:
        """Ask for a lease, or go on waiting for one, until it is held or `wait_s` is over.

        A caller who is gone (this is cancelled) leaves the queue, unless they have a request id to come back with.

        Raises:
            LeaseRefused: no device can ever serve it.
            LeaseOver: it is over already: it ended, expired, or was given back.
            LeaseDiffers: this request id holds less already, or for another process.
            ActivationRefused: the store granted it, and the node's books say that the memory is not there.
            StoreUnavailable
        """
        lease_id = PREFIX + (wish.request_id or new_request_id())
        errand = self._errands.get(lease_id)
        if errand is None:
            held = await self._ledger.find(lease_id) if wish.request_id else None
            if held is not None and held.state in OVER:
                raise _over(held)
            if held is not None and held.state in (LeaseState.ACTIVE, LeaseState.ENDING):
                return await self._held(held, wish)
            errand = self._errands.get(lease_id) or self._begin(lease_id, wish)
        else:
            await self._change(errand, wish)
        return await self._wait(errand, wish)

    async def renew(self, lease_id: str) -> Lease:
        """Say that whoever holds the lease by word still does; for one that waits or has a pid this changes nothing.

        Raises:
            LeaseUnknown, LeaseElsewhere, LeaseOver, StoreUnavailable
        """
        lease = await self.find(lease_id)
        _check_ours(lease)
        if lease.state in OVER:
            raise _over(lease)
        if lease.ttl_s is None or lease.state is LeaseState.QUEUED:
            return lease
        try:
            return await self._ledger.renew(lease)
        except errors.StaleFence as error:
            raise LeaseOver(f"lease {lease_id} of {lease.holder} ended while it was being renewed") from error

    async def give_back(self, lease_id: str) -> Lease:
        """End a lease, or leave the queue; one that is over stays so. What its program still uses is foreign then.

        Raises:
            LeaseUnknown, LeaseElsewhere, StoreUnavailable
        """
        errand = self._errands.get(lease_id)
        if errand is not None:
            await self._drop(errand)
        lease = await self.find(lease_id)
        _check_ours(lease)
        if lease.state is LeaseState.QUEUED:
            await self._ledger.cancel(lease)
        elif lease.state not in OVER:
            await self._release(lease)
        return await self.find(lease_id)

    async def find(self, lease_id: str) -> Lease:
        """A lease as it stands; also one of somebody else.

        Raises:
            LeaseUnknown, StoreUnavailable
        """
        lease = await self._ledger.find(lease_id)
        if lease is None:
            raise LeaseUnknown(f"there is no lease {lease_id[:80]!r}, or it ended more than ten minutes ago")
        return lease

    async def snapshot(self) -> Snapshot:
        """All leases of this host, holders first, and its devices."""
        return await self._ledger.snapshot()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this host."""
        return self._ledger.devices

    async def close(self) -> None:
        """Leave the queue for everybody who waits. What is held stays held."""
        running = [errand.task for errand in self._errands.values() if errand.task is not None]
        for errand in list(self._errands.values()):
            self._drop_soon(errand)
        if leaving := {*running, *self._ending}:
            _, late = await asyncio.wait(leaving, timeout=FAREWELL_S)
            for task in late:
                task.cancel()
        while left := {task for task in running if not task.done()} | self._ending:
            await asyncio.wait(left)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _wait(self, errand: _Errand, wish: LeaseWish) -> Standing:
        errand.callers += 1
        if errand.patience is not None:
            errand.patience.cancel()
        gone = True
        try:
            await errand.answered.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wish.wait_s):
                    await errand.settled.wait()
            gone = False
        finally:
            errand.callers -= 1
            self._after_caller(errand, gone=gone and wish.request_id is None)
        if errand.error is not None:
            raise errand.error
        assert errand.lease is not None
        if errand.settled.is_set():
            return await self._held(errand.lease, wish)
        return Standing(await self._ledger.find(errand.id) or errand.lease, held=False)  # with its place of now

    async def _held(self, lease: Lease, wish: LeaseWish) -> Standing:
        """What is held, for whoever asks for no more than that: they must not believe in memory they do not have."""
        least = min(lease.shares.values(), default=0)
        if len(lease.shares) < wish.gpus or least < (wish.vram_bytes or 0):
            held = ", ".join(f"{format_bytes(size)} of {device}" for device, size in lease.shares.items())
            raise LeaseDiffers(f"lease {lease.id} of {lease.holder} holds {held}, and more is asked for: {_OTHER_ID}")
        if (wish.process is None) != (lease.ttl_s is not None):
            how = "by word" if lease.ttl_s is not None else "by a process"
            raise LeaseDiffers(f"lease {lease.id} of {lease.holder} is held {how}: {_OTHER_ID}")
        holder = await asyncio.to_thread(self._process_in_books, lease) if wish.process is not None else None
        if holder is not None and holder != wish.process:
            raise LeaseDiffers(f"lease {lease.id} of {lease.holder} is held by process {holder.pid}: {_OTHER_ID}")
        return Standing(lease, held=True)

    def _process_in_books(self, lease: Lease) -> ProcessIdentity | None:
        with NodeLedger(self._ledger.state.ledger_path) as books:
            return next((row.process for row in books.rows() if row.lease_id == lease.id), None)

    def _after_caller(self, errand: _Errand, *, gone: bool) -> None:
        """Somebody who waited has an answer, or is gone for good."""
        if errand.callers:
            return
        if errand.settled.is_set() and not gone:
            self._errands.pop(errand.id, None)
        elif gone:
            self._drop_soon(errand, give_back=True)
        else:
            ttl_s = errand.wish.ttl_s or DEFAULT_TTL_S
            errand.patience = asyncio.get_running_loop().call_later(ttl_s, self._drop_soon, errand)

    async def _change(self, errand: _Errand, wish: LeaseWish) -> None:
        """Asked again, it may be for more, or less, or more important; its place stays."""
        if wish.size == errand.wish.size or errand.settled.is_set():
            return
        await errand.answered.wait()
        lease = errand.lease
        if lease is None or lease.state is not LeaseState.QUEUED:
            return
        options = wish.options(self._ledger.devices, await self._ledger.snapshot())
        with contextlib.suppress(errors.StaleFence):  # it was granted this moment, as it was asked for before
            await self._ledger.resize(lease, options, wish.priority)
            errand.wish = wish

    # -- the errand ---------------------------------------------------------------------------------------------------

    def _begin(self, lease_id: str, wish: LeaseWish) -> _Errand:
        errand = self._errands[lease_id] = _Errand(lease_id, wish)
        errand.task = asyncio.create_task(self._run(errand), name=f"lease {lease_id}")
        return errand

    async def _run(self, errand: _Errand) -> None:
        """Until it is held, or cannot be; whoever ends this ends the lease too, unless it is held."""
        try:
            await self._obtain(errand)
        except (errors.GpubossError, LeaseOver) as error:
            await self._fail(errand, LeaseOver(error.message) if isinstance(error, errors.StaleFence) else error)
        except asyncio.CancelledError:
            why = f"lease {errand.id} was given up: nobody came back for it, or it was given back"
            await self._fail(errand, LeaseOver(why))
            raise
        except Exception as error:
            _log.exception("lease_fault", lease=errand.id)
            why = f"lease {errand.id} failed by an error of Model Boss itself: {error!r}"
            await self._fail(errand, errors.GpubossError(why))

    async def _obtain(self, errand: _Errand) -> None:
        wish = errand.wish
        snapshot = await self._ledger.snapshot()
        options = wish.options(self._ledger.devices, snapshot)
        used = await asyncio.to_thread(self._used, wish.process, options, snapshot) if wish.process else {}
        if used:
            options = wish.options(self._ledger.devices, snapshot, used)
        request = LeaseRequest(
            errand.id,
            job_holder(wish.name),
            HolderKind.JOB,
            options,
            wish.priority,
            preemptible=wish.preemptible,
            grace_s=wish.grace_s,
            ttl_s=wish.ttl_s,
            adopts=used,
        )
        errand.lease = await self._ledger.acquire(request)
        if errand.lease.state is LeaseState.QUEUED:
            errand.answered.set()
            errand.lease = await self._granted(errand.lease, wish.process)
        errand.tell(await self._activated(errand.lease, wish.process))
        errand.settled.set()

    def _used(self, process: ProcessIdentity, options: Sequence[Shares], snapshot: Snapshot) -> Shares:
        """What its process uses without a lease: on a full device that is no reason to keep it waiting."""
        if external_process.lease_of(process, self._ledger.state) is not None:
            return {}
        kinds = {device.kind for device in self._ledger.devices if any(device.id in option for option in options)}
        return external_process.use_of(process, snapshot, host_memory=kinds == {DeviceKind.CPU})

    async def _granted(self, lease: Lease, process: ProcessIdentity | None) -> Lease:
        granting = asyncio.ensure_future(self._ledger.wait_granted(lease))
        try:
            while True:
                done, _ = await asyncio.wait({granting}, timeout=LOOK_S)
                if done:
                    return granting.result()
                _check_alive(lease, process)
        finally:
            granting.cancel()
            await asyncio.wait({granting})

    async def _activated(self, lease: Lease, process: ProcessIdentity | None) -> Lease:
        """In the books. Where these refuse for a while what the store granted, they are asked again."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SETTLE_S
        while True:
            _check_alive(lease, process)
            try:
                if process is None:
                    return await self._ledger.activate(lease, by_word=True)
                return await self._ledger.activate(lease, process)
            except errors.ActivationRefused:
                if loop.time() > deadline_s:
                    raise
            await self._ledger.sweep()
            await asyncio.sleep(_AGAIN_S)
            if lease.ttl_s is not None:
                lease = await self._ledger.renew(lease)

    async def _fail(self, errand: _Errand, error: errors.GpubossError | LeaseOver) -> None:
        """Nothing is left of it; who waits is told so, also when a broker that ends cannot wait for the store."""
        try:
            await self._undo(errand)
        finally:
            errand.fail(error)

    async def _undo(self, errand: _Errand) -> None:
        """Nothing is left of it."""
        if errand.lease is None:
            return  # cancelled or refused while it was asked for: the client gives that up by itself
        with contextlib.suppress(errors.GpubossError):
            if errand.lease.state is LeaseState.ACTIVE:
                await self._release(errand.lease)
            else:
                await self._ledger.cancel(errand.lease)

    def _drop_soon(self, errand: _Errand, *, give_back: bool = False) -> None:
        dropping = self._drop(errand, give_back=give_back)
        task = asyncio.get_running_loop().create_task(dropping, name=f"lease {errand.id} is given up")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _drop(self, errand: _Errand, *, give_back: bool = False) -> None:
        """End the errand; what is held by then stays held, unless nobody will ever hear of it."""
        self._errands.pop(errand.id, None)
        if errand.patience is not None:
            errand.patience.cancel()
        if errand.task is not None:
            errand.task.cancel()
            await asyncio.wait({errand.task})
        if give_back and errand.error is None and errand.lease is not None:
            with contextlib.suppress(errors.GpubossError):
                await self._release(errand.lease)

    async def _release(self, lease: Lease) -> None:
        await asyncio.to_thread(self._leave_books, lease)
        await self._ledger.release(lease)

    def _leave_books(self, lease: Lease) -> None:
        """Its row goes, whichever life of the broker entered it."""
        if lease.fence is not None:
            with NodeLedger(self._ledger.state.ledger_path) as books:
                books.remove(lease.id, lease.fence.epoch, lease.fence.seq)


def _check_alive(lease: Lease, process: ProcessIdentity | None) -> None:
    if process is not None and process.is_alive() is Liveness.DEAD:
        raise LeaseOver(f"process {process.pid}, for which lease {lease.id} of {lease.holder} waited, has ended")


def _check_ours(lease: Lease) -> None:
    if not lease.id.startswith(PREFIX):
        raise LeaseElsewhere(
            f"lease {lease.id} of {lease.holder} was not asked for over HTTP, and is not given back or renewed here: "
            "unload a model, end a program, or see `gpuboss release`"
        )


def _over(lease: Lease) -> LeaseOver:
    why = f" ({lease.reason})" if lease.reason else ""
    if lease.reason == EXPIRED and lease.ttl_s is not None:
        why = f" (expired: it was not renewed for its `ttl_s`, {lease.ttl_s:g} s)"
    return LeaseOver(
        f"lease {lease.id} of {lease.holder} is {lease.state}{why}: ask for a new one by another request_id"
    )
