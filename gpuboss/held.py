"""Leases that this process holds: what they show, how they are told to yield, how they are given back.

Made by `gpuboss.holding`; calls `gpuboss.session`. `HeldLease` is for threads, `AsyncHeldLease` for coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gpuboss import errors, taking
from gpuboss.devices import Device, DeviceKind
from gpuboss.leases import Lease, Notice, Shares
from gpuboss.session import Session
from gpuboss.units import parse_memory

__all__ = ["AsyncHeldLease", "HeldLease", "OnPreempt", "visible_devices"]

OnPreempt = Callable[[Notice], object]
_log = logging.getLogger(__name__)


class Held:
    """What both kinds of held leases show."""

    def __init__(self, session: Session, lease: Lease, on_preempt: OnPreempt | None = None) -> None:
        self._session = session
        self._lease = lease
        self._on_preempt = on_preempt
        self._notice: Notice | None = None
        self._pid = os.getpid()
        self._released = False
        self._lost = False
        self._lost_event: threading.Event | None = None

    @property
    def id(self) -> str:
        """Names the lease, here, in `gpuboss ps` and in the environment variable GPUBOSS_LEASE."""
        return self._lease.id

    @property
    def holder(self) -> str:
        """What people are shown."""
        return self._lease.holder

    @property
    def shares(self) -> Shares:
        """Device id -> bytes."""
        return self._lease.shares

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices it is on, in index order."""
        return tuple(device for device in self._session.client.devices if device.id in self._lease.shares)

    @property
    def env(self) -> dict[str, str]:
        """Variables by which a program uses these devices alone, for children, or for `os.environ` before CUDA begins.

        CUDA_VISIBLE_DEVICES by UUID, for AMD's cards ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES; and GPUBOSS_LEASE.
        """
        return {**visible_devices(self.devices), "GPUBOSS_LEASE": self.id}

    @property
    def lost(self) -> bool:
        """Whether the lease is over or another's. What it held may then be used by others: stop using it."""
        return self._lost

    @property
    def lost_event(self) -> threading.Event:
        """Set when the lease is lost, for threads that wait for that."""
        if self._lost_event is None:
            self._lost_event = threading.Event()
        if self._lost:
            self._lost_event.set()
        return self._lost_event

    @property
    def preempted(self) -> Notice | None:
        """The notice to yield, as long as it stands; None when nobody wants the memory, or not any more."""
        return self._notice

    @property
    def is_ours(self) -> bool:
        """Whether this process holds it; False in a child that was forked meanwhile, which hears nothing of it."""
        return self._pid == os.getpid()

    def __repr__(self) -> str:
        state = "released" if self._released else "lost" if self._lost else "held"
        return f"<{type(self).__name__} {self.id} of {self.holder}: {state} {dict(self.shares)}>"

    def watch(self) -> None:
        """Begin to hear of notices and of the loss: at once if it may be told to yield, else at the next look."""
        client = self._session.client
        client.on_lost(self._lease, self._take_loss)
        if self._on_preempt is not None or self._lease.preemptible:
            self._session.call_soon(client.on_notice, self._lease, self._take_notice)
        else:
            client.on_notice(self._lease, self._take_notice, at_once=False)

    def give_back_later(self) -> None:
        """Return it, and let nobody wait for that: the program was interrupted, or has lost track of it."""
        if self._released or not self.is_ours:
            return
        self._released = True
        client = self._session.client
        client.stop_watching(self.id)
        self._session.see_to(taking.give_back(client, self._lease))

    # Called in the session's loop.

    def _take_loss(self, lease: Lease) -> None:
        _log.warning("lease %s of %s is lost: its memory may be used by others", lease.id, lease.holder)
        self._lost = True
        if self._lost_event is not None:
            self._lost_event.set()

    def _take_notice(self, lease: Lease) -> None:
        before, self._notice = self._notice, lease.notice
        if lease.notice is not None and before is None and self._on_preempt is not None:
            self._begin_call(self._on_preempt, lease.notice)

    def _begin_call(self, on_preempt: OnPreempt, notice: Notice) -> None:
        """Call the program's function, where it may take its time."""
        raise NotImplementedError

    def _take_answer(self, answer: object) -> None:
        """A True says that it yields whatever happens."""
        if answer is True and not self._released and self.is_ours:
            self._session.see_to(self._session.client.ack(self._lease))

    def _resized(self, vram: str | int) -> dict[str, int]:
        if (size := parse_memory(vram)) == 0:
            raise ValueError(f"vram={vram!r} is nothing to hold: release the lease instead")
        return dict.fromkeys(self._lease.shares, size)


