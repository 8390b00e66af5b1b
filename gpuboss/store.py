"""The lease store as its callers see it: run a transition, wait for events.

Called by `gpuboss.client` and `gpuboss.keeper`; calls `gpuboss.store_link`, `gpuboss.store_fitness` and
`gpuboss.scripts`. Every call is one atomic script that may be repeated: `call` tries again, with new connections, until
the store answers or the time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from redis import exceptions as redis_errors

from gpuboss import errors, store_fitness
from gpuboss.keys import DEFAULT_POOL, PoolKeys
from gpuboss.scripts import Script, source
from gpuboss.settings import Timings
from gpuboss.store_link import LOST, Link, LinkPool, facts_of

__all__ = ["MISSED", "Event", "Reply", "Store"]

Reply = dict[str, Any]
"""A script's reply; see the script's first lines."""
MISSED = "missed"
"""What an event is that stands for those the stream no longer has, because they were read too late."""

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25
_TRY_S = 7.0
"""How long one try may take, with the wait for a connection."""
_SHORTEST_TRY_S = 0.5
"""How long it may take at least, however little time is left."""
_BLOCKED_ANSWER_S = 5.0
"""How much longer than asked for a blocking read may take before the store counts as gone."""
_MOST_EVENTS = 1000
"""Read at once."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a lease."""

    what: str
    """The state it entered; `notice` or `withdrawn`; `epoch` for a new life of the store; `missed`."""
    lease_id: str
    """Empty for `epoch` and `missed`."""
    epoch: int | None = None
    seq: int | None = None
    """With `epoch` the lease's fence; None for a lease without one."""
    holder: str = ""
    node: str = ""
    at_ms: int = 0
    """The server's clock; 0 for `missed`."""


class Store:
    """One process's way to the store; safe for many tasks at once."""

    def __init__(self, url: str, timings: Timings, *, pool: str = DEFAULT_POOL) -> None:
        """ValueError, which tells no secret, for a URL that names no store. Nothing is connected yet."""
        self.up = False
        """Whether the last command was answered."""
        self.warnings: tuple[str, ...] = ()
        """What `check_fitness` found that people should know."""
        self._keys = PoolKeys(pool)
        self._timings = timings
        self._links = LinkPool(url)
        self._blocked: Link | None = None
        self._returned = asyncio.Event()

    def hurry(self) -> None:
        """The store is said to be back: calls that pause between two tries go on at once."""
        self._links.hurry()
        self._returned.set()
        self._returned = asyncio.Event()

    async def call(self, script: Script, arguments: Reply | None = None, *, within_s: float | None = None) -> Reply:
        """Run a script and return its reply, whose status is `ok`, `refused`, `stale` or `over`.

        While the store does not answer, or its node has not synced with it yet, tries again for `within_s` seconds
        (default: the renew deadline), then raises StoreUnavailable or NoEpoch. StoreUnfit: the store holds another
        version's data, or does not let us run scripts.
        """
        deadline = time.monotonic() + (self._timings.renew_deadline_s if within_s is None else within_s)
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with self._guarded(max(_SHORTEST_TRY_S, deadline - time.monotonic())):
                    return await self.call_once(script, arguments)
            except (errors.StoreUnavailable, errors.NoEpoch) as error:
                self.up = not isinstance(error, errors.StoreUnavailable)
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
            async with self._guarded(_TRY_S), self._links.link() as link:
                reply = await self._evaluate(link, script, arguments or {})
        except errors.StoreUnavailable:
            self.up = False
            raise
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

        Without a place: nothing, and the place of now. A first event `missed` says that some are gone for good. Uses a
        connection of its own; for one task at a time. Raises StoreUnavailable.
        """
        try:
            async with self._guarded(block_s + _TRY_S + _BLOCKED_ANSWER_S):
                return await self._read(after, block_s)
        except (errors.GpubossError, asyncio.CancelledError):
            await self._drop_blocked()
            raise

    async def check_fitness(self) -> list[str]:
        """What people should be warned of and was not said before, kept in `warnings`.

        StoreUnfit when the store may drop keys under memory pressure.
        """
        async with self._guarded(_TRY_S), self._links.link() as link:
            sections = ("server", "memory", "persistence", "replication")
            facts = facts_of(*[await link.ask("INFO", section) for section in sections])
        store_fitness.refuse_eviction(facts)
        known, self.warnings = self.warnings, store_fitness.warnings(facts, by_sentinel=self._links.by_sentinel)
        return [warning for warning in self.warnings if warning not in known]

    async def close(self) -> None:
        """Close every connection."""
        await self._drop_blocked()
        await self._links.close()

    @contextlib.asynccontextmanager
    async def _guarded(self, within_s: float) -> AsyncIterator[None]:
        """Turns what redis-py raises, and `within_s` seconds without an outcome, into errors of ours."""
        place = self._links.shown
        try:
            async with asyncio.timeout(within_s):
                yield
        except redis_errors.AuthenticationError as error:
            raise errors.StoreUnavailable(f"the lease store {place} refuses user or password: {error}") from error
        except LOST as error:
            reason = str(error) or f"no answer within {within_s:g} s"
            raise errors.StoreUnavailable(f"the lease store {place} does not answer: {reason}") from error
        except redis_errors.RedisError as error:
            raise errors.StoreUnfit(f"the lease store {place} refuses to do its work: {error}") from error

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

    async def _read(self, after: str | None, block_s: float) -> tuple[str, list[Event]]:
        if self._blocked is not None and not self._links.is_current(self._blocked):
            await self._drop_blocked()
        is_new = self._blocked is None
        link = self._blocked = self._blocked or await self._links.open()
        stream = self._keys.events
        try:
            if after is None:
                newest = await link.ask("XREVRANGE", stream, "+", "-", "COUNT", 1)
                return (str(newest[0][0]) if newest else "0-0"), []
            block_ms = max(1, int(block_s * 1000))
            command = ("XREAD", "COUNT", _MOST_EVENTS, "BLOCK", block_ms, "STREAMS", stream, after)
            found = await link.ask(*command, within_s=block_s + _BLOCKED_ANSWER_S)
            if not found:
                return after, []
            entries = found[0][1]
            events = [_event(place, fields) for place, fields in entries]
            # Only who was away, or reads too slowly, can have been overtaken by the stream's trimming.
            if (is_new or len(entries) == _MOST_EVENTS) and await self._is_trimmed(link, after):
                events.insert(0, Event(MISSED, ""))
            return str(entries[-1][0]), events
        except LOST as error:
            self._blocked = None
            await self._links.lost(link, error)
            raise

    async def _is_trimmed(self, link: Link, after: str) -> bool:
        """Whether the entry at a place that was read is gone, and so perhaps others after it."""
        oldest = await link.ask("XRANGE", self._keys.events, "-", "+", "COUNT", 1)
        return bool(oldest) and after != "0-0" and _order(oldest[0][0]) > _order(after)

    async def _drop_blocked(self) -> None:
        link, self._blocked = self._blocked, None
        if link is not None:
            await link.drop()


def _event(place: str, flat: list[str]) -> Event:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return Event(
        fields["what"],
        fields["lease"],
        epoch=int(fields["epoch"]) if fields.get("epoch") else None,
        seq=int(fields["seq"]) if fields.get("seq") else None,
        holder=fields.get("holder", ""),
        node=fields.get("node", ""),
        at_ms=_order(place)[0],
    )


def _order(place: str) -> tuple[int, int]:
    at_ms, _, number = place.partition("-")
    return int(at_ms), int(number or 0)
