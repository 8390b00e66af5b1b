"""The keeper's regular work on its node: look at devices and holders, bury the dead, sync with the store, tick.

Run by `gpuboss.keeper`; calls `gpuboss.node_watch`, `gpuboss.sweep` (who is dead), `gpuboss.holders` (their lock
files), `gpuboss.processes` (their end) and the scripts `confirm_dead`, `tick` and `audit`. One task runs `main_loop`;
everybody else only sends it word: `poke`, `sweep`, `expect_death`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpuboss import errors, holders
from gpuboss.devices import DeviceKind
from gpuboss.identity import Liveness, ProcessIdentity
from gpuboss.ledger_rows import LedgerRow
from gpuboss.node_watch import NodeWatch
from gpuboss.processes import end_processes
from gpuboss.scripts import Script
from gpuboss.settings import Timings
from gpuboss.store import Store
from gpuboss.sweep import StoredLease, dead_leases, dead_rows

__all__ = ["Beats"]

_RESTLESS_S = 0.1
"""Between beats while somebody is dying, or a GPU gives memory back."""
_TROUBLE_S = 0.25
"""Between beats while something fails, such as the store."""
_CLOSING_S = 2.0
"""How long a client that closed its connection may take to die; one that lives on keeps its leases."""
_DYING_S = 30.0
"""How long a dead client's leases are looked after on every restless beat; then on the regular ones."""
_SETTLING_S = 2.0
"""How long after a holder's end its GPU is read on restless beats: its driver takes time to give the memory back."""
_MOST_SYNCS = 5
_AUDIT_S = 30.0
"""Between two audits of the store's books."""
_log = logging.getLogger(__name__)


