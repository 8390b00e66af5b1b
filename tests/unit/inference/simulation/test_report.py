"""The figures: each computed by hand for a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inference.simulation.plots import draw
from inference.simulation.report import ALL, percentile
from tests.unit.inference.simulation.scene import a_model, a_trace, ask, played


def test_waits_are_told_by_class() -> None:
    requests = [ask(0.0, "a", 1.0), ask(20.0, "a", 1.0), *(ask(40.0, "a", 1.0, 5) for _ in range(4))]
    waits = played(a_trace(requests)).report.waits
    assert list(waits) == ["high", "normal", ALL]
    assert (waits["normal"].count, waits["normal"].p50_s, waits["normal"].max_s) == (2, 0.0, 10.0)
    assert (waits["high"].mean_s, waits["high"].p95_s) == (1.5, 3.0)
    assert waits[ALL].count == 6


def test_percentiles_are_values_that_occur() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([3.0], 0.5) == 3.0
    assert percentile([], 0.5) == 0.0


def test_swaps_are_loads_for_which_somebody_went() -> None:
    requests = [ask(0.0, "a"), ask(100.0, "b"), ask(200.0, "a"), ask(700.0, "b")]
    models = [a_model("a"), a_model("b")]
    report = played(a_trace(requests, models)).report
    # The last load finds the room free: `a` has left by itself after 300 s.
    assert (report.loads, report.swaps, report.cancelled) == (4, 2, 0)


def test_memory_is_counted_over_the_whole_run() -> None:
    report = played(a_trace([ask(0.0, "a", 10.0), ask(10.0, "a", 5.0)])).report
    assert report.makespan_s == 25.0
    assert report.use.held == pytest.approx(0.8)
    assert report.use.busy == pytest.approx(0.8 * 15 / 25)
    assert report.use.engine_s == 15.0


def test_a_second_in_which_several_requests_run_is_one_second_of_the_engine() -> None:
    report = played(a_trace([ask(0.0, "a", 10.0), ask(0.0, "a", 10.0)], models=[a_model("a", parallel=2)])).report
    assert report.use.engine_s == 10.0


def test_slowdowns_and_their_evenness() -> None:
    models = [a_model("a", 5), a_model("b", 5, load_s=30.0)]
    report = played(a_trace([ask(0.0, "a", 10.0), ask(0.0, "b", 10.0)], models)).report
    assert report.slowdown == {"a": 2.0, "b": 4.0}
    assert report.fairness.jain == pytest.approx(6**2 / (2 * (2**2 + 4**2)))


def test_overtaking_is_counted_on_those_who_had_to_go() -> None:
    steady = [ask(12.0 + second, "a", 1.2, client="ann") for second in range(30)]
    requests = sorted([ask(0.0, "a", 1.0), ask(11.5, "b", 1.0, client="bob"), *steady], key=lambda one: one.at_s)
    outcome = played(a_trace(requests, min_residency_s=0.0, max_overtakes=5))
    [bob] = [turn for turn in outcome.journal.turns.values() if turn.ticket.client_id == "bob"]
    assert bob.overtaken == outcome.report.fairness.most_overtaken <= 5
    assert outcome.report.fairness.beyond_bound_s == 0.0


def test_a_run_without_requests_has_figures_too() -> None:
    report = played(a_trace([])).report
    assert (report.requests, report.served, report.makespan_s) == (0, 0, 0.0)
    assert report.fairness.jain == 1.0


def test_refusals_are_counted_by_code_the_most_frequent_first() -> None:
    models = [a_model("a"), a_model("huge", 11)]
    requests = [ask(0.0, "huge"), *(ask(0.0, "a", 90.0) for _ in range(4))]
    refused = played(a_trace(requests, models, max_waiting=2, max_wait_s=60.0)).report.refused
    assert list(refused.items()) == [("queue_full", 2), ("queue_timeout", 1), ("will_never_fit", 1)]


def test_a_report_is_json(tmp_path: Path) -> None:
    report = played(a_trace([ask(0.0, "a")])).report
    document = json.loads(json.dumps(report.as_json()))
    assert document["waits"]["normal"]["p50_s"] == 10.0
    assert document["use"]["held"] == pytest.approx(0.8)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    trace = a_trace([ask(float(second), "ab"[second % 2], 1.0) for second in range(50)])
    path = tmp_path / "simulation.png"
    draw([played(trace), played(trace, "fifo"), played(a_trace([]), "lru-count")], path)
    assert path.read_bytes().startswith(b"\x89PNG")
