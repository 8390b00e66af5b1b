"""A broker that was killed, and the next one: warm engines are adopted, with their leases; what cannot be is ended."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuboss.client import Client
from gpuboss.leases import HolderKind, LeaseRequest, LeaseState, new_request_id
from gpuboss.node_ledger import NodeLedger
from inference import engine_run, events, orphans
from inference.adoption import adopt_orphans
from inference.backends import REGISTRY
from inference.orphans import Past
from inference.slot import Slot
from inference.slot_state import SlotState
from tests.integration.inference.predecessor import SHARE, Had, Predecessor, model
from tests.integration.inference.shim_kit import alive
from tests.integration.inference.slot_kit import Rig, post, stream
from tests.support import until

CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8, "temperature": 0}


class Scene:
    """Brokers one after the other on one ledger; this process is the last of them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.state = rig.ledger.state
        self.brokers: list[Predecessor] = []

    def broker(self, *models: str, **more: Any) -> Predecessor:
        """Another process that has (or adopts) engines for these models."""
        made = Predecessor(self.state.root.parent, self.rig.binary, self.rig.file, *(models or ("robin",)), **more)
        self.brokers.append(made)
        return made

    async def killed(self, *models: str, **more: Any) -> dict[str, Had]:
        """What such a process had, that was killed when its engines were ready."""
        _, had = await self.killed_broker(*models, **more)
        return had

    async def killed_broker(self, *models: str, **more: Any) -> tuple[int, dict[str, Had]]:
        """Its pid, and what it had."""
        broker = self.broker(*models, **more)
        had = await asyncio.to_thread(broker.had)
        broker.kill()
        if more.get("grace_s", 30.0) is not None:
            leases = [one.lease for one in had.values()]
            file = partial(orphans.file_for, self.state)
            await until(lambda: all(file(lease).exists() for lease in leases), "the shims to have heard all orders")
        return broker.pid, had

    def slot(self, model_id: str, *, stall_s: float = 60.0, ledger: Client | None = None, **changes: Any) -> Slot:
        """An idle slot of ours; `changes` of its model's definition."""
        made = Slot(
            replace(model(model_id, self.rig.file), **changes),
            ledger=ledger or self.rig.ledger,
            backend=REGISTRY["llama-server"],
            binary=self.rig.binary,
            report=self.rig.events.append,
            shims=self.rig.shims,
            stall_s=stall_s,
            orphan_grace_s=30.0,
        )
        self.rig.slots.append(made)
        return made

    async def adopt(self, slot_for: Callable[[Past], Slot | None] | None = None, **changes: Any) -> list[Slot]:
        """As a broker does at its start."""
        return await adopt_orphans(self.rig.ledger, slot_for or (lambda past: self.slot(past.model_id, **changes)))

    def files(self) -> list[str]:
        """What is left on the disk of engines and shims."""
        return [path.name for path in (*self.state.root.glob("orphans/*"), *self.state.root.glob("*-*.sock"))]

    async def nothing_left(self, had: Had) -> None:
        """No process, no row, no lease, no file."""
        await until(lambda: not alive(had.pid) and not alive(had.shim), "the engine and its shim to be dead")
        await until(lambda: not self.rig.rows() and not self.files(), "row and files to be gone")

        async def no_lease() -> bool:
            return not await self.rig.leases()

        await until(no_lease, "the lease to be free")


@pytest.fixture
async def scene(rig: Rig) -> AsyncIterator[Scene]:
    made = Scene(rig)
    yield made
    for broker in made.brokers:
        broker.kill()
    for slot in rig.slots:
        await slot.close()
    for slot in await adopt_orphans(rig.ledger, lambda past: None):
        raise AssertionError(f"{slot} was adopted by nobody")
    assert not made.files()


def is_same(slot: Slot, had: Had) -> bool:
    """The very engine, under the very lease."""
    assert slot.lease is not None
    return (slot.pid, slot.shim_pid, slot.lease.id, slot.lease.fence) == (had.pid, had.shim, had.lease, had.fence)


