"""Thousands of random histories against the rules of `scheduler_rules.py`; and proof that the rules can be broken."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from inference import eviction, overtaking
from inference.board import Board
from inference.eviction import Candidate
from inference.model import Model
from inference.placement import Rooms
from inference.plan import Plan
from inference.queue import Entry
from inference.slot_view import SlotRecord
from inference.yielding import Yielding
from tests.unit.inference.one_room import OneRoom, Turns
from tests.unit.inference.scheduler_rules import Broken
from tests.unit.inference.scheduler_world import World


class Impatient(World):
    """Long loads, and callers who do not wait for them."""

    def people(self) -> None:
        super().people()
        self.limits = replace(self.limits, load_grace_s=10.0)
        self.load_s = dict.fromkeys(self.models, 15.0)
        self.trouble = 0.6


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
    counts = play(World, range(100), busy_s=40.0)
    assert all(counts[name] > 100 for name in ("Start", "Drain", "Stop", "Grant", "Refuse", "Ask", "Reprice"))
    assert all(counts[name] > 100 for name in ("noticed", "Acknowledge", "job granted"))
    assert counts["cut"] > 5


def test_nobody_is_overtaken_beyond_the_bounds():
    counts = play(OneRoom, range(30), busy_s=15.0)
    assert counts["Start"] > 300


def test_nobody_waits_longer_than_the_bound_the_longest_request_and_the_load_and_the_turns_of_those_before():
    worlds = [Turns(seed) for seed in range(30)]
    for world in worlds:
        world.run(40.0)
    assert sum(world.waits for world in worlds) > 100
    assert max(world.most_turns for world in worlds) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(4))
def test_thousands_of_random_histories_keep_every_rule(batch: int):
    play(World, range(1000 + batch * 500, 1500 + batch * 500), busy_s=40.0)


@pytest.mark.slow
def test_hundreds_of_histories_overtake_nobody_beyond_the_bounds():
    play(OneRoom, range(1000, 1120), busy_s=20.0)


@pytest.mark.slow
def test_hundreds_of_histories_let_nobody_wait_longer_than_the_bounds():
    play(Turns, range(1000, 1300), busy_s=40.0)


# -- the rules go red when a protection is switched off --------------------------------------------------------------


def test_a_busy_or_loading_slot_that_is_evicted_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(Candidate, "yields_to", lambda self, priority, *, overdue: True)
    with pytest.raises(Broken, match="4: "):
        play(World, range(100), busy_s=40.0)


def test_a_superfluous_victim_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(eviction, "_without_redundant", lambda need, trial, chosen, devices, groups: tuple(chosen))
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


def test_a_wait_without_a_bound_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(overtaking.Overtaking, "forbids", lambda self, slot, entry: False)
    monkeypatch.setattr(OneRoom, "overtaken", lambda self, leader, by: None)
    with pytest.raises(Broken, match="waited"):
        play(Turns, range(30), busy_s=40.0)


def for_ever(self: SlotRecord, entry: Entry, _now_s: float, _turn_s: float) -> bool:
    """Who waited for the load has its turn by it, however many and however late."""
    return self.ready_at_s is not None and entry.submitted_at_s < self.ready_at_s


def to_whoever_fills_a_place(self: SlotRecord, _entry: Entry, _now_s: float, _turn_s: float) -> bool:
    """The first batch is of as many as the slot has places, whether or not they waited for the load."""
    return self.taken < self.model.parallel


@pytest.mark.parametrize("owes", [for_ever, to_whoever_fills_a_place])
def test_a_load_that_owes_too_much_breaks_a_rule(monkeypatch, owes):
    monkeypatch.setattr(SlotRecord, "owes", owes)
    monkeypatch.setattr(OneRoom, "overtaken", lambda self, leader, by: None)
    with pytest.raises(Broken, match="waited"):
        play(Turns, range(200), busy_s=40.0)


def test_a_model_that_goes_although_it_was_just_loaded_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(SlotRecord, "resident_until_s", lambda self, min_residency_s: 0.0)
    with pytest.raises(Broken, match="was just loaded"):
        play(World, range(300), busy_s=40.0)


def test_a_load_that_is_given_up_as_soon_as_its_caller_left_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(Board, "is_orphaned", lambda self, slot: False)
    play_impatient(range(40), spoilt=True)


def play_impatient(seeds: range, *, spoilt: bool) -> None:
    with pytest.raises(Broken, match="was wanted just now") if spoilt else contextlib.nullcontext():
        play(Impatient, seeds, busy_s=60.0)


def test_callers_who_leave_before_their_model_is_loaded_keep_every_rule():
    play_impatient(range(40), spoilt=False)


def test_a_further_slot_that_evicts_somebody_breaks_a_rule(monkeypatch):
    def widen(self: Plan, model: Model) -> None:
        if len(self._board.slots.of(model.id)) < model.replicas:
            self._board.start(model, ({self._board.usable[0].id: model.claim_bytes},), 10)

    monkeypatch.setattr(Plan, "_widen", widen)
    with pytest.raises(Broken, match=r"11: |3: "):
        play(World, range(100), busy_s=40.0)


def test_a_slot_that_does_not_heed_its_notice_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(Yielding, "run", lambda self: False)
    with pytest.raises(Broken, match=r"8: .* does not yield"):
        play(World, range(100), busy_s=40.0)


def test_a_busy_slot_that_yields_to_its_own_class_breaks_a_rule(monkeypatch):
    yields = Yielding._yields
    monkeypatch.setattr(
        Yielding,
        "_yields",
        lambda self, slot, demand: yields(self, slot, replace(demand, priority=demand.priority - 1)),
    )
    with pytest.raises(Broken, match="8: busy"):
        play(World, range(100), busy_s=40.0)


def test_a_pinned_slot_that_yields_to_a_lease_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(
        Yielding, "_demand_on", lambda self, slot: self._board.demands[slot.notice.by] if slot.notice else None
    )
    with pytest.raises(Broken, match="8: pinned"):
        play(World, range(300), busy_s=40.0)


def test_a_request_that_is_cut_short_within_its_grace_breaks_a_rule(monkeypatch):
    told = Board.notice
    monkeypatch.setattr(
        Board, "notice", lambda self, slot, event: told(self, slot, replace(event, deadline_s=event.deadline_s / 2))
    )
    with pytest.raises(Broken, match=r"8: Stop.* before"):
        play(World, range(300), busy_s=40.0)


def test_memory_that_is_not_kept_for_who_waits_outside_breaks_a_rule(monkeypatch):
    way = Board.give_way
    monkeypatch.setattr(
        Board, "give_way", lambda self, slot, *told: (way(self, slot, *told), setattr(slot, "yields_to", None))
    )
    with pytest.raises(Broken, match="3: "):
        play(World, range(300), busy_s=40.0)


def test_unbounded_overtaking_of_who_waits_outside_breaks_a_rule(monkeypatch):
    monkeypatch.setattr(Yielding, "forbids", lambda self, slot, entry: False)
    with pytest.raises(Broken, match="9: "):
        play(World, range(300), busy_s=40.0)


def test_a_queue_that_forgets_to_grant_is_a_deadlock_the_world_notices(monkeypatch):
    monkeypatch.setattr(overtaking.Overtaking, "forbids", lambda self, slot, entry: slot.taken > 0)
    with pytest.raises(Broken, match="7: still waiting"):
        play(OneRoom, range(5), busy_s=5.0)
