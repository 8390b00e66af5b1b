"""Keeps forecasts of everybody's turn at hand while somebody waits.

Owned by `pool.py`, whose progress reports and refusals state them; calls `forecast.py`. A forecast takes the processor
from engines that may need it, so it is made in slices between other work, only while somebody wants to know, and only
for queues that do not clear by themselves in a moment.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping

import structlog

from inference.forecast import Forecast
from inference.scheduler import Scheduler

__all__ = ["Forecaster"]

EVERY_S = 1.0
"""Between the beginnings of two forecasts; more where they need more than"""
SHARE = 0.05
"""of a processor. Each is made at once, for an old one is worth little to whoever is next."""
WANTED_S = 15.0
"""How long the last question counts; a waiting stream asks every second, or every ten where many wait."""
LATE = 0.8
"""Part of `max_wait_s` after which somebody will soon be told to come back, and when."""
WORTH_IT_S = 0.5
"""Nobody asks how long it will take before somebody has waited for so long."""
_SLICE_STEPS = 8
"""A millisecond or two."""

_log = structlog.get_logger(__name__)


class Forecaster:
    """The latest forecast of one live scheduler. Belongs to one event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._turns_s: Mapping[str, float] = {}
        self._asked_at_s = -math.inf
        self._spent_s = 0.0
        """Of the processor, since the last forecast began."""

    def eta_s(self, ticket_id: str) -> float | None:
        """Seconds until an engine gets the waiting ticket; None where no forecast says so, or it did not come true."""
        now_s = self._asked_at_s = time.monotonic()
        turn_s = self._turns_s.get(ticket_id)
        return None if turn_s is None or turn_s <= now_s else turn_s - now_s

    async def main_loop(self, someone_waits: asyncio.Event) -> None:
        """Make forecasts while somebody waits. Until it is cancelled."""
        while True:
            await someone_waits.wait()
            began_s, before_s, self._spent_s = time.monotonic(), time.thread_time(), 0.0
            if self._is_worth_it(began_s):
                try:
                    forecast = Forecast(self._scheduler.copy(), began_s)
                    self._spent_s = time.thread_time() - before_s
                    self._turns_s = await self.look_ahead(forecast)
                except Exception:  # without estimates everything goes on; a fault in one must not end them all
                    _log.exception("forecast_failed")
            await asyncio.sleep(max(began_s + EVERY_S - time.monotonic(), self._spent_s / SHARE))

    async def look_ahead(self, forecast: Forecast) -> Mapping[str, float]:
        """Run a forecast between other work; the moments of the turns by ticket."""
        over = False
        while not over:
            began_s = time.thread_time()
            over = forecast.run(_SLICE_STEPS)
            self._spent_s += time.thread_time() - began_s
            await asyncio.sleep(0)
        return forecast.turns_s

    def _is_worth_it(self, now_s: float) -> bool:
        board = self._scheduler.board
        if board.line.oldest_s is None:
            return False
        waited_s = now_s - board.line.oldest_s
        wanted = now_s - self._asked_at_s < WANTED_S or waited_s >= LATE * board.limits.max_wait_s
        return wanted and waited_s >= WORTH_IT_S
