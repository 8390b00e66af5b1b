"""A faulty network between clients and their store, as a process: `python -m tests.faults.proxy LISTEN UPSTREAM SEED`.

Started by `tests.faults.crowd`. Per request, by chance: the connection is cut before the request goes on, or after it
was done and before its reply; the reply is late; or the connection stays open and nothing comes any more. All else
goes through untouched, as cheaply as it can: nobody looks into the bytes.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Callable
from typing import cast

import uvloop

__all__ = ["FAULTS"]

FAULTS = {"cut before": 0.0015, "cut after": 0.0015, "late": 0.006, "half open": 0.00002}
"""Of all requests, this part."""
_LATEST_S = 0.05


class _Side(asyncio.Protocol):
    """One end of a connection; `other` is set as soon as it is there."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        self._take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class _Pair:
    """A client's connection and the one to the store."""

    def __init__(self, upstream: str, chance: random.Random, told: dict[str, int]) -> None:
        self._upstream = upstream
        self._chance = chance
        self._told = told
        self._client = _Side(self._request)
        self._store = _Side(self._reply)
        self._fate = ""
        self._early: list[bytes] = []

    def accept(self) -> _Side:
        """The client's side."""
        asyncio.get_running_loop().create_task(self._connect())
        return self._client

    async def _connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self._store, self._upstream)
        except OSError:
            self._cut()
            return
        self._client.other, self._store.other = self._store, self._client
        early, self._early = self._early, []
        for data in early:
            self._request(data)

    def _request(self, data: bytes) -> None:
        if self._store.transport is None:
            self._early.append(data)
            return
        self._told["requests"] += 1
        luck = self._chance.random()
        for fate, part in FAULTS.items():
            if luck < part:
                self._fate = fate
                self._told[fate] += 1
                break
            luck -= part
        if self._fate == "cut before":
            self._cut()
        elif not self._store.transport.is_closing():
            self._store.transport.write(data)

    def _reply(self, data: bytes) -> None:
        fate = self._fate
        if fate == "cut after":
            self._cut()
        elif fate == "late":
            self._fate = ""
            asyncio.get_running_loop().call_later(self._chance.random() * _LATEST_S, self._pass, data)
        elif fate != "half open":
            self._pass(data)

    def _pass(self, data: bytes) -> None:
        transport = self._client.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def _cut(self) -> None:
        for side in (self._client, self._store):
            if side.transport is not None:
                side.transport.abort()


async def _serve(listen: str, upstream: str, seed: int) -> None:
    chance = random.Random(seed)
    told = dict.fromkeys(("requests", *FAULTS), 0)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_unix_server(lambda: _Pair(upstream, chance, told).accept(), listen)
    await stop.wait()
    server.close()
    print(", ".join(f"{count} {what}" for what, count in told.items()), flush=True)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
