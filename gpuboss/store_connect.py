"""Connections to a server by its address, as redis-py makes them, with everything in them that we decide ourselves.

Called by `gpuboss.store_routes` and `gpuboss.store_sentinels`. redis-py reads the addresses and speaks the protocol;
its pools and retries are not used.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, parse_url

__all__ = ["CONNECT_TIMEOUT_S", "ConnectionMaker", "Unusable", "connect"]

CONNECT_TIMEOUT_S = 2.0
"""For one server to take a connection and say who it is."""
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_OURS = frozenset(
    {"decode_responses", "encoding", "encoding_errors", "health_check_interval", "legacy_responses", "max_connections"}
    | {"protocol", "retry_on_timeout", "socket_connect_timeout", "socket_timeout", "timeout"}
)
"""Parameters that addresses written for other programs may hold, and that are ours to choose here."""
_SILENT: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)
"""Keeps redis-py from introducing itself, which takes longer than everything else about a new connection."""


class Unusable(ValueError):
    """An address that says what we cannot use; the message quotes nothing secret."""


class ConnectionMaker:
    """Makes connections to one server, or to several that want the same credentials."""

    def __init__(self, url: str) -> None:
        arguments: dict[str, Any] = {name: value for name, value in parse_url(url).items() if name not in _OURS}
        self._class: type[AbstractConnection] = arguments.pop("connection_class", Connection)
        for name in _FILES:
            if name in arguments and not _is_readable(Path(arguments[name])):
                raise Unusable(f"{name}={arguments[name]} must be the absolute path of a file we can read")
        # What is the default in newer versions of redis-py only.
        if issubclass(self._class, Connection):
            arguments.setdefault("socket_keepalive", True)
        if self._class is SSLConnection and arguments.get("ssl_cert_reqs") != "none":
            arguments.setdefault("ssl_check_hostname", True)
        self._arguments = arguments | _SILENT
        self._certificates: Any = None
        """One for all connections: to read the system's takes 40 ms."""
        try:
            self.make()
        except TypeError as error:
            name = str(error).rpartition("argument ")[2]
            raise Unusable(
                f"there is no parameter {name} here (ssl_... belong to rediss://, sentinel_... to redis+sentinel://)"
            ) from None
        except redis_errors.RedisError as error:
            raise Unusable(str(error)) from None

    def make(self, **other: Any) -> AbstractConnection:
        """A connection, not connected yet."""
        connection = self._class(
            protocol=2,
            decode_responses=True,
            encoding_errors="replace",
            socket_timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            **(self._arguments | other),
        )
        if isinstance(connection, SSLConnection):
            self._certificates = connection.ssl_context = self._certificates or connection.ssl_context
        return connection

    def forget(self) -> None:
        """Read the certificates again for the next connection."""
        self._certificates = None


async def connect(connection: AbstractConnection) -> None:
    """Open its socket and log in."""
    opening: Callable[[], Awaitable[None]] = connection.connect  # redis-py publishes no type for it
    await opening()


def _is_readable(path: Path) -> bool:
    """For everybody: the keeper's working directory is another than its starter's."""
    return path.is_absolute() and os.access(path, os.R_OK)
