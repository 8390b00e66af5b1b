"""Keeps forecasts of everybody's turn at hand while somebody waits.

Owned by `pool.py`, whose progress reports and refusals state them; calls `forecast.py`. A forecast takes the processor
for milliseconds, so it is made in slices between other work, at most once a second, and only for queues that do not
clear by themselves in a moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from inference.forecast import Forecast
from inference.scheduler import Scheduler

__all__ = ["Forecaster"]

EVERY_S = 1.0
"""Between the beginnings of two forecasts."""
WORTH_IT_S = 0.5
"""Nobody asks how long it will take before somebody has waited for so long."""
_SLICE_STEPS = 16
"""Some milliseconds."""
_PAUSE_S = 0.012
"""So a forecast takes a fifth of a processor while it is made."""

_log = structlog.get_logger(__name__)


class Forecaster:
    """The latest forecast of one live scheduler. Belongs to one event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._turns_s: Mapping[str, float] = {}

    def eta_s(self, ticket_id: str) -> float | None:
        """Seconds until the waiting ticket's turn; None where there is no forecast for it."""
        turn_s = self._turns_s.get(ticket_id)
        return None if turn_s is None else max(0.0, turn_s - time.monotonic())

    async def main_loop(self, someone_waits: asyncio.Event) -> None:
        """Make forecasts while somebody waits. Until it is cancelled."""
        while True:
            await someone_waits.wait()
            began_s = time.monotonic()
            if self._is_worth_it(began_s):
                try:
                    self._turns_s = await self.look_ahead(Forecast(self._scheduler.copy(), began_s))
                except Exception:  # without estimates everything goes on; a fault in one must not end them all
                    _log.exception("forecast_failed")
            await asyncio.sleep(max(_PAUSE_S, EVERY_S - (time.monotonic() - began_s)))

    async def look_ahead(self, forecast: Forecast) -> Mapping[str, float]:
        """Run a forecast between other work; the moments of the turns by ticket."""
        while not forecast.run(_SLICE_STEPS):  # noqa: ASYNC110 (it is not waiting: it lets others have the processor)
            await asyncio.sleep(_PAUSE_S)
        return forecast.turns_s

    def _is_worth_it(self, now_s: float) -> bool:
        first_s = self._scheduler.board.line.oldest_s
        return first_s is not None and now_s - first_s >= WORTH_IT_S
