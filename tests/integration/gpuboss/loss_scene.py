"""A ledger at work while its store is hurt: a holder, waiters behind it, and somebody who asks all the time.

`at_work` sets the scene; the test hurts the store, mends it and says when; `Scene.check` then proves that the holder
never noticed, that nothing was promised twice, and how soon memory was granted again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from gpuboss import errors
from gpuboss.client import Client
from gpuboss.leases import Lease, LeaseState
from gpuboss.node_ledger import NodeLedger
from tests.integration.gpuboss.keeper_harness import MIB, Holder, LedgerUnderTest, ask
from tests.support import until

LONG = os.environ.get("MODEL_BOSS_LONG") == "1"
OUTAGE_S = 60.0 if LONG else 8.0
"""How long a store is gone: longer than all deadlines of `keeper_harness.QUICK`; the longest is the TTL, 6 s."""
HANG_S = 20.0 if LONG else 8.0
"""How long it stands still."""
RESUME_S = 3.0
"""How soon after the store's return memory is granted again."""
BIG = 60 * MIB
"""Two of these do not fit a device of 100 MiB."""


def resume_bound_s() -> float:
    """Twice as long while others use this machine."""
    return RESUME_S if os.getloadavg()[0] <= (os.cpu_count() or 1) else 2 * RESUME_S


@dataclass
class Scene:
    """What was going on before the store was hurt."""

    ledger: LedgerUnderTest
    client: Client
    held: Lease
    """On sim0, in use."""
    holder: Holder
    waiters: list[Lease]
    """For as much on sim0, in this order."""
    more: list[tuple[Lease, Holder]] = field(default_factory=list)
    """Others in use, on sim1."""
    asking: asyncio.Task[float] | None = None

    def ask_all_the_time(self, size: int = 30 * MIB) -> None:
        """Begin to ask for something that fits on sim1."""
        self.asking = asyncio.create_task(self._first_grant(size))

    async def hold_more(self) -> Lease:
        """Another lease in use, on sim1."""
        lease = await self.client.acquire(ask(BIG, "sim1"))
        self.more.append((lease, await asyncio.to_thread(self.ledger.run_holder, lease)))
        await until(lambda: self.shows(lease, LeaseState.ACTIVE), "the second lease to be active")
        return lease

    async def last(self, seconds: float) -> None:
        """Let it go on for so long; the holder must live all the time, and nobody be granted anything."""
        end_s = time.monotonic() + seconds
        await until(lambda: self._is_over(end_s), f"{seconds:g} s", timeout_s=seconds + 20)

    async def check(self, returned_s: float) -> None:
        """All promises kept, the store having been there again since `returned_s` (monotonic)."""
        assert self.asking is not None
        async with asyncio.timeout(30):
            took_s = await self.asking - returned_s
        print(f"granted again {took_s:.2f} s after the store's return")
        assert took_s <= resume_bound_s(), f"{took_s:.2f} s until the first grant\n{self.ledger.log}"
        for lease, holder in [(self.held, self.holder), *self.more]:
            await until(lambda one=lease: self.shows(one, LeaseState.ACTIVE), "the holder's lease to be active again")
            self._is_untouched(lease, holder)
        await until(lambda: self._queue_is(self.waiters), "the waiters in their order")
        assert await self.client.audit() == []
        self._has_room()
        await self._gives_way()

    async def shows(self, lease: Lease, state: LeaseState) -> bool:
        """Whether the store has the lease in this state, under the fence it always had."""
        try:
            leases = (await self.client.snapshot()).leases
        except errors.GpubossError:
            return False
        return any((one.id, one.state, one.fence) == (lease.id, state, lease.fence) for one in leases)

    def _is_over(self, end_s: float) -> bool:
        assert self.holder.process.poll() is None, self.ledger.log
        assert self.asking is None or not self.asking.done(), "granted without a store"
        return time.monotonic() > end_s

    def _is_untouched(self, lease: Lease, holder: Holder) -> None:
        assert holder.process.poll() is None, f"the holder was ended\n{self.ledger.log}"
        assert lease.fence is not None
        with NodeLedger(self.ledger.state.ledger_path) as book:
            rows = {row.lease_id: row for row in book.rows()}
        assert (rows[lease.id].epoch, rows[lease.id].seq) == (lease.fence.epoch, lease.fence.seq)

    def _has_room(self) -> None:
        with NodeLedger(self.ledger.state.ledger_path) as book:
            assert [device for device in book.devices() if device.free_bytes < 0] == []

    async def _queue_is(self, waiters: list[Lease]) -> bool:
        found = {lease.id: lease for lease in (await self.client.snapshot()).leases}
        states = [found[waiter.id].state for waiter in waiters if waiter.id in found]
        assert LeaseState.GRANTED not in states, "granted while its room is held"
        places = [found[waiter.id].position for waiter in waiters if waiter.id in found]
        return len(places) == len(waiters) and places == sorted(places, key=lambda place: place or 0)

    async def _gives_way(self) -> None:
        """When the holder ends, the first waiter gets its room, under a fence that is newer."""
        await asyncio.to_thread(self.holder.end)
        await self.client.release(self.held)
        async with asyncio.timeout(10):
            granted = await self.client.wait_granted(self.waiters[0])
        assert granted.fence is not None
        assert self.held.fence is not None
        assert (granted.fence.epoch, granted.fence.seq) > (self.held.fence.epoch, self.held.fence.seq)
        for lease, holder in self.more:
            await asyncio.to_thread(holder.end)
            await self.client.release(lease)

    async def _first_grant(self, size: int) -> float:
        """When (monotonic) it was granted."""
        while True:
            with contextlib.suppress(errors.StoreUnavailable, errors.NoEpoch):
                lease = await self.client.wait_granted(await self.client.acquire(ask(size, "sim1")))
                granted_s = time.monotonic()
                await self.client.release(lease)
                return granted_s


@contextlib.asynccontextmanager
async def at_work(ledger: LedgerUnderTest) -> AsyncIterator[Scene]:
    """A client, a holder on sim0, and two waiters."""
    async with await Client.connect(ledger.settings, name="test") as client:
        held = await client.acquire(ask(BIG))
        holder = await asyncio.to_thread(ledger.run_holder, held)
        waiters = [await client.acquire(ask(BIG)) for _ in range(2)]
        assert [waiter.state for waiter in waiters] == [LeaseState.QUEUED] * 2
        scene = Scene(ledger, client, held, holder, waiters)
        await until(lambda: scene.shows(held, LeaseState.ACTIVE), "the lease to be active")
        try:
            yield scene
        finally:
            if scene.asking is not None:
                scene.asking.cancel()
                await asyncio.gather(scene.asking, return_exceptions=True)
