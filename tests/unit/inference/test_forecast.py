"""When somebody's turn will be: what is foretold, against what then happens on the same virtual clock."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from inference import actions, events, forecaster
from inference.errors import TooManyQuestions
from inference.events import Purpose, Ticket
from inference.forecast import Forecast
from inference.forecaster import Forecaster, look_ahead
from inference.habits import Expected, Habits
from inference.model import Model
from inference.queue import QueueLimits
from inference.scheduler import Scheduler
from inference.simulation.trace import Request
from inference.simulation.world import Times, World
from tests.unit.inference.scheduler_bench import Bench
from tests.unit.inference.scheduler_rules import GIB, a_device, a_model

A, B = a_model("a", 6), a_model("b", 6)


@dataclass
class Life:
    """A scheduler's life on a virtual clock, and what was foretold in it."""

    seed: int
    stated: list[tuple[str, float, float]] = field(default_factory=list)
    """Ticket, when it was said, seconds that were said."""
    granted: dict[str, float] = field(default_factory=dict)
    left_out: int = 0
    """Tickets that nothing was said of."""

    def run(self) -> Life:
        rng = self.rng = random.Random(self.seed)
        count = rng.choice([3, 5])
        models = {f"m{n}": a_model(f"m{n}", 6, parallel=rng.choice([1, 1, 2])) for n in range(count)}
        service_s = {name: rng.uniform(0.5, 4.0) for name in models}
        self.scheduler = Scheduler(QueueLimits())
        self.world = World(
            self.scheduler,
            devices=[a_device("d0", 8)],
            models=models,
            times=Times(load_s={name: rng.uniform(1.0, 8.0) for name in models}, service_s=service_s),
            requests=self.requests(models, service_s),
            watcher=self.watch,
        )
        self.world.begin()
        self.world.run()
        return self

    def requests(self, models: dict[str, Model], service_s: dict[str, float]) -> list[Request]:
        rng, at_s, found = self.rng, 0.0, list[Request]()
        rate = rng.choice([0.4, 0.8, 1.2]) / (sum(service_s.values()) / len(service_s))
        for _ in range(120):
            at_s += rng.expovariate(rate)
            name = f"m{min(int(rng.expovariate(0.9)), len(models) - 1)}"
            took_s = max(0.05, rng.gauss(service_s[name], 0.3 * service_s[name]))
            found.append(Request(at_s=at_s, model=name, priority=10, service_s=took_s))
        return found

    def watch(self, event: events.Event, decided: Sequence[actions.Action]) -> None:
        for action in decided:
            if isinstance(action, actions.Grant):
                self.granted[action.ticket_id] = self.world.now_s
        if isinstance(event, events.Tick) and len(self.granted) > 30 and self.rng.random() < 0.1:
            forecast = Forecast(self.scheduler.copy(), self.world.now_s)
            forecast.run()
            for ticket in self.scheduler.waiting():
                turn_s = forecast.turns_s.get(ticket.id)
                self.left_out += turn_s is None
                if turn_s is not None:
                    self.stated.append((ticket.id, self.world.now_s, turn_s - self.world.now_s))


def test_four_of_five_stated_times_are_within_a_third():
    right = wrong = left_out = 0
    for seed in range(8):
        life = Life(seed).run()
        left_out += life.left_out
        for ticket_id, said_at_s, eta_s in life.stated:
            real_s = life.granted[ticket_id] - said_at_s
            if abs(eta_s - real_s) <= 0.3 * real_s:
                right += 1
            else:
                wrong += 1
    assert right + wrong > 2000
    assert right >= 0.8 * (right + wrong), f"{right} right, {wrong} wrong"
    assert left_out <= 0.2 * (right + wrong), f"nothing was said of {left_out}"


def measured(bench: Bench, model_id: str, service_s: float) -> None:
    """Load the model and let a request take so long."""
    said = bench.ask(model_id)
    assert f"start {model_id}" in said
    bench.up(model_id, load_s=5.0)
    ticket_id = bench.flying[-1]
    bench.now += service_s
    bench.served(ticket_id)


def test_a_waiting_request_is_told_when_the_one_before_it_will_be_done():
    bench = Bench(A)
    measured(bench, "a", 4.0)
    bench.now += 100.0
    bench.ask("a")
    bench.ask("a")
    bench.now += 1.0
    forecast = Forecast(bench.scheduler.copy(), bench.now)
    assert forecast.run()
    (turn_s,) = forecast.turns_s.values()
    assert turn_s - bench.now == pytest.approx(3.0)


