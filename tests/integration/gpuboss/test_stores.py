"""Every kind of store with a real keeper, client and holder; what a store must be; what is told of it, and what not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from gpuboss import errors
from gpuboss.client import Client
from gpuboss.leases import LeaseState
from gpuboss.scripts import Script
from gpuboss.settings import Timings
from gpuboss.store import Store
from tests.contract.stores import (
    PASSWORD,
    STORES,
    Server,
    acl_lines,
    certificates,
    free_port,
    redis7,
    server,
    valkey9,
)
from tests.integration.gpuboss.keeper_harness import MIB, LedgerUnderTest, ask, ledger_in
from tests.support import until

SECRET = quote(PASSWORD, safe="")


@pytest.fixture(params=list(STORES))
def any_ledger(request: pytest.FixtureRequest, tmp_dir: Path) -> Iterator[LedgerUnderTest]:
    """A ledger in each kind of store."""
    for name in ("store", "ledger"):
        (tmp_dir / name).mkdir()
    with STORES[request.param](tmp_dir / "store") as url:
        under_test = ledger_in(tmp_dir / "ledger", store_url=url or None)
        yield under_test
        under_test.clean_up()
        for told in (under_test.log, repr(under_test)):
            assert PASSWORD not in told
            assert SECRET not in told


async def test_leases_live_in_every_kind_of_store(any_ledger: LedgerUnderTest) -> None:
    async with await Client.connect(any_ledger.settings, name="test") as client:
        held = await client.acquire(ask(60 * MIB))
        holder = await asyncio.to_thread(any_ledger.run_holder, held)
        await until(lambda: _shows(client, held.id, LeaseState.ACTIVE), "the lease to be active")
        waiting = await client.acquire(ask(60 * MIB))
        assert (waiting.state, waiting.position) == (LeaseState.QUEUED, 1)
        assert await client.audit() == []
        await asyncio.to_thread(holder.end)
        await client.release(held)
        async with asyncio.timeout(10):
            granted = await client.wait_granted(waiting)
        assert granted.fence is not None
        assert held.fence is not None
        assert (granted.fence.epoch, granted.fence.seq) > (held.fence.epoch, held.fence.seq)
        await client.release(granted)
        assert (await client.snapshot()).leases == ()


@pytest.mark.parametrize(("source", "program"), [("private-path", "redis"), ("private-wheel", "valkey")])
async def test_the_private_store_is_the_server_on_the_path_or_the_wheels(
    source: str, program: str, tmp_dir: Path
) -> None:
    ledger = _ledger(tmp_dir, None)
    with STORES[source](tmp_dir / "source"):
        async with await Client.connect(ledger.settings, name="test"):
            assert program in await asyncio.to_thread(_program, ledger.store_pid)
        ledger.clean_up()


async def test_another_server_takes_over_the_private_stores_files_or_begins_empty(tmp_dir: Path) -> None:
    """Redis 7 cannot read what Valkey 9 wrote. What runs does not depend on it."""
    ledger = _ledger(tmp_dir, None)
    try:
        for number, source in enumerate(("private-path", "private-wheel", "private-path")):
            with STORES[source](tmp_dir / f"source{number}"):
                async with await Client.connect(ledger.settings, name="test") as client:
                    held = await client.acquire(ask(60 * MIB))
                    assert held.state is LeaseState.GRANTED
                    with redis.Redis(unix_socket_path=str(ledger.state.socket_path("store"))) as connection:
                        connection.bgrewriteaof()  # the whole of it in the server's own format
                        await until(lambda: not _is_rewriting(connection), "the rewriting")
                    await client.release(held)
                await until(lambda: not ledger.processes(), "keeper and store to leave")
    finally:
        ledger.clean_up()
    assert [path.name for path in ledger.state.root.glob("store-unreadable-*")] != []
    assert "set aside" in ledger.log


_POLICIES = ("allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-lru", "volatile-lfu", "volatile-random")


@pytest.mark.parametrize("policy", [*_POLICIES, "volatile-ttl"])
async def test_a_store_that_drops_keys_is_refused(policy: str, tmp_dir: Path) -> None:
    with server(valkey9(), tmp_dir / "store", "--maxmemory-policy", policy) as one:
        store = Store(_url(one), Timings())
        with pytest.raises(errors.StoreUnfit, match=f"{policy}.*noeviction"):
            await store.check_fitness()
        await store.close()


async def test_no_ledger_starts_on_a_store_that_drops_keys(tmp_dir: Path) -> None:
    with server(valkey9(), tmp_dir / "store", "--maxmemory-policy", "allkeys-lru") as one:
        ledger = _ledger(tmp_dir, _url(one))
        with pytest.raises(errors.StoreUnfit, match="maxmemory-policy noeviction"):
            await Client.connect(ledger.settings, name="test")
        ledger.clean_up()


async def test_a_store_without_a_file_is_warned_of_once(tmp_dir: Path) -> None:
    with server(valkey9(), tmp_dir / "store", "--appendonly", "no") as one:
        ledger = _ledger(tmp_dir, _url(one))
        for name in ("first", "second"):
            async with await Client.connect(ledger.settings, name=name) as client:
                assert (await client.acquire(ask())).state is LeaseState.GRANTED
        assert ledger.log.count("WARNING gpuboss.keeper: the lease store keeps no append-only file") == 1
        ledger.clean_up()
        store = Store(_url(one), Timings())
        (warning,) = await store.check_fitness()
        assert store.warnings == (warning,)
        assert await store.check_fitness() == [], "said twice"
        await store.close()


async def test_a_master_without_a_file_is_told_what_it_does_to_its_replicas(tmp_dir: Path) -> None:
    quick = "repl-diskless-sync-delay 0"
    with (
        server(valkey9(), tmp_dir / "store", "--appendonly", "no", lines=[quick]) as one,
        server(valkey9(), tmp_dir / "replica", lines=[f"replicaof 127.0.0.1 {one.port}"]) as other,
    ):
        await until(lambda: _link_is_up(other), "the replica")
        store, replica = Store(_url(one), Timings()), Store(_url(other), Timings())
        assert "empties its replicas" in (await store.check_fitness())[0]
        with pytest.raises(errors.StoreUnavailable, match="it is a replica, and takes no writes"):
            await replica.check_fitness()
        await store.close()
        await replica.close()


async def test_a_store_in_good_order_is_not_warned_of(tmp_dir: Path) -> None:
    for name, program in (("valkey", valkey9()), ("redis", redis7())):
        with server(program, tmp_dir / name) as one:
            store = Store(_url(one), Timings())
            assert await store.check_fitness() == []
            await store.close()


async def test_a_wrong_password_is_said_and_never_shown(tmp_dir: Path) -> None:
    lines = acl_lines("boss", "right")
    with server(valkey9(), tmp_dir / "store", lines=lines, user="boss", password="right") as one:
        ledger = _ledger(tmp_dir, f"redis://boss:{SECRET}@127.0.0.1:{one.port}")
        with pytest.raises(errors.StoreUnavailable, match="refuses user or password") as refused:
            await Client.connect(ledger.settings, name="test")
        assert f"redis://127.0.0.1:{one.port}" in refused.value.message
        ledger.clean_up()
        for told in (refused.value.message, ledger.log):
            assert PASSWORD not in told
            assert SECRET not in told


async def test_a_user_who_may_not_run_scripts_is_told_so(tmp_dir: Path) -> None:
    lines = ["user default off", f"user boss on >{PASSWORD} ~* +@all -@scripting"]
    with server(valkey9(), tmp_dir / "store", lines=lines, user="boss", password=PASSWORD) as one:
        store = Store(f"redis://boss:{SECRET}@127.0.0.1:{one.port}", Timings())
        with pytest.raises(errors.StoreUnfit, match="evalsha") as refused:
            await store.call(Script.TICK)
        assert PASSWORD not in refused.value.message
        await store.close()


@pytest.mark.parametrize(
    ("query", "says"),
    [("", "certificate verify failed"), ("ssl_ca_certs={authority}", "alert|closed|reset|Connection")],
    ids=["an authority we do not know", "no certificate of our own"],
)
async def test_tls_that_cannot_be_trusted_is_refused(query: str, says: str, tmp_dir: Path) -> None:
    made, port = certificates(tmp_dir), free_port()
    lines = [f"tls-port {port}", f"tls-cert-file {made.server}", f"tls-key-file {made.server}"]
    with server(redis7(), tmp_dir / "store", lines=[*lines, f"tls-ca-cert-file {made.authority}"]):
        store = Store(f"rediss://localhost:{port}?{query.format(authority=made.authority)}", Timings())
        with pytest.raises(errors.StoreUnavailable, match=re.compile(says, re.IGNORECASE)):
            await store.check_fitness()
        await store.close()


async def test_sentinels_that_know_nothing_or_nobody_are_said(tmp_dir: Path) -> None:
    with server(valkey9(), tmp_dir / "store", lines=[f'requirepass "{PASSWORD}"'], password=PASSWORD) as one:
        nobody = free_port()
        url = f"redis+sentinel://127.0.0.1:{one.port},127.0.0.1:{nobody}/leases?sentinel_password=wrong-{SECRET}"
        store = Store(url, Timings())
        with pytest.raises(errors.StoreUnavailable) as refused:
            await store.check_fitness()
        for words in (
            "no Sentinel tells where 'leases' is",
            f"127.0.0.1:{one.port}: ",
            f"127.0.0.1:{nobody}: ",
            "sentinel_password",
        ):
            assert words in refused.value.message
        assert PASSWORD not in refused.value.message
        await store.close()


async def test_what_is_no_store_is_not_taken_for_one(tmp_dir: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    web = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with web:
        store = Store(f"redis://127.0.0.1:{web.sockets[0].getsockname()[1]}", Timings())
        with pytest.raises(errors.StoreUnavailable, match="does not answer"):
            await store.check_fitness()
        await store.close()


def _ledger(tmp_dir: Path, url: str | None) -> LedgerUnderTest:
    (tmp_dir / "ledger").mkdir()
    return ledger_in(tmp_dir / "ledger", store_url=url)


def _url(one: Server) -> str:
    return f"unix://{one.socket}"


def _program(pid: int) -> str:
    return Path(f"/proc/{pid}/exe").readlink().name


def _is_rewriting(connection: redis.Redis) -> bool:
    facts = connection.info("persistence")
    return bool(facts["aof_rewrite_in_progress"] or facts["aof_rewrite_scheduled"])


def _link_is_up(replica: Server) -> bool:
    with replica.connect() as connection:
        return bool(connection.info("replication")["master_link_status"] == "up")


async def _shows(client: Client, lease_id: str, state: LeaseState) -> bool:
    return any(lease.id == lease_id and lease.state is state for lease in (await client.snapshot()).leases)
