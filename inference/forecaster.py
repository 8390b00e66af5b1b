"""Keeps forecasts of everybody's turn at hand while somebody waits, and looks ahead for who asks.

Owned by `pool.py`, whose progress reports, refusals and explanations state them; calls `forecast.py`. A forecast takes
the processor from engines and relays that need it, so it is made in slices between other work, stops where it has cost
enough, and is made only while somebody wants to know, of queues that do not clear by themselves in a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping

import structlog

from inference.errors import TooManyQuestions
from inference.forecast import Forecast
from inference.scheduler import Scheduler

__all__ = ["Forecaster", "look_ahead"]

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
MOST_S = 0.5
"""Of the processor for one forecast; whose turn it has not come to by then gets no estimate."""
SLICE_S = 0.002
"""Of the processor, before others have their turn of it."""
MOST_QUESTIONS = 16
"""Looked into one after the other; who comes while so many wait is refused."""

_log = structlog.get_logger(__name__)


class Forecaster:
    """The latest forecast of one live scheduler. Belongs to one event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._turns_s: Mapping[str, float] = {}
        self._asked_at_s = -math.inf
        self._questions = 0
        self._one_question = asyncio.Lock()

    def eta_s(self, ticket_id: str) -> float | None:
        """Seconds until an engine gets the waiting ticket; None where no forecast says so, or it did not come true."""
        now_s = self._asked_at_s = time.monotonic()
        turn_s = self._turns_s.get(ticket_id)
        return None if turn_s is None or turn_s <= now_s else turn_s - now_s

    async def main_loop(self, someone_waits: asyncio.Event) -> None:
        """Make forecasts while somebody waits. Until it is cancelled."""
        while True:
            await someone_waits.wait()
            began_s, copying_s, spent_s = time.monotonic(), time.thread_time(), 0.0
            if self._is_worth_it(began_s):
                try:
                    forecast = Forecast(self._scheduler.copy(), began_s)
                    spent_s = time.thread_time() - copying_s
                    spent_s += await look_ahead(forecast)
                    self._turns_s = forecast.turns_s
                except Exception:  # without estimates everything goes on; a fault in one must not end them all
                    _log.exception("forecast_failed")
            await asyncio.sleep(max(began_s + EVERY_S - time.monotonic(), spent_s / SHARE))

    @contextlib.asynccontextmanager
    async def question(self) -> AsyncIterator[None]:
        """Somebody asks for a look ahead of their own: one after the other, inside of this.

        Raises:
            TooManyQuestions: as many wait for that already as may.
        """
        if self._questions >= MOST_QUESTIONS:
            raise TooManyQuestions(f"{self._questions} such questions wait already, and each takes a while: ask later")
        self._questions += 1
        try:
            async with self._one_question:
                yield
        finally:
            self._questions -= 1

    def _is_worth_it(self, now_s: float) -> bool:
        board = self._scheduler.board
        if board.line.oldest_s is None:
            return False
        waited_s = now_s - board.line.oldest_s
        wanted = now_s - self._asked_at_s < WANTED_S or waited_s >= LATE * board.limits.max_wait_s
        return wanted and waited_s >= WORTH_IT_S


async def look_ahead(forecast: Forecast, *, resting: bool = False) -> float:
    """Run a forecast between other work, for as long as it may cost; the seconds of the processor that it did.

    `resting` as long after each slice as that took: it takes no more than half a processor then.
    """
    spent_s, over = 0.0, False
    while not over and spent_s < MOST_S:
        began_s, slice_s = time.thread_time(), 0.0
        while not over and slice_s < SLICE_S:
            over = forecast.run(1)
            slice_s = time.thread_time() - began_s
        spent_s += slice_s
        await asyncio.sleep(slice_s if resting else 0.0)
    return spent_s
