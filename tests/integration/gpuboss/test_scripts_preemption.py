"""Pre-emption inside the queue, rule by rule, on a real Valkey and a clock of the test's own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import redis

from gpuboss.scripts import Script, source
from tests.integration.gpuboss.script_harness import MIB, NODE, ScriptStore, row_of

ONE = {"sim0": {"total": 100 * MIB}}
TWO = {"sim0": {"total": 100 * MIB}, "sim1": {"total": 100 * MIB}}
BROKER = json.dumps({"boot_id": "b", "pid": 7, "pid_namespace": 2, "start_ticks": 3})
OTHER_BROKER = json.dumps({"boot_id": "b", "pid": 8, "pid_namespace": 2, "start_ticks": 3})
YIELDING: dict[str, Any] = {"preemptible": True}
SLOT: dict[str, Any] = {"kind": "slot", "owner": BROKER}
BATCH: dict[str, Any] = YIELDING | {"priority": 50}


def part(size: int, device: str = "sim0") -> dict[str, int]:
    return {device: size * MIB}


def test_a_less_important_holder_that_agreed_to_it_is_told_to_yield(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.hold("batch", part(60), grace_ms=45_000, **BATCH)
    scripts.wait("urgent", part(80), priority=1, holder="job:sft-12")
    scripts.pass_time(5)
    assert scripts.view("batch")["notice"] == {
        "by": "urgent",
        "holder": "job:sft-12",
        "priority": 1,
        "since_ms": scripts.now_ms - 5000,
        "left_ms": 40_000,
        "acked": False,
        "outranks": True,
    }
    assert scripts.events().count(("notice", "batch")) == 1, "told once, however often the queue is gone through"


@pytest.mark.parametrize(
    ("holder", "waiter", "is_told"),
    [
        pytest.param({"priority": 50}, {"priority": 1}, False, id="a holder that did not agree to it"),
        pytest.param(YIELDING | {"priority": 10}, {"priority": 10}, False, id="an equal that was first"),
        pytest.param(YIELDING | {"priority": 5}, {"priority": 10}, False, id="a more important one"),
        pytest.param(SLOT | {"priority": 10}, {"priority": 10}, True, id="a slot, by its equal"),
        pytest.param(SLOT | {"priority": 5}, {"priority": 10}, False, id="a more important slot"),
        pytest.param(SLOT | {"priority": 50}, SLOT | {"priority": 10}, False, id="a slot, by one of its own broker"),
        pytest.param(SLOT, SLOT | {"owner": OTHER_BROKER}, True, id="a slot, by one of another broker"),
        pytest.param(SLOT, {"owner": BROKER}, True, id="a slot, by a job that its broker's process asks for"),
        pytest.param(YIELDING | {"kind": "service", "priority": 50}, {}, True, id="a service that agreed to it"),
    ],
)
def test_who_is_told_to_yield(
    scripts: ScriptStore, holder: dict[str, Any], waiter: dict[str, Any], is_told: bool
) -> None:
    scripts.sync(ONE)
    scripts.hold("holder", part(60), **holder)
    scripts.wait("waiter", part(80), **waiter)
    assert scripts.told("waiter") == ({"holder"} if is_told else set())


def test_a_slot_is_told_whether_it_must_yield_busy_or_not(scripts: ScriptStore) -> None:
    scripts.sync(TWO)
    scripts.hold("equal", part(90), **SLOT | {"priority": 10})
    scripts.hold("lesser", part(90, "sim1"), **SLOT | {"priority": 20})
    scripts.wait("waiter", part(90) | part(90, "sim1"), priority=10)
    assert scripts.told("waiter") == {"equal", "lesser"}
    assert not scripts.view("equal")["notice"]["outranks"]
    assert scripts.view("lesser")["notice"]["outranks"]


def test_a_slot_that_may_stay_while_busy_gets_its_whole_grace_when_it_must_go_in_any_case(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.hold("slot", part(90), **SLOT)
    scripts.wait("equal", part(90))
    scripts.pass_time(20)
    scripts.wait("urgent", part(90), priority=1)
    notice = scripts.view("slot")["notice"]
    assert (notice["by"], notice["outranks"], notice["left_ms"]) == ("urgent", True, 30_000)
    assert scripts.events().count(("notice", "slot")) == 2, "it learns that things have changed"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(BATCH, YIELDING | {"priority": 20}, id="the less important one"),
        pytest.param(SLOT | {"priority": 50}, BATCH, id="a slot before a job"),
        pytest.param(BATCH, BATCH | {"order": 1}, id="the younger one"),
    ],
)
def test_of_two_that_could_yield(scripts: ScriptStore, first: dict[str, Any], second: dict[str, Any]) -> None:
    scripts.sync(ONE)
    scripts.hold("first", part(50), **first)
    scripts.hold("second", part(50), **second)
    scripts.wait("urgent", part(40), priority=1)
    assert scripts.told("urgent") == {"first"}


def few_are_disturbed(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    for name, size, priority in (("small", 10, 50), ("middle", 20, 40), ("large", 60, 20)):
        scripts.hold(name, part(size), preemptible=True, priority=priority)
    scripts.wait("urgent", part(70), priority=1)
    assert scripts.told("urgent") == {"large"}, "10 are free and 60 come: telling the less important ones gains nothing"


def enough_or_nobody(scripts: ScriptStore) -> None:
    scripts.sync(TWO)
    scripts.hold("stays", part(50))
    scripts.hold("batch", part(40), **BATCH)
    scripts.hold("other", part(90, "sim1"), **BATCH)
    scripts.wait("urgent", part(60) | part(60, "sim1"), priority=1)
    assert scripts.told("urgent") == set(), "all that could yield would not be enough on sim0"
    scripts.run(Script.CANCEL, id="urgent")
    scripts.wait("modest", part(50) | part(60, "sim1"), priority=1)
    assert scripts.told("modest") == {"batch", "other"}, "a gang gets both or neither"


def freed_memory_is_kept(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    batch = [scripts.hold(f"batch{number}", part(50), **BATCH) for number in range(2)]
    scripts.wait("urgent", part(80), priority=1)
    assert scripts.told("urgent") == {"batch0", "batch1"}
    scripts.release(batch[0])
    scripts.wait("again", part(10), **BATCH)
    scripts.wait("small", part(10), priority=5)
    scripts.release(batch[1])
    assert scripts.state("urgent") == "granted"
    assert {scripts.state("small"), scripts.state("again")} == {"granted"}, "what is left over is theirs"


def memory_that_a_driver_gives_back_late_is_kept(scripts: ScriptStore) -> None:
    gpu = {"gpu": {"total": 100 * MIB, "settles": True}}
    scripts.sync(gpu)
    batch = scripts.hold("batch", part(90, "gpu"), **BATCH)
    row = {name: batch[name] for name in ("id", "holder", "kind", "priority", "owner", "epoch", "seq", "shares")}
    scripts.sync(gpu, [row | {"observed": json.dumps({f"{NODE}/gpu": 90 * MIB})}])
    scripts.wait("urgent", part(80, "gpu"), priority=1)
    scripts.release(batch)
    assert scripts.state("urgent") == "queued", "nobody has seen it free yet"
    assert scripts.acquire("again", part(10, "gpu"), **BATCH)["lease"]["state"] == "queued"
    scripts.sync(gpu)
    assert scripts.state("urgent") == "granted"


def a_notice_is_taken_back(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    batch = scripts.hold("batch", part(40), **BATCH)
    stays = scripts.hold("stays", part(60))
    scripts.wait("urgent", part(40), priority=1)
    scripts.wait("also", part(10), priority=50)
    scripts.run(Script.CANCEL, id="urgent")
    assert "notice" not in scripts.view("batch")
    assert scripts.events()[-1] == ("withdrawn", "batch")
    assert "notice" not in scripts.fenced(Script.ACK, batch)["lease"], "who acknowledges too late may stay"
    scripts.wait("next", part(40), priority=1)
    assert scripts.told("next") == {"batch"}
    scripts.release(stays)
    assert scripts.state("next") == "granted"
    assert scripts.told("next") == set(), "what it waited for came from somebody else"


def an_acknowledged_notice_stands(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    batch = scripts.hold("batch", part(100), **BATCH)
    scripts.wait("urgent", part(40), priority=1)
    for _ in range(2):
        assert scripts.fenced(Script.ACK, batch)["lease"]["notice"]["acked"]
    scripts.run(Script.CANCEL, id="urgent")
    scripts.run(Script.TICK)
    assert scripts.view("batch")["notice"]["acked"], "it is yielding, and its memory is coming"
    scripts.wait("next", part(40), priority=1)
    scripts.release(batch)
    assert scripts.state("next") == "granted"


def nobody_is_told_twice(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    batch = scripts.hold("batch", part(100), **BATCH)
    scripts.wait("high", part(40), priority=5)
    scripts.pass_time(10)
    scripts.wait("urgent", part(40), priority=1)
    notice = scripts.view("batch")["notice"]
    assert (notice["by"], notice["priority"], notice["left_ms"]) == ("urgent", 1, 20_000), "its grace goes on"
    assert scripts.events().count(("notice", "batch")) == 1
    scripts.run(Script.CANCEL, id="urgent")
    assert scripts.view("batch")["notice"]["by"] == "high", "who wants it still has it yield"
    assert ("withdrawn", "batch") not in scripts.events()
    scripts.release(batch)
    assert scripts.state("high") == "granted"


def displaced_holders_displace_nobody_back(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    victim = scripts.hold("batch", part(80), **BATCH)
    scripts.wait("normal", part(80), **YIELDING)
    scripts.release(victim)
    assert scripts.state("normal") == "granted"
    scripts.wait("batch2", part(80), **BATCH)
    scripts.wait("equal", part(80), **YIELDING)
    assert scripts.told("batch2") | scripts.told("equal") == set()


def who_is_let_past_yields_in_time(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    stays = scripts.hold("stays", part(50))
    scripts.wait("first", part(80))
    scripts.wait("rigid", part(30))
    scripts.hold("yielding", part(30), **YIELDING)
    scripts.release(stays)
    assert scripts.state("rigid") == "queued", "it does not yield, so it was not let past"
    assert scripts.told("first") == {"yielding"}
    assert scripts.view("yielding")["notice"]["outranks"], "of the same class, but let past one that was first"


def nobody_is_let_past_while_room_is_made(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.hold("batch", part(60), **BATCH)
    scripts.wait("first", part(80))
    assert scripts.told("first") == {"batch"}
    scripts.wait("yielding", part(15), **YIELDING)


def slots_of_one_broker_come_in_its_order(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.hold("stays", part(50))
    scripts.wait("large", part(80), **SLOT)
    scripts.wait("small", part(30), **SLOT)
    scripts.hold("stranger", part(30), **SLOT | {"owner": OTHER_BROKER})


def a_broker_makes_room_among_its_own_first(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    own = scripts.hold("own", part(50), **SLOT)
    scripts.hold("batch", part(50), **BATCH)
    scripts.wait("model", part(50), **SLOT)
    scripts.pass_time(9)
    assert scripts.told("model") == set(), "its broker can stop a model of its own"
    scripts.wait("past", part(10), **BATCH)
    scripts.pass_time(2)
    assert scripts.told("model") == {"batch"}, "it has not, so others must yield"
    scripts.release(own)
    assert scripts.state("model") == "granted"
    assert scripts.told("model") == set()


def waiters_behind_are_served_at_the_same_time(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    batch = [scripts.hold(f"batch{number}", part(25), **BATCH) for number in range(4)]
    scripts.wait("one", part(25), priority=1)
    scripts.wait("two", part(40), priority=1)
    assert scripts.told("one") == {"batch3"}
    assert scripts.told("two") == {"batch2", "batch1"}, "what the first one gets is not counted for the second"
    for lease in batch[1:]:
        scripts.release(lease)
    assert {scripts.state("one"), scripts.state("two")} == {"granted"}
    assert scripts.told("") | scripts.told("one") | scripts.told("two") == set()


def nobody_is_disturbed_for_one_that_is_behind_another(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.hold("stays", part(50))
    scripts.hold("batch", part(50), **BATCH)
    scripts.wait("large", part(90), priority=1)
    scripts.wait("small", part(40), priority=5)
    assert scripts.told("small") == set(), "the memory would be kept for the one before it"
    scripts.run(Script.CANCEL, id="large")
    assert scripts.told("small") == {"batch"}


def an_option_that_is_being_emptied_is_kept(scripts: ScriptStore) -> None:
    scripts.sync(TWO)
    rigid = scripts.hold("rigid", part(50))
    scripts.hold("better", part(40), **BATCH)
    worse = scripts.hold("worse", part(60, "sim1"), **BATCH)
    scripts.wait("urgent", part(60), part(60, "sim1"), priority=1)
    assert scripts.told("urgent") == {"worse"}, "not enough of sim0 could be freed"
    scripts.fenced(Script.RESIZE, rigid, options=json.dumps([{f"{NODE}/sim0": 40 * MIB}]))
    scripts.pass_time(1)
    assert scripts.told("urgent") == {"worse"}, "now it could, but somebody yields already"
    scripts.release(worse)
    assert json.loads(scripts.view("urgent")["shares"]) == {f"{NODE}/sim1": 60 * MIB}


LETS_ANYBODY_PAST = {"(found.loose and not found.emptying and not found.shut and lets_past(found, waiter))": "true"}
MARKS_KEEP_NOBODY_OUT = {"of_all and not (found and found.loose)": "of_all"}
RULES: dict[Callable[[ScriptStore], None], dict[str, str]] = {
    few_are_disturbed: {"if is_enough(missing, chosen[i]) then": "if false then"},
    enough_or_nobody: {
        "if not is_enough(missing) then return nil end": "",
        "if lack > (desk.gain[name] or 0) then return nil end": "",
    },
    freed_memory_is_kept: LETS_ANYBODY_PAST,
    memory_that_a_driver_gives_back_late_is_kept: {"KEPT_MS = 20000": "KEPT_MS = 0"},
    a_notice_is_taken_back: {"        take_notice_back(holder.id)": ""},
    an_acknowledged_notice_stands: {"if holder.by == '' or holder.acked then": "if holder.by == '' then"},
    nobody_is_told_twice: {"if not lease.notice_at or (notice": "if true or (notice"},
    displaced_holders_displace_nobody_back: {
        "return holder.preemptible and before(waiter, holder)": "return true",
        "while holder and (holder.priority": "while false and (holder.priority",
    },
    who_is_let_past_yields_in_time: LETS_ANYBODY_PAST | MARKS_KEEP_NOBODY_OUT,
    nobody_is_let_past_while_room_is_made: LETS_ANYBODY_PAST,
    slots_of_one_broker_come_in_its_order: {"waiter.preemptible and not are_siblings": "true or not are_siblings"},
    a_broker_makes_room_among_its_own_first: {"OWN_FIRST_MS = 10000": "OWN_FIRST_MS = 0"},
    waiters_behind_are_served_at_the_same_time: {" + (desk.spoken[name] or 0)\n    if lack": "\n    if lack"},
    nobody_is_disturbed_for_one_that_is_behind_another: {
        "(not found.loose or lets_past(found, waiter))": "true",
    }
    | MARKS_KEEP_NOBODY_OUT,
    an_option_that_is_being_emptied_is_kept: {"if not option or not (desk.named": "if true or not (desk.named"},
}
"""Each with what in the scripts makes it so."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(scripts: ScriptStore, rule: Callable[[ScriptStore], None]) -> None:
    rule(scripts)
    assert scripts.faults() == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_without_its_line_a_rule_does_not_hold(valkey: redis.Redis, rule: Callable[[ScriptStore], None]) -> None:
    for line in RULES[rule]:
        assert line in source(Script.TICK).text, f"no script says {line!r}"
    with pytest.raises((AssertionError, KeyError)):
        rule(ScriptStore(valkey, RULES[rule]))


