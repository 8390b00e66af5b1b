"""When a model whose engine failed may be started again: the schedule, second by second, on a clock of the test's."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.breaker import Breaker, MayStart, NotBefore, Open, Standing
from inference.fault import Fault

FREE = MayStart()
MINUTE_S = 60.0


class Engine:
    """Starts as soon as its breaker allows, and fails as it is told."""

    def __init__(self, model_id: str = "robin") -> None:
        self.breaker = Breaker(model_id)
        self.now_s = 1000.0

    def dies(self, *, was_ready: bool = True, fault: Fault = Fault.CRASH) -> float:
        """Fail now; the pause until the next start, to which the clock goes on."""
        failed_at_s = self.now_s
        self.breaker.failed(fault, failed_at_s, "its log", was_ready=was_ready)
        match self.breaker.state(failed_at_s):
            case NotBefore(at_s) | Open(at_s):
                self.now_s = at_s
        assert isinstance(self.breaker.state(self.now_s), MayStart)
        return self.now_s - failed_at_s

    def lives(self, seconds: float) -> Engine:
        self.now_s += seconds
        return self


def test_a_model_that_never_failed_may_start() -> None:
    assert Breaker("robin").state(0.0) == FREE


def test_the_first_restart_of_an_engine_that_served_is_at_once() -> None:
    assert Engine().dies() == 0.0


def test_a_load_that_failed_waits_a_second() -> None:
    assert Engine().dies(was_ready=False) == pytest.approx(1.0, rel=0.2)


def test_the_pauses_double_up_to_a_minute() -> None:
    """Deaths that are four minutes apart: not often enough for the breaker to open."""
    engine = Engine()
    pauses = [engine.lives(4 * MINUTE_S).dies() for _ in range(10)]
    expected = [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pauses == [pytest.approx(pause_s, rel=0.2) for pause_s in expected]
    assert pauses != expected, "no jitter"


def test_the_jitter_is_another_for_another_model_and_the_same_for_the_same() -> None:
    def third(model_id: str) -> float:
        engine = Engine(model_id)
        return [engine.lives(4 * MINUTE_S).dies() for _ in range(3)][-1]

    assert third("robin") == third("robin")
    assert len({third(f"model-{number}") for number in range(20)}) == 20


def test_before_its_time_it_is_told_when_to_come_again() -> None:
    breaker = Breaker("robin")
    breaker.failed(Fault.CRASH, 100.0, "its log")
    state = breaker.state(100.5)
    assert isinstance(state, NotBefore)
    assert 100.8 <= state.at_s <= 101.2
    assert breaker.state(state.at_s) == FREE


def test_ten_healthy_minutes_take_everything_back() -> None:
    engine = Engine()
    for _ in range(5):
        engine.lives(4 * MINUTE_S).dies()
    engine.breaker.served(engine.lives(10 * MINUTE_S).now_s)
    assert engine.dies() == 0.0


def test_less_than_ten_healthy_minutes_take_nothing_back() -> None:
    engine = Engine()
    engine.dies()
    engine.breaker.served(engine.lives(10 * MINUTE_S - 1).now_s)
    assert engine.dies() > 0.0


def test_time_alone_proves_no_health() -> None:
    engine = Engine()
    engine.dies()
    assert engine.lives(60 * MINUTE_S).dies() > 0.0


def test_the_third_crash_in_a_minute_opens_it_for_five() -> None:
    engine = Engine()
    assert engine.dies() == 0.0
    assert engine.dies() == pytest.approx(1.0, rel=0.2)
    third_at_s = engine.now_s
    assert engine.dies() == pytest.approx(5 * MINUTE_S)
    assert engine.breaker.state(third_at_s + 299.9) == Open(third_at_s + 300.0, 3, "its log")


def test_the_fifth_crash_in_ten_minutes_opens_it_too() -> None:
    engine = Engine()
    pauses = [engine.lives(2 * MINUTE_S).dies() for _ in range(5)]
    assert max(pauses[:4]) < 5
    assert pauses[4] == pytest.approx(5 * MINUTE_S)


@pytest.mark.parametrize(("apart_s", "count"), [(31.0, 3), (151.0, 5)])
def test_a_crash_less_often_than_that_opens_nothing(apart_s: float, count: int) -> None:
    breaker = Breaker("robin")
    for number in range(count):
        breaker.failed(Fault.CRASH, number * apart_s, "its log")
    assert not isinstance(breaker.state(number * apart_s), Open)


def opened() -> Engine:
    engine = Engine()
    for _ in range(3):
        engine.dies()
    return engine


def test_after_five_minutes_one_start_alone_is_tried() -> None:
    engine = opened()
    assert engine.breaker.state(engine.now_s) == MayStart(alone=True)


def test_a_try_that_serves_closes_it() -> None:
    engine = opened()
    engine.breaker.served(engine.lives(1.0).now_s)
    assert engine.breaker.state(engine.now_s) == FREE
    assert engine.dies() == 0.0


def test_a_try_that_fails_opens_it_again() -> None:
    engine = opened()
    assert engine.lives(1.0).dies(was_ready=False) == pytest.approx(5 * MINUTE_S)
    assert engine.lives(60 * MINUTE_S).dies() == pytest.approx(5 * MINUTE_S)


def test_what_another_slot_serves_while_it_is_open_does_not_close_it() -> None:
    breaker = Breaker("robin")
    for _ in range(3):
        breaker.failed(Fault.CRASH, 100.0, "its log")
    breaker.served(101.0)
    assert isinstance(breaker.state(101.0), Open)


def test_a_stall_counts_as_a_crash() -> None:
    engine = Engine()
    pauses = [engine.dies(fault=fault) for fault in (Fault.STALL, Fault.CRASH, Fault.STALL)]
    assert pauses[-1] == pytest.approx(5 * MINUTE_S)


@pytest.mark.parametrize("fault", [Fault.BAD_ARGUMENTS, Fault.BAD_MODEL])
def test_what_no_try_can_mend_is_never_tried_again(fault: Fault) -> None:
    breaker = Breaker("robin")
    breaker.failed(fault, 100.0, "invalid argument: --no-such-thing")
    assert breaker.state(1e9) == Standing(fault, "invalid argument: --no-such-thing")
    breaker.served(1e9)
    assert isinstance(breaker.state(1e9), Standing)


def test_an_operators_load_is_tried_whatever_was() -> None:
    for faults in ([Fault.BAD_MODEL], [Fault.CRASH] * 3, [Fault.OUT_OF_MEMORY] * 2):
        breaker = Breaker("robin")
        for fault in faults:
            breaker.failed(fault, 100.0, "its log")
        breaker.pardon()
        assert breaker.state(100.0) == FREE


def test_where_memory_ran_out_more_is_claimed_once_and_at_once() -> None:
    breaker = Breaker("robin")
    assert not breaker.raise_claim
    breaker.failed(Fault.OUT_OF_MEMORY, 100.0, "cudaMalloc failed")
    assert breaker.state(100.0) == FREE
    assert breaker.raise_claim
    breaker.failed(Fault.OUT_OF_MEMORY, 101.0, "cudaMalloc failed")
    assert breaker.state(1e9) == Standing(Fault.OUT_OF_MEMORY, "cudaMalloc failed")
    assert breaker.raise_claim


def test_a_claim_that_was_raised_stays_raised() -> None:
    engine = Engine()
    engine.dies(fault=Fault.OUT_OF_MEMORY)
    engine.breaker.served(engine.lives(20 * MINUTE_S).now_s)
    engine.breaker.pardon()
    assert engine.breaker.raise_claim


def test_memory_that_ran_out_is_no_crash() -> None:
    engine = Engine()
    engine.dies(fault=Fault.OUT_OF_MEMORY)
    assert engine.dies() == 0.0


@given(
    model_id=st.text("abcdef0123456789-", min_size=1, max_size=12),
    lives_s=st.lists(st.one_of(st.floats(0, 30), st.floats(0, 400), st.floats(0, 3000)), min_size=1, max_size=40),
    ready=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_no_two_starts_are_closer_than_the_law_allows(model_id: str, lives_s: list[float], ready: list[bool]) -> None:
    """An engine that always crashes, and is always started as early as can be."""
    engine = Engine(model_id)
    starts, crashes = [engine.now_s], []
    for life_s, was_ready in zip(lives_s, ready, strict=False):
        crashes.append(engine.lives(life_s).now_s)
        engine.dies(was_ready=was_ready)
        starts.append(engine.now_s)
    pauses = [start - crash for start, crash in zip(starts[1:], crashes, strict=True)]
    assert all(pause_s >= 0.8 * 1 for pause_s in pauses[1:]), "only the first restart is at once"
    growing = [pause_s for pause_s in pauses[1:] if pause_s < 300]
    assert all(pause_s >= 0.8 * min(2**count, 60) for count, pause_s in enumerate(growing)), "the pauses double"
    assert all(pause_s <= 72 or pause_s == pytest.approx(300) for pause_s in pauses)
    for count, within_s in ((3, 60.0), (5, 600.0)):
        for burst in zip(*(crashes[offset:] for offset in range(count)), strict=False):
            if burst[-1] - burst[0] <= within_s:
                after = next((start for start in starts if start > burst[-1]), None)
                assert after is None or after - burst[-1] >= 299.9, "an open breaker starts nothing"
    assert all(later >= earlier for earlier, later in pairwise(starts))
