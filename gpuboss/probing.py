"""Asks drivers for readings without ever waiting long for one: a driver that hangs must not stop the keeper.

Called by `gpuboss.node_watch` (`PatientProbe`), and by `gpuboss.keeper` for finding devices (`in_time`). Each probe has
a thread of its own, which makes one call at a time. While a call hangs no other is made, so there is never more than
that one thread; the last reading stands meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from gpuboss.devices import Device, Probe, Reading
from gpuboss.errors import DeviceError

__all__ = ["PATIENCE_S", "PatientProbe", "in_time"]

PATIENCE_S = 1.0
"""How long a driver may take to answer; drivers that are well take milliseconds."""
T = TypeVar("T")


class PatientProbe:
    """A probe that answers within `patience_s`, or says that it cannot."""

    def __init__(self, probe: Probe, patience_s: float = PATIENCE_S) -> None:
        self.devices: tuple[Device, ...] = tuple(probe.devices())
        self._probe = probe
        self._patience_s = patience_s
        self._name = ", ".join(device.id for device in self.devices)
        self._calls: queue.SimpleQueue[_Call[Sequence[Reading]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._call: _Call[Sequence[Reading]] | None = None
        """The one that is under way."""

    async def read(self, pids: Sequence[int]) -> Sequence[Reading]:
        """One reading per device. DeviceError: the driver does not answer, not yet, or with an error."""
        if self._call is not None and not self._call.answered.done():
            # What a call answers that is this late was measured who knows when: it is not taken for a reading.
            raise self._overdue(self._call)
        call = self._call = _Call(lambda: self._probe.read(pids))
        self._start().put(call)
        try:
            async with asyncio.timeout(self._patience_s):
                await asyncio.shield(call.answered)
        except TimeoutError:
            raise self._overdue(call) from None
        return call.result()

    def close(self) -> None:
        """Let the thread go, once its call has come back."""
        self._calls.put(None)

    def _overdue(self, call: _Call[Sequence[Reading]]) -> DeviceError:
        waited_s = time.monotonic() - call.since_s
        return DeviceError(f"the driver of {self._name} has not answered for {waited_s:.1f} s: does it hang?")

    def _start(self) -> queue.SimpleQueue[_Call[Sequence[Reading]] | None]:
        if self._thread is None:
            self._thread = _daemon(f"probe {self._name}", lambda: _serve(self._calls))
        return self._calls


async def in_time(function: Callable[[], T], patience_s: float, what: str) -> T:
    """What a function returns that may hang, run in a thread of its own; DeviceError when it takes longer."""
    call = _Call(function)
    _daemon(what, call.run)
    try:
        async with asyncio.timeout(patience_s):
            await asyncio.shield(call.answered)
    except TimeoutError:
        raise DeviceError(
            f"{what}: no answer within {patience_s:g} s; see what `nvidia-smi` (or `rocm-smi`) says, "
            "or declare devices (GPUBOSS_DEVICES) to go on without measuring"
        ) from None
    return call.result()


class _Call(Generic[T]):
    """One call of a function in another thread, and what came of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.since_s = time.monotonic()
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the function has returned, or raised."""
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._value: T
        self._error: Exception | None = None

    def run(self) -> None:
        """In the other thread."""
        try:
            self._value = self._function()
        except Exception as error:  # whatever it is, `result` raises it
            self._error = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._answer)

    def result(self) -> T:
        """What it returned, or raised."""
        if self._error is not None:
            raise self._error
        return self._value

    def _answer(self) -> None:
        if not self.answered.done():
            self.answered.set_result(None)


def _serve(calls: queue.SimpleQueue[_Call[T] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()


def _daemon(name: str, target: Callable[[], None]) -> threading.Thread:
    """A thread that does not keep the process from ending: a call that hangs may never return."""
    thread = threading.Thread(target=target, name=name[:60], daemon=True)
    thread.start()
    return thread
