"""What a process costs its store: a few connections, and a few tries a second while it is away, however many ask."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpuboss import errors
from gpuboss.client import Client
from gpuboss.scripts import Script
from gpuboss.settings import Timings
from gpuboss.store import MISSED, Store
from gpuboss.store_link import MOST_LINKS, Link, LinkPool
from tests.contract.stores import Server, server, valkey9
from tests.integration.gpuboss.keeper_harness import ask, ledger_in
from tests.support import until

_TASKS = 100
_WATCHED_S = 3.0
_FIRST_TRIES = 12
"""The quick ones, before the pause between two tries is at its longest."""
_TRIES_PER_S = 6.0
"""A pause of 250 ms, less a fifth, is 5 per second."""


async def test_a_process_has_few_connections_however_many_tasks(tmp_dir: Path) -> None:
    with server(valkey9(), tmp_dir / "store") as one:
        store = Store(f"unix://{one.socket}", Timings())
        try:
            reading = asyncio.create_task(store.read_events("0-0", 5.0))
            most = 0
            for _ in range(5):
                asking = [asyncio.create_task(store.call_once(Script.TICK)) for _ in range(_TASKS)]
                await until(lambda: any(task.done() for task in asking), "the first answer")  # noqa: B023
                most = max(most, _connections(one))
                told = await asyncio.gather(*asking, return_exceptions=True)
                assert {type(answer) for answer in told} == {errors.NoEpoch}, "each had its answer"
            assert 2 <= most <= MOST_LINKS + 1
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        finally:
            await store.close()
        await until(lambda: _connections(one) == 0, "all to be closed")


@pytest.mark.parametrize("behaviour", ["refuses", "hangs up", "is mute"])
async def test_a_store_that_is_away_is_tried_a_few_times_a_second_whoever_asks(behaviour: str, tmp_dir: Path) -> None:
    async with _away(tmp_dir / "kv.sock", behaviour) as (url, tries):
        store = Store(url, Timings())
        counted = _count_tries(store) if tries is None else tries
        asking = [asyncio.create_task(_ask_on(store)) for _ in range(_TASKS)]
        reading = asyncio.create_task(_read_on(store))
        began_s, used_s = time.monotonic(), _cpu_s()
        await until(lambda: time.monotonic() - began_s > _WATCHED_S, "some seconds")
        elapsed_s = time.monotonic() - began_s
        for task in (*asking, reading):
            task.cancel()
        await asyncio.gather(*asking, reading, return_exceptions=True)
        await store.close()
        assert 1 <= counted() <= _FIRST_TRIES + _TRIES_PER_S * elapsed_s
        assert _cpu_s() - used_s < 0.7 * elapsed_s, "it spins"


async def test_a_store_that_answers_and_does_nothing_is_asked_a_few_times_a_second(tmp_dir: Path) -> None:
    (tmp_dir / "ledger").mkdir()
    with server(valkey9(), tmp_dir / "store") as one, one.connect() as connection:
        ledger = ledger_in(tmp_dir / "ledger", store_url=f"unix://{one.socket}")
        async with await Client.connect(ledger.settings, name="test") as client:
            connection.config_set("maxmemory", "1")
            asking = [asyncio.create_task(_acquire_on(client)) for _ in range(_TASKS)]
            before, began_s = _scripts_run(one), time.monotonic()
            await until(lambda: time.monotonic() - began_s > _WATCHED_S, "some seconds")
            tries, elapsed_s = _scripts_run(one) - before, time.monotonic() - began_s
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            connection.config_set("maxmemory", "0")
        ledger.clean_up()
        # Two processes, this one and the keeper, which also ticks.
        assert 1 <= tries <= 2 * (_FIRST_TRIES + _TRIES_PER_S * elapsed_s)


async def test_all_that_waited_go_on_when_the_store_is_back(tmp_dir: Path) -> None:
    with server(valkey9(), tmp_dir / "store") as one:
        one.stop()
        store = Store(f"unix://{one.socket}", Timings())
        asking = [asyncio.create_task(_until_it_answers(store)) for _ in range(_TASKS)]
        await until(lambda: store._links._pace._failures > 8, "the longest pauses")
        await asyncio.to_thread(one.start)
        returned_s = time.monotonic()
        async with asyncio.timeout(10):
            await asyncio.gather(*asking)
        assert time.monotonic() - returned_s < 5, "not one after the other"
        assert store.up
        await store.close()


async def test_a_call_is_over_when_its_time_is_and_says_where_it_asked(tmp_dir: Path) -> None:
    async with _away(tmp_dir / "kv.sock", "is mute") as (url, _):
        store = Store(url, Timings())
        began_s = time.monotonic()
        with pytest.raises(errors.StoreUnavailable, match=f"{url} does not answer: no answer within"):
            await store.call(Script.TICK, within_s=1.0)
        assert time.monotonic() - began_s < 3, "not as long as calls have by themselves"
        assert not store.up
        await store.close()


async def test_a_connection_to_a_server_that_was_lost_meanwhile_is_not_used_again(tmp_dir: Path) -> None:
    """It may still answer, as the master of yesterday."""
    with server(valkey9(), tmp_dir / "store") as one:
        links = LinkPool(f"unix://{one.socket}")
        async with links.link() as kept:
            with pytest.raises(ConnectionError):
                async with links.link() as lost:
                    raise ConnectionError("lost")
            assert not links.is_current(kept)
            assert await kept.ask("PING") == "PONG"
        async with links.link() as fresh:
            assert fresh not in (kept, lost)
            await until(lambda: _connections(one) == 1, "the two old ones to be closed")
        await links.close()


async def test_a_connection_whose_command_was_cancelled_is_not_used_again(tmp_dir: Path) -> None:
    """Its answer is on its way still; and redis-py would reconnect it, to whatever server is there by then."""
    used: list[Link] = []

    async def ask() -> None:
        async with links.link() as link:
            used.append(link)
            await link.ask("BLPOP", "{gb:main}:nothing", 10, within_s=10)

    with server(valkey9(), tmp_dir / "store") as one:
        links = LinkPool(f"unix://{one.socket}")
        for _ in range(3):
            asking = asyncio.create_task(ask())
            await until(lambda: _is_blocked(one), "the command to be on its way")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            async with links.link() as next_one:
                assert next_one not in used
                assert await next_one.ask("PING") == "PONG"
        await links.close()


async def test_a_reader_that_was_overtaken_by_the_streams_end_is_told(tmp_dir: Path) -> None:
    with server(valkey9(), tmp_dir / "store") as one, one.connect() as connection:
        store, stream = Store(f"unix://{one.socket}", Timings()), "{gb:main}:events"
        first = connection.xadd(stream, {"what": "granted", "lease": "a", "epoch": "7", "seq": "1", "node": "n"})
        place, events = await store.read_events("0-0", 1.0)
        (event,) = events
        assert (place, event.what, event.lease_id, event.epoch, event.node) == (first, "granted", "a", 7, "n")
        assert event.at_ms == int(first.partition("-")[0])
        _, nothing = await store.read_events(place, 0.001)
        assert nothing == []
        await store.close()
        for _ in range(3):
            connection.xadd(stream, {"what": "freed", "lease": "a"}, maxlen=2, approximate=False)
        place, events = await store.read_events(place, 1.0)
        assert [event.what for event in events] == [MISSED, "freed", "freed"]
        await store.close()
        connection.xadd(stream, {"what": "freed", "lease": "b"})
        _, events = await store.read_events(place, 1.0)
        assert [event.lease_id for event in events] == ["b"], "nothing was missed"
        await store.close()


@contextlib.asynccontextmanager
async def _away(socket: Path, behaviour: str) -> AsyncIterator[tuple[str, Callable[[], int] | None]]:
    """A store's address where nobody does his work, and how often somebody knocked, where the socket can tell."""
    if behaviour == "refuses":
        yield f"unix://{socket}", None
        return
    knocks = 0
    mute: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        if behaviour == "is mute":
            mute.append(writer)
        else:
            writer.close()

    async with await asyncio.start_unix_server(answer, str(socket)):
        yield f"unix://{socket}", lambda: knocks
        for writer in mute:
            writer.close()


