"""Whether an engine that loads gets on: a slow disk is no fault, standing still is.

Used by `engine_run.py`. Engines that do not tell how far they are show it all the same: the log grows, bytes are read,
memory becomes resident, or they compute. How long a load may take grows with its size, for only `STALL_S` without any
of that end it; `watchdog.py` says how long computing alone counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from gpuboss.units import format_bytes
from inference.watchdog import Watchdog

__all__ = ["STALL_S", "LoadProgress"]

STALL_S = 120.0
"""Without any progress, after which a load has failed."""
LOOK_EVERY_S = 0.25


class LoadProgress:
    """One load. `look` now and then, then read the rest."""

    def __init__(self, pid: int, file_bytes: int, log: Path, clock: Callable[[], float]) -> None:
        self.fraction: float | None = None
        """Part that is done, 0 to 1; the engine's own figure, else an estimate by what it has read; None at first."""
        self.stalled_s: float | None = None
        """Seconds without progress once that is too long; None before."""
        self._process = _process(pid)
        self._file_bytes = max(file_bytes, 1)
        self._log = log
        self._clock = clock
        self._began_s = self._looked_s = clock()
        self._log_bytes = self._resident_bytes = self._read_bytes = self._faulted_bytes = 0
        self._cpu_s: float | None = None
        self._told: float | None = None
        self._watchdog = Watchdog(STALL_S, self._began_s, seen=self._seen())

    def told(self, fraction: float | None) -> None:
        """The engine said how far it is."""
        if fraction is not None and fraction != self._told:
            self._told = self.fraction = fraction
            self._look(self._clock())

    def look(self) -> None:
        """Look at the process, at most every `LOOK_EVERY_S`."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        self._read()
        self._watchdog.look(now_s, self._seen(), cpu_s=self._cpu_s, waited_s=now_s - self._looked_s)
        self._looked_s = now_s
        if self._told is None:
            self.fraction = min(max(self._resident_bytes, self._read_bytes) / self._file_bytes, 0.99)
        deadline_s = self._watchdog.deadline_s
        stalled = deadline_s is not None and now_s >= deadline_s
        self.stalled_s = self._watchdog.still_s(now_s) if stalled else None

    def _seen(self) -> tuple[object, ...]:
        return self._log_bytes, self._resident_bytes, self._read_bytes, self._faulted_bytes, self._told

    def __str__(self) -> str:
        """For the error: what there was."""
        return (
            f"{self._looked_s - self._began_s:.0f} s after its start it had {format_bytes(self._resident_bytes)} in "
            f"memory, had read {format_bytes(self._read_bytes)} and logged {format_bytes(self._log_bytes)}"
        )

    def _read(self) -> None:
        """Take the figures; what cannot be seen stays as it was."""
        try:
            self._log_bytes = self._log.stat().st_size
        except OSError:
            self._log_bytes = 0
        if self._process is None:
            return
        try:
            self._resident_bytes = self._process.memory_info().rss
            times = self._process.cpu_times()
            self._cpu_s = times.user + times.system
            if hasattr(self._process, "io_counters"):  # not on macOS
                counters = self._process.io_counters()
                # A file that is mapped is read by touching it: those bytes are counted where they come from the disk.
                self._read_bytes, self._faulted_bytes = counters.read_chars, counters.read_bytes
        except (psutil.Error, OSError):
            return


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
