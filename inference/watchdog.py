"""Whether an engine gets on with its work, told from what is seen of it now and then.

Asked by `progress_watch.py` about an engine that serves and by `load_progress.py` about one that loads. Pure: times,
what was seen and processor seconds come as arguments.

1. What is seen differs from what was seen before: progress. So is to have had nothing to do, until now.
2. Progress happened between two looks; it is taken to have been `LATE_S` after the earlier one, or at the later one if
   that came sooner. So a stall is told at most `LATE_S` too late, and up to two looks too early. Only an answer that
   had to wait came at the very end of a step.
3. An engine that computes on the processor may be in the middle of one long step that shows nothing. Processor seconds
   are progress too, but for `COMPUTING_TIMES` times the patience at most, for an endless loop burns them as well.
   Engines that wait for an accelerator may do so busily: theirs are not told.
"""

from __future__ import annotations

from typing import Final

__all__ = ["COMPUTING_TIMES", "LATE_S", "Watchdog"]

LATE_S: Final = 0.5
COMPUTING_SHARE: Final = 0.1
"""Processor seconds per second from which on an engine computes; to be looked at takes a hundredth of that."""
COMPUTING_TIMES: Final = 10


class Watchdog:
    """One engine, from a moment at which it got on."""

    def __init__(self, patience_s: float, now_s: float, *, seen: object = None) -> None:
        """`seen`: how far it is at that moment."""
        self._patience_s = patience_s
        self._looked_s = self._moved_s = self._computed_s = now_s
        self._idle = False
        self._seen = seen
        self._cpu_s: float | None = None

    def look(self, now_s: float, seen: object, *, cpu_s: float | None = None, waited_s: float = 0.0) -> None:
        """It has work.

        Args:
            seen: how far it is; None when it did not answer.
            cpu_s: what it has computed on the processor so far; None where that says nothing.
            waited_s: how long its answer took.
        """
        if self._idle or (seen is not None and seen != self._seen):  # 1
            self._moved_s = now_s if waited_s > LATE_S else self._at_most(now_s)
        self._seen = self._seen if seen is None else seen
        self._idle = False
        computed_s = 0.0 if cpu_s is None or self._cpu_s is None else cpu_s - self._cpu_s
        if computed_s > COMPUTING_SHARE * (now_s - self._looked_s):  # 3
            self._computed_s = min(self._at_most(now_s), self._looked_s + computed_s)
        self._cpu_s, self._looked_s = cpu_s, now_s

    def idle(self, now_s: float) -> None:
        """It has nothing to do."""
        self._idle = True
        self._cpu_s, self._looked_s = None, now_s

    def _at_most(self, now_s: float) -> float:
        return min(now_s, self._looked_s + LATE_S)  # 2

    @property
    def deadline_s(self) -> float | None:
        """When it is stalled unless it gets on before; None while it has nothing to do."""
        if self._idle:
            return None
        computed_s = min(self._computed_s, self._moved_s + (COMPUTING_TIMES - 1) * self._patience_s)
        return max(self._moved_s, computed_s) + self._patience_s

    def still_s(self, now_s: float) -> float:
        """For how long nothing was seen but processor seconds."""
        return now_s - self._moved_s
