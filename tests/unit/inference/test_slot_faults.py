"""What a slot says of an engine that fails: which fault, in which words; stalls; processes that do not die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from inference import events, inquest, progress_watch
from inference.engine_log import log_path
from inference.errors import EngineDied, EngineStalled, IllegalTransition, ShuttingDown
from inference.fault import Fault
from inference.process import EndReason, Exited, LaunchOrder, Lost, Wedged
from inference.slot import Slot
from inference.slot_state import SlotState
from tests.support import until
from tests.unit.inference.slot_world import MODEL, OPTIONS, World

STALL_S = 60.0


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(progress_watch, "LOOK_EVERY_S", 0.01)
    made = World(tmp_path)
    made.ledger.state.log_dir.mkdir()
    yield made
    for shim in made.shims.out:
        shim.obeys = True
    await made.slot.close()


async def ready(world: World) -> None:
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.slot.state is SlotState.READY, "the slot to be ready")


async def failure(world: World) -> events.SlotFailed:
    await until(lambda: world.told(events.SlotFailed), "the failure to be reported")
    [failed] = world.told(events.SlotFailed)
    assert isinstance(failed, events.SlotFailed)
    assert failed.fault is failed.error.fault
    return failed


# -- which fault ---------------------------------------------------------------------------------------------------


async def test_the_backend_says_what_was_wrong_and_the_message_says_it_in_words(world: World) -> None:
    world.backend.fault = Fault.BAD_ARGUMENTS
    await ready(world)
    world.shim.say(Exited(1, None, 1, EndReason.EXIT))
    failed = await failure(world)
    assert failed.fault is Fault.BAD_ARGUMENTS
    assert failed.error.message == ("the engine of 'robin' does not understand its arguments; it ended with code 1")


async def test_memory_that_ran_out_is_told_with_what_was_leased(world: World) -> None:
    world.backend.fault = Fault.OUT_OF_MEMORY
    world.backend.ready.clear()
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.backend.probes > 1, "the load to be probed")
    world.shim.say(Exited(1, None, 1, EndReason.EXIT))
    failed = await failure(world)
    assert failed.fault is Fault.OUT_OF_MEMORY
    assert "its engine ran out of memory with 1MiB leased; it ended with code 1" in failed.error.message


@pytest.mark.parametrize(("kills", "fault"), [((3, 4), Fault.OUT_OF_MEMORY), ((3, 3), Fault.CRASH)])
async def test_a_kill_that_nobody_ordered_is_the_systems_if_the_system_counts_it(
    world: World, monkeypatch: pytest.MonkeyPatch, kills: tuple[int, int], fault: Fault
) -> None:
    counts = iter(kills)
    monkeypatch.setattr(inquest.oom_kills, "count", lambda: next(counts))
    await ready(world)
    world.shim.say(Exited(None, 9, 1, EndReason.EXIT))
    assert (await failure(world)).fault is fault


async def test_a_supervisor_that_was_killed_is_a_crash(world: World) -> None:
    await ready(world)
    world.shim.say(Lost(-9))
    assert (await failure(world)).fault is Fault.CRASH


async def test_what_is_not_the_engines_doing_has_no_fault(world: World) -> None:
    async def broken(_: object) -> None:
        raise ZeroDivisionError

    world.backend.probe = broken  # type: ignore[assignment, method-assign]
    world.slot.start(OPTIONS, 10)
    assert (await failure(world)).fault is None


async def test_a_state_directory_that_is_full_fails_the_load_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    world.slot.start(OPTIONS, 10)
    failed = await failure(world)
    assert "engine-home cannot be made in the state directory (No space left on device)" in failed.error.message
    monkeypatch.undo()


# -- stalls --------------------------------------------------------------------------------------------------------


async def working(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ready slot whose engine has a request."""
    await ready(world)
    monkeypatch.setattr(type(world.slot.engine), "working", property(lambda _: True))
    world.backend.says = lambda: "still here"
    await until(lambda: world.backend.asked > 1, "the engine to be asked how far it is")


async def test_an_engine_that_stalls_is_killed_and_its_requests_are_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await working(world, monkeypatch)
    engine = world.slot.engine
    assert engine is not None
    world.now_s += STALL_S + 1
    failed = await failure(world)
    assert isinstance(failed.error, EngineStalled)
    assert failed.was_ready
    assert failed.fault is Fault.STALL
    assert "no progress for 61 s, and `stall_s` in model-boss.yaml is 60" in failed.error.message
    told = engine.died("ended before it answered")
    assert isinstance(told, EngineStalled)
    assert (told.message, told.retry_after_s) == (failed.error.message, 1.0)
    assert world.shim.orders[-1] == 0.0, "killed, for it hears no SIGTERM"
    assert world.slot.state is SlotState.FAILED
    assert [how for how, _ in world.ledger.given_back] == ["release"]


