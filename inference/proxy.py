"""The way to an engine: HTTP/1.1 over its unix socket, with its key; bytes pass as they come and are never looked into.

Made by `engine_run.py`, one `EngineClient` per life of an engine; used by the coordinator for requests and by backends
for probes. Why it is our own: docs/decisions/0003-data-path-client.md.

    response = await client.open("POST", "/v1/chat/completions", body, [(b"content-type", b"application/json")])
    try:
        async for chunk in response: ...
    finally:
        response.close()          # before its end this closes the connection, and the engine stops generating
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from inference.engine_http import Connection, EngineResponse, Unread
from inference.errors import EngineDied, InferenceError

__all__ = ["EngineClient", "EngineResponse"]

_TARGET: Final = re.compile(r"[A-Z]{1,16} /[!-~]*")
_PASSED_ON: Final = frozenset({b"content-type", b"accept"})
"""All an engine is told of the caller's headers; `x-conversation-id` would make llama-server go on after a hang-up."""


class EngineClient:
    """Connections to one engine, for as long as it lives. Belongs to the event loop it was made on."""

    def __init__(self, socket: Path, api_key: str, *, name: str) -> None:
        self.name = name
        """The model's id, for messages."""
        self._path = str(socket)
        self._common = f"Host: engine\r\nAuthorization: Bearer {api_key}\r\n".encode()
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._closed = False
        self._interrupted: InferenceError | None = None
        self._all_gone: asyncio.Future[None] | None = None

    @property
    def working(self) -> bool:
        """Whether the engine was asked anything that it has not answered to the end."""
        return any(connection.working for connection in self._connections)

    async def open(
        self, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> EngineResponse:
        """Send a request and wait for the head of its answer. `path` holds the query; it must be percent-encoded.

        Of `headers` only Content-Type and Accept reach the engine. Cancelling closes the connection.

        Raises:
            EngineDied: nothing listens, or the engine ended before it answered.
            InferenceError: the answer was interrupted, and why.
            ValueError: the path or a header would break the request.
        """
        request = self._request(method, path, body, headers)
        if self._closed:
            raise self.died("was stopped", reached=False)
        connection = self._take_idle()
        while True:
            fresh = connection is None
            if connection is None:
                connection = await self._connect()
            response = connection.send(request, bodyless=method == "HEAD")
            try:
                await response.head
            except Unread as error:
                if fresh:
                    raise self.died("ended before it read the request", reached=False) from error
                connection = None
            except BaseException:
                connection.abort()
                raise
            else:
                return response

    def interrupt(self, error: InferenceError) -> None:
        """Close every connection; answers under way end with this error, and nothing new is asked."""
        self._closed, self._interrupted = True, error
        for connection in list(self._connections):
            connection.abort()

    async def close(self) -> None:
        """Close every connection; answers under way end with EngineDied. May be called again."""
        self._closed = True
        for connection in list(self._connections):
            connection.abort()
        if self._connections:
            self._all_gone = self._all_gone or self._loop.create_future()
            await asyncio.shield(self._all_gone)

    def _request(self, method: str, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        target = f"{method} {path}"
        if _TARGET.fullmatch(target) is None:
            raise ValueError(f"{target!r} is not a request's method and percent-encoded path")
        lines = [target.encode("ascii"), b" HTTP/1.1\r\n", self._common]
        for name, value in headers:
            if name.lower() in _PASSED_ON:
                if b"\r" in value or b"\n" in value:
                    raise ValueError(f"the header {name!r} holds a line break")
                lines += (name, b": ", value, b"\r\n")
        if body or method == "POST":
            lines.append(b"Content-Length: %d\r\n" % len(body))
        lines += (b"\r\n", body)
        return b"".join(lines)

    def _take_idle(self) -> Connection | None:
        """The connection used last, if the engine will not have closed it; older ones are closed here."""
        now_s = self._loop.time()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable_at(now_s):
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        try:
            _, connection = await self._loop.create_unix_connection(lambda: Connection(self, self._loop), self._path)
        except OSError as error:
            raise self.died(f"does not listen ({error.strerror or error})", reached=False) from error
        if self._closed:
            connection.abort()
            raise self.died("was stopped", reached=False)
        self._connections.add(connection)
        return connection

    def died(self, what: str, *, reached: bool = True) -> InferenceError:
        """The error for an engine that did so, or was closed before; `reached`: it may have seen the request."""
        if self._interrupted is not None and reached:
            return copy.copy(self._interrupted)  # each raised where it is caught, with a trace of its own
        what = "was stopped" if self._closed else what
        return EngineDied(f"the engine of '{self.name}' {what}", retry_after_s=1.0, reached=reached)

    def keep(self, connection: Connection) -> None:
        """The connection may be used again."""
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """The connection is closed."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._all_gone is not None and not self._connections and not self._all_gone.done():
            self._all_gone.set_result(None)
