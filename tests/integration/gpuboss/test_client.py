"""The client against a real keeper and store: asking, waiting, giving up, giving back, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gpuboss import errors
from gpuboss.client import Client
from gpuboss.entries import Entries
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HOLDS_MEMORY, HolderKind, Lease, LeaseRequest, LeaseState, Snapshot, new_request_id
from gpuboss.node_ledger import LedgerRow, NodeLedger
from gpuboss.scripts import Script
from gpuboss.store import Event, Store
from tests.integration.gpuboss.keeper_harness import MIB, LedgerUnderTest, ask, descriptors
from tests.support import until


@pytest.fixture
async def client(ledger: LedgerUnderTest) -> AsyncIterator[Client]:
    async with await Client.connect(ledger.settings, name="test") as connected:
        yield connected


async def test_a_free_device_is_granted_and_shown(client: Client) -> None:
    lease = await client.acquire(ask(60 * MIB, holder="slot:robin", priority=5))
    assert (lease.state, lease.shares, lease.position) == (LeaseState.GRANTED, {"sim0": 60 * MIB}, None)
    snapshot = await client.snapshot()
    (shown,) = snapshot.leases
    assert (shown.id, shown.holder, shown.priority, shown.owner.pid) == (lease.id, "slot:robin", 5, os.getpid())
    use = {found.device.id: found for found in snapshot.devices}
    assert (use["sim0"].claimed_bytes, use["sim0"].free_bytes, use["sim1"].free_bytes) == (
        60 * MIB,
        40 * MIB,
        100 * MIB,
    )
    assert use["sim0"].observed_bytes is None
    await client.release(lease)
    await client.release(lease)
    assert _free(await client.snapshot()) == {"sim0": 100 * MIB, "sim1": 100 * MIB}


async def test_a_waiter_is_woken_by_the_release(client: Client) -> None:
    held = await client.acquire(ask())
    queued = await client.acquire(ask())
    assert (queued.state, queued.position, queued.fence) == (LeaseState.QUEUED, 1, None)
    waiting = asyncio.create_task(client.wait_granted(queued))
    await client.release(held)
    granted = await asyncio.wait_for(waiting, 5)
    assert granted.state is LeaseState.GRANTED
    assert granted.fence is not None
    assert held.fence is not None
    assert granted.fence > held.fence
    assert await client.wait_granted(granted) == granted, "nothing to wait for"


async def test_what_can_never_fit_is_refused_with_the_numbers(client: Client) -> None:
    options = ({"sim0": 200 * MIB}, {"sim0": 50 * MIB, "gpu9": 50 * MIB})
    with pytest.raises(errors.LeaseRefused) as refused:
        await client.acquire(LeaseRequest(new_request_id(), "slot:big", HolderKind.SLOT, options, 10))
    for words in ("slot:big", "200MiB of sim0, which can give 100MiB", "50MiB of gpu9, which this node does not have"):
        assert words in refused.value.message


async def test_given_up_leases_free_their_room_and_their_place(client: Client) -> None:
    held, queued, behind = [await client.acquire(ask()) for _ in range(3)]
    await client.cancel(queued)
    await client.cancel(queued)
    await client.cancel(held)
    assert (await asyncio.wait_for(client.wait_granted(behind), 5)).state is LeaseState.GRANTED
    with pytest.raises(errors.StaleFence):
        await client.wait_granted(queued)


async def test_asking_twice_is_asking_once(client: Client) -> None:
    request = ask(60 * MIB)
    first, second = await asyncio.gather(client.acquire(request), client.acquire(request))
    assert first == second
    assert _free(await client.snapshot())["sim0"] == 40 * MIB


async def test_a_released_request_cannot_be_asked_for_again(client: Client) -> None:
    request = ask()
    await client.release(await client.acquire(request))
    with pytest.raises(errors.StaleFence):
        await client.acquire(request)


async def test_many_tasks_share_one_client(client: Client) -> None:
    chance = random.Random(7)
    most = 0

    async def use(size: int, device: str) -> None:
        nonlocal most
        lease = await client.wait_granted(await client.acquire(ask(size, device)))
        snapshot = await client.snapshot()
        assert all(free >= 0 for free in _free(snapshot).values())
        most = max(most, sum(found.state in HOLDS_MEMORY for found in snapshot.leases))
        await client.release(lease)

    jobs = [use(chance.randint(10, 60) * MIB, chance.choice(["sim0", "sim1"])) for _ in range(60)]
    await asyncio.wait_for(asyncio.gather(*jobs), 60)
    assert most > 2, "leases were held side by side"
    assert not (await client.snapshot()).leases
    assert len(client._store._links._idle) <= 8


async def test_a_cancelled_acquire_leaves_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = asyncio.Event()
    real = Store.call

    async def slow(self: Store, script: Script, *arguments: Any, **more: Any) -> Any:
        reply = await real(self, script, *arguments, **more)
        if script is Script.ACQUIRE:
            answered.set()
            await asyncio.Event().wait()  # the answer is on its way when its asker is cancelled
        return reply

    monkeypatch.setattr(Store, "call", slow)
    asking = asyncio.create_task(client.acquire(ask()))
    await answered.wait()
    assert (await client.snapshot()).leases
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: _is_empty(client), "the granted lease to be given back")


async def test_without_any_wake_up_a_waiter_is_granted_by_the_tick(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[Event] = []
    real = Store.read_events

    async def deaf(self: Store, after: str | None, block_s: float) -> tuple[str, list[Event]]:
        place, events = await real(self, after, block_s)
        dropped.extend(events)
        return place, []

    monkeypatch.setattr(Store, "read_events", deaf)
    held, queued = await client.acquire(ask()), await client.acquire(ask())
    await until(client._lookout.listening.is_set, "the client to listen")
    await client.release(held)
    assert (await asyncio.wait_for(client.wait_granted(queued), 5)).state is LeaseState.GRANTED
    await until(lambda: queued.id in {event.lease_id for event in dropped}, "the event that nobody heard")


async def test_close_gives_up_what_waits_and_leaves_no_task_and_no_descriptor(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="watcher") as watcher:
        await watcher.snapshot()
        before, tasks = descriptors(), asyncio.all_tasks()
        client = await Client.connect(ledger.settings, name="closing")
        await client.acquire(ask(60 * MIB))
        queued = await client.acquire(ask(60 * MIB))
        abandoned = asyncio.create_task(client.wait_granted(queued))
        await asyncio.gather(*(client.snapshot() for _ in range(20)))
        abandoned.cancel()
        await client.close()
        await client.close()
        assert not (await watcher.snapshot()).leases
        assert asyncio.all_tasks() <= tasks, asyncio.all_tasks() - tasks
        assert descriptors() <= before


async def test_a_closed_client_can_be_followed_by_another_loop(ledger: LedgerUnderTest) -> None:
    def in_a_loop_of_its_own() -> int:
        async def look() -> int:
            async with await Client.connect(ledger.settings, name="thread") as client:
                return len((await client.snapshot()).devices)

        return asyncio.run(look())

    assert await asyncio.to_thread(in_a_loop_of_its_own) == 2


async def test_processes_share_one_queue(ledger: LedgerUnderTest, client: Client) -> None:
    async with await Client.connect(ledger.settings, name="other") as other:
        held = await client.acquire(ask())
        queued = await other.acquire(ask(priority=50))
        first = await client.acquire(ask(priority=1))
        assert [lease.id for lease in (await other.snapshot()).leases] == [held.id, first.id, queued.id]
        await client.release(held)
        await client.release(await asyncio.wait_for(client.wait_granted(first), 5))
        assert (await asyncio.wait_for(other.wait_granted(queued), 5)).state is LeaseState.GRANTED


async def test_an_unanswered_acquire_is_given_up(ledger: LedgerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = replace(ledger.settings.timings, renew_deadline_s=1.2)
    async with await Client.connect(replace(ledger.settings, timings=hasty), name="test") as client:
        real = Store.call_once

        async def mute(self: Store, script: Script, *arguments: Any, **more: Any) -> Any:
            reply = await real(self, script, *arguments, **more)
            if script is Script.ACQUIRE:
                raise errors.StoreUnavailable("the reply was lost")
            return reply

        monkeypatch.setattr(Store, "call_once", mute)
        with pytest.raises(errors.StoreUnavailable):
            await client.acquire(ask())
        await until(lambda: _is_empty(client), "the lease that nobody knows of to be given back")


def _free(snapshot: Snapshot) -> dict[str, int]:
    return {use.device.id: use.free_bytes for use in snapshot.devices}


async def _is_empty(client: Client) -> bool:
    leases: tuple[Lease, ...] = (await client.snapshot()).leases
    return not leases


async def test_what_a_dead_holder_left_in_the_books_is_cleared_before_an_activation_fails(
    ledger: LedgerUnderTest, client: Client
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    who = ProcessIdentity.of(dead.pid)
    dead.communicate()
    lease = await client.acquire(ask(60 * MIB))
    with NodeLedger(ledger.state.ledger_path) as books:
        shares = {"sim0": 60 * MIB}
        books.admit(LedgerRow("dead", 1, 1, "job:dead", shares, who.pid, who.start_ticks, who.pid_namespace))
    assert (await client.activate(lease)).state is LeaseState.ACTIVE
    with NodeLedger(ledger.state.ledger_path) as books:
        assert [row.lease_id for row in books.rows()] == [lease.id]
    await client.release(lease)


async def test_an_activation_that_is_refused_leaves_no_row(ledger: LedgerUnderTest, client: Client) -> None:
    lease = await client.acquire(ask(60 * MIB))
    me = ProcessIdentity.current()
    with NodeLedger(ledger.state.ledger_path) as books:
        row = LedgerRow("other", 1, 1, "job:other", {"sim0": 60 * MIB}, me.pid, me.start_ticks, me.pid_namespace)
        books.admit(row)
        with pytest.raises(errors.ActivationRefused, match="job:other 60MiB"):
            await client.activate(lease)
        assert [found.lease_id for found in books.rows()] == ["other"]
        books.remove("other", 1, 1)
    await client.cancel(lease)


async def test_a_cancelled_activation_is_undone(
    ledger: LedgerUnderTest, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await client.acquire(ask(60 * MIB))
    entering, go_on = threading.Event(), threading.Event()
    real = Entries.enter

    def slow(self: Entries, *arguments: Any, **more: Any) -> None:
        entering.set()
        go_on.wait(20)
        real(self, *arguments, **more)

    monkeypatch.setattr(Entries, "enter", slow)
    activating = asyncio.create_task(client.activate(lease))
    await asyncio.to_thread(entering.wait, 20)
    activating.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await activating
    with NodeLedger(ledger.state.ledger_path) as books:
        assert books.rows() == []
    await client.cancel(lease)


async def test_a_store_that_is_away_does_not_keep_a_granted_lease_from_its_use(
    ledger: LedgerUnderTest, client: Client
) -> None:
    lease = await client.acquire(ask(60 * MIB))
    os.kill(ledger.store_pid, signal.SIGSTOP)
    try:
        activated = await client.activate(lease)
        assert activated.fence == lease.fence
        with NodeLedger(ledger.state.ledger_path) as books:
            assert [row.lease_id for row in books.rows()] == [lease.id]
    finally:
        os.kill(ledger.store_pid, signal.SIGCONT)
    await until(lambda: _is_active(client, lease), "the keeper to tell the store")
    await client.release(lease)


async def _is_active(client: Client, lease: Lease) -> bool:
    found = await client.find(lease.id)
    return found is not None and found.state is LeaseState.ACTIVE


async def test_growth_waits_for_rows_of_leases_that_are_over(ledger: LedgerUnderTest, client: Client) -> None:
    """The store frees a lease held by word at once; its row goes at the keeper's next beat."""
    lease = await client.activate(await client.acquire(ask(40 * MIB)))
    expired = await client.activate(await client.acquire(replace(ask(50 * MIB), ttl_s=60)), by_word=True)
    assert expired.fence is not None
    freed = {"id": expired.id, "epoch": expired.fence.epoch, "seq": expired.fence.seq}
    assert (await client._store.call(Script.RELEASE, freed))["state"] == "freed"
    grown = await client.resize(lease, [{"sim0": 90 * MIB}])
    with NodeLedger(ledger.state.ledger_path) as books:
        assert [row.shares for row in books.rows()] == [{"sim0": 90 * MIB}]
    await client.release(grown)


async def test_growth_that_the_books_refuse_changes_nothing(ledger: LedgerUnderTest, client: Client) -> None:
    lease = await client.activate(await client.acquire(ask(40 * MIB)))
    me = ProcessIdentity.current()
    with NodeLedger(ledger.state.ledger_path) as books:
        row = LedgerRow("other", 1, 1, "job:other", {"sim0": 50 * MIB}, me.pid, me.start_ticks, me.pid_namespace)
        books.admit(row)
        with pytest.raises(errors.LeaseRefused, match="60MiB"):
            await client.resize(lease, [{"sim0": 60 * MIB}])
        books.remove("other", 1, 1)
    await client.sweep()
    found = await client.find(lease.id)
    assert found is not None
    assert found.shares == {"sim0": 40 * MIB}
    grown = await client.resize(found, [{"sim0": 60 * MIB}], priority=3)
    assert (grown.shares, grown.priority) == ({"sim0": 60 * MIB}, 3)
    with NodeLedger(ledger.state.ledger_path) as books:
        (row,) = books.rows()
    assert row.shares == {"sim0": 60 * MIB}
    assert json.loads(row.terms)["priority"] == 3
    await client.release(grown)