class HeldLease(Held):
    """A lease that this process holds."""

    def resize(self, vram: str | int) -> None:
        """Hold another amount of each device from now on: less at once, more where there is room.

        Raises LeaseRefused with the numbers when there is none; then it keeps what it has. StaleFence when it is lost,
        ValueError for nothing, RuntimeError in a forked child, whose it is not.
        """
        self._lease = self._session.run(self._session.client.resize(self._lease, [self._resized(vram)]))

    def renew(self) -> None:
        """See `gpuboss.renew`."""
        self._lease = self._session.run(self._session.client.renew(self._lease))

    def release(self) -> None:
        """Give it back; harmless when that was done before, and in a forked child, whose it is not.

        A signal handler may call it too; where it interrupts gpuboss itself, the lease is given back soon after.
        """
        if self._released or not self.is_ours:
            return
        try:
            self._session.give_back(self._lease)
        except errors.GpubossError:
            raise
        except BaseException:
            self.give_back_later()
            raise
        self._released = True

    def _begin_call(self, on_preempt: OnPreempt, notice: Notice) -> None:
        name = f"gpuboss-preempt {self.id[:8]}"
        threading.Thread(target=self._call, args=(on_preempt, notice), name=name, daemon=True).start()

    def _call(self, on_preempt: OnPreempt, notice: Notice) -> None:
        try:
            answer = on_preempt(notice)
        except Exception:
            _log.exception("on_preempt of %s failed", self.holder)
        else:
            self._take_answer(answer)


class AsyncHeldLease(Held):
    """A lease that this process holds, for coroutines of one event loop."""

    def __init__(self, session: Session, lease: Lease, on_preempt: OnPreempt | None = None) -> None:
        super().__init__(session, lease, on_preempt)
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Task[None]] = set()

    async def resize(self, vram: str | int) -> None:
        """As `HeldLease.resize`."""
        self._lease = await self._session.follow(self._session.client.resize(self._lease, [self._resized(vram)]))

    async def renew(self) -> None:
        """As `gpuboss.renew`."""
        self._lease = await self._session.follow(self._session.client.renew(self._lease))

    async def release(self) -> None:
        """As `HeldLease.release`."""
        if self._released or not self.is_ours:
            return
        client = self._session.client
        client.stop_watching(self.id)
        try:
            await self._session.follow(taking.give_back(client, self._lease))
        except errors.GpubossError:
            raise
        except BaseException:
            self.give_back_later()  # cancelled: it is given back all the same
            raise
        self._released = True

    def _begin_call(self, on_preempt: OnPreempt, notice: Notice) -> None:
        with contextlib.suppress(RuntimeError):  # the program's event loop has ended
            self._loop.call_soon_threadsafe(self._start, on_preempt, notice)

    def _start(self, on_preempt: OnPreempt, notice: Notice) -> None:
        task = self._loop.create_task(self._call(on_preempt, notice), name=f"gpuboss-preempt {self.id[:8]}")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, on_preempt: OnPreempt, notice: Notice) -> None:
        try:
            answer: Any = on_preempt(notice)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception:
            _log.exception("on_preempt of %s failed", self.holder)
        else:
            self._take_answer(answer)


def visible_devices(devices: Sequence[Device]) -> dict[str, str]:
    """Variables by which a program sees these devices alone; none for devices that no driver hides.

    NVIDIA's are named by UUID. AMD's by unique id where they have one, and counted from 0 among those; else by index.
    """
    found: dict[str, str] = {}
    cuda = [device for device in devices if device.kind is DeviceKind.CUDA]
    rocm = [device for device in devices if device.kind is DeviceKind.ROCM]
    if cuda:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(device.id for device in cuda)
    if rocm and all(device.id.startswith("GPU-") for device in rocm):
        found["ROCR_VISIBLE_DEVICES"] = ",".join(device.id for device in rocm)
        found["HIP_VISIBLE_DEVICES"] = ",".join(map(str, range(len(rocm))))
    elif rocm:
        found["HIP_VISIBLE_DEVICES"] = ",".join(str(device.index) for device in rocm)
    return found
