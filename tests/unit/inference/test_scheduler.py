"""Decisions about slots: loading, granting, evicting, failing, staying warm, unloading, shutting down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuboss.units import format_bytes
from inference import errors, events
from inference.events import Purpose
from inference.fault import Fault
from inference.queue import QueueLimits
from inference.raised import raised
from inference.slot_state import SlotState
from tests.unit.inference.scheduler_bench import Bench
from tests.unit.inference.scheduler_rules import GIB, a_device, a_model

A, B, C = a_model("a", 6), a_model("b", 6), a_model("c", 2)


# -- loading and granting -----------------------------------------------------------------------------------------


def test_a_request_loads_its_model_and_is_granted_when_the_engine_answers():
    bench = Bench(A)
    assert bench.ask("a", priority=5) == ["start a"]
    assert bench.starts["a"].options == ({"d0": 6 * GIB},)
    assert bench.starts["a"].priority == 5
    assert bench.up("a") == ["grant a1"]
    assert bench.scheduler.in_flight("a") == 1
    assert bench.served("a1") == []
    assert bench.scheduler.in_flight("a") == 0


def test_a_request_for_a_ready_idle_model_is_granted_at_once():
    bench = Bench(A)
    bench.loaded("a")
    assert bench.ask("a") == ["grant a2"]


def test_one_load_serves_everybody_who_waits():
    bench = Bench(a_model("a", 6, parallel=3))
    assert bench.ask("a") == ["start a"]
    assert bench.ask("a") + bench.ask("a") == []
    assert bench.up("a") == ["grant a1", "grant a2", "grant a3"]


def test_an_engine_gets_no_more_requests_than_it_serves_at_once():
    bench = Bench(a_model("a", 6, parallel=2))
    for _ in range(4):
        bench.ask("a")
    assert bench.up("a") == ["grant a1", "grant a2"]
    assert bench.served("a2") == ["grant a3"]


def test_independent_models_load_at_once():
    bench = Bench(A, C)
    assert bench.ask("a") + bench.ask("c") == ["start a", "start c"]


def test_what_does_not_fit_waits_without_stopping_others():
    bench = Bench(A, B, C)
    bench.ask("a")
    assert bench.ask("b") == []
    assert bench.ask("c") == ["start c"]


def test_a_model_goes_where_another_lease_left_room():
    bench = Bench(A, devices=(a_device("d0", 10, others=5), a_device("d1", 10)))
    bench.ask("a")
    assert bench.starts["a"].options == ({"d1": 6 * GIB},)


def test_a_model_too_large_for_one_device_is_spread():
    bench = Bench(a_model("a", 15), devices=(a_device("d0", 10), a_device("d1", 10)))
    bench.ask("a")
    assert bench.starts["a"].options == ({"d0": 7.5 * GIB, "d1": 7.5 * GIB},)


def test_the_lease_says_where_the_model_went():
    bench = Bench(A, B, devices=(a_device("d0", 7), a_device("d1", 8)))
    bench.ask("a")
    assert bench.starts["a"].options == ({"d0": 6 * GIB}, {"d1": 6 * GIB})
    bench.tell(events.LeaseGranted(bench.now, "a", {"d1": 6 * GIB}))
    bench.ask("b")
    assert bench.starts["b"].options == ({"d0": 6 * GIB},)


def test_nothing_is_decided_before_the_devices_are_known():
    bench = Bench(A)
    bench.devices()
    assert bench.ask("a") == []
    assert bench.devices(a_device("d0", 10)) == ["start a"]


# -- evicting -----------------------------------------------------------------------------------------------------


def test_an_idle_model_makes_room_and_the_start_queues_first():
    bench = Bench(A, B)
    bench.loaded("a")
    assert bench.ask("b") == ["start b", "drain a", "stop a"]
    assert bench.reasons["a"] == "makes room for 'b' (class 10)"
    assert bench.scheduler.slot_view("a").beneficiary == "b"
    assert bench.gone("a") == []
    assert bench.up("b") == ["grant b2"]


def test_a_busy_model_of_the_same_class_is_left_to_finish():
    bench = Bench(A, B)
    bench.ask("a")
    bench.up("a")
    assert bench.ask("b") == []
    assert bench.served("a1") == ["start b", "drain a", "stop a"]


def test_a_busy_model_drains_for_a_more_important_class_and_stops_when_its_last_request_is_done():
    bench = Bench(a_model("a", 6, parallel=2), B)
    bench.ask("a")
    bench.ask("a")
    bench.up("a")
    assert bench.ask("b", priority=5) == ["start b", "drain a"]
    assert bench.served("a1") == []
    assert bench.served("a2") == ["stop a"]


def test_an_idle_model_does_not_yield_to_a_less_important_class_until_it_has_faded():
    bench = Bench(A, B)
    bench.ask("a", priority=5)
    bench.up("a")
    bench.served("a1")
    assert bench.ask("b", priority=10) == []
    assert bench.after(59.0) == []
    assert bench.after(1.0) == ["start b", "drain a", "stop a"]


def test_requests_for_a_draining_model_wait_and_load_it_again():
    bench = Bench(A, B)
    bench.loaded("a")
    bench.ask("a")
    assert bench.ask("b", priority=5) == ["start b", "drain a"]
    assert bench.ask("a", priority=1) == []
    assert bench.served("a2") == ["stop a"]
    assert bench.up("b") == ["grant b3"]
    assert bench.gone("a") == ["start a", "drain b"]


def test_a_pinned_model_is_never_evicted_and_the_refusal_says_so_in_numbers():
    bench = Bench(a_model("a", 6, pin=True), B)
    assert bench.first == ["start a"]
    bench.up("a")
    assert bench.ask("b", priority=1) == ["refuse b1 NoRoom"]
    assert "needs 6GiB" in bench.errors["b1"].message
    assert "'a' 6GiB" in bench.errors["b1"].message
    assert "`pin`" in bench.errors["b1"].message


def test_a_model_beside_a_pinned_one_waits_for_memory_that_other_programs_hold():
    bench = Bench(a_model("a", 6, pin=True), a_model("b", 4))
    bench.up("a")
    bench.devices(a_device("d0", 10, others=4))
    assert bench.ask("b") == []
    assert bench.devices(a_device("d0", 10)) == ["start b"]


def test_of_two_idle_models_the_one_that_is_cheap_to_reload_and_long_idle_goes():
    bench = Bench(a_model("a", 5), a_model("b", 5), a_model("d", 5))
    for name, load_s in (("a", 60.0), ("b", 2.0)):
        bench.ask(name)
        bench.up(name, load_s)
        bench.served(f"{name}{1 if name == 'a' else 2}")
    bench.now += 10.0
    assert bench.ask("d") == ["start d", "drain b", "stop b"]


def test_nothing_is_evicted_when_it_would_not_suffice():
    bench = Bench(a_model("a", 4), a_model("b", 4), a_model("d", 9))
    bench.loaded("a")
    bench.ask("b")
    bench.up("b")
    assert bench.ask("d") == []
    assert bench.state("a") == "ready"


def test_a_load_nobody_wants_any_more_goes_on_until_somebody_needs_its_room():
    bench = Bench(A, B)
    bench.ask("a")
    assert bench.abandoned("a1") == []
    assert bench.ask("b") == ["start b", "stop a"]
    assert "nobody waits for it" in bench.reasons["a"]
    assert bench.gone("a") == []
    assert bench.tell(events.SlotReady(bench.now, "a", 1.0)) == []


def test_a_wanted_load_is_not_evicted_even_for_a_more_important_class():
    bench = Bench(A, B)
    bench.ask("a", priority=50)
    assert bench.ask("b", priority=1) == []
    assert bench.up("a") == ["start b", "drain a", "stop a"]


def test_room_being_freed_is_promised_to_one_only():
    bench = Bench(A, B, a_model("d", 6))
    bench.loaded("a")
    assert bench.ask("b") == ["start b", "drain a", "stop a"]
    assert bench.ask("d") == []


def test_readings_that_shrink_the_room_evict_nobody():
    bench = Bench(A)
    bench.loaded("a")
    assert bench.devices(a_device("d0", 10, others=9)) == []
    assert bench.state("a") == "ready"


def test_a_queued_load_whose_room_is_taken_gives_up_and_starts_again_when_there_is_room():
    bench = Bench(A)
    bench.ask("a")
    assert bench.devices(a_device("d0", 10, others=8)) == []
    assert bench.after(4.0) == []
    assert bench.after(1.0) == ["stop a"]
    assert bench.gone("a") == []
    assert bench.devices(a_device("d0", 10)) == ["start a"]


def test_a_queued_load_is_not_given_up_for_an_overdue_ticket_that_waits_for_the_same_device():
    large = a_model("d", 9)
    bench = Bench(A, a_model("b", 3), a_model("c", 3), large, limits=QueueLimits(max_overtakes=0))
    bench.ask("a")
    bench.up("a")
    bench.ask("b", priority=20)
    bench.up("b")
    assert bench.ask("c", priority=5) == ["start c", "drain b"]
    assert bench.ask("d", priority=5) == []
    assert bench.after(1.0) + bench.after(60.0) == []
    assert bench.served("b2") == ["stop b"]
    assert bench.up("c") == ["grant c3"]


def test_a_queued_load_survives_a_reading_that_is_wrong_for_a_moment():
    bench = Bench(A)
    bench.ask("a")
    bench.devices(a_device("d0", 10, others=8))
    assert bench.devices(a_device("d0", 10)) == []
    assert bench.after(60.0) == []
    assert bench.up("a") == ["grant a1"]


# -- refusals -----------------------------------------------------------------------------------------------------


def test_a_model_larger_than_every_device_is_refused_with_numbers_and_the_setting_to_change():
    bench = Bench(a_model("a", 12))
    assert bench.ask("a") == ["refuse a1 WillNeverFit"]
    message = bench.errors["a1"].message
    for part in ("12GiB", "10GiB", "11GiB less 1GiB reserve", "`vram`", "`devices`", "`reserve`"):
        assert part in message


def test_an_unknown_and_a_broken_model_are_refused():
    bench = Bench(replace(A, problem="the file is truncated"))
    assert bench.ask("a") == ["refuse a1 ModelBroken"]
    assert "truncated" in bench.errors["a1"].message
    assert bench.ask("nobody") == ["refuse nobody2 ModelNotFound"]


def test_a_full_queue_refuses_the_next_but_not_one_that_need_not_wait():
    bench = Bench(A, B, limits=QueueLimits(max_waiting=1))
    bench.loaded("a")
    bench.ask("a")
    assert bench.ask("b") == []
    assert bench.ask("b") == ["refuse b4 QueueFull"]
    assert "`queue.max_waiting`" in bench.errors["b4"].message
    assert 1.0 <= bench.errors["b4"].retry_after_s <= 60.0
    bench.served("a2")
    bench.gone("a")
    bench.up("b")
    bench.served("b3")
    assert bench.ask("a") == ["start a", "drain b", "stop b"]
    assert bench.ask("b", purpose=Purpose.LOAD) == ["refuse b6 QueueFull"]


def test_a_ticket_that_waits_too_long_is_refused_at_a_tick_with_its_place():
    bench = Bench(A, B, limits=QueueLimits(max_wait_s=30.0))
    bench.ask("a")
    bench.up("a")
    bench.ask("b")
    bench.ask("b")
    assert bench.after(29.9) == []
    assert bench.after(0.1) == ["refuse b2 QueueTimeout", "refuse b3 QueueTimeout"]
    assert "number 1 of 2" in bench.errors["b2"].message
    assert "`queue.max_wait_s`" in bench.errors["b2"].message
    assert "4GiB of 10GiB free on d0" in bench.errors["b2"].message
    assert "the model is not loaded; " in bench.errors["b2"].message
    assert "`model-boss explain b`" in bench.errors["b2"].message


def test_who_waited_too_long_is_told_what_its_model_is_doing():
    bench = Bench(A, B, limits=QueueLimits(max_wait_s=30.0))
    bench.ask("a")
    bench.up("a")
    bench.ask("a")
    assert bench.after(30.0) == ["refuse a2 QueueTimeout"]
    assert "the model is loaded, with 1 in flight; " in bench.errors["a2"].message
    assert bench.served("a1") == []
    bench.ask("b")
    assert bench.after(30.0) == ["refuse b3 QueueTimeout"]
    assert "the model is being loaded; " in bench.errors["b3"].message


# -- other purposes -----------------------------------------------------------------------------------------------


def test_a_load_ticket_is_served_by_the_model_being_ready():
    bench = Bench(A)
    assert bench.ask("a", purpose=Purpose.LOAD) == ["start a"]
    assert bench.up("a") == ["grant a1"]


def test_a_load_ticket_does_not_wait_for_a_place_at_the_engine():
    bench = Bench(A)
    bench.ask("a")
    bench.up("a")
    assert bench.ask("a") == []
    assert bench.ask("a", purpose=Purpose.LOAD) == ["grant a3"]


def test_a_peek_loads_into_free_room():
    bench = Bench(A)
    assert bench.ask("a", purpose=Purpose.PEEK) == ["start a"]


def test_a_peek_evicts_nobody_and_is_refused_with_numbers():
    bench = Bench(A, B)
    bench.loaded("a")
    assert bench.ask("b", purpose=Purpose.PEEK) == ["refuse b2 NoRoom"]
    assert "6GiB" in bench.errors["b2"].message
    assert "4GiB of 10GiB free on d0" in bench.errors["b2"].message


def test_a_peek_rides_along_when_somebody_else_loads_the_model():
    bench = Bench(a_model("a", 6, parallel=2), B)
    bench.ask("b")
    bench.up("b")
    assert bench.ask("a") == []
    assert bench.ask("a", purpose=Purpose.PEEK) == []
    bench.served("b1")
    assert bench.up("a") == ["grant a2", "grant a3"]


def test_a_peek_does_not_keep_a_model_warm():
    bench = Bench(a_model("a", 6, stay_warm_s=100.0))
    bench.loaded("a")
    bench.after(90.0)
    assert bench.ask("a", purpose=Purpose.PEEK) == ["grant a2"]
    bench.served("a2")
    assert bench.after(10.0) == ["drain a", "stop a"]


# -- staying warm -------------------------------------------------------------------------------------------------


def test_an_idle_model_leaves_after_its_time_and_a_request_prolongs_it():
    bench = Bench(a_model("a", 6, stay_warm_s=100.0))
    bench.loaded("a")
    bench.after(60.0)
    bench.ask("a")
    bench.served("a2")
    assert bench.after(99.0) == []
    assert bench.after(1.0) == ["drain a", "stop a"]


def test_a_busy_model_does_not_leave():
    bench = Bench(a_model("a", 6, stay_warm_s=1.0))
    bench.ask("a")
    bench.up("a")
    assert bench.after(1000.0) == []


def test_a_requests_own_wish_beats_the_models_time_and_outlasts_requests_without_one():
    bench = Bench(a_model("a", 6, stay_warm_s=10.0))
    bench.loaded("a")
    bench.ask("a", stay_warm_s=500.0)
    bench.served("a2")
    bench.ask("a")
    bench.served("a3")
    assert bench.after(499.0) == []
    bench.ask("a", stay_warm_s=0.0)
    bench.served("a4")
    assert bench.after(0.0) == ["drain a", "stop a"]


def test_how_long_a_model_stays_can_be_changed_while_it_does():
    bench = Bench(a_model("a", 6, stay_warm_s=100.0))
    bench.loaded("a")
    bench.after(60.0)
    bench.tell(events.ModelsChanged(bench.now, {"a": a_model("a", 6, stay_warm_s=200.0)}))
    assert bench.after(139.0) == []
    bench.tell(events.ModelsChanged(bench.now, {"a": a_model("a", 6, stay_warm_s=500.0)}))
    assert bench.after(1.0) == []
    bench.tell(events.ModelsChanged(bench.now, {"a": a_model("a", 6, stay_warm_s=20.0)}))
    assert bench.after(0.0) == ["drain a", "stop a"]


def test_a_changed_rule_leaves_a_requests_wish_alone_which_lasts_until_the_next_load():
    bench = Bench(a_model("a", 6, stay_warm_s=10.0))
    bench.loaded("a")
    bench.ask("a", stay_warm_s=500.0)
    bench.served("a2")
    bench.tell(events.ModelsChanged(bench.now, {"a": a_model("a", 6, stay_warm_s=1.0)}))
    assert bench.after(499.0) == []
    bench.tell(events.UnloadWanted(bench.now, "a"))
    bench.gone("a")
    bench.loaded("a")
    assert bench.after(1.0) == ["drain a", "stop a"]


def test_pinned_and_preloaded_models_do_not_leave():
    bench = Bench(a_model("a", 4, pin=True, stay_warm_s=1.0), a_model("b", 4, preload=True, stay_warm_s=1.0))
    bench.up("a")
    bench.up("b")
    assert bench.after(1000.0) == []
    assert bench.scheduler.slot_view("b").warm_until_s is None


# -- preloading ---------------------------------------------------------------------------------------------------


def test_pinned_models_are_started_before_preloaded_ones_and_only_into_free_room():
    bench = Bench(a_model("b", 6, preload=True), a_model("a", 6, pin=True), a_model("c", 2, preload=True))
    assert bench.first == ["start a", "start c"]


def test_a_preloaded_model_yields_to_any_request_and_comes_back_when_there_is_room():
    bench = Bench(a_model("a", 6, preload=True), a_model("b", 6, stay_warm_s=50.0))
    bench.up("a")
    assert bench.ask("b", priority=1000) == ["start b", "drain a", "stop a"]
    bench.gone("a")
    bench.up("b")
    bench.served("b1")
    assert bench.after(49.0) == []
    assert bench.after(1.0) == ["drain b", "stop b", "start a"]


def test_a_preload_does_not_take_room_somebody_waits_for():
    preloaded, large = a_model("a", 2, preload=True), a_model("d", 8)
    bench = Bench(B, large)
    bench.ask("b")
    bench.up("b")
    assert bench.ask("d") == []
    assert bench.tell(events.ModelsChanged(bench.now, {"a": preloaded, "b": B, "d": large})) == []
    assert bench.served("b1") == ["start d", "drain b", "stop b"]
    assert bench.after(1.0) == ["start a"]


def test_a_preload_under_way_is_cancelled_for_a_request():
    bench = Bench(a_model("a", 6, preload=True), B)
    assert bench.ask("b") == ["start b", "stop a"]


def test_a_failed_preload_is_left_alone_until_a_request_or_a_change():
    bench = Bench(a_model("a", 6, preload=True))
    assert bench.failed("a", was_ready=False) == []
    assert bench.after(1.0) + bench.after(1000.0) == []
    assert bench.tell(events.ModelsChanged(bench.now, {"a": a_model("a", 6, preload=True)})) == []
    assert bench.tell(events.Tick(bench.now)) == ["start a"]
    bench.failed("a", was_ready=False)
    assert bench.ask("a") == ["start a"]


def test_a_preloaded_model_that_an_operator_unloaded_stays_out_until_a_request():
    bench = Bench(a_model("a", 6, preload=True))
    bench.up("a")
    assert bench.tell(events.UnloadWanted(bench.now, "a")) == ["drain a", "stop a"]
    bench.gone("a")
    assert bench.after(5.0) == []
    assert bench.ask("a") == ["start a"]


# -- failing ------------------------------------------------------------------------------------------------------


def test_a_failed_load_refuses_everybody_who_waits_with_the_engines_words():
    bench = Bench(A)
    bench.ask("a")
    bench.ask("a")
    assert bench.failed("a", was_ready=False) == ["refuse a1 LoadFailed", "refuse a2 LoadFailed"]
    assert "status 1" in bench.errors["a2"].message
    assert bench.ask("a") == ["start a"]


def test_an_engine_that_dies_is_loaded_again_for_those_who_wait_and_its_request_in_flight_comes_back_by_itself():
    bench = Bench(A)
    bench.ask("a")
    bench.ask("a")
    bench.up("a")
    assert bench.failed("a", was_ready=True) == ["start a"]
    assert bench.scheduler.in_flight("a") == 0
    assert bench.served("a1") == []
    assert bench.up("a") == ["grant a2"]


def test_an_engine_that_keeps_dying_is_given_up_after_a_few_loads():
    bench = Bench(A)
    for _ in range(5):
        bench.ask("a")
    bench.up("a")
    assert bench.failed("a", was_ready=True, fault=Fault.CRASH) == ["start a"]
    bench.up("a")
    assert bench.failed("a", was_ready=True, fault=Fault.CRASH) == []
    bench.now += 1.5
    assert bench.tell(events.Tick(bench.now)) == ["start a"]
    bench.up("a")
    assert bench.failed("a", was_ready=True, fault=Fault.CRASH) == ["refuse a4 LoadFailed", "refuse a5 LoadFailed"]
    assert bench.ask("a") == ["refuse a6 LoadFailed"]


def test_an_operator_who_loads_a_model_by_hand_has_it_tried_at_once():
    bench = Bench(A)
    bench.ask("a")
    assert bench.failed("a", was_ready=False, fault=Fault.BAD_MODEL) == ["refuse a1 LoadFailed"]
    assert bench.ask("a") == ["refuse a2 LoadFailed"]
    assert bench.ask("a", purpose=Purpose.LOAD) == ["start a"]


def test_a_model_whose_definition_changed_is_tried_again():
    bench = Bench(A)
    bench.ask("a")
    bench.failed("a", was_ready=False, fault=Fault.BAD_ARGUMENTS)
    bench.tell(events.ModelsChanged(bench.now, {"a": a_model("a", 6, extra_args=("--flash-attn",))}))
    assert bench.ask("a") == ["start a"]


def test_a_load_that_ran_out_of_memory_is_tried_once_with_a_larger_claim_and_then_refused_with_numbers():
    bench = Bench(A)
    bench.ask("a")
    assert bench.failed("a", was_ready=False, fault=Fault.OUT_OF_MEMORY) == ["start a"]
    assert sum(bench.starts["a"].options[0].values()) == raised(A).claim_bytes
    assert bench.failed("a", was_ready=False, fault=Fault.OUT_OF_MEMORY) == ["refuse a1 LoadFailed"]
    error = bench.errors["a1"]
    assert "6GiB" in error.message
    assert format_bytes(raised(A).claim_bytes) in error.message


def test_a_raised_claim_that_no_device_could_hold_is_refused_with_what_it_ran_out_with():
    bench = Bench(a_model("a", 9.5))
    bench.ask("a")
    assert bench.failed("a", was_ready=False, fault=Fault.OUT_OF_MEMORY) == ["refuse a1 WillNeverFit"]
    assert "ran out of memory with 9.5GiB" in bench.errors["a1"].message


def test_what_is_not_the_engines_doing_takes_its_tickets_along_and_is_no_reason_to_wait():
    bench = Bench(A)
    bench.ask("a")
    assert bench.failed("a", was_ready=False) == ["refuse a1 LoadFailed"]
    assert bench.ask("a") == ["start a"]


def test_an_engine_that_dies_while_draining_frees_the_room_it_was_leaving():
    bench = Bench(A, B)
    bench.ask("a")
    bench.up("a")
    bench.ask("b", priority=5)
    assert bench.failed("a", was_ready=True) == []
    assert bench.state("a") == "failed"
    assert bench.up("b") == ["grant b2"]


def test_a_lost_lease_is_room_only_when_the_engine_is_gone():
    bench = Bench(A, B)
    bench.loaded("a")
    assert bench.tell(events.LeaseLost(bench.now, "a")) == []
    assert bench.state("a") == "stopping"
    assert bench.ask("a") == []
    assert bench.gone("a") == ["start a"]


def test_a_model_that_keeps_losing_its_lease_is_given_up_after_a_few_loads():
    bench = Bench(A)
    bench.ask("a")
    said: list[str] = []
    for _ in range(3):
        said += bench.tell(events.LeaseLost(bench.now, "a"))
        said += bench.failed("a", was_ready=False)
        bench.now += 5.0
        said += bench.tell(events.Tick(bench.now))
    assert said == ["start a", "start a", "refuse a1 LoadFailed"]


def test_when_the_broker_waits_no_longer_what_still_runs_is_cut_short_and_told_why():
    bench = Bench(A)
    bench.ask("a")
    bench.up("a")
    assert bench.tell(events.ShutdownBegan(bench.now)) == ["drain a"]
    bench.now += 10.0
    assert bench.tell(events.ShutdownDue(bench.now, 10.0)) == ["cut a"]
    assert "was not done 10 s later" in bench.cut["a"].message
    assert bench.served("a1") == []


# -- operators ----------------------------------------------------------------------------------------------------


def test_unloading_drains_the_slot_and_refuses_who_waits_for_it():
    bench = Bench(A)
    bench.ask("a")
    bench.up("a")
    bench.ask("a")
    assert bench.tell(events.UnloadWanted(bench.now, "a")) == ["drain a", "refuse a2 Unloaded"]
    assert bench.served("a1") == ["stop a"]


def test_unloading_a_loading_model_stops_the_load():
    bench = Bench(A)
    bench.ask("a")
    assert bench.tell(events.UnloadWanted(bench.now, "a")) == ["stop a", "refuse a1 Unloaded"]


def test_a_removed_model_is_drained_and_its_tickets_are_refused():
    bench = Bench(A, C)
    bench.ask("a")
    bench.up("a")
    bench.ask("a")
    assert bench.tell(events.ModelsChanged(bench.now, {"c": C})) == ["drain a", "refuse a2 ModelNotFound"]
    assert bench.served("a1") == ["stop a"]
    assert bench.gone("a") == []
    assert bench.scheduler.slot_view("a").state is SlotState.IDLE


def test_a_changed_model_applies_to_the_next_load():
    bench = Bench(a_model("a", 6, parallel=1))
    bench.loaded("a")
    bench.tell(events.ModelsChanged(bench.now, {"a": a_model("a", 3, parallel=2)}))
    assert bench.ask("a") == ["grant a2"]
    assert bench.ask("a") == []
    assert bench.scheduler.slot_view("a").shares == {"d0": 6 * GIB}
    bench.tell(events.UnloadWanted(bench.now, "a"))
    bench.served("a2")
    bench.gone("a")
    bench.ask("a")
    assert bench.starts["a"].options == ({"d0": 3 * GIB},)


def test_the_rules_of_a_changed_model_apply_to_the_slot_it_has():
    bench = Bench(a_model("a", 6, pin=True), B)
    bench.up("a")
    assert bench.ask("b") == ["refuse b1 NoRoom"]
    assert bench.scheduler.slot_view("a").pinned
    bench.tell(events.ModelsChanged(bench.now, {"a": a_model("a", 6, extra_args=("--flash-attn",)), "b": B}))
    assert not bench.scheduler.slot_view("a").pinned
    assert bench.ask("b") == ["start b", "drain a", "stop a"]


def test_shutting_down_refuses_who_waits_drains_who_runs_and_starts_nothing():
    bench = Bench(A, B, a_model("c", 2), devices=(a_device("d0", 8), a_device("d1", 8)))
    bench.ask("a")
    bench.up("a")
    bench.ask("a")
    bench.ask("b")
    said = bench.tell(events.ShutdownBegan(bench.now))
    assert said == ["refuse a2 ShuttingDown", "refuse b3 ShuttingDown", "drain a", "stop b"]
    assert bench.ask("c") == ["refuse c4 ShuttingDown"]
    assert bench.served("a1") == ["stop a"]
    assert bench.gone("a") + bench.gone("b") + bench.after(5.0) == []


# -- any event in any state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        events.Served(0.0, "nobody"),
        events.Abandoned(0.0, "nobody"),
        events.LeaseGranted(0.0, "nobody", {"d0": 1}),
        events.LeaseLost(0.0, "nobody"),
        events.SlotReady(0.0, "nobody", 1.0),
        events.SlotFailed(0.0, "nobody", errors.LoadFailed("no"), was_ready=False),
        events.SlotGone(0.0, "nobody"),
        events.UnloadWanted(0.0, "nobody"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_about_strangers_change_nothing(event: events.Event):
    bench = Bench(A, B)
    bench.loaded("a")
    before = bench.scheduler.slot_view("a")
    assert bench.tell(event) == []
    assert bench.scheduler.slot_view("a") == before


def test_a_ticket_is_answered_once_however_often_it_arrives_or_ends():
    bench = Bench(A)
    bench.loaded("a")
    ticket = events.Ticket("x", "a", 10, 0.0)
    assert bench.tell(events.Arrived(0.0, ticket)) == ["grant x"]
    assert bench.tell(events.Arrived(0.0, ticket)) == []
    assert bench.served("x") + bench.served("x") + bench.abandoned("x") == []
    assert bench.scheduler.in_flight("a") == 0


def test_a_late_report_of_an_earlier_life_does_not_end_a_load():
    bench = Bench(A)
    bench.ask("a")
    assert bench.gone("a") == []
    assert bench.up("a") == ["grant a1"]


def test_the_clock_of_the_events_never_runs_backwards():
    bench = Bench(a_model("a", 6, stay_warm_s=10.0))
    bench.loaded("a")
    bench.after(9.0)
    assert bench.tell(events.Tick(0.0)) == []
    assert bench.after(1.0) == ["drain a", "stop a"]


# -- looking --------------------------------------------------------------------------------------------------------


def test_the_queue_shows_who_is_next_and_everyones_place():
    bench = Bench(A, B)
    bench.ask("a")
    bench.up("a")
    bench.ask("b", priority=20)
    bench.ask("a", priority=10)
    assert bench.scheduler.waiting_count == 2
    assert [ticket.id for ticket in bench.scheduler.waiting()] == ["a3", "b2"]
    assert bench.scheduler.position("b2") == (2, 2)
    assert bench.scheduler.position("a1") == (0, 2)


def test_a_slot_view_tells_the_state_in_numbers():
    bench = Bench(a_model("a", 6, stay_warm_s=100.0))
    assert bench.scheduler.slot_view("a").state is SlotState.IDLE
    bench.now = 7.0
    bench.ask("a", priority=5)
    bench.up("a", load_s=3.0)
    bench.ask("a", priority=20)
    view = bench.scheduler.slot_view("a")
    assert (view.state, view.in_flight, view.waiting, view.priority) == (SlotState.READY, 1, 1, 5)
    assert (view.shares, view.last_load_s, view.ready_at_s) == ({"d0": 6 * GIB}, 3.0, 7.0)
    assert view.warm_until_s == 107.0
