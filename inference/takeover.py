"""Proves to the shim of a dead broker that we are the next, and gives orders to it as to one of our own.

Called by `adoption.py` with what stands in the shim's file (`orphans.py`). The other end, and the protocol, are in
`shim_door.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpuboss.identity import Liveness, ProcessIdentity
from inference.process import Shim
from inference.shim_door import PROTOCOL, SPOKEN

__all__ = ["PROTOCOL", "SPOKEN", "Address", "Refusal", "TurnedAway", "end_by_signal", "take_over"]

ANSWER_S = 3.0
"""For the shim's answer, which takes a millisecond; and, once more, for one that still has a broker, since that may
have been killed just now and the shim not have heard of it, or that has no time for us."""
_RETRY_S = 0.05
_LOOK_EVERY_S = 0.02


class Refusal(StrEnum):
    """Why a shim is not ours to order."""

    VERSION = "version"
    """It does not speak what we speak."""
    SECRET = "secret"  # noqa: S105 (a word of the protocol)
    """It has been called ready since we read its file, or the file is not its own."""
    TAKEN = "taken"
    """It has a broker."""
    SILENT = "silent"
    """Nobody answers: it is dead, stands still, or its engine's story is over."""


class TurnedAway(Exception):
    """A shim was not taken over, and why."""

    def __init__(self, why: Refusal) -> None:
        super().__init__(why.value)
        self.why = why


@dataclass(frozen=True, slots=True)
class Address:
    """Where a shim is, and what proves to it that we may order it."""

    shim: ProcessIdentity
    socket: Path
    secret: str
    protocol: int
    """What it speaks; never more than we do."""


class Stranger:
    """A shim that another process spawned: its end has to be looked for, and how it came nobody tells us."""

    def __init__(self, identity: ProcessIdentity) -> None:
        self.pid = identity.pid
        self.returncode: int | None = None
        """0 once it is known to be dead."""
        self._identity = identity

    async def wait(self) -> None:
        """Return when it is dead."""
        while self._identity.is_alive() is Liveness.ALIVE:  # noqa: ASYNC110 (the system tells nobody but its parent)
            await asyncio.sleep(_LOOK_EVERY_S)
        self.returncode = 0

    def kill(self) -> None:
        """SIGKILL, if it is still that process."""
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Signal it, if it is still that process."""
        if self._identity.is_alive() is Liveness.ALIVE:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def take_over(address: Address) -> Shim:
    """The shim, ours to order from now on. Its next report is one about its engine.

    Raises:
        TurnedAway
    """
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + ANSWER_S
    while True:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await _knock(address)
        except TurnedAway as refused:
            if refused.why is not Refusal.TAKEN or clock() > deadline_s:
                raise
        except (OSError, TimeoutError, ValueError) as error:
            # A connection that is cut off, or not even made, says nothing: too many may have come at once.
            if clock() > deadline_s or address.shim.is_alive() is not Liveness.ALIVE:
                raise TurnedAway(Refusal.SILENT) from error
        await asyncio.sleep(_RETRY_S)


async def _knock(address: Address) -> Shim:
    reports, orders = await asyncio.open_unix_connection(str(address.socket))
    taken = False
    try:
        hello = {"op": "adopt", "protocol": address.protocol, "secret": address.secret}
        orders.write(json.dumps(hello).encode() + b"\n")
        answer = json.loads(await reports.readline())
        if answer["event"] != "adopted":
            raise TurnedAway(Refusal(answer["why"]))
        taken = True
        return Shim(Stranger(address.shim), orders, reports, adopted=True, protocol=address.protocol)
    finally:
        if not taken:
            orders.close()


async def end_by_signal(shim: ProcessIdentity, patience_s: float = ANSWER_S) -> bool:
    """End a shim that is not to be spoken to, whatever version it is: SIGTERM has it end its engine first.

    SIGKILL for one that stands still; the keeper ends what that leaves. False when even then it is not dead.
    """
    stranger = Stranger(shim)
    for number in (signal.SIGTERM, signal.SIGKILL):
        stranger.signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await stranger.wait()
                return True
    return False