# -- adopted ----------------------------------------------------------------------------------------------------------


async def test_a_warm_engine_is_adopted_with_its_lease_and_answers(scene: Scene) -> None:
    broker, had = await scene.killed_broker("robin", "raven")
    adopted = {slot.id: slot for slot in await scene.adopt()}
    assert adopted.keys() == {"robin", "raven"}
    for name, slot in adopted.items():
        assert is_same(slot, had[name])
        assert slot.state is SlotState.READY
        assert f"adopted from broker {broker}, as process {slot.pid}" in str(slot.story[-1])
        status, answer = await post(slot.engine, "/v1/chat/completions", CHAT)
        assert (status, answer["model"]) == (200, name)
        [told] = scene.rig.told(events.SlotAdopted, slot)
        assert isinstance(told, events.SlotAdopted)
        assert (told.model_id, told.shares, told.load_s) == (name, {"sim0": SHARE}, slot.last_load_s)
        assert told.load_s > 0, "what its load took then"
    leases = (await scene.rig.ledger.snapshot()).leases
    assert {lease.owner for lease in leases} == {scene.rig.ledger.owner}, "the leases are ours"
    for slot in adopted.values():
        slot.drain("a test")
        slot.stop("a test")
        await scene.rig.gone(slot)
    assert not scene.files()
    await scene.rig.check_nothing_left()


async def test_brokers_may_be_killed_one_after_the_other(scene: Scene) -> None:
    first = await scene.killed()
    second = await scene.killed(adopts=True)
    third = await scene.killed(adopts=True)
    assert first == second == third
    [slot] = await scene.adopt()
    assert is_same(slot, first["robin"])


async def test_an_adopted_engine_that_is_killed_fails_its_slot_and_is_loaded_again(scene: Scene) -> None:
    had = (await scene.killed())["robin"]
    [slot] = await scene.adopt()
    answer = await stream(slot.engine)
    await anext(answer)
    os.kill(had.pid, signal.SIGKILL)
    failure = await scene.rig.failed(slot)
    assert failure.was_ready
    scene.rig.events.clear()
    slot.start(({"sim0": SHARE},), 10)
    await until(lambda: slot.state is SlotState.READY, "it to be loaded anew")
    assert slot.shim_pid != had.shim, "by a shim of our own"


async def test_an_adopted_engines_shim_that_is_killed_fails_its_slot_and_the_keeper_clears_up(scene: Scene) -> None:
    had = (await scene.killed())["robin"]
    [slot] = await scene.adopt()
    os.kill(had.shim, signal.SIGKILL)
    failure = await scene.rig.failed(slot)
    assert "its supervisor" in failure.error.message
    assert [type(event) for event in scene.rig.events] == [events.SlotAdopted, events.LeaseLost, events.SlotFailed]
    assert not alive(had.pid)
    assert not scene.files()


async def test_an_adopted_engine_that_stands_still_is_noticed_as_any_other(scene: Scene) -> None:
    had = (await scene.killed())["robin"]
    [slot] = await scene.adopt(stall_s=1.0)
    answer = await stream(slot.engine)
    await anext(answer)
    os.kill(had.pid, signal.SIGSTOP)
    failure = await scene.rig.failed(slot)
    assert "no progress" in failure.error.message


async def test_a_notice_that_was_given_meanwhile_is_heard(scene: Scene) -> None:
    await scene.killed()
    waiting = LeaseRequest(new_request_id(), "job:sft", HolderKind.JOB, ({"sim0": 60 << 20},), 5)
    job = await scene.rig.ledger.acquire(waiting)
    assert job.state is LeaseState.QUEUED
    [slot] = await scene.adopt()
    adopted, noticed = scene.rig.events
    assert isinstance(adopted, events.SlotAdopted)
    assert isinstance(noticed, events.Noticed)
    assert (noticed.slot_id, noticed.by, noticed.holder) == ("robin", job.id, "job:sft")
    slot.stop("room for the job")
    granted = await scene.rig.ledger.wait_granted(job)
    await scene.rig.ledger.cancel(granted)


