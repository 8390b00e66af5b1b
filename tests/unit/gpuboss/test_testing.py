"""The ledger in memory and its clock, beyond what the contract suite asks of every ledger."""

from __future__ import annotations

import asyncio
import inspect
import random
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gpuboss import errors, testing
from gpuboss.client import Client
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HolderKind, LeaseRequest, LeaseState, new_request_id
from gpuboss.testing import FakeClock, MemoryLedger
from inference.ledger import Ledger

MIB = 1 << 20


def ask(size: int, device: str = "sim0", priority: int = 10, **more: object) -> LeaseRequest:
    return LeaseRequest(
        new_request_id(), "job:test", HolderKind.JOB, ({device: size * MIB},), priority, **more  # type: ignore[arg-type]
    )  # fmt: skip


async def test_the_example_of_its_page_runs() -> None:
    example = textwrap.dedent((testing.__doc__ or "").partition("\n\n")[2].partition("\n\n`")[0])
    names: dict[str, Any] = {}
    exec(compile(example, "the example", "exec"), names)
    await names["test_my_program"]()


async def test_the_clock_stands_until_it_is_advanced_and_calls_what_is_due_in_order() -> None:
    clock = FakeClock(100.0)
    called: list[tuple[str, float]] = []
    for name, at_s in (("late", 103.0), ("early", 101.0), ("never", 110.0)):
        clock.at(at_s, lambda name=name: called.append((name, clock.now_s)))
    clock.at(101.0, lambda: clock.at(102.0, lambda: called.append(("added", clock.time()))))
    clock.advance(5.0)
    assert called == [("early", 101.0), ("added", 102.0), ("late", 103.0)]
    assert clock.monotonic() == 105.0
    sleeping = asyncio.create_task(clock.sleep(2.0))
    await asyncio.sleep(0)
    clock.advance(1.9)
    await asyncio.sleep(0)
    assert not sleeping.done()
    clock.advance(0.1)
    async with asyncio.timeout(5):
        await sleeping
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


async def test_it_is_a_ledger_for_the_broker(tmp_path: Path) -> None:
    ledger: Ledger = MemoryLedger("sim0=100MiB", state=tmp_path)
    assert ledger.state.root.is_dir()
    assert ledger.devices[0].id == "sim0"
    with pytest.raises(RuntimeError, match="no state directory"):
        _ = MemoryLedger().state


@pytest.mark.parametrize(
    "name",
    [
        *("acquire", "wait_granted", "cancel", "activate", "renew", "renew_many", "resize", "preempt", "ack"),
        *("release", "find", "snapshot", "audit", "sweep", "watch", "on_notice", "on_lost", "close"),
    ],
)
def test_it_is_called_as_the_real_one_is(name: str) -> None:
    real = inspect.signature(getattr(Client, name)).parameters
    ours = inspect.signature(getattr(MemoryLedger, name)).parameters
    # Whatever the real one takes, this one takes in the same way; it may take more, by name.
    assert [str(ours[parameter]) for parameter in real] == [str(found) for found in real.values()]
    assert all(ours[more].default is None for more in ours.keys() - real.keys())
    assert inspect.iscoroutinefunction(getattr(Client, name)) == inspect.iscoroutinefunction(
        getattr(MemoryLedger, name)
    )


async def test_a_waiter_is_woken_when_time_ends_what_is_before_it() -> None:
    clock = FakeClock()
    ledger = MemoryLedger("sim0=100MiB", clock)
    lease = await ledger.activate(await ledger.acquire(ask(100, ttl_s=10.0)), by_word=True)
    waiting = asyncio.create_task(ledger.wait_granted(await ledger.acquire(ask(100))))
    clock.advance(9.0)
    await ledger.renew(lease)
    clock.advance(9.9)
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(0.1)
    async with asyncio.timeout(5):
        assert (await waiting).state is LeaseState.GRANTED


async def test_a_lease_by_word_gets_no_longer_than_its_grace() -> None:
    clock = FakeClock()
    ledger = MemoryLedger("sim0=100MiB", clock)
    lease = await ledger.acquire(ask(100, ttl_s=60.0, preemptible=True, grace_s=5.0, priority=50))
    await ledger.acquire(ask(100, priority=1))
    clock.advance(5.0)
    found = await ledger.find(lease.id)
    assert found is not None
    assert (found.state, found.reason) == (LeaseState.FREED, "preempted")


