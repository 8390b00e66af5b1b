"""One HTTP/1.1 connection to an engine, and the answer that comes over it. Used by `proxy.py` alone.

Written on `asyncio.Protocol` and httptools because every request pays for it: docs/decisions/0003-data-path-client.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol, cast

import httptools

from inference.errors import InferenceError

__all__ = ["Connection", "EngineResponse", "Headers", "Unread"]

Headers = list[tuple[bytes, bytes]]

MAX_IDLE_S = 4.0
"""A connection unused for longer is not used again: llama-server closes it after 5 s."""
HIGH_WATER_BYTES = 256 << 10
"""Of a body nobody reads; then the engine has to wait."""

_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"server", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)


class Unread(ConnectionError):
    """The connection was closed before the engine read the request, which may therefore be sent again."""


class EngineResponse:
    """Status and headers of an answer whose body is still coming. Used by one task."""

    __slots__ = ("_chunks", "_connection", "_done", "_error", "_size", "_waiter", "head", "headers", "status")

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        """Lower-case names; without those that concern the connection or the engine's own CORS rules."""
        self._connection = connection
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._done = False
        self._error: ConnectionError | InferenceError | None = None
        self.head: asyncio.Future[None] = connection.loop.create_future()
        """Done once status and headers are there. For the client, like the methods below for the connection."""
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> EngineResponse:
        return self

    async def __anext__(self) -> bytes:
        """The next piece of the body; EngineDied when the engine ended before, or why the answer was interrupted."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunk = self._chunks.popleft()
        self._size -= len(chunk)
        if self._size < HIGH_WATER_BYTES:
            self._connection.resume()
        return chunk

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            EngineDied: the engine ended before the body did.
            InferenceError: the answer was interrupted, and why.
        """
        if self._done and len(self._chunks) == 1:
            return self._chunks.popleft()
        return b"".join([chunk async for chunk in self])

    def close(self) -> None:
        """Finish; a body that is still coming is given up, which makes the engine stop. May be called again."""
        if not self._done:
            self._connection.abort()

    def push(self, chunk: bytes) -> bool:
        """Take a piece of the body; False when the reader has enough for now."""
        self._chunks.append(chunk)
        self._size += len(chunk)
        self._wake()
        return self._size < HIGH_WATER_BYTES

    def end(self, error: ConnectionError | InferenceError | None = None) -> None:
        """The answer is complete, or will never be."""
        if self._done or self._error is not None:
            return
        self._done, self._error = error is None, error
        if error is not None and not self.head.done():
            self.head.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Owner(Protocol):
    """Who keeps connections: the client."""

    def keep(self, connection: Connection) -> None:
        """The connection may be used again."""

    def forget(self, connection: Connection) -> None:
        """The connection is closed."""

    def died(self, what: str) -> InferenceError:
        """The error for an engine that did so, or for an answer that was interrupted."""


class Connection(asyncio.Protocol):
    """One connection to the engine: one request at a time, kept for the next where both sides agree."""

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._idle_since_s = 0.0
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response: EngineResponse | None = None
        self._bodyless = False
        self._chunked = False
        self._answered = False
        self._paused = False
        self._body: list[bytes] = []

    def send(self, request: bytes, *, bodyless: bool) -> EngineResponse:
        """Send a request; the response's head is awaited by the client."""
        assert self._transport is not None, "a connection is used once it is made"
        self._response = response = EngineResponse(self)
        self._bodyless, self._chunked, self._answered = bodyless, False, False
        self._transport.write(request)
        return response

    @property
    def working(self) -> bool:
        """The engine owes an answer, or more of it; one that its reader does not take is not owed."""
        return self._response is not None and not self._paused

    def usable_at(self, now_s: float) -> bool:
        """Whether the engine can be expected to still listen on this idle connection."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and now_s - self._idle_since_s < MAX_IDLE_S

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def resume(self) -> None:
        """Read on after the reader caught up."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    # -- called by the event loop ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """There is a connection."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """A piece of an answer."""
        response = self._response
        if response is None:
            self.abort()  # nobody asked for anything
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            response.end(self._owner.died(f"answered something that is not HTTP ({error})"))
            self.abort()
            return
        if self._body:
            chunk = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            if not response.push(chunk) and self._response is response and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
        if self._response is None:
            response.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed, by whichever side."""
        self._transport = None
        self._owner.forget(self)
        response, self._response = self._response, None
        if response is None:
            return
        # On a unix socket a reset says that our bytes were never read: the engine thought it idle, or died.
        if not self._answered and isinstance(exc, BrokenPipeError | ConnectionResetError):
            response.end(Unread())
        else:
            when = "in the middle of its answer" if response.status else "before it answered"
            response.end(self._owner.died(f"ended {when}"))

    # -- called by the parser --------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        name = name.lower()
        if name == b"transfer-encoding":
            self._chunked = True
        elif self._response is not None and name not in _HOP_BY_HOP and not name.startswith(b"access-control-"):
            self._response.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Status and headers are there."""
        response = self._response
        if response is None:
            return
        response.status = self._parser.get_status_code()
        if not response.head.done():
            response.head.set_result(None)
        if self._bodyless:
            self._response = None
            self.abort()  # the parser would wait for the body that the headers announce

    def on_body(self, body: bytes) -> None:
        """A piece of the body, without its chunk frame."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._response is None:
            return
        self._response = None
        # After a stream llama-server closes the connection, whatever it said: the next request would run into that.
        if self._parser.should_keep_alive() and not self._chunked:
            self._idle_since_s = self.loop.time()
            self._owner.keep(self)
        else:
            self.abort()
