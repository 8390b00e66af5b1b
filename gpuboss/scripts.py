"""The store's transitions: one Lua script each, in `gpuboss/scripts/`, which run atomically inside the store.

Called by `gpuboss.store`, which adds the arguments that every script takes. Each file's first lines say what it takes
and what it replies; `_common.lua` is put before every one of them.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Script", "Source", "source"]

_DIRECTORY = Path(__file__).with_name("scripts")


class Script(enum.Enum):
    """One transition each; the value is the file's name."""

    NODE_SYNC = "node_sync"
    """A keeper says what its node has and what runs there; begins an epoch where there is none; renews what runs."""
    ACQUIRE = "acquire"
    """Asks for a lease: granted, queued, or refused for good."""
    LOOK = "look"
    """Shows leases that are not active yet and keeps them from expiring."""
    CANCEL = "cancel"
    """Gives up a lease that nobody uses yet."""
    RELEASE = "release"
    """Gives back a lease whose holder is gone, by its fence."""
    CONFIRM_DEAD = "confirm_dead"
    """A keeper frees what dead holders held and dead waiters waited for."""
    TICK = "tick"
    """Expires and grants."""
    SNAPSHOT = "snapshot"
    """Shows one node's devices and leases."""


@dataclass(frozen=True, slots=True)
class Source:
    """A script as the store takes it."""

    text: str
    sha: str
    """What EVALSHA calls it."""


@functools.cache
def source(script: Script) -> Source:
    """The script's text, read once per process."""
    text = (_DIRECTORY / "_common.lua").read_text("utf-8") + (_DIRECTORY / f"{script.value}.lua").read_text("utf-8")
    return Source(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
