"""The transitions of leases that are held: activated, renewed, resized, held by word; on a real Valkey."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from gpuboss.identity import ProcessIdentity
from gpuboss.lease_wire import lease_from, terms_for
from gpuboss.scripts import Script
from tests.integration.gpuboss.script_harness import MIB, NODE, TTL_MS, ScriptStore, audit, row_of

ONE = {"sim0": {"total": 100 * MIB}}
TWO = {"sim0": {"total": 100 * MIB}, "sim1": {"total": 100 * MIB}}
BY_WORD: dict[str, Any] = {"lease_ttl_ms": 30_000}


def part(size: int, device: str = "sim0") -> dict[str, int]:
    return {device: size * MIB}


def named(*options: dict[str, int]) -> str:
    return json.dumps([{f"{NODE}/{device}": size for device, size in option.items()} for option in options])


def resize(scripts: ScriptStore, lease: dict[str, Any], *options: dict[str, int], **more: Any) -> dict[str, Any]:
    told = {"options": named(*options)} if options else {}
    fence = {name: lease[name] for name in ("epoch", "seq") if name in lease}
    return scripts.run(Script.RESIZE, **{"id": lease["id"], "revision": lease["revision"]} | fence | told | more)


def bytes_of(view: dict[str, Any]) -> dict[str, int]:
    return {name.partition("/")[2]: size // MIB for name, size in json.loads(view["shares"]).items()}


# Activation and renewal ---------------------------------------------------------------------------------------------


def test_a_granted_lease_is_activated_once_and_then_its_asker_cannot_give_it_up(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(60))
    for _ in range(2):
        reply = scripts.fenced(Script.ACTIVATE, lease)
        assert (reply["status"], reply["state"], reply["lease"]["state"]) == ("ok", "active", "active")
    assert scripts.events().count(("active", "a")) == 1
    assert scripts.run(Script.CANCEL, id="a")["state"] == "active"


def test_an_activation_by_another_fence_or_of_a_waiter_changes_nothing(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(60))
    scripts.wait("b", part(60))
    assert scripts.fenced(Script.ACTIVATE, lease | {"seq": lease["seq"] + 1})["status"] == "stale"
    assert scripts.fenced(Script.ACTIVATE, lease | {"id": "b"})["lease"]["state"] == "queued"
    assert "lease" not in scripts.fenced(Script.ACTIVATE, lease | {"id": "unheard-of"})
    assert scripts.state("a") == "granted"
    scripts.release(lease)
    assert scripts.fenced(Script.ACTIVATE, lease)["state"] == "freed"


def test_an_activation_finds_what_had_run_out_of_time(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(60))
    scripts.pass_time(20)
    assert scripts.raw()["leases"]["a"]["state"] == "ending"
    assert scripts.fenced(Script.ACTIVATE, lease)["state"] == "active"
    scripts.pass_time(10)
    assert scripts.raw()["leases"]["a"]["state"] == "active", "with its whole time before it"


def test_a_lease_that_is_activated_after_a_keeper_looked_is_not_taken_for_dead(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(60))
    dead = {name: lease[name] for name in ("id", "epoch", "seq", "state")}
    scripts.fenced(Script.ACTIVATE, lease)
    assert not scripts.run(Script.CONFIRM_DEAD, leases=[dead])["freed"]
    assert scripts.run(Script.CONFIRM_DEAD, leases=[dead | {"state": "active"}])["freed"] == ["a"]


def test_renewals_keep_and_revive_by_fence(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    kept, late = scripts.hold("kept", part(20)), scripts.hold("late", part(20))
    scripts.fenced(Script.ACTIVATE, kept)
    scripts.fenced(Script.ACTIVATE, late)
    scripts.wait("waiter", part(90))
    over = scripts.hold("over", part(10), priority=1)
    scripts.release(over)

    def renew(*leases: dict[str, Any]) -> dict[str, Any]:
        fences = [{name: lease[name] for name in ("id", "epoch", "seq")} for lease in leases]
        return scripts.run(Script.RENEW_MANY, leases=fences)

    for _ in range(4):
        scripts.pass_time(5)
        assert [view["id"] for view in renew(kept)["renewed"]] == ["kept"]
    assert (scripts.raw()["leases"]["kept"]["state"], scripts.raw()["leases"]["late"]["state"]) == ("active", "ending")
    scripts.acquire("waiter2", part(90))
    reply = renew(late, kept | {"seq": 99}, over, kept | {"id": "waiter2"}, kept | {"id": "unheard-of"})
    assert [view["state"] for view in reply["renewed"]] == ["active"]
    assert (reply["stale"], reply["unknown"]) == (["kept", "over", "waiter2"], ["unheard-of"])
    assert scripts.raw()["leases"]["late"]["state"] == "active"
    assert scripts.events()[-1] == ("active", "late")


# Leases that are held by word ---------------------------------------------------------------------------------------


def test_a_lease_by_word_is_freed_when_nobody_renews_it(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(60), **BY_WORD)
    scripts.fenced(Script.ACTIVATE, lease)
    scripts.acquire("next", part(60))
    for _ in range(3):
        scripts.pass_time(14)
        scripts.view("a")  # a look renews nothing
        scripts.view("next")
        fence = {name: lease[name] for name in ("id", "epoch", "seq")}
        assert [view["lease_ttl_ms"] for view in scripts.run(Script.RENEW_MANY, leases=[fence])["renewed"]] == [30_000]
    for _ in range(3):
        scripts.pass_time(10)
        scripts.view("next")
    view = scripts.view("a")
    assert (view["state"], view["reason"]) == ("freed", "expired")
    assert ("ending", "a") not in scripts.events()
    assert scripts.state("next") == "granted"
    assert scripts.run(Script.RENEW_MANY, leases=[fence])["stale"] == ["a"]


def test_a_lease_by_word_that_nobody_picks_up_is_freed_too(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.hold("a", part(60), **BY_WORD)
    for _ in range(3):
        scripts.pass_time(10)
        scripts.view("a")
    assert scripts.state("a") == "freed"


def test_a_nodes_sync_does_not_renew_a_lease_by_word_and_says_when_it_is_over(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    row = row_of(scripts.hold("a", part(60), **BY_WORD), lease_ttl_ms=30_000)
    for _ in range(6):
        scripts.pass_time(5)
        reply = scripts.sync(ONE, [row])
    assert (reply["status"], reply["ids"]) == ("over", ["a"])
    reply = scripts.sync(ONE, [row | {"insist": True}])
    assert (reply["status"], reply["over"], list(reply["leases"])) == ("ok", ["a"], [])
    assert scripts.state("a") == "freed", "a row of a lease by word is no truth"
    assert audit(scripts.raw()) == {f"{NODE}/sim0": 100 * MIB}


@pytest.mark.parametrize("loss", ["wipe", "restart"])
def test_a_lease_by_word_has_all_its_time_before_it_after_a_loss(scripts: ScriptStore, loss: str) -> None:
    """Its holder may not have been able to renew it meanwhile."""
    scripts.sync(ONE)
    lease = scripts.hold("a", part(60), **BY_WORD)
    row = row_of(lease, lease_ttl_ms=30_000)
    scripts.sync(ONE, [row])
    scripts.pass_time(28)
    scripts.wipe() if loss == "wipe" else scripts.restart()
    scripts.sync(ONE, [row], seen_epoch=lease["epoch"])
    for _ in range(28):
        scripts.now_ms += 1000
        scripts.sync(ONE, [row])
    assert scripts.view("a")["lease_ttl_ms"] == 30_000
    assert scripts.state("a") == "active"
    scripts.pass_time(3)
    assert scripts.state("a") == "freed"


def test_a_lease_by_word_that_ignores_its_notice_ends_with_its_grace(scripts: ScriptStore) -> None:
    """It has no process that somebody could end."""
    scripts.sync(ONE)
    lease = scripts.hold("a", part(60), preemptible=True, priority=50, grace_ms=20_000, **BY_WORD)
    scripts.acquire("urgent", part(60), priority=1)
    for _ in range(4):
        scripts.view("urgent")
        scripts.run(Script.RENEW_MANY, leases=[{name: lease[name] for name in ("id", "epoch", "seq")}])
        scripts.pass_time(5)
    assert scripts.view("a")["reason"] == "preempted"
    assert scripts.state("urgent") == "granted"


# Another size -------------------------------------------------------------------------------------------------------


def test_a_waiter_keeps_its_place_with_another_size(scripts: ScriptStore) -> None:
    scripts.sync(TWO)
    scripts.hold("holder", part(90))
    first = scripts.wait("first", part(80))
    scripts.wait("second", part(20))
    resized = resize(scripts, first, part(60))["lease"]
    assert (resized["state"], resized["position"], resized["order"]) == ("queued", 1, first["order"])
    for _ in range(2):
        granted = resize(scripts, first, part(95), part(50, "sim1"))["lease"]
        assert (granted["state"], bytes_of(granted)) == ("granted", {"sim1": 50})
    assert resize(scripts, first, part(40, "sim1"))["status"] == "stale", "a holder has a fence"
    assert scripts.view("second")["position"] == 1


def test_a_waiters_impossible_size_is_refused_and_it_waits_on(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.hold("holder", part(90))
    first = scripts.wait("first", part(80))
    reply = resize(scripts, first, part(180))
    assert reply["status"] == "refused"
    assert reply["shortage"] == [{f"{NODE}/sim0": {"wanted": 180 * MIB, "cap": 100 * MIB, "total": 100 * MIB}}]
    assert json.loads(scripts.raw()["leases"]["first"]["options"]) == [{f"{NODE}/sim0": 80 * MIB}]


def test_a_waiter_with_another_priority_keeps_its_order_among_its_new_equals(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    scripts.hold("holder", part(90))
    waiters = [scripts.wait(name, part(80)) for name in ("a", "b", "c")]
    resize(scripts, waiters[1], priority=5)
    assert scripts.raw()["queue"] == ["b", "a", "c"]
    resize(scripts, waiters[0], priority=5)
    assert scripts.raw()["queue"] == ["a", "b", "c"]
    assert scripts.faults() == []


def test_a_resized_waiter_has_other_holders_told_and_the_former_ones_not(scripts: ScriptStore) -> None:
    scripts.sync(TWO)
    scripts.hold("one", part(90), preemptible=True, priority=50)
    scripts.hold("two", part(90, "sim1"), preemptible=True, priority=50)
    urgent = scripts.wait("urgent", part(80), priority=1)
    assert scripts.told("urgent") == {"one"}
    resize(scripts, urgent, part(80, "sim1"))
    assert scripts.told("urgent") == {"two"}
    assert ("withdrawn", "one") in scripts.events()


def test_a_holder_shrinks_and_the_next_is_granted(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(80))
    scripts.wait("b", part(50))
    view = resize(scripts, lease, part(50))["lease"]
    assert (bytes_of(view), view["revision"], view["seq"]) == ({"sim0": 50}, 1, lease["seq"])
    assert scripts.state("b") == "granted"


def test_a_holder_grows_where_there_is_room_and_else_is_told_the_numbers(scripts: ScriptStore) -> None:
    scripts.sync(TWO)
    lease = scripts.hold("a", part(40) | part(40, "sim1"))
    scripts.hold("b", part(50, "sim1"))
    reply = resize(scripts, lease, part(60) | part(60, "sim1"))
    assert reply["status"] == "refused"
    assert reply["shortage"][0][f"{NODE}/sim1"] == {"wanted": 60 * MIB, "held": 40 * MIB, "free": 10 * MIB}
    assert bytes_of(scripts.view("a")) == {"sim0": 40, "sim1": 40}, "on all its devices or on none"
    grown = resize(scripts, lease, part(100) | part(50, "sim1"))["lease"]
    assert bytes_of(grown) == {"sim0": 100, "sim1": 50}
    assert audit(scripts.raw()) == {f"{NODE}/sim0": 0, f"{NODE}/sim1": 0}


@pytest.mark.parametrize("other", [part(10, "sim1"), part(10) | part(10, "sim1")], ids=["another", "one more"])
def test_a_holder_keeps_its_devices(scripts: ScriptStore, other: dict[str, int]) -> None:
    scripts.sync(TWO)
    lease = scripts.hold("a", part(40))
    assert resize(scripts, lease, other)["status"] == "refused"
    assert bytes_of(scripts.view("a")) == {"sim0": 40}


def test_a_holder_grows_past_nobody_who_waits(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(30))
    urgent = scripts.hold("urgent", part(30), priority=1)
    scripts.wait("waiter", part(60))
    assert resize(scripts, lease, part(40))["status"] == "refused"
    assert resize(scripts, urgent, part(40))["status"] == "ok", "a more important one would have come first, too"


def test_only_the_holder_as_it_is_now_is_resized(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(40))
    assert resize(scripts, lease | {"seq": 9}, part(10))["status"] == "stale"
    assert resize(scripts, {"id": "a", "revision": 0}, part(10))["status"] == "stale"
    assert resize(scripts, lease, part(10))["lease"]["revision"] == 1
    assert resize(scripts, lease, part(10))["status"] == "ok", "a lost reply is asked for again"
    lease = resize(scripts, lease | {"revision": 1}, part(60))["lease"]
    assert resize(scripts, lease | {"revision": 0}, part(10))["status"] == "stale", "a late one changes nothing"
    assert bytes_of(scripts.view("a")) == {"sim0": 60}
    scripts.release(lease)
    assert resize(scripts, lease, part(10))["status"] == "stale"
    assert resize(scripts, lease | {"id": "unheard-of"}, part(10))["status"] == "stale"


def test_a_holders_priority_changes_who_is_told(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(90), preemptible=True, priority=5)
    scripts.wait("b", part(50))
    assert scripts.told("b") == set()
    assert resize(scripts, lease, priority=50)["lease"]["priority"] == 50
    assert scripts.told("b") == {"a"}


@pytest.mark.parametrize("size", [70, 20])
def test_a_row_that_was_read_before_a_resize_does_not_undo_it(scripts: ScriptStore, size: int) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(40))
    row = row_of(lease)
    scripts.sync(ONE, [row])
    resize(scripts, lease, part(size))
    scripts.sync(ONE, [row])
    assert audit(scripts.raw()) == {f"{NODE}/sim0": (100 - size) * MIB}
    for _ in range(1 + TTL_MS // 2000):
        scripts.now_ms += 2000
        scripts.sync(ONE, [row])
    assert audit(scripts.raw()) == {f"{NODE}/sim0": 60 * MIB}, "in the end the row is the truth"


def test_after_a_loss_the_row_is_the_truth_at_once(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = scripts.hold("a", part(40))
    lease = resize(scripts, lease, part(20))["lease"]
    row = row_of(lease | {"shares": named(part(70))[1:-1]})
    scripts.restart()
    scripts.sync(ONE, [row])
    assert audit(scripts.raw()) == {f"{NODE}/sim0": 30 * MIB}


# Memory that is in use already --------------------------------------------------------------------------------------


def test_memory_that_a_future_holder_uses_already_is_there_for_it_and_counts_once(scripts: ScriptStore) -> None:
    busy = {"gpu": {"total": 100 * MIB, "foreign": 70 * MIB}}
    scripts.sync(busy)
    mine = json.dumps({f"{NODE}/gpu": 60 * MIB})
    assert scripts.acquire("other", part(50, "gpu"))["lease"]["state"] == "queued"
    scripts.run(Script.CANCEL, id="other")
    lease = scripts.hold("a", part(80, "gpu"), adopts=mine)
    shown = scripts.run(Script.SNAPSHOT, node=NODE)["devices"][f"{NODE}/gpu"]
    assert (shown["free"], shown["adopted"]) == (10 * MIB, 60 * MIB), "80 of it and 10 of somebody else"
    assert scripts.faults() == []
    scripts.sync({"gpu": {"total": 100 * MIB, "foreign": 10 * MIB}}, [row_of(lease, {"gpu": 60 * MIB})])
    assert scripts.run(Script.SNAPSHOT, node=NODE)["devices"][f"{NODE}/gpu"]["free"] == 10 * MIB


def test_nobody_adopts_more_than_is_foreign(scripts: ScriptStore) -> None:
    scripts.sync({"gpu": {"total": 100 * MIB, "foreign": 20 * MIB}})
    scripts.hold("b", part(30, "gpu"))
    scripts.wait("a", part(80, "gpu"), adopts=json.dumps({f"{NODE}/gpu": 80 * MIB}))
    scripts.run(Script.CANCEL, id="a")
    scripts.hold("c", part(70, "gpu"), adopts=json.dumps({f"{NODE}/gpu": 80 * MIB}))


# What a node says ---------------------------------------------------------------------------------------------------


def test_a_lease_that_the_store_forgot_comes_back_with_all_its_terms(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    owner = json.dumps({name: getattr(ProcessIdentity.current(), name) for name in ProcessIdentity.__slots__})
    asked = {"preemptible": True, "grace_ms": 45_000, "lease_ttl_ms": 60_000, "priority": 20, "owner": owner}
    before = scripts.hold("a", part(60), **asked)
    row = {name: before[name] for name in ("id", "holder", "epoch", "seq", "shares")} | {"observed": "{}"}
    row |= {"terms": terms_for(lease_from(before))}
    scripts.wipe()
    (told,) = scripts.sync(ONE, [row], seen_epoch=before["epoch"])["leases"]
    after = scripts.view("a")
    for name in ("holder", "kind", "priority", "order", "preemptible", "grace_ms", "lease_ttl_ms", "owner", "shares"):
        assert (after[name], told[name]) == (before[name], before[name]), name
    assert lease_from(after).ttl_s == 60


def test_whoever_comes_after_a_loss_comes_after_those_of_before_whatever_the_clock_says(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    holder = scripts.hold("holder", part(60), preemptible=True)
    waiter = scripts.wait("waiter", part(80))
    scripts.wipe()
    scripts.now_ms -= 3_600_000
    scripts.sync(ONE, [row_of(holder, preemptible=True, order=holder["order"])], seen_epoch=holder["epoch"])
    new = scripts.wait("new", part(80))
    assert new["order"] > holder["order"]
    assert scripts.told("new") == set(), "the holder was first"
    scripts.wait("waiter", part(80), order=waiter["order"])
    assert scripts.wait("newer", part(80))["order"] > waiter["order"]
    assert scripts.raw()["queue"].index("waiter") < scripts.raw()["queue"].index("newer")


def test_a_keeper_hears_of_notices(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    row = row_of(scripts.hold("a", part(60), preemptible=True, priority=50), preemptible=True)
    scripts.wait("urgent", part(60), priority=1)
    told = {lease["id"]: lease for lease in scripts.sync(ONE, [row])["leases"]}
    assert told["a"]["notice"]["by"] == "urgent"
    assert "notice" not in told["urgent"]


def test_a_snapshot_shows_what_a_node_only_tells_for_people(scripts: ScriptStore) -> None:
    foreign = [{"pid": 7, "name": "comfyui", "bytes": 5 * MIB}, {"pid": 8, "name": "", "bytes": None}]
    scripts.sync({"gpu": {"total": 100 * MIB, "foreign": 5 * MIB, "residual": 3 * MIB, "quarantined": 2 * MIB}
                  | {"foreign_pids": foreign}})  # fmt: skip
    shown = scripts.run(Script.SNAPSHOT, node=NODE)["devices"][f"{NODE}/gpu"]
    assert (shown["quarantined"], shown["foreign_pids"]) == (2 * MIB, foreign)
    assert shown["free"] == 92 * MIB


# The audit ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(scripts: ScriptStore) -> ScriptStore:
    """A holder in use with a notice, one that is granted, and two waiters."""
    scripts.sync(ONE)
    row = row_of(scripts.hold("active", part(50), preemptible=True, priority=50))
    scripts.sync(ONE, [row])
    scripts.hold("granted", part(30))
    scripts.wait("waiter", part(70))
    scripts.wait("behind", part(10))
    assert scripts.told("waiter") == {"active"}
    assert scripts.faults() == []
    return scripts


def test_an_audit_of_a_sound_store_gives_its_sums_and_changes_nothing(busy: ScriptStore) -> None:
    before = busy.raw()
    reply = busy.run(Script.AUDIT)
    assert (list(reply["faults"]), list(reply["overfull"])) == ([], [])
    assert reply["devices"][f"{NODE}/sim0"]["claimed"] == 80 * MIB
    assert busy.raw() == before


PLANTED = {
    "lease active holds memory and has no record": ("DEL", "lease:active"),
    "lease active holds memory and is freed": ("HSET", "lease:active", "state", "freed"),
    "lease active is active and has no shares": ("HDEL", "lease:active", "shares"),
    "lease active is active without a fence": ("HDEL", "lease:active", "seq"),
    "which was never given": ("HINCRBY", "lease:active", "seq", "1000"),
    "have the same fence": ("HINCRBY", "lease:active", "seq", "1"),
    "lease active shall yield to nobody, which does not wait": ("HSET", "lease:active", "notice_by", "nobody"),
    "lease granted is granted and never expires": ("ZREM", "deadlines", "granted"),
    "lease granted expires later than it may": ("ZADD", "deadlines", "9999999999999", "granted"),
    "lease granted is granted, expires, and neither waits nor holds memory": ("SREM", "held", "granted"),
    "lease waiter waits and has no record": ("DEL", "lease:waiter"),
    "lease waiter waits and is granted": ("HSET", "lease:waiter", "state", "granted"),
    "lease waiter does not wait in its place": ("HSET", "lease:waiter", "priority", "1"),
    "lease waiter stands in the queue twice, or holds memory too": ("SADD", "held", "waiter"),
    "lease gone is gone, expires, and neither waits nor holds memory": ("ZADD", "deadlines", "1", "gone"),
    "lease behind does not say what it wants": ("ZREM", "wants", "n:behind"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_an_audit_finds_what_was_planted(busy: ScriptStore, fault: str) -> None:
    command, key, *rest = PLANTED[fault]
    busy.server.eval("return redis.call(unpack(ARGV))", 0, command, f"{{gb:{busy.keys.pool}}}:{key}", *rest)
    found = busy.faults()
    assert any(fault in text for text in found), found


def test_more_claimed_than_there_is_is_shown_and_is_no_fault(busy: ScriptStore) -> None:
    busy.sync({"sim0": {"total": 70 * MIB}}, [row_of(busy.view("active"))])
    reply = busy.run(Script.AUDIT)
    assert list(reply["faults"]) == []
    assert reply["overfull"] == [f"{NODE}/sim0: {80 * MIB} of {70 * MIB} bytes claimed"]


def test_a_lease_by_word_without_its_protections(valkey: redis.Redis) -> None:
    """The guards of two tests above, switched off."""
    for off, broken in (
        ({"tonumber(lease.lease_ttl_ms or 0) > 0 then\n      local over": "false then\n      local over"}, "ending"),
        ({"if not is_by_word or is_new": "if true or is_new"}, "active"),
    ):
        store = ScriptStore(valkey, off)
        store.sync(ONE)
        row = row_of(store.hold("a", part(60), **BY_WORD), lease_ttl_ms=30_000)
        for _ in range(7):
            store.pass_time(5)
            store.sync(ONE, [row] if broken == "active" else [])
        assert store.raw()["leases"]["a"]["state"] == broken
