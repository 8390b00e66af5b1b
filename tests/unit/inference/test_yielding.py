"""Slots and holders outside the pool: giving way at a notice, coming back, and asking for others' memory."""

from __future__ import annotations

import math

import pytest

from gpuboss.priority import OVER_PINNED
from inference import events
from inference.demand import Demand
from inference.errors import Preempted
from inference.events import Purpose
from inference.queue import QueueLimits
from inference.slot_state import SlotState
from tests.unit.inference.scheduler_bench import Bench
from tests.unit.inference.scheduler_rules import GIB, a_device, a_model

A, B, C = a_model("a", 6), a_model("b", 6), a_model("c", 2)
TAKEN = (a_device("d0", 10, others=8, leased=8),)
"""A job holds 8 of the 10 GiB."""


def a_busy_bench(priority: int = 10, limits: QueueLimits | None = None, parallel: int = 1) -> Bench:
    """`a` is loaded and works on `a1`."""
    bench = Bench(a_model("a", 6, parallel=parallel), B, C, limits=limits)
    bench.ask("a", priority)
    bench.up("a")
    return bench


# -- an idle slot -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [10, 5, 0])
def test_an_idle_slot_yields_to_the_same_or_a_more_important_class_at_once(priority: int):
    bench = Bench(A)
    bench.loaded("a")
    assert bench.noticed("a", priority) == ["drain a", "stop a"]
    assert bench.reasons["a"].startswith("yields to job:job (class ")
    assert bench.acknowledged == ["a"]


def test_an_idle_slot_does_not_yield_to_a_less_important_class_until_it_has_faded():
    bench = Bench(A)
    bench.loaded("a")
    assert bench.noticed("a", 20) == []
    assert bench.acknowledged == []
    assert bench.after(59.0) == []
    assert bench.after(1.0) == ["drain a", "stop a"]


def test_a_class_that_falls_with_time_is_told_to_the_ledger():
    """Else the ledger, which goes by the lease, would never ask a slot that was loaded for somebody important."""
    bench = Bench(A)
    bench.ask("a", 5)
    bench.up("a")
    bench.served("a1")
    assert bench.lease_class["a"] == 5
    bench.after(60.0)
    assert bench.lease_class["a"] == 10
    bench.ask("a", 1)
    bench.after(1.0)
    assert bench.lease_class["a"] == 1


def test_what_yields_is_promised_to_the_job_and_taken_by_nobody_here():
    bench = Bench(A, B)
    bench.loaded("a")
    bench.noticed("a")
    assert bench.ask("b") == ["ask b"]
    assert bench.gone("a") == []
    assert bench.devices(a_device("d0", 10), waiting=["job"]) == []
    assert bench.after(1.0) == []
    assert bench.state("b") == "queued"


def test_without_the_promise_the_room_is_taken_before_the_job_has_it(monkeypatch):
    """The guard of the test above, switched off."""
    monkeypatch.setattr(
        "inference.board.Board.give_way", lambda board, slot, demand, reason: board.remove(slot, reason)
    )
    bench = Bench(A, B)
    bench.loaded("a")
    bench.noticed("a")
    assert bench.ask("b") == ["start b"]


def test_what_was_promised_is_free_again_when_the_job_waits_no_more():
    bench = Bench(A, B)
    bench.loaded("a")
    bench.noticed("a")
    bench.gone("a")
    bench.ask("b")
    # Asked for before the notice came: this reading knows nothing of the job.
    assert bench.devices(a_device("d0", 10), asked_at_s=bench.now) == []
    bench.now += 1.0
    assert bench.devices(a_device("d0", 10), asked_at_s=bench.now) == ["start b"]


def test_a_slot_that_is_leaving_already_says_so():
    bench = Bench(A, B)
    bench.loaded("a")
    assert bench.ask("b") == ["start b", "drain a", "stop a"]
    assert bench.noticed("a") == []
    assert bench.acknowledged == ["a"]


