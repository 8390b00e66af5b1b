"""How long a waiting ticket may be passed by: overtaking, ageing, and who is held meanwhile."""

from __future__ import annotations

import math

from inference.queue import QueueLimits
from tests.unit.inference.scheduler_bench import Bench
from tests.unit.inference.scheduler_rules import a_device, a_model

A, B, C = a_model("a", 6), a_model("b", 6), a_model("c", 6)


def steady_traffic(bench: Bench, *, seconds: float, every_s: float = 1.0, priority: int = 10) -> list[str]:
    """Always one request for `a` in flight and one waiting; what was decided until `b` started or time was up."""
    end, said = bench.now + seconds, bench.ask("a", priority)
    while bench.now < end and "start b" not in said:
        bench.now += every_s
        said += bench.ask("a", priority)
        said += bench.served(bench.flying[0])
    return said


def a_served_bench(limits: QueueLimits | None = None) -> Bench:
    """`a` is loaded and busy; there is no room for another."""
    bench = Bench(A, B, C, limits=limits)
    bench.ask("a")
    bench.up("a")
    return bench


def test_requests_for_a_loaded_model_pass_a_waiting_one_at_most_max_overtakes_times():
    bench = a_served_bench(QueueLimits(max_overtakes=5, max_overtaken_s=math.inf))
    bench.ask("b")
    said = steady_traffic(bench, seconds=100)
    assert said.count("start b") == 1
    assert sum(word.startswith("grant a") for word in said) == 5


def test_requests_for_a_loaded_model_pass_a_waiting_one_at_most_max_overtaken_s_long():
    bench = a_served_bench(QueueLimits(max_overtakes=10**9, max_overtaken_s=20.0))
    bench.ask("b")
    asked_at = bench.now
    assert "start b" in steady_traffic(bench, seconds=1000, every_s=2.0)
    # The first overtaking comes with the first request served after 2 s; then 20 s, and the last one in flight ends.
    assert bench.now - asked_at <= 2.0 + 20.0 + 2.0


def test_without_the_bound_steady_traffic_on_one_model_starves_another():
    """The guard of the two tests above, switched off: this is what they protect from."""
    unbounded = QueueLimits(max_overtakes=10**9, max_overtaken_s=math.inf, max_wait_s=1e9, aging_s=1e9)
    bench = a_served_bench(unbounded)
    bench.ask("b")
    said = steady_traffic(bench, seconds=5000)
    assert "start b" not in said
    assert sum(word.startswith("grant a") for word in said) == 5000


def test_an_overdue_ticket_lets_those_pass_who_came_before_it():
    bench = a_served_bench(QueueLimits(max_overtakes=0))
    bench.ask("a")
    bench.now = 1.0
    bench.ask("b")
    bench.ask("a")
    assert bench.served("a1") == ["grant a2"]
    assert bench.served("a2") == ["start b", "drain a", "stop a"]


def test_a_more_important_request_passes_an_overdue_one():
    bench = a_served_bench(QueueLimits(max_overtakes=0))
    bench.ask("b")
    bench.ask("a", priority=5)
    assert bench.served("a1") == ["grant a3"]


def test_only_the_models_that_stand_in_the_way_are_held():
    limits = QueueLimits(max_overtakes=0)
    big, small, other = a_model("a", 8), a_model("b", 8), a_model("c", 6)
    bench = Bench(big, small, other, devices=(a_device("d0", 9), a_device("d1", 7)), limits=limits)
    bench.ask("a")
    bench.up("a")
    bench.loaded("c")
    bench.ask("b")
    bench.ask("a")
    assert bench.ask("c") == ["grant c5"]
    assert bench.served("a1") == ["start b", "drain a", "stop a"]


def test_the_room_an_overdue_ticket_counts_on_is_kept_from_later_loads():
    bench = Bench(A, a_model("b", 10), a_model("c", 3), limits=QueueLimits(max_overtakes=0))
    bench.ask("a")
    bench.up("a")
    bench.ask("b")
    assert bench.ask("c") == []
    assert bench.served("a1") == ["start b", "drain a", "stop a"]


def test_before_it_is_overdue_later_loads_may_use_the_room():
    bench = Bench(A, a_model("b", 10), a_model("c", 3))
    bench.ask("a")
    bench.up("a")
    bench.ask("b")
    assert bench.ask("c") == ["start c"]


