"""The peers' rules, each told by what it would do differently, on small traces."""

from __future__ import annotations

import pytest

from inference.queue import QueueLimits
from inference.simulation.peers import how_many_fit
from inference.simulation.policies import POLICIES
from inference.simulation.synthetic import generate, parse_spec
from inference.simulation.trace import Trace
from inference.simulation.world import Times, World
from tests.unit.inference.simulation.scene import GIB, Story, a_device, a_model, a_trace, ask, played, waits

PEERS = [name for name in POLICIES if name != "ours"]


def told(trace: Trace, policy: str, models_max: int | None = None) -> list[str]:
    story = Story()
    world = World(
        POLICIES[policy](trace, models_max=models_max),
        devices=trace.devices,
        models={model.id: model.as_model() for model in trace.models},
        times=Times(trace.load_s, trace.service_s),
        requests=trace.requests,
        watcher=story,
    )
    world.begin()
    world.run()
    return [word.partition(" ")[2] for word in story.words if "drain" not in word]


BOTH_FIT = [a_model("a", 5), a_model("b", 5)]


def test_in_fifo_a_load_holds_up_those_behind_it() -> None:
    trace = a_trace([ask(0.0, "a", 1.0), ask(20.0, "b", 1.0), ask(21.0, "a", 1.0)], models=BOTH_FIT)
    assert waits(played(trace, "fifo")) == [10.0, 10.0, 9.0]
    assert waits(played(trace, "lru-count")) == [10.0, 10.0, 0.0]


def test_fifo_serves_in_the_order_of_coming_whatever_the_class() -> None:
    trace = a_trace([ask(0.0, "a", 5.0), ask(1.0, "b", 1.0, 50), ask(2.0, "a", 1.0, 1)])
    assert told(trace, "fifo") == [
        "start a", "grant a to None", "start b", "stop a", "grant b to None", "start a", "stop b", "grant a to None"
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["fifo", "lru-count"])
def test_the_least_recently_used_goes(policy: str) -> None:
    models = [a_model("a", 5), a_model("b", 5), a_model("c", 5)]
    requests = [ask(0.0, "a", 1.0), ask(20.0, "b", 1.0), ask(40.0, "a", 1.0), ask(60.0, "c", 1.0)]
    assert "stop b" in told(a_trace(requests, models), policy)
    assert "stop a" not in told(a_trace(requests, models), policy)


def test_lru_count_counts_models_and_not_their_size() -> None:
    models = [a_model("a", 1), a_model("b", 1), a_model("c", 1)]
    requests = [ask(0.0, "a", 1.0), ask(20.0, "b", 1.0), ask(40.0, "c", 1.0)]
    assert "stop a" in told(a_trace(requests, models), "lru-count", models_max=2)
    assert not any(word.startswith("stop") for word in told(a_trace(requests, models), "lru-count"))


def test_lru_count_waits_for_a_busy_model_as_long_as_others_keep_it_busy() -> None:
    steady = [ask(float(second), "a", 1.5) for second in range(100)]
    trace = a_trace(sorted([*steady, ask(15.5, "b", 1.0, client="bob")], key=lambda one: one.at_s), max_waiting=500)
    outcome = played(trace, "lru-count")
    [bob] = [turn for turn in outcome.journal.turns.values() if turn.ticket.client_id == "bob"]
    assert (bob.waited_s or 0) > 100
    assert bob.overtaken > 50
    assert outcome.report.fairness.beyond_bound_s > 50
    [ours] = [turn for turn in played(trace).journal.turns.values() if turn.ticket.client_id == "bob"]
    assert (ours.waited_s or 0) < 60


def test_the_shortest_keep_alive_goes_first_though_it_was_used_last() -> None:
    models = [a_model("a", 5, stay_warm_s=300.0), a_model("b", 5, stay_warm_s=30.0), a_model("c", 5)]
    requests = [ask(0.0, "a", 1.0), ask(20.0, "b", 1.0), ask(32.0, "c", 1.0)]
    assert "stop b" in told(a_trace(requests, models), "shortest-keepalive")
    assert "stop a" in told(a_trace(requests, models), "fifo")


def test_with_shortest_keepalive_who_needs_room_holds_up_those_behind() -> None:
    requests = [ask(0.0, "a", 20.0), ask(12.0, "b", 1.0), ask(13.0, "a", 1.0)]
    assert told(a_trace(requests), "shortest-keepalive") == [
        "start a", "grant a to None", "start b", "stop a", "grant b to None", "start a", "stop b", "grant a to None"
    ]  # fmt: skip


def test_with_shortest_keepalive_what_is_loaded_already_has_a_line_of_its_own() -> None:
    trace = a_trace([ask(0.0, "a", 20.0), ask(1.0, "a", 1.0), ask(2.0, "b", 1.0)], models=BOTH_FIT)
    assert waits(played(trace, "shortest-keepalive")) == [10.0, 29.0, 10.0]


@pytest.mark.parametrize("policy", PEERS)
def test_peers_keep_what_is_pinned_and_refuse_what_never_fits(policy: str) -> None:
    models = [a_model("a", 8, pin=True), a_model("b", 8), a_model("huge", 11)]
    outcome = played(a_trace([ask(0.0, "a"), ask(20.0, "b"), ask(21.0, "huge")], models, max_wait_s=60.0), policy)
    assert outcome.report.refused == {"queue_timeout": 1, "will_never_fit": 1}


@pytest.mark.parametrize("policy", PEERS)
def test_peers_have_the_same_bounds_of_waiting(policy: str) -> None:
    outcome = played(a_trace([ask(0.0, "a", 90.0) for _ in range(5)], max_waiting=3, max_wait_s=150.0), policy)
    assert outcome.report.refused == {"queue_full": 2, "queue_timeout": 1}
    assert outcome.report.served == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_everybody_is_answered_on_any_trace(policy: str, seed: int) -> None:
    spec = parse_spec(
        f"models=9 size=1GiB..18GiB load=1s..30s requests=400 rate=1/s parallel=1..3 seed={seed} leave=5s..900s "
        "classes=normal:6,high:1,batch:3"
    )
    devices = (a_device("d0", 12, node="n"), a_device("d1", 12, node="n"))
    outcome = played(generate(spec, devices), policy)
    report = outcome.report
    assert report.served + report.left + sum(report.refused.values()) == report.requests == 400
    assert 0 < report.use.busy <= report.use.held <= 1


def test_how_many_fit_counts_whole_ones_or_else_split_ones() -> None:
    four = tuple(a_device(f"d{index}", 24, node=f"n{index // 2}") for index in range(4))
    assert how_many_fit(four, 10 * GIB) == 8
    assert how_many_fit(four, 40 * GIB) == 2
    assert how_many_fit(four, 60 * GIB) == 0
    assert QueueLimits().max_waiting == 512