def test_a_withdrawn_notice_is_forgotten():
    bench = a_busy_bench()
    bench.noticed("a")
    assert bench.scheduler.slot_view("a").noticed_by == "job:job"
    assert bench.withdrawn("a") == []
    assert bench.scheduler.slot_view("a").noticed_by is None
    assert bench.served("a1") == []
    assert bench.after(200.0) == []


@pytest.mark.parametrize("event", [events.Noticed(0.0, "a", "job", "job:j", 1, 30.0), events.Withdrawn(0.0, "a")])
def test_a_notice_for_a_slot_without_a_lease_changes_nothing(event: events.Event):
    bench = Bench(A)
    assert bench.tell(event) == []
    bench.loaded("a")
    assert bench.state("a") == "ready"


# -- a busy slot --------------------------------------------------------------------------------------------------


def test_a_busy_slot_takes_no_more_for_a_more_important_job_and_ends_with_its_last_request():
    bench = a_busy_bench(parallel=2)
    assert bench.noticed("a", 5) == ["drain a"]
    assert bench.acknowledged == ["a"]
    assert bench.ask("a") == []
    assert bench.after(29.0) == []
    assert bench.served("a1") == ["stop a"]


def test_what_is_in_flight_when_the_grace_is_over_ends_with_preempted():
    bench = a_busy_bench()
    bench.noticed("a", 5, grace_s=30.0)
    assert bench.after(29.9) == []
    assert bench.after(0.1) == ["cut a"]
    error = bench.cut["a"]
    assert isinstance(error, Preempted)
    assert "job:job (class high)" in error.message
    assert "`preempt_grace_s`" in error.message
    assert bench.served("a1") == []
    assert bench.gone("a") == []


def test_a_busy_slot_of_the_same_class_ends_what_it_does_however_long_and_yields_when_it_is_idle():
    bench = a_busy_bench()
    assert bench.noticed("a", 10, grace_s=30.0) == []
    assert bench.after(1000.0) == []
    assert bench.cut == {}
    assert bench.served("a1") == ["drain a", "stop a"]


def test_a_busy_slot_of_a_more_important_class_yields_when_it_is_idle_and_has_faded():
    bench = a_busy_bench(priority=5)
    assert bench.noticed("a", 10) == []
    assert bench.served("a1") == []
    assert bench.after(60.0) == ["drain a", "stop a"]


def test_a_slot_whose_important_request_is_done_drains_under_the_lesser_ones():
    bench = a_busy_bench(priority=1, parallel=2, limits=QueueLimits(aging_s=10.0))
    bench.ask("a", 50)
    assert bench.noticed("a", 5) == []
    assert bench.served("a1") == []
    # Its last work, of class 1, defends it until that has fallen below 5.
    assert bench.after(19.9) == []
    assert bench.after(0.1) == ["drain a"]


def test_requests_of_the_same_class_pass_the_job_as_often_as_they_may_pass_a_request():
    bench = a_busy_bench(limits=QueueLimits(max_overtakes=3, max_overtaken_s=math.inf))
    bench.now = 1.0
    bench.noticed("a")
    said: list[str] = []
    for number in range(1, 8):
        bench.now += 1.0
        said += bench.ask("a")
        said += bench.served(f"a{number}")
        if "drain a" in said:
            break
    assert [word for word in said if word.startswith("grant")] == ["grant a2", "grant a3", "grant a4"]
    assert said[-2:] == ["drain a", "stop a"]


def test_without_the_bound_steady_traffic_starves_the_job(monkeypatch):
    """The guard of the test above, switched off."""
    monkeypatch.setattr(Demand, "overdue", lambda self, now_s, limits: False)
    bench = a_busy_bench(limits=QueueLimits(max_overtakes=3, max_overtaken_s=5.0))
    bench.now = 1.0
    bench.noticed("a")
    for number in range(1, 500):
        bench.now += 1.0
        bench.ask("a")
        assert bench.served(f"a{number}") == [f"grant a{number + 1}"]


