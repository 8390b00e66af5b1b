"""The parts of the benchmarks that could be wrong without anybody noticing: what they ask for, and what they count."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.eta import Life
from benchmarks.eta_samples import Listener, Statement, share_good
from benchmarks.open_loop import Answer, Callers, arrivals
from benchmarks.scheduler_load import BusyPool

MODELS = {"amber": 2, "beryl": 1, "coral": 1}


def test_the_same_seed_brings_the_same_callers() -> None:
    first = arrivals(MODELS, rate=5.0, seconds=100.0, seed=1)
    assert first == arrivals(MODELS, rate=5.0, seconds=100.0, seed=1)
    assert first != arrivals(MODELS, rate=5.0, seconds=100.0, seed=2)


def test_callers_come_as_often_as_was_asked_for_and_want_every_model() -> None:
    coming = arrivals(MODELS, rate=5.0, seconds=1000.0, seed=1)
    assert len(coming) == pytest.approx(5000, rel=0.05)
    assert all(0 < one.at_s < 1000 for one in coming)
    assert len({one.name for one in coming}) == len(coming)
    for model in MODELS:
        assert sum(one.model == model for one in coming) == pytest.approx(len(coming) * MODELS[model] / 4, rel=0.1)


def test_a_statement_may_be_wrong_by_thirty_percent_of_the_time_that_was_left() -> None:
    assert Statement(said_s=13.0, real_s=10.0).good
    assert Statement(said_s=7.0, real_s=10.0).good
    assert not Statement(said_s=13.1, real_s=10.0).good
    assert not Statement(said_s=0.1, real_s=0.0).good
    assert share_good([Statement(1.0, 1.0), Statement(2.0, 1.0)]) == 0.5
    assert share_good([]) == 0.0


def test_every_statement_is_held_against_the_moment_its_callers_engine_got_it() -> None:
    listener = Listener(Callers(port=0))
    listener.heard(4.0, [{"client_id": "a", "eta_s": 5.0}, {"client_id": "b", "eta_s": None}])
    answers = [Answer("a", "amber", 2.0, 8.0, 7.5, 11.0), Answer("b", "amber", 2.0, None, None, 9.0)]
    assert listener.compared(answers) == ([Statement(said_s=5.0, real_s=5.5)], 1)


@pytest.mark.parametrize("late", [False, True], ids=["in its headers", "in a comment of its stream"])
async def test_a_caller_reads_how_long_it_was_queued(late: bool) -> None:
    told = {"x-boss-queue-ms": "1250"}

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={} if late else told)
        await response.prepare(request)
        if late:
            await response.write(b": queued 1 of 1\n\n: x-boss-model: amber\n: x-boss-queue-ms: 1250\n\n")
        await response.write(b"data: {}\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    server = TestServer(app)
    await server.start_server()
    try:
        async with Callers(server.port or 0) as callers:
            answered = await callers.ask("amber", "a")
    finally:
        await server.close()
    assert answered.queued_s == 1.25
    assert answered.waited_s is not None


def test_a_busy_pool_has_as_many_waiting_after_a_thousand_decisions_as_before() -> None:
    pool = BusyPool(500, models=80)
    pool.settle()
    decisions = pool.run(1000)
    assert pool.waiting == pytest.approx(500, rel=0.1)
    assert {"Arrived", "Served", "Tick", "DevicesRead"} <= {one.kind for one in decisions}
    assert all(one.took_s > 0 for one in decisions)


def test_a_life_states_turns_that_come() -> None:
    outcome = Life(0).lived()
    assert outcome.statements
    assert all(one.said_s >= 0 and one.real_s >= 0 for one in outcome.statements)
