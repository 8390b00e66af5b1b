"""A store behind Sentinels: its master is killed, and a replica takes over, with or without the last writes.

Holders never notice, nothing is promised twice, and memory is granted again within 3 s of the promotion.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuboss.settings import Timings
from gpuboss.store import Store
from gpuboss.store_sentinels import _TIMEOUT_S
from tests.contract.stores import PASSWORD, Sentinels, Server, valkey9
from tests.integration.gpuboss.keeper_harness import LedgerUnderTest, ask, ledger_in
from tests.integration.gpuboss.loss_scene import BIG, at_work
from tests.support import until

pytestmark = pytest.mark.slow


@pytest.fixture
def sentinels(tmp_dir: Path) -> Iterator[Sentinels]:
    (tmp_dir / "store").mkdir()
    made = Sentinels(tmp_dir / "store", valkey9())
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def ledger(sentinels: Sentinels, tmp_dir: Path) -> Iterator[LedgerUnderTest]:
    (tmp_dir / "ledger").mkdir()
    under_test = ledger_in(tmp_dir / "ledger", store_url=sentinels.url)
    yield under_test
    under_test.clean_up()
    assert PASSWORD not in under_test.log


async def test_the_master_killed(ledger: LedgerUnderTest, sentinels: Sentinels) -> None:
    async with at_work(ledger) as scene:
        await scene.hold_more()
        master, replica = sentinels.master, sentinels.replica
        master.stop()
        scene.ask_all_the_time()
        await until(lambda: _role(replica) == "master", "the promotion")
        await scene.check(returned_s=time.monotonic())


async def test_a_fail_over_and_back(ledger: LedgerUnderTest, sentinels: Sentinels) -> None:
    """The first master returns as a replica, and is promoted again: by its run id it is another server."""
    async with at_work(ledger) as scene:
        first, second = sentinels.master, sentinels.replica
        first.stop()
        await until(lambda: _role(second) == "master", "the first promotion")
        await asyncio.to_thread(first.start)
        await until(lambda: _follows(sentinels, first), "the old master to follow", timeout_s=40)
        second.stop()
        scene.ask_all_the_time()
        await until(lambda: _role(first) == "master", "the second promotion", timeout_s=40)
        await scene.check(returned_s=time.monotonic())


async def test_a_replica_that_lost_the_last_writes_is_promoted(ledger: LedgerUnderTest, sentinels: Sentinels) -> None:
    async with at_work(ledger) as scene:
        master, replica = sentinels.master, sentinels.replica
        _cut_off(replica)
        recent = await scene.hold_more()
        assert _knows(master, recent.id)
        assert not _knows(replica, recent.id), "the replica heard of it"
        master.stop()
        scene.ask_all_the_time()
        tempted = asyncio.create_task(scene.client.acquire(ask(BIG, "sim1", priority=50)))
        await until(lambda: _role(replica) == "master", "the promotion")
        returned_s = time.monotonic()
        assert (await tempted).fence is None, "granted what the second holder uses"
        scene.waiters.append(tempted.result())
        await scene.check(returned_s)


async def test_a_replaced_master_is_left_before_it_knows(ledger: LedgerUnderTest, sentinels: Sentinels) -> None:
    """It lives on and takes writes, which its successor will never hear of."""
    async with at_work(ledger) as scene:
        old, new = sentinels.master, sentinels.replica
        with sentinels.sentinels[0].connect() as connection:
            connection.execute_command("SENTINEL", "FAILOVER", "leases")
        await until(lambda: _role(new) == "master", "the promotion")
        await until(lambda: _serves(new), "the client and the keeper to have left")
        assert _role(old) == "master", "it was told before we could leave by ourselves"
        scene.ask_all_the_time()
        await scene.check(returned_s=time.monotonic())


async def test_one_sentinel_is_enough_to_find_the_master(sentinels: Sentinels) -> None:
    for sentinel in sentinels.sentinels[:2]:
        os.kill(sentinel.pid, signal.SIGKILL)
    store = Store(sentinels.url, Timings())
    try:
        assert any("min-replicas-to-write" in warning for warning in await store.check_fitness())
    finally:
        await store.close()


async def test_a_sentinel_that_stands_still_delays_nobody(sentinels: Sentinels) -> None:
    os.kill(sentinels.sentinels[0].pid, signal.SIGSTOP)
    store = Store(sentinels.url, Timings())
    try:
        began_s = time.monotonic()
        await store.check_fitness()
        assert time.monotonic() - began_s < _TIMEOUT_S, "the two others agree: nobody waits for the third"
    finally:
        await store.close()


def _role(server: Server) -> str:
    with server.connect() as connection:
        return str(connection.info("replication")["role"])


def _serves(server: Server) -> bool:
    """Whether a keeper synced with it: the store lives in it now."""
    with server.connect() as connection:
        return bool(connection.hget("{gb:main}:meta", "run_id") == connection.info("server")["run_id"])


def _knows(server: Server, lease_id: str) -> bool:
    with server.connect() as connection:
        return any(lease_id in str(key) for key in connection.scan_iter("*:lease:*"))


def _cut_off(replica: Server) -> None:
    """It keeps asking its master for the latest, under a password that is wrong."""
    with replica.connect() as connection:
        connection.config_set("masterauth", "wrong")
        connection.execute_command("CLIENT", "KILL", "TYPE", "master")


def _follows(sentinels: Sentinels, server: Server) -> bool:
    """Whether it is an up-to-date replica, and the Sentinels know."""
    with server.connect() as connection:
        facts = connection.info("replication")
    return facts["role"] == "slave" and facts["master_link_status"] == "up" and sentinels.master is not server
