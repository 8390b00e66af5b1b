"""What counts as progress and what as a stall, on a clock of the test's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.progress_watch import LOOK_EVERY_S
from inference.watchdog import COMPUTING_TIMES, LATE_S, Watchdog

STALL_S = 60.0


def stalled_at(
    seen: Callable[[float], object],
    *,
    cpu: Callable[[float], float] | None = None,
    every_s: float = LOOK_EVERY_S,
    until_s: float = 2000.0,
) -> float | None:
    """When an engine that was ready at 0, and shows this at a time, is found stalled; None: not until then."""
    watchdog = Watchdog(STALL_S, 0.0)
    now_s = 0.0
    while now_s < until_s:
        deadline_s = watchdog.deadline_s
        assert deadline_s is not None
        now_s = min(now_s + every_s, max(deadline_s, now_s))
        watchdog.look(now_s, seen(now_s), cpu_s=cpu(now_s) if cpu else None)
        if (deadline_s := watchdog.deadline_s) is not None and now_s >= deadline_s:
            return now_s
    return None


def test_an_engine_that_makes_tokens_is_not_stalled() -> None:
    assert stalled_at(lambda now_s: int(now_s * 20)) is None


def test_a_prompt_that_takes_longer_than_the_patience_is_no_stall() -> None:
    """Its tokens are counted step by step, here one every 40 s."""
    assert stalled_at(lambda now_s: ("prompt", now_s // 40)) is None


def test_steps_that_take_nearly_as_long_as_the_patience_are_no_stall() -> None:
    assert stalled_at(lambda now_s: now_s // (STALL_S - LOOK_EVERY_S)) is None


@given(last_s=st.floats(0.1, 300.0))
def test_a_stall_is_told_within_a_second_of_its_time(last_s: float) -> None:
    """The engine makes a token every 10 ms until it stops, and answers no more or always the same."""
    for shown in (
        lambda now_s: int(min(now_s, last_s) * 100),
        lambda now_s: int(now_s * 100) if now_s < last_s else None,
    ):
        at_s = stalled_at(shown)
        assert at_s is not None
        assert last_s + STALL_S - 2 * LOOK_EVERY_S <= at_s <= last_s + STALL_S + LATE_S + 0.02


def test_no_answer_is_no_progress() -> None:
    assert stalled_at(lambda _: None) == STALL_S


def test_an_answer_after_silence_is_progress_if_it_says_something_new() -> None:
    assert stalled_at(lambda now_s: None if now_s % 50 > 2 else now_s // 50) is None
    assert stalled_at(lambda now_s: None if now_s % 50 > 2 else "the same") == pytest.approx(STALL_S + LATE_S)


def test_an_answer_that_had_to_wait_came_at_the_end_of_its_step() -> None:
    watchdog = Watchdog(STALL_S, 0.0)
    watchdog.look(30.0, 1, waited_s=28.0)
    assert watchdog.deadline_s == 30.0 + STALL_S
    watchdog.look(50.0, 2, waited_s=0.01)
    assert watchdog.deadline_s == 30.0 + LATE_S + STALL_S


def test_one_long_step_on_the_processor_is_no_stall() -> None:
    """Five minutes in which nothing is shown, but computed."""
    assert stalled_at(lambda now_s: now_s // 300, cpu=lambda now_s: now_s) is None


def test_the_same_without_computing_is_a_stall() -> None:
    assert stalled_at(lambda now_s: now_s // 300) is not None


def test_an_endless_loop_is_a_stall_all_the_same() -> None:
    assert stalled_at(lambda _: None, cpu=lambda now_s: 2 * now_s) == pytest.approx(COMPUTING_TIMES * STALL_S, abs=2)


def test_an_engine_that_is_stopped_in_the_middle_of_a_step_does_not_compute() -> None:
    """Its processor seconds say to a moment when it stopped."""
    for stopped_s in (10.0, 10.3, 10.9, 11.2):
        at_s = stalled_at(lambda _: None, cpu=lambda now_s, end_s=stopped_s: min(now_s, end_s))
        assert at_s is not None
        assert stopped_s + STALL_S - LOOK_EVERY_S <= at_s <= stopped_s + STALL_S + LATE_S + 0.02


def test_being_looked_at_is_no_computing() -> None:
    assert stalled_at(lambda _: None, cpu=lambda now_s: 0.01 * now_s) == pytest.approx(STALL_S, abs=1)


def test_an_engine_without_work_has_no_deadline_and_gets_its_time_when_it_has_some() -> None:
    watchdog = Watchdog(STALL_S, 0.0)
    watchdog.look(1.0, "read 5")
    watchdog.idle(500.0)
    assert watchdog.deadline_s is None
    watchdog.look(500.2, None)
    assert watchdog.deadline_s == 500.2 + STALL_S
    watchdog.idle(550.0)
    watchdog.look(551.25, "read 5")
    assert watchdog.deadline_s == 550.0 + LATE_S + STALL_S
    assert watchdog.still_s(560.5) == 10.0
