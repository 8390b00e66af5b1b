"""What a broker does at its start with the engines that another left alive: each is adopted, or ended.

Called by `pool.py` before anything is loaded and before the broker's port opens. Reads the files that shims left
(`orphans.py`), proves itself to the shims (`takeover.py`), has the ledger make the leases ours, and hands everything to
a slot (`slot.py`). An engine is ended

1. when its shim speaks no version that we speak: by a signal, for nothing can be ordered
2. when there is no slot for it: its model or slot is known no more, or nothing is to be adopted (`on_restart: reap`)
3. when it was started by another definition of its model than there is now
4. when its shim does not answer
5. when the ledger says that its lease is not held any more, or cannot be asked
6. when it does not answer itself

and its memory counts as in use until its processes are dead, for its row in the node's books stands as long. An engine
that another broker has, or is just taking, is that one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import structlog

from gpuboss.errors import GpubossError
from inference.errors import InferenceError
from inference.ledger import Ledger
from inference.orphans import Foreigner, Orphan, Past, find
from inference.process import Exited, Lost, Shim
from inference.slot import Slot
from inference.takeover import Refusal, TurnedAway, end_by_signal, take_over

__all__ = ["adopt_orphans"]

END_S = 5.0
"""How long the start waits for an engine that is ended; one that takes longer is its shim's to end, which goes on."""
_NOT_OURS = frozenset({Refusal.TAKEN, Refusal.SECRET})

_log = structlog.get_logger(__name__)


class _NotAdopted(Exception):
    """Why not, for the log."""


async def adopt_orphans(ledger: Ledger, slot_for: Callable[[Past], Slot | None]) -> list[Slot]:
    """Adopt or end every engine that a dead broker left; the slots that have one now.

    `slot_for`: the idle slot that is to have it; None: it is to be ended.
    """
    found = find(ledger.state)
    return await _Adoption(ledger, slot_for).settle(found) if found else []


class _Adoption:
    def __init__(self, ledger: Ledger, slot_for: Callable[[Past], Slot | None]) -> None:
        self._ledger = ledger
        self._slot_for = slot_for
        self._filled: set[str] = set()
        """Ids of the slots that have an engine, or are about to."""
        self._ended = False

    async def settle(self, found: Sequence[Orphan | Foreigner]) -> list[Slot]:
        async with asyncio.TaskGroup() as tasks:
            settling = [tasks.create_task(self._settle(one), name=f"orphan {one.shim.pid}") for one in found]
        if self._ended:
            await self._ledger.sweep()  # what they had is free from here on
        return [slot for task in settling if (slot := task.result()) is not None]

    async def _settle(self, found: Orphan | Foreigner) -> Slot | None:
        began_s = time.monotonic()
        try:
            slot = await self._adopt(found)
        except _NotAdopted as reason:
            _log.warning("engine_not_adopted", shim=found.shim.pid, **_named(found), reason=str(reason))
            return None
        took_s = round(time.monotonic() - began_s, 3)
        _log.info("engine_adopted", slot=slot.id, pid=slot.pid, took_s=took_s)
        return slot

    async def _adopt(self, found: Orphan | Foreigner) -> Slot:
        if isinstance(found, Foreigner):  # 1
            await self._end_by_signal(found)
            raise _NotAdopted(f"its shim speaks version {found.protocol}")
        slot = self._slot_of(found.past)
        shim = await self._take(found)
        if isinstance(slot, str):  # 2, 3
            await self._end(shim)
            raise _NotAdopted(slot)
        try:
            lease = await self._ledger.take_over(found.past.lease_id, found.past.fence)
        except GpubossError as error:  # 5
            await self._end(shim)
            raise _NotAdopted(error.message) from error
        except BaseException:
            shim.let_go()
            raise
        try:
            await slot.adopt(found, shim, lease)
        except InferenceError as error:  # 6
            self._ended = True
            raise _NotAdopted(error.message) from error
        return slot

    def _slot_of(self, past: Past) -> Slot | str:
        """The slot; or why there is none."""
        slot = self._slot_for(past)
        if slot is None or slot.id in self._filled:
            return "there is no slot for it"
        try:
            if slot.fingerprint(past.shares) != past.fingerprint:
                return "its model's definition is another now"
        except InferenceError as error:
            return error.message
        self._filled.add(slot.id)
        return slot

    async def _take(self, orphan: Orphan) -> Shim:
        try:
            return await take_over(orphan.address)
        except TurnedAway as refused:
            if refused.why in _NOT_OURS:
                raise _NotAdopted(f"it has a broker ({refused.why})") from refused
            await self._end_by_signal(orphan)  # 1, 4
            raise _NotAdopted(f"its shim could not be taken over ({refused.why})") from refused

    async def _end_by_signal(self, found: Orphan | Foreigner) -> None:
        self._ended = True
        if not await end_by_signal(found.shim):
            _log.error("shim_not_ended", shim=found.shim.pid, **_named(found))

    async def _end(self, shim: Shim) -> None:
        """Have the engine ended, and wait for it, but not for ever."""
        self._ended = True
        shim.stop(0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while not isinstance(await shim.report(), Exited | Lost):
                    pass
        shim.let_go()


def _named(found: Orphan | Foreigner) -> dict[str, object]:
    return {"slot": found.past.slot_id, "pid": found.engine_pid} if isinstance(found, Orphan) else {}
