"""The virtual world: what is decided comes true in its time, and a world can go on from any state of a scheduler."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import pytest

from inference import actions, events
from inference.events import Shares, Ticket
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from inference.simulation.ledger import VirtualLedger
from inference.simulation.synthetic import generate, parse_spec
from inference.simulation.trace import Trace
from inference.simulation.world import STOP_S, Standing, Times, World
from inference.slot_state import SlotState
from tests.unit.inference.simulation.scene import GIB, Story, a_device, a_model, a_trace, ask, played, waits


def a_world(trace: Trace, story: Story, **more: object) -> World:
    return World(
        Scheduler(trace.limits),
        devices=trace.devices,
        models={model.id: model.as_model() for model in trace.models},
        times=Times(trace.load_s, trace.service_s),
        requests=trace.requests,
        watcher=story,
        **more,  # type: ignore[arg-type]  # by name
    )


def told(trace: Trace) -> list[str]:
    story = Story()
    world = a_world(trace, story)
    world.begin()
    world.run()
    story.close()
    return story.words


def test_a_load_takes_its_time_and_a_request_its_own() -> None:
    outcome = played(a_trace([ask(0.0, "a", 2.0), ask(1.0, "a", 3.0)]))
    assert waits(outcome) == [10.0, 11.0]
    assert [turn.done_s for turn in outcome.journal.turns.values()] == [12.0, 15.0]


def test_a_swap_waits_for_the_memory_to_be_free() -> None:
    words = told(a_trace([ask(0.0, "a", 2.0, client="ann"), ask(20.0, "b", 2.0, client="bob")], min_residency_s=0.0))
    assert words == [
        "0 start a", "10 grant a to ann", "20 start b", "20 drain a", "20 stop a", "30.5 grant b to bob"
    ]  # fmt: skip


def test_a_request_of_unknown_length_takes_as_long_as_its_model_s_others() -> None:
    outcome = played(a_trace([ask(0.0, "a", 2.0), ask(0.0, "a", 4.0), ask(50.0, "a", None)]))
    last = list(outcome.journal.turns.values())[-1]
    assert last.done_s == 53.0


def test_callers_give_up_when_they_did() -> None:
    outcome = played(a_trace([ask(0.0, "a", 60.0), ask(1.0, "a", 1.0, left_s=5.0), ask(2.0, "a", 1.0, left_s=90.0)]))
    assert waits(outcome) == [10.0, None, 68.0]
    assert outcome.report.left == 1


def test_an_idle_model_leaves_when_its_time_is_over_and_not_before() -> None:
    words = told(
        a_trace([ask(0.0, "a", 2.0), ask(500.0, "b", 1.0)], models=[a_model("a", stay_warm_s=60.0), a_model("b")])
    )
    assert words[2:4] == ["73 drain a", "73 stop a"], "at the first tick after that"


def test_a_wish_to_stay_warm_counts() -> None:
    words = told(a_trace([ask(0.0, "a", 2.0, stay_warm_s=7.0), ask(500.0, "b", 1.0)]))
    assert words[2] == "20 drain a"


def test_who_waits_too_long_is_refused() -> None:
    outcome = played(a_trace([ask(0.0, "a", 100.0), ask(0.0, "a", 1.0)], max_wait_s=30.0))
    assert outcome.report.refused == {"queue_timeout": 1}


def test_preloaded_models_come_back_without_a_request() -> None:
    models = [a_model("a", preload=True), a_model("b", stay_warm_s=5.0)]
    words = told(a_trace([ask(20.0, "b", 2.0), ask(100.0, "b", 2.0)], models=models, min_residency_s=0.0))
    assert words[0].endswith(" start a")
    assert any(word.endswith("start a") for word in words[1:]), words


def test_a_model_with_several_slots_serves_in_all_of_them() -> None:
    models = [a_model("a", 4, replicas=2)]
    outcome = played(a_trace([ask(0.0, "a", 50.0), ask(0.0, "a", 50.0)], models=models))
    assert outcome.report.loads == 2
    assert max(wait or 0.0 for wait in waits(outcome)) < 50.0


def test_several_loads_go_on_at_once() -> None:
    models = [a_model("a", 5), a_model("b", 5)]
    assert waits(played(a_trace([ask(0.0, "a"), ask(0.0, "b")], models=models))) == [10.0, 10.0]


def test_memory_that_others_hold_is_not_there() -> None:
    held = a_device()
    held = type(held)("d0", held.total_bytes, 0, 5 * GIB, accelerator=True)
    outcome = played(a_trace([ask(0.0, "a")], devices=[held], max_wait_s=20.0))
    assert outcome.report.served == 0
    assert outcome.report.refused == {"queue_timeout": 1}


@pytest.mark.parametrize("seed", range(8))
def test_memory_is_never_oversold_and_everybody_is_answered(seed: int) -> None:
    spec = parse_spec(
        f"models=7 size=2GiB..14GiB load=1s..20s requests=300 rate=1/s parallel=1..3 seed={seed} leave=1s..400s "
        "classes=normal:6,high:1,batch:3"
    )
    trace = generate(spec, (a_device("d0", 16), a_device("d1", 12)))
    free = {device.id: device.capacity_bytes for device in trace.devices}
    held: dict[str, Shares] = {}

    class Checked(Story):
        def __call__(self, event: events.Event, decided: Sequence[actions.Action]) -> None:
            if isinstance(event, events.LeaseGranted):
                held[event.slot_id] = event.shares
            elif isinstance(event, events.SlotGone):
                held.pop(event.slot_id, None)
            for device, room in free.items():
                assert sum(shares.get(device, 0) for shares in held.values()) <= room
            super().__call__(event, decided)

    story = Checked()
    world = a_world(trace, story)
    world.begin()
    world.run()
    assert len(story.turns) == 300
    assert all(turn.end is not None for turn in story.turns.values())


# -- going on from a live scheduler ----------------------------------------------------------------------------------


def a_live_scheduler() -> tuple[Scheduler, Mapping[str, Ticket]]:
    """At 100 s: `a` works (since 99 s), `b` waits for room and leads, another for `a` waits behind."""
    scheduler = Scheduler(QueueLimits(min_residency_s=0.0))
    trace = a_trace([])
    scheduler.handle(events.DevicesRead(0.0, trace.devices))
    scheduler.handle(events.ModelsChanged(0.0, {model.id: model.as_model() for model in trace.models}))
    tickets = {name: Ticket(name, model, 10, at_s) for name, model, at_s in (("t1", "a", 80.0), ("t2", "b", 99.5))}
    scheduler.handle(events.Arrived(80.0, tickets["t1"]))
    scheduler.handle(events.LeaseGranted(80.0, "a", {"d0": 8 * GIB}))
    scheduler.handle(events.SlotReady(99.0, "a", 19.0))
    scheduler.handle(events.Arrived(99.5, tickets["t2"]))
    return scheduler, tickets


def going_on(scheduler: Scheduler, story: Story, *standing: Standing) -> World:
    trace = a_trace([])
    return World(
        scheduler,
        devices=trace.devices,
        models={model.id: model.as_model() for model in trace.models},
        times=Times(load_s={"a": 10.0, "b": 10.0}, service_s={"a": 4.0, "b": 2.0}),
        standing=standing,
        now_s=100.0,
        watcher=story,
    )


def test_a_world_goes_on_from_a_copy_of_a_live_scheduler() -> None:
    live, tickets = a_live_scheduler()
    twin = copy.deepcopy(live)
    story = Story()
    for ticket in tickets.values():
        story(events.Arrived(ticket.submitted_at_s, ticket), ())
    story((events.Arrived(80.0, tickets["t1"])), [actions.Start("a", "a", (), 10), actions.Grant("t1", "a")])
    busy = Standing("a", "a", SlotState.READY, {"d0": 8 * GIB}, in_flight={"t1": 99.0})
    world = going_on(twin, story, busy)
    while world.step():
        pass
    assert story.turns["t2"].granted_s == pytest.approx(99.0 + 4.0 + STOP_S + 10.0)
    assert live.waiting_count == 1, "the live one knows nothing of it"


@pytest.mark.parametrize(
    ("state", "leased", "expected_s"),
    [(SlotState.LOADING, True, 104.0), (SlotState.LOADING, False, 110.0), (SlotState.STOPPING, True, 110.0)],
)
def test_slots_that_load_or_leave_go_on_where_they_stand(state: SlotState, leased: bool, expected_s: float) -> None:
    scheduler = Scheduler()
    trace = a_trace([])
    scheduler.handle(events.DevicesRead(0.0, trace.devices))
    scheduler.handle(events.ModelsChanged(0.0, {model.id: model.as_model() for model in trace.models}))
    scheduler.handle(events.Arrived(94.0, Ticket("t1", "a", 10, 94.0)))
    if leased:
        scheduler.handle(events.LeaseGranted(94.0, "a", {"d0": 8 * GIB}))
    if state is SlotState.STOPPING:
        scheduler.handle(events.SlotReady(95.0, "a", 1.0))
        scheduler.handle(events.Served(96.0, "t1"))
        scheduler.handle(events.UnloadWanted(99.99, "a"))
        scheduler.handle(events.Arrived(99.99, Ticket("t2", "a", 10, 99.99)))
    granted: list[float] = []

    def watch(event: events.Event, decided: Sequence[actions.Action]) -> None:
        granted.extend(event.at_s for action in decided if isinstance(action, actions.Grant))

    standing = Standing("a", "a", state, {"d0": 8 * GIB}, leased=leased, since_s=94.0 if leased else 100.0)
    world = going_on(scheduler, watch, standing)  # type: ignore[arg-type]  # any watcher will do
    world.run()
    assert granted == [pytest.approx(expected_s, abs=STOP_S)]


def test_a_world_is_run_in_slices() -> None:
    story = Story()
    world = a_world(a_trace([ask(0.0, "a", 2.0), ask(30.0, "a", 2.0)]), story)
    world.begin()
    world.run(until_s=11.0)
    assert world.now_s >= 11.0
    assert world.busy
    assert len(story.turns) == 1
    world.run()
    assert not world.busy
    assert not world.step()
    assert len(story.turns) == 2


# -- the virtual ledger ------------------------------------------------------------------------------------------------


def test_leases_are_granted_in_order_of_class_and_asking() -> None:
    ledger = VirtualLedger([a_device()])
    for name, priority in (("late", 20), ("first", 10), ("second", 10)):
        ledger.queue(name, ({"d0": 6 * GIB},), priority)
    granted = []
    while (place := ledger.grant_next()) is not None:
        granted.append(place.slot_id)
        ledger.release(place.slot_id)
    assert granted == ["first", "second", "late"]


def test_a_blocked_lease_keeps_later_ones_from_its_devices_only() -> None:
    ledger = VirtualLedger([a_device("d0"), a_device("d1")])
    ledger.hold("old", {"d0": 8 * GIB})
    ledger.queue("blocked", ({"d0": 8 * GIB},), 10)
    ledger.queue("small", ({"d0": 2 * GIB},), 10)
    ledger.queue("beside", ({"d0": 2 * GIB}, {"d1": 2 * GIB}), 10)
    place = ledger.grant_next()
    assert place is not None
    assert (place.slot_id, place.shares) == ("beside", {"d1": 2 * GIB})
    assert ledger.grant_next() is None
    ledger.release("old")
    assert [place.slot_id for place in iter(ledger.grant_next, None)] == ["blocked", "small"]


def test_a_lease_may_go_ahead_of_others_and_change_its_class() -> None:
    ledger = VirtualLedger([a_device()])
    ledger.queue("queued", ({"d0": 20 * GIB},), 10)
    ledger.queue("quick", ({"d0": 2 * GIB},), 10, ahead_of=("queued",))
    place = ledger.grant_next()
    assert place is not None
    assert place.slot_id == "quick"
    ledger.queue("low", ({"d0": 2 * GIB},), 50)
    assert ledger.grant_next() is None
    ledger.reprice("low", 1)
    assert ledger.stirred
    place = ledger.grant_next()
    assert place is not None
    assert place.slot_id == "low"
