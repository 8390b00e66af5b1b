"""Programs that we did not start: a real one with real memory, a real ledger that measures it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuboss.client import Client, LedgerSettings
from gpuboss.devices import parse_devices
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import HolderKind, Lease, LeaseRequest, LeaseState, new_request_id
from gpuboss.node_ledger import NodeLedger
from gpuboss.settings import Timings
from inference import external
from inference.external import ExternalState, ExternalView
from inference.external_spec import Spec
from inference.externals import Externals
from tests.integration.inference.neighbour import NEEDS, Neighbour, a_neighbour
from tests.support import until

MIB = 1 << 20
DEVICE = 600 * MIB


@pytest.fixture
def neighbour(tmp_dir: Path) -> Iterator[Neighbour]:
    with a_neighbour(tmp_dir, f"neighbour-{uuid.uuid4().hex}") as made:
        yield made


class World:
    """A ledger, and programs beside it."""

    def __init__(self, root: Path, devices: str) -> None:
        self.settings = LedgerSettings(
            state_dir=root / "state", devices=parse_devices(devices), timings=Timings(linger_s=0.2)
        )
        self.keepers: set[int] = set()
        self.stack = contextlib.AsyncExitStack()

    async def client(self, name: str = "test") -> Client:
        client = await Client.connect(self.settings, name=name)
        self.stack.push_async_callback(client.close)
        self.keepers.add(client._link.welcome.pid)
        return client

    async def watch(self, spec: Spec, ledger: Client) -> Externals:
        externals = Externals([spec], ledger)
        externals.startup()
        self.stack.push_async_callback(externals.shutdown)
        return externals

    async def close(self) -> None:
        await self.stack.aclose()
        for keeper in self.keepers:
            await until(lambda keeper=keeper: not _runs(keeper), "the keeper to be gone")


@pytest.fixture
async def world(tmp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(external, "LOOK_S", 0.2)
    made = World(tmp_dir, "cpu=600MiB")
    yield made
    await made.close()


def _runs(pid: int) -> bool:
    try:  # a keeper that this process started is its child
        return os.waitpid(pid, os.WNOHANG)[0] != pid
    except ChildProcessError:
        return psutil.pid_exists(pid)


async def held(externals: Externals, holds: Callable[[ExternalView], object] = bool) -> ExternalView:
    def found() -> bool:
        [view] = externals.views()
        return view.state is ExternalState.HELD and bool(holds(view))

    await until(found, "the program to have its lease, and what else is expected of it")
    return externals.views()[0]


def a_job(size: int, priority: int = 10, device: str = "cpu") -> LeaseRequest:
    return LeaseRequest(new_request_id(), "job:sft", HolderKind.JOB, ({device: size},), priority)


async def granted(ledger: Client, lease: Lease) -> Lease:
    async with asyncio.timeout(20):
        return await ledger.wait_granted(lease)


async def test_a_program_is_seen_and_given_a_lease_over_what_it_needs(world: World, neighbour: Neighbour) -> None:
    ledger = await world.client()
    neighbour.post("/work", mb=60)
    externals = await world.watch(neighbour.spec, ledger)
    view = await held(externals, lambda view: view.used_bytes)
    assert (view.name, view.pid, view.shares, view.busy) == (
        "comfyui",
        neighbour.process.pid,
        {"cpu": NEEDS},
        True,
    )
    assert view.used_bytes is not None
    assert 60 * MIB < view.used_bytes < NEEDS
    [lease] = (await ledger.snapshot()).leases
    assert (lease.holder, lease.kind, lease.priority) == ("service:comfyui", HolderKind.SERVICE, 20)
    assert lease.preemptible
    with NodeLedger(ledger.state.ledger_path) as books:
        assert [row.pid for row in books.rows()] == [neighbour.process.pid]


async def test_an_idle_program_is_asked_to_free_and_its_claim_shrinks_to_what_it_uses(
    world: World, neighbour: Neighbour
) -> None:
    ledger = await world.client()
    neighbour.post("/work", mb=120)
    neighbour.post("/done")
    externals = await world.watch(neighbour.spec, ledger)
    await held(externals, lambda view: view.used_bytes and view.used_bytes > 120 * MIB)
    job = await ledger.acquire(a_job(DEVICE - 100 * MIB))
    assert job.state is LeaseState.QUEUED
    job = await granted(ledger, job)
    assert neighbour.asked_to_free == 1
    view = await held(externals, lambda view: view.notice is None)
    [share] = view.shares.values()
    assert view.used_bytes is not None
    assert view.used_bytes <= share <= 100 * MIB
    await ledger.cancel(job)


async def test_a_busy_program_is_asked_only_when_the_grace_is_over(world: World, neighbour: Neighbour) -> None:
    ledger = await world.client()
    neighbour.post("/work", mb=120)
    externals = await world.watch(replace(neighbour.spec, grace_s=2.0), ledger)
    await held(externals, lambda view: view.busy)
    began_s = asyncio.get_running_loop().time()
    job = await ledger.acquire(a_job(DEVICE - 100 * MIB))
    await held(externals, lambda view: view.notice == "job:sft")
    assert neighbour.asked_to_free == 0
    job = await granted(ledger, job)
    assert asyncio.get_running_loop().time() - began_s >= 2.0
    assert neighbour.asked_to_free == 1
    await ledger.cancel(job)


async def test_a_busy_program_that_becomes_idle_is_asked_then(world: World, neighbour: Neighbour) -> None:
    ledger = await world.client()
    neighbour.post("/work", mb=120)
    externals = await world.watch(neighbour.spec, ledger)
    await held(externals, lambda view: view.busy)
    job = await ledger.acquire(a_job(DEVICE - 100 * MIB))
    await held(externals, lambda view: view.notice)
    neighbour.post("/done")
    await ledger.cancel(await granted(ledger, job))


async def test_a_program_that_works_again_gets_its_claim_back_when_there_is_room(
    world: World, neighbour: Neighbour
) -> None:
    ledger = await world.client()
    externals = await world.watch(neighbour.spec, ledger)
    await held(externals)
    job = await granted(ledger, await ledger.acquire(a_job(DEVICE - 100 * MIB)))
    await held(externals, lambda view: view.shares["cpu"] < NEEDS)
    neighbour.post("/work", mb=20)
    view = await held(externals, lambda view: view.problem)
    assert "comfyui" in str(view.problem)
    await ledger.cancel(job)
    view = await held(externals, lambda view: view.shares == {"cpu": NEEDS})
    assert view.problem is None


async def test_a_program_that_does_not_free_says_why_and_keeps_its_claim(world: World, neighbour: Neighbour) -> None:
    ledger = await world.client()
    neighbour.post("/sulk")
    externals = await world.watch(neighbour.spec, ledger)
    await held(externals)
    job = await ledger.acquire(a_job(DEVICE - 100 * MIB))
    view = await held(externals, lambda view: view.problem)
    assert "was answered with status 500" in str(view.problem)
    assert view.shares == {"cpu": NEEDS}
    await ledger.cancel(job)


@pytest.mark.parametrize(
    ("wish", "words"),
    [({"vram_bytes": 2 * DEVICE}, "cpu can give 600MiB"), ({"device": "gpu7"}, "no device 'gpu7'; it has cpu")],
)
async def test_what_can_never_be_leased_is_told(
    world: World, neighbour: Neighbour, wish: dict[str, Any], words: str
) -> None:
    externals = await world.watch(replace(neighbour.spec, **wish), await world.client())
    await until(lambda: words in str(externals.views()[0].problem), "the problem to be told")
    assert externals.views()[0].state is ExternalState.WAITING


async def test_a_program_that_ends_has_no_lease_and_gets_one_when_it_is_started_again(
    world: World, neighbour: Neighbour, tmp_dir: Path
) -> None:
    ledger = await world.client()
    externals = await world.watch(neighbour.spec, ledger)
    await held(externals)
    neighbour.process.kill()
    neighbour.process.wait()
    await until(lambda: externals.views()[0].state is ExternalState.ABSENT, "its end to be seen")

    async def free() -> bool:
        return (await ledger.snapshot()).leases == ()

    await until(free, "its lease to be gone")
    with a_neighbour(tmp_dir, neighbour.name) as again:
        assert (await held(externals)).pid == again.process.pid


async def test_the_next_broker_takes_the_lease_over(world: World, neighbour: Neighbour) -> None:
    first = await Client.connect(world.settings, name="first")
    second = await world.client("second")  # so that the keeper stays
    externals = Externals([neighbour.spec], first)
    externals.startup()
    await held(externals)
    await externals.shutdown()
    await first.close()
    [lease] = (await second.snapshot()).leases
    again = await world.watch(neighbour.spec, second)
    await held(again)
    assert [one.id for one in (await second.snapshot()).leases] == [lease.id]
    job = await granted(second, await second.acquire(a_job(DEVICE - 100 * MIB)))
    assert neighbour.asked_to_free == 1, "its notices are heard"
    await second.cancel(job)


async def test_a_program_under_somebody_elses_lease_is_left_alone(world: World, neighbour: Neighbour) -> None:
    ledger = await world.client()
    lease = await ledger.acquire(a_job(50 * MIB))
    lease = await ledger.activate(lease, ProcessIdentity.of(neighbour.process.pid))
    externals = await world.watch(neighbour.spec, ledger)
    await until(lambda: externals.views()[0].state is ExternalState.ELSEWHERE, "the lease to be seen")
    assert len((await ledger.snapshot()).leases) == 1
    await ledger.release(lease)


async def test_a_lease_waits_for_room_and_is_given_up_when_the_program_ends(world: World, neighbour: Neighbour) -> None:
    ledger = await world.client()
    job = await ledger.acquire(a_job(DEVICE - 100 * MIB))
    externals = await world.watch(neighbour.spec, ledger)

    async def queued() -> bool:
        return [lease.state for lease in (await ledger.snapshot()).leases][1:] == [LeaseState.QUEUED]

    await until(queued, "its lease to be queued")
    assert externals.views()[0].state is ExternalState.WAITING
    neighbour.process.kill()
    neighbour.process.wait()

    async def alone() -> bool:
        return len((await ledger.snapshot()).leases) == 1

    await until(alone, "its lease to be given up")
    await ledger.cancel(job)


async def test_an_end_of_the_broker_does_not_wait_for_a_store_that_hangs(
    world: World, neighbour: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "FAREWELL_S", 0.1)
    ledger = await world.client()
    job = await ledger.acquire(a_job(DEVICE - 100 * MIB))
    externals = await world.watch(neighbour.spec, ledger)

    async def states() -> list[LeaseState]:
        return [lease.state for lease in (await ledger.snapshot()).leases]

    async def queued() -> bool:
        return (await states())[1:] == [LeaseState.QUEUED]

    await until(queued, "its lease to be queued")
    keeper = psutil.Process(ledger._link.welcome.pid)
    [store] = [child for child in keeper.children() if "valkey" in child.name() or "redis" in child.name()]
    given_up: list[str] = []
    abandon = ledger.abandon
    monkeypatch.setattr(ledger, "abandon", lambda lease_id: (given_up.append(lease_id), abandon(lease_id)))
    store.suspend()
    try:
        await externals.shutdown()
        assert len(given_up) == 1
    finally:
        store.resume()

    async def alone() -> bool:
        return len(await states()) == 1

    await until(alone, "its lease to be given up once the store answers")
    await ledger.cancel(job)


async def test_where_nobody_measures_the_programs_word_is_taken(
    tmp_dir: Path, neighbour: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "LOOK_S", 0.2)
    world = World(tmp_dir, "sim0=300MiB")
    ledger = await world.client()
    externals = await world.watch(neighbour.spec, ledger)
    assert (await held(externals)).shares == {"sim0": NEEDS}
    job = await granted(ledger, await ledger.acquire(a_job(299 * MIB, device="sim0")))
    assert (await held(externals)).shares == {"sim0": MIB}
    await ledger.cancel(job)
    neighbour.process.kill()
    await world.close()
