"""Looks after an engine that serves: does it get on with what it was asked?

Used by `engine_run.py`, which calls `look` again and again and ends the engine once `stalled_s` is set. Asks the
backend how far the engine is, and only while requests are under way; `watchdog.py` says what that means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Final

import psutil

from gpuboss.devices import Device, DeviceKind
from inference.backends import Backend
from inference.errors import InferenceError
from inference.proxy import EngineClient
from inference.watchdog import Watchdog

__all__ = ["STALL_S", "ProgressWatch", "computing_process"]

STALL_S: Final = 60.0
"""Without progress, after which an engine is stalled, where nothing else is configured (`stall_s`)."""
LOOK_EVERY_S: Final = 1.25
"""More than a second: whoever waits for llama-server's answer is looked after only in a second without any event."""
LOOKS: Final = 4
"""At least so many within the patience."""
ASK_PATIENCE_S: Final = 5.0
LAST_PATIENCE_S: Final = 0.25
"""For an answer when the deadline has come: one that does not give it within that is stalled."""
_ON_PROCESSOR: Final = frozenset({DeviceKind.CPU, DeviceKind.SIM})


class ProgressWatch:
    """One engine, from when it is ready. `look` now and then, then read the rest."""

    def __init__(
        self,
        client: EngineClient,
        backend: Backend,
        process: psutil.Process | None,
        *,
        stall_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.stalled_s: float | None = None
        """Seconds without progress once that is too long; None before."""
        self._client = client
        self._backend = backend
        self._process = process
        """See `computing_process`."""
        self._stall_s = stall_s
        self._clock = clock
        self._watchdog = Watchdog(stall_s, clock())

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        pause_s = min(LOOK_EVERY_S, self._stall_s / LOOKS)
        deadline_s = self._watchdog.deadline_s
        return pause_s if deadline_s is None else max(0.0, min(pause_s, deadline_s - self._clock()))

    async def look(self) -> None:
        """One look; takes no longer than the engine has left."""
        if not self._client.working:
            self._watchdog.idle(self._clock())
            return
        asked_s = self._clock()
        seen, tells = await self._ask()
        now_s = self._clock()
        if not tells:
            self._watchdog.idle(now_s)
            return
        self._watchdog.look(now_s, seen, cpu_s=self._cpu_s(), waited_s=now_s - asked_s)
        deadline_s = self._watchdog.deadline_s
        if deadline_s is not None and now_s >= deadline_s and self._client.working:
            self.stalled_s = self._watchdog.still_s(now_s)

    async def _ask(self) -> tuple[object, bool]:
        """(how far it is, whether it can tell at all); the former is None when it does not answer."""
        deadline_s = self._watchdog.deadline_s
        left_s = ASK_PATIENCE_S if deadline_s is None else deadline_s - self._clock()
        try:
            async with asyncio.timeout(min(ASK_PATIENCE_S, max(LAST_PATIENCE_S, left_s))):
                seen = await self._backend.progress(self._client)
        except (TimeoutError, InferenceError):
            return None, True
        return seen, seen is not None

    def _cpu_s(self) -> float | None:
        if self._process is None:
            return None
        try:
            times = self._process.cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)


def computing_process(pid: int | None, devices: Iterable[Device], leased: Collection[str]) -> psutil.Process | None:
    """The engine's process, if it computes, at least in part, on the processor.

    None for one with accelerators alone: its processor seconds say nothing.
    """
    if pid is None or not any(device.kind in _ON_PROCESSOR for device in devices if device.id in leased):
        return None
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