def test_requests_of_the_same_class_pass_the_job_only_so_long():
    bench = a_busy_bench(limits=QueueLimits(max_overtakes=10**9, max_overtaken_s=20.0))
    bench.now = 1.0
    bench.noticed("a")
    number = 0
    while "drain a" not in bench.reasons and bench.state("a") == "ready":
        number += 1
        bench.now += 2.0
        bench.ask("a")
        bench.served(f"a{number}")
    # The first overtaking 2 s after the notice; then 20 s, and the last one in flight ends.
    assert bench.now - 1.0 <= 2.0 + 20.0 + 2.0


def test_requests_that_were_there_before_the_job_go_first_and_more_important_ones_too():
    bench = a_busy_bench(limits=QueueLimits(max_overtakes=0))
    bench.ask("a")
    bench.now = 1.0
    bench.noticed("a")
    bench.now = 2.0
    bench.ask("a")
    bench.ask("a", 5)
    assert bench.served("a1") == ["grant a4"]
    assert bench.served("a4") == ["grant a2"]
    bench.after(60.0)  # the class that the more important one left behind has fallen
    assert bench.served("a2") == ["drain a", "stop a"]


def test_requests_that_age_while_a_long_one_runs_do_not_rise_above_the_job():
    bench = a_busy_bench(limits=QueueLimits(max_overtakes=0))
    bench.now = 1.0
    bench.noticed("a")
    bench.now = 2.0
    bench.ask("a")
    bench.after(70.0)
    assert bench.served("a1") == ["drain a", "stop a"]


def test_a_job_that_has_waited_long_cuts_nobody_short_of_its_own_class():
    bench = a_busy_bench()
    bench.noticed("a", 10)
    assert bench.after(600.0) == []


def test_a_waiting_request_that_comes_before_the_job_keeps_the_slot_from_it():
    bench = a_busy_bench(priority=50)
    bench.ask("a", 5)
    assert bench.noticed("a", 10) == []
    assert bench.served("a1") == ["grant a2"]


def test_a_slot_that_has_just_loaded_takes_one_batch_before_it_yields():
    bench = Bench(A, limits=QueueLimits(max_overtakes=0))
    bench.ask("a")
    bench.ask("a")
    bench.tell(events.LeaseGranted(bench.now, "a", {"d0": 6 * GIB}))
    bench.now = 1.0
    assert bench.noticed("a") == []
    bench.withdrawn("a")
    bench.noticed("a", by="other")
    assert bench.tell(events.SlotReady(bench.now, "a", 1.0)) == ["grant a1"]
    assert bench.served("a1") == ["grant a2"]  # it was there before
    assert bench.served("a2") == ["drain a", "stop a"]


# -- a load -------------------------------------------------------------------------------------------------------


def test_a_load_is_cancelled_for_a_more_important_job_and_those_who_wait_wait_on():
    bench = Bench(A)
    bench.ask("a")
    assert bench.noticed("a", 5) == ["stop a"]
    assert bench.acknowledged == ["a"]
    assert bench.gone("a") == ["ask a"]
    assert bench.scheduler.waiting_count == 1


def test_a_load_for_somebody_of_the_same_class_goes_on():
    bench = Bench(A)
    bench.ask("a")
    assert bench.noticed("a", 10) == []
    assert bench.up("a") == ["grant a1"]
    assert bench.served("a1") == ["drain a", "stop a"]


def test_a_load_nobody_waits_for_is_cancelled_for_anybody():
    bench = Bench(a_model("a", 6, preload=True))
    assert bench.noticed("a", 1000) == ["stop a"]


def test_the_lease_of_a_queued_load_has_the_class_of_who_leads_its_line():
    bench = Bench(A)
    bench.ask("a", 20)
    assert bench.starts["a"].priority == 20
    bench.ask("a", 5)
    assert bench.lease_class["a"] == 5
    bench.abandoned("a2")
    assert bench.lease_class["a"] == 20
    bench.abandoned("a1")
    bench.after(1.0)
    assert bench.lease_class["a"] == 1000