def test_a_swap_is_counted_with_what_loads_took():
    bench = Bench(A, B)
    measured(bench, "b", 1.0)
    bench.now += 1000.0
    measured(bench, "a", 4.0)
    bench.now += 1000.0
    bench.ask("a")
    bench.ask("b")
    forecast = Forecast(bench.scheduler.copy(), bench.now)
    forecast.run()
    (turn_s,) = forecast.turns_s.values()
    assert turn_s - bench.now == pytest.approx(4.0 + 5.0, abs=0.5)


def test_who_waits_for_others_memory_gets_no_estimate():
    bench = Bench(A, devices=(a_device("d0", 10, others=8, leased=8),))
    assert bench.ask("a") == ["ask a"]
    forecast = Forecast(bench.scheduler.copy(), bench.now)
    assert forecast.run()
    assert forecast.turns_s == {}


def test_a_forecast_may_be_made_in_slices():
    bench = Bench(A)
    measured(bench, "a", 4.0)
    for _ in range(30):
        bench.ask("a")
    forecast = Forecast(bench.scheduler.copy(), bench.now)
    slices = 0
    while not forecast.run(5):
        slices += 1
    assert slices > 5
    assert len(forecast.turns_s) == 29


def test_looking_ahead_changes_nothing():
    bench = Bench(A, B)
    measured(bench, "a", 4.0)
    for name in ("a", "b", "a"):
        bench.ask(name)
    before = repr(bench.scheduler.board.slots), bench.scheduler.waiting()
    Forecast(bench.scheduler.copy(), bench.now).run()
    assert (repr(bench.scheduler.board.slots), bench.scheduler.waiting()) == before


async def test_a_forecaster_looks_ahead_once_somebody_has_waited_and_survives_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecaster, "EVERY_S", 0.01)
    bench = Bench(A)
    measured(bench, "a", 4.0)
    loop_s = asyncio.get_running_loop().time()
    bench.now = loop_s - 10.0
    for _ in range(2):
        bench.tell(events.Arrived(bench.now, Ticket(f"w{_}", "a", 10, bench.now, purpose=Purpose.INFER)))
    looked = Forecaster(bench.scheduler)
    assert looked.eta_s("w1") is None, "nobody had asked"
    faults = iter([RuntimeError("nobody foresaw this")])
    real_copy = bench.scheduler.copy

    def copy() -> Scheduler:
        for fault in faults:
            raise fault
        return real_copy()

    monkeypatch.setattr(bench.scheduler, "copy", copy)
    waits = asyncio.Event()
    waits.set()
    task = asyncio.create_task(looked.main_loop(waits))
    try:
        async with asyncio.timeout(10):
            while looked.eta_s("w1") is None:  # noqa: ASYNC110 (what is waited for is a figure, not an event)
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert next(faults, None) is None, "the fault was raised, and the next forecast was made all the same"


async def test_forecasts_leave_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    spent_s = 0.0

    class Endless:
        """Takes the processor for five milliseconds to be made, then for a slice each time, ten times."""

        def __init__(self, _scheduler: Scheduler, _now_s: float) -> None:
            self.left = 10
            self.turns_s: dict[str, float] = {}
            self.work(0.005)

        def run(self, _most_steps: int) -> bool:
            self.work(forecaster.SLICE_S)
            self.left -= 1
            return self.left == 0

        def work(self, needed_s: float) -> None:
            nonlocal spent_s
            began_s = time.thread_time()
            while time.thread_time() - began_s < needed_s:
                pass
            spent_s += time.thread_time() - began_s

    monkeypatch.setattr(forecaster, "EVERY_S", 0.0)
    monkeypatch.setattr(forecaster, "Forecast", Endless)
    bench = Bench(A)
    bench.now = asyncio.get_running_loop().time() - 10.0
    bench.tell(events.Arrived(bench.now, Ticket("w1", "a", 10, bench.now, purpose=Purpose.INFER)))
    looked = Forecaster(bench.scheduler)
    looked.eta_s("w1")
    waits = asyncio.Event()
    waits.set()
    began_s, turns = time.monotonic(), 0
    task = asyncio.create_task(looked.main_loop(waits))
    while spent_s < 0.025:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 10, "between any two slices whoever else is there has a turn"
    while spent_s < 0.1:  # noqa: ASYNC110 (what is waited for is a figure, not an event)
        await asyncio.sleep(0.01)
    took_s = time.monotonic() - began_s
    task.cancel()
    await asyncio.wait({task})
    assert 0.075 / took_s <= forecaster.SHARE, "the fourth comes once the first three are paid for"


