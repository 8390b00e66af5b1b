"""Looking and listening: `gpuboss.devices`, `snapshot` and `watch`, and what a client hears when much is missed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import gpuboss
from gpuboss import session
from gpuboss.client import Client
from gpuboss.settings import LedgerSettings
from gpuboss.store import Event, Store
from gpuboss.watching import LedgerEvent
from tests.integration.gpuboss.keeper_harness import MIB, LedgerUnderTest, ask
from tests.support import until, wait_until


@pytest.fixture
def settings(ledger: LedgerUnderTest) -> Iterator[LedgerSettings]:
    """Of the test's ledger; this process's session with it is closed afterwards."""
    yield ledger.settings
    session.close_all()


@pytest.fixture
async def client(ledger: LedgerUnderTest) -> AsyncIterator[Client]:
    async with await Client.connect(ledger.settings, name="test") as connected:
        yield connected


def test_devices_and_snapshot_show_what_is_held(settings: LedgerSettings) -> None:
    with gpuboss.hold("60MiB", devices=["sim1"], job="a", settings=settings) as lease:
        uses = gpuboss.devices(settings)
        assert [(use.device.id, use.claimed_bytes, use.free_bytes) for use in uses] == [
            ("sim0", 0, 100 * MIB),
            ("sim1", 60 * MIB, 40 * MIB),
        ]
        snapshot = gpuboss.snapshot(settings)
        assert snapshot.devices == uses
        assert [(found.id, found.holder) for found in snapshot.leases] == [(lease.id, "job:a")]


def test_the_environment_names_the_ledger(ledger: LedgerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUBOSS_STATE_DIR", str(ledger.directory))
    monkeypatch.setenv("GPUBOSS_DEVICES", "sim0=1GiB")
    try:
        with gpuboss.hold("1GiB", job="a"):
            assert [use.device.id for use in gpuboss.devices()] == ["sim0"]
            assert not gpuboss.devices()[0].free_bytes
        monkeypatch.setenv("GPUBOSS_DEVICES", "sim0=2GiB")
        with pytest.raises(gpuboss.LedgerConflict, match="sim0=2GiB"):
            gpuboss.devices()
    finally:
        session.close_all()


def test_a_program_hears_what_happens_from_now_on(settings: LedgerSettings) -> None:
    with gpuboss.hold("1MiB", job="before", settings=settings):
        pass
    heard: list[LedgerEvent] = []
    with gpuboss.watch(settings) as events:
        with gpuboss.hold("60MiB", job="after", settings=settings) as lease:
            pass
        for event in events:
            heard.append(event)
            if event.what == "freed":
                break
    assert [(event.what, event.holder) for event in heard if event.what != "active"] == [
        ("granted", "job:after"),
        ("freed", "job:after"),
    ]
    assert {event.lease_id for event in heard} == {lease.id}
    assert list(events) == [], "closed"


def test_a_watch_can_be_closed_by_another_thread(settings: LedgerSettings) -> None:
    events = gpuboss.watch(settings)
    ended = threading.Event()

    def read() -> None:
        for _ in events:
            pass
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    events.close()
    assert ended.wait(10)
    reader.join()


def test_a_watch_that_is_forgotten_is_not_heard_for(settings: LedgerSettings) -> None:
    one = session.session_for(settings)
    events = gpuboss.watch(settings)
    wait_until(lambda: one.client._lookout._watches, "the watch")
    del events
    wait_until(lambda: not one.client._lookout._watches, "nobody to be told any more")


async def test_nobody_listens_when_nobody_wants_to_hear(client: Client) -> None:
    lookout = client._lookout
    lease = await client.acquire(ask())
    assert not lookout.listening.is_set()
    waiting = asyncio.create_task(client.wait_granted(await client.acquire(ask())))
    await until(lookout.listening.is_set, "a waiter to be listened for")
    await client.release(lease)
    async with asyncio.timeout(5):
        await client.release(await waiting)
    await until(lambda: not lookout.listening.is_set(), "peace")
    async with client.watch():
        assert lookout.listening.is_set()
    await until(lambda: not lookout.listening.is_set(), "peace")
    assert not lookout._watches


async def test_a_new_life_of_the_store_is_missed_nothing_else_is(ledger: LedgerUnderTest, client: Client) -> None:
    async with client.watch() as events:
        first = await client.acquire(ask(10 * MIB))
        assert (await anext(events)).what == "granted"
        os.kill(ledger.store_pid, signal.SIGKILL)
        heard = []
        async with asyncio.timeout(20):
            while not heard or heard[-1] != "missed":
                heard.append((await anext(events)).what)
        second = await client.acquire(ask(20 * MIB))
        async with asyncio.timeout(20):
            while True:
                event = await anext(events)
                if (event.what, event.lease_id) == ("granted", second.id):
                    break
        await client.release(first)
        await client.release(second)


async def test_a_watcher_that_sleeps_is_told_that_it_missed_something(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuboss.watching._MOST_UNREAD", 5)
    async with client.watch() as events:
        for number in range(8):
            events.tell(LedgerEvent("granted", str(number), "job:a", "", 1))
        heard = [await anext(events) for _ in range(5)]
        assert [event.lease_id for event in heard] == ["0", "1", "2", "3", "4"]
        events.tell(LedgerEvent("freed", "9", "job:a", "", 1))
        assert [(await anext(events)).what for _ in range(2)] == ["missed", "freed"]


async def test_a_notice_is_told_by_the_look_when_no_event_comes(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.read_events
    dropped: list[Event] = []

    async def deaf(self: Store, after: str | None, block_s: float) -> tuple[str, list[Event]]:
        place, events = await real(self, after, block_s)
        dropped.extend(events)
        return place, []

    monkeypatch.setattr(Store, "read_events", deaf)
    lease = await client.activate(await client.acquire(ask()))
    told: list[str | None] = []
    client.on_notice(lease, lambda found: told.append(found.notice.holder if found.notice else None))
    await until(client._lookout.listening.is_set, "the client to listen")
    await client.preempt(lease.id, by="a person")
    await until(lambda: told == ["a person"], "the notice")
    await until(lambda: bool(dropped), "the event that nobody heard")
    await client.release(lease)


async def test_a_callback_that_fails_does_not_deafen_the_others(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("ours")

    told: list[str] = []
    first, second = await client.acquire(ask(10 * MIB)), await client.acquire(ask(10 * MIB))
    client.on_notice(first, fail)
    client.on_notice(second, lambda lease: told.append(lease.id))
    await client.preempt(first.id, by="a person")
    await client.preempt(second.id, by="a person")
    await until(lambda: told == [second.id], "the other's notice")
    assert "a callback for lease" in caplog.text
    for lease in (first, second):
        await client.release(lease)
