"""What a broker says about when a request's turn will be, and when it was. Used by `fairness.py` and `eta.py`.

A statement is good if it is wrong by at most 30 % of the time that was really left, however little that was. The turn
is the moment at which the engine gets the request: how long it reads before its first word is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.open_loop import Answer, Callers

GOOD = 0.3
BAR = 0.8
"""So many of the statements must be good."""
EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Statement:
    """What was said, and what came of it."""

    said_s: float
    """Seconds until the request's turn, as stated."""
    real_s: float
    """As it was."""

    @property
    def good(self) -> bool:
        """Was it near enough?"""
        return abs(self.said_s - self.real_s) <= GOOD * self.real_s


@dataclass(frozen=True, slots=True)
class _Said:
    name: str
    at_s: float
    eta_s: float | None


class Listener:
    """Reads the queue of a broker again and again, and remembers what it said."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._said: list[_Said] = []

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Read while the block runs."""
        task = asyncio.create_task(self._listen(), name="eta-listener")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _listen(self) -> None:
        while True:
            answer: Any = await self._callers.get("/api/v1/queue")
            self.heard(self._callers.now_s(), answer["queue"])
            await asyncio.sleep(EVERY_S)

    def heard(self, now_s: float, queue: Sequence[Mapping[str, Any]]) -> None:
        """Remember what was said of everybody in the queue."""
        self._said += [_Said(one["client_id"], now_s, one["eta_s"]) for one in queue]

    def compared(self, answers: Iterable[Answer]) -> tuple[list[Statement], int]:
        """Every statement with what came of it, and how often there was none."""
        turn_s = {one.name: one.came_s + one.queued_s for one in answers if one.queued_s is not None}
        return list(_pairs(self._said, turn_s)), sum(said.eta_s is None for said in self._said)


def _pairs(said: Sequence[_Said], turn_s: Mapping[str, float]) -> Iterator[Statement]:
    for one in said:
        if one.eta_s is not None and one.name in turn_s:
            yield Statement(one.eta_s, max(0.0, turn_s[one.name] - one.at_s))


def share_good(statements: Sequence[Statement]) -> float:
    """The part of them that was near enough; 0 where nothing was said."""
    return sum(one.good for one in statements) / len(statements) if statements else 0.0