class Slow:
    """A forecast without an end."""

    turns_s: ClassVar[dict[str, float]] = {}

    def run(self, _most_steps: int) -> bool:
        began_s = time.thread_time()
        while time.thread_time() - began_s < forecaster.SLICE_S:
            pass
        return False


async def test_a_forecast_stops_where_it_has_cost_enough_and_a_question_leaves_half_the_processor() -> None:
    began_s = time.monotonic()
    spent_s = await look_ahead(Slow(), resting=True)
    assert spent_s == pytest.approx(forecaster.MOST_S, abs=0.1)
    assert time.monotonic() - began_s >= 2 * forecaster.MOST_S


async def test_questions_are_answered_one_by_one_and_no_more_than_some_may_wait() -> None:
    looked, at_once, most = Forecaster(Bench(A).scheduler), 0, 0

    async def ask() -> None:
        nonlocal at_once, most
        async with looked.question():
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1

    asked = [asyncio.create_task(ask()) for _ in range(forecaster.MOST_QUESTIONS + 1)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert most == 1
    assert [outcome for outcome in outcomes if outcome is not None] == [outcomes[-1]]
    assert isinstance(outcomes[-1], TooManyQuestions)
    await ask()
    gone = [asyncio.create_task(ask()) for _ in range(forecaster.MOST_QUESTIONS)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    await ask()


def test_whose_turn_comes_soon_is_known_before_the_forecast_is_over():
    bench = Bench(A)
    measured(bench, "a", 4.0)
    for _ in range(30):
        bench.ask("a")
    forecast = Forecast(bench.scheduler.copy(), bench.now)
    while not forecast.turns_s:
        assert not forecast.run(1)
    soon = next(iter(forecast.turns_s))
    forecast.run()
    assert forecast.turns_s[soon] == min(forecast.turns_s.values())


async def test_a_moment_that_has_passed_is_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(A)
    bench.now = asyncio.get_running_loop().time() - 10.0
    bench.tell(events.Arrived(bench.now, Ticket("w1", "a", 10, bench.now, purpose=Purpose.INFER)))
    looked = Forecaster(bench.scheduler)
    looked.eta_s("w1")

    class Known:
        turns_s: ClassVar[dict[str, float]] = {"late": time.monotonic() - 0.1, "soon": time.monotonic() + 50.0}

        def __init__(self, _scheduler: Scheduler, _now_s: float) -> None:
            pass

        def run(self, _most_steps: int) -> bool:
            return True

    monkeypatch.setattr(forecaster, "Forecast", Known)
    waits = asyncio.Event()
    waits.set()
    task = asyncio.create_task(looked.main_loop(waits))
    try:
        async with asyncio.timeout(10):
            while looked.eta_s("soon") is None:  # noqa: ASYNC110 (what is waited for is a figure, not an event)
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert looked.eta_s("soon") == pytest.approx(50.0, abs=5.0)
    assert looked.eta_s("late") is None


def test_habits_forget_slowly_and_guess_what_was_never_measured():
    habits = Habits()
    assert not habits.measured
    assert habits.load_s(A) == pytest.approx(6 * GIB / 1e9)
    habits.served("a", 10.0)
    habits.served("a", 5.0)
    assert habits.service_s("a") == pytest.approx(9.0)
    assert habits.service_s("never seen") == pytest.approx(9.0)
    habits.loaded(A, 3.0)
    assert habits.load_s(a_model("twice", 12)) == pytest.approx(6.0)
    habits.stopped(2.0)
    habits.stopped(1.0)
    assert habits.copy().stop_s == pytest.approx(1.8)


def test_only_models_that_are_still_asked_for_are_expected_again():
    habits = Habits()
    for at_s, priority in ((0.0, 10), (2.0, 20), (4.0, 10)):
        habits.arrived("a", priority, at_s)
    habits.arrived("once", 10, 4.0)
    assert habits.expected(5.0) == {"a": Expected(pytest.approx(2.0), (10, 20, 10))}
    assert habits.expected(50.0) == {}
