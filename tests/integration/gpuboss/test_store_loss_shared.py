"""A store that others run goes away, stands still, forgets, goes back in time, or answers and does nothing.

Each time: holders never notice, nothing is promised twice, and memory is granted again within 3 s of its return. With
MODEL_BOSS_LONG=1 it is gone for 60 s and stands still for 20; otherwise a little longer than all deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.contract.stores import Server, redis7, server, valkey9
from tests.integration.gpuboss.keeper_harness import LedgerUnderTest, ask, ledger_in
from tests.integration.gpuboss.loss_scene import BIG, HANG_S, LONG, OUTAGE_S, at_work
from tests.support import until, wait_until

_TROUBLE_S = 20.0 if LONG else 1.5
"""How long a store answers and does nothing."""


@pytest.fixture(params=["valkey9", "redis7"])
def store(request: pytest.FixtureRequest, tmp_dir: Path) -> Iterator[Server]:
    program = {"valkey9": valkey9, "redis7": redis7}[request.param]()
    with server(program, tmp_dir / "store") as one:
        yield one


@pytest.fixture
def ledger(store: Server, tmp_dir: Path) -> Iterator[LedgerUnderTest]:
    (tmp_dir / "ledger").mkdir()
    under_test = ledger_in(tmp_dir / "ledger", store_url=f"redis://127.0.0.1:{store.port}")
    yield under_test
    under_test.clean_up()


@pytest.mark.slow
@pytest.mark.parametrize("store", ["valkey9", "redis7"] if LONG else ["valkey9"], indirect=True)
async def test_stopped(ledger: LedgerUnderTest, store: Server) -> None:
    async with at_work(ledger) as scene:
        store.stop()
        scene.ask_all_the_time()
        await scene.last(OUTAGE_S)
        await asyncio.to_thread(store.start)
        await scene.check(returned_s=time.monotonic())


@pytest.mark.slow
@pytest.mark.parametrize("store", ["valkey9", "redis7"] if LONG else ["valkey9"], indirect=True)
async def test_standing_still(ledger: LedgerUnderTest, store: Server) -> None:
    async with at_work(ledger) as scene:
        assert store.process is not None
        store.process.send_signal(signal.SIGSTOP)
        scene.ask_all_the_time()
        try:
            await scene.last(HANG_S)
        finally:
            store.process.send_signal(signal.SIGCONT)
        await scene.check(returned_s=time.monotonic())


async def test_wiped(ledger: LedgerUnderTest, store: Server) -> None:
    async with at_work(ledger) as scene:
        await scene.hold_more()
        _tell(store, "FLUSHALL")
        returned_s = time.monotonic()
        scene.ask_all_the_time()
        await scene.check(returned_s)


async def test_wiped_while_down(ledger: LedgerUnderTest, store: Server) -> None:
    async with at_work(ledger) as scene:
        await scene.hold_more()
        store.stop()
        scene.ask_all_the_time()
        shutil.rmtree(store.directory / "appendonlydir")
        await asyncio.to_thread(store.start)
        await scene.check(returned_s=time.monotonic())


async def test_rolled_back(ledger: LedgerUnderTest, store: Server) -> None:
    """To before a lease that runs: what it uses is not granted again, though the store never heard of it."""
    async with at_work(ledger) as scene:
        files, older = store.directory / "appendonlydir", store.directory / "older"
        shutil.copytree(files, older)
        recent = await scene.hold_more()
        known = _leases(store)
        store.stop()
        scene.ask_all_the_time()
        tempted = asyncio.create_task(scene.client.acquire(ask(BIG, "sim1", priority=50)))
        shutil.rmtree(files)
        older.rename(files)
        await asyncio.to_thread(store.start)
        returned_s = time.monotonic()
        assert any(recent.id in key for key in known)
        assert (await tempted).fence is None, "granted what the second holder uses"
        scene.waiters.append(tempted.result())
        await scene.check(returned_s)


async def test_clients_killed(ledger: LedgerUnderTest, store: Server) -> None:
    async with at_work(ledger) as scene:
        for _ in range(5):
            await until(lambda: _kill_clients(store), "one to be there, and killed")
        scene.ask_all_the_time()
        await scene.check(returned_s=time.monotonic())


async def test_script_cache_flushed(ledger: LedgerUnderTest, store: Server) -> None:
    async with at_work(ledger) as scene:
        for _ in range(5):
            _tell(store, "SCRIPT", "FLUSH", "SYNC")
            await until(lambda: _scripts(store) > 0, "scripts that were sent again")
        scene.ask_all_the_time()
        await scene.check(returned_s=time.monotonic())


_TROUBLES = {"OOM": "used memory > 'maxmemory'", "MISCONF": "MISCONF", "BUSY": "BUSY"}
"""What each is called in the store's answers, as redis-py passes them on."""


@pytest.mark.parametrize("trouble", _TROUBLES)
async def test_answering_and_doing_nothing(ledger: LedgerUnderTest, store: Server, trouble: str) -> None:
    async with at_work(ledger) as scene:
        with {"OOM": _out_of_memory, "MISCONF": _failing_disk, "BUSY": _busy}[trouble](store):
            scene.ask_all_the_time()
            await scene.last(_TROUBLE_S)
            await until(lambda: _TROUBLES[trouble] in ledger.log, f"the keeper to say {trouble}")
        await scene.check(returned_s=time.monotonic())


@contextlib.contextmanager
def _out_of_memory(store: Server) -> Iterator[None]:
    _tell(store, "CONFIG", "SET", "maxmemory", "1")
    try:
        yield
    finally:
        _tell(store, "CONFIG", "SET", "maxmemory", "0")


@contextlib.contextmanager
def _failing_disk(store: Server) -> Iterator[None]:
    """Where its snapshot should go is a directory."""
    (store.directory / "dump.rdb").mkdir()
    _tell(store, "CONFIG", "SET", "save", "3600 1000000")
    _tell(store, "BGSAVE")
    with store.connect() as connection:
        wait_until(lambda: connection.info("persistence")["rdb_last_bgsave_status"] == "err", "the snapshot to fail")
    try:
        yield
    finally:
        _tell(store, "CONFIG", "SET", "stop-writes-on-bgsave-error", "no")


@contextlib.contextmanager
def _busy(store: Server) -> Iterator[None]:
    """Somebody's script does not end."""
    _tell(store, "CONFIG", "SET", "busy-reply-threshold", "50")

    def run() -> None:
        with contextlib.suppress(redis.exceptions.RedisError), store.connect() as connection:
            connection.eval("while true do end", 0)

    def is_busy() -> bool:
        try:
            _tell(store, "PING")
        except redis.exceptions.ResponseError as error:
            return str(error).startswith("BUSY")
        return False

    endless = threading.Thread(target=run)
    endless.start()
    wait_until(is_busy, "the store to be busy")
    try:
        yield
    finally:
        _tell(store, "SCRIPT", "KILL")
        endless.join(20)


def _tell(store: Server, *command: str) -> str:
    with store.connect() as connection:
        return str(connection.execute_command(*command))


def _kill_clients(store: Server) -> int:
    return int(_tell(store, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))


def _leases(store: Server) -> list[str]:
    with store.connect() as connection:
        return [str(key) for key in connection.scan_iter("*:lease:*")]


def _scripts(store: Server) -> int:
    with store.connect() as connection:
        return int(connection.info("memory")["number_of_cached_scripts"])
