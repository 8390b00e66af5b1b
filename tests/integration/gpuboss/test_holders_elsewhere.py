"""Holders in another pid namespace: alive as long as their lock file is held, dead when it is free, else unknown."""

from __future__ import annotations

import asyncio

import pytest

from gpuboss import holders
from gpuboss.client import Client
from gpuboss.identity import pid_namespace
from gpuboss.leases import Lease, LeaseState
from gpuboss.node_ledger import NodeLedger
from tests.integration.gpuboss.elsewhere import run_container, run_elsewhere, why_not
from tests.integration.gpuboss.keeper_harness import _USER, MIB, LedgerUnderTest, ask, told_by
from tests.support import until

_WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")


async def test_a_holder_that_cannot_be_seen_keeps_its_lease_until_it_ends(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="watcher") as client:
        async with await Client.connect(ledger.settings, name="asker") as asker:
            held = await asker.acquire(ask())
            container = run_container(ledger, held)
        assert container.namespace != pid_namespace()
        await until(lambda: _is_active(client, held), "the lease to be active")
        waiting = await client.acquire(ask())
        for _ in range(5):
            await client.sweep()
            assert await _is_active(client, held)
        assert (ledger.state.holders_dir / held.id).exists()
        container.end()
        assert (await asyncio.wait_for(client.wait_granted(waiting), 5)).state is LeaseState.GRANTED
        with NodeLedger(ledger.state.ledger_path) as book:
            assert not book.rows()
        await until(lambda: not list(ledger.state.holders_dir.iterdir()), "the lock file to be swept away")


async def test_a_dead_holders_child_keeps_the_lease_as_long_as_it_lives(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="watcher") as client:
        held = await client.acquire(ask())
        container = run_container(ledger, held)
        await until(lambda: _is_active(client, held), "the lease to be active")
        container.kill("holder")
        for _ in range(3):
            await client.sweep()
            assert await _is_active(client, held)
        container.kill("child")
        await until(lambda: _is_free_after_sweep(client), "the killed child to let go of its file")


async def test_without_a_lock_file_nobody_is_ever_taken_for_dead(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="watcher") as client:
        held = await client.acquire(ask())
        container = run_container(ledger, held, lock=False)
        await until(lambda: _is_active(client, held), "the lease to be active")
        container.end()
        for _ in range(3):
            await client.sweep()
            assert await _is_active(client, held)
        assert held.fence is not None
        with NodeLedger(ledger.state.ledger_path) as book:
            assert book.remove(held.id, held.fence.epoch, held.fence.seq)
        await client.sweep()
        assert not (await client.snapshot()).leases


async def test_a_keeper_in_a_namespace_of_its_own_takes_nobody_outside_for_dead(ledger: LedgerUnderTest) -> None:
    order = {"state_dir": str(ledger.directory), "settings": ledger.settings.to_wire(), "requests": []}
    inside = run_elsewhere(ledger, _USER, order)
    told_by(inside)
    async with await Client.connect(ledger.settings, name="outside") as client:
        held, kept = await client.acquire(ask()), await client.acquire(ask(device="sim1"))
        lock = holders.HolderLock(ledger.state.holders_dir / held.id)
        lock.take()
        holder = ledger.run_holder(held)
        other = ledger.run_holder(kept)
        await until(lambda: _is_active(client, held), "the lease to be active")
        for _ in range(3):
            await client.sweep()
            assert await _is_active(client, held)
        holder.kill()
        other.kill()
        lock.close()
        await client.sweep()
        leases = (await client.snapshot()).leases
        assert [lease.id for lease in leases] == [kept.id], "of this one nobody knows: it left no lock file"
        assert kept.fence is not None
        with NodeLedger(ledger.state.ledger_path) as book:
            book.remove(kept.id, kept.fence.epoch, kept.fence.seq)


async def test_a_waiter_elsewhere_is_left_to_the_stores_clock_whatever_files_say(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="watcher") as client:
        held = await client.acquire(ask())
        order = {"state_dir": str(ledger.directory), "settings": ledger.settings.to_wire()}
        waiter = run_elsewhere(ledger, _USER, order | {"requests": [[{"sim0": 60 * MIB}]]})
        assert told_by(waiter)["states"] == ["queued"]
        (waiting,) = [lease for lease in (await client.snapshot()).leases if lease.id != held.id]
        # E.g. left by an attempt to begin that failed: it tells nothing of who asks.
        (ledger.state.holders_dir / waiting.id).touch()
        for _ in range(3):
            await client.sweep()
            assert len((await client.snapshot()).leases) == 2
        assert not (ledger.state.holders_dir / waiting.id).exists()
        waiter.kill()
        await until(lambda: _is_alone(client), "the waiter to be forgotten")


async def _is_alone(client: Client) -> bool:
    return len((await client.snapshot()).leases) == 1


async def _is_free_after_sweep(client: Client) -> bool:
    await client.sweep()
    return not (await client.snapshot()).leases


async def _is_active(client: Client, held: Lease) -> bool:
    return any(
        lease.id == held.id and lease.state is LeaseState.ACTIVE and lease.fence == held.fence
        for lease in (await client.snapshot()).leases
    )
