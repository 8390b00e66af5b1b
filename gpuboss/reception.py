"""Whom the keeper lets in: a process that comes with other devices or another store is refused, with both values.

Called by `gpuboss.door` for every visitor; `gpuboss.keeper` opens it once the node is synced, or closes it with what
went wrong.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuboss import errors
from gpuboss.door import PROTOCOL, Visitor
from gpuboss.settings import LedgerSettings, describe_devices
from gpuboss.store_url import shown
from gpuboss.wire import Wire

if TYPE_CHECKING:
    from gpuboss.beats import Beats  # imports the store's library, for which the door does not wait

__all__ = ["Opened", "Reception", "conflict"]

_BURIAL_S = 3.0
"""How long the leases of visitors that left may take to be given back before they stand in the way of a newcomer."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """What a keeper that is ready has to offer."""

    beats: Beats
    welcome: Wire
    """Told to everybody who is let in."""


class Reception:
    """Answers the keeper's door."""

    def __init__(self, root: Path, settings: LedgerSettings, is_empty: Callable[[], bool]) -> None:
        """`is_empty`: nobody is inside."""
        self.leaving = False
        """Whether this keeper makes room for one with other settings."""
        self.refused = 0
        """How many were told why this keeper cannot start."""
        self._root = root
        self._settings = settings
        self._is_empty = is_empty
        self._served = False
        self._opened: asyncio.Future[Opened | errors.GpubossError] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Whether the keeper has started."""
        return self._opened.done()

    def open(self, opened: Opened) -> None:
        """The keeper is ready: those who wait are answered."""
        self._opened.set_result(opened)

    def fail(self, error: errors.GpubossError) -> None:
        """The keeper cannot start: everybody is told why."""
        self._opened.set_result(error)

    async def receive(self, hello: Wire) -> Wire:
        """Welcome, refused, or yield."""
        opened = await asyncio.shield(self._opened)
        if isinstance(opened, errors.GpubossError):
            if hello["settings"] != self._settings.to_wire():
                return {"op": "yield"}  # with other settings the next keeper may well start
            self.refused += 1
            return _refusal(opened)
        theirs = LedgerSettings.from_wire(hello["settings"], None)
        other_version = hello["protocol"] != PROTOCOL
        against = f"version {hello['protocol']} of gpuboss" if other_version else conflict(self._settings, theirs)
        if against is None:
            self._served = True
            return opened.welcome
        if await self._is_unneeded(opened.beats):
            _log.info("nobody is here: making room for %s with %s", hello["name"], against)
            self.leaving = True
            opened.beats.poke()
            return {"op": "yield"}
        _log.warning("%s is refused: %s", hello["name"], against)
        return _refusal(errors.LedgerConflict(self._explained(against)))

    async def sweep(self) -> None:
        """Look for deaths; returns when that is done."""
        opened = await asyncio.shield(self._opened)
        if isinstance(opened, Opened):
            await opened.beats.sweep()

    def left(self, visitor: Visitor) -> None:
        """Look for what a visitor that may be dead has left behind."""
        opened = self._opened.result()
        if isinstance(opened, Opened):
            opened.beats.expect_death(visitor.process)

    async def _is_unneeded(self, beats: Beats) -> bool:
        """Whether this keeper only lingers: its visitors have left, and what they held is given back or about to be."""
        deadline_s = time.monotonic() + _BURIAL_S
        while self._served and self._is_empty():
            if not beats.in_use:
                return True
            if time.monotonic() > deadline_s:
                return False
            await beats.sweep()
            await asyncio.sleep(0.05)
        return False

    def _explained(self, against: str) -> str:
        return (
            f"the ledger in {self._root} (keeper process {os.getpid()}) is in use with {_described(self._settings)}; "
            f"this process came with {against}: use the same (GPUBOSS_DEVICES and GPUBOSS_URL, or `devices` and "
            "`store` in the configuration), another state directory (GPUBOSS_STATE_DIR), or wait until those who use "
            "the ledger have ended"
        )


def conflict(mine: LedgerSettings, theirs: LedgerSettings) -> str | None:
    """What of theirs contradicts this ledger, in words; None when nothing does. What they leave open does not."""
    if theirs.devices is not None and theirs.devices != mine.devices:
        return describe_devices(theirs.devices)
    if theirs.store_url is not None and theirs.store_url != mine.store_url:
        return f"the store {shown(theirs.store_url)}"
    return None


def _described(settings: LedgerSettings) -> str:
    store = "a private store" if settings.store_url is None else f"the store {shown(settings.store_url)}"
    return f"{describe_devices(settings.devices)} and {store}"


def _refusal(error: errors.GpubossError) -> Wire:
    return {"op": "refused", "error": type(error).__name__, "message": error.message}
