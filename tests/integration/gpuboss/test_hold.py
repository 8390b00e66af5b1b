"""`gpuboss.hold` against a real keeper and store: taking, waiting, yielding, losing, being interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import gpuboss
from gpuboss import errors, session
from gpuboss.client import Client
from gpuboss.direct import _PATIENCE_S, DirectStore
from gpuboss.entries import Entries
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HOLDS_MEMORY, HolderKind, Lease, LeaseState, Notice, Snapshot
from gpuboss.node_ledger import LedgerRow, NodeLedger
from gpuboss.scripts import Script
from gpuboss.settings import LedgerSettings
from tests.integration.gpuboss.keeper_harness import MIB, LedgerUnderTest
from tests.integration.gpuboss.programs import output, run, said
from tests.support import until, wait_until


@pytest.fixture
def settings(ledger: LedgerUnderTest) -> Iterator[LedgerSettings]:
    """Of the test's ledger; this process's session with it is closed afterwards."""
    yield ledger.settings
    session.close_all()


def free(settings: LedgerSettings) -> dict[str, int]:
    return {use.device.id: use.free_bytes // MIB for use in gpuboss.devices(settings)}


def leases(settings: LedgerSettings) -> list[Lease]:
    return list(gpuboss.snapshot(settings).leases)


def rows(ledger: LedgerUnderTest) -> list[LedgerRow]:
    with NodeLedger(ledger.state.ledger_path) as books:
        return books.rows()


# -- taking and giving back --------------------------------------------------------------------------------------------


def test_memory_is_held_for_the_block_and_entered_in_the_books(
    ledger: LedgerUnderTest, settings: LedgerSettings
) -> None:
    with gpuboss.hold("60MiB", job="sft-12", priority="batch", devices=["sim0"], settings=settings) as lease:
        (row,) = rows(ledger)
        assert (row.lease_id, row.pid, row.shares) == (lease.id, os.getpid(), {"sim0": 60 * MIB})
        assert json.loads(row.terms)["priority"] == 50
        assert (ledger.state.holders_dir / lease.id).exists()
        assert free(settings) == {"sim0": 40, "sim1": 100}
        (shown,) = leases(settings)
        assert (shown.id, shown.holder, shown.kind, shown.priority) == (lease.id, "job:sft-12", HolderKind.JOB, 50)
        assert [device.id for device in lease.devices] == ["sim0"]
        assert lease.env == {"GPUBOSS_LEASE": lease.id}
        assert (lease.lost, lease.preempted, lease.is_ours) == (False, None, True)
        wait_until(lambda: leases(settings)[0].state is LeaseState.ACTIVE, "the keeper to tell of its holder")
    assert not rows(ledger)
    assert free(settings) == {"sim0": 100, "sim1": 100}
    lease.release()
    assert "released" in repr(lease)


def test_the_short_way_needs_no_word_with_the_session(
    settings: LedgerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpuboss.hold("10MiB", settings=settings):
        pass

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked the session's thread")

    for way in ("run", "begin", "see_to", "call_soon"):
        monkeypatch.setattr(session.Session, way, never)
    with gpuboss.hold("10MiB", settings=settings), gpuboss.hold("10MiB", gpus=2, settings=settings):
        pass


def test_the_long_way_is_gone_where_the_short_one_fails(
    settings: LedgerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Script] = []

    def broken(self: DirectStore, script: Script, arguments: Any) -> None:
        asked.append(script)

    def untold(self: DirectStore, script: Script, arguments: Any, unheard: Any) -> bool:
        asked.append(script)
        return False

    monkeypatch.setattr(DirectStore, "call", broken)
    monkeypatch.setattr(DirectStore, "tell", untold)
    with gpuboss.hold("60MiB", settings=settings):
        assert sorted(free(settings).values()) == [40, 100]
    assert sorted(free(settings).values()) == [100, 100]
    assert asked == [Script.SNAPSHOT, Script.RELEASE]


def test_nobody_waits_for_the_store_to_take_a_lease_back(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    with gpuboss.hold("60MiB", settings=settings):
        pass
    store = ledger.store_pid
    lease = gpuboss.acquire("60MiB", settings=settings)
    os.kill(store, signal.SIGSTOP)
    try:
        began = time.monotonic()
        lease.release()
        assert time.monotonic() - began < _PATIENCE_S
        assert not rows(ledger)
    finally:
        os.kill(store, signal.SIGCONT)
    assert leases(settings) == []


def test_a_lease_whose_return_was_not_taken_is_returned_again(
    ledger: LedgerUnderTest, settings: LedgerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers the command that nobody waits for with anything but ok: the session sees to it."""
    with gpuboss.hold("10MiB", settings=settings):
        pass
    lease = gpuboss.acquire("60MiB", settings=settings)
    direct = session.session_for(settings)._direct
    (line,) = direct._idle
    line._common["run_id"] = "of another life"
    again = threading.Event()
    real = Client.release

    async def release(self: Client, given: Lease) -> None:
        again.set()
        await real(self, given)

    monkeypatch.setattr(Client, "release", release)
    lease.release()
    assert direct.owes
    assert not again.is_set()
    direct.settle()
    assert again.wait(10)
    wait_until(lambda: leases(settings) == [], "the lease to be freed")


