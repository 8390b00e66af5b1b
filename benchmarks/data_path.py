"""What one proxied request costs the broker in each candidate for the data path's client.

Run as `python -m benchmarks.data_path`; the figures are in docs/decisions/0003-data-path-client.md. A process of its
own plays the engine and answers from memory over a unix socket, as llama-server does: a short body with Content-Length
on a kept connection, a stream in chunks and then the end of the connection. CPU time of the asking process is what is
compared: unlike the clock it says the same on a busy machine. The candidates take turns, and medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import uvloop

from inference.proxy import EngineClient

REQUEST = b'{"messages":[{"role":"user","content":"Who are you?"}],"max_tokens":4}'
_PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 600\r\n\r\n" + b"x" * 600
_CHUNK = b"data: " + b"y" * 220 + b"\n\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_CHUNKS = 16

Ask = Callable[[str], Awaitable[int]]


class _FakeEngine(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment] # a unix server's transport is one

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST /plain"):
            self._transport.write(_PLAIN)
            return
        self._transport.write(_STREAM_HEAD)
        self._next_chunk(_CHUNKS)

    def _next_chunk(self, left: int) -> None:
        if left == 0:
            self._transport.write(b"0\r\n\r\n")
            self._transport.close()
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(_CHUNK), _CHUNK))
        asyncio.get_running_loop().call_later(0.0002, self._next_chunk, left - 1)


async def _serve(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(_FakeEngine, path)
    print("ready", flush=True)
    await server.serve_forever()


@contextlib.asynccontextmanager
async def _own(path: str) -> AsyncIterator[Ask]:
    client = EngineClient(Path(path), "key", name="fake")

    async def ask(target: str) -> int:
        response = await client.open("POST", target, REQUEST, [(b"content-type", b"application/json")])
        return sum([len(chunk) async for chunk in response])

    yield ask
    await client.close()


@contextlib.asynccontextmanager
async def _aiohttp(path: str) -> AsyncIterator[Ask]:
    def session(*, keep: bool) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0, force_close=not keep),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Authorization": "Bearer key", "Content-Type": "application/json"},
        )

    # Kept after a stream, a connection would fail the next request: the engine closes it without having said so.
    async with session(keep=True) as plain, session(keep=False) as stream:

        async def ask(target: str) -> int:
            chosen = stream if target == "/stream" else plain
            async with chosen.post(f"http://engine{target}", data=REQUEST) as response:
                return sum([len(chunk) async for chunk in response.content.iter_any()])

        yield ask


@contextlib.asynccontextmanager
async def _streams(path: str) -> AsyncIterator[Ask]:
    """asyncio's streams and the least parsing that works: the floor for a client without a parser in C."""
    head = b"Host: engine\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(target: str) -> int:
        reader, writer = kept.pop() if kept else await asyncio.open_unix_connection(path)
        writer.write(b"POST " + target.encode() + b" HTTP/1.1\r\n" + head % len(REQUEST) + REQUEST)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length: " in answer:
            size = len(await reader.readexactly(int(answer.split(b"content-length: ")[1].split(b"\r\n")[0])))
            kept.append((reader, writer))
            return size
        size = 0
        while length := int(await reader.readline(), 16):
            size += len(await reader.readexactly(length + 2)) - 2
        writer.close()
        await writer.wait_closed()
        return size

    yield ask
    for _, writer in kept:
        writer.close()


CANDIDATES = {"own (httptools)": _own, "aiohttp": _aiohttp, "asyncio streams": _streams}


async def _measure(path: str, rounds: int, requests: int) -> None:
    spent: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for target, expected in (("/plain", 600), ("/stream", _CHUNKS * len(_CHUNK))):
            for name, candidate in CANDIDATES.items():
                async with candidate(path) as ask:
                    await ask(target)
                    began_s = time.process_time()
                    for _ in range(requests):
                        assert await ask(target) == expected
                    spent.setdefault((target, name), []).append((time.process_time() - began_s) / requests)
    for (target, name), seconds in spent.items():
        print(f"{target[1:]:8} {name:16} {statistics.median(seconds) * 1e6:6.0f} us CPU per request")


async def _main(rounds: int, requests: int) -> None:
    with tempfile.TemporaryDirectory(prefix="mb-", dir="/tmp") as folder:
        path = str(Path(folder, "e.sock"))
        engine = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.data_path", "--engine", path, stdout=asyncio.subprocess.PIPE
        )
        assert engine.stdout is not None
        await engine.stdout.readline()
        try:
            await _measure(path, rounds, requests)
        finally:
            engine.kill()
            await engine.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    uvloop.run(_serve(given.engine) if given.engine else _main(given.rounds, given.requests))