async def test_programs_without_a_lease_take_room_and_are_adopted() -> None:
    ledger = MemoryLedger("sim0=100MiB")
    ledger.use_without_lease("sim0", 60 * MIB)
    assert (await ledger.snapshot()).devices[0].free_bytes == 40 * MIB
    assert (await ledger.acquire(ask(60))).state is LeaseState.QUEUED
    adopting = await ledger.acquire(ask(60, priority=1, adopts={"sim0": 60 * MIB}))
    assert adopting.state is LeaseState.GRANTED
    await ledger.activate(adopting, ProcessIdentity.current())
    (use,) = (await ledger.snapshot()).devices
    assert (use.foreign_bytes, use.claimed_bytes, use.free_bytes) == (0, 60 * MIB, 40 * MIB)


async def test_what_has_grown_meanwhile_refuses_the_activation() -> None:
    ledger = MemoryLedger("sim0=100MiB")
    lease = await ledger.acquire(ask(80))
    ledger.use_without_lease("sim0", 30 * MIB)
    with pytest.raises(errors.ActivationRefused, match="80MiB wanted, 70MiB free"):
        await ledger.activate(lease)


async def test_the_end_of_a_holder_frees_and_of_a_waiter_cancels() -> None:
    ledger = MemoryLedger("sim0=100MiB")
    lease, waiter = await ledger.acquire(ask(100)), await ledger.acquire(ask(100))
    last = await ledger.acquire(ask(100))
    ledger.end_holder(waiter)
    ledger.end_holder(lease)
    async with asyncio.timeout(5):
        await ledger.wait_granted(last)
    with pytest.raises(errors.StaleFence):
        await ledger.wait_granted(waiter)


async def test_a_store_that_is_away() -> None:
    ledger = MemoryLedger()
    ledger.store_up = False
    with pytest.raises(errors.StoreUnavailable):
        await ledger.acquire(ask(1))
    ledger.store_up = True
    assert (await ledger.acquire(ask(1))).state is LeaseState.GRANTED


async def test_leaving_gives_up_what_waits_and_leaves_what_is_held() -> None:
    async with MemoryLedger("sim0=100MiB") as ledger:
        lease, waiter = await ledger.acquire(ask(100)), await ledger.acquire(ask(100))
    assert [found.state for one in (lease, waiter) if (found := await ledger.find(one.id))] == [
        *(LeaseState.GRANTED, LeaseState.CANCELLED)
    ]


async def test_hundreds_of_random_steps_leave_the_books_right() -> None:
    chance = random.Random(11)
    clock = FakeClock()
    ledger = MemoryLedger("sim0=100MiB,sim1=100MiB", clock)
    open_leases: list[str] = []
    for _ in range(300):
        step = chance.random()
        if step < 0.5 or not open_leases:
            kind = chance.choice(list(HolderKind))
            options = tuple(
                {name: chance.randint(1, 100) * MIB for name in chance.sample(["sim0", "sim1"], chance.randint(1, 2))}
                for _ in range(chance.randint(1, 2))
            )
            request = LeaseRequest(
                new_request_id(),
                f"{kind}:x",
                kind,
                options,
                chance.choice([1, 10, 50]),
                preemptible=chance.random() < 0.5,
                ttl_s=chance.choice([None, None, 5.0]),
            )
            open_leases.append((await ledger.acquire(request)).id)
        elif step < 0.55:
            clock.advance(chance.random())
        else:
            found = await ledger.find(open_leases.pop(chance.randrange(len(open_leases))))
            assert found is not None
            match chance.choice(["release", "activate", "ack", "preempt"]):
                case "activate" if found.state is LeaseState.GRANTED:
                    await ledger.activate(found)
                    open_leases.append(found.id)
                case "ack" if found.notice is not None:
                    await ledger.ack(found)
                    open_leases.append(found.id)
                case "preempt" if found.fence is not None and found.state is LeaseState.ACTIVE:
                    await ledger.preempt(found.id, by="somebody")
                    open_leases.append(found.id)
                case _:
                    await ledger.release(found)
        assert await ledger.audit() == []
        assert all(use.free_bytes >= 0 for use in (await ledger.snapshot()).devices)
