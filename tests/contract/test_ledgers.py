"""One suite for every ledger: the one in memory, and the real one on every kind of store."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import gpuboss
from gpuboss import errors, session
from gpuboss.client import Client
from gpuboss.devices import parse_devices
from gpuboss.leases import HolderKind, Lease, LeaseRequest, LeaseState, Shares, new_request_id
from gpuboss.priority import OVER_PINNED
from gpuboss.settings import LedgerSettings, Timings
from gpuboss.testing import FakeClock, MemoryLedger
from gpuboss.watching import LedgerEvent
from tests.contract.stores import STORES
from tests.support import until, wait_until

MIB = 1 << 20
DEVICES = "sim0=100MiB,sim1=100MiB"
_TIMINGS = Timings(beat_s=0.5, tick_s=0.25, ttl_s=6.0, renew_deadline_s=5.0, linger_s=2.0)


@dataclass
class World:
    """A ledger, and how time passes for it."""

    ledger: Client | MemoryLedger
    clock: FakeClock | None

    async def eventually(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait until it holds, while time passes."""

        async def look() -> bool:
            if self.clock is not None:
                self.clock.advance(0.1)
            return await holds()

        await until(look, what)

    async def state_of(self, lease: Lease) -> LeaseState:
        found = await self.ledger.find(lease.id)
        assert found is not None
        return found.state

    async def has_notice(self, lease: Lease) -> bool:
        found = await self.ledger.find(lease.id)
        return found is not None and found.notice is not None

    async def free(self) -> dict[str, int]:
        return {use.device.id: use.free_bytes // MIB for use in (await self.ledger.snapshot()).devices}


@dataclass
class Place:
    """Where a real ledger lives."""

    settings: LedgerSettings

    def wait_empty(self) -> None:
        """Until its keeper, and a private store, have left."""
        needle = str(self.settings.state_dir).encode()
        wait_until(lambda: not _has_processes(needle), f"the processes of {self.settings.state_dir} to leave")


@pytest.fixture(scope="module", params=["memory", *STORES])
def place(request: pytest.FixtureRequest) -> Iterator[Place | None]:
    """None: in memory."""
    if request.param == "memory":
        yield None
        return
    directory = Path(tempfile.mkdtemp(prefix="mb-", dir="/tmp"))
    try:
        (directory / "store").mkdir()
        with STORES[request.param](directory / "store") as url:
            state_dir = directory / "state"
            made = Place(LedgerSettings(state_dir, parse_devices(DEVICES), url or None, 0, _TIMINGS))
            yield made
            made.wait_empty()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def world(place: Place | None) -> AsyncIterator[World]:
    if place is None:
        clock = FakeClock()
        async with MemoryLedger(DEVICES, clock) as memory:
            yield World(memory, clock)
            await _check_and_clear(memory)
        return
    async with await Client.connect(place.settings, name="contract") as client:
        yield World(client, None)
        await _check_and_clear(client)


async def _check_and_clear(ledger: Client | MemoryLedger) -> None:
    """Whatever a test did, the books must agree, and give everything back."""
    assert await ledger.audit() == []
    for lease in (await ledger.snapshot()).leases:
        await ledger.release(lease)
    snapshot = await ledger.snapshot()
    assert [lease.holder for lease in snapshot.leases] == []
    assert [use.free_bytes for use in snapshot.devices] == [100 * MIB, 100 * MIB]
    assert await ledger.audit() == []


def ask(
    size: int | Shares = 100,
    device: str = "sim0",
    *,
    holder: str = "job:test",
    priority: int = 10,
    kind: HolderKind = HolderKind.JOB,
    preemptible: bool = False,
    ttl_s: float | None = None,
    grace_s: float = 30.0,
) -> LeaseRequest:
    """A request for one option; sizes in MiB."""
    shares = {device: size} if isinstance(size, int) else size
    option = {name: count * MIB for name, count in shares.items()}
    return LeaseRequest(
        new_request_id(),
        holder,
        kind,
        (option,),
        priority,
        preemptible=preemptible,
        ttl_s=ttl_s,
        grace_s=grace_s,
    )


async def held(world: World, request: LeaseRequest) -> Lease:
    """A lease in use."""
    lease = await world.ledger.acquire(request)
    assert lease.state is LeaseState.GRANTED
    return await world.ledger.activate(lease)


# -- asking ----------------------------------------------------------------------------------------------------------


async def test_what_fits_is_granted_at_once_with_a_fence_and_shown(world: World) -> None:
    lease = await world.ledger.acquire(ask(60, holder="job:sft-12", priority=5))
    assert (lease.state, lease.shares, lease.position) == (LeaseState.GRANTED, {"sim0": 60 * MIB}, None)
    assert lease.fence is not None
    assert await world.free() == {"sim0": 40, "sim1": 100}
    (shown,) = (await world.ledger.snapshot()).leases
    assert (shown.id, shown.holder, shown.priority, shown.node) == (lease.id, "job:sft-12", 5, world.ledger.node)
    assert shown.owner == world.ledger.owner


async def test_asking_twice_is_asking_once(world: World) -> None:
    request = ask(60)
    first, second = await asyncio.gather(world.ledger.acquire(request), world.ledger.acquire(request))
    assert (first.id, first.fence) == (second.id, second.fence)
    assert await world.free() == {"sim0": 40, "sim1": 100}


async def test_what_is_over_cannot_be_asked_for_again(world: World) -> None:
    request = ask()
    lease = await world.ledger.acquire(request)
    await world.ledger.release(lease)
    await world.ledger.release(lease)
    with pytest.raises(errors.StaleFence):
        await world.ledger.acquire(request)
    assert await world.state_of(lease) is LeaseState.FREED


async def test_what_can_never_fit_is_refused_with_the_numbers(world: World) -> None:
    options = ({"sim0": 200 * MIB}, {"sim0": 50 * MIB, "gpu9": 50 * MIB})
    with pytest.raises(errors.LeaseRefused) as refused:
        await world.ledger.acquire(LeaseRequest(new_request_id(), "job:big", HolderKind.JOB, options, 10))
    for words in ("job:big", "200MiB of sim0, which can give 100MiB", "50MiB of gpu9, which this node does not have"):
        assert words in refused.value.message


async def test_the_first_option_that_fits_is_granted(world: World) -> None:
    await world.ledger.acquire(ask(60, "sim0"))
    options: tuple[Shares, ...] = ({"sim0": 60 * MIB}, {"sim1": 60 * MIB})
    lease = await world.ledger.acquire(LeaseRequest(new_request_id(), "job:any", HolderKind.JOB, options, 10))
    assert lease.shares == {"sim1": 60 * MIB}


async def test_fences_rise_and_never_repeat(world: World) -> None:
    fences = []
    for _ in range(3):
        lease = await world.ledger.acquire(ask())
        fences.append(lease.fence)
        await world.ledger.release(lease)
    assert fences == sorted(set(fences))


# -- waiting ---------------------------------------------------------------------------------------------------------


async def test_waiters_stand_by_priority_and_then_in_turn(world: World) -> None:
    first = await world.ledger.acquire(ask())
    waiters = [await world.ledger.acquire(ask(holder=name, priority=p)) for name, p in _LINE]
    assert all(waiter.state is LeaseState.QUEUED and waiter.fence is None for waiter in waiters)
    found = [await world.ledger.find(waiter.id) for waiter in waiters]
    assert [lease.position for lease in found if lease] == [3, 4, 1, 2]
    assert [lease.holder for lease in (await world.ledger.snapshot()).leases] == [
        *("job:test", "job:c", "job:d", "job:a", "job:b")
    ]
    order = []
    await world.ledger.release(first)
    for waiter in (waiters[2], waiters[3], waiters[0], waiters[1]):
        async with asyncio.timeout(10):
            granted = await world.ledger.wait_granted(waiter)
        order.append(granted.holder)
        await world.ledger.release(granted)
    assert order == ["job:c", "job:d", "job:a", "job:b"]


_LINE = (("job:a", 10), ("job:b", 10), ("job:c", 5), ("job:d", 5))


async def test_who_gives_up_lets_those_behind_through(world: World) -> None:
    first = await world.ledger.acquire(ask())
    queued, behind = await world.ledger.acquire(ask()), await world.ledger.acquire(ask())
    await world.ledger.cancel(queued)
    await world.ledger.cancel(queued)
    await world.ledger.cancel(first)
    async with asyncio.timeout(10):
        assert (await world.ledger.wait_granted(behind)).state is LeaseState.GRANTED
    with pytest.raises(errors.StaleFence):
        await world.ledger.wait_granted(queued)
    assert await world.state_of(first) is LeaseState.CANCELLED


async def test_all_devices_or_none_and_what_a_waiter_wants_is_kept_for_it(world: World) -> None:
    first = await world.ledger.acquire(ask(60, "sim0"))
    gang = await world.ledger.acquire(ask({"sim0": 80, "sim1": 80}))
    assert (gang.state, gang.shares) == (LeaseState.QUEUED, {})
    assert gang.wants == {"sim0": 80 * MIB, "sim1": 80 * MIB}
    small = await world.ledger.acquire(ask(30, "sim0"))
    other = await world.ledger.acquire(ask(30, "sim1"))
    assert {small.state, other.state} == {LeaseState.QUEUED}, "both want a device that the gang waits for"
    await world.ledger.release(first)
    async with asyncio.timeout(10):
        granted = await world.ledger.wait_granted(gang)
    assert (granted.shares, granted.wants) == (gang.wants, {})
    assert await world.state_of(small) is LeaseState.QUEUED


async def test_who_waits_may_ask_for_less_and_keeps_its_place(world: World) -> None:
    await world.ledger.acquire(ask(60))
    big, behind = await world.ledger.acquire(ask(100)), await world.ledger.acquire(ask(10))
    assert (await world.ledger.resize(big, [{"sim0": 90 * MIB}])).wants == {"sim0": 90 * MIB}
    resized = await world.ledger.resize(big, [{"sim0": 30 * MIB}])
    assert (resized.state, resized.order) == (LeaseState.GRANTED, big.order)
    async with asyncio.timeout(10):
        await world.ledger.wait_granted(behind)
        assert (await world.ledger.wait_granted(big)).shares == {"sim0": 30 * MIB}
    with pytest.raises(errors.LeaseRefused):
        await world.ledger.resize(await world.ledger.acquire(ask(100)), [{"sim0": 101 * MIB}])


async def test_who_waits_may_become_more_important(world: World) -> None:
    first = await world.ledger.acquire(ask())
    early, late = await world.ledger.acquire(ask()), await world.ledger.acquire(ask())
    assert (await world.ledger.resize(late, priority=1)).position == 1
    await world.ledger.release(first)
    async with asyncio.timeout(10):
        await world.ledger.wait_granted(late)
    assert await world.state_of(early) is LeaseState.QUEUED


# -- holding ---------------------------------------------------------------------------------------------------------


async def test_a_lease_is_active_from_its_activation_to_its_release(world: World) -> None:
    lease = await world.ledger.acquire(ask(60))
    active = await world.ledger.activate(lease)
    assert (active.state, active.fence) == (LeaseState.ACTIVE, lease.fence)
    assert (await world.ledger.activate(lease)).state is LeaseState.ACTIVE, "once more changes nothing"
    await world.ledger.release(active)
    assert await world.state_of(lease) is LeaseState.FREED
    with pytest.raises(errors.StaleFence):
        await world.ledger.activate(active)
    assert await world.free() == {"sim0": 100, "sim1": 100}


async def test_a_lease_in_use_is_taken_over_by_its_fence_and_stays_what_it_was(world: World) -> None:
    lease = await held(world, ask(60, kind=HolderKind.SLOT, holder="slot:robin", priority=5))
    assert lease.fence is not None
    for _ in range(2):
        taken = await world.ledger.take_over(lease.id, lease.fence)
        assert (taken.owner, taken.fence, taken.shares) == (world.ledger.owner, lease.fence, lease.shares)
        assert (taken.priority, taken.state, taken.order) == (5, LeaseState.ACTIVE, lease.order)
    repriced = await world.ledger.resize(taken, None, 20)
    assert repriced.priority == 20
    with pytest.raises(errors.StaleFence):
        await world.ledger.take_over(lease.id, replace(lease.fence, seq=lease.fence.seq + 1))
    await world.ledger.release(taken)
    with pytest.raises(errors.StaleFence):
        await world.ledger.take_over(lease.id, lease.fence)


async def test_a_lease_that_nobody_uses_is_not_taken_over(world: World) -> None:
    granted = await world.ledger.acquire(ask(60))
    waiting = await world.ledger.acquire(ask(60))
    assert granted.fence is not None
    for lease_id in (granted.id, waiting.id, "unheard-of"):
        with pytest.raises(errors.StaleFence):
            await world.ledger.take_over(lease_id, granted.fence)
    assert await world.state_of(granted) is LeaseState.GRANTED


async def test_a_waiter_cannot_be_activated(world: World) -> None:
    await world.ledger.acquire(ask())
    with pytest.raises(errors.StaleFence):
        await world.ledger.activate(await world.ledger.acquire(ask()))


async def test_a_holder_that_shrinks_lets_a_waiter_in_and_grows_where_there_is_room(world: World) -> None:
    lease = await held(world, ask(80))
    waiter = await world.ledger.acquire(ask(50))
    shrunk = await world.ledger.resize(lease, [{"sim0": 40 * MIB}])
    assert (shrunk.shares, shrunk.fence) == ({"sim0": 40 * MIB}, lease.fence)
    async with asyncio.timeout(10):
        await world.ledger.wait_granted(waiter)
    grown = await world.ledger.resize(shrunk, [{"sim0": 50 * MIB}])
    assert grown.shares == {"sim0": 50 * MIB}
    with pytest.raises(errors.LeaseRefused, match=r"51MiB of sim0, where it holds 50MiB and 0B are free"):
        await world.ledger.resize(grown, [{"sim0": 51 * MIB}])
    with pytest.raises(ValueError, match="a holder keeps its devices"):
        await world.ledger.resize(grown, [{"sim1": 10 * MIB}])
    assert await world.free() == {"sim0": 0, "sim1": 100}


async def test_a_holder_does_not_grow_into_what_others_wait_for(world: World) -> None:
    lease = await held(world, ask(40))
    await world.ledger.acquire(ask(100))
    with pytest.raises(errors.LeaseRefused):
        await world.ledger.resize(lease, [{"sim0": 50 * MIB}])


async def test_a_lease_by_word_lives_as_long_as_it_is_renewed(world: World) -> None:
    lease = await world.ledger.activate(await world.ledger.acquire(ask(60, ttl_s=1.0)), by_word=True)
    assert lease.ttl_s == 1.0
    assert (await world.ledger.renew(lease)).state is LeaseState.ACTIVE

    async def is_freed() -> bool:
        return await world.state_of(lease) is LeaseState.FREED

    await world.eventually(is_freed, "the lease that nobody renews to be freed")
    found = await world.ledger.find(lease.id)
    assert found is not None
    assert found.reason == "expired"
    with pytest.raises(errors.StaleFence):
        await world.ledger.renew(lease)

    async def is_free() -> bool:
        return (await world.free())["sim0"] == 100

    await world.eventually(is_free, "its memory")


async def test_renewals_are_by_fence(world: World) -> None:
    lease, over = await held(world, ask(60)), await held(world, ask(20))
    await world.ledger.release(over)
    never = LeaseRequest(new_request_id(), "job:never", HolderKind.JOB, ({"sim0": MIB},), 10)
    unknown = await held(world, ask(10))
    strange = [lease, over, _renamed(unknown, never.request_id)]
    renewed = await world.ledger.renew_many(strange)
    assert [found.id for found in renewed.leases] == [lease.id]
    assert (renewed.stale, renewed.unknown) == ((over.id,), (never.request_id,))


def _renamed(lease: Lease, lease_id: str) -> Lease:
    return replace(lease, id=lease_id, request_id=lease_id)


async def test_whose_lease_is_lost_is_told_once(world: World) -> None:
    lease = await world.ledger.activate(await world.ledger.acquire(ask(60, ttl_s=1.0)), by_word=True)
    other = await held(world, ask(10))
    lost: list[str] = []
    world.ledger.on_lost(lease, lambda gone: lost.append(gone.id))
    world.ledger.on_lost(other, lambda gone: lost.append(gone.id))

    async def is_told() -> bool:
        return bool(lost)

    await world.eventually(is_told, "the loss to be told")
    await world.ledger.release(other)
    assert lost == [lease.id]


# -- yielding --------------------------------------------------------------------------------------------------------


async def test_a_more_important_waiter_has_preemptible_holders_told(world: World) -> None:
    batch = await held(world, ask(60, holder="job:batch", priority=50, preemptible=True))
    firm = await held(world, ask(40, "sim1", priority=50))
    waiter = await world.ledger.acquire(ask(100, holder="job:sft-12", priority=5))
    assert waiter.state is LeaseState.QUEUED
    found = await world.ledger.find(batch.id)
    assert found is not None
    assert found.notice is not None
    told = found.notice
    assert (told.by, told.holder, told.priority, told.acknowledged) == (waiter.id, "job:sft-12", 5, False)
    assert 25 < told.left_s <= 30
    assert not await world.has_notice(firm)
    await world.ledger.release(batch)
    async with asyncio.timeout(10):
        assert (await world.ledger.wait_granted(waiter)).shares == {"sim0": 100 * MIB}


async def test_who_comes_before_every_class_has_even_the_first_class_told_and_its_turn_first(world: World) -> None:
    pinned = await held(world, ask(100, holder="slot:pinned", kind=HolderKind.SLOT, priority=0))
    urgent = await world.ledger.acquire(ask(60, priority=1))
    assert not await world.has_notice(pinned)
    over = await world.ledger.acquire(ask(60, holder="job:over", priority=OVER_PINNED))
    found = await world.ledger.find(pinned.id)
    assert found is not None
    assert found.notice is not None
    assert (found.notice.by, found.notice.priority) == (over.id, OVER_PINNED)
    await world.ledger.release(pinned)
    async with asyncio.timeout(10):
        await world.ledger.wait_granted(over)
    waiting = await world.ledger.find(urgent.id)
    assert waiting is not None
    assert waiting.state is LeaseState.QUEUED


async def test_equals_are_not_pushed_out_and_nobody_in_vain(world: World) -> None:
    equal = await held(world, ask(60, priority=10, preemptible=True))
    await world.ledger.acquire(ask(100, priority=10))
    assert not await world.has_notice(equal)
    less = await held(world, ask(50, "sim1", priority=50, preemptible=True))
    await held(world, ask(50, "sim1", priority=50))
    await world.ledger.acquire(ask(100, "sim1", priority=1))
    assert not await world.has_notice(less), "its memory is not enough"


async def test_the_fewest_are_told_the_least_important_and_youngest_first(world: World) -> None:
    leases = [
        await held(world, ask(25, holder=f"job:{name}", priority=priority, preemptible=True))
        for name, priority in (("old", 50), ("young", 50), ("dear", 20), ("spare", 90))
    ]
    await world.ledger.acquire(ask(50, priority=5))
    assert [await world.has_notice(lease) for lease in leases] == [False, True, False, True]


async def test_who_is_let_past_a_waiter_yields_when_that_can_start(world: World) -> None:
    first = await held(world, ask(60))
    waiter = await world.ledger.acquire(ask(100))
    assert (await world.ledger.acquire(ask(30))).state is LeaseState.QUEUED
    guest = await held(world, ask(40, preemptible=True))
    assert not await world.has_notice(guest), "it could not start yet"
    await world.ledger.release(first)
    assert await world.has_notice(guest)
    await world.ledger.release(guest)
    async with asyncio.timeout(10):
        await world.ledger.wait_granted(waiter)


async def test_a_notice_is_taken_back_when_nobody_waits_any_more(world: World) -> None:
    batch = await held(world, ask(60, priority=50, preemptible=True))
    told: list[str | None] = []
    world.ledger.on_notice(batch, lambda lease: told.append(lease.notice.holder if lease.notice else None))
    waiter = await world.ledger.acquire(ask(100, holder="job:eager", priority=5))
    await until(lambda: told == ["job:eager"], "the notice")
    await world.ledger.cancel(waiter)
    await until(lambda: told == ["job:eager", None], "the notice to be taken back")
    assert not await world.has_notice(batch)


async def test_an_acknowledged_notice_stands(world: World) -> None:
    batch = await held(world, ask(60, priority=50, preemptible=True))
    waiter = await world.ledger.acquire(ask(100, priority=5))
    assert await world.has_notice(batch)
    acknowledged = (await world.ledger.ack(batch)).notice
    assert acknowledged is not None
    assert acknowledged.acknowledged
    await world.ledger.cancel(waiter)
    assert await world.has_notice(batch)
    await world.ledger.release(batch)
    with pytest.raises(errors.StaleFence):
        await world.ledger.ack(batch)


async def test_a_person_may_ask_anybody_to_yield(world: World) -> None:
    lease = await held(world, ask(60, grace_s=60.0))
    told = (await world.ledger.preempt(lease.id, by="a person", grace_s=5.0)).notice
    assert told is not None
    assert (told.by, told.holder) == ("", "a person")
    assert 0 < told.left_s <= 5
    with pytest.raises(errors.StaleFence):
        await world.ledger.preempt(new_request_id(), by="a person")
    waiter = await world.ledger.acquire(ask(100))
    with pytest.raises(errors.StaleFence):
        await world.ledger.preempt(waiter.id, by="a person")


async def test_slots_yield_to_equals_of_others_but_not_to_their_own(world: World) -> None:
    slot = await held(world, ask(60, holder="slot:robin", kind=HolderKind.SLOT))
    assert slot.preemptible
    sibling = await world.ledger.acquire(ask(100, holder="slot:wren", kind=HolderKind.SLOT))
    assert not await world.has_notice(slot), "between its own slots the broker decides"
    await world.ledger.cancel(sibling)
    await world.ledger.acquire(ask(100, holder="job:equal"))
    assert await world.has_notice(slot)
    found = await world.ledger.find(slot.id)
    assert found is not None
    assert found.notice is not None
    assert not found.notice.outranks, "only when it is idle"


# -- looking ---------------------------------------------------------------------------------------------------------


async def test_events_tell_what_happens_in_order(world: World) -> None:
    async with world.ledger.watch() as events:
        lease = await held(world, ask(100, holder="job:a"))
        queued = await world.ledger.acquire(ask(100, holder="job:b"))
        await world.ledger.release(lease)
        await until(lambda: _granted(world, queued), "the grant")
        heard: list[LedgerEvent] = []
        async with asyncio.timeout(10):
            async for event in events:
                heard.append(event)
                if (event.lease_id, event.what) == (queued.id, "granted"):
                    break
    ours = [(event.what, event.holder) for event in heard if event.lease_id in (lease.id, queued.id)]
    expected = [
        ("granted", "job:a"),
        ("active", "job:a"),
        ("queued", "job:b"),
        ("freed", "job:a"),
        ("granted", "job:b"),
    ]
    assert [event for event in ours if event in expected] == expected
    assert {event.node for event in heard if event.lease_id} == {world.ledger.node}
    assert all(event.at_ms > 1_600_000_000_000 for event in heard)


async def _granted(world: World, lease: Lease) -> bool:
    return await world.state_of(lease) is LeaseState.GRANTED


async def test_hold_does_on_every_store_what_it_says(place: Place | None) -> None:
    """By the short way where the store has a plain address, by the long one elsewhere."""
    if place is None:
        pytest.skip("hold needs a ledger that processes share")
    await asyncio.to_thread(_hold_and_wait, place.settings)


def _hold_and_wait(settings: LedgerSettings) -> None:
    try:
        with ThreadPoolExecutor(1) as threads:
            with gpuboss.hold("60MiB", gpus=2, settings=settings) as lease:
                assert [found.id for found in gpuboss.snapshot(settings).leases] == [lease.id]
                waiting = threads.submit(_hold_everything, settings)
                wait_until(lambda: len(gpuboss.snapshot(settings).leases) == 2, "the waiter")
            assert waiting.result(timeout=20) == {"sim0": 100 * MIB, "sim1": 100 * MIB}
        assert gpuboss.snapshot(settings).leases == ()
    finally:
        session.close_all()


def _hold_everything(settings: LedgerSettings) -> dict[str, int]:
    with gpuboss.hold("100MiB", gpus=2, settings=settings) as lease:
        return dict(lease.shares)


async def test_what_holders_took_is_kept_under_the_names_it_was_told(world: World) -> None:
    name = new_request_id()
    first, second = await held(world, ask(10)), await held(world, ask(10))
    await world.ledger.learn(name, first, {"cuda": 7 * MIB})
    await world.ledger.learn(name, first, {"cuda": 5 * MIB, "host": MIB})
    record = await world.ledger.learn(name, second, {"cuda": 6 * MIB})
    assert (record.loads, record.most("cuda"), record.most("host"), record.most("cpu")) == (2, 7 * MIB, MIB, 0)
    assert record.peaks == ({"cuda": 7 * MIB, "host": MIB}, {"cuda": 6 * MIB})
    assert [found for found in await world.ledger.learned() if found.profile == name] == [record]


async def test_nobody_knows_a_lease_that_never_was(world: World) -> None:
    assert await world.ledger.find(new_request_id()) is None


def _has_processes(needle: bytes) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if needle in (entry / "cmdline").read_bytes():
                    return True
            except OSError:
                continue
    return False