# -- pinned models ------------------------------------------------------------------------------------------------


def test_a_pinned_slot_yields_to_no_lease_and_its_own_stands_first_in_the_ledger():
    bench = Bench(a_model("a", 6, pin=True))
    bench.up("a")
    bench.after(1.0)
    assert bench.lease_class["a"] == 0
    assert bench.noticed("a", 0) == []
    assert bench.after(100.0) == []
    assert bench.acknowledged == []


def test_a_pinned_slot_yields_to_a_person_and_stays_out_until_a_request():
    bench = Bench(a_model("a", 6, pin=True))
    bench.up("a")
    assert bench.noticed("a", by="") == ["drain a", "stop a"]
    assert bench.reasons["a"] == "yields to a person"
    assert bench.gone("a") == []
    assert bench.after(5.0) == []
    assert bench.ask("a") == ["start a"]


def test_a_pinned_slot_yields_to_a_lease_that_is_asked_for_over_pinned_models_and_comes_back():
    bench = Bench(a_model("a", 6, pin=True))
    bench.up("a")
    assert bench.noticed("a", OVER_PINNED) == ["drain a", "stop a"]
    assert bench.reasons["a"] == "yields to job:job (class over pinned)"
    bench.gone("a")
    assert bench.devices(*TAKEN) == []
    assert bench.after(1.0) == []
    bench.devices(a_device("d0", 8))
    assert bench.after(1.0) == ["start a"]


def test_what_a_pinned_slot_does_is_cut_short_for_it_when_the_grace_is_over():
    bench = Bench(a_model("a", 6, pin=True))
    bench.up("a")
    bench.ask("a", priority=0)
    assert bench.noticed("a", OVER_PINNED, grace_s=5.0) == ["drain a"]
    assert bench.after(5.0) == ["cut a"]
    assert "(class over pinned)" in bench.cut["a"].message


def test_a_persons_wish_comes_before_every_class():
    bench = a_busy_bench(priority=0)
    assert bench.noticed("a", by="", grace_s=5.0) == ["drain a"]
    assert bench.after(5.0) == ["cut a"]
    assert "for a person" in bench.cut["a"].message


# -- coming back --------------------------------------------------------------------------------------------------


def leave_for_a_job(bench: Bench, *models: str) -> None:
    """The models' idle slots yield, and the job gets the memory."""
    for model in models:
        assert bench.noticed(model) == [f"drain {model}", f"stop {model}"]
        bench.gone(model)
    assert bench.devices(*TAKEN) == []


def test_a_warm_slot_comes_back_without_a_request_when_there_is_room_again():
    bench = Bench(a_model("a", 6, stay_warm_s=100.0))
    bench.loaded("a")
    leave_for_a_job(bench, "a")
    assert bench.after(50.0) == []
    bench.devices(a_device("d0", 10))
    assert bench.after(1.0) == ["start a"]
    assert bench.lease_class["a"] == 1000
    assert bench.up("a") == []
    # It is not a new life: it stays warm as long as it would have stayed.
    assert bench.after(48.0) == []
    assert bench.after(1.0) == ["drain a", "stop a"]


def test_a_slot_whose_time_ran_out_meanwhile_stays_away():
    bench = Bench(a_model("a", 6, stay_warm_s=100.0))
    bench.loaded("a")
    leave_for_a_job(bench, "a")
    bench.after(99.5)
    bench.devices(a_device("d0", 10))
    # Half a second is left, and its load takes one.
    assert bench.after(0.1) == []


def test_slots_come_back_by_class_then_last_use_as_far_as_there_is_room():
    names = ("a", "b", "c", "d")
    bench = Bench(*(a_model(name, 2) for name in names))
    for name, priority in zip(names, (10, 10, 5, 10), strict=True):
        bench.now += 1.0
        bench.ask(name, priority)
        bench.up(name)
        bench.served(bench.flying[-1])
    for name in names:
        bench.noticed(name, 5)
        bench.gone(name)
    bench.devices(*TAKEN)
    bench.devices(a_device("d0", 10, others=4, leased=4))
    assert bench.after(1.0) == ["start c", "start d", "start b"]


