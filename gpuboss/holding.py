"""`gpuboss.hold`: memory of a device for as long as a block of code runs.

    with gpuboss.hold("20GiB", job="sft-12", wait="2h") as lease:
        os.environ.update(lease.env)        # before CUDA is initialised
        train()

Called by programs that use a device themselves: training jobs, notebooks, vision services. It calls `gpuboss.session`.
The lease is held by this process: the keeper renews it as long as the process lives, nothing of ours does so inside it,
and it is freed when the block is left or the process is gone, however it went. A forked child does not hold its
parent's lease and never gives it back; it may hold leases of its own. Neither torch nor a driver is touched here.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType

from gpuboss import taking
from gpuboss.held import AsyncHeldLease, HeldLease, OnPreempt, visible_devices
from gpuboss.leases import GRACE_S, Lease, job_holder
from gpuboss.priority import parse_priority
from gpuboss.session import session_for
from gpuboss.settings import LedgerSettings
from gpuboss.taking import Wish
from gpuboss.units import parse_bytes, parse_duration

__all__ = ["AsyncHold", "Hold", "acquire", "hold", "hold_async", "release", "renew", "visible_devices"]

Duration = str | float | timedelta
_LONGEST_NAME = 200


def hold(
    vram: str | int | None = None,
    *,
    job: str | None = None,
    gpus: int = 1,
    exclusive: bool = False,
    priority: str | int = "normal",
    wait: Duration | None = None,
    preemptible: bool = False,
    grace: Duration = GRACE_S,
    devices: Sequence[str] | None = None,
    on_preempt: OnPreempt | None = None,
    name: str | None = None,
    settings: LedgerSettings | None = None,
) -> Hold:
    """Hold memory of devices for a block: `with gpuboss.hold("20GiB", job="sft-12") as lease: ...`.

    vram: how much of each device, "20GiB" or bytes. Or `exclusive`: all of each device.
    job: what people are shown as its holder, as "job:sft-12"; the program's name by default.
    gpus: on so many devices, all of them or none.
    priority: "urgent", "high", "normal", "low", "batch", or 0 (most important) to 1000.
    wait: "2h", "30s", seconds: how long to wait at most; None: as long as it takes; 0: not at all.
    preemptible: a more important waiter may have it. `on_preempt` is then called with a `Notice`, in a thread of its
        own, and has `grace` to leave the block; so has who looks at `lease.preempted`. A True from `on_preempt` says
        that it will leave in any case, even if the memory is not needed any more.
    grace: "60s", seconds: how long it may take to leave after a notice.
    devices: names of the devices to choose from: ids as `gpuboss devices` shows them, or "gpu0", "gpu1", by index.
    name: the whole of what people are shown, instead of `job`; "service:..." makes it a service.
    settings: which ledger; that of the environment by default.

    Entering it raises LeaseRefused when these devices can never serve it, WaitExpired when it was not granted in time;
    both carry the numbers. StateDirError, LedgerConflict, DeviceError, StoreUnfit, StoreUnavailable when there is no
    ledger to be had. ValueError here for what is not understood.
    """
    wish = _wish(vram, job, gpus, exclusive, priority, wait, preemptible, grace, devices, name)
    return Hold(wish, on_preempt, settings)


def hold_async(
    vram: str | int | None = None,
    *,
    job: str | None = None,
    gpus: int = 1,
    exclusive: bool = False,
    priority: str | int = "normal",
    wait: Duration | None = None,
    preemptible: bool = False,
    grace: Duration = GRACE_S,
    devices: Sequence[str] | None = None,
    on_preempt: OnPreempt | None = None,
    name: str | None = None,
    settings: LedgerSettings | None = None,
) -> AsyncHold:
    """`hold` for coroutines: `async with gpuboss.hold_async("20GiB") as lease: ...`. Waiting blocks no event loop.

    `on_preempt` is called in the event loop, and may be a coroutine function.
    """
    wish = _wish(vram, job, gpus, exclusive, priority, wait, preemptible, grace, devices, name)
    return AsyncHold(wish, on_preempt, settings)


def acquire(
    vram: str | int | None = None,
    *,
    job: str | None = None,
    gpus: int = 1,
    exclusive: bool = False,
    priority: str | int = "normal",
    wait: Duration | None = None,
    preemptible: bool = False,
    grace: Duration = GRACE_S,
    devices: Sequence[str] | None = None,
    on_preempt: OnPreempt | None = None,
    name: str | None = None,
    settings: LedgerSettings | None = None,
) -> HeldLease:
    """`hold` without a block: what it returns is held until `release`, or until this process ends."""
    wish = _wish(vram, job, gpus, exclusive, priority, wait, preemptible, grace, devices, name)
    return Hold(wish, on_preempt, settings).take()


def renew(lease: HeldLease) -> None:
    """Make sure that a lease is still held. The keeper renews it by itself, so nobody has to call this.

    Raises StaleFence when it is over or another's, StoreUnavailable.
    """
    lease.renew()


def release(lease: HeldLease) -> None:
    """Give a lease back; harmless when that was done before. What still uses its memory is foreign from then on."""
    lease.release()


class Hold:
    """What `hold` returns: a lease for each time a `with` block is entered, one at a time."""

    def __init__(self, wish: Wish, on_preempt: OnPreempt | None, settings: LedgerSettings | None) -> None:
        self._wish = wish
        self._on_preempt = on_preempt
        self._settings = settings
        self._held: HeldLease | None = None

    def take(self) -> HeldLease:
        """Wait for a lease and hold it, block or no block. Raises what `hold` says."""
        session = session_for(self._settings)
        lease: Lease | None = None

        def orphaned(lease: Lease) -> None:
            HeldLease(session, lease).give_back_later()

        try:
            request, lease = session.take_at_once(self._wish)
            if lease is None:
                lease = session.run(taking.take(session.client, self._wish, request), orphaned=orphaned)
            held = HeldLease(session, lease, self._on_preempt)
            held.watch()
        except BaseException:
            if lease is not None:
                orphaned(lease)
            raise
        return held

    def __enter__(self) -> HeldLease:
        if self._held is not None and self._held.is_ours:
            raise RuntimeError("this hold is in use: call gpuboss.hold again for a second lease")
        self._held = self.take()
        return self._held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is not None:
            self._held.release()
        self._held = None

    def __del__(self) -> None:
        # A Ctrl-C at the very end of a block can come before `__exit__` has begun.
        if self._held is not None:
            self._held.give_back_later()


class AsyncHold:
    """What `hold_async` returns: a lease for each time an `async with` block is entered, one at a time."""

    def __init__(self, wish: Wish, on_preempt: OnPreempt | None, settings: LedgerSettings | None) -> None:
        self._wish = wish
        self._on_preempt = on_preempt
        self._settings = settings
        self._held: AsyncHeldLease | None = None

    async def take(self) -> AsyncHeldLease:
        """Wait for a lease and hold it, block or no block. Raises what `hold` says."""
        session = await asyncio.to_thread(session_for, self._settings)

        def orphaned(lease: Lease) -> None:
            AsyncHeldLease(session, lease).give_back_later()

        lease = await session.follow(taking.take(session.client, self._wish), orphaned=orphaned)
        held = AsyncHeldLease(session, lease, self._on_preempt)
        held.watch()
        return held

    async def __aenter__(self) -> AsyncHeldLease:
        if self._held is not None and self._held.is_ours:
            raise RuntimeError("this hold is in use: call gpuboss.hold_async again for a second lease")
        self._held = await self.take()
        return self._held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is not None:
            await self._held.release()
        self._held = None


def _wish(
    vram: str | int | None,
    job: str | None,
    gpus: int,
    exclusive: bool,
    priority: str | int,
    wait: Duration | None,
    preemptible: bool,
    grace: Duration,
    devices: Sequence[str] | None,
    name: str | None,
) -> Wish:
    """The arguments of `hold`, understood. Raises ValueError."""
    if isinstance(devices, str):
        raise ValueError(f"devices={devices!r} is one name: write [{devices!r}]")
    only = None if devices is None else tuple(devices)
    holder = name or job_holder(job or _program())
    return _understood(vram, holder, gpus, exclusive, priority, wait, preemptible, grace, only)


@functools.lru_cache(128, typed=True)  # a loop that holds for every step asks for the same each time
def _understood(
    vram: str | int | None,
    holder: str,
    gpus: int,
    exclusive: bool,
    priority: str | int,
    wait: Duration | None,
    preemptible: bool,
    grace: Duration,
    only: tuple[str, ...] | None,
) -> Wish:
    if (vram is None) == (not exclusive):
        raise ValueError('say how much memory of each device, such as "20GiB", or exclusive=True: one of both')
    if not holder.isprintable() or len(holder) > _LONGEST_NAME:
        raise ValueError(f"{holder!r} is no name: at most {_LONGEST_NAME} printable characters")
    size = None if vram is None else parse_bytes(vram)
    if size == 0 or gpus < 1 or only == ():
        raise ValueError(f"{vram!r} of {gpus} devices is nothing to hold")
    return Wish(
        holder,
        size,
        gpus=gpus,
        only=only,
        priority=parse_priority(priority),
        preemptible=preemptible,
        grace_s=_seconds(grace),
        wait_s=None if wait is None else _seconds(wait),
    )


def _seconds(value: Duration) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else parse_duration(value).total_seconds()


def _program() -> str:
    """What runs here, for people."""
    path = sys.argv[0] if sys.argv else ""
    return os.path.basename(path) or f"python-{os.getpid()}"  # noqa: PTH119 (on the way of every lease)