async def test_an_engine_that_gets_on_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await working(world, monkeypatch)
    world.backend.says = lambda: world.now_s
    for _ in range(5):
        asked = world.backend.asked
        world.now_s += STALL_S / 2
        await until(lambda asked=asked: world.backend.asked > asked + 1, "the next answers")
    assert world.slot.state is SlotState.READY


async def test_a_stop_while_the_engine_is_asked_is_a_stop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await working(world, monkeypatch)

    async def hang(_: object) -> None:
        world.backend.asked += 100
        await asyncio.Event().wait()

    world.backend.progress = hang  # type: ignore[assignment, method-assign]
    await until(lambda: world.backend.asked > 100, "an answer that does not come")
    world.slot.stop("room for raven")
    await until(lambda: world.told(events.SlotGone), "the slot to be gone")
    assert not world.told(events.SlotFailed)


# -- processes that do not die ---------------------------------------------------------------------------------------


async def test_processes_that_do_not_die_are_reported_and_so_is_their_end_after_all(world: World) -> None:
    await ready(world)
    world.shim.obeys = False
    world.slot.stop("drained")
    world.shim.say(Wedged((77,)))
    await until(lambda: world.told(events.SlotWedged), "the wedge to be reported")
    assert world.events[-1] == events.SlotWedged(100.0, "robin")
    assert world.slot.state is SlotState.WEDGED
    world.shim.say(Exited(None, 9, 1, EndReason.STOPPED))
    await until(lambda: world.told(events.SlotGone), "the end to be reported")
    assert [type(event) for event in world.events[-2:]] == [events.SlotWedged, events.SlotGone]


# -- one of several slots, and a slot that follows another -------------------------------------------------------------


def another(world: World, **changes: object) -> Slot:
    return Slot(
        MODEL,
        ledger=world.ledger,
        backend=world.backend,
        binary=Path("/bin/engine"),
        report=world.events.append,
        shims=world.shims,  # type: ignore[arg-type] # plays it
        clock=lambda: world.now_s,
        **changes,  # type: ignore[arg-type] # names of arguments
    )


async def test_a_slot_of_several_has_its_own_name_wherever_slots_are_told_apart(world: World) -> None:
    world.slot = another(world, id="robin#2")
    await ready(world)
    assert world.slot.id == "robin#2"
    assert world.slot.model.id == "robin"
    assert [event.slot_id for event in world.events] == ["robin#2", "robin#2"]  # type: ignore[union-attr]
    assert world.ledger.requests[0].holder == "slot:robin#2"
    [order] = world.shim.orders
    assert isinstance(order, LaunchOrder)
    assert order.lease.holder == "slot:robin#2"
    assert order.log == str(log_path(world.ledger.state.log_dir, "robin#2"))
    assert order.argv == ("/bin/engine", "robin"), "its answers carry the model's name"


async def test_a_slot_goes_on_with_the_story_of_the_one_it_replaces(world: World) -> None:
    await ready(world)
    world.slot.stop("its model is another now")
    await until(lambda: world.told(events.SlotGone), "the slot to be gone")
    before = world.slot.story
    world.slot = Slot(
        replace(MODEL, context=1024),
        ledger=world.ledger,
        backend=world.backend,
        binary=Path("/bin/engine"),
        report=world.events.append,
        story=world.slot.story,
    )
    assert world.slot.story == before
    with pytest.raises(IllegalTransition, match=r"(?s)its story:.*wanted.*loaded in.*its model is another now"):
        world.slot.drain("why not")


async def test_the_shutdown_tells_those_in_flight_why(world: World) -> None:
    await ready(world)
    engine = world.slot.engine
    assert engine is not None
    world.slot.stop("the broker shuts down", ShuttingDown("the broker is shutting down"))
    await world.slot.wait_over()
    assert isinstance(engine.died("ended"), ShuttingDown)


async def test_an_engine_that_dies_on_its_own_is_told_as_ever(world: World) -> None:
    await ready(world)
    world.shim.say(Exited(None, 11, 1, EndReason.EXIT))
    failed = await failure(world)
    assert isinstance(failed.error, EngineDied)
    assert failed.error.message == "the engine of 'robin' crashed; it was killed by SIGSEGV"
