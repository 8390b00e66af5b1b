"""How the next broker finds a shim and proves itself to it: a private file, a socket, a secret.

Opened by `shim.py` when its broker calls an engine ready, closed when that engine's story is over; like the shim it is
made of the standard library alone. The other end is `takeover.py`, the file is read by `orphans.py`.

The file: {"protocol", "shim": PROCESS, "engine": PROCESS, "socket", "secret", "told"}, where PROCESS is a
`ProcessIdentity` field by field and "told" what the broker wanted the next one to know. It has a new secret whenever
the engine is called ready. On the socket, JSON lines:

    visitor  {"op": "adopt", "protocol", "secret"}
    shim     {"event": "adopted", "protocol"}            from now on this connection carries orders and reports
             {"event": "turned away", "why", "protocol"}    then the connection ends; "why" is one of

1. "version"   the visitor speaks none that is spoken here: `PROTOCOL` or the one before it
2. "secret"    it is not that of the file
3. "taken"     there is a broker, or another visitor was faster

What the versions differ in:

    2   a broker that has adopted an engine calls it ready, as one that launched it does; until then its death
        counts for nothing, and the engine ends when the grace since the last broker's death is over
    1   adopting is calling ready; the file stays as it is
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PROTOCOL = 2
SPOKEN = (PROTOCOL, PROTOCOL - 1)
_MOST_VISITORS = 8
"""At once; the one that came first has to leave for more. All are processes of our own user."""
_LONGEST_HELLO = 4096


class Visitor:
    """Somebody on the socket who has not proved to be a broker yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.said = b""


class Door:
    """See the module."""

    def __init__(self, poll: select.poll, path: str) -> None:
        """Listen at `path`; OSError when that cannot be. What happens there wakes `poll`."""
        self._poll = poll
        self._path = path
        self._file = ""
        self._secret = ""
        self._visitors: dict[int, Visitor] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 (no pathlib here)
        before = os.umask(0o177)
        try:
            self._listener.bind(path)
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        finally:
            os.umask(before)
        self._listener.setblocking(False)
        poll.register(self._listener.fileno(), select.POLLIN)

    def tell(self, file: str, told: dict[str, Any], shim: dict[str, Any], engine: dict[str, Any]) -> None:
        """Write the file, over one that is there, with a new secret; OSError when that cannot be."""
        self._secret = os.urandom(32).hex()
        record = {"protocol": PROTOCOL, "shim": shim, "engine": engine, "socket": self._path, "secret": self._secret}
        draft = f"{file}.{os.getpid()}"
        self._file = file
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(handle, "w", encoding="utf-8") as text:  # noqa: PTH123 (no pathlib here)
                json.dump(record | {"told": told}, text)
            os.replace(draft, file)  # noqa: PTH105
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft)  # noqa: PTH108
            raise

    def attend(self, ready: dict[int, int], *, taken: bool) -> tuple[int, int] | None:
        """Hear whoever is there; the connection and the version of the one that proved to be the next broker."""
        if self._listener.fileno() in ready:
            self._let_in()
        for handle in [handle for handle in self._visitors if handle in ready]:
            protocol = self._hear(self._visitors[handle], taken=taken)
            if protocol is not None:
                self._poll.unregister(handle)
                return self._visitors.pop(handle).connection.detach(), protocol
        return None

    def close(self) -> None:
        """Nobody is to come any more; the file and the socket go."""
        with contextlib.suppress(OSError):
            os.unlink(self._file)  # noqa: PTH108
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # noqa: PTH108
        for handle in list(self._visitors):
            self._send_off(handle)
        self._poll.unregister(self._listener.fileno())
        self._listener.close()

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left again
            return
        connection.setblocking(False)
        if len(self._visitors) == _MOST_VISITORS:
            self._send_off(next(iter(self._visitors)))
        self._visitors[connection.fileno()] = Visitor(connection)
        self._poll.register(connection.fileno(), select.POLLIN)

    def _hear(self, visitor: Visitor, *, taken: bool) -> int | None:
        """The version in which it has proved itself; None when it has not (yet)."""
        try:
            heard = visitor.connection.recv(_LONGEST_HELLO)
        except BlockingIOError:  # what was ready had the same number before
            return None
        except OSError:
            heard = b""
        visitor.said += heard
        if heard and b"\n" not in visitor.said and len(visitor.said) < _LONGEST_HELLO:
            return None
        why, protocol = self._judge(visitor.said, taken=taken)
        if why:
            self._turn_away(visitor, why)
            return None
        try:
            visitor.connection.send(json.dumps({"event": "adopted", "protocol": protocol}).encode() + b"\n")
        except OSError:  # it has left again
            self._send_off(visitor.connection.fileno())
            return None
        visitor.connection.setblocking(True)
        return protocol

    def _judge(self, said: bytes, *, taken: bool) -> tuple[str, int]:
        """Why it is turned away, "" when it is not; and the version it speaks."""
        from hmac import compare_digest  # here: most engines are never adopted

        try:
            hello = json.loads(said)
            op, protocol, secret = hello["op"], hello["protocol"], hello["secret"]
        except (ValueError, KeyError, TypeError):
            return "version", 0
        if op != "adopt" or protocol not in SPOKEN:  # 1
            return "version", 0
        if not compare_digest(str(secret).encode(), self._secret.encode()):  # 2
            return "secret", 0
        return "taken" if taken else "", protocol  # 3

    def _turn_away(self, visitor: Visitor, why: str) -> None:
        with contextlib.suppress(OSError):
            told = {"event": "turned away", "why": why, "protocol": PROTOCOL}
            visitor.connection.send(json.dumps(told).encode() + b"\n")
        self._send_off(visitor.connection.fileno())

    def _send_off(self, handle: int) -> None:
        self._poll.unregister(handle)
        self._visitors.pop(handle).connection.close()
