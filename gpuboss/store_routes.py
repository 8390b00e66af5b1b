"""Ways to the server that holds the store, by its address: straight, or by asking Sentinels who the master is now.

Called by `gpuboss.store_link`, which asks anew for every connection it opens: so a fail-over is followed. Calls
`gpuboss.store_connect` and `gpuboss.store_sentinels`.

    redis://[user:password@]host[:port][/db]            rediss://...?ssl_ca_certs=FILE&ssl_certfile=..&ssl_keyfile=..
    unix://[user:password@]/path/of/socket[?db=..]
    redis+sentinel://[user:password@]host[:port],.../service[/db][?sentinel_password=..&sentinel_username=..&ssl=true]
"""

from __future__ import annotations

from typing import Protocol
from urllib.parse import urlsplit

from redis.asyncio.connection import AbstractConnection

from gpuboss.store_connect import ConnectionMaker, Unusable
from gpuboss.store_sentinels import SCHEMES, SentinelRoute
from gpuboss.store_url import shown

__all__ = ["Route", "route_to"]

_SAFE_REASONS = ("Invalid value for", "Redis URL must", "Port out of range", "Invalid IPv6 URL")
"""Beginnings of parse errors that quote nothing of the address."""
_UNREADABLE = "its host or port cannot be read (special characters of a password are written %2F for /, %23 for #, ..)"


class Route(Protocol):
    """One way to the store."""

    shown: str
    """The address for people."""
    by_sentinel: bool
    """Whether the master may be another server tomorrow."""

    async def candidates(self) -> list[AbstractConnection]:
        """Connections to try, not connected yet, best first. Raises a RedisError where nobody can tell."""

    async def leads_to(self, connection: AbstractConnection, /) -> bool:
        """Whether a connection made a while ago still leads where a new one would."""

    def forget(self) -> None:
        """Certificates may have been renewed: read them again."""


def route_to(url: str) -> Route:
    """The way that an address means. ValueError, which tells no secret, for one that names no store."""
    try:
        parts = urlsplit(url)
        if parts.fragment or "@" in parts.query:  # the rest of a password, of which nothing may be quoted below
            raise Unusable(_UNREADABLE)
        return SentinelRoute(url) if parts.scheme in SCHEMES else _DirectRoute(url)
    except ValueError as error:
        reason = str(error) if isinstance(error, Unusable) else _safe_reason(str(error))
        # Not `from error`: the cause may quote the password, and causes are logged.
        raise ValueError(f"{shown(url)}: {reason}") from None


class _DirectRoute:
    by_sentinel = False

    def __init__(self, url: str) -> None:
        self.shown = shown(url)
        self._maker = ConnectionMaker(url)
        parts = urlsplit(url)
        if parts.scheme == "unix" and (not parts.path or parts.netloc.rpartition("@")[2]):
            raise Unusable("it must hold the absolute path of a socket (unix:///path/of/socket)")
        if parts.scheme in ("redis", "rediss") and not parts.path.strip("/").isdigit() and parts.path.strip("/"):
            raise Unusable("what follows the host must be the number of a database")

    async def candidates(self) -> list[AbstractConnection]:
        return [self._maker.make()]

    async def leads_to(self, _connection: AbstractConnection, /) -> bool:
        return True

    def forget(self) -> None:
        self._maker.forget()


def _safe_reason(reason: str) -> str:
    return reason if reason.startswith(_SAFE_REASONS) else _UNREADABLE
