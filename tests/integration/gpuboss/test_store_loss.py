"""The store killed, stopped, wiped: holders never notice, waiters keep their places, nothing is granted twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis

from gpuboss import errors
from gpuboss.client import Client
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HOLDS_MEMORY, Fence, HolderKind, Lease, LeaseState
from gpuboss.node_ledger import NodeLedger
from gpuboss.server import StoreServer, find_server
from gpuboss.settings import Timings
from tests.integration.gpuboss.keeper_harness import MIB, LedgerUnderTest, ask, gone, told_by
from tests.support import until


@pytest.fixture
async def client(ledger: LedgerUnderTest) -> AsyncIterator[Client]:
    async with await Client.connect(ledger.settings, name="test") as connected:
        yield connected


async def test_kill_9_of_the_store_is_invisible_to_holders_and_keeps_places(
    ledger: LedgerUnderTest, client: Client
) -> None:
    held = await client.acquire(ask(60 * MIB))
    holder = ledger.run_holder(held)
    await until(lambda: _shows(client, held.id, LeaseState.ACTIVE), "the lease to be active")
    waiters = [await client.acquire(ask(60 * MIB, priority=priority)) for priority in (10, 10, 5)]
    epoch = (await client.snapshot()).epoch
    keeper = ledger.keeper_pid
    for _ in range(3):
        store = ledger.store_pid
        os.kill(store, signal.SIGKILL)
        await until(lambda gone_one=store: ledger.store_pid != gone_one, "the next store")
    await until(lambda: _epoch_above(client, epoch), "a new epoch")
    snapshot = await client.snapshot()
    found = {lease.id: lease for lease in snapshot.leases}
    assert (found[held.id].state, found[held.id].fence) == (LeaseState.ACTIVE, held.fence)
    assert [found[waiter.id].position for waiter in waiters] == [2, 3, 1]
    assert client.store_up
    assert ledger.keeper_pid == keeper
    assert holder.process.poll() is None
    holder.end()
    await client.release(held)
    granted = await asyncio.wait_for(client.wait_granted(waiters[2]), 10)
    assert granted.fence is not None
    assert granted.fence.epoch > epoch


async def test_a_wiped_store_learns_from_the_node_and_from_its_waiters(ledger: LedgerUnderTest, client: Client) -> None:
    held = await client.acquire(ask(60 * MIB, priority=5))
    holder = ledger.run_holder(held)
    await until(lambda: _shows(client, held.id, LeaseState.ACTIVE), "the lease to be active")
    waiters = [await client.acquire(ask(60 * MIB)) for _ in range(3)]
    epoch = (await client.snapshot()).epoch
    with redis.Redis(unix_socket_path=str(ledger.state.socket_path("store"))) as wiping:
        wiping.flushall()
    await until(lambda: _epoch_above(client, epoch), "a new epoch")
    await until(lambda: _positions(client, waiters, [1, 2, 3]), "the waiters to be back in their order")
    found = next(lease for lease in (await client.snapshot()).leases if lease.id == held.id)
    assert (found.state, found.fence, found.priority) == (LeaseState.ACTIVE, held.fence, 5)
    assert found.owner.pid == os.getpid()
    holder.end()
    await client.release(held)
    assert (await asyncio.wait_for(client.wait_granted(waiters[0]), 10)).state is LeaseState.GRANTED


async def test_granted_and_not_yet_active_survives_a_wipe(ledger: LedgerUnderTest, client: Client) -> None:
    granted = await client.acquire(ask(60 * MIB))
    with redis.Redis(unix_socket_path=str(ledger.state.socket_path("store"))) as wiping:
        wiping.flushall()
    # Its holder starts with the fence it was given, whatever the store has made of the lease since.
    holder = ledger.run_holder(granted)
    await until(lambda: _shows(client, granted.id, LeaseState.ACTIVE), "the lease to be active")
    (found,) = (await client.snapshot()).leases
    assert found.fence == granted.fence
    holder.end()
    await client.release(granted)
    assert not (await client.snapshot()).leases


async def test_a_stopped_store_delays_and_is_caught_up_with(ledger: LedgerUnderTest) -> None:
    # A store that stands still is noticed when an answer is overdue; acquire must outlast that.
    patient = replace(
        ledger.settings, timings=Timings(beat_s=0.5, tick_s=0.25, ttl_s=30.0, renew_deadline_s=20.0, linger_s=0.3)
    )
    async with await Client.connect(patient, name="test") as client:
        held = await client.acquire(ask(60 * MIB))
        holder = ledger.run_holder(held)
        await until(lambda: _shows(client, held.id, LeaseState.ACTIVE), "the lease to be active")
        store = ledger.store_pid
        os.kill(store, signal.SIGSTOP)
        asking = asyncio.create_task(client.acquire(ask(40 * MIB)))
        try:
            await until(lambda: not client.store_up, "the outage to be noticed")
            assert not asking.done()
        finally:
            os.kill(store, signal.SIGCONT)
        assert (await asyncio.wait_for(asking, 20)).state is LeaseState.GRANTED
        assert client.store_up
        assert await _shows(client, held.id, LeaseState.ACTIVE)
        holder.end()


async def test_close_says_farewell_for_all_at_once_to_a_store_that_hangs(ledger: LedgerUnderTest) -> None:
    client = await Client.connect(ledger.settings, name="test")
    for _ in range(8):
        await client.acquire(ask(60 * MIB))
    store = ledger.store_pid
    os.kill(store, signal.SIGSTOP)
    try:
        async with asyncio.timeout(6):  # one after the other they would take longer
            await client.close()
    finally:
        os.kill(store, signal.SIGCONT)
    async with await Client.connect(ledger.settings, name="next") as after:
        await after.snapshot()


async def test_a_long_outage_is_said_and_what_was_asked_is_taken_back(ledger: LedgerUnderTest) -> None:
    hasty = replace(ledger.settings, timings=replace(ledger.settings.timings, renew_deadline_s=1.2))
    async with await Client.connect(hasty, name="test") as client:
        keeper, store = ledger.keeper_pid, ledger.store_pid
        os.kill(keeper, signal.SIGSTOP)  # nobody restarts the store
        try:
            os.kill(store, signal.SIGKILL)
            await until(lambda: gone(store), "the store to be gone")
            with pytest.raises(errors.StoreUnavailable):
                await client.acquire(ask())
            assert not client.store_up
            await client.release(_a_lease_of_nobody())
        finally:
            os.kill(keeper, signal.SIGCONT)
        await until(lambda: _is_empty(client) if client.store_up else False, "the store to be back, and empty")
        assert (await client.acquire(ask())).state is LeaseState.GRANTED


async def test_no_device_is_ever_overfull_while_the_store_falls_again_and_again(
    ledger: LedgerUnderTest, client: Client
) -> None:
    over: list[str] = []
    done = 0

    async def use(size: int) -> None:
        nonlocal done
        lease = await client.wait_granted(await client.acquire(ask(size * MIB)))
        holder = await asyncio.to_thread(ledger.run_holder, lease)
        with NodeLedger(ledger.state.ledger_path) as book:
            over.extend(f"{row.id} {row.free_bytes}" for row in book.devices() if row.free_bytes < 0)
        await asyncio.to_thread(holder.end)
        await client.release(lease)
        done += 1

    async def wreck() -> None:
        while True:
            before, store = done, ledger.store_pid
            os.kill(store, signal.SIGKILL)
            await until(lambda: ledger.store_pid != store, "the next store")  # noqa: B023 (used at once)
            await until(lambda: done > before, "one holder more")  # noqa: B023

    wrecking = asyncio.create_task(wreck())
    await asyncio.wait_for(asyncio.gather(*(use(size) for size in (60, 50, 40, 30, 60, 50, 40, 30))), 60)
    wrecking.cancel()
    await asyncio.gather(wrecking, return_exceptions=True)
    assert done == 8
    assert over == []
    assert ledger.log.count("fell") >= 2, "the store did fall"
    await until(lambda: _is_empty(client), "everything to be given back")


@pytest.mark.parametrize("guarded", [False, True], ids=["by the kernel", "by the guard"])
async def test_the_store_dies_with_its_parent(ledger: LedgerUnderTest, guarded: bool) -> None:
    parent = ledger.run_parent_of_store(guarded=guarded)
    store = told_by(parent)["store"]
    assert not gone(store)
    parent.kill()
    await until(lambda: gone(store), "the store to be gone")


async def test_the_next_keeper_ends_a_server_that_outlived_its_own(ledger: LedgerUnderTest) -> None:
    first = StoreServer(ledger.state, find_server())
    await first.launch()
    await first.wait_ready()
    assert first.pid is not None
    second = StoreServer(ledger.state, find_server())
    await second.launch()
    await second.wait_ready()
    assert second.pid != first.pid
    assert gone(first.pid)
    await first.wait_ended()
    await second.stop()


async def _shows(client: Client, lease_id: str, state: LeaseState) -> bool:
    return any(lease.id == lease_id and lease.state is state for lease in (await client.snapshot()).leases)


async def _epoch_above(client: Client, epoch: int) -> bool:
    return (await client.snapshot()).epoch > epoch


async def _positions(client: Client, waiters: list[Lease], positions: list[int]) -> bool:
    found = {lease.id: lease.position for lease in (await client.snapshot()).leases}
    return [found.get(waiter.id) for waiter in waiters] == positions


async def _is_empty(client: Client) -> bool:
    return not any(lease.state in HOLDS_MEMORY for lease in (await client.snapshot()).leases)


def _a_lease_of_nobody() -> Lease:
    return Lease(
        *("x", "x", "job:x", HolderKind.JOB, LeaseState.ACTIVE, {"sim0": 1}, 10, Fence(1, 1), None),
        ProcessIdentity.current(),
        since_ms=0,
    )
