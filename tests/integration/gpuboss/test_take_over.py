"""Who asked for a lease is dead, who uses the memory lives on: another process answers for it from now on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis

from gpuboss import errors, telling
from gpuboss.client import Client
from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Fence, HolderKind, Lease, LeaseRequest, LeaseState, new_request_id
from gpuboss.node_ledger import NodeLedger
from gpuboss.scripts import Script, source
from tests.integration.gpuboss.keeper_harness import MIB, LedgerUnderTest, told_by
from tests.integration.gpuboss.script_harness import OWNER, TTL_MS, ScriptStore, row_of
from tests.support import until

ONE = {"sim0": {"total": 100 * MIB}}
NEXT = json.dumps({"boot_id": "b", "pid": 7, "pid_namespace": 2, "start_ticks": 9})
SLOT: dict[str, Any] = {"kind": "slot", "holder": "slot:robin", "priority": 20}


def active(scripts: ScriptStore, **more: Any) -> dict[str, Any]:
    """A slot in use."""
    lease = scripts.hold("a", {"sim0": 60 * MIB}, **SLOT | more)
    view: dict[str, Any] = scripts.fenced(Script.ACTIVATE, lease)["lease"]
    return view


# -- the script -------------------------------------------------------------------------------------------------------


def test_a_taken_over_lease_has_another_owner_and_nothing_else_is_changed(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = active(scripts)
    for _ in range(2):
        reply = scripts.fenced(Script.TAKE_OVER, lease, owner=NEXT)
        assert reply["lease"] == lease | {"owner": NEXT}
    assert scripts.faults() == []


def test_by_another_fence_or_for_a_waiter_nothing_is_taken_over(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = active(scripts)
    scripts.wait("b", {"sim0": 60 * MIB})
    for wrong in ({"seq": lease["seq"] + 1}, {"id": "b"}, {"id": "unheard-of"}):
        assert scripts.fenced(Script.TAKE_OVER, lease | wrong, owner=NEXT)["status"] == "stale"
    assert (scripts.view("a")["owner"], scripts.view("b")["owner"]) == (OWNER, OWNER)
    scripts.release(lease)
    assert scripts.fenced(Script.TAKE_OVER, lease, owner=NEXT)["lease"]["state"] == "freed"


def test_a_notice_stands_and_the_slots_of_the_new_owner_are_its_siblings(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = active(scripts)
    scripts.wait("job", {"sim0": 80 * MIB}, priority=10)
    assert scripts.told("job") == {"a"}
    view = scripts.fenced(Script.TAKE_OVER, lease, owner=NEXT)["lease"]
    assert view["notice"]["by"] == "job"
    scripts.run(Script.CANCEL, id="job")
    assert scripts.told("job") == set()
    scripts.wait("sibling", {"sim0": 80 * MIB}, **SLOT | {"priority": 10, "owner": NEXT})
    assert scripts.told("sibling") == set(), "between slots of one broker the ledger decides nothing"
    scripts.wait("other", {"sim0": 80 * MIB}, **SLOT | {"priority": 5, "owner": OWNER})
    assert scripts.told("other") == {"a"}, "to its former owner's slots it is a stranger's"


def forgotten_with_the_store_it_is_told_by_the_books(scripts: ScriptStore) -> None:
    """A fail-over that lost the take-over alone."""
    scripts.sync(ONE)
    lease = active(scripts)
    before = scripts.copy()
    scripts.fenced(Script.TAKE_OVER, lease, owner=NEXT)
    scripts.roll_back(before)
    scripts.sync(ONE, [row_of(lease, owner=NEXT, is_owner=True)])
    assert scripts.view("a")["owner"] == NEXT


def a_row_that_was_read_before_it_takes_nothing_back(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = active(scripts)
    old = row_of(lease, owner=OWNER, is_owner=True)
    scripts.fenced(Script.TAKE_OVER, lease, owner=NEXT)
    scripts.sync(ONE, [old])
    assert scripts.view("a")["owner"] == NEXT
    scripts.now_ms += TTL_MS
    scripts.sync(ONE, [row_of(lease, owner=NEXT, is_owner=True)])
    assert scripts.view("a")["owner"] == NEXT


def a_row_that_does_not_say_so_itself_changes_no_owner(scripts: ScriptStore) -> None:
    scripts.sync(ONE)
    lease = active(scripts)
    scripts.sync(ONE, [row_of(lease, owner=NEXT)])
    assert scripts.view("a")["owner"] == OWNER


RULES: dict[Callable[[ScriptStore], None], dict[str, str]] = {
    forgotten_with_the_store_it_is_told_by_the_books: {"if row.is_owner and": "if false and"},
    a_row_that_was_read_before_it_takes_nothing_back: {" and not is_taken_over_since(lease)": ""},
    a_row_that_does_not_say_so_itself_changes_no_owner: {"if row.is_owner and": "if"},
}
"""Each with what in the scripts makes it so."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(scripts: ScriptStore, rule: Callable[[ScriptStore], None]) -> None:
    rule(scripts)
    assert scripts.faults() == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_without_its_line_a_rule_does_not_hold(valkey: redis.Redis, rule: Callable[[ScriptStore], None]) -> None:
    for line in RULES[rule]:
        assert line in source(Script.NODE_SYNC).text, f"no script says {line!r}"
    with pytest.raises(AssertionError):
        rule(ScriptStore(valkey, RULES[rule]))


# -- with processes ---------------------------------------------------------------------------------------------------