@pytest.mark.parametrize("error", [errors.LedgerBusy("locked"), errors.StateDirError("disk full"), KeyError("ours")])
def test_what_fails_in_the_books_leaves_no_lease(
    settings: LedgerSettings, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with gpuboss.hold("10MiB", settings=settings):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(NodeLedger, "admit", fail)
    with pytest.raises(type(error)), gpuboss.hold("60MiB", settings=settings):
        pass
    wait_until(lambda: leases(settings) == [], "the grant to be given back")
    session.close_all()
    assert not list((settings.state_dir or Path()).glob("*/holders/*"))


def test_holds_nest_and_several_devices_are_taken_together(settings: LedgerSettings) -> None:
    with gpuboss.hold("60MiB", gpus=2, settings=settings) as outer:
        assert dict(outer.shares) == {"sim0": 60 * MIB, "sim1": 60 * MIB}
        with gpuboss.hold("30MiB", settings=settings), gpuboss.hold("30MiB", settings=settings):
            assert sorted(free(settings).values()) == [10, 10], "the tightest fit, then what is left"
    assert sorted(free(settings).values()) == [100, 100]


def test_the_tightest_device_is_chosen(settings: LedgerSettings) -> None:
    with (
        gpuboss.hold("50MiB", devices=["sim1"], settings=settings),
        gpuboss.hold("40MiB", settings=settings) as lease,
    ):
        assert dict(lease.shares) == {"sim1": 40 * MIB}


def test_an_exclusive_hold_takes_all_of_it(settings: LedgerSettings) -> None:
    with gpuboss.hold(exclusive=True, settings=settings):
        assert sorted(free(settings).values()) == [0, 100]


def test_one_hold_may_be_used_again_but_not_twice_at_once(settings: LedgerSettings) -> None:
    block = gpuboss.hold("10MiB", settings=settings)
    with block as first:
        with pytest.raises(RuntimeError, match="in use"), block:
            pass
        assert len(leases(settings)) == 1
    with block as second:
        assert second.id != first.id


def test_of_threads_that_enter_one_hold_at_once_one_is_let_in(settings: LedgerSettings) -> None:
    block = gpuboss.hold("10MiB", settings=settings)
    start, leave = threading.Barrier(8), threading.Event()
    entered: list[str] = []

    def enter() -> str:
        start.wait(20)
        try:
            with block as lease:
                entered.append(lease.id)
                assert leave.wait(20)
                return lease.id
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        told = [threads.submit(enter) for _ in range(8)]
        try:
            wait_until(lambda: sum(one.done() for one in told) == 7, "all but one to be refused")
            wait_until(lambda: entered, "the one to be in")
            assert [lease.id for lease in leases(settings)] == entered
        finally:
            leave.set()
        assert sum("in use" in one.result(timeout=20) for one in told) == 7
    assert leases(settings) == []
    with block as again:
        assert [again.id] != entered


def test_a_hold_whose_return_failed_is_returned_later_and_may_be_used_again(
    settings: LedgerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = gpuboss.hold("10MiB", settings=settings)

    def locked(self: session.Session, lease: Lease) -> None:
        raise errors.LedgerBusy("locked")

    with monkeypatch.context() as patch, pytest.raises(errors.LedgerBusy), block:
        patch.setattr(session.Session, "give_back", locked)
    wait_until(lambda: leases(settings) == [], "the lease to be given back")
    with block:
        pass


def test_what_is_waited_for_when_the_session_is_closed_is_given_up(settings: LedgerSettings) -> None:
    with gpuboss.hold("60MiB", gpus=2, settings=settings), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(gpuboss.acquire, "60MiB", job="late", settings=settings)
        wait_until(lambda: _queue(settings) == ["job:late"], "its place in the queue")
        errands = session.session_for(settings)._errands
        wait_until(lambda: any(errand._task for errand in list(errands)), "the session to wait for it")
        session.close_all()
        with pytest.raises(RuntimeError, match="was closed"):
            waiting.result(timeout=20)
        wait_until(lambda: _queue(settings) == [], "its place to be given up")


def test_a_lease_is_not_resized_to_nothing(settings: LedgerSettings) -> None:
    with gpuboss.hold("10MiB", settings=settings) as lease:
        for nothing in ("0", 0, "0GiB"):
            with pytest.raises(ValueError, match="nothing to hold"):
                lease.resize(nothing)
        assert set(lease.shares.values()) == {10 * MIB}


def test_without_a_block(settings: LedgerSettings) -> None:
    lease = gpuboss.acquire("60MiB", job="a", settings=settings)
    gpuboss.renew(lease)
    lease.resize("80MiB")
    assert sorted(free(settings).values()) == [20, 100]
    with pytest.raises(gpuboss.LeaseRefused):
        lease.resize("101MiB")
    assert set(lease.shares.values()) == {80 * MIB}
    gpuboss.release(lease)
    gpuboss.release(lease)
    assert sorted(free(settings).values()) == [100, 100]
    with pytest.raises(gpuboss.StaleFence):
        gpuboss.renew(lease)


def test_many_threads_hold_at_once_and_never_too_much(settings: LedgerSettings) -> None:
    in_use = {"sim0": 0, "sim1": 0}
    most = 0
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal most
        for turn in range(4):
            size = 20 + (number * 7 + turn * 13) % 50
            with gpuboss.hold(f"{size}MiB", job=f"t{number}", settings=settings) as lease:
                (device,) = lease.shares
                with lock:
                    in_use[device] += size
                    most = max(most, sum(in_use.values()))
                    assert in_use[device] <= 100
                time.sleep(0.005)  # the work
                with lock:
                    in_use[device] -= size

    with ThreadPoolExecutor(16) as threads:
        for done in [threads.submit(work, number) for number in range(16)]:
            done.result(timeout=60)
    assert most > 100, "several held at once"
    assert leases(settings) == []
    assert sorted(free(settings).values()) == [100, 100]


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_waiter_is_granted_what_another_gives_back(settings: LedgerSettings) -> None:
    order: list[str] = []

    def wait(name: str) -> None:
        with gpuboss.hold("100MiB", gpus=2, job=name, settings=settings):
            order.append(name)

    with ThreadPoolExecutor(3) as threads:
        with gpuboss.hold("60MiB", gpus=2, settings=settings):
            waiting = []
            for name in ("a", "b", "c"):
                waiting.append(threads.submit(wait, name))
                wait_until(lambda name=name: f"job:{name}" in _queue(settings), "its place in the queue")
        for done in waiting:
            done.result(timeout=20)
    assert order == ["a", "b", "c"]


def _queue(settings: LedgerSettings) -> list[str]:
    return [lease.holder for lease in leases(settings) if lease.state is LeaseState.QUEUED]


def test_a_wait_that_ends_says_what_stood_in_its_way(settings: LedgerSettings) -> None:
    with (
        gpuboss.hold("60MiB", job="big", devices=["sim0"], settings=settings),
        pytest.raises(gpuboss.WaitExpired) as expired,
        gpuboss.hold("50MiB", job="late", devices=["sim0"], wait=0.3, settings=settings),
    ):
        raise AssertionError("it was granted")
    error = expired.value
    assert (error.holder, error.position, error.devices) == ("job:late", 1, (("sim0", 40 * MIB),))
    assert error.holders == (("job:big", 60 * MIB),)
    assert 0.3 <= error.waited_s < 5
    for words in ("job:late was not granted within", "50MiB of one device", "sim0 has 40MiB free", "number 1"):
        assert words in error.message
    assert leases(settings) == [], "it has left the queue"


def test_who_will_not_wait_does_not_join_the_queue(settings: LedgerSettings) -> None:
    with (
        gpuboss.hold("60MiB", gpus=2, preemptible=True, priority="batch", job="meek", settings=settings) as held,
        gpuboss.watch(settings) as events,
    ):
        with (
            pytest.raises(gpuboss.WaitExpired, match="cannot be granted at once"),
            gpuboss.hold("50MiB", wait=0, job="hasty", priority="urgent", settings=settings),
        ):
            raise AssertionError("it was granted")
        with gpuboss.hold("40MiB", wait=0, job="modest", settings=settings):
            pass
        heard = []
        for event in events:
            heard.append((event.holder, event.what))
            if heard[-1] == ("job:modest", "freed"):
                break
        assert not [what for holder, what in heard if holder == "job:hasty"]
        assert held.preempted is None, "nobody was disturbed"


def test_what_these_devices_can_never_give_is_refused(settings: LedgerSettings) -> None:
    for more, words in (({}, "sim0 can give 100MiB"), ({"gpus": 3}, "3 devices"), ({"devices": ["gpu7"]}, "'gpu7'")):
        size = "60MiB" if more else "101MiB"
        with pytest.raises(gpuboss.LeaseRefused, match=words), gpuboss.hold(size, settings=settings, **more):
            pass
    assert leases(settings) == []


def test_what_the_books_refuse_is_asked_for_again_in_its_place(
    ledger: LedgerUnderTest, settings: LedgerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store grants what the node's books know to be in use: it is told, and the holder waits for its memory."""
    with gpuboss.hold("10MiB", settings=settings):
        pass
    refused = threading.Event()
    real = Entries.enter

    def enter(self: Entries, lease: Lease, *arguments: Any, **more: Any) -> None:
        if not refused.is_set():
            refused.set()
            raise errors.ActivationRefused("sim0", wanted_bytes=1, free_bytes=0)
        real(self, lease, *arguments, **more)

    monkeypatch.setattr(Entries, "enter", enter)
    with gpuboss.hold("100MiB", devices=["sim0"], wait=20, settings=settings):
        assert len(leases(settings)) == 1
    assert refused.is_set()
    assert leases(settings) == []


def test_a_row_that_the_store_does_not_know_keeps_others_out(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    with gpuboss.hold("10MiB", settings=settings):
        pass
    stranger = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        who = ProcessIdentity.of(stranger.pid)
        row = LedgerRow(
            "stranger", 1, 1, "job:stranger", {"sim0": 60 * MIB}, who.pid, who.start_ticks, who.pid_namespace
        )
        with NodeLedger(ledger.state.ledger_path) as books:
            books.admit(row)
        with (
            pytest.raises(gpuboss.WaitExpired, match="job:stranger 60MiB"),
            gpuboss.hold("100MiB", devices=["sim0"], wait=1, settings=settings),
        ):
            raise AssertionError("it was granted")
    finally:
        stranger.kill()
        stranger.communicate()
    with gpuboss.hold("100MiB", devices=["sim0"], wait=20, settings=settings):
        pass


# -- yielding and losing -----------------------------------------------------------------------------------------------


def test_a_preemptible_holder_is_told_and_the_memory_goes_to_who_wants_it(settings: LedgerSettings) -> None:
    told: list[Notice] = []
    leave = threading.Event()

    def on_preempt(notice: Notice) -> None:
        told.append(notice)
        leave.set()

    def want() -> None:
        with gpuboss.hold("100MiB", devices=["sim0"], job="dear", priority="high", settings=settings):
            pass

    with ThreadPoolExecutor(1) as threads:
        with gpuboss.hold(
            "60MiB", devices=["sim0"], priority="batch", preemptible=True, grace="20s", on_preempt=on_preempt,
            settings=settings,
        ) as lease:  # fmt: skip
            wanting = threads.submit(want)
            assert leave.wait(10)
            assert lease.preempted is not None
            assert lease.preempted.holder == "job:dear"
        wanting.result(timeout=10)
    (notice,) = told
    assert (notice.holder, notice.priority, notice.outranks) == ("job:dear", 5, True)
    assert 10 < notice.left_s <= 20


def test_a_notice_that_is_taken_back_is_forgotten_and_comes_again(settings: LedgerSettings) -> None:
    told: list[Notice] = []
    with gpuboss.hold(
        "60MiB", devices=["sim0"], priority="batch", preemptible=True, on_preempt=told.append, settings=settings
    ) as lease:
        for turn in (1, 2):
            with contextlib.suppress(gpuboss.WaitExpired), gpuboss.hold(
                "100MiB", devices=["sim0"], priority="high", wait=0.5, settings=settings
            ):  # fmt: skip
                pass
            wait_until(lambda turn=turn: len(told) == turn, "the notice")
            wait_until(lambda: lease.preempted is None, "the notice to be taken back")


def test_a_true_says_that_it_yields_in_any_case(settings: LedgerSettings) -> None:
    with gpuboss.hold(
        "60MiB", devices=["sim0"], priority="batch", preemptible=True, on_preempt=lambda _: True, settings=settings
    ):
        with contextlib.suppress(gpuboss.WaitExpired), gpuboss.hold(
            "100MiB", devices=["sim0"], priority="high", wait=1, settings=settings
        ):  # fmt: skip
            pass
        (shown,) = leases(settings)
        assert shown.notice is not None
        assert shown.notice.acknowledged


def test_a_holder_without_a_callback_sees_a_person_ask(settings: LedgerSettings) -> None:
    with gpuboss.hold("60MiB", settings=settings) as lease:
        one = session.session_for(settings)
        one.run(one.client.preempt(lease.id, by="a person", grace_s=9.0))
        wait_until(lambda: lease.preempted is not None, "the notice")
        assert lease.preempted is not None
        assert lease.preempted.holder == "a person"


def test_a_callback_that_fails_harms_nobody(settings: LedgerSettings, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Notice) -> None:
        raise KeyError("no checkpoint")

    with gpuboss.hold("60MiB", on_preempt=fail, settings=settings) as lease:
        one = session.session_for(settings)
        one.run(one.client.preempt(lease.id, by="a person"))
        wait_until(lambda: "on_preempt of" in caplog.text, "the failure in the log")
    assert leases(settings) == []


def test_a_lost_lease_is_known_to_be_lost(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    with gpuboss.hold("60MiB", settings=settings) as lease:
        (row,) = rows(ledger)
        one = session.session_for(settings)
        # Freed in the store alone, it is not lost: the node's books know what runs, and the store is told.
        fence = {"id": row.lease_id, "epoch": row.epoch, "seq": row.seq}
        one.run(one.client._store.call(Script.RELEASE, fence))
        wait_until(lambda: [found.state for found in leases(settings)] == [LeaseState.ACTIVE], "the keeper's word")
        assert not lease.lost
        with NodeLedger(ledger.state.ledger_path) as books:
            books.remove(row.lease_id, row.epoch, row.seq)
        assert lease.lost_event.wait(10)
        assert lease.lost
        assert "lost" in repr(lease)


# -- coroutines --------------------------------------------------------------------------------------------------------


async def test_coroutines_hold_wait_and_yield(ledger: LedgerUnderTest) -> None:
    settings = ledger.settings
    told: list[Notice] = []

    async def on_preempt(notice: Notice) -> bool:
        await asyncio.sleep(0)
        told.append(notice)
        return True

    try:
        async with gpuboss.hold_async(
            "60MiB", devices=["sim0"], priority="batch", on_preempt=on_preempt, preemptible=True, settings=settings
        ) as lease:
            assert lease.env == {"GPUBOSS_LEASE": lease.id}
            await lease.resize("50MiB")
            await lease.renew()
            waiting = asyncio.create_task(_hold_for_a_moment(settings))
            await until(lambda: bool(told), "the notice")
            assert not waiting.done()
        async with asyncio.timeout(10):
            await waiting
        await lease.release()
        assert (await asyncio.to_thread(leases, settings)) == []
    finally:
        await asyncio.to_thread(session.close_all)


async def _hold_for_a_moment(settings: LedgerSettings) -> None:
    async with gpuboss.hold_async("100MiB", devices=["sim0"], priority="high", settings=settings):
        pass


async def test_a_cancelled_wait_leaves_the_queue(ledger: LedgerUnderTest) -> None:
    settings = ledger.settings
    try:
        async with gpuboss.hold_async("100MiB", gpus=2, settings=settings):
            waiting = [asyncio.create_task(_hold_for_a_moment(settings)) for _ in range(3)]
            await until(lambda: _in_queue(settings, 3), "the waiters")
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert all(task.cancelled() for task in waiting)
            assert await _in_queue(settings, 0), "at once, not after a while"
        async with gpuboss.hold_async("100MiB", gpus=2, settings=settings):
            with pytest.raises(gpuboss.WaitExpired):
                await gpuboss.hold_async("1MiB", wait=0.1, settings=settings).take()
    finally:
        await asyncio.to_thread(session.close_all)


async def test_of_tasks_that_enter_one_hold_at_once_one_is_let_in(ledger: LedgerUnderTest) -> None:
    settings = ledger.settings
    block = gpuboss.hold_async("10MiB", settings=settings)
    leave = asyncio.Event()

    async def enter() -> None:
        async with block as lease:
            with pytest.raises(ValueError, match="nothing to hold"):
                await lease.resize(0)
            await leave.wait()

    try:
        tasks = [asyncio.create_task(enter()) for _ in range(4)]
        await until(lambda: sum(task.done() for task in tasks) == 3, "all but one to be refused")
        assert len(await asyncio.to_thread(leases, settings)) <= 1
        leave.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(str(outcome)[:19] for outcome in outcomes) == ["None", *["this hold is in use"] * 3]
        assert await _is_empty(settings)
    finally:
        await asyncio.to_thread(session.close_all)


@pytest.mark.parametrize("how", ["dropped", "destroyed"])
def test_an_async_hold_that_is_never_left_is_given_back(settings: LedgerSettings, how: str) -> None:
    """It is forgotten, or the event loop of its task is closed while the task is in the block."""

    async def forget() -> None:
        await gpuboss.hold_async("10MiB", settings=settings).__aenter__()

    async def hold() -> None:
        async with gpuboss.hold_async("10MiB", settings=settings):
            held.set()
            await asyncio.Event().wait()

    async def begin() -> None:
        await asyncio.wait([asyncio.ensure_future(held.wait())])

    if how == "dropped":
        asyncio.run(forget())
    else:
        loop = asyncio.new_event_loop()
        held = asyncio.Event()
        coroutine = hold()
        task = loop.create_task(coroutine)
        loop.run_until_complete(begin())
        loop.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        del task
        with contextlib.suppress(RuntimeError):  # it cannot be closed without its loop
            coroutine.close()
        del coroutine
    gc.collect()
    wait_until(lambda: leases(settings) == [], "the lease to be given back")


async def _in_queue(settings: LedgerSettings, count: int) -> bool:
    return len(await asyncio.to_thread(_queue, settings)) == count


async def test_tasks_cancelled_at_any_moment_leak_nothing(ledger: LedgerUnderTest) -> None:
    settings = ledger.settings
    try:
        async with gpuboss.hold_async("1MiB", settings=settings):
            pass
        for turn in range(40):
            task = asyncio.create_task(_hold_for_a_moment(settings))
            await asyncio.sleep(turn * 0.0005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: _is_empty(settings), "every lease to be given back")
        assert not rows(ledger)
    finally:
        await asyncio.to_thread(session.close_all)


async def _is_empty(settings: LedgerSettings) -> bool:
    return not await asyncio.to_thread(leases, settings)


# -- death and interruption --------------------------------------------------------------------------------------------

_HOLD = """
with gpuboss.hold(order["size"], gpus=2, job="victim", settings=settings) as lease:
    say(lease.id)
    time.sleep(600)
"""
_WAIT = """
try:
    say("begin")
    with gpuboss.hold("100MiB", gpus=2, job="victim", settings=settings):
        say("granted")
except KeyboardInterrupt:
    say("interrupted")
    sys.stdin.read()
"""
_STORM = """
import gc, signal
armed = False
rounds = interrupted = 0

def interrupt(number, frame):
    # A Ctrl-C at any moment of the block below, and only there: one in between would hit this test's own lines.
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

with gpuboss.hold("30MiB", gpus=2, job="victim", settings=settings):
    pass  # an interrupted import is Python's to mend
signal.signal(signal.SIGINT, interrupt)
say("begin")
ends = time.monotonic() + 4
while time.monotonic() < ends:
    try:
        armed = True
        with gpuboss.hold("30MiB", gpus=2, job="victim", settings=settings):
            rounds += 1
        armed = False
    except KeyboardInterrupt:
        interrupted += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
gc.collect()
say([rounds, interrupted])
sys.stdin.read()
"""


def test_a_holder_killed_with_minus_9_is_freed_by_the_keeper(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    victim = run(ledger, _HOLD, size="60MiB")
    lease_id = said(victim)
    assert [lease.id for lease in leases(settings)] == [lease_id]
    victim.kill()
    began = time.monotonic()
    with gpuboss.hold("100MiB", gpus=2, wait=20, settings=settings):
        assert time.monotonic() - began < 10
    assert not rows(ledger)


_DAEMONS = """
import threading, warnings
warnings.simplefilter("always")
ready = threading.Barrier(5)

def churn():
    ready.wait()
    while True:
        with gpuboss.hold("1MiB", settings=settings):
            pass

def wait():
    ready.wait()
    with gpuboss.hold("100MiB", gpus=2, settings=settings):
        pass

lease = gpuboss.acquire("1MiB", gpus=2, settings=settings)
for _ in range(4):
    threading.Thread(target=globals()[order["what"]], daemon=True).start()
ready.wait()
while len(gpuboss.snapshot(settings).leases) < 2:
    pass
"""


@pytest.mark.parametrize("what", ["churn", "wait"])
def test_a_process_ends_without_a_word_while_daemon_threads_hold_or_wait(
    ledger: LedgerUnderTest, settings: LedgerSettings, what: str
) -> None:
    for _ in range(3):
        assert output(ledger, _DAEMONS, what=what) == ("", "")
    wait_until(lambda: leases(settings) == [], "the ledger to see its end")


def test_ctrl_c_while_waiting_leaves_the_queue(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    with gpuboss.hold("60MiB", gpus=2, settings=settings):
        victim = run(ledger, _WAIT)
        assert said(victim) == "begin"
        wait_until(lambda: _queue(settings) == ["job:victim"], "its place in the queue")
        victim.send_signal(signal.SIGINT)
        assert said(victim) == "interrupted"
        assert _queue(settings) == [], "before its process ends"
        victim.communicate(timeout=20)
        assert victim.returncode == 0


def test_a_second_ctrl_c_does_not_wait_for_a_store_that_hangs(
    ledger: LedgerUnderTest, settings: LedgerSettings
) -> None:
    with gpuboss.hold("60MiB", gpus=2, settings=settings):
        victim = run(ledger, _WAIT.replace("sys.stdin.read()", "raise SystemExit(3)"))
        assert said(victim) == "begin"
        wait_until(lambda: _queue(settings) == ["job:victim"], "its place in the queue")
        store = ledger.store_pid
        os.kill(store, signal.SIGSTOP)
        try:
            began = time.monotonic()
            victim.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                victim.wait(0.2)
            victim.send_signal(signal.SIGINT)
            victim.wait(10)
            assert time.monotonic() - began < 8
        finally:
            os.kill(store, signal.SIGCONT)
        wait_until(lambda: _queue(settings) == [], "the keeper to see that it is gone")


@pytest.mark.slow
def test_interrupted_at_any_moment_it_leaks_no_lease(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    victim = run(ledger, _STORM)
    assert said(victim) == "begin"
    ends = time.monotonic() + 3.5
    sent = 0
    while time.monotonic() < ends:
        victim.send_signal(signal.SIGINT)
        sent += 1
        time.sleep(0.003 + (sent % 17) * 0.001)
    rounds, interrupted = said(victim)
    assert interrupted > 50, (sent, rounds, interrupted)
    assert rounds > 50, (sent, rounds, interrupted)
    wait_until(lambda: not _held(gpuboss.snapshot(settings)), "everything to be given back while it lives")
    assert victim.poll() is None
    assert not rows(ledger)


def _held(snapshot: Snapshot) -> list[Lease]:
    return [lease for lease in snapshot.leases if lease.state in HOLDS_MEMORY]


def test_the_session_outlives_its_keeper_and_its_store(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    with gpuboss.hold("60MiB", gpus=2, settings=settings) as lease:
        for victim in (ledger.store_pid, ledger.keeper_pid):
            os.kill(victim, signal.SIGKILL)
            with gpuboss.hold("40MiB", gpus=2, wait=30, settings=settings):
                pass
        assert not lease.lost
        wait_until(lambda: [found.id for found in leases(settings)] == [lease.id], "the ledger to know its holder")
    assert leases(settings) == []


def test_a_store_that_is_away_for_a_while_is_waited_for(ledger: LedgerUnderTest, settings: LedgerSettings) -> None:
    with gpuboss.hold("1MiB", settings=settings):
        pass
    store = ledger.store_pid
    os.kill(store, signal.SIGSTOP)
    waking = threading.Timer(6.0, os.kill, (store, signal.SIGCONT))
    waking.start()
    try:
        with gpuboss.hold("60MiB", wait=40, settings=settings):
            pass
    finally:
        waking.join()


async def test_a_waiter_that_was_suspended_is_in_the_queue_again(ledger: LedgerUnderTest) -> None:
    """SIGSTOP for longer than waiters live without a word: it comes back to its place, ahead of those after it."""
    async with await Client.connect(ledger.settings, name="holder") as client:
        lease = await client.acquire(_everything("job:holder"))
        victim = run(ledger, _WAIT)
        assert (await asyncio.to_thread(said, victim)) == "begin"
        await until(lambda: _has_waiter(client), "its place in the queue")
        victim.send_signal(signal.SIGSTOP)
        late = await client.acquire(_everything("job:late"))
        waiting = asyncio.create_task(client.wait_granted(late))
        await until(lambda: _lost_waiter(client), "the suspended waiter to be taken for gone", timeout_s=30)
        victim.send_signal(signal.SIGCONT)
        await until(lambda: _has_waiter(client), "its place in the queue again")
        await client.release(lease)
        assert (await asyncio.to_thread(said, victim)) == "granted", "before the later one"
        async with asyncio.timeout(20):
            await waiting


def _everything(holder: str) -> gpuboss.LeaseRequest:
    from gpuboss.leases import new_request_id

    return gpuboss.LeaseRequest(new_request_id(), holder, HolderKind.JOB, ({"sim0": 100 * MIB, "sim1": 100 * MIB},), 10)


async def _has_waiter(client: Client) -> bool:
    return any(lease.holder == "job:victim" for lease in (await client.snapshot()).leases)


async def _lost_waiter(client: Client) -> bool:
    return not await _has_waiter(client)