def test_a_model_just_loaded_serves_one_batch_of_those_who_waited_before_it_is_held():
    bench = Bench(a_model("a", 6, parallel=2), B, limits=QueueLimits(max_overtakes=0, max_overtaken_s=0.0))
    bench.ask("a")
    bench.now = 1.0
    bench.ask("b")
    for _ in range(3):
        bench.ask("a")
    bench.now = 2.0
    assert bench.up("a") == ["grant a1", "grant a3"]
    assert bench.served("a1") == []
    assert bench.served("a3") == ["start b", "drain a", "stop a"]


def test_who_comes_after_the_load_is_not_of_its_batch():
    """Else a slot of eight places let an overdue ticket wait for eight answers, one after the other."""
    bench = Bench(a_model("a", 6, parallel=8), B, limits=QueueLimits(max_overtakes=0))
    bench.ask("a")
    bench.now = 1.0
    assert bench.up("a") == ["grant a1"]
    bench.now = 2.0
    bench.ask("b")
    assert bench.ask("a") == []
    assert bench.served("a1") == ["start b", "drain a", "stop a"]


def a_contested_load(limits: QueueLimits) -> Bench:
    """`a` is loaded for `a1`, and `a3` and `a4` waited for it too; `b2`, which came before these, is overdue."""
    bench = Bench(A, B, limits=limits)
    bench.ask("a")
    bench.now = 1.0
    bench.ask("b")
    bench.now = 2.0
    for _ in range(2):
        bench.ask("a")
    bench.now = 3.0
    assert bench.up("a") == ["grant a1"]
    return bench


def test_who_waited_for_a_load_has_its_turn_by_it_and_who_comes_later_has_not():
    bench = a_contested_load(QueueLimits(max_overtakes=0, max_overtaken_s=20.0))
    bench.now = 4.0
    bench.ask("a")
    assert bench.served("a1") == ["grant a3"]
    assert bench.served("a3") == ["grant a4"]
    assert bench.served("a4") == ["start b", "drain a", "stop a"]


def test_a_load_serves_who_waited_for_it_no_longer_than_max_overtaken_s():
    bench = a_contested_load(QueueLimits(max_overtakes=0, max_overtaken_s=20.0))
    bench.now = 3.0 + 19.0
    assert bench.served("a1") == ["grant a3"]
    bench.now = 3.0 + 20.0
    assert bench.served("a3") == ["start b", "drain a", "stop a"]


def test_overtakings_pass_to_the_next_ticket_only_if_it_was_there():
    bench = a_served_bench(QueueLimits(max_overtakes=2, max_overtaken_s=math.inf))
    bench.ask("b")
    bench.ask("b")
    bench.ask("a")
    bench.served("a1")
    bench.ask("a")
    bench.served("a4")
    bench.abandoned("b2")
    bench.ask("a")
    assert bench.served("a5") == ["start b", "drain a", "stop a"]


def test_overtakings_of_a_ticket_that_left_do_not_help_a_newcomer():
    bench = a_served_bench(QueueLimits(max_overtakes=2, max_overtaken_s=math.inf))
    bench.ask("b")
    for n in (1, 3):
        bench.ask("a")
        bench.served(f"a{n}")
    bench.now = 1.0
    bench.abandoned("b2")
    bench.ask("b")
    bench.ask("a")
    assert bench.served("a4") == ["grant a6"]


def test_a_batch_ticket_gets_its_turn_by_ageing_although_normal_traffic_never_ends():
    bench = a_served_bench(QueueLimits(max_wait_s=1e9))
    bench.ask("b", priority=50)
    said = steady_traffic(bench, seconds=1000)
    assert "start b" in said
    # Two classes up after 120 s, then it is one of the same class that may be passed for 20 s.
    assert 120.0 <= bench.now <= 120.0 + 20.0 + 2.0


def test_without_ageing_normal_traffic_starves_batch():
    """The guard of the test above, switched off."""
    bench = a_served_bench(QueueLimits(max_wait_s=1e9, aging_s=1e9))
    bench.ask("b", priority=50)
    assert "start b" not in steady_traffic(bench, seconds=2000)


def test_urgent_traffic_is_not_held_for_an_aged_ticket():
    bench = a_served_bench(QueueLimits(max_wait_s=1e9))
    bench.ask("b", priority=50)
    assert "start b" not in steady_traffic(bench, seconds=1000, priority=1)