@pytest.mark.parametrize("asks", ["stream", "whole"])
async def test_what_the_dead_broker_had_asked_is_worked_on_no_more(scene: Scene, asks: str) -> None:
    await scene.killed(asks=asks, context=100_000)
    [slot] = await scene.adopt(context=100_000)

    async def rests() -> bool:
        await passes(1.25)  # asked more often it would not look after those who wait for a whole answer
        assert slot.engine is not None
        response = await slot.engine.open("GET", "/slots")
        return not any(place["is_processing"] for place in json.loads(await response.read()))

    await until(rests, "the engine to stop generating for nobody", timeout_s=5.0)
    assert (await post(slot.engine, "/v1/chat/completions", CHAT))[0] == 200


@pytest.mark.parametrize("victim", ["keeper", "store"])
async def test_a_keeper_or_store_that_is_killed_meanwhile_changes_nothing(scene: Scene, victim: str) -> None:
    had = (await scene.killed())["robin"]
    if victim == "keeper":
        os.kill(scene.rig.ledger._link.welcome.pid, signal.SIGKILL)
    else:
        os.kill(json.loads((scene.state.root / "store.pid").read_text())["pid"], signal.SIGKILL)
    [slot] = await scene.adopt()
    assert is_same(slot, had)
    await scene.rig.ledger.sweep()
    [lease] = (await scene.rig.ledger.snapshot()).leases
    assert (lease.state, lease.owner, lease.fence) == (LeaseState.ACTIVE, scene.rig.ledger.owner, had.fence)


async def test_a_successor_that_is_killed_at_any_moment_of_it_leaves_the_engine_to_the_next(scene: Scene) -> None:
    dice = random.Random(11)
    had = (await scene.killed())["robin"]
    seen = set()
    for _ in range(10):
        before, connected = _told(scene, had), dice.random() < 0.7
        successor = scene.broker(adopts=True)
        moment = partial(_has_begun, scene, had, before) if connected else partial(_is_elsewhere, successor)
        await until(moment, "it to begin")
        await passes(dice.uniform(0, 0.01))
        seen.add(_told(scene, had) != before)
        successor.kill()
    assert seen == {False, True}, "some were killed before they had it, and some after"
    [slot] = await scene.adopt()
    assert is_same(slot, had)
    assert (await post(slot.engine, "/v1/chat/completions", CHAT))[0] == 200


def _told(scene: Scene, had: Had) -> str:
    return orphans.file_for(scene.state, had.lease).read_text()


def _has_begun(scene: Scene, had: Had, before: str) -> bool:
    """Somebody is connected to the shim's door, or has been."""
    door = str(orphans.door_for(scene.state, had.lease))
    open_ends = Path("/proc/net/unix").read_text().count(door)
    return open_ends > 1 or _told(scene, had) != before


def _is_elsewhere(successor: Predecessor) -> bool:
    """It runs, and has not come so far."""
    return len(Path(f"/proc/{successor.pid}/maps").read_text()) > 0


async def passes(seconds: float) -> None:
    since_s = time.monotonic()
    await until(lambda: time.monotonic() > since_s + seconds, "time to pass")