def test_a_person_may_have_anybody_yield(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("rigid", part(100), priority=1)
    first = scripts.run(Script.PREEMPT, id="rigid", by="a person")["lease"]["notice"]
    assert (first["by"], first["holder"], first["left_ms"], first["outranks"]) == ("", "a person", 30_000, True)
    scripts.pass_time(10)
    again = scripts.run(Script.PREEMPT, id="rigid", by="a person")["lease"]["notice"]
    assert again["left_ms"] == 20_000, "asking twice does not begin anew"
    scripts.wait("next", part(50))
    assert scripts.told("next") == set(), "its memory is coming already"
    scripts.run(Script.CANCEL, id="next")
    assert scripts.told("") == {"rigid"}, "a person's wish is not taken back"
    patient = scripts.run(Script.PREEMPT, id="rigid", by="a person", grace_ms=60_000)["lease"]["notice"]
    assert patient["left_ms"] == 20_000, "who waits for it was told when it comes"
    hurried = scripts.run(Script.PREEMPT, id="rigid", by="a person", grace_ms=5_000)["lease"]["notice"]
    assert hurried["left_ms"] == 5_000, "from now"
    scripts.release(lease)
    assert scripts.run(Script.PREEMPT, id="rigid", by="a person")["status"] == "over"
    assert scripts.run(Script.PREEMPT, id="unheard-of", by="a person")["status"] == "stale"


def test_a_persons_wish_takes_the_place_of_a_waiters_notice(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.hold("batch", part(100), **BATCH)
    scripts.wait("urgent", part(50), priority=1)
    scripts.pass_time(10)
    scripts.run(Script.PREEMPT, id="batch", by="a person")
    scripts.run(Script.CANCEL, id="urgent")
    notice = scripts.view("batch")["notice"]
    assert (notice["by"], notice["left_ms"]) == ("", 20_000)


def test_an_acknowledgement_needs_the_fence(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("batch", part(100), **BATCH)
    scripts.wait("urgent", part(50), priority=1)
    assert scripts.fenced(Script.ACK, lease | {"seq": lease["seq"] + 1})["status"] == "stale"
    assert not scripts.view("batch")["notice"]["acked"]
    assert scripts.fenced(Script.ACK, {"id": "unheard-of", "epoch": 1, "seq": 1})["status"] == "stale"


def test_a_store_that_forgot_a_notice_gives_it_again(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    batch = scripts.hold("batch", part(100), **BATCH)
    order = scripts.wait("urgent", part(50), priority=1)["order"]
    scripts.wipe()
    scripts.sync(ONE, [row_of(batch, preemptible=True)], seen_epoch=batch["epoch"])
    scripts.wait("urgent", part(50), priority=1, order=order)
    assert scripts.told("urgent") == {"batch"}


@pytest.mark.parametrize("seed", range(40))
def test_storms_come_to_rest_and_nobody_is_displaced_by_whom_it_displaced(scripts: ScriptStore, seed: int) -> None:
    """Every holder that is told yields and asks again at once, as a job that starts over does."""
    chance = random.Random(seed)
    scripts.sync(TWO)
    sizes = [chance.randint(20, 100) for _ in range(12)]
    priority = [chance.choice([1, 5, 10, 10, 20, 50]) for _ in sizes]
    devices = [chance.choice(["sim0", "sim1"]) for _ in sizes]
    round_of = dict.fromkeys(range(len(sizes)), 0)
    displaced: set[tuple[int, int]] = set()

    def ask(job: int) -> None:
        name = f"j{job}-{round_of[job]}"
        scripts.acquire(name, part(sizes[job], devices[job]), preemptible=True, priority=priority[job])

    def job_of(lease_id: str) -> int:
        return int(lease_id[1:].partition("-")[0])

    for job in chance.sample(range(len(sizes)), len(sizes)):
        ask(job)
    for _ in range(200):
        raw = scripts.raw()
        told = [lease_id for lease_id in raw["held"] if raw["leases"][lease_id].get("notice_by")]
        if not told:
            break
        lease_id = chance.choice(sorted(told))
        victim, winner = job_of(lease_id), job_of(raw["leases"][lease_id]["notice_by"])
        displaced.add((winner, victim))
        assert (victim, winner) not in displaced, f"{victim} and {winner} take turns"
        scripts.release(scripts.view(lease_id))
        round_of[victim] += 1
        ask(victim)
        scripts.pass_time(1)
        assert scripts.faults() == []
    else:
        pytest.fail("holders are told again and again")