def _count_tries(store: Store) -> Callable[[], int]:
    tries = 0
    candidates = store._links._route.candidates

    async def counting() -> object:
        nonlocal tries
        tries += 1
        return await candidates()

    store._links._route.candidates = counting  # type: ignore[method-assign]
    return lambda: tries


async def _ask_on(store: Store) -> None:
    while True:
        with contextlib.suppress(errors.StoreUnavailable):
            await store.call(Script.TICK)
        await asyncio.sleep(0)  # whatever the store does, this test goes on


async def _acquire_on(client: Client) -> None:
    while True:
        with contextlib.suppress(errors.StoreUnavailable):
            await client.acquire(ask())


async def _read_on(store: Store) -> None:
    while True:
        with contextlib.suppress(errors.StoreUnavailable):
            await store.read_events(None, 0)
        await asyncio.sleep(0)


async def _until_it_answers(store: Store) -> None:
    while True:
        try:
            await store.call_once(Script.TICK)
        except errors.NoEpoch:  # no node has synced with it
            return
        except errors.StoreUnavailable:
            continue


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _connections(one: Server) -> int:
    """Besides the one that asks."""
    with one.connect() as connection:
        return len(connection.client_list()) - 1


def _is_blocked(one: Server) -> bool:
    with one.connect() as connection:
        return bool(connection.info("clients")["blocked_clients"])


def _scripts_run(one: Server) -> int:
    with one.connect() as connection:
        told = connection.info("commandstats")
    return sum(told[name][how] for name in told if "eval" in name for how in ("calls", "rejected_calls"))
