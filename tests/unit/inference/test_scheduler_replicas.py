"""Several slots of one model: when a further one is loaded, which one a ticket gets, and when one goes."""

from __future__ import annotations

from inference import events
from inference.events import Purpose
from tests.unit.inference.scheduler_bench import Bench
from tests.unit.inference.scheduler_rules import a_device, a_model

TWO = a_model("a", 3, replicas=2)
B = a_model("b", 8)


def a_full_bench(*more: object, replicas: int = 2) -> Bench:
    """The model's first slot is busy, and a second request waits for which another slot was started."""
    bench = Bench(a_model("a", 3, replicas=replicas), *more)  # type: ignore[arg-type]
    bench.ask("a")
    bench.up("a")
    assert bench.ask("a") == ["start a#2"]
    return bench


def test_a_further_slot_is_loaded_into_free_room_when_all_places_are_taken():
    bench = a_full_bench()
    assert bench.starts["a#2"].priority == 1000
    assert bench.up("a#2") == ["grant a2"]
    assert bench.scheduler.in_flight("a") == bench.scheduler.in_flight("a#2") == 1


def test_there_are_no_more_slots_than_replicas():
    bench = a_full_bench()
    bench.up("a#2")
    assert bench.ask("a") == []


def test_one_further_slot_is_loaded_at_a_time():
    bench = a_full_bench(replicas=3)
    assert bench.ask("a") == []
    assert bench.up("a#2") == ["grant a2", "start a#3"]


def test_a_further_slot_evicts_nobody():
    bench = Bench(TWO, a_model("idle", 6), devices=(a_device("d0", 10),))
    bench.loaded("idle")
    bench.ask("a", priority=1)
    bench.up("a")
    assert bench.ask("a", priority=1) == []


def test_a_further_slot_is_not_loaded_where_somebody_waits_for_the_room():
    bench = Bench(TWO, a_model("busy", 5), B, devices=(a_device("d0", 12),))
    bench.ask("busy")
    bench.up("busy")
    bench.ask("a")
    bench.up("a")
    assert bench.ask("b") == []
    assert bench.ask("a") == []


def test_whoever_waits_is_served_by_the_slot_that_has_a_place_first():
    bench = a_full_bench()
    assert bench.served("a1") == ["grant a2"]
    assert bench.up("a#2") == []
    assert bench.ask("a") == ["grant a3"]
    assert bench.scheduler.in_flight("a#2") == 1


def test_a_ticket_gets_the_slot_with_the_least_to_do():
    bench = Bench(a_model("a", 3, replicas=2, parallel=2))
    for _ in range(3):
        bench.ask("a")
    assert bench.up("a") == ["grant a1", "grant a2", "start a#2"]
    assert bench.up("a#2") == ["grant a3"]
    bench.ask("a")
    assert bench.scheduler.in_flight("a#2") == 2


def test_a_session_stays_with_the_slot_that_had_its_last_request():
    bench = a_full_bench()
    bench.up("a#2")
    bench.served("a1")
    bench.served("a2")
    bench.ask("a", session="talk")  # both idle: the first
    bench.served("a3")
    bench.ask("a")
    bench.ask("a", session="other")
    assert "other" in bench.scheduler.board.slots["a#2"].sessions
    bench.served("a4")
    bench.served("a5")
    for _ in range(3):
        bench.ask("a", session="other")
        (flying,) = bench.flying
        assert bench.scheduler.in_flight("a#2") == 1
        bench.served(flying)


def test_a_session_does_not_wait_for_its_slot_while_another_has_a_place():
    bench = a_full_bench()
    bench.up("a#2")
    bench.served("a1")
    bench.served("a2")
    bench.ask("a", session="talk")
    assert bench.ask("a", session="talk") == ["grant a4"]
    assert bench.scheduler.in_flight("a#2") == 1


def test_a_further_slot_that_nobody_needs_any_more_goes_before_everything_else():
    bench = a_full_bench(B)
    assert bench.served("a1") == ["grant a2"]
    assert bench.ask("b", priority=5) == ["start b", "stop a#2", "drain a"]


def test_idle_slots_of_a_model_leave_one_by_one_when_their_time_is_over():
    bench = a_full_bench()
    bench.up("a#2")
    bench.served("a2")
    bench.now += 200.0
    bench.served("a1")
    assert bench.after(150.0) == ["drain a#2", "stop a#2"]
    bench.gone("a#2")
    assert bench.after(200.0) == ["drain a", "stop a"]


def test_unloading_a_model_takes_all_its_slots_out():
    bench = a_full_bench()
    bench.up("a#2")
    bench.served("a1")
    bench.served("a2")
    assert bench.tell(events.UnloadWanted(bench.now, "a")) == ["drain a", "stop a", "drain a#2", "stop a#2"]


def test_a_request_to_load_is_served_by_any_slot():
    bench = a_full_bench()
    assert bench.ask("a", purpose=Purpose.LOAD) == ["grant a3"]


def test_a_model_whose_slot_is_wedged_is_loaded_elsewhere():
    bench = Bench(a_model("a", 3))
    bench.loaded("a")
    bench.tell(events.UnloadWanted(bench.now, "a"))
    bench.tell(events.SlotWedged(bench.now, "a"))
    assert bench.state("a") == "wedged"
    assert bench.ask("a") == ["start a#2"]
    assert bench.up("a#2") == ["grant a2"]


def test_a_slot_that_wedges_by_itself_gets_no_more_tickets():
    bench = Bench(a_model("a", 3))
    bench.ask("a")
    bench.up("a")
    bench.tell(events.SlotWedged(bench.now, "a"))
    assert bench.served("a1") == []
    assert bench.ask("a") == ["start a#2"]


def test_what_is_wedged_counts_as_taken_until_it_is_gone():
    bench = Bench(a_model("a", 6))
    bench.loaded("a")
    bench.tell(events.UnloadWanted(bench.now, "a"))
    bench.tell(events.SlotWedged(bench.now, "a"))
    assert bench.ask("a") == []
    assert bench.gone("a") == ["start a"]


def test_an_adopted_slot_serves_at_once_and_keeps_what_its_load_took():
    bench = Bench(a_model("a", 3))
    shares = {"d0": a_model("a", 3).claim_bytes}
    assert bench.tell(events.SlotAdopted(bench.now, "a", "a", shares, 12.0)) == []
    assert bench.ask("a") == ["grant a1"]
    assert bench.scheduler.slot_view("a").last_load_s == 12.0


def test_an_adopted_slot_defends_itself_with_the_class_its_lease_has():
    bench = Bench(a_model("a", 6), B)
    bench.tell(events.SlotAdopted(bench.now, "a", "a", {"d0": a_model("a", 6).claim_bytes}, 12.0, 5))
    assert bench.ask("b") == []
    assert bench.ask("b", priority=5) == ["start b", "drain a", "stop a"]


def test_a_preloaded_model_that_was_adopted_is_not_loaded_twice():
    bench = Bench()
    model = a_model("a", 3, preload=True)
    bench.tell(events.ModelsChanged(bench.now, {"a": model}))
    bench.tell(events.SlotAdopted(bench.now, "a", "a", {"d0": model.claim_bytes}, 12.0))
    assert bench.after(1.0) == []
