"""Connections to the lease store, each of which knows the run id of the server it speaks to.

Called by `gpuboss.store` alone; `gpuboss.store_routes` finds the server, `gpuboss.store_pace` says when to try again.
redis-py's own pool and retries are not used: they reconnect in silence, and a command meant for one life of the store
would then be done in the next. Here a connection lives as long as its socket, and a command carries the run id of the
very connection it goes out on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection

from gpuboss.store_connect import CONNECT_TIMEOUT_S, connect
from gpuboss.store_pace import Pace
from gpuboss.store_routes import route_to

__all__ = ["LOST", "MOST_LINKS", "Link", "LinkPool", "facts_of"]


class Unwilling(redis_errors.ResponseError):
    """The server answers, and takes no writes at present: its disk or memory is full, or a script keeps it busy."""


_UNWILLING = ("MISCONF", "OOM", "BUSY", "NOREPLICAS", "UNBLOCKED")
"""First words of such answers. redis-py gives most of them no class of their own."""
LOST = (
    Unwilling,
    redis_errors.OutOfMemoryError,
    redis_errors.ConnectionError,  # also: the server loads its file, or refuses user and password
    redis_errors.TimeoutError,
    redis_errors.InvalidResponse,
    redis_errors.ReadOnlyError,
    redis_errors.MasterDownError,
    redis_errors.TryAgainError,
    redis_errors.ClusterDownError,
    OSError,
)
"""What says that this server is of no use now and that another connection may help."""
MOST_LINKS = 8
"""Connections one process has for commands; a blocking read has one of its own."""
_ANSWER_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Link:
    """One connection."""

    connection: AbstractConnection
    generation: int
    """How many times the store had been lost when this connection was made."""
    run_id: str = ""
    """The server's, read when the connection was made."""

    async def ask(self, *command: str | int, within_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """One command and its reply. Raises what `LOST` lists, and then is of no more use; or a ResponseError."""
        (answer,) = await self.ask_all([command], within_s=within_s)
        return answer

    async def ask_all(self, commands: list[tuple[str | int, ...]], *, within_s: float = _ANSWER_TIMEOUT_S) -> list[Any]:
        """Several commands, sent together; as `ask`, but of no more use after any error."""
        # Not redis-py's own timeout, which can swallow a cancellation: `asyncio.wait_for` of Python 3.11 does.
        try:
            async with asyncio.timeout(within_s):
                for command in commands:
                    await self.connection.send_command(*command)
                return [await self.connection.read_response() for _ in commands]
        except TimeoutError:
            raise TimeoutError(f"no answer within {within_s:g} s") from None
        except redis_errors.ResponseError as error:
            if str(error).startswith(_UNWILLING):
                raise Unwilling(str(error)) from error
            raise

    async def close(self) -> None:
        """Close the socket in good order."""
        with contextlib.suppress(*LOST):
            await self.connection.disconnect()

    async def drop(self) -> None:
        """Close the socket without waiting for anybody."""
        await self.connection.disconnect(nowait=True)


class LinkPool:
    """A few connections to one store, opened when needed and used by one command at a time."""

    def __init__(self, url: str) -> None:
        """ValueError, which tells no secret, for a URL that names no store."""
        self._route = route_to(url)
        self.shown = self._route.shown
        """The URL for people."""
        self.by_sentinel = self._route.by_sentinel
        self._pace = Pace()
        self._generation = 0
        self._idle: list[Link] = []
        self._room = asyncio.Semaphore(MOST_LINKS)

    def hurry(self) -> None:
        """The store is said to be back: try at once."""
        self._pace.hurry()

    async def open(self) -> Link:
        """A connection of the caller's own, e.g. to block on. Raises what `LOST` lists."""
        async with self._pace.turn():
            generation = self._generation
            try:
                return await self._connect(generation)
            except LOST as error:
                self._note_loss(generation, error)
                raise

    @contextlib.asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        """A connection for one command. When it is lost, all idle ones are dropped: they led to the same server."""
        async with self._room:
            await self._leave_the_replaced()
            link = self._idle.pop() if self._idle else await self.open()
            try:
                yield link
            except LOST as error:
                await self.lost(link, error)
                raise
            except redis_errors.ResponseError:
                await self._put_back(link)
                raise
            except BaseException:
                await link.drop()
                raise
            self._pace.succeeded()
            await self._put_back(link)

    async def lost(self, link: Link, error: Exception) -> None:
        """A connection is of no more use, and those opened with it neither."""
        await link.drop()
        if self._note_loss(link.generation, error):
            await self.drop_idle()

    def is_current(self, link: Link) -> bool:
        """Whether the store was not lost since this connection was made."""
        return link.generation == self._generation

    async def drop_idle(self) -> None:
        """Close the connections nobody uses now, without waiting."""
        while self._idle:
            await self._idle.pop().drop()

    async def close(self) -> None:
        """Close the connections nobody uses now, in good order."""
        while self._idle:
            await self._idle.pop().close()

    def _note_loss(self, generation: int, error: Exception) -> bool:
        """Whether this is news: one fall of the store is seen on every connection, and counts once."""
        if generation != self._generation:
            return False
        self._generation += 1
        self._pace.failed(str(error))
        if "SSL" in str(error):
            self._route.forget()
        return True

    async def _put_back(self, link: Link) -> None:
        if self.is_current(link):
            self._idle.append(link)
        else:  # the server it leads to was lost meanwhile, and may be the master no more
            await link.drop()

    async def _leave_the_replaced(self) -> None:
        """Drop what leads to a server that was the master and is not any more."""
        if self._idle:
            link = self._idle[-1]
            if not await self._route.leads_to(link.connection):
                self._note_loss(link.generation, redis_errors.ConnectionError("the Sentinels name another master"))
                await self.drop_idle()

    async def _connect(self, generation: int) -> Link:
        failure: Exception = redis_errors.ConnectionError("no server is known")
        for connection in await self._route.candidates():
            try:
                return await self._greet(Link(connection, generation))
            except LOST as error:
                failure = error
        raise failure

    async def _greet(self, link: Link) -> Link:
        """Connect and learn who that is."""
        try:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await connect(link.connection)
                    told = await link.ask_all([("INFO", "server"), ("INFO", "replication")])
            except TimeoutError:
                raise TimeoutError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None
            facts = facts_of(*told)
            link.run_id = facts.get("run_id", "")
            if not link.run_id:
                raise redis_errors.ConnectionError("it does not tell its run id (INFO server)")
            if facts.get("role", "master") != "master":
                raise redis_errors.ReadOnlyError("it is a replica, and takes no writes")
        except BaseException:
            await link.drop()
            raise
        return link


def facts_of(*told: str) -> dict[str, str]:
    """What INFO says, by name."""
    lines = (line.partition(":") for text in told for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in lines}
