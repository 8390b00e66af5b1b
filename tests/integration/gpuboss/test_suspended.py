"""Processes that stand still for longer than a lease lives, with real signals: afterwards everybody has its lease."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from gpuboss.client import Client
from gpuboss.leases import HOLDS_MEMORY, Lease, LeaseRequest, LeaseState
from gpuboss.scripts import Script
from gpuboss.settings import Timings
from tests.integration.gpuboss.keeper_harness import MIB, LedgerUnderTest, ask
from tests.support import until

TIMINGS = Timings(beat_s=0.4, tick_s=0.2, ttl_s=3.0, renew_deadline_s=2.0, linger_s=0.3)
SUSPENDED_S = 4.0


@pytest.mark.parametrize(
    "who", [("holder",), ("keeper",), ("keeper", "store", "holder")], ids=["holder", "keeper", "everything"]
)
async def test_who_was_suspended_for_longer_than_a_lease_lives_has_its_lease_still(
    ledger: LedgerUnderTest, who: tuple[str, ...]
) -> None:
    async with await Client.connect(replace(ledger.settings, timings=TIMINGS), name="test") as client:
        held = await client.acquire(ask(60 * MIB))
        holder = ledger.run_holder(held)
        await until(lambda: _stands(client, held, LeaseState.ACTIVE), "the lease to be active")
        waiting = await client.acquire(ask(60 * MIB))
        numbers = {"holder": holder.process.pid, "keeper": ledger.keeper_pid, "store": ledger.store_pid}
        for name in who:
            os.kill(numbers[name], signal.SIGSTOP)
        try:
            until_s = time.monotonic() + SUSPENDED_S
            while time.monotonic() < until_s:
                if "store" in who:
                    await until(lambda: time.monotonic() >= until_s, "the suspension to be over")
                    continue
                # Somebody else lets the store's time pass, tick by tick.
                await client._store.call(Script.TICK)
                states = {lease.id: lease.state for lease in (await client.snapshot()).leases}
                assert states[held.id] in HOLDS_MEMORY
                assert states[waiting.id] is LeaseState.QUEUED
        finally:
            for name in who:
                os.kill(numbers[name], signal.SIGCONT)
        await until(lambda: _stands(client, held, LeaseState.ACTIVE), "the lease to be active again")
        assert holder.process.poll() is None
        assert (ledger.keeper_pid, ledger.store_pid) == (numbers["keeper"], numbers["store"])
        holder.end()
        await client.release(held)
        assert (await client.wait_granted(waiting)).state is LeaseState.GRANTED


@pytest.mark.slow
async def test_a_lease_that_its_holder_renews_outlives_the_machines_sleep(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(replace(ledger.settings, timings=TIMINGS), name="test") as client:
        request = ask(60 * MIB)
        by_word = LeaseRequest(
            request.request_id, request.holder, request.kind, request.options, request.priority, ttl_s=5.0
        )
        lease = await client.activate(await client.acquire(by_word), by_word=True)
        for pid in (stopped := [ledger.keeper_pid, ledger.store_pid]):
            os.kill(pid, signal.SIGSTOP)
        until_s = time.monotonic() + 5.5
        await until(lambda: time.monotonic() >= until_s, "the machine to wake up")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert (await client.renew(lease)).state is LeaseState.ACTIVE
        # And when nobody renews it, it is over, and its row with it.
        await until(lambda: _is_gone(client, lease), "the lease to be over")
        await until(lambda: not client.entries.has_row(lease), "its row to be gone")


async def _stands(client: Client, wanted: Lease, state: LeaseState) -> bool:
    return any(
        lease.id == wanted.id and lease.state is state and lease.fence == wanted.fence
        for lease in (await client.snapshot()).leases
    )


async def _is_gone(client: Client, wanted: Lease) -> bool:
    return all(lease.id != wanted.id for lease in (await client.snapshot()).leases)
