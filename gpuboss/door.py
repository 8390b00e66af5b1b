"""The keeper's socket: who comes in, who is turned away, and who has left.

Called by `gpuboss.keeper`; the other end is `gpuboss.keeper_link`. JSON lines both ways:

    visitor  {"op": "hello", "protocol", "name", "process", "settings"}    first
    keeper   {"op": "welcome", "pid", "store_url", "node", "devices", "timings"}
             {"op": "refused", "error", "message"}
             {"op": "yield"}                                               this keeper leaves: come again
    visitor  {"op": "sweep", "n"}                                          at any time
    keeper   {"op": "swept", "n"}                                          when that is done
             {"op": "epoch", "epoch"}                                      the store began a new life
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpuboss.identity import ProcessIdentity
from gpuboss.wire import Wire, process_from_wire

__all__ = ["PROTOCOL", "Door", "Host", "Visitor"]

PROTOCOL = 1
_HELLO_S = 10.0
_LONGEST_LINE = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Visitor:
    """A client that was let in."""

    name: str
    """What it calls itself, for the log."""
    process: ProcessIdentity


class Host(Protocol):
    """Who answers the door."""

    async def receive(self, hello: Wire) -> Wire:
        """The answer to a hello, once there is one: welcome, refused or yield."""
        ...

    async def sweep(self) -> None:
        """Look for deaths; returns when that is done."""
        ...

    def left(self, visitor: Visitor) -> None:
        """A visitor's connection is gone, and perhaps the visitor."""
        ...


class Door:
    """The listening socket and everybody inside."""

    def __init__(self, path: Path, host: Host) -> None:
        self.path = path
        self._host = host
        self._server: asyncio.Server | None = None
        self._inside: dict[asyncio.StreamWriter, Visitor | None] = {}

    @property
    def visitors(self) -> list[Visitor]:
        """Everybody who was let in and has not left."""
        return [visitor for visitor in self._inside.values() if visitor is not None]

    @property
    def callers(self) -> int:
        """How many connections there are, let in or not."""
        return len(self._inside)

    async def open(self) -> None:
        """Listen. The caller holds the keeper's lock, so a socket that is there already is a dead keeper's."""
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=_LONGEST_LINE)
        shared = self.path.parent.stat().st_mode & 0o020
        self.path.chmod(0o770 if shared else 0o700)

    def tell_all(self, message: Wire) -> None:
        """Send to everybody inside."""
        for writer, visitor in self._inside.items():
            if visitor is not None and not writer.is_closing():
                _send(writer, message)

    def shut(self) -> None:
        """Let nobody in any more; those inside stay."""
        if self._server is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Shut, and drop every connection."""
        self.shut()
        for writer in list(self._inside):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._inside[writer] = None
        visitor: Visitor | None = None
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = await _receive(reader)
            if hello is None:
                return
            answer = await self._host.receive(hello)
            if answer["op"] == "welcome":
                visitor = self._inside[writer] = Visitor(str(hello["name"]), process_from_wire(hello["process"]))
            _send(writer, answer)
            if visitor is not None:
                await self._attend(reader, writer)
        except (OSError, ValueError, KeyError, TypeError, TimeoutError) as error:
            _log.warning("a visitor (%s) was cut off: %r", visitor.name if visitor else "unknown", error)
        finally:
            del self._inside[writer]
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            if visitor is not None:
                self._host.left(visitor)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (message := await _receive(reader)) is not None:
            await self._host.sweep()
            _send(writer, {"op": "swept", "n": message["n"]})
            await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Wire | None:
    """One message; None when the other side has left."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    message: dict[str, Any] = json.loads(line)
    return message


def _send(writer: asyncio.StreamWriter, message: Wire) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
