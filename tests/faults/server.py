"""A Valkey of the tests' own on a unix socket, and a connection to it that costs as little as one can.

Fault histories are a million dependent commands, so the time that a client library takes for each would be most of all
the time there is. Used by `tests.faults.store`; knows nothing of leases.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpuboss.server import find_server
from tests.support import wait_until

__all__ = ["Connection", "ServerError", "die_with_parent", "running_server"]


class ServerError(Exception):
    """The server answered with an error, such as a script's own."""


@contextlib.contextmanager
def running_server(*more: str) -> Iterator[Path]:
    """A server that keeps nothing on disk; gives its socket's path. It dies with this process, whatever ends it."""
    with tempfile.TemporaryDirectory(prefix="mb-", dir="/tmp") as directory:
        path = Path(directory) / "kv.sock"
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", directory]
        options += ["--logfile", f"{directory}/log", *more]
        process = subprocess.Popen([find_server(), *options], preexec_fn=die_with_parent)
        try:
            wait_until(path.exists, "the server's socket")
            yield path
        finally:
            process.kill()
            process.wait()


class Connection:
    """One connection; commands go out in one write and their replies are read in order."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._replies = self._socket.makefile("rb")

    def ask(self, *words: str | bytes | int) -> Any:
        """One command and its reply; ServerError for an error."""
        return self.ask_raw(encode(words), 1)[0]

    def ask_raw(self, commands: bytes, count: int) -> list[Any]:
        """The replies of `count` commands that are encoded already; ServerError when one is an error."""
        self._socket.sendall(commands)
        replies = [self._read() for _ in range(count)]
        for reply in replies:
            if isinstance(reply, ServerError):
                raise reply
        return replies

    def close(self) -> None:
        """Close the socket."""
        self._replies.close()
        self._socket.close()

    def _read(self) -> Any:
        line = self._replies.readline()
        sort, rest = line[:1], line[1:-2]
        if sort == b"$":
            size = int(rest)
            return None if size < 0 else self._replies.read(size + 2)[:-2]
        if sort == b"*":
            return [self._read() for _ in range(int(rest))]
        if sort == b":":
            return int(rest)
        if sort == b"+":
            return rest
        if sort == b"-":
            return ServerError(rest.decode())
        raise ConnectionError("the server closed the connection")


def encode(words: Sequence[str | bytes | int]) -> bytes:
    """A command as the server reads it."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends; where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
