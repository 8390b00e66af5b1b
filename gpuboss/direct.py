"""The short way to the store: one script over a blocking connection, in the thread that wants it done.

Called by `gpuboss.session`. It knows no patience: whatever is not an orderly answer (the store is away, began a new
life, wants the script's text a second time) gives None, and the caller goes the long way, by `gpuboss.store`, with the
same request; every script may be repeated. It saves two changes of threads and an event loop's work for each command,
which is most of what a lease costs.

Only for stores reached by a plain address. Where Sentinels say who the master is, or certificates who it may be, every
call goes the long way.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

from redis import connection as redis_connection
from redis import exceptions as redis_errors

from gpuboss.keys import DEFAULT_POOL, PoolKeys
from gpuboss.scripts import Script, source
from gpuboss.settings import Timings

__all__ = ["DirectStore", "Reply"]

Reply = dict[str, Any]

_SCHEMES = ("unix://", "redis://")
_PATIENCE_S = 2.0
_ORDERLY = frozenset({"ok", "refused", "stale"})
_TROUBLE = (redis_errors.RedisError, OSError, ValueError)
_OURS = ("protocol", "decode_responses", "socket_timeout", "socket_connect_timeout", "retry_on_timeout", "timeout")
"""What an address may say and is ours to choose."""
_SILENT: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(redis_connection.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)
"""Keeps redis-py from introducing itself on every new connection."""


class DirectStore:
    """Blocking connections to one store, used by one call at a time each. For any thread of one process."""

    def __init__(self, url: str, timings: Timings, *, pool: str = DEFAULT_POOL) -> None:
        self._keys = PoolKeys(pool)
        self._ttl_ms = int(timings.ttl_s * 1000)
        self._class: Any = None
        self._idle: list[_Line] = []
        if url.startswith(_SCHEMES):
            parsed: Reply = redis_connection.parse_url(url)  # type: ignore[no-untyped-call]
            told = {name: value for name, value in parsed.items() if name not in _OURS}
            self._class = told.pop("connection_class", redis_connection.Connection)
            self._options = {
                "protocol": 2,
                "decode_responses": True,
                "socket_timeout": _PATIENCE_S,
                "socket_connect_timeout": _PATIENCE_S,
                **told,
                **_SILENT,
            }

    def call(self, script: Script, arguments: Reply, *, meanwhile: Callable[[], object] | None = None) -> Reply | None:
        """The reply (`ok`, `refused` or `stale`), or None: then nothing is known, and the long way is to be gone.

        `meanwhile` is called while the store works.
        """
        line = self._take()
        if line is None:
            if meanwhile is not None:
                meanwhile()
            return None
        try:
            line.send(script, arguments)
            if meanwhile is not None:
                meanwhile()
            reply = line.receive()
        except _TROUBLE:
            self._drop(line)
            return None
        except BaseException:
            line.close()  # its answer may be on its way still
            raise
        self._idle.append(line)
        return reply if reply["status"] in _ORDERLY else None

    def tell(self, script: Script, arguments: Reply, unheard: Callable[[], object]) -> bool:
        """As `call`, but nobody waits for the reply: it is read before the connection's next command, or by `settle`.

        `unheard` is called then if it is not `ok`. False: it was not even sent, and the long way is to be gone.
        """
        line = self._take()
        if line is None:
            return False
        try:
            line.send(script, arguments)
            if not line.has_done(script):
                return self._is_ok(line, line.receive())
            line.owe(unheard)
        except _TROUBLE:
            self._drop(line)
            return False
        except BaseException:
            line.close()
            raise
        self._idle.append(line)
        return True

    @property
    def owes(self) -> bool:
        """Whether a reply is outstanding."""
        return any(line.owes for line in list(self._idle))

    def settle(self) -> None:
        """Hear every reply that is outstanding: what was told is done."""
        settled = []
        try:
            while self.owes:
                line = self._take()
                if line is None:
                    return
                try:
                    line.settle()
                except _TROUBLE:
                    self._drop(line)
                except BaseException:
                    line.close()
                    raise
                else:
                    settled.append(line)
        finally:
            self._idle.extend(settled)

    def close(self) -> None:
        """Close what nobody uses now."""
        while self._idle:
            try:
                line = self._idle.pop()
            except IndexError:  # another thread took it
                return
            line.close()

    def _take(self) -> _Line | None:
        if self._class is None:
            return None
        try:
            return self._idle.pop()
        except IndexError:
            return _Line(self._class(**self._options), self._keys, self._ttl_ms)

    def _drop(self, line: _Line) -> None:
        line.close()
        self.close()  # the others lead to the same server

    def _is_ok(self, line: _Line, reply: Reply) -> bool:
        self._idle.append(line)
        return bool(reply["status"] == "ok")


class _Line:
    """One connection, which knows the run id of the server it speaks to."""

    def __init__(self, connection: Any, keys: PoolKeys, ttl_ms: int) -> None:
        self._connection = connection
        self._keys = keys
        self._common = {"lease_prefix": keys.lease_prefix, "run_id": "", "ttl_ms": ttl_ms}
        self._done: set[Script] = set()
        """What the server is known to have the text of."""
        self._sent: tuple[Script, str] | None = None
        self._unheard: Callable[[], object] | None = None

    @property
    def owes(self) -> bool:
        """Whether a reply is outstanding that nobody waits for."""
        return self._unheard is not None

    def has_done(self, script: Script) -> bool:
        """Whether the server has this script."""
        return script in self._done

    def send(self, script: Script, arguments: Reply) -> None:
        """Begin a script."""
        if not self._common["run_id"]:
            self._greet()
        told = _encode(self._common | arguments)
        self._sent = script, told
        packed = told.encode()
        # Packed by hand: all but the last argument is the same each time.
        self._connection.send_packed_command([b"%b$%d\r\n%b\r\n" % (_prefix(script, self._keys), len(packed), packed)])

    def receive(self) -> Reply:
        """The reply to what was sent."""
        assert self._sent is not None
        script, told = self._sent
        self._sent = None
        self.settle()
        try:
            text = self._connection.read_response()
        except redis_errors.NoScriptError:
            names = self._keys.keys()
            text = self._ask("EVAL", source(script).text, len(names), *names, told)
        self._done.add(script)
        reply: Reply = json.loads(text)
        return reply

    def owe(self, unheard: Callable[[], object]) -> None:
        """Leave the reply to what was sent for later."""
        self.settle()
        self._sent, self._unheard = None, unheard

    def close(self) -> None:
        """Close the socket."""
        self._connection.disconnect()
        unheard, self._unheard = self._unheard, None
        if unheard is not None:
            unheard()

    def settle(self) -> None:
        """Hear the reply that is outstanding, if one is."""
        unheard = self._unheard
        if unheard is None:
            return
        try:
            is_ok = json.loads(self._connection.read_response())["status"] == "ok"
        except redis_errors.NoScriptError:
            is_ok = False
        self._unheard = None
        if not is_ok:
            unheard()

    def _greet(self) -> None:
        self._connection.connect()
        facts = dict(
            line.split(":", 1)
            for section in ("server", "replication")
            for line in self._ask("INFO", section).splitlines()
            if ":" in line
        )
        if facts.get("role", "master") != "master" or not facts.get("run_id"):
            raise redis_errors.ReadOnlyError("a replica takes no writes")
        self._common["run_id"] = facts["run_id"]

    def _ask(self, *command: str | int | bytes) -> Any:
        self._connection.send_command(*command)
        return self._connection.read_response()


_encode = json.JSONEncoder(separators=(",", ":")).encode


@functools.cache
def _prefix(script: Script, keys: PoolKeys) -> bytes:
    """The command EVALSHA but for its last argument, as it goes over the wire."""
    words = ("EVALSHA", source(script).sha, str(len(keys.keys())), *keys.keys())
    packed = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in (word.encode() for word in words))
    return b"*%d\r\n%b" % (len(words) + 1, packed)