def test_pinned_slots_come_back_first_and_preloaded_ones_too():
    bench = Bench(a_model("a", 3), a_model("b", 3, preload=True))
    bench.up("b")
    bench.loaded("a")
    leave_for_a_job(bench, "a", "b")
    bench.devices(a_device("d0", 10))
    assert bench.after(1.0) == ["start a", "start b"]


def test_a_slot_that_was_cut_short_comes_back():
    bench = a_busy_bench()
    bench.noticed("a", 5)
    assert bench.after(30.0) == ["cut a"]
    bench.gone("a")
    bench.devices(*TAKEN)
    bench.devices(a_device("d0", 10))
    assert bench.after(1.0) == ["start a"]


def test_a_slot_does_not_come_back_into_the_room_of_somebody_who_waits():
    bench = Bench(A, B)
    bench.loaded("a")
    leave_for_a_job(bench, "a")
    assert bench.ask("b") == ["ask b"]
    assert bench.devices(a_device("d0", 10)) == ["start b"]
    assert bench.after(1.0) == []


def test_a_returning_slot_keeps_its_class_among_the_others():
    bench = Bench(A, B)
    bench.ask("a", 5)
    bench.up("a")
    bench.served("a1")
    bench.noticed("a", 5)
    bench.gone("a")
    bench.devices(*TAKEN)
    bench.devices(a_device("d0", 10))
    bench.after(1.0)
    bench.up("a")
    assert bench.ask("b", 10) == []


# -- asking for others' memory ------------------------------------------------------------------------------------


def test_a_request_that_only_others_leases_keep_out_queues_in_the_ledger():
    bench = Bench(A, devices=TAKEN)
    assert bench.ask("a", 20) == ["ask a"]
    assert bench.asks["a"].options == ({"d0": 6 * GIB},)
    assert bench.asks["a"].priority == 20
    assert bench.state("a") == "queued"
    assert bench.after(100.0) == []
    bench.ask("a", 5)
    assert bench.lease_class["a"] == 5
    assert bench.up_from_queue("a") == ["grant a2"]


def test_memory_in_use_without_a_lease_is_not_queued_for():
    bench = Bench(A, devices=(a_device("d0", 10, others=8),))
    assert bench.ask("a") == []


def test_a_slot_here_that_would_make_room_is_preferred_to_others():
    bench = Bench(A, B, devices=(a_device("d0", 10, others=3, leased=3),))
    bench.ask("a")
    bench.up("a")
    assert bench.ask("b") == []
    assert bench.served("a1") == ["start b", "drain a", "stop a"]


def test_a_queued_slot_counts_for_nothing_and_starts_where_room_is_found():
    bench = Bench(A, B, devices=(*TAKEN, a_device("d1", 7)))
    bench.ask("b")
    bench.up("b")
    bench.ask("a")
    assert bench.state("a") == "idle"  # `b` would make room for it once it is idle
    bench.devices(a_device("d0", 10, others=8, leased=8), a_device("d1", 7))
    bench.tell(events.UnloadWanted(bench.now, "b"))
    assert bench.served("b1") == ["stop b"]
    assert bench.gone("b") == []


def test_a_queued_slot_nobody_waits_for_any_more_leaves_the_ledgers_queue():
    bench = Bench(A, devices=TAKEN)
    bench.ask("a")
    assert bench.abandoned("a1") == ["stop a"]
    assert bench.gone("a") == []
    assert bench.state("a") == "idle"


