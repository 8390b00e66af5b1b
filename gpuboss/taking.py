"""From a wish ("20 GiB on one GPU, within two hours") to a lease that this process holds, and back.

Called by `gpuboss.session`, in its event loop. The steps of `take`:

1. the options are found (`gpuboss.sizing`), with a look at what is free where there is a choice
2. the store is asked; what must wait, waits
3. this process is entered in the node's books; where these refuse what the store granted, the store is told what they
   know and asked again, in the same place
4. whoever stops waiting, for whatever reason, leaves the queue
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuboss import errors
from gpuboss.client import Client
from gpuboss.devices import Device
from gpuboss.leases import DeviceUse, HolderKind, Lease, LeaseRequest, LeaseState, Snapshot, new_request_id
from gpuboss.sizing import choose_devices, is_open_choice, options_for
from gpuboss.units import format_bytes

__all__ = ["Wish", "give_back", "give_up", "take"]

_AGAIN_S = 0.2
"""Before the store is asked again for what the books refused."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants to hold."""

    holder: str
    """Shown to people, e.g. "job:sft-12"."""
    vram_bytes: int | None
    """On each device; None: all of each (exclusive)."""
    gpus: int = 1
    """On so many devices."""
    only: tuple[str, ...] | None = None
    """The devices to choose from; None: every accelerator."""
    priority: int = 10
    preemptible: bool = False
    grace_s: float = 30.0
    wait_s: float | None = None
    """How long to wait at most; None: as long as it takes; 0: not at all, and without joining the queue."""

    @property
    def exclusive(self) -> bool:
        """Whether all of a device is wanted."""
        return self.vram_bytes is None

    def is_open(self, devices: Sequence[Device]) -> bool:
        """Whether what is free decides what is asked for."""
        return is_open_choice(devices, exclusive=self.exclusive, gpus=self.gpus, only=self.only)

    def request(self, devices: Sequence[Device], uses: Sequence[DeviceUse] = ()) -> LeaseRequest:
        """What to ask the store for. Raises LeaseRefused when these devices can never serve it."""
        options = options_for(
            devices, uses, vram_bytes=self.vram_bytes, exclusive=self.exclusive, gpus=self.gpus, only=self.only
        )
        kind = HolderKind.SERVICE if self.holder.startswith("service:") else HolderKind.JOB
        return LeaseRequest(
            new_request_id(),
            self.holder,
            kind,
            options,
            self.priority,
            preemptible=self.preemptible,
            grace_s=self.grace_s,
        )

    def __str__(self) -> str:
        size = "all memory" if self.vram_bytes is None else format_bytes(self.vram_bytes)
        each = "one device" if self.gpus == 1 else f"each of {self.gpus} devices"
        return f"{size} of {each}" + (f" of {', '.join(self.only)}" if self.only is not None else "")


async def take(client: Client, wish: Wish, request: LeaseRequest | None = None) -> Lease:
    """A lease that is granted and whose holder, this process, is entered in the node's books.

    `request`: what was asked for already. Raises LeaseRefused, WaitExpired, StateDirError, LedgerBusy, LedgerDamaged,
    StoreUnfit; StoreUnavailable only where it was not to be waited for.
    """
    began_s = time.monotonic()
    order: int | None = None
    while True:
        if request is None:
            request = await _request(client, wish)
        try:
            return await _try(client, wish, request, began_s, order)
        except (errors.StoreUnavailable, errors.NoEpoch):
            if _is_over(wish, began_s):
                raise
        except _Overslept as slept:
            order = slept.order
        except _RefusedByBooks as refused:
            await client.sweep()
            if _is_over(wish, began_s):
                raise await _expired(client, wish, refused.lease) from refused.error
            order = refused.lease.order
        await asyncio.sleep(_AGAIN_S)
        request = None if wish.is_open(client.devices) else replace(request, request_id=new_request_id())


async def give_back(client: Client, lease: Lease) -> None:
    """Return a lease that this process holds: out of the books, then out of the store."""
    await client.release(lease)


