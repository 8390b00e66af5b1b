"""Connections to the lease store, each of which knows the run id of the server it speaks to.

Called by `gpuboss.store` alone. redis-py's own pool and retries are not used: they reconnect in silence, and a command
meant for one life of the store would then be done in the next. Here a connection lives as long as its socket, and a
command carries the run id of the very connection it goes out on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection, parse_url

__all__ = ["LOST", "Link", "LinkPool"]


class Unwilling(redis_errors.ResponseError):
    """The server answers, and takes no writes at present: its disk or memory is full, or a script keeps it busy."""


_UNWILLING = ("MISCONF", "OOM", "BUSY", "NOREPLICAS")
"""First words of such answers. redis-py gives most of them no class of their own."""
LOST = (
    Unwilling,
    redis_errors.OutOfMemoryError,
    redis_errors.ConnectionError,  # also: the server loads its file
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    redis_errors.MasterDownError,
    redis_errors.TryAgainError,
    redis_errors.ClusterDownError,
    OSError,
)
"""What says that this server is of no use now and that another connection may help."""
_MOST_LINKS = 8
_CONNECT_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Link:
    """One connection."""

    connection: AbstractConnection
    run_id: str
    """The server's, read when the connection was made."""

    async def ask(self, *command: str | int, within_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """One command and its reply. Raises what `LOST` lists, and then is of no more use; or a ResponseError."""
        # Not redis-py's own timeout, which can swallow a cancellation: `asyncio.wait_for` of Python 3.11 does.
        async with asyncio.timeout(within_s):
            await self.connection.send_command(*command)
            try:
                return await self.connection.read_response()
            except redis_errors.ResponseError as error:
                if str(error).startswith(_UNWILLING):
                    raise Unwilling(str(error)) from error
                raise

    async def close(self) -> None:
        """Close the socket."""
        await self.connection.disconnect()


class LinkPool:
    """A few connections to one store, opened when needed and used by one command at a time."""

    def __init__(self, url: str) -> None:
        """ValueError when the URL is none that redis-py takes."""
        arguments: dict[str, Any] = dict(parse_url(url))
        self._connection_class = arguments.pop("connection_class", None) or _default_class()
        self._arguments = {
            "protocol": 2,
            "decode_responses": True,
            "socket_timeout": None,
            "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        } | arguments
        self._idle: list[Link] = []
        self._room = asyncio.Semaphore(_MOST_LINKS)

    async def open(self) -> Link:
        """A connection of the caller's own, e.g. to block on."""
        connection = self._connection_class(**self._arguments)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await connection.connect()
                await connection.send_command("INFO", "server")
                run_id = _run_id(await connection.read_response())
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return Link(connection, run_id)

    @contextlib.asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        """A connection for one command. When it is lost, all idle ones are dropped: they led to the same server."""
        async with self._room:
            link = self._idle.pop() if self._idle else await self.open()
            try:
                yield link
            except LOST:
                await link.close()
                await self.drop_idle()
                raise
            except redis_errors.ResponseError:
                self._idle.append(link)
                raise
            except BaseException:
                await link.connection.disconnect(nowait=True)
                raise
            self._idle.append(link)

    async def drop_idle(self) -> None:
        """Close the connections nobody uses now."""
        while self._idle:
            await self._idle.pop().close()


def _default_class() -> type[AbstractConnection]:
    from redis.asyncio.connection import Connection

    return Connection


def _run_id(info: str) -> str:
    for line in info.splitlines():
        if line.startswith("run_id:"):
            return line.partition(":")[2].strip()
    raise redis_errors.ConnectionError("the store does not tell its run id (INFO server)")
