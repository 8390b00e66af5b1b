"""The way to a store whose master changes: its Sentinels are asked where it is.

Made by `gpuboss.store_routes`; a `Route` as described there. redis-py's own Sentinel client is not used: it asks one
Sentinel after the other, and believes the first.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection, Connection

from gpuboss.store_connect import ConnectionMaker, Unusable, connect
from gpuboss.store_url import shown

__all__ = ["SCHEMES", "SentinelRoute"]

SCHEMES = ("redis+sentinel", "rediss+sentinel")
_TIMEOUT_S = 1.0
_TRUSTED_S = 2.0
"""How long a server is taken for the master before the Sentinels are asked again."""
_TRUSTED_WITHOUT_SENTINELS_S = 30.0
"""The same while no Sentinel answers."""
_PORT = 26379


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int


class SentinelRoute:
    """Asks all Sentinels at once, and believes the address that most of them name, if it says that it is a master.

    Where that one does not answer, the other addresses are tried: after a fail-over one Sentinel knows before the rest.
    """

    by_sentinel = True

    def __init__(self, url: str) -> None:
        self.shown = shown(url)
        parts = urlsplit(url)
        user, _, hosts = parts.netloc.rpartition("@")
        service, _, database = parts.path.strip("/").partition("/")
        if not service or not all(hosts.split(",")):
            raise Unusable("it must name Sentinels and a service (redis+sentinel://host:26379,host:26379/mymaster)")
        if database and not database.isdigit():
            raise Unusable("what follows the service must be the number of a database")
        self._service = unquote(service)
        self._trusted_until_s = 0.0
        query = dict(parse_qsl(parts.query))
        encrypted = parts.scheme.startswith("rediss") or _is_true(query.pop("ssl", "false"), "ssl")
        sentinels_encrypted = _is_true(query.pop("sentinel_ssl", str(encrypted)), "sentinel_ssl")
        login = {name: query.pop(f"sentinel_{name}", "") for name in ("username", "password")}
        self._masters = ConnectionMaker(
            f"{_scheme(encrypted)}://{user}{'@' if user else ''}master/{database}?{urlencode(query)}"
        )
        options = {name: value for name, value in query.items() if name.startswith("ssl") and sentinels_encrypted}
        self._sentinels = {
            place: ConnectionMaker(
                f"{_scheme(sentinels_encrypted)}://{quote(login['username'], safe='')}:"
                f"{quote(login['password'], safe='')}@{place}?{urlencode(options)}"
            )
            for place in map(_with_port, hosts.split(","))
        }

    async def candidates(self) -> list[AbstractConnection]:
        """To the master, and after it to whatever else a Sentinel takes for the master."""
        places = await self._places()
        self._trusted_until_s = time.monotonic() + _TRUSTED_S
        return [self._masters.make(host=place.host, port=place.port) for place in places]

    async def leads_to(self, connection: AbstractConnection, /) -> bool:
        """Asked now and then, since a master that was replaced answers on until somebody tells it."""
        if time.monotonic() < self._trusted_until_s or not isinstance(connection, Connection):
            return True
        self._trusted_until_s = time.monotonic() + _TRUSTED_S  # before the answer: one asks for all
        try:
            places = await self._places()
        except (redis_errors.RedisError, OSError):
            self._trusted_until_s = time.monotonic() + _TRUSTED_WITHOUT_SENTINELS_S
            return True
        return places[0] == _Address(connection.host, connection.port)

    def forget(self) -> None:
        """Read the certificates again for the next connection."""
        for maker in (self._masters, *self._sentinels.values()):
            maker.forget()

    async def _places(self) -> list[_Address]:
        """Where the master is said to be, by number of votes; no vote is waited for once a majority agrees."""
        votes: Counter[_Address] = Counter()
        silent: list[str] = []
        asked = {asyncio.create_task(self._ask(maker)): place for place, maker in self._sentinels.items()}
        waiting = set(asked)
        try:
            while waiting and (not votes or votes.most_common(1)[0][1] * 2 <= len(asked)):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        votes[task.result()] += 1
                    except (redis_errors.RedisError, OSError) as error:
                        silent.append(f"{asked[task]}: {error or 'no answer'}")
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not votes:
            raise redis_errors.ConnectionError(
                f"no Sentinel tells where {self._service!r} is ({'; '.join(sorted(silent))})"
            )
        return [place for place, _ in votes.most_common()]

    async def _ask(self, maker: ConnectionMaker) -> _Address:
        connection = maker.make()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await connect(connection)
                await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
                told = await connection.read_response()
        except redis_errors.AuthenticationError as error:
            raise redis_errors.AuthenticationError(
                f"{error} (sentinel_username and sentinel_password are for the Sentinels)"
            ) from None
        finally:
            await connection.disconnect(nowait=True)
        if not told:
            raise redis_errors.ConnectionError(f"it watches no {self._service!r}")
        return _Address(str(told[0]), int(told[1]))


def _scheme(encrypted: bool) -> str:
    return "rediss" if encrypted else "redis"


def _with_port(place: str) -> str:
    return place if place.rpartition(":")[2].isdigit() and not place.endswith("]") else f"{place}:{_PORT}"


def _is_true(word: str, name: str) -> bool:
    if word.lower() in ("true", "1", "yes"):
        return True
    if word.lower() in ("false", "0", "no"):
        return False
    raise Unusable(f"{name} must be true or false")
