"""Thousands of random histories against the rules of `scheduler_rules.py`; and proof that the rules can be broken."""

from __future__ import annotations

import pytest

from inference import eviction, overtaking
from inference.eviction import Candidate
from inference.placement import Rooms
from tests.unit.inference.one_room import OneRoom
from tests.unit.inference.scheduler_rules import Broken
from tests.unit.inference.scheduler_world import World


def play(kind: type[World], seeds: range, busy_s: float) -> dict[str, int]:
    """Decisions by kind over all histories; names the seed of the first that breaks a rule."""
    counts: dict[str, int] = {}
    for seed in seeds:
        world = kind(seed)
        try:
            world.run(busy_s)
        except Broken as broken:
            raise Broken(f"{kind.__name__}({seed}).run({busy_s}): {broken}") from broken
        for name, count in world.counts.items():
            counts[name] = counts.get(name, 0) + count
    return counts


def test_random_histories_keep_every_rule():
    counts = play(World, range(150), busy_s=40.0)
    assert all(counts[name] > 100 for name in ("Start", "Drain", "Stop", "Grant", "Refuse"))


def test_nobody_is_overtaken_beyond_the_bounds():
    counts = play(OneRoom, range(30), busy_s=15.0)
    assert counts["Start"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(4))
def test_thousands_of_random_histories_keep_every_rule(batch: int):
    play(World, range(1000 + batch * 500, 1500 + batch * 500), busy_s=40.0)


@pytest.mark.slow
def test_hundreds_of_histories_overtake_nobody_beyond_the_bounds():
    play(OneRoom, range(1000, 1120), busy_s=20.0)


# -- the rules go red when a protection is switched off --------------------------------------------------------------


def test_a_busy_or_loading_slot_that_is_evicted_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(Candidate, "yields_to", lambda self, priority: True)
    with pytest.raises(Broken, match="4: "):
        play(World, range(100), busy_s=40.0)


def test_a_superfluous_victim_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(eviction, "_without_redundant", lambda need, trial, chosen, *, may_split: tuple(chosen))
    with pytest.raises(Broken, match="5: "):
        play(World, range(200), busy_s=40.0)


def test_room_that_is_promised_twice_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(Rooms, "take", lambda self, shares: None)
    with pytest.raises(Broken, match="3: "):
        play(World, range(100), busy_s=40.0)


def test_unbounded_overtaking_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(overtaking.Overtaking, "forbids", lambda self, slot, entry: False)
    with pytest.raises(Broken, match="is overtaken"):
        play(OneRoom, range(30), busy_s=15.0)


def test_a_queue_that_forgets_to_grant_is_a_deadlock_the_world_notices(monkeypatch):
    monkeypatch.setattr(overtaking.Overtaking, "forbids", lambda self, slot, entry: slot.taken > 0)
    with pytest.raises(Broken, match="7: still waiting"):
        play(OneRoom, range(5), busy_s=5.0)