def test_a_queued_slot_asks_for_other_devices_in_the_same_place_when_others_take_some():
    bench = Bench(a_model("a", 9), devices=(*TAKEN, a_device("d1", 10, others=10)))
    bench.ask("a")
    assert bench.asks["a"].options == ({"d0": 9 * GIB},)
    assert bench.devices(*TAKEN, a_device("d1", 10, others=9, leased=9)) == ["ask a"]
    assert set(map(frozenset, bench.asks["a"].options)) == {frozenset({"d0"}), frozenset({"d1"})}
    assert bench.devices(*TAKEN, a_device("d1", 10, others=10, leased=10)) == []


def test_a_lease_that_can_never_be_granted_refuses_those_who_wait():
    bench = Bench(A, devices=TAKEN)
    bench.ask("a")
    assert bench.failed("a", was_ready=False) == ["refuse a1 LoadFailed"]


@pytest.mark.parametrize("end", ["unload", "models", "shutdown"])
def test_a_queued_slot_can_be_ended_like_any_other(end: str):
    bench = Bench(A, devices=TAKEN)
    bench.ask("a")
    match end:
        case "unload":
            said = bench.tell(events.UnloadWanted(bench.now, "a"))
        case "models":
            said = bench.tell(events.ModelsChanged(bench.now, {"b": B}))
        case _:
            said = bench.tell(events.ShutdownBegan(bench.now))
    assert "stop a" in said
    assert bench.gone("a") == []
    assert bench.scheduler.slot_view("a").state is SlotState.IDLE


def test_a_peek_is_refused_rather_than_queued_outside():
    bench = Bench(A, devices=TAKEN)
    assert bench.ask("a", purpose=Purpose.PEEK) == ["refuse a1 NoRoom"]


def test_a_load_there_is_room_for_does_not_wait_behind_a_queued_one_in_the_ledger():
    bench = Bench(A, C, devices=TAKEN)
    assert bench.ask("a", 5) == ["ask a"]
    assert bench.ask("c", 20) == ["start c"]
    assert bench.starts["c"].ahead_of == ("a",)
    assert bench.starts["c"].priority == 5
    assert bench.up("c") == ["grant c2"]
    bench.after(1.0)
    assert bench.lease_class["c"] == 20


def test_a_load_on_other_devices_keeps_its_own_place_in_the_ledger():
    bench = Bench(a_model("a", 9), C, devices=(a_device("d0", 10, others=9, leased=9), a_device("d1", 3)))
    assert bench.ask("a", 5) == ["ask a"]
    assert bench.ask("c", 20) == ["start c"]
    assert (bench.starts["c"].priority, bench.starts["c"].ahead_of) == (20, ())


def test_room_that_others_are_told_to_complete_is_kept_for_who_waits_for_it():
    bench = Bench(A, C, devices=TAKEN)
    bench.ask("a")
    assert bench.devices(*TAKEN, coming={"a": {"d0": 4 * GIB}}) == []
    assert bench.ask("c") == ["ask c"]
    assert bench.devices(*TAKEN) == ["start c"]


def test_a_slot_that_was_let_past_a_job_of_its_class_yields_although_it_is_busy():
    bench = a_busy_bench()
    assert bench.noticed("a", 10, outranks=True) == ["drain a"]
    assert bench.after(30.0) == ["cut a"]


def test_a_slot_whose_lease_had_another_class_when_the_notice_was_given_was_not_let_past():
    """It was idle for long when the job asked, and has just taken a request of the job's class."""
    bench = a_busy_bench()
    bench.served("a1")
    bench.after(60.0)
    assert bench.lease_class["a"] == 20
    bench.ask("a")
    bench.after(1.0)
    assert bench.noticed("a", 10, outranks=True) == []
    assert bench.after(100.0) == []


def test_a_slot_under_notice_is_not_given_another_class_unless_that_takes_the_notice_back():
    bench = a_busy_bench()
    bench.noticed("a", 10)
    bench.after(1.0)
    assert bench.lease_class["a"] == 10
    bench.served("a1")
    bench = a_busy_bench(parallel=2)
    bench.noticed("a", 10)
    bench.ask("a", 5)
    bench.after(1.0)
    assert bench.lease_class["a"] == 5
