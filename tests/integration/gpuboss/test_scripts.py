"""The transitions of the store, one by one, on a real Valkey and a clock of the test's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuboss.scripts import Script
from tests.integration.gpuboss.script_harness import MIB, NODE, TTL_MS, ScriptStore, audit, row_of

ONE = {"sim0": {"total": 100 * MIB}}
TWO = {"sim0": {"total": 100 * MIB}, "sim1": {"total": 100 * MIB}}


def test_an_empty_store_grants_nothing_before_a_sync(scripts: ScriptStore) -> None:
    assert scripts.acquire("a", {"sim0": MIB})["status"] == "noepoch"
    scripts.sync(ONE)
    assert scripts.acquire("a", {"sim0": MIB})["lease"]["state"] == "granted"


def test_another_run_id_is_turned_away_until_the_node_synced(scripts: ScriptStore) -> None:
    first = scripts.sync(ONE)["epoch"]
    scripts.restart()
    assert scripts.acquire("a", {"sim0": MIB})["status"] == "noepoch"
    assert scripts.sync(ONE)["epoch"] > first
    assert scripts.acquire("a", {"sim0": MIB})["status"] == "ok"


def test_a_command_of_the_life_before_changes_nothing(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    old_life = scripts.run_id
    scripts.restart()
    scripts.sync(ONE)
    assert scripts.acquire("a", {"sim0": MIB}, run_id=old_life)["status"] == "noepoch"
    assert scripts.state("a") == "unknown"


def test_an_epoch_is_higher_than_any_that_a_node_saw(scripts: ScriptStore) -> None:
    ahead = scripts.now_ms + 1_000_000
    assert scripts.sync(ONE, seen_epoch=ahead)["epoch"] == ahead + 1
    assert scripts.sync(ONE, seen_epoch=ahead + 1)["epoch"] == ahead + 1


def test_no_fence_is_given_twice_when_two_lives_begin_the_same_epoch(scripts: ScriptStore) -> None:
    """The clock went back, and the node that syncs first has not seen the life before."""
    ahead = scripts.now_ms + 7
    first = scripts.sync(ONE, seen_epoch=ahead) and scripts.hold("a", {"sim0": MIB})
    scripts.wipe()
    elsewhere: dict[str, Any] = {"node": "other", "devices": {}, "rows": []}
    assert scripts.run(Script.NODE_SYNC, seen_epoch=ahead, **elsewhere)["epoch"] == first["epoch"]
    assert scripts.sync(ONE, seen_epoch=first["epoch"])["epoch"] > first["epoch"], "it was in another one of that name"
    second = scripts.hold("a", {"sim0": MIB})
    assert (second["epoch"], second["seq"]) > (first["epoch"], first["seq"])
    epoch = scripts.sync(ONE, seen_epoch=second["epoch"])["epoch"]
    assert epoch == second["epoch"], "and in this one from then on"


def test_the_grants_of_two_lives_are_numbered_differently(scripts: ScriptStore) -> None:
    fences = set()
    for _ in range(2):
        scripts.sync(ONE, seen_epoch=scripts.now_ms + 7)
        lease = scripts.hold("a", {"sim0": MIB})
        fences.add((lease["epoch"], lease["seq"]))
        scripts.wipe()
    assert len({epoch for epoch, _ in fences}) == 1
    assert len(fences) == 2


def test_a_store_of_another_schema_is_left_alone(scripts: ScriptStore) -> None:
    scripts.server.hset(scripts.keys.meta, "schema", "0")
    assert scripts.sync(ONE)["status"] == "schema"


def test_asking_again_gives_the_same_lease(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    first = scripts.acquire("a", {"sim0": 60 * MIB})["lease"]
    again = scripts.acquire("a", {"sim0": 60 * MIB})["lease"]
    assert (again["epoch"], again["seq"]) == (first["epoch"], first["seq"])
    assert audit(scripts.raw()) == {f"{NODE}/sim0": 40 * MIB}


def test_the_first_option_that_fits_is_granted_whole(scripts: ScriptStore) -> None:
    scripts.sync(TWO)
    scripts.acquire("full", {"sim0": 80 * MIB})
    lease = scripts.acquire("a", {"sim0": 50 * MIB, "sim1": 50 * MIB}, {"sim1": 90 * MIB})["lease"]
    assert json.loads(lease["shares"]) == {f"{NODE}/sim1": 90 * MIB}


def test_what_can_never_fit_is_refused_with_numbers(scripts: ScriptStore) -> None:
    scripts.sync({"sim0": {"total": 100 * MIB, "reserve": 10 * MIB}})
    reply = scripts.acquire("a", {"sim0": 95 * MIB}, {"gone": MIB})
    assert reply["status"] == "refused"
    assert reply["shortage"][0] == {f"{NODE}/sim0": {"wanted": 95 * MIB, "cap": 90 * MIB, "total": 100 * MIB}}
    assert reply["shortage"][1] == {f"{NODE}/gone": {"wanted": MIB}}


def test_a_waiter_is_refused_when_its_device_shrinks_for_good(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.acquire("a", {"sim0": 80 * MIB})
    scripts.acquire("b", {"sim0": 80 * MIB})
    scripts.sync({"sim0": {"total": 50 * MIB}})
    assert scripts.state("b") == "refused"


def test_foreign_residual_and_observed_memory_count(scripts: ScriptStore) -> None:
    scripts.sync({"sim0": {"total": 100 * MIB, "foreign": 20 * MIB, "residual": 5 * MIB}})
    assert scripts.acquire("big", {"sim0": 80 * MIB})["lease"]["state"] == "queued"
    scripts.run(Script.CANCEL, id="big")
    lease = scripts.acquire("a", {"sim0": 10 * MIB})["lease"]
    scripts.sync(ONE, [row_of(lease, {"sim0": 30 * MIB})])
    assert audit(scripts.raw()) == {f"{NODE}/sim0": 70 * MIB}
    shown = scripts.run(Script.SNAPSHOT, node=NODE)["devices"][f"{NODE}/sim0"]
    assert (shown["claimed"], shown["observed"], shown["free"]) == (10 * MIB, 30 * MIB, 70 * MIB)


def test_waiters_come_by_priority_then_by_arrival(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.acquire("holder", {"sim0": 100 * MIB})
    for name, priority in (("c", 10), ("a", 10), ("b", 10), ("low", 50), ("high", 1)):
        scripts.acquire(name, {"sim0": 100 * MIB}, priority=priority)
    order = []
    current = "holder"
    while current:
        lease = scripts.acquire(current, {"sim0": 100 * MIB})["lease"]
        scripts.run(Script.RELEASE, id=current, epoch=lease["epoch"], seq=lease["seq"])
        held = scripts.raw()["held"]
        current = held[0] if held else ""
        order.append(current)
    assert order == ["high", "c", "a", "b", "low", ""]


def test_a_blocked_waiter_keeps_its_device_and_only_that(scripts: ScriptStore) -> None:
    scripts.sync(TWO)
    scripts.acquire("holder", {"sim0": 50 * MIB})
    assert scripts.acquire("first", {"sim0": 80 * MIB})["lease"]["position"] == 1
    assert scripts.acquire("small", {"sim0": 10 * MIB})["lease"]["position"] == 2
    assert scripts.acquire("elsewhere", {"sim1": 10 * MIB})["lease"]["state"] == "granted"


def test_release_wakes_the_next_and_says_so_on_the_stream(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    first = scripts.acquire("a", {"sim0": 100 * MIB})["lease"]
    scripts.acquire("b", {"sim0": 100 * MIB})
    scripts.run(Script.RELEASE, id="a", epoch=first["epoch"], seq=first["seq"])
    assert scripts.events()[-2:] == [("freed", "a"), ("granted", "b")]
    assert scripts.state("b") == "granted"


def test_a_release_with_another_fence_is_stale(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.acquire("a", {"sim0": MIB})["lease"]
    assert scripts.run(Script.RELEASE, id="a", epoch=lease["epoch"], seq=lease["seq"] + 1)["status"] == "stale"
    assert scripts.state("a") == "granted"
    for _ in range(2):
        assert scripts.run(Script.RELEASE, id="a", epoch=lease["epoch"], seq=lease["seq"])["state"] == "freed"


@pytest.mark.parametrize("known", [True, False])
def test_a_late_acquire_finds_itself_cancelled(scripts: ScriptStore, known: bool) -> None:
    scripts.sync(ONE)
    if known:
        scripts.acquire("a", {"sim0": MIB})
    assert scripts.run(Script.CANCEL, id="a")["state"] == "cancelled"
    assert scripts.acquire("a", {"sim0": MIB})["lease"]["state"] == "cancelled"
    assert audit(scripts.raw()) == {f"{NODE}/sim0": 100 * MIB}


def test_what_is_in_use_cannot_be_cancelled(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.sync(ONE, [row_of(scripts.acquire("a", {"sim0": MIB})["lease"])])
    assert scripts.run(Script.CANCEL, id="a")["state"] == "active"


def test_expiry_frees_nothing_and_a_renewal_revives(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    row = row_of(scripts.acquire("a", {"sim0": 60 * MIB})["lease"])
    scripts.sync(ONE, [row])
    scripts.acquire("waiter", {"sim0": 60 * MIB})
    for _ in range(10):
        scripts.now_ms += 2000
        scripts.run(Script.TICK)
    assert scripts.raw()["leases"]["a"]["state"] == "ending"
    assert scripts.raw()["leases"]["waiter"]["state"] == "cancelled"
    assert audit(scripts.raw()) == {f"{NODE}/sim0": 40 * MIB}
    scripts.sync(ONE, [row])
    assert scripts.raw()["leases"]["a"]["state"] == "active"


def test_a_granted_lease_that_its_asker_forgot_ends_and_revives_when_asked_for(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.acquire("a", {"sim0": 60 * MIB})
    for _ in range(10):
        scripts.now_ms += 2000
        scripts.run(Script.TICK)
    assert scripts.raw()["leases"]["a"]["state"] == "ending"
    assert scripts.state("a") == "granted"


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000])
def test_a_jump_of_the_clock_expires_nobody_and_time_goes_on_after_it(scripts: ScriptStore, jump_ms: int) -> None:
    scripts.sync(ONE)
    scripts.acquire("holder", {"sim0": 100 * MIB})
    scripts.acquire("waiter", {"sim0": 100 * MIB})
    scripts.now_ms += jump_ms
    scripts.run(Script.TICK)
    assert scripts.raw()["leases"]["waiter"]["state"] == "queued"
    for _ in range(1 + TTL_MS // 2000):
        scripts.now_ms += 2000
        scripts.run(Script.TICK)
    assert scripts.raw()["leases"]["waiter"]["state"] == "cancelled"


def test_a_wiped_store_takes_what_runs_with_its_old_fence(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.acquire("a", {"sim0": 60 * MIB})["lease"]
    scripts.wipe()
    scripts.sync(ONE, [row_of(lease)], seen_epoch=lease["epoch"])
    kept = scripts.raw()["leases"]["a"]
    assert (kept["state"], int(kept["epoch"]), int(kept["seq"])) == ("active", lease["epoch"], lease["seq"])
    other = scripts.acquire("b", {"sim0": 40 * MIB})["lease"]
    assert other["epoch"] > lease["epoch"]
    assert scripts.run(Script.RELEASE, id="a", epoch=lease["epoch"], seq=lease["seq"])["state"] == "freed"


def test_what_runs_beats_a_second_grant_of_the_same_lease(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    old = scripts.acquire("a", {"sim0": 60 * MIB})["lease"]
    scripts.wipe()
    scripts.sync(ONE, seen_epoch=old["epoch"])
    scripts.acquire("other", {"sim0": 60 * MIB})
    assert scripts.acquire("a", {"sim0": 60 * MIB})["lease"]["state"] == "queued"
    scripts.sync(ONE, [row_of(old)])
    assert scripts.raw()["queue"] == []
    assert audit(scripts.raw()) == {f"{NODE}/sim0": -20 * MIB}, (
        "over-full after a wipe: shown, and nothing more is granted"
    )
    assert scripts.acquire("more", {"sim0": MIB})["lease"]["state"] == "queued"


def test_a_waiter_keeps_its_place_over_a_wipe(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    holder = scripts.acquire("holder", {"sim0": 100 * MIB})["lease"]
    places = {name: scripts.acquire(name, {"sim0": 100 * MIB})["lease"]["order"] for name in ("first", "second")}
    scripts.wipe()
    scripts.now_ms += 5000
    scripts.sync(ONE, [row_of(holder)], seen_epoch=holder["epoch"])
    assert scripts.acquire("new", {"sim0": 100 * MIB})["lease"]["position"] == 1
    for name in ("second", "first"):
        scripts.acquire(name, {"sim0": 100 * MIB}, order=places[name])
    assert scripts.raw()["queue"] == ["first", "second", "new"]


def test_rows_older_than_a_release_do_not_bring_the_lease_back(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.acquire("a", {"sim0": 60 * MIB})["lease"]
    scripts.run(Script.RELEASE, id="a", epoch=lease["epoch"], seq=lease["seq"])
    reply = scripts.sync({"sim0": {"total": 50 * MIB}}, [row_of(lease)])
    assert (reply["status"], reply["ids"]) == ("over", ["a"])
    assert scripts.run(Script.SNAPSHOT, node=NODE)["devices"][f"{NODE}/sim0"]["total"] == 100 * MIB, (
        "nothing was changed"
    )
    scripts.sync(ONE, [row_of(lease, insist=True)])
    assert scripts.raw()["leases"]["a"]["state"] == "active", "a row that stands is the truth"


def test_memory_of_the_dead_must_be_read_back_where_it_is_measured(scripts: ScriptStore) -> None:
    gpu = {"gpu": {"total": 100 * MIB, "settles": True}}
    scripts.sync(gpu)
    lease = scripts.acquire("a", {"gpu": 60 * MIB})["lease"]
    scripts.sync(gpu, [row_of(lease, {"gpu": 50 * MIB})])
    scripts.run(Script.RELEASE, id="a", epoch=lease["epoch"], seq=lease["seq"])
    assert scripts.acquire("b", {"gpu": 60 * MIB})["lease"]["state"] == "queued"
    scripts.sync(gpu)
    assert scripts.state("b") == "granted"


def test_confirm_dead_frees_holders_and_waiters_but_no_newer_grant(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.acquire("a", {"sim0": 100 * MIB})["lease"]
    scripts.acquire("b", {"sim0": 100 * MIB})
    wrong = {"id": "a", "epoch": lease["epoch"], "seq": lease["seq"] + 1}
    assert not scripts.run(Script.CONFIRM_DEAD, leases=[wrong])["freed"]
    right = {"id": "a", "epoch": lease["epoch"], "seq": lease["seq"]}
    assert scripts.run(Script.CONFIRM_DEAD, leases=[right])["freed"] == ["a"]
    # The waiter was granted meanwhile: a keeper that saw it as a waiter without a living owner looks again first.
    assert not scripts.run(Script.CONFIRM_DEAD, leases=[{"id": "b"}])["freed"]
    assert scripts.state("b") == "granted"


def test_another_node_that_has_not_synced_grants_nothing(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    reply = scripts.run(
        Script.ACQUIRE,
        id="x",
        holder="h",
        kind="job",
        priority=1,
        node=NODE,
        owner="{}",
        options=json.dumps([{"other/gpu": MIB}]),
    )
    assert (reply["status"], reply["node"]) == ("unsynced", "other")


def test_a_node_has_one_ledger_at_a_time(scripts: ScriptStore) -> None:
    """Another one's rows are not these: whatever this one leased would be taken for dead."""
    mine, other = {"id": "a1", "place": "/here"}, {"id": "b2", "place": "/there"}
    scripts.sync(ONE, ledger=mine)
    scripts.hold("a", {"sim0": 90 * MIB})
    refused = scripts.sync(ONE, ledger=other)
    assert (refused["status"], refused["place"]) == ("conflict", "/here")
    assert scripts.state("a") == "granted"
    for _ in range(10):
        scripts.pass_time(2)
        assert scripts.sync(ONE, ledger=mine)["status"] == "ok", "it speaks on"
    assert scripts.sync(ONE, ledger=other)["status"] == "conflict"
    scripts.restart()
    assert scripts.sync(ONE, ledger=other)["status"] == "conflict", "the store's new life changes nothing"
    for _ in range(TTL_MS // 2000 + 1):
        assert scripts.sync(ONE, ledger=other)["status"] == "conflict"
        scripts.pass_time(2)
    assert scripts.sync(ONE, ledger=other)["status"] == "ok", "the first one speaks no more"
    assert scripts.sync(ONE, ledger=mine)["place"] == "/there"
    scripts.sync(ONE, ledger=other | {"leaves": True})
    assert scripts.sync(ONE, ledger=mine)["status"] == "ok", "who leaves says so"


def test_every_key_is_bounded_or_expires(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.acquire("a", {"sim0": MIB})["lease"]
    scripts.acquire("b", {"sim0": 100 * MIB})
    scripts.run(Script.RELEASE, id="a", epoch=lease["epoch"], seq=lease["seq"])
    scripts.run(Script.CANCEL, id="b")
    scripts.run(Script.CANCEL, id="never-heard-of")
    scripts.run(Script.LEARN, profile="p", id="a", bytes={"cpu": MIB})
    for_ever = set(scripts.keys.keys())
    for name in scripts.server.scan_iter(f"{{gb:{scripts.keys.pool}}}:*"):
        assert name.decode() in for_ever or 0 < scripts.server.pttl(name) <= 600_000, name


def test_what_holders_took_is_kept_of_the_latest_loads_and_profiles(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    for load in range(7):
        record = scripts.run(Script.LEARN, profile="p", id=f"lease-{load}", bytes={"cpu": load})["record"]
    assert record["loads"] == 7
    assert [peak["bytes"]["cpu"] for peak in record["peaks"]] == [2, 3, 4, 5, 6]
    for size in (50, 40):
        record = scripts.run(Script.LEARN, profile="p", id="lease-6", bytes={"cpu": size, "host": 1})["record"]
    assert (record["loads"], record["peaks"][-1]["bytes"]) == (7, {"cpu": 50, "host": 1})
    for number in range(520):
        scripts.now_ms += 1
        scripts.run(Script.LEARN, profile=f"profile-{number}", id="lease", bytes={"cpu": 1})
    known = {found["profile"] for found in scripts.run(Script.LEARNED)["records"]}
    assert len(known) == 512
    assert not known & {"p", "profile-7"}
    assert {"profile-8", "profile-519"} <= known


def test_a_release_also_ends_what_a_forgetful_store_has_waiting_again(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    old = scripts.acquire("a", {"sim0": 60 * MIB})["lease"]
    scripts.wipe()
    scripts.sync(ONE, seen_epoch=old["epoch"])
    scripts.acquire("other", {"sim0": 60 * MIB})
    assert scripts.acquire("a", {"sim0": 60 * MIB})["lease"]["state"] == "queued"
    assert scripts.run(Script.RELEASE, id="a", epoch=old["epoch"], seq=old["seq"])["state"] == "cancelled"
