"""The keeper as a process: how it comes, whom it lets in, whom it buries, what it survives, when it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from gpuboss import errors, host_lock
from gpuboss.client import Client
from gpuboss.devices import Device, DeviceKind, parse_devices
from gpuboss.host_lock import HostLock
from gpuboss.identity import ProcessIdentity
from gpuboss.keeper import Keeper
from gpuboss.leases import HolderKind, LeaseRequest, LeaseState, new_request_id
from gpuboss.node_ledger import LedgerRow, NodeLedger
from gpuboss.settings import LedgerSettings
from gpuboss.state_dir import StateDir
from tests.integration.gpuboss.keeper_harness import MIB, LedgerUnderTest, ask, gone, ledger_in, read_proc, told_by
from tests.support import until


async def test_the_first_client_starts_keeper_and_store_and_the_last_lets_them_go(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="first") as client:
        assert [device.id for device in client.devices] == ["sim0", "sim1"]
        keeper, store = ledger.keeper_pid, ledger.store_pid
        assert os.getsid(keeper) != os.getsid(0)
        assert read_proc(store, "stat").rpartition(b")")[2].split()[1] == str(keeper).encode()
    await until(lambda: gone(keeper) and gone(store), "keeper and store to leave")
    assert not ledger.state.socket_path("keeper").exists()


async def test_of_many_starters_at_once_one_keeper_comes(ledger: LedgerUnderTest) -> None:
    users = [ledger.run_user() for _ in range(4)]
    keepers = {told_by(user)["keeper"] for user in users}
    assert keepers == {ledger.keeper_pid}
    assert ledger.log.count("ready with") == 1


async def test_a_keeper_gets_neither_its_starters_secrets_nor_its_lease(
    ledger: LedgerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_BOSS_API_KEY", "secret")
    monkeypatch.setenv("GPUBOSS_LEASE", "abc")
    async with await Client.connect(ledger.settings, name="under a lease"):
        for pid in (ledger.keeper_pid, ledger.store_pid):
            environment = read_proc(pid, "environ")
            assert b"secret" not in environment
            assert b"GPUBOSS_LEASE" not in environment


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"devices": parse_devices("sim0=50MiB")}, "sim0=50MiB"),
        ({"store_url": "redis://:hidden@somewhere/0"}, "redis://somewhere/0"),
    ],
)
async def test_who_comes_with_something_else_is_refused_with_both_values(
    ledger: LedgerUnderTest, change: dict[str, object], named: str
) -> None:
    async with await Client.connect(ledger.settings, name="first"):
        with pytest.raises(errors.LedgerConflict) as refused:
            await Client.connect(replace(ledger.settings, **change), name="other")
        for word in (named, "sim0=100MiB,sim1=100MiB", "a private store", str(ledger.directory)):
            assert word in refused.value.message
        assert "hidden" not in refused.value.message


async def test_who_leaves_it_open_takes_what_the_ledger_has(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="first") as first:
        nothing_said = LedgerSettings(state_dir=ledger.directory)
        async with await Client.connect(nothing_said, name="second") as second:
            assert second.devices == first.devices


async def test_a_keeper_nobody_needs_makes_room_for_other_devices(ledger: LedgerUnderTest) -> None:
    lingering = replace(ledger.settings, timings=replace(ledger.settings.timings, linger_s=60.0))
    async with await Client.connect(lingering, name="first"):
        first_keeper = ledger.keeper_pid
    other = replace(ledger.settings, devices=parse_devices("sim7=1GiB"))
    async with await Client.connect(other, name="second") as second:
        assert [device.id for device in second.devices] == ["sim7"]
        assert ledger.keeper_pid != first_keeper


async def test_a_killed_users_leases_do_not_stand_in_the_way_of_other_devices(ledger: LedgerUnderTest) -> None:
    lingering = replace(ledger.settings, timings=replace(ledger.settings.timings, linger_s=60.0))
    user = ledger.run_user([{"sim0": 60 * MIB}], settings=lingering)
    assert told_by(user)["states"] == ["granted"]
    user.kill()
    user.wait()
    other = replace(ledger.settings, devices=parse_devices("sim7=1GiB"))
    async with await Client.connect(other, name="second") as second:
        assert [device.id for device in second.devices] == ["sim7"]


async def test_a_keeper_that_cannot_start_tells_why(ledger: LedgerUnderTest, valkey_url: str, valkey: object) -> None:
    evicting = valkey
    evicting.config_set("maxmemory-policy", "allkeys-lru")  # type: ignore[attr-defined]
    try:
        with pytest.raises(errors.StoreUnfit, match="allkeys-lru"):
            await Client.connect(replace(ledger.settings, store_url=valkey_url), name="first")
    finally:
        evicting.config_set("maxmemory-policy", "noeviction")  # type: ignore[attr-defined]
    with pytest.raises(errors.StoreUnfit, match="names no store"):
        await Client.connect(replace(ledger.settings, store_url="http://localhost"), name="second")
    with pytest.raises(errors.StoreUnavailable, match="does not answer"):
        await Client.connect(replace(ledger.settings, store_url="unix:///nowhere.sock"), name="third")
    with pytest.raises(errors.DeviceError, match="cpu"):
        await Client.connect(replace(ledger.settings, devices=parse_devices("cpu=999TiB")), name="fourth")


async def test_a_shared_store_is_used_and_not_minded(ledger: LedgerUnderTest, valkey_url: str) -> None:
    async with await Client.connect(replace(ledger.settings, store_url=valkey_url), name="first") as client:
        lease = await client.acquire(ask())
        assert lease.state is LeaseState.GRANTED
        assert not (ledger.state.root / "store.pid").exists()


async def test_a_second_ledger_of_one_host_is_refused_by_a_shared_store(
    ledger: LedgerUnderTest, tmp_dir: Path, valkey_url: str
) -> None:
    shared = replace(ledger.settings, store_url=valkey_url)
    (tmp_dir / "other").mkdir()
    async with await Client.connect(shared, name="first") as client:
        lease = await client.activate(await client.acquire(ask()))
        with pytest.raises(errors.LedgerConflict, match=f"the ledger in {ledger.state.root} speaks for node"):
            await Client.connect(replace(shared, state_dir=tmp_dir / "other"), name="second")
        assert (await client.renew_many([lease])).leases, "it is held as before"
        await client.release(lease)


async def test_a_private_store_may_lie_anywhere(tmp_dir: Path) -> None:
    """Its address is a URL: what such a text means otherwise stands for itself."""
    names = ["a%41", "a?db=3", "a#b", "a b"]
    ledgers = []
    for name in names:
        (tmp_dir / name).mkdir()
        ledgers.append(ledger_in(tmp_dir / name))
    try:
        for one in ledgers:
            async with await Client.connect(one.settings, name="first") as client:
                assert (await client.acquire(ask())).state is LeaseState.GRANTED
    finally:
        for one in ledgers:
            one.clean_up()


async def test_unreadable_files_of_the_store_are_set_aside(ledger: LedgerUnderTest) -> None:
    broken = ledger.state.store_dir / "appendonlydir"
    broken.mkdir()
    (broken / "appendonly.aof.manifest").write_text("nonsense")
    async with await Client.connect(ledger.settings, name="first") as client:
        assert (await client.acquire(ask())).state is LeaseState.GRANTED
    assert list(ledger.state.root.glob("store-unreadable-*/appendonlydir"))


async def test_kill_9_of_the_keeper_is_made_good_by_any_client(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="first") as client:
        held = await client.acquire(ask(60 * MIB))
        holder = ledger.run_holder(held)
        await until(lambda: _state(client, held.id, LeaseState.ACTIVE), "the lease to be active")
        waiters = [await client.acquire(ask(60 * MIB, priority=priority)) for priority in (10, 10, 5)]
        keeper, store = ledger.keeper_pid, ledger.store_pid
        os.kill(keeper, signal.SIGKILL)
        await until(lambda: gone(store), "the store to die with its keeper", timeout_s=2)
        await until(lambda: ledger.keeper_pid != keeper and client.store_up, "the next keeper")
        await until(lambda: _state(client, held.id, LeaseState.ACTIVE), "the ledger to be back")
        leases = {lease.id: lease for lease in (await client.snapshot()).leases}
        assert leases[held.id].fence == held.fence
        assert [leases[waiter.id].position for waiter in waiters] == [2, 3, 1]
        holder.end()
        await client.release(held)
        assert (await asyncio.wait_for(client.wait_granted(waiters[2]), 10)).state is LeaseState.GRANTED


async def test_a_lease_is_the_same_to_the_next_keeper_though_the_store_lost_everything(
    ledger: LedgerUnderTest,
) -> None:
    async with await Client.connect(ledger.settings, name="first") as client:
        request = LeaseRequest(
            new_request_id(),
            *("ours", HolderKind.SERVICE, ({"sim0": 60 * MIB},), 7),
            preemptible=True,
            grace_s=12.0,
        )
        held = await client.activate(await client.acquire(request))
        keeper = ledger.keeper_pid
        with redis.Redis(unix_socket_path=str(ledger.state.socket_path("store"))) as wiping:
            os.kill(keeper, signal.SIGSTOP)  # it must not hear of the wipe before it dies
            wiping.flushall()
        os.kill(keeper, signal.SIGKILL)
        await until(lambda: ledger.keeper_pid != keeper, "the next keeper")
        await until(lambda: _state(client, held.id, LeaseState.ACTIVE), "the ledger to be back")
        (found,) = (await client.snapshot()).leases
        assert replace(found, since_ms=held.since_ms) == held
        await client.release(held)


async def test_a_keeper_killed_before_it_is_ready_is_followed_soon(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="first") as client:
        first = ledger.keeper_pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: ledger.keeper_pid != first, "a second keeper to begin")
        second = ledger.keeper_pid
        os.kill(second, signal.SIGKILL)
        assert client._link.welcome.pid == first, "the second was not ready yet"
        await until(lambda: client._link.welcome.pid not in (first, second), "a third keeper", timeout_s=3)


async def test_a_keeper_outlives_the_client_that_started_it(ledger: LedgerUnderTest) -> None:
    starter = ledger.run_user()
    keeper = told_by(starter)["keeper"]
    async with await Client.connect(ledger.settings, name="second") as second:
        starter.kill()
        starter.wait()
        assert (await second.acquire(ask())).state is LeaseState.GRANTED
        assert ledger.keeper_pid == keeper


async def test_what_a_killed_client_asked_for_is_freed_at_once(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="watcher") as watcher:
        user = ledger.run_user([{"sim0": 60 * MIB}], [{"sim0": 60 * MIB}])
        assert told_by(user)["states"] == ["granted", "queued"]
        waiting = await watcher.acquire(ask(60 * MIB))
        assert waiting.position == 2
        user.kill()
        user.wait()
        assert (await asyncio.wait_for(watcher.wait_granted(waiting), 5)).state is LeaseState.GRANTED
        assert [lease.id for lease in (await watcher.snapshot()).leases] == [waiting.id]


async def test_a_client_that_only_closes_keeps_what_it_holds(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="watcher") as watcher:
        async with await Client.connect(ledger.settings, name="starter of a job") as starter:
            held = await starter.acquire(ask())
            holder = ledger.run_holder(held)
            await until(lambda: _state(watcher, held.id, LeaseState.ACTIVE), "the lease to be active")
        await watcher.sweep()
        assert await _state(watcher, held.id, LeaseState.ACTIVE)
        holder.end()
        await watcher.sweep()
        assert not (await watcher.snapshot()).leases


async def test_what_a_dead_holder_left_is_killed_before_its_memory_is_free(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="watcher") as client:
        held = await client.acquire(ask())
        holder = ledger.run_holder(held, engine=True)
        assert holder.engine is not None
        waiting = await client.acquire(ask())
        engine, children = holder.engine, f"task/{holder.engine}/children"
        await until(lambda: read_proc(engine, children), "the engine's child")
        child = int(read_proc(engine, children).split()[0])
        holder.kill()
        await client.sweep()
        assert gone(holder.engine)
        assert gone(child)
        assert (await asyncio.wait_for(client.wait_granted(waiting), 5)).state is LeaseState.GRANTED
        with NodeLedger(ledger.state.ledger_path) as book:
            assert not book.rows()


async def test_a_row_keeps_the_keeper_without_any_client(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="first") as client:
        holder = ledger.run_holder(await client.acquire(ask()))
        keeper = ledger.keeper_pid
    before = ledger.log
    await until(lambda: _no_visitors_left(ledger, keeper), "the keeper to be alone")
    assert not gone(keeper)
    holder.end()
    await until(lambda: gone(keeper), "the keeper to leave")
    assert "is gone" in ledger.log.removeprefix(before)


async def test_a_holder_in_another_pid_namespace_is_never_taken_for_dead(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="first") as client:
        held = await client.acquire(ask())
        assert held.fence is not None
        me = ProcessIdentity.current()
        row = LedgerRow(
            *(held.id, held.fence.epoch, held.fence.seq, held.holder, dict(held.shares)),
            pid=2**22 - 1,  # nobody here
            start_ticks=me.start_ticks,
            pid_namespace=me.pid_namespace + 1,
        )
        with NodeLedger(ledger.state.ledger_path) as book:
            book.admit(row)
            for _ in range(3):
                await client.sweep()
            assert await _state(client, held.id, LeaseState.ACTIVE)
            book.remove(row.lease_id, row.epoch, row.seq)
        await client.sweep()
        assert not (await client.snapshot()).leases


async def test_a_gpu_of_another_ledger_is_refused_with_its_directory(
    tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lock, "_everybodys_directory", lambda: tmp_dir)
    gpu = Device(f"GPU-test-{tmp_dir.name}", DeviceKind.CUDA, "Test card", 0, MIB, 0, measured=True)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        one, other = (Keeper(StateDir.resolve(tmp_dir / name), LedgerSettings()) for name in ("one", "other"))
        one._lock_gpus([gpu], first)
        with pytest.raises(errors.LedgerConflict, match=r"Test card.*one"):
            other._lock_gpus([gpu], second)


async def test_a_second_keeper_leaves_the_first_alone(ledger: LedgerUnderTest) -> None:
    async with await Client.connect(ledger.settings, name="first"):
        keeper = ledger.keeper_pid
        second = Keeper(ledger.state, ledger.settings)
        assert await second.run() == 0
        assert ledger.keeper_pid == keeper
        with pytest.raises(errors.LockHeld):
            HostLock(ledger.state.lock_path("keeper")).acquire()


async def _state(client: Client, lease_id: str, state: LeaseState) -> bool:
    try:
        snapshot = await client.snapshot()
    except errors.StoreUnavailable:
        return False
    return any(lease.id == lease_id and lease.state is state for lease in snapshot.leases)


def _no_visitors_left(ledger: LedgerUnderTest, keeper: int) -> bool:
    """Whether the keeper's door has no open connection: its listening socket is the only one of that path."""
    path = str(ledger.state.socket_path("keeper"))
    lines = Path("/proc/net/unix").read_text().splitlines()
    return not gone(keeper) and sum(path in line for line in lines) == 1