async def in_use(ledger: LedgerUnderTest) -> tuple[Client, Lease, int]:
    """A client of ours, a lease in use whose asker was killed while its holder lives, and the asker's pid."""
    asker = ledger.run_user([{"sim0": 60 * MIB}])
    assert told_by(asker)["states"] == ["granted"]
    client = await Client.connect(ledger.settings, name="next")
    (lease,) = (await client.snapshot()).leases
    ledger.run_holder(lease)
    await client.sweep()
    os.kill(asker.pid, signal.SIGKILL)
    asker.communicate()
    return client, lease, asker.pid


async def found(client: Client, lease: Lease) -> Lease:
    seen = await client.find(lease.id)
    assert seen is not None
    return seen


async def test_the_lease_of_a_dead_asker_lives_with_its_holder_and_is_taken_over(ledger: LedgerUnderTest) -> None:
    client, lease, asker = await in_use(ledger)
    assert lease.fence is not None
    async with client:
        await client.sweep()
        seen = await found(client, lease)
        assert (seen.state, seen.owner.pid) == (LeaseState.ACTIVE, asker), "the keeper leaves alone what is in use"
        taken = await client.take_over(lease.id, lease.fence)
        assert (taken.owner, taken.fence) == (client.owner, lease.fence)
        (row,) = _rows(ledger)
        assert json.loads(json.loads(row.terms)["owner"])["pid"] == client.owner.pid
        told: list[object] = []
        client.on_notice(taken, lambda now: told.append(now.notice))
        await client.preempt(lease.id, by="a person")
        await until(lambda: told, "notices to be heard by the new owner")
        ledger.started[1].communicate()  # its holder ends, and takes out its row
        assert not _rows(ledger)
        await client.release(taken)
        assert (await found(client, lease)).state is LeaseState.FREED


async def test_what_has_no_row_any_more_is_not_taken_over(ledger: LedgerUnderTest) -> None:
    client, lease, _ = await in_use(ledger)
    assert lease.fence is not None
    async with client:
        for fence in (Fence(lease.fence.epoch, lease.fence.seq + 1), Fence(1, 1)):
            with pytest.raises(errors.StaleFence, match="there is nothing to take over"):
                await client.take_over(lease.id, fence)
        ledger.started[1].communicate()
        with pytest.raises(errors.StaleFence, match="there is nothing to take over"):
            await client.take_over(lease.id, lease.fence)


@pytest.mark.parametrize("victim", ["keeper", "store"])
async def test_a_killed_keeper_or_store_changes_nothing_about_it(ledger: LedgerUnderTest, victim: str) -> None:
    client, lease, _ = await in_use(ledger)
    assert lease.fence is not None
    async with client:
        os.kill(ledger.keeper_pid if victim == "keeper" else ledger.store_pid, signal.SIGKILL)
        taken = await client.take_over(lease.id, lease.fence)
        assert taken.owner == client.owner
        await client.sweep()
        seen = await found(client, lease)
        assert (seen.state, seen.owner, seen.fence) == (LeaseState.ACTIVE, client.owner, lease.fence)


async def test_a_store_that_was_emptied_gets_the_lease_back_with_its_new_owner(ledger: LedgerUnderTest) -> None:
    client, lease, _ = await in_use(ledger)
    assert lease.fence is not None
    async with client:
        await client.take_over(lease.id, lease.fence)
        with redis.Redis(unix_socket_path=str(ledger.state.socket_path("store"))) as store:
            store.flushall()

        async def is_back() -> bool:
            seen = await client.find(lease.id)
            return seen is not None and seen.state is LeaseState.ACTIVE

        await until(is_back, "the keeper to tell the store of what runs")
        seen = await found(client, lease)
        assert (seen.owner, seen.fence) == (client.owner, lease.fence)


async def test_a_store_that_knows_nothing_of_it_yet_is_told_and_asked_again(ledger: LedgerUnderTest) -> None:
    client, lease, _ = await in_use(ledger)
    assert lease.fence is not None
    async with client:
        with redis.Redis(unix_socket_path=str(ledger.state.socket_path("store"))) as store:
            for key in store.scan_iter(f"*lease:{lease.id}"):
                store.delete(key)
        assert (await client.take_over(lease.id, lease.fence)).owner == client.owner


def test_the_books_know_the_owner_better_than_what_the_store_said_last() -> None:
    me = ProcessIdentity.current()
    request = LeaseRequest(new_request_id(), "slot:robin", HolderKind.SLOT, ({"sim0": 1},), 10)
    row = _Row(request.request_id, json.dumps({"owner": NEXT, "priority": 10}), me)
    told = telling.row_told(row, {"owner": OWNER, "priority": 50}, {}, {})  # type: ignore[arg-type] # plays a row
    assert (told["owner"], told["priority"], told["is_owner"]) == (NEXT, 50, True)
    row = _Row(request.request_id, "", me)
    told = telling.row_told(row, {"owner": OWNER}, {}, {})  # type: ignore[arg-type] # plays a row
    assert told["owner"] == OWNER
    assert "is_owner" not in told


class _Row:
    """As much of a row as is told."""

    holder, epoch, seq = "slot:robin", 1, 1

    def __init__(self, lease_id: str, terms: str, process: ProcessIdentity) -> None:
        self.lease_id, self.terms, self.process = lease_id, terms, process


def _rows(ledger: LedgerUnderTest) -> list[Any]:
    with NodeLedger(ledger.state.ledger_path) as books:
        return list(books.rows())