async def give_up(client: Client, lease_id: str) -> None:
    """Return a lease of which nobody knows how far it got: asked for, granted, entered, or none of it."""
    with contextlib.suppress(errors.GpubossError):
        client.entries.leave(lease_id)
    client.entries.unlock(lease_id)
    client.abandon(lease_id)


class _RefusedByBooks(Exception):
    """The store granted what the node's books refuse."""

    def __init__(self, lease: Lease, error: errors.ActivationRefused) -> None:
        super().__init__(error.message)
        self.lease = lease
        self.error = error


class _Overslept(Exception):
    """This process was suspended while it waited, and was taken for gone."""

    def __init__(self, order: int) -> None:
        super().__init__("suspended while it waited")
        self.order = order


async def _try(client: Client, wish: Wish, request: LeaseRequest, began_s: float, order: int | None) -> Lease:
    """Ask, wait, enter; whatever goes wrong, nothing is left of it."""
    if wish.wait_s == 0:
        await _refuse_to_queue(client, wish, request)
    lease = await client.acquire(request, order=order)
    try:
        if lease.state is LeaseState.QUEUED:
            try:
                lease = await _wait(client, wish, lease, began_s)
            except errors.StaleFence:
                if client.overslept_since(began_s):
                    raise _Overslept(lease.order) from None
                raise
        await client.enter(lease, client.owner, own=True)
    except errors.ActivationRefused as error:
        await client.cancel(lease)
        raise _RefusedByBooks(lease, error) from error
    except BaseException:
        await asyncio.shield(client.cancel(lease))
        raise
    return lease


async def _request(client: Client, wish: Wish) -> LeaseRequest:
    uses: Sequence[DeviceUse] = ()
    if wish.is_open(client.devices):
        uses = (await client.snapshot()).devices
    return wish.request(client.devices, uses)


async def _refuse_to_queue(client: Client, wish: Wish, request: LeaseRequest) -> None:
    """One that will not wait must not even join the queue: others would be told to yield to it."""
    snapshot = await client.snapshot()
    free = {use.device.id: use.free_bytes for use in snapshot.devices}
    if not any(all(free.get(device, 0) >= size for device, size in option.items()) for option in request.options):
        raise _explanation(client, wish, snapshot, None, 0.0)


async def _wait(client: Client, wish: Wish, lease: Lease, began_s: float) -> Lease:
    try:
        async with asyncio.timeout(None if wish.wait_s is None else max(0.0, began_s + wish.wait_s - time.monotonic())):
            return await client.wait_granted(lease)
    except TimeoutError:
        raise await _expired(client, wish, lease) from None


def _is_over(wish: Wish, began_s: float) -> bool:
    return wish.wait_s is not None and time.monotonic() + _AGAIN_S > began_s + wish.wait_s


async def _expired(client: Client, wish: Wish, lease: Lease) -> errors.WaitExpired:
    snapshot = None
    with contextlib.suppress(errors.GpubossError):
        snapshot = await client.snapshot()
    return _explanation(client, wish, snapshot, lease, wish.wait_s or 0.0)


def _explanation(
    client: Client, wish: Wish, snapshot: Snapshot | None, lease: Lease | None, waited_s: float
) -> errors.WaitExpired:
    """Why it was not granted, in numbers, as far as the store tells."""
    candidates = {device.id for device in choose_devices(client.devices, wish.only)}
    uses = [use for use in snapshot.devices if use.device.id in candidates] if snapshot else []
    held: list[tuple[str, int]] = []
    position = lease.position if lease else None
    for other in snapshot.leases if snapshot else ():
        if lease is not None and other.id == lease.id:
            position = other.position
        elif size := sum(size for device, size in other.shares.items() if device in candidates):
            held.append((other.holder, size))
    held += [("programs without a lease", use.foreign_bytes) for use in uses if use.foreign_bytes]
    return errors.WaitExpired(
        wish.holder,
        waited_s=waited_s,
        wanted=str(wish),
        position=position,
        devices=[(use.device.id, use.free_bytes) for use in uses],
        holders=sorted(held, key=lambda holder: -holder[1]),
    )
