"""The listening socket, opened by `server.py` before anything else is started, so that a taken port costs nothing."""

from __future__ import annotations

import errno
import socket

BACKLOG = 2048


class CannotListen(Exception):
    """The address cannot be listened on; the message names it, who may hold it, and the setting."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on that address; port 0 takes a free one.

    Raises:
        CannotListen
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotListen(f"{host} is not an address ({error.strerror}): set --host (or `host:`)") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(_explained(host, port, error)) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The address to call it by."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 (compared, not bound)
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explained(host: str, port: int, error: OSError) -> str:
    where = f"{host}:{port}"
    match error.errno:
        case errno.EADDRINUSE:
            return f"{where} is taken by {_holder(port)}: end that, or choose another port with --port (or `port:`)"
        case errno.EACCES:
            return f"{where} needs special rights: choose a port above 1023 with --port (or `port:`)"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine: set --host (or `host:`)"
    return f"cannot listen on {where}: {error.strerror}"


def _holder(port: int) -> str:
    """Who listens on the port, as far as we may see."""
    import psutil  # here, for it is slow to import and seldom needed

    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr[1:] == (port,):
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid} ({command[:120]})"
    except psutil.Error:
        pass  # macOS shows connections to root only
    return "another process"
