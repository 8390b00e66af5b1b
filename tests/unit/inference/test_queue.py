"""Who is next: order, ageing, places, limits."""

from __future__ import annotations

import random

import pytest

from inference.events import Purpose, Ticket
from inference.queue import QueueLimits, WaitingLine, fallen, risen


def a_ticket(name: str, *, priority: int = 10, at: float = 0.0, model: str = "a", purpose: Purpose = Purpose.INFER):
    return Ticket(name, model, priority, at, purpose=purpose)


def a_line(*tickets: Ticket, aging_s: float = 60.0) -> WaitingLine:
    line = WaitingLine(aging_s)
    for ticket in tickets:
        line.add(ticket)
    return line


def names(entries) -> list[str]:
    return [entry.ticket.id for entry in entries]


def test_a_more_important_class_comes_first_and_within_a_class_who_came_first():
    line = a_line(
        a_ticket("late", at=2.0),
        a_ticket("early", at=1.0),
        a_ticket("urgent", priority=1, at=3.0),
        a_ticket("same", at=1.0),
    )
    assert names(line.in_order(now_s=3.0)) == ["urgent", "early", "same", "late"]
    assert names(line.waiting_for("a")) == ["urgent", "early", "same", "late"]


def test_positions_count_every_model_and_purpose():
    line = a_line(
        a_ticket("a1", at=1.0),
        a_ticket("b1", at=2.0, model="b"),
        a_ticket("load", at=3.0, model="c", purpose=Purpose.LOAD),
        a_ticket("high", priority=5, at=4.0, model="b"),
    )
    assert line.position("high") == (1, 4)
    assert line.position("a1") == (2, 4)
    assert line.position("load") == (4, 4)
    assert line.position("stranger") == (0, 4)


def test_a_ticket_that_left_leaves_nothing_behind():
    line = a_line(a_ticket("one"), a_ticket("two", priority=20))
    assert line.remove("one") is not None
    assert line.remove("one") is None
    assert line.remove("two") is not None
    assert len(line) == 0
    assert not line.models()
    assert line.in_order(now_s=1e6) == []


def test_only_the_oldest_of_a_class_ages_one_class_per_period_up_to_high():
    line = a_line(a_ticket("old", priority=50, at=0.0), a_ticket("young", priority=50, at=1.0))
    seen = [names(line.in_order(now)) and line.in_order(now)[0].priority for now in (59.0, 60.0, 120.0, 180.0, 9999.0)]
    assert seen == [50, 20, 10, 5, 5]
    assert [entry.priority for entry in line.in_order(9999.0)] == [5, 50]


def test_ageing_starts_anew_for_the_next_oldest_when_the_oldest_had_its_turn():
    line = a_line(a_ticket("old", priority=20, at=0.0), a_ticket("next", priority=20, at=1.0))
    line.granted("old", at_s=100.0)
    assert not line.aged(now_s=159.0)
    assert line.aged(now_s=160.0)["a"][0].priority == 10


def test_a_grant_to_a_younger_ticket_does_not_take_the_oldest_ones_age():
    line = a_line(a_ticket("old", priority=20, at=0.0), a_ticket("warm", priority=20, at=1.0, model="b"))
    line.granted("warm", at_s=100.0)
    assert line.aged(now_s=101.0)["a"][0].ticket.id == "old"


def test_high_and_urgent_do_not_age():
    line = a_line(a_ticket("high", priority=5), a_ticket("urgent", priority=1, model="b"))
    assert not line.aged(now_s=1e9)


def test_an_aged_ticket_overtakes_younger_ones_of_its_own_model():
    line = a_line(a_ticket("batch", priority=50, at=0.0), a_ticket("normal", priority=10, at=130.0))
    assert line.leader("a", line.aged(now_s=100.0)).ticket.id == "normal"
    assert line.leader("a", line.aged(now_s=131.0)).ticket.id == "batch"
    assert line.next_for_ready("a", line.aged(now_s=131.0)).ticket.id == "batch"


@pytest.mark.parametrize(
    ("priority", "steps", "becomes"), [(50, 1, 20), (50, 9, 5), (30, 1, 20), (1000, 1, 50), (7, 1, 5), (3, 4, 3)]
)
def test_a_class_rises_along_the_named_classes(priority: int, steps: int, becomes: int):
    assert risen(priority, steps) == becomes


@pytest.mark.parametrize(
    ("priority", "steps", "becomes"), [(1, 1, 5), (10, 0, 10), (10, 2, 50), (30, 1, 50), (50, 1, 1000), (1000, 3, 1000)]
)
def test_an_idle_slots_class_falls_along_the_named_classes(priority: int, steps: int, becomes: int):
    assert fallen(priority, steps) == becomes


def test_a_model_is_loaded_for_its_first_ticket_that_is_no_peek():
    line = a_line(
        a_ticket("peek", at=1.0, purpose=Purpose.PEEK),
        a_ticket("work", at=2.0),
        a_ticket("load", at=3.0, purpose=Purpose.LOAD),
    )
    assert line.leader("a", {}).ticket.id == "work"
    line.remove("work")
    assert line.leader("a", {}).ticket.id == "load"
    line.remove("load")
    assert line.leader("a", {}).ticket.id == "peek"


def test_a_ready_models_next_ticket_is_one_that_uses_the_engine():
    line = a_line(a_ticket("load", at=1.0, purpose=Purpose.LOAD), a_ticket("peek", at=2.0, purpose=Purpose.PEEK))
    assert line.next_for_ready("a", {}).ticket.id == "peek"
    assert names(line.loads("a", {})) == ["load"]


def test_tickets_expire_when_they_have_waited_as_long_as_they_may():
    line = a_line(a_ticket("old", at=0.0), a_ticket("batch", priority=50, at=5.0), a_ticket("new", at=5.1))
    assert names(line.expired(now_s=305.0, max_wait_s=300.0)) == ["old", "batch"]


def test_the_heads_agree_with_sorting_everything_after_any_coming_and_going():
    rng = random.Random(7)
    line, alive = WaitingLine(60.0), {}
    for number in range(3000):
        if alive and rng.random() < 0.48:
            name = rng.choice(list(alive))
            del alive[name]
            line.remove(name)
        else:
            ticket = a_ticket(
                f"t{number}", priority=rng.choice([1, 5, 10, 20, 50]), at=rng.random() * 50, model=rng.choice("abc")
            )
            alive[ticket.id] = ticket
            line.add(ticket)
        assert len(line) == len(alive)
        for model in line.models():
            expected = min(
                (one for one in alive.values() if one.model_id == model),
                key=lambda one: (one.priority, one.submitted_at_s),
            )
            assert line.leader(model, {}).ticket is expected


@pytest.mark.parametrize(
    "wrong", [{"max_waiting": 0}, {"max_wait_s": 0}, {"aging_s": -1}, {"aging_s": 1e-320}, {"max_overtakes": -1}]
)
def test_limits_that_cannot_be_meant_are_refused_by_name(wrong: dict):
    with pytest.raises(ValueError, match=f"queue.{next(iter(wrong))}"):
        QueueLimits(**wrong)