class Beats:
    """The one writer of the node's state."""

    def __init__(
        self,
        node: NodeWatch,
        store: Store,
        timings: Timings,
        holders_dir: Path,
        on_epoch: Callable[[int], None],
        *,
        audit_s: float = _AUDIT_S,
    ) -> None:
        """`on_epoch` is told when the store began a new life and this node is synced with it."""
        self._node = node
        self._holders_dir = holders_dir
        self._evidence = holders.Evidence(holders_dir)
        self._audit_s = audit_s
        self._next_audit_s = time.monotonic() + audit_s
        self._store = store
        self._timings = timings
        self._on_epoch = on_epoch
        self._poked = asyncio.Event()
        self._sweeps: list[asyncio.Future[None]] = []
        self._closed: dict[ProcessIdentity, float] = {}
        """Owners whose connection closed, and when."""
        self._surviving: set[str] = set()
        """Leases whose holder is dead and of which something is left that cannot be ended."""
        self._settling_until_s = 0.0
        self._well = True
        """Whether the last beat did all it had to."""

    @property
    def in_use(self) -> bool:
        """Whether a lease or a row is there to be kept."""
        return bool(self._node.rows or self._node.leases)

    async def main_loop(self, stay: Callable[[], bool]) -> None:
        """Beat and tick for as long as `stay()` says after each of them."""
        next_beat_s = time.monotonic() + self._timings.beat_s
        while stay():
            await self._wait(next_beat_s)
            if self._poked.is_set() or not self._well or self._restless() or time.monotonic() >= next_beat_s:
                self._poked.clear()
                await self.beat()
                next_beat_s = time.monotonic() + self._timings.beat_s
            else:
                await self._tick()

    async def begin(self) -> None:
        """The first beat; raises what goes wrong with it."""
        await self._node.look()
        await self._bury_rows()
        await self._sync()
        holders.sweep_away(self._holders_dir, self._node.standing)

    async def beat(self) -> None:
        """Look, bury, sync. What fails is tried again soon; the node ledger does not wait for the store."""
        asked, self._sweeps = self._sweeps, []
        try:
            await self.begin()
            await self._audit()
            self._note_trouble(None)
        except errors.GpubossError as error:
            self._note_trouble(error)
        finally:
            for waiting in asked:
                if not waiting.done():
                    waiting.set_result(None)

    def poke(self) -> None:
        """Beat now."""
        self._poked.set()

    async def sweep(self) -> None:
        """Beat now; returns when it is done."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sweeps.append(done)
        if any(device.measured and device.kind is not DeviceKind.CPU for device in self._node.devices):
            self._settling_until_s = time.monotonic() + _SETTLING_S
        self.poke()
        await done

    def expect_death(self, owner: ProcessIdentity) -> None:
        """A client's connection closed: beat restlessly until nothing of it is left, or it proves to live."""
        self._closed[owner] = time.monotonic()
        self.poke()

    async def _wait(self, next_beat_s: float) -> None:
        pause_s = self._timings.tick_s
        if self._restless():
            pause_s = _RESTLESS_S
        elif not self._well:
            pause_s = _TROUBLE_S
        pause_s = max(0.0, min(pause_s, next_beat_s - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._poked.wait()

    def _restless(self) -> bool:
        now_s = time.monotonic()
        for owner, since_s in list(self._closed.items()):
            left = any(lease.owner == owner for lease in self._node.leases)
            patience_s = _DYING_S if owner.is_alive() is Liveness.DEAD else _CLOSING_S
            if not left or now_s - since_s > patience_s:
                del self._closed[owner]
        return bool(self._closed) or now_s < self._settling_until_s

    async def _bury_rows(self) -> None:
        """End what dead holders left behind; their rows go when nothing of it is left."""
        buried = False
        for row in dead_rows(self._node.rows, self._evidence.of):
            if await end_processes(row.lease_id, _recorded(row), partial(self._evidence.of, row.lease_id)):
                self._surviving.discard(row.lease_id)
                _log.info(
                    "lease %s of %s: its holder %s is dead and nothing of it is left", row.lease_id, row.holder, row.pid
                )
                self._node.remove(row)
                buried = True
            elif row.lease_id not in self._surviving:  # said once, not on every beat
                self._surviving.add(row.lease_id)
                _log.error(
                    "lease %s of %s: processes survive SIGKILL or are another user's to end; their memory counts on",
                    *(row.lease_id, row.holder),
                )
        if buried:
            await self._node.look()

    async def _sync(self) -> None:
        for _ in range(_MOST_SYNCS):
            if await self._node.sync(self._store):
                _log.info("the store lives in epoch %d; %d rows are told", self._node.epoch, len(self._node.rows))
                self._on_epoch(self._node.epoch)
            # Read after the store's answer: who became active meanwhile had entered its row before that.
            rows = self._node.standing()
            dead = dead_leases(self._node.leases, rows, self._node.vanished, ProcessIdentity.is_alive)
            if not dead:
                return
            _log.info("no holder or waiter is left of %s", ", ".join(f"{lease.id} ({lease.state})" for lease in dead))
            await self._store.call_once(Script.CONFIRM_DEAD, {"leases": [_told(lease) for lease in dead]})

    async def _audit(self) -> None:
        """Have the store's books recomputed; what does not agree is a fault of ours, or of who wrote into the store."""
        if time.monotonic() < self._next_audit_s:
            return
        self._next_audit_s = time.monotonic() + self._audit_s
        reply = await self._store.call_once(Script.AUDIT)
        for fault in reply["faults"] or ():
            _log.error("audit of the lease store: %s", fault)
        for device in reply.get("overfull") or ():
            _log.warning("more is leased than there is, nothing is granted there until it is back: %s", device)

    async def _tick(self) -> None:
        try:
            await self._store.call_once(Script.TICK)
        except errors.NoEpoch:
            self.poke()
        except errors.GpubossError as error:
            self._note_trouble(error)

    def _note_trouble(self, error: errors.GpubossError | None) -> None:
        """Log that something fails, and that all is well again, once each."""
        if (error is None) == self._well:
            return
        self._well = error is None
        if error is None:
            _log.info("all is well again")
        else:
            _log.error("%s", error)


def _recorded(row: LedgerRow) -> list[ProcessIdentity]:
    return [process for process in (row.process, row.engine) if process is not None]


def _told(lease: StoredLease) -> dict[str, str | int]:
    """With its state: one that its holder has revived or activated since is left alone."""
    told: dict[str, str | int] = {"id": lease.id, "state": lease.state}
    return told if lease.fence is None else told | {"epoch": lease.fence.epoch, "seq": lease.fence.seq}
