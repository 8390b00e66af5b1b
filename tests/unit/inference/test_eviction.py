"""Who must go: order of candidates, who yields to whom, sets without a superfluous member."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from inference.eviction import UNWANTED, Activity, Candidate, choose
from inference.placement import once_gone, reach
from tests.unit.inference.scheduler_rules import GIB, one_node

IDLE, BUSY, LOADING = Activity.IDLE, Activity.BUSY, Activity.LOADING


def a_candidate(
    name: str, gib: float, *, priority: int = 10, cost: float = 1.0, device="d0", activity=IDLE
) -> Candidate:
    return Candidate(name, {device: int(gib * GIB)}, priority, activity, cost)


def chosen(need: float, rooms: dict[str, float], *candidates: Candidate) -> list[str] | None:
    free = {device: int(gib * GIB) for device, gib in rooms.items()}
    victims = choose(int(need * GIB), free, sorted(candidates, key=lambda one: one.rank), one_node(rooms))
    return None if victims is None else sorted(victim.slot_id for victim in victims)


def test_the_least_important_goes_first_and_of_equals_the_cheapest():
    batch, normal = a_candidate("batch", 4, priority=50, cost=9.0), a_candidate("normal", 4)
    cheap, dear = a_candidate("cheap", 4, cost=0.1), a_candidate("dear", 4, cost=2.0)
    assert chosen(4, {"d0": 0}, normal, batch) == ["batch"]
    assert chosen(4, {"d0": 0}, dear, cheap) == ["cheap"]


def test_no_more_go_than_needed():
    small, large = a_candidate("small", 2, priority=50), a_candidate("large", 8)
    assert chosen(8, {"d0": 0}, small, large) == ["large"]
    assert chosen(9, {"d0": 0}, small, large) == ["large", "small"]


def test_free_room_counts():
    assert chosen(8, {"d0": 6}, a_candidate("a", 2), a_candidate("b", 2)) == ["a"]


def test_nobody_goes_when_all_together_do_not_suffice():
    assert chosen(9, {"d0": 0}, a_candidate("a", 4), a_candidate("b", 4)) is None
    assert chosen(1, {"d0": 0}) is None


def test_victims_on_a_device_that_does_not_help_are_spared():
    elsewhere = a_candidate("elsewhere", 1, priority=50, device="d1")
    here = a_candidate("here", 8, device="d0")
    assert chosen(8, {"d0": 0, "d1": 0}, elsewhere, here) == ["here"]


def test_several_devices_may_be_cleared_for_a_model_that_needs_them_all():
    assert chosen(14, {"d0": 0, "d1": 0}, a_candidate("a", 8, device="d0"), a_candidate("b", 8, device="d1")) == [
        "a",
        "b",
    ]


def test_a_load_that_nobody_wants_goes_before_everything_else():
    unwanted = a_candidate("unwanted", 4, priority=UNWANTED, activity=Activity.UNWANTED, cost=0.0)
    assert chosen(4, {"d0": 0}, a_candidate("batch", 4, priority=1000), unwanted) == ["unwanted"]


@pytest.mark.parametrize(
    ("activity", "priority", "to", "yields"),
    [
        (IDLE, 10, 10, True),
        (IDLE, 10, 5, True),
        (IDLE, 5, 10, False),
        (BUSY, 10, 10, False),
        (BUSY, 10, 5, True),
        (BUSY, 5, 10, False),
        (LOADING, 1000, 1, False),
        (Activity.UNWANTED, UNWANTED, 1000, True),
    ],
)
def test_who_yields_to_whom(activity: Activity, priority: int, to: int, yields: bool):
    assert a_candidate("a", 1, priority=priority, activity=activity).yields_to(to) is yields


def test_every_set_suffices_and_needs_each_of_its_members_and_no_set_of_lesser_ones_would_do():
    rng = random.Random(11)
    for _ in range(1500):
        rooms = {f"d{n}": rng.randrange(0, 4 * GIB) for n in range(rng.randint(1, 3))}
        candidates = sorted(
            (
                Candidate(
                    f"m{n}",
                    {rng.choice(list(rooms)): rng.randrange(1, 5 * GIB)},
                    rng.choice([5, 10, 20, 50]),
                    IDLE,
                    rng.choice([0.1, 1.0, math.inf]),
                )
                for n in range(rng.randint(0, 6))
            ),
            key=lambda one: one.rank,
        )
        need = rng.randrange(4 * GIB, 14 * GIB)
        if need <= reach(rooms, one_node(rooms)):
            continue
        victims = choose(need, rooms, candidates, one_node(rooms))

        def suffices(some, need=need, rooms=rooms) -> bool:
            return need <= reach(once_gone(rooms, some), one_node(rooms))

        assert (victims is not None) == suffices(candidates)
        if victims is None:
            continue
        assert suffices(victims)
        for spared in victims:
            assert not suffices([victim for victim in victims if victim is not spared])
        worst = min(victim.priority for victim in victims)
        lesser = [candidate for candidate in candidates if candidate.priority > worst]
        assert not any(
            suffices(some) for size in range(len(lesser) + 1) for some in itertools.combinations(lesser, size)
        )
