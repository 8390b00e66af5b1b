"""The store's transitions: one Lua script each, in `gpuboss/scripts/`, which run atomically inside the store.

Called by `gpuboss.store`, which adds the arguments that every script takes. Each file's first lines say what it takes
and what it replies. Before every one of them stand the parts they share: clock and leases, books, pre-emption, queue.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Script", "Source", "source"]

_DIRECTORY = Path(__file__).with_name("scripts")
_SHARED = ("_common", "_books")
_WHEN_AWAITED = ("_notices", "_queue")
"""The larger part, which a script defines only when it calls `queue()`: what is granted or released while nobody waits
takes half the time without it."""
_QUEUE = """
local defined_queue
local function queue()
  defined_queue = defined_queue or define_queue()
  return defined_queue
end
"""


class Script(enum.Enum):
    """One transition each; the value is the file's name."""

    NODE_SYNC = "node_sync"
    """A keeper says what its node has and what runs there; begins an epoch where there is none; renews what runs."""
    ACQUIRE = "acquire"
    """Asks for a lease: granted, queued, or refused for good."""
    LOOK = "look"
    """Shows leases that are not active yet and keeps them from expiring."""
    RESIZE = "resize"
    """Changes what a lease asks for or holds, or its priority; a waiter keeps its place."""
    CANCEL = "cancel"
    """Gives up a lease that nobody uses yet."""
    ACTIVATE = "activate"
    """The node's books show its holder: it is in use."""
    TAKE_OVER = "take_over"
    """Another process answers for a held lease whose asker is dead."""
    RENEW_MANY = "renew_many"
    """Keeps held leases from expiring, by their fences, and revives those that had run out of time."""
    RELEASE = "release"
    """Gives back a lease whose holder is gone, by its fence."""
    CONFIRM_DEAD = "confirm_dead"
    """A keeper frees what dead holders held and dead waiters waited for."""
    PREEMPT = "preempt"
    """A person asks a holder to yield."""
    ACK = "ack"
    """A holder has heard that it must yield, and is yielding."""
    TICK = "tick"
    """Expires and grants."""
    LEARN = "learn"
    """Keeps what a holder was seen to take, for claims to come."""
    LEARNED = "learned"
    """Shows all that `LEARN` was told."""
    SNAPSHOT = "snapshot"
    """Shows one node's devices and leases."""
    AUDIT = "audit"
    """Adds everything up anew and says where the store contradicts itself."""


@dataclass(frozen=True, slots=True)
class Source:
    """A script as the store takes it."""

    text: str
    sha: str
    """What EVALSHA calls it."""


@functools.cache
def source(script: Script) -> Source:
    """The script's text, read once per process."""
    late = "".join(map(_read, _WHEN_AWAITED))
    queue = f"local function define_queue()\n{late}end\n{_QUEUE}"
    text = "".join(map(_read, _SHARED)) + queue + _read(script.value)
    return Source(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(part: str) -> str:
    return (_DIRECTORY / f"{part}.lua").read_text("utf-8")
