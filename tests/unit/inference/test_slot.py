"""A slot's states, story and reports, whatever happens to its engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuboss import errors as ledger_errors
from gpuboss.leases import LeaseState, Notice
from inference import events, lease_terms, left_row
from inference.errors import EngineDied, IllegalTransition, LoadFailed, WillNeverFit
from inference.process import EndReason, Exited, LaunchOrder, Lost, Wedged
from inference.slot import STORY_LENGTH
from inference.slot_state import SlotState
from tests.support import until
from tests.unit.inference.slot_world import ENGINE_PID, OPTIONS, World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    for shim in made.shims.out:
        shim.obeys = True
    await made.slot.close()
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, left
    # Whatever was acquired was given back, once; and no shim is kept.
    given_back = [lease for _, lease in made.ledger.given_back]
    refused = made.ledger.refuses is not None
    assert refused or sorted(given_back) == sorted(request.request_id for request in made.ledger.requests)
    assert all(shim.closed for shim in made.shims.out)


async def ready(world: World) -> None:
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.slot.state is SlotState.READY, "the slot to be ready")


async def ended(world: World) -> events.SlotFailed | events.SlotGone:
    await until(lambda: world.told(events.SlotFailed) or world.told(events.SlotGone), "the end to be reported")
    [end] = world.told(events.SlotFailed) + world.told(events.SlotGone)
    assert isinstance(end, events.SlotFailed | events.SlotGone)
    return end


async def test_a_start_leads_to_ready_and_is_reported_step_by_step(world: World) -> None:
    assert world.slot.state is SlotState.IDLE
    await ready(world)
    granted, got_ready = world.events
    assert granted == events.LeaseGranted(100.0, "robin", {"sim0": 1 << 20})
    assert got_ready == events.SlotReady(100.0, "robin", 0.0)
    assert world.slot.pid == ENGINE_PID
    assert world.slot.engine is not None
    assert (world.slot.ready_at_s, world.slot.last_load_s) == (100.0, 0.0)
    assert world.slot.lease is not None
    assert world.slot.lease.shares == {"sim0": 1 << 20}


async def test_the_engine_is_ordered_with_its_lease_and_an_environment_of_its_own(world: World) -> None:
    await ready(world)
    [order] = world.shim.orders
    [launch] = world.backend.launches
    [request] = world.ledger.requests
    assert isinstance(order, LaunchOrder)
    assert order.argv == ("/bin/engine", "robin")
    assert order.env == {"A": "b", "GPUBOSS_LEASE": request.request_id}
    assert (order.lease.epoch, order.lease.seq, order.lease.holder) == (1, 1, "slot:robin")
    assert order.lease.shares == launch.shares == OPTIONS[0]
    assert order.socket == str(launch.socket)
    assert launch.socket.suffix == ".sock"
    assert len(launch.api_key) >= 32


async def test_a_stop_gives_everything_back_before_it_is_reported(world: World) -> None:
    await ready(world)
    world.slot.drain("room for raven")
    assert world.slot.state is SlotState.DRAINING
    world.slot.stop("drained")
    assert world.slot.state is SlotState.STOPPING
    assert await ended(world) == events.SlotGone(100.0, "robin")
    assert world.slot.state is SlotState.IDLE
    assert world.shim.orders[-1] == world.backend.stop_grace_s
    assert [how for how, _ in world.ledger.given_back] == ["release"]
    assert (world.slot.pid, world.slot.engine, world.slot.lease, world.slot.ready_at_s) == (None, None, None, None)


async def test_the_story_tells_every_move_with_its_reason(world: World) -> None:
    await ready(world)
    world.slot.drain("room for raven")
    world.slot.stop("drained")
    await ended(world)
    assert [(move.state, move.reason.split()[0]) for move in world.slot.story] == [
        (SlotState.LOADING, "wanted"),
        (SlotState.READY, "loaded"),
        (SlotState.DRAINING, "room"),
        (SlotState.STOPPING, "drained"),
        (SlotState.IDLE, "its"),
    ]


async def test_the_story_keeps_the_last_moves(world: World) -> None:
    for _ in range(STORY_LENGTH // 4 + 1):
        world.events.clear()
        await ready(world)
        world.slot.stop("again")
        await ended(world)
    assert len(world.slot.story) == STORY_LENGTH


@pytest.mark.parametrize("move", ["drain", "stop"])
async def test_a_move_that_is_not_allowed_raises_with_the_story(world: World, move: str) -> None:
    with pytest.raises(IllegalTransition, match="slot 'robin' is idle and cannot become"):
        getattr(world.slot, move)("why not")
    await ready(world)
    with pytest.raises(IllegalTransition, match=r"(?s)is ready and cannot become loading.*100\.000 loading: wanted"):
        world.slot.start(OPTIONS, 10)
    assert world.slot.state is SlotState.READY


async def test_an_engine_that_dies_while_it_serves_fails_the_slot_after_its_lease_is_released(world: World) -> None:
    await ready(world)
    world.shim.say(Exited(None, 11, 1, EndReason.EXIT))
    end = await ended(world)
    assert isinstance(end, events.SlotFailed)
    assert end.was_ready
    assert isinstance(end.error, EngineDied)
    assert "was killed by SIGSEGV" in end.error.message
    assert world.slot.state is SlotState.FAILED
    assert [how for how, _ in world.ledger.given_back] == ["release"]
    assert not world.told(events.LeaseLost)


async def test_a_failed_slot_starts_again(world: World) -> None:
    await ready(world)
    world.shim.say(Exited(1, None, 1, EndReason.EXIT))
    await ended(world)
    await ready(world)
    assert len(world.ledger.requests) == 2


async def test_a_lost_shim_is_cleared_up_by_the_keeper_before_the_lease_is_released(world: World) -> None:
    await ready(world)
    world.ledger.enter(world.ledger.requests[0].request_id)
    world.shim.say(Lost(-9))
    end = await ended(world)
    assert isinstance(end, events.SlotFailed)
    assert end.was_ready
    assert "its supervisor was ended by signal 9" in end.error.message
    assert world.ledger.sweeps >= 1
    assert world.ledger.rows() == []
    assert [type(event) for event in world.events[-2:]] == [events.LeaseLost, events.SlotFailed]


@pytest.mark.parametrize("answers", [True, False])
async def test_a_row_that_cannot_be_taken_out_is_waited_for_but_not_by_a_broker_that_ends(
    world: World, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """As on a full disk, or where the store keeps the keeper from answering."""
    monkeypatch.setattr(left_row, "SWEEP_S", 0.01)
    monkeypatch.setattr(left_row, "LAST_WAIT_S", 0.05)
    world.ledger.buries = False
    if not answers:
        world.ledger.answers.clear()
    await ready(world)
    [request] = world.ledger.requests
    world.ledger.enter(request.request_id)
    world.slot.stop("drained")
    world.shim.obeys = False
    world.shim.say(Lost(1))
    await until(lambda: world.ledger.sweeps > 2, "the keeper to be asked again and again")
    assert not world.told(events.SlotGone)
    await world.slot.close()
    assert isinstance(await ended(world), events.SlotGone)
    assert [row.lease_id for row in world.ledger.rows()] == [request.request_id]
    assert world.ledger.given_back == [], "what stands in the books is in use: its lease is not ours to release"
    world.ledger.given_back.append(("keeper", request.request_id))


async def test_an_engine_that_dies_while_it_drains_fails_the_slot(world: World) -> None:
    await ready(world)
    world.slot.drain("room for raven")
    world.shim.say(Exited(1, None, 1, EndReason.EXIT))
    assert isinstance(await ended(world), events.SlotFailed)


async def test_a_stop_while_the_lease_is_queued_cancels_it(world: World) -> None:
    world.ledger.free.clear()
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.slot.lease is not None, "the lease to be queued")
    world.slot.stop("nobody wants it")
    assert isinstance(await ended(world), events.SlotGone)
    assert [how for how, _ in world.ledger.given_back] == ["cancel"]
    assert not world.told(events.LeaseGranted)
    assert world.shim.orders == []


async def test_a_stop_at_the_very_start_leaves_nothing(world: World) -> None:
    world.slot.start(OPTIONS, 10)
    world.slot.stop("changed my mind")
    assert isinstance(await ended(world), events.SlotGone)
    world.ledger.requests.clear()  # the request was cancelled inside of `acquire`, which gives it up by itself
    world.ledger.given_back.clear()


async def test_a_stop_while_the_engine_loads_ends_it(world: World) -> None:
    world.backend.ready.clear()
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.backend.probes > 1, "the load to be probed")
    world.slot.stop("nobody wants it")
    assert isinstance(await ended(world), events.SlotGone)
    assert [how for how, _ in world.ledger.given_back] == ["release"]
    assert not world.told(events.SlotReady)


async def test_a_stop_in_the_moment_of_the_launch_ends_what_was_launched(world: World) -> None:
    world.slot._report = lambda event: (
        world.slot.stop("no more") if isinstance(event, events.LeaseGranted) else world.events.append(event)
    )
    world.slot.start(OPTIONS, 10)
    assert isinstance(await ended(world), events.SlotGone)
    launched = [order for order in world.shim.orders if isinstance(order, LaunchOrder)]
    assert len(launched) <= 1
    assert not launched or world.shim.orders[-1] == world.backend.stop_grace_s


async def test_closing_waits_until_nothing_is_left(world: World) -> None:
    await ready(world)
    await world.slot.close()
    assert isinstance(await ended(world), events.SlotGone)
    await world.slot.close()
    assert len(world.told(events.SlotGone)) == 1


async def test_a_lease_that_can_never_be_is_told_with_its_numbers(world: World) -> None:
    world.ledger.refuses = ledger_errors.LeaseRefused("2 GiB wanted, 1 GiB there is")
    world.slot.start(OPTIONS, 10)
    end = await ended(world)
    assert isinstance(end, events.SlotFailed)
    assert not end.was_ready
    assert isinstance(end.error, WillNeverFit)
    assert "2 GiB wanted" in end.error.message
    assert world.ledger.given_back == []


async def test_a_ledger_that_does_not_answer_fails_the_load(world: World) -> None:
    world.ledger.refuses = ledger_errors.StoreUnavailable("no answer for 10 s")
    world.slot.start(OPTIONS, 10)
    end = await ended(world)
    assert isinstance(end, events.SlotFailed)
    assert isinstance(end.error, LoadFailed)
    assert "no answer for 10 s" in end.error.message
    assert end.error.retry_after_s is not None


@pytest.mark.parametrize("error", [ledger_errors.StaleFence("over"), ledger_errors.StoreUnavailable("down")])
async def test_a_lease_that_cannot_be_released_does_not_keep_the_slot(
    world: World, error: ledger_errors.GpubossError
) -> None:
    world.ledger.fails_to_release = error
    await ready(world)
    world.slot.stop("drained")
    assert isinstance(await ended(world), events.SlotGone)


async def test_processes_that_sigkill_does_not_end_keep_the_memory_and_are_shown(world: World) -> None:
    await ready(world)
    world.shim.obeys = False
    world.slot.stop("drained")
    world.shim.say(Wedged((77,)))
    await until(lambda: world.slot.state is SlotState.WEDGED, "the slot to be wedged")
    assert "77" in world.slot.story[-1].reason
    assert world.ledger.given_back == []
    assert not world.told(events.SlotGone)
    world.shim.say(Exited(None, 9, 1, EndReason.STOPPED))
    assert isinstance(await ended(world), events.SlotGone)
    assert world.slot.state is SlotState.IDLE


async def test_a_fault_of_ours_fails_the_slot_and_gives_everything_back(world: World) -> None:
    async def broken(_: object) -> None:
        raise ZeroDivisionError("a bug")

    world.backend.probe = broken  # type: ignore[assignment, method-assign]
    world.slot.start(OPTIONS, 10)
    end = await ended(world)
    assert isinstance(end, events.SlotFailed)
    assert "an error of Model Boss itself: ZeroDivisionError" in end.error.message
    assert [how for how, _ in world.ledger.given_back] == ["release"]


# -- notices, and memory that others hold ----------------------------------------------------------------------------


async def test_a_slots_lease_says_that_it_yields_and_how_long_it_may_take(world: World) -> None:
    world.slot._grace_s = 12.0
    await ready(world)
    [request] = world.ledger.requests
    assert (request.preemptible, request.grace_s) == (True, 12.0)
    [order] = world.shim.orders
    assert isinstance(order, LaunchOrder)
    terms = json.loads(order.lease.terms)
    assert (terms["kind"], terms["priority"]) == ("slot", 10)


async def test_a_notice_is_reported_with_what_is_left_of_the_grace(world: World) -> None:
    await ready(world)
    world.ledger.notice(Notice("w1", "job:sft", 5, 0, 30.0, acknowledged=False, outranks=False))
    assert world.events[-1] == events.Noticed(100.0, "robin", "w1", "job:sft", 5, 130.0, outranks=False)
    world.ledger.notice(None)
    assert world.events[-1] == events.Withdrawn(100.0, "robin")


async def test_the_ledger_is_told_that_a_slot_yields(world: World) -> None:
    await ready(world)
    world.slot.acknowledge()
    await until(lambda: world.ledger.acknowledged == [world.ledger.requests[0].request_id], "the ledger to be told")


async def test_a_slot_that_waits_for_others_memory_takes_no_supervisor_before_it_has_it(world: World) -> None:
    world.ledger.free.clear()
    world.slot.ask(OPTIONS, 20)
    assert world.slot.state is SlotState.QUEUED
    await until(lambda: world.slot.lease is not None, "the lease to be queued")
    assert world.shims.out == []
    world.ledger.free.set()
    await until(lambda: world.slot.state is SlotState.READY, "the slot to be ready")
    assert [type(event) for event in world.events] == [events.LeaseGranted, events.SlotReady]


async def test_a_queued_slot_for_which_room_is_found_keeps_its_place_and_asks_for_that_room(world: World) -> None:
    world.ledger.free.clear()
    world.slot.ask(OPTIONS, 20)
    await until(lambda: world.slot.lease is not None, "the lease to be queued")
    found = ({"sim1": 1 << 20},)
    world.slot.start(found, 5)
    assert world.slot.state is SlotState.LOADING
    await until(lambda: world.ledger.changes == [(LeaseState.QUEUED, found, 5)], "the lease to be changed")
    assert len(world.ledger.requests) == 1


async def test_what_is_wanted_while_the_lease_is_asked_for_is_told_once_it_is_there(world: World) -> None:
    world.ledger.free.clear()
    world.slot.start(OPTIONS, 20)
    world.slot.reprice(10)
    world.slot.reprice(5)
    await until(lambda: world.ledger.changes == [(LeaseState.QUEUED, None, 5)], "the lease to be changed")


async def test_a_class_told_while_the_lease_is_granted_reaches_the_lease_that_is_held(world: World) -> None:
    """The queued lease the change was meant for is one that is held, which is changed otherwise."""
    world.ledger.free.clear()
    world.slot.ask(OPTIONS, 20)
    await until(lambda: world.slot.lease is not None, "the lease to be queued")
    world.ledger.free.set()
    world.slot.reprice(5)
    await until(lambda: world.ledger.changes == [(LeaseState.GRANTED, None, 5)], "the lease to be changed")


async def test_a_class_that_the_ledger_could_not_take_is_told_again(world: World, monkeypatch) -> None:
    monkeypatch.setattr(lease_terms, "RETRY_S", 0.01)
    await ready(world)
    world.ledger.fails_to_change = ledger_errors.StoreUnavailable("down")
    world.slot.reprice(50)
    await asyncio.sleep(0)
    world.ledger.fails_to_change = None
    await until(lambda: world.ledger.changes == [(LeaseState.GRANTED, None, 50)], "the lease to be changed")


async def test_a_start_takes_the_place_in_the_queue_that_it_is_given(world: World) -> None:
    world.slot.start(OPTIONS, 10, order=7)
    await until(lambda: world.slot.state is SlotState.READY, "the slot to be ready")
    assert world.ledger.orders == [7]


async def test_a_stop_while_the_slot_waits_for_others_leaves_the_queue(world: World) -> None:
    world.ledger.free.clear()
    world.slot.ask(OPTIONS, 10)
    await until(lambda: world.slot.lease is not None, "the lease to be queued")
    world.slot.stop("nobody waits for it any more")
    assert isinstance(await ended(world), events.SlotGone)
    assert [how for how, _ in world.ledger.given_back] == ["cancel"]


async def test_what_can_never_be_granted_fails_the_waiting_slot(world: World) -> None:
    world.ledger.refuses = ledger_errors.LeaseRefused("2 GiB wanted, 1 GiB there is")
    world.slot.ask(OPTIONS, 10)
    end = await ended(world)
    assert isinstance(end, events.SlotFailed)
    assert isinstance(end.error, WillNeverFit)
