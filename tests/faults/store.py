"""The store as a fault history has it: real scripts on a real Valkey, a clock and lives of the history's own.

Used by `tests.faults.world`. Time and the server's run id are arguments of every script, so a history can play
restarts, fail-overs and clocks that jump, thousands of times a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpuboss.keys import PoolKeys
from gpuboss.scripts import Script, source
from tests.faults.server import Connection, encode

__all__ = ["START_MS", "TTL_MS", "ScriptServer", "VirtualStore", "mutated"]

TTL_MS = 15_000
START_MS = 1_700_000_000_000
Json = dict[str, Any]

# A copy of everything is kept in the server's second database: that is a snapshot file, or a replica that lags.
_COPY = """
redis.call('SELECT', ARGV[2]) redis.call('FLUSHDB') redis.call('SELECT', ARGV[1])
for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('COPY', key, key, 'DB', ARGV[2]) end
"""
_SHOWN = ("shares", "notice_by", "notice_priority", "notice_outranks")
"""Fields of a lease that a history reads behind the scripts' back where an event of the stream does not tell them."""


def mutated(text: str, overrides: Mapping[str, str]) -> tuple[str, set[str]]:
    """A script with parts of it replaced, and which of them it had."""
    found = {old for old in overrides if old in text}
    for old in found:
        text = text.replace(old, overrides[old])
    return text, found


class ScriptServer:
    """One server with all scripts loaded; `overrides` replaces text of them: how a protection is switched off."""

    def __init__(self, path: Path, overrides: Mapping[str, str] | None = None) -> None:
        """AssertionError when no script has a text that is to be replaced: the mutant would be the original."""
        self.connection = Connection(path)
        self.keys = PoolKeys()
        self._overrides = dict(overrides or {})
        self._found: set[str] = set()
        try:
            self._heads = {script: self._head(script) for script in Script}
            missing = set(self._overrides) - self._found
            assert not missing, f"no script says {sorted(missing)}"
        except BaseException:
            self.close()
            raise
        self._copy = self.connection.ask("SCRIPT", "LOAD", _COPY)
        self._events = self.keys.events.encode()

    def run(self, script: Script, told: Json, after: bytes | None) -> tuple[Json, list[list[str]], bytes | None]:
        """A script's reply; the events since the place `after` (None: not asked for), and the place after them."""
        text = json.dumps(told, separators=(",", ":")).encode()
        commands = b"%s$%d\r\n%s\r\n" % (self._heads[script], len(text), text)
        if after is None:
            return json.loads(self.connection.ask_raw(commands, 1)[0]), [], None
        commands += b"*4\r\n$6\r\nXRANGE\r\n$%d\r\n%s\r\n$%d\r\n(%s\r\n$1\r\n+\r\n" % (
            *(len(self._events), self._events),
            *(len(after) + 1, after),
        )
        reply, entries = self.connection.ask_raw(commands, 2)
        events = [[word.decode() for word in entry[1]] for entry in entries]
        return json.loads(reply), events, entries[-1][0] if entries else after

    def leases(self, lease_ids: Iterable[str]) -> dict[str, Json]:
        """What the store has of leases and its events do not tell; only fields that are there."""
        ids = list(lease_ids)
        prefix = self.keys.lease_prefix
        commands = b"".join(encode(("HMGET", prefix + lease_id, *_SHOWN)) for lease_id in ids)
        return {
            lease_id: {name: value.decode() for name, value in zip(_SHOWN, found, strict=True) if value is not None}
            for lease_id, found in zip(ids, self.connection.ask_raw(commands, len(ids)), strict=True)
        }

    def empty(self) -> None:
        """Forget everything."""
        self.connection.ask("FLUSHDB")

    def keep_copy(self) -> None:
        """Remember everything as it is now."""
        self.connection.ask("EVALSHA", self._copy, 0, 0, 1)

    def restore_copy(self) -> None:
        """Make everything as it was when the copy was taken."""
        self.connection.ask("EVALSHA", self._copy, 0, 1, 0)
        self.connection.ask("SELECT", 0)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def __enter__(self) -> ScriptServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _head(self, script: Script) -> bytes:
        text, found = mutated(source(script).text, self._overrides)
        self._found |= found
        sha = self.connection.ask("SCRIPT", "LOAD", text)
        keys = self.keys.keys()
        words = ["EVALSHA", sha, len(keys), *keys]
        return encode([*words, ""]).removesuffix(b"$0\r\n\r\n")


class VirtualStore:
    """One history's pool, empty at first."""

    def __init__(self, server: ScriptServer) -> None:
        self.server = server
        self.now_ms = START_MS
        self.life = 1
        """Counts the server's lives: its run id."""
        self._place = b"0-0"
        self._copied_place = b"0-0"
        self._common: Json = {"lease_prefix": server.keys.lease_prefix, "ttl_ms": TTL_MS}
        server.empty()

    def run(self, script: Script, told: Json, life: int | None = None) -> tuple[Json, list[Json]]:
        """A script's reply and the events it caused, sent on a connection that was made in `life` (None: now)."""
        run_id = f"life-{life or self.life}"
        full = self._common | {"run_id": run_id, "now": self.now_ms} | told
        reply, events, place = self.server.run(script, full, self._place)
        assert place is not None
        self._place = place
        return reply, [dict(zip(words[::2], words[1::2], strict=True)) for words in events]

    def restart(self) -> None:
        """A new life of the server process, with the data it had."""
        self.life += 1

    def wipe(self) -> None:
        """A new life without data."""
        self.life += 1
        self.server.empty()
        self._place = b"0-0"

    def save(self) -> None:
        """Write a snapshot file."""
        self.server.keep_copy()
        self._copied_place = self._place

    def roll_back(self) -> None:
        """A new life with the snapshot's data: a fail-over that lost the newest writes."""
        self.life += 1
        self.server.restore_copy()
        self._place = self._copied_place
