"""Whether an engine that loads gets on: a slow disk is no fault, standing still is.

Used by `engine_run.py`. Engines that do not tell how far they are show it all the same: the log grows, bytes are read,
memory becomes resident.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from gpuboss.units import format_bytes

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
        self._began_s = self._moved_s = self._looked_s = clock()
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._told: float | None = None

    def told(self, fraction: float | None) -> None:
        """The engine said how far it is."""
        if fraction is not None and fraction != self._told:
            self._told = self.fraction = fraction
            self._moved_s = self._clock()

    def look(self) -> None:
        """Look at the process, at most every `LOOK_EVERY_S`."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        seen = (self._log_bytes(), *self._process_bytes())
        if seen != self._seen:
            self._seen, self._moved_s = seen, now_s
        if self._told is None:
            self.fraction = min(max(seen[1:]) / self._file_bytes, 0.99)
        stalled_s = now_s - self._moved_s
        self.stalled_s = stalled_s if stalled_s >= STALL_S else None

    def __str__(self) -> str:
        """For the error: what there was."""
        log, resident, read = self._seen
        return (
            f"{self._looked_s - self._began_s:.0f} s after its start it had {format_bytes(resident)} in memory, "
            f"had read {format_bytes(read)} and logged {format_bytes(log)}"
        )

    def _log_bytes(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _process_bytes(self) -> tuple[int, int]:
        """(resident, read); what cannot be seen is 0."""
        if self._process is None:
            return 0, 0
        try:
            resident = self._process.memory_info().rss
            # Not on macOS.
            read = self._process.io_counters().read_chars if hasattr(self._process, "io_counters") else 0
        except (psutil.Error, OSError):
            return 0, 0
        return resident, read


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
