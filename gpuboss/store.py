"""The lease store as its callers see it: run a transition, wait for events.

Called by `gpuboss.client` and `gpuboss.keeper`; calls `gpuboss.store_link` and `gpuboss.scripts`. Every call is one
atomic script that may be repeated: `call` tries again, with new connections, until the store answers or the time is
over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from redis import exceptions as redis_errors

from gpuboss import errors
from gpuboss.keys import DEFAULT_POOL, PoolKeys
from gpuboss.scripts import Script, source
from gpuboss.settings import Timings
from gpuboss.store_link import LOST, Link, LinkPool

__all__ = ["Event", "Reply", "Store"]

Reply = dict[str, Any]
"""A script's reply; see the script's first lines."""

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25
_BLOCKED_ANSWER_S = 5.0
"""How much longer than asked for a blocking read may take before the store counts as gone."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a lease."""

    what: str
    """The state it entered, or `epoch` for a new life of the store."""
    lease_id: str
    """Empty for `epoch`."""


class Store:
    """One process's way to the store; safe for many tasks at once."""

    def __init__(self, url: str, timings: Timings, *, pool: str = DEFAULT_POOL) -> None:
        """ValueError for a URL that names no store. Nothing is connected yet."""
        self.up = False
        """Whether the last command was answered."""
        self._keys = PoolKeys(pool)
        self._timings = timings
        self._links = LinkPool(url)
        self._blocked: Link | None = None
        self._returned = asyncio.Event()

    def hurry(self) -> None:
        """The store is said to be back: calls that pause between two tries go on at once."""
        self._returned.set()
        self._returned = asyncio.Event()

    async def call(self, script: Script, arguments: Reply | None = None, *, within_s: float | None = None) -> Reply:
        """Run a script and return its reply, whose status is `ok`, `refused`, `stale` or `over`.

        While the store does not answer, or its node has not synced with it yet, tries again for `within_s` seconds
        (default: the renew deadline), then raises StoreUnavailable or NoEpoch. StoreUnfit: the store holds another
        version's data.
        """
        deadline = time.monotonic() + (self._timings.renew_deadline_s if within_s is None else within_s)
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self.call_once(script, arguments)
            except (errors.StoreUnavailable, errors.NoEpoch):
                if time.monotonic() + pause_s > deadline:
                    raise
            with contextlib.suppress(TimeoutError):
                # The spread of retries guards nothing.
                async with asyncio.timeout(pause_s * random.uniform(0.8, 1.2)):  # noqa: S311
                    await self._returned.wait()
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def call_once(self, script: Script, arguments: Reply | None = None) -> Reply:
        """`call` without trying again."""
        try:
            async with self._links.link() as link:
                reply = await self._evaluate(link, script, arguments or {})
        except LOST as error:
            self.up = False
            raise errors.StoreUnavailable(f"the lease store does not answer: {error}") from error
        self.up = True
        match reply["status"]:
            case "noepoch":
                raise errors.NoEpoch("the lease store began a new life; this node has not synced with it yet")
            case "unsynced":
                raise errors.NoEpoch(f"node {reply['node']} has not synced with the lease store yet")
            case "schema":
                raise errors.StoreUnfit(
                    f"the lease store holds data of schema {reply['found']}, this version needs {reply['wanted']}: "
                    "use one version of gpuboss on all hosts, or another store"
                )
        return reply

    async def read_events(self, after: str | None, block_s: float) -> tuple[str, list[Event]]:
        """Events after the place `after`, waiting up to `block_s` seconds for the first; and the place to read on from.

        Without a place: nothing, and the place of now. Uses a connection of its own; for one task at a time. Raises
        StoreUnavailable.
        """
        try:
            if self._blocked is None:
                self._blocked = await self._links.open()
            if after is None:
                return await self._last_place(self._blocked), []
            command = (
                "XREAD",
                "COUNT",
                1000,
                "BLOCK",
                max(1, int(block_s * 1000)),
                "STREAMS",
                self._keys.events,
                after,
            )
            found = await self._blocked.ask(*command, within_s=block_s + _BLOCKED_ANSWER_S)
        except LOST as error:
            await self._drop_blocked()
            raise errors.StoreUnavailable(f"the lease store does not answer: {error}") from error
        except asyncio.CancelledError:
            await self._drop_blocked()
            raise
        if not found:
            return after, []
        entries = found[0][1]
        return entries[-1][0], [_event(fields) for _place, fields in entries]

    async def check_fitness(self) -> list[str]:
        """StoreUnfit when the store may drop keys under memory pressure; else what people should be warned of."""
        try:
            async with self._links.link() as link:
                facts = _info(await link.ask("INFO", "memory")) | _info(await link.ask("INFO", "persistence"))
        except LOST as error:
            raise errors.StoreUnavailable(f"the lease store does not answer: {error}") from error
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise errors.StoreUnfit(
                f"the lease store has maxmemory-policy {policy} and may drop leases when its memory is full: "
                "set `maxmemory-policy noeviction` there, or name another store with GPUBOSS_URL"
            )
        if facts.get("aof_enabled") == "0":
            return ["the lease store keeps no append-only file (`appendonly yes`): it begins empty after a restart"]
        return []

    async def close(self) -> None:
        """Close every connection."""
        await self._drop_blocked()
        await self._links.drop_idle()

    async def _evaluate(self, link: Link, script: Script, arguments: Reply) -> Reply:
        keys = self._keys.keys()
        common = {
            "lease_prefix": self._keys.lease_prefix,
            "run_id": link.run_id,
            "ttl_ms": int(self._timings.ttl_s * 1000),
        }
        told = json.dumps(common | arguments, separators=(",", ":"))
        code = source(script)
        try:
            text = await link.ask("EVALSHA", code.sha, len(keys), *keys, told)
        except redis_errors.NoScriptError:
            text = await link.ask("EVAL", code.text, len(keys), *keys, told)
        reply: Reply = json.loads(text)
        return reply

    async def _last_place(self, link: Link) -> str:
        newest = await link.ask("XREVRANGE", self._keys.events, "+", "-", "COUNT", 1)
        return str(newest[0][0]) if newest else "0-0"

    async def _drop_blocked(self) -> None:
        link, self._blocked = self._blocked, None
        if link is not None:
            await link.close()


def _event(flat: list[str]) -> Event:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return Event(fields["what"], fields["lease"])


def _info(text: str) -> dict[str, str]:
    lines = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in lines}