async def test_of_two_brokers_that_start_at_once_one_gets_each_engine(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.takeover.ANSWER_S", 0.5)
    had = await scene.killed("robin", "raven")
    one, other = await asyncio.gather(scene.adopt(), scene.adopt())
    assert sorted(slot.id for slot in [*one, *other]) == ["raven", "robin"]
    for slot in [*one, *other]:
        assert is_same(slot, had[slot.id]), "nobody ended what the other had"


# -- not adopted ------------------------------------------------------------------------------------------------------


async def test_without_a_successor_everything_is_gone_after_the_grace(scene: Scene) -> None:
    had = (await scene.killed(grace_s=0.3))["robin"]
    await scene.nothing_left(had)


async def test_without_a_grace_engines_end_with_their_broker(scene: Scene) -> None:
    had = (await scene.killed(grace_s=None))["robin"]
    await scene.nothing_left(had)


async def test_what_a_shim_that_was_killed_meanwhile_left_is_tidied_up(scene: Scene) -> None:
    had = (await scene.killed())["robin"]
    os.kill(had.shim, signal.SIGKILL)
    await until(lambda: not alive(had.shim), "the shim to be dead")
    assert scene.files()
    assert await scene.adopt() == []
    await scene.nothing_left(had)


def _is_reaped(scene: Scene) -> Callable[[Past], Slot | None]:
    return lambda past: None


def _has_another_context(scene: Scene) -> Callable[[Past], Slot | None]:
    return lambda past: scene.slot(past.model_id, context=256)


def _has_another_file(scene: Scene) -> Callable[[Past], Slot | None]:
    status = scene.rig.file.stat()
    os.utime(scene.rig.file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    return lambda past: scene.slot(past.model_id)


def _has_a_broken_definition(scene: Scene) -> Callable[[Past], Slot | None]:
    return lambda past: scene.slot(past.model_id, extra_args=("--port=1",))


def _speaks_another_version(scene: Scene) -> Callable[[Past], Slot | None]:
    [file] = (scene.state.root / "orphans").iterdir()
    record = json.loads(file.read_text())
    file.write_text(json.dumps({name: record[name] for name in ("shim", "socket")} | {"protocol": 3}))
    return lambda past: scene.slot(past.model_id)


def _has_no_lease_any_more(scene: Scene) -> Callable[[Past], Slot | None]:
    def slot_for(past: Past) -> Slot | None:
        with NodeLedger(scene.state.ledger_path) as books:
            books.remove(past.lease_id, past.fence.epoch, past.fence.seq)
        return scene.slot(past.model_id)

    return slot_for


@pytest.mark.parametrize(
    "case",
    [
        _is_reaped,
        _has_another_context,
        _has_another_file,
        _has_a_broken_definition,
        _speaks_another_version,
        _has_no_lease_any_more,
    ],
)
async def test_what_cannot_be_adopted_is_ended_and_its_memory_is_back(
    scene: Scene, case: Callable[[Scene], Callable[[Past], Slot | None]], tmp_dir: Path
) -> None:
    scene.rig.file = copy_of(scene.rig.file, tmp_dir)
    had = (await scene.killed())["robin"]
    assert await scene.adopt(case(scene)) == []
    assert not alive(had.pid), "by the time the broker goes on"
    await scene.nothing_left(had)
    whole = await scene.rig.ledger.acquire(
        LeaseRequest(new_request_id(), "job:all", HolderKind.JOB, ({"sim0": 64 << 20},), 10)
    )
    assert whole.state is LeaseState.GRANTED
    await scene.rig.ledger.cancel(whole)


async def test_an_engine_that_does_not_answer_is_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_run, "PROBE_PATIENCE_S", 0.3)
    had = (await scene.killed())["robin"]
    os.kill(had.pid, signal.SIGSTOP)
    assert await scene.adopt() == []
    await scene.nothing_left(had)


async def test_a_shim_that_does_not_answer_is_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.takeover.ANSWER_S", 0.3)
    had = (await scene.killed())["robin"]
    os.kill(had.shim, signal.SIGSTOP)
    assert await scene.adopt() == []
    await until(lambda: not alive(had.pid), "the engine to be dead")
    assert await scene.adopt() == []
    await scene.nothing_left(had)


async def test_a_slot_gets_one_engine_and_any_other_that_was_its_is_ended(scene: Scene) -> None:
    had = await scene.killed("robin", "raven")
    slot = scene.slot("robin")
    [adopted] = await scene.adopt(lambda past: slot)
    assert adopted is slot
    await until(lambda: len(scene.rig.rows()) == 1, "the other to be ended")
    assert is_same(slot, had["robin"])


def copy_of(file: Path, folder: Path) -> Path:
    """Of a model's file, to be changed."""
    copy = folder / file.name
    copy.write_bytes(file.read_bytes())
    return copy
