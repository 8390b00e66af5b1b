"""Callers who come when they come, whatever the server does: arrivals at random moments, and how long each one waited.

Used by `fairness.py`. A wait lasts from the moment the request is sent until the first `data:` line of its stream;
comments that say how far one is in the queue do not end it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

PATIENCE_S = 120.0
_QUEUE_MS = "x-boss-queue-ms"
_COMMENT = f": {_QUEUE_MS}: ".encode()
TOKENS = 8
"""Of an answer: short beside a load, as most answers are beside loads of real models."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come."""

    name: str
    """Who asks; nobody asks twice."""
    at_s: float
    """Seconds from the beginning."""
    model: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its caller saw it. Moments are seconds from the beginning."""

    name: str
    model: str
    came_s: float
    waited_s: float | None
    """Until the first data; None when it never had any."""
    queued_s: float | None
    """Until the engine got it, as Model Boss says; None where nobody says so."""
    over_s: float
    """When the last byte was there, or the caller gave up."""


Demand = Mapping[str, float]
"""How often each of the models is asked for, in any unit."""


def arrivals(demand: Demand, *, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """A Poisson process: so many a second, each for one of the models at random."""
    rng = random.Random(seed)
    coming: list[Arrival] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        coming.append(Arrival(f"caller-{seed}-{len(coming)}", at_s, _any_model(demand, rng)))
        at_s += rng.expovariate(rate)
    return coming


def _any_model(demand: Demand, rng: random.Random) -> str:
    return rng.choices(list(demand), list(demand.values()))[0]


def _queued_s(milliseconds: str | None) -> float | None:
    return None if milliseconds is None else float(milliseconds) / 1000


class Callers:
    """Everybody who asks one server. Used as a context; its beginning is the time all moments count from."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    async def __aenter__(self) -> Callers:
        # Kept after a stream, a connection would fail the next request: llama-server closes it without a word.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        self._began_s = time.perf_counter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def now_s(self) -> float:
        """Seconds from the beginning."""
        return time.perf_counter() - self._began_s

    async def play(self, coming: Sequence[Arrival]) -> list[Answer]:
        """Let them come, and wait until all are answered."""
        under_way = []
        for arrival in coming:
            await asyncio.sleep(max(0.0, arrival.at_s - self.now_s()))
            under_way.append(asyncio.create_task(self.ask(arrival.model, arrival.name)))
        return list(await asyncio.gather(*under_way))

    async def insist(self, demand: Demand, *, callers: int, until: asyncio.Event) -> list[Answer]:
        """So many callers, each asking again for one of the models at random as soon as it is answered."""
        rng = random.Random(callers)

        async def one(name: str) -> list[Answer]:
            answers = []
            while not until.is_set():
                answers.append(await self.ask(_any_model(demand, rng), name))
            return answers

        everyone = await asyncio.gather(*(one(f"steady-{number}") for number in range(callers)))
        return [answer for answers in everyone for answer in answers]

    async def ask(self, model: str, name: str, *, patience_s: float = PATIENCE_S) -> Answer:
        """One request."""
        came_s, first_s, queued_s = self.now_s(), None, None
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Who are you?"}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with (
                asyncio.timeout(patience_s),
                self._session.post(
                    f"{self._base}/v1/chat/completions", json=body, headers={"X-Boss-Client-Id": name}
                ) as response,
            ):
                queued_s = _queued_s(response.headers.get(_QUEUE_MS))
                async for line in response.content:
                    if line.startswith(_COMMENT):  # the headers had left before
                        queued_s = _queued_s(line.removeprefix(_COMMENT).decode())
                    if first_s is None and response.status == 200 and line.startswith(b"data:"):
                        first_s = self.now_s()
                    if line.startswith((b"error:", b'data: {"error"')):
                        raise RuntimeError(f"{model} for {name}: {line[:500].decode()}")
        except TimeoutError:
            pass  # its caller gave up, which is a measurement too
        return Answer(name, model, came_s, None if first_s is None else first_s - came_s, queued_s, self.now_s())

    async def get(self, path: str) -> object:
        """The JSON that the server answers."""
        async with self._session.get(self._base + path) as response:
            return await response.json()

    async def post(self, path: str) -> None:
        """Have the server do something."""
        async with self._session.post(self._base + path, json={}) as response:
            await response.read()
