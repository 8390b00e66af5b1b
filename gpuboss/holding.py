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
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Generic, NoReturn, TypeVar

from gpuboss import taking
from gpuboss.held import AsyncHeldLease, Held, HeldLease, OnPreempt, visible_devices
from gpuboss.leases import GRACE_S, Lease, job_holder
from gpuboss.priority import parse_priority
from gpuboss.session import session_for
from gpuboss.settings import LedgerSettings
from gpuboss.taking import Wish
from gpuboss.units import parse_duration, parse_memory

__all__ = ["AsyncHold", "Hold", "acquire", "hold", "hold_async", "release", "renew", "visible_devices"]

Duration = str | float | timedelta
_HeldLease = TypeVar("_HeldLease", HeldLease, AsyncHeldLease)
_Told = TypeVar("_Told")
_Found = TypeVar("_Found")
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


class _Block(Generic[_HeldLease]):
    """What both kinds of hold are: a lease for each time a block is entered, one at a time."""

    _how = ""

    def __init__(self, wish: Wish, on_preempt: OnPreempt | None, settings: LedgerSettings | None) -> None:
        if on_preempt is not None and not callable(on_preempt):
            raise ValueError(f"on_preempt={on_preempt!r} is not understood: it is a function that takes the notice")
        if settings is not None and not isinstance(settings, LedgerSettings):
            raise ValueError(f"settings={settings!r} is not understood: it is a gpuboss.LedgerSettings")
        self._wish = wish
        self._on_preempt = on_preempt
        self._settings = settings
        self._held: _HeldLease | None = None
        self._users: dict[int, object] = {}
        """Process -> its use of this block, from before it asks for the lease until that is given back."""

    def _begin(self, use: object) -> None:
        """Of several threads, or a signal handler and what it interrupts, one may go on."""
        if self._users.setdefault(os.getpid(), use) is not use:
            raise RuntimeError(f"this hold is in use: call {self._how} again for a second lease")

    def _fail(self, use: object) -> None:
        if self._users.get(os.getpid()) is use:
            self._end()

    def _end(self) -> None:
        self._drop()
        self._users.pop(os.getpid(), None)

    def _drop(self) -> None:
        if self._held is not None:
            self._held.give_back_later()  # which does nothing for what was given back
            self._held = None

    def __del__(self) -> None:
        # A Ctrl-C at the very end of a block can come before its exit has begun; a task may never be gone on with.
        if hasattr(self, "_users"):
            self._drop()


class Hold(_Block[HeldLease]):
    """What `hold` returns: a lease for each time a `with` block is entered, one at a time."""

    _how = "gpuboss.hold"

    def take(self) -> HeldLease:
        """Wait for a lease and hold it, block or no block. Raises what `hold` says."""
        session = session_for(self._settings)
        lease: Lease | None = None

        def orphaned(lease: Lease) -> None:
            Held(session, lease).give_back_later()

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
        use = object()
        try:
            self._begin(use)
            self._held = self.take()
        except BaseException:
            self._fail(use)
            raise
        return self._held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._held is not None:
                self._held.release()
        finally:
            self._end()

    def __aenter__(self) -> NoReturn:
        raise TypeError("gpuboss.hold is for `with`: in coroutines use `async with gpuboss.hold_async(...)`")

    async def __aexit__(self, *_: object) -> None:
        """There for `__aenter__` to be called."""


class AsyncHold(_Block[AsyncHeldLease]):
    """What `hold_async` returns: a lease for each time an `async with` block is entered, one at a time."""

    _how = "gpuboss.hold_async"

    async def take(self) -> AsyncHeldLease:
        """Wait for a lease and hold it, block or no block. Raises what `hold` says."""
        session = await asyncio.to_thread(session_for, self._settings)

        def orphaned(lease: Lease) -> None:
            Held(session, lease).give_back_later()

        lease = await session.follow(taking.take(session.client, self._wish), orphaned=orphaned)
        held = AsyncHeldLease(session, lease, self._on_preempt)
        held.watch()
        return held

    async def __aenter__(self) -> AsyncHeldLease:
        use = object()
        try:
            self._begin(use)
            self._held = await self.take()
        except BaseException:
            self._fail(use)
            raise
        return self._held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._held is not None:
                await self._held.release()
        finally:
            self._end()

    def __enter__(self) -> NoReturn:
        raise TypeError("gpuboss.hold_async is for `async with`: without coroutines use `with gpuboss.hold(...)`")

    def __exit__(self, *_: object) -> None:
        """There for `__enter__` to be called."""


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
    for argument, value in (("job", job), ("name", name)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{argument}={value!r} is not understood: it is a text for people")
    if isinstance(devices, str):
        raise ValueError(f"devices={devices!r} is one name: write [{devices!r}]")
    only = None if devices is None else _names(devices)
    holder = name or job_holder(job or _program())
    told = vram, holder, gpus, exclusive, priority, wait, preemptible, grace, only
    try:
        return _understood(*told)
    except TypeError:  # a list or the like, which cannot be remembered
        return _understood.__wrapped__(*told)


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
    if isinstance(gpus, bool) or not isinstance(gpus, int):
        raise ValueError(f"gpus={gpus!r} is not understood: it is a whole number of devices")
    size = None if vram is None else _read("vram", parse_memory, vram)
    if size == 0 or gpus < 1 or only == ():
        raise ValueError(f"{vram!r} of {gpus} devices is nothing to hold")
    return Wish(
        holder,
        size,
        gpus=gpus,
        only=only,
        priority=parse_priority(priority),
        preemptible=bool(preemptible),
        grace_s=_read("grace", _seconds, grace),
        wait_s=None if wait is None else _read("wait", _seconds, wait),
    )


def _names(devices: Iterable[str]) -> tuple[str, ...]:
    names = tuple(devices) if isinstance(devices, Iterable) else ()
    if not (isinstance(devices, Iterable) and all(isinstance(name, str) for name in names)):
        raise ValueError(f'devices={devices!r} is not understood: write their names, such as ["gpu0"]')
    return names


def _read(argument: str, read: Callable[[_Told], _Found], value: _Told) -> _Found:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None


def _seconds(value: Duration) -> float:
    return parse_duration(value.total_seconds() if isinstance(value, timedelta) else value).total_seconds()


def _program() -> str:
    """What runs here, for people."""
    path = sys.argv[0] if sys.argv else ""
    return os.path.basename(path) or f"python-{os.getpid()}"  # noqa: PTH119 (on the way of every lease)
