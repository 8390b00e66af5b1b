"""The desk of leases over HTTP before a ledger that is played: what it asks for, and what is left when things fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import errors, lease_desk
from coordinator.lease_desk import LeaseDesk, LeaseWish
from gpuboss.devices import Device, DeviceKind
from gpuboss.errors import ActivationRefused, GpubossError, LeaseRefused, StaleFence, StoreUnavailable
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import DeviceUse, Fence, ForeignUse, Lease, LeaseRequest, LeaseState, Shares, Snapshot
from inference import external_process
from tests.support import until

GIB = 1 << 30
DEVICES = tuple(Device(f"g{index}", DeviceKind.CUDA, "H200", index, 40 * GIB, GIB, measured=True) for index in (0, 1))
ME = ProcessIdentity.current()
NO_MEMORY = ActivationRefused("g0", wanted_bytes=20 * GIB, free_bytes=3 * GIB, holders=[("job:other", 36 * GIB)])


class PlayedLedger:
    """Grants at once, or when it is told to; fails as it is told to."""

    def __init__(self) -> None:
        self.state: Any = SimpleNamespace(ledger_path=None)
        self.devices = DEVICES
        self.uses = tuple(DeviceUse(device, 0, 0, 0, 0, 39 * GIB) for device in DEVICES)
        self.fails: Exception | None = None
        """Of `acquire`."""
        self.refusals: list[Exception] = []
        """Of `activate`, one after the other."""
        self.grants = asyncio.Event()
        self.grants.set()
        self.asked: list[LeaseRequest] = []
        self.leases: dict[str, Lease] = {}
        self.renewed = 0
        self.on_activate: Callable[[], object] = bool
        self.answers = asyncio.Event()
        """Whether the store answers who gives something up."""
        self.answers.set()
        self.left_for_later: list[str] = []
        """Given up by who could not wait for the store."""

    def state_of(self, lease: Lease) -> LeaseState:
        return self.leases[lease.id].state

    def _now(self, lease: Lease, state: LeaseState, **changes: Any) -> Lease:
        self.leases[lease.id] = replace(lease, state=state, **changes)
        return self.leases[lease.id]

    async def acquire(self, request: LeaseRequest) -> Lease:
        self.asked.append(request)
        if self.fails is not None:
            raise self.fails
        id_, kind = request.request_id, request.kind
        lease = Lease(id_, id_, request.holder, kind, LeaseState.QUEUED, {}, 10, None, 1, ME, 0, ttl_s=request.ttl_s)
        return self._granted(lease) if self.grants.is_set() else self._now(lease, LeaseState.QUEUED)

    def _granted(self, lease: Lease) -> Lease:
        return self._now(lease, LeaseState.GRANTED, shares=self.asked[-1].options[0], fence=Fence(1, 1), position=None)

    async def wait_granted(self, lease: Lease) -> Lease:
        await self.grants.wait()
        return self._granted(lease)

    async def activate(self, lease: Lease, process: ProcessIdentity | None = None, *, by_word: bool = False) -> Lease:
        if self.refusals:
            raise self.refusals.pop()
        self.on_activate()
        return self._now(lease, LeaseState.ACTIVE)

    async def renew(self, lease: Lease) -> Lease:
        self.renewed += 1
        return lease

    async def resize(self, lease: Lease, options: Sequence[Shares] | None = None, priority: int | None = None) -> Lease:
        raise StaleFence("it was granted this moment")

    async def cancel(self, lease: Lease) -> None:
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.left_for_later.append(lease.id)
            raise
        self._now(lease, LeaseState.CANCELLED)

    async def release(self, lease: Lease) -> None:
        self._now(lease, LeaseState.FREED)

    async def find(self, lease_id: str) -> Lease | None:
        return self.leases.get(lease_id)

    async def snapshot(self) -> Snapshot:
        return Snapshot(1, self.uses, tuple(self.leases.values()))

    async def sweep(self) -> None:
        """Nobody died."""


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> PlayedLedger:
    monkeypatch.setattr(lease_desk, "_AGAIN_S", 0.0)
    monkeypatch.setattr(LeaseDesk, "_leave_books", lambda desk, lease: None)
    monkeypatch.setattr(LeaseDesk, "_process_in_books", lambda desk, lease: ME)
    monkeypatch.setattr(external_process, "lease_of", lambda process, state: None)
    return PlayedLedger()


@pytest.fixture
def desk(ledger: PlayedLedger) -> LeaseDesk:
    return LeaseDesk(ledger)


def a_wish(**changes: Any) -> LeaseWish:
    return replace(LeaseWish(vram_bytes=20 * GIB, wait_s=20.0, request_id="mine"), **changes)


# -- what the node's books refuse ---------------------------------------------------------------------------------


async def test_what_the_books_refuse_for_good_is_given_up_and_told_in_numbers(
    desk: LeaseDesk, ledger: PlayedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_desk, "SETTLE_S", -1.0)
    ledger.refusals = [NO_MEMORY]
    with pytest.raises(ActivationRefused) as caught:
        await desk.ask(a_wish())
    shown = errors.render(caught.value)
    told = json.loads(shown.body)["error"]
    assert (shown.status, told["code"]) == (503, "no_room")
    assert told["message"] == "g0: 20GiB wanted, 3GiB free; held by job:other 36GiB"
    assert (b"retry-after", b"10") in shown.headers
    assert [lease.state for lease in ledger.leases.values()] == [LeaseState.CANCELLED]


async def test_books_that_refuse_for_a_while_are_asked_again_and_the_lease_is_renewed_meanwhile(
    desk: LeaseDesk, ledger: PlayedLedger
) -> None:
    ledger.refusals = [NO_MEMORY] * 3
    standing = await desk.ask(a_wish())
    assert (standing.held, standing.lease.state) == (True, LeaseState.ACTIVE)
    assert ledger.renewed == 3, "its time runs from the grant on, and nobody else would renew it"


# -- what fails ---------------------------------------------------------------------------------------------------


async def test_a_store_that_is_away_is_told_and_leaves_nothing_behind(desk: LeaseDesk, ledger: PlayedLedger) -> None:
    ledger.fails = StoreUnavailable("the lease store does not answer")
    with pytest.raises(StoreUnavailable) as caught:
        await desk.ask(a_wish())
    assert errors.render(caught.value).status == 503
    ledger.fails = None
    assert (await desk.ask(a_wish())).held, "asked again by the same name, it is asked for anew"
    assert [request.request_id for request in ledger.asked] == ["http-mine"] * 2


async def test_a_fault_of_ours_gives_the_lease_up_and_is_not_told(desk: LeaseDesk, ledger: PlayedLedger) -> None:
    ledger.refusals = [KeyError("nobody thought of this")]
    with pytest.raises(GpubossError) as caught:
        await desk.ask(a_wish())
    shown = errors.render(caught.value)
    assert (shown.status, b"nobody thought" in shown.body) == (500, False)
    assert [lease.state for lease in ledger.leases.values()] == [LeaseState.CANCELLED]


async def test_a_lease_that_ends_while_it_is_renewed_is_over(
    desk: LeaseDesk, ledger: PlayedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = (await desk.ask(a_wish())).lease

    async def too_late(lease: Lease) -> Lease:
        raise StaleFence("it is over")

    monkeypatch.setattr(ledger, "renew", too_late)
    with pytest.raises(errors.LeaseOver, match="ended while it was being renewed"):
        await desk.renew(lease.id)


async def test_a_lease_that_expired_says_after_how_long(desk: LeaseDesk, ledger: PlayedLedger) -> None:
    lease = (await desk.ask(a_wish(ttl_s=90.0))).lease
    ledger.leases[lease.id] = replace(lease, state=LeaseState.FREED, reason="expired")
    for asking in (desk.renew(lease.id), desk.ask(a_wish())):
        with pytest.raises(errors.LeaseOver, match="expired: it was not renewed for its `ttl_s`, 90 s"):
            await asking


async def test_what_can_never_be_names_the_numbers_and_the_settings(desk: LeaseDesk) -> None:
    with pytest.raises(LeaseRefused) as caught:
        await desk.ask(a_wish(vram_bytes=40 * GIB))
    assert "g0 can give 39GiB" in caught.value.message
    assert "change `devices` or `reserve` in model-boss.yaml" in caught.value.message
    assert errors.render(caught.value).status == 400


# -- callers who go -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("request_id", "left"), [(None, LeaseState.FREED), ("mine", LeaseState.ACTIVE)])
async def test_who_hangs_up_in_the_moment_of_the_grant_holds_nothing_unless_they_can_come_back(
    desk: LeaseDesk, ledger: PlayedLedger, request_id: str | None, left: LeaseState
) -> None:
    ledger.grants.clear()
    waiting = asyncio.create_task(desk.ask(a_wish(request_id=request_id)))
    await until(lambda: ledger.leases, "the lease to be asked for")
    ledger.on_activate = waiting.cancel
    ledger.grants.set()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    await until(lambda: not desk._ending, "what is to be ended to be ended")
    [lease] = ledger.leases.values()
    assert lease.state is left


async def test_an_end_of_the_broker_leaves_the_queue_and_keeps_what_is_held(
    desk: LeaseDesk, ledger: PlayedLedger
) -> None:
    held = (await desk.ask(a_wish(request_id="held"))).lease
    ledger.grants.clear()
    waiting = asyncio.create_task(desk.ask(a_wish(request_id="waits")))
    await until(lambda: len(ledger.leases) == 2, "the second lease to be asked for")
    await desk.close()
    with pytest.raises(errors.LeaseOver):
        await waiting
    assert ledger.state_of(held) is LeaseState.ACTIVE
    assert ledger.leases["http-waits"].state is LeaseState.CANCELLED


async def test_an_end_of_the_broker_does_not_wait_for_a_store_that_hangs(
    desk: LeaseDesk, ledger: PlayedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_desk, "FAREWELL_S", 0.05)
    ledger.grants.clear()
    waiting = [asyncio.create_task(desk.ask(a_wish(request_id=name))) for name in ("one", "two")]
    await until(lambda: len(ledger.leases) == 2, "both leases to be asked for")
    ledger.answers.clear()
    await desk.close()
    assert sorted(ledger.left_for_later) == ["http-one", "http-two"]
    for caller in waiting:
        with pytest.raises(errors.LeaseOver):
            await caller


# -- a process that runs already ----------------------------------------------------------------------------------


async def test_what_a_process_uses_already_is_its_own_and_it_stays_on_its_device(
    desk: LeaseDesk, ledger: PlayedLedger
) -> None:
    strangers = (ForeignUse(ME.pid, "python", 12 * GIB), ForeignUse(1, "other", 5 * GIB))
    ledger.uses = (ledger.uses[0], replace(ledger.uses[1], foreign_bytes=17 * GIB, foreign_pids=strangers))
    await desk.ask(a_wish(process=ME, ttl_s=None))
    [request] = ledger.asked
    assert request.adopts == {"g1": 12 * GIB}
    assert request.options == ({"g1": 20 * GIB},)


async def test_what_it_uses_under_a_lease_is_not_adopted_a_second_time(
    desk: LeaseDesk, ledger: PlayedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_process, "lease_of", lambda process, state: object())
    ledger.uses = (replace(ledger.uses[0], foreign_pids=(ForeignUse(ME.pid, "python", GIB),)), ledger.uses[1])
    await desk.ask(a_wish(process=ME, ttl_s=None))
    [request] = ledger.asked
    assert request.adopts == {}


async def test_nothing_is_adopted_by_a_lease_that_is_held_by_word(desk: LeaseDesk, ledger: PlayedLedger) -> None:
    ledger.uses = (replace(ledger.uses[0], foreign_pids=(ForeignUse(ME.pid, "python", GIB),)), ledger.uses[1])
    await desk.ask(a_wish())
    assert ledger.asked[0].adopts == {}
