"""What becomes of callers without patience: kept places, loads that go on, models that stay, clients that rest."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from inference import events
from inference.errors import LoadFailed
from inference.events import Ticket
from inference.fault import Fault
from inference.places import MOST_PLACES, KeptPlaces, Place
from inference.queue import QueueLimits
from tests.unit.inference.scheduler_bench import Bench
from tests.unit.inference.scheduler_rules import GIB, a_device, a_model

A, B, C = a_model("a", 6), a_model("b", 6), a_model("c", 2)
LIMITS = QueueLimits(load_grace_s=0.0, min_residency_s=0.0)


def a_busy_bench(limits: QueueLimits = LIMITS) -> Bench:
    """`a` is loaded and busy, and there is no room for `b`."""
    bench = Bench(A, B, C, limits=limits)
    bench.ask("a")
    bench.up("a")
    return bench


# -- kept places --------------------------------------------------------------------------------------------------


def test_a_caller_who_timed_out_and_asks_again_stands_where_it_stood():
    bench = a_busy_bench(replace(LIMITS, max_wait_s=20.0))
    bench.ask("a", client="eve")
    bench.now += 10.0
    bench.ask("a")
    assert bench.after(10.0) == ["refuse a2 QueueTimeout"]
    bench.ask("a", client="eve")
    assert bench.served("a1") == ["grant a4"]


def test_a_caller_who_left_and_asks_again_stands_where_it_stood():
    bench = a_busy_bench()
    bench.ask("a", client="eve")
    bench.now += 10.0
    bench.ask("a")
    bench.abandoned("a2")
    bench.ask("a", client="eve")
    assert bench.served("a1") == ["grant a4"]


def test_at_a_kept_place_one_may_wait_for_the_whole_time_again():
    bench = a_busy_bench(replace(LIMITS, max_wait_s=20.0))
    bench.ask("a", client="eve")
    bench.after(20.0)
    bench.ask("a", client="eve")
    assert bench.after(19.0) == []
    assert bench.after(1.0) == ["refuse a3 QueueTimeout"]


def test_a_place_is_kept_for_the_same_client_and_model_alone_and_taken_once():
    bench = a_busy_bench()
    bench.ask("a", client="eve")
    bench.now += 1.0
    bench.ask("a", client="bob")
    bench.abandoned("a2")
    bench.now += 1.0
    for client in ("mallory", None, "eve", "eve"):
        bench.ask("a", client=client)
    order = [bench.served(last) for last in ("a1", "a6", "a3", "a4", "a5")]
    assert order == [["grant a6"], ["grant a3"], ["grant a4"], ["grant a5"], ["grant a7"]]


def test_a_place_is_kept_for_keep_place_s():
    for gone_s, first in ((120.0, "grant a4"), (121.0, "grant a3")):
        bench = a_busy_bench(replace(LIMITS, keep_place_s=120.0))
        bench.ask("a", client="eve")
        bench.now += 1.0
        bench.ask("a")
        bench.abandoned("a2")
        bench.now += gone_s
        bench.ask("a", client="eve")
        assert bench.served("a1") == [first]


def test_who_comes_back_to_a_kept_place_overtakes_whoever_stayed():
    """Else a heap of places, left before somebody came and taken up one by one, held a loaded model for ever."""
    bench = a_busy_bench(replace(LIMITS, max_overtakes=3))
    for n in range(20):
        bench.ask("a", client=f"eve{n}")
    for n in range(20):
        bench.abandoned(f"a{n + 2}")
    bench.now += 1.0
    bench.ask("b")
    overtaken, last = 0, "a1"
    for n in range(20):
        bench.ask("a", client=f"eve{n}")
        decided = bench.served(last)
        if "start b" in decided:
            break
        overtaken, last = overtaken + 1, f"a{n + 23}"
    assert overtaken == 3


def test_what_a_caller_suffered_from_overtaking_is_kept_with_its_place():
    """Without that, one who is less patient than `max_overtaken_s` would never have its turn."""
    bench = a_busy_bench(replace(LIMITS, max_overtaken_s=20.0, max_overtakes=10**9, max_wait_s=1e9))
    bench.ask("b", client="eve")
    said: list[str] = []
    for _ in range(40):
        bench.now += 1.0
        said += bench.ask("a")
        said += bench.served(bench.flying[0])
        if int(bench.now) % 7 == 0:  # eve's patience
            waiting = [ticket.id for ticket in bench.scheduler.waiting() if ticket.client_id == "eve"]
            for ticket_id in waiting:
                said += bench.abandoned(ticket_id)
            said += bench.ask("b", client="eve")
        if "start b" in said:
            break
    assert "start b" in said
    assert bench.now <= 1.0 + 20.0 + 2.0


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("ab"), st.booleans()), max_size=60))
def test_places_come_back_in_the_order_they_were_left_to_those_who_left_them(steps: list[tuple[str, str, bool]]):
    places, model = KeptPlaces(), dict[tuple[str, str], list[float]]()
    for now, (client, model_id, leaves) in enumerate(steps):
        ticket = Ticket(f"t{now}", model_id, 10, float(now), client_id=client)
        if leaves:
            places.keep(ticket, Place(float(now), until_s=now + 20.0))
            model.setdefault((client, model_id), []).append(float(now))
        else:
            mine = [at for at in model.get((client, model_id), []) if at + 20.0 >= now]
            taken = places.take(ticket, float(now))
            assert (taken.submitted_at_s if taken is not None else None) == (mine[0] if mine else None)
            model[client, model_id] = mine[1:]


def test_no_more_places_are_kept_than_there_is_a_bound():
    places = KeptPlaces()
    for number in range(MOST_PLACES + 50):
        places.keep(Ticket(f"t{number}", "a", 10, 0.0, client_id=f"c{number}"), Place(0.0, until_s=1.0))
    assert len(places) == MOST_PLACES
    places.forget(2.0)
    assert len(places) == 0


# -- loads that go on ------------------------------------------------------------------------------------------------


def test_a_load_goes_on_for_load_grace_s_after_its_callers_left_although_others_wait():
    bench = Bench(A, B, limits=replace(LIMITS, load_grace_s=10.0))
    bench.ask("a")
    bench.abandoned("a1")
    assert bench.ask("b") == []
    assert bench.after(9.9) == []
    assert bench.after(0.1) == ["start b", "stop a"]


def test_a_caller_who_comes_back_within_the_grace_finds_its_model_loading_on():
    bench = Bench(A, B, limits=replace(LIMITS, load_grace_s=10.0))
    bench.ask("a")
    bench.abandoned("a1")
    bench.ask("b")
    bench.now += 8.0
    assert bench.ask("a") == []
    bench.now += 8.0
    assert bench.up("a") == ["grant a3"]


def test_a_load_nobody_wants_goes_at_once_for_somebody_more_important():
    bench = Bench(A, B, limits=replace(LIMITS, load_grace_s=10.0))
    bench.ask("a")
    bench.abandoned("a1")
    assert bench.ask("b", priority=5) == ["start b", "stop a"]


def test_a_load_nobody_wants_and_nobody_minds_goes_on():
    bench = Bench(A, B, limits=replace(LIMITS, load_grace_s=10.0))
    bench.ask("a")
    bench.abandoned("a1")
    assert bench.after(100.0) == []
    assert bench.up("a") == []
    assert bench.ask("a") == ["grant a2"]


# -- minimum residency -----------------------------------------------------------------------------------------------


def loaded_for(load_s: float, limits: QueueLimits, model=A) -> Bench:
    bench = Bench(model, B, limits=limits)
    bench.ask("a")
    bench.up("a", load_s)
    bench.served("a1")
    return bench


def resident(min_residency_s: float | None = None, **more: float) -> QueueLimits:
    limits = replace(LIMITS, **more)  # type: ignore[arg-type]
    # The bench takes None for "no residency".
    return replace(limits, min_residency_s=math.inf if min_residency_s is None else min_residency_s)


def test_a_model_that_was_just_loaded_is_safe_from_its_equals_for_min_residency_s():
    bench = loaded_for(1.0, resident(5.0))
    assert bench.ask("b") == []
    assert bench.after(4.9) == []
    assert bench.after(0.1) == ["start b", "drain a", "stop a"]


def test_where_nothing_is_configured_that_is_three_times_what_its_load_took():
    bench = loaded_for(2.0, LIMITS)
    bench.scheduler.board.limits = replace(LIMITS, min_residency_s=None)
    assert bench.ask("b") == []
    assert bench.after(5.9) == []
    assert bench.after(0.1) == ["start b", "drain a", "stop a"]


def test_a_models_own_min_residency_s_goes_before_the_common_one():
    bench = loaded_for(1.0, resident(500.0), a_model("a", 6, min_residency_s=0.0))
    assert bench.ask("b") == ["start b", "drain a", "stop a"]


def test_nobody_waits_longer_than_max_overtaken_s_for_a_model_that_was_just_loaded():
    bench = loaded_for(100.0, resident(300.0, max_overtaken_s=20.0))
    assert bench.ask("b") == []
    assert bench.after(19.9) == []
    assert bench.after(0.1) == ["start b", "drain a", "stop a"]


def test_somebody_more_important_does_not_wait_for_a_model_that_was_just_loaded():
    bench = loaded_for(100.0, resident(300.0))
    assert bench.ask("b", priority=5) == ["start b", "drain a", "stop a"]


# -- clients that rest -----------------------------------------------------------------------------------------------


def test_a_client_rests_for_client_cooldown_s_after_a_request_and_then_has_its_place():
    bench = Bench(A, limits=replace(LIMITS, client_cooldown_s=5.0))
    bench.ask("a", client="eve")
    bench.up("a")
    bench.served("a1")
    assert bench.ask("a", client="eve") == []
    assert bench.after(4.9) == []
    assert bench.after(0.1) == ["grant a2"]


def test_others_do_not_wait_for_a_client_that_rests():
    bench = Bench(A, limits=replace(LIMITS, client_cooldown_s=5.0))
    bench.ask("a", client="eve")
    bench.up("a")
    bench.ask("a", client="eve")
    bench.ask("a", client="bob")
    assert bench.served("a1") == ["grant a3"]
    assert bench.served("a3") == []
    assert bench.after(5.0) == ["grant a2"]


def test_a_request_may_say_how_long_its_client_rests_after_it():
    bench = Bench(A, limits=LIMITS)
    bench.ask("a", client="eve", cooldown_s=3.0)
    bench.up("a")
    bench.served("a1")
    assert bench.ask("a", client="eve") == []
    assert bench.after(3.0) == ["grant a2"]


def test_a_client_that_rests_neither_loads_nor_defends_a_model():
    bench = Bench(A, B, limits=replace(LIMITS, client_cooldown_s=50.0))
    bench.ask("a", client="eve")
    bench.up("a")
    bench.served("a1")
    assert bench.ask("b", client="eve") == []
    bench.ask("a", client="eve")
    assert bench.ask("b", client="bob") == ["start b", "drain a", "stop a"]


def test_whoever_does_not_say_who_they_are_does_not_rest():
    bench = Bench(A, limits=replace(LIMITS, client_cooldown_s=5.0))
    bench.ask("a")
    bench.up("a")
    bench.served("a1")
    assert bench.ask("a") == ["grant a2"]


def test_a_client_that_rests_may_give_up_and_times_out_like_everybody():
    bench = Bench(A, limits=replace(LIMITS, client_cooldown_s=50.0, max_wait_s=10.0))
    bench.ask("a", client="eve")
    bench.up("a")
    bench.served("a1")
    bench.ask("a", client="eve")
    bench.ask("a", client="eve")
    assert bench.abandoned("a2") == []
    assert bench.after(10.0) == ["refuse a3 QueueTimeout"]
    assert bench.scheduler.waiting_count == 0


# -- claims end with their reason ------------------------------------------------------------------------------------


def a_suffering_client(bench: Bench) -> None:
    """`eve` leads those who wait for `b`, and was overtaken."""
    bench.ask("b", client="eve")
    bench.ask("a")
    bench.now += 1.0
    bench.served(bench.flying[0])


def test_a_place_that_is_taken_where_the_model_is_ready_holds_nobody():
    bench = a_busy_bench(replace(LIMITS, max_overtaken_s=5.0))
    a_suffering_client(bench)
    bench.abandoned("b2")
    bench.served(bench.flying[0])
    bench.ask("b")
    bench.up("b")
    bench.served(bench.flying[0])
    bench.ask("b", client="eve")
    bench.served(bench.flying[0])
    bench.now += 100.0
    for _ in range(3):
        bench.ask("b")
        assert bench.flying, "an idle, loaded model serves"
        bench.served(bench.flying[0])


def test_a_model_that_is_known_no_more_claims_nothing():
    bench = a_busy_bench(replace(LIMITS, max_overtaken_s=5.0))
    a_suffering_client(bench)
    bench.abandoned("b2")
    bench.ask("b", client="eve")
    bench.now += 100.0
    bench.tell(events.ModelsChanged(bench.now, {"a": A}))
    bench.served(bench.flying[0])
    assert bench.ask("a")[0].startswith("grant a")


def test_a_client_that_rests_holds_nobodys_model():
    bench = a_busy_bench(replace(LIMITS, max_overtaken_s=5.0))
    a_suffering_client(bench)
    bench.ask("c", client="eve", cooldown_s=60.0)
    bench.up("c")
    bench.served("c4")
    bench.now += 30.0
    bench.served(bench.flying[0])
    for _ in range(3):
        assert bench.ask("a")[0].startswith("grant a")
        bench.served(bench.flying[0])


def test_nobody_is_held_for_a_model_that_may_not_be_loaded_yet():
    bench = a_busy_bench(replace(LIMITS, max_overtakes=0))
    bench.tell(events.SlotFailed(bench.now, "b", LoadFailed("it crashed"), was_ready=False, fault=Fault.CRASH))
    bench.scheduler._breaker_of("b").failed(Fault.CRASH, bench.now, "it crashed")
    bench.ask("b")
    bench.served("a1")
    assert bench.ask("a") == ["grant a3"]


def test_a_place_holds_in_its_class_alone():
    bench = a_busy_bench()
    bench.ask("a", client="eve", priority=50)
    bench.abandoned("a2")
    bench.now += 10.0
    bench.ask("a")
    bench.ask("a", client="eve")
    assert bench.served("a1") == ["grant a3"]


def test_a_place_that_is_only_kept_and_never_used_grows_too_old():
    bench = a_busy_bench(replace(LIMITS, max_wait_s=20.0, keep_place_s=15.0))
    last = "a2"
    bench.ask("a", client="eve")
    for number in range(3, 9):
        bench.abandoned(last)
        bench.now += 10.0
        bench.ask("a", client="eve")
        last = f"a{number}"
    bench.abandoned(last)
    bench.ask("a")
    bench.ask("a", client="eve")
    assert bench.served("a1") == ["grant a9"]


# -- host memory beside an accelerator -------------------------------------------------------------------------------

HOSTED = a_model("hosted", 6, host_bytes=4 * GIB)


def test_nobody_goes_for_a_model_whose_host_memory_is_not_there():
    devices = (a_device("d0", 10), a_device("cpu", 8, others=5, accelerator=False))
    bench = Bench(A, HOSTED, devices=devices, limits=LIMITS)
    bench.loaded("a")
    assert bench.ask("hosted") == []
    assert bench.state("a") == "ready"
    freed = (a_device("d0", 10), a_device("cpu", 8, accelerator=False))
    assert bench.tell(events.DevicesRead(bench.now, freed)) == ["start hosted", "drain a", "stop a"]
    assert bench.starts["hosted"].options == ({"d0": 6 * GIB, "cpu": 4 * GIB},)


def test_a_model_whose_host_memory_never_fits_is_refused_and_evicts_nobody():
    bench = Bench(A, HOSTED, devices=(a_device("d0", 10), a_device("cpu", 3, accelerator=False)), limits=LIMITS)
    bench.loaded("a")
    assert bench.ask("hosted") == ["refuse hosted2 WillNeverFit"]
    assert "gpu_layers" in bench.errors["hosted2"].message
    assert bench.state("a") == "ready"
