"""What a keeper makes of its drivers' words, and what it tells the store of what runs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuboss import accounts, errors
from gpuboss.leases import LeaseState
from gpuboss.node_watch import families
from gpuboss.probing import PatientProbe
from gpuboss.scripts import Script
from tests.integration.gpuboss.node_world import CARD, GIB, World
from tests.support import until


@pytest.fixture
async def world(tmp_path: Path, valkey_url: str, valkey: object) -> AsyncIterator[World]:
    made = World(tmp_path, valkey_url)
    await made.beat()
    yield made
    await made.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is given a tenth of a second to return memory."""
    monkeypatch.setattr(accounts, "QUARANTINE_AFTER_S", 0.1)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("per_process", [True, False], ids=["per process", "as a whole"])
async def test_what_a_driver_keeps_of_the_dead_is_quarantined_until_it_is_back(
    world: World, caplog: pytest.LogCaptureFixture, per_process: bool
) -> None:
    world.driver.per_process = per_process
    process = world.process(40)
    row = world.holder(50, process)
    await world.beat()
    use = await world.use()
    assert (use.claimed_bytes, use.observed_bytes, use.foreign_bytes) == (50 * GIB, 40 * GIB, 1 * GIB)
    world.dies(process, keeps=30)
    await world.beat()
    assert row.lease_id not in await world.leases()
    assert (await world.ask(70)).state is LeaseState.QUEUED, "30 of 100 are not back"
    await until(lambda: _beat_and_see(world, 30 * GIB), "the quarantine")
    use = await world.use()
    assert (use.free_bytes, use.residual_bytes, use.foreign_bytes) == (69 * GIB, 30 * GIB, 1 * GIB)
    assert (await world.ask(70)).state is LeaseState.QUEUED
    assert (await world.ask(69)).state is LeaseState.GRANTED
    with pytest.raises(errors.ActivationRefused, match="ended holders, not given back by the driver 30GiB"):
        world.holder(70)
    world.keeper_restarts()
    await world.beat()
    assert (await world.use()).quarantined_bytes == 30 * GIB, "the next keeper knows of it"
    world.driver.kept = 0
    await world.beat()
    use = await world.use()
    assert (use.quarantined_bytes, use.residual_bytes, use.free_bytes) == (0, 0, 99 * GIB)
    assert [record.message for record in caplog.records if "quarantined" in record.message] == [
        "GPU-a: 30GiB of ended holders did not come back within 5 s: quarantined until they do",
        "GPU-a: 30GiB of ended holders did not come back within 5 s: quarantined until they do",
        "GPU-a: what was quarantined (30GiB) is back",
    ]


async def test_what_a_driver_gives_back_soon_is_never_called_quarantined(world: World) -> None:
    process = world.process(40)
    world.holder(50, process)
    await world.beat()
    world.dies(process, keeps=40)
    await world.beat()
    use = await world.use()
    assert (use.residual_bytes, use.quarantined_bytes, use.free_bytes) == (40 * GIB, 0, 59 * GIB)
    world.driver.kept = 0
    await world.beat()
    use = await world.use()
    assert (use.residual_bytes, use.free_bytes) == (0, 99 * GIB)


async def test_who_uses_a_card_without_a_lease_is_shown_by_pid_and_name(world: World) -> None:
    ours, stranger, small = world.process(10), world.process(20), world.process(5)
    world.holder(10, ours)
    await world.beat()
    use = await world.use()
    assert [(each.pid, each.name, each.bytes) for each in use.foreign_pids] == [
        (stranger.pid, "sleep", 20 * GIB),
        (small.pid, "sleep", 5 * GIB),
    ]
    assert use.foreign_bytes == 26 * GIB, "and the driver's own"
    world.dies(stranger)
    await world.beat()
    assert [each.pid for each in (await world.use()).foreign_pids] == [small.pid]


async def test_on_a_card_measured_as_a_whole_one_holder_begins_at_a_time(world: World) -> None:
    world.driver.per_process = False
    world.driver.own = 10
    await world.beat()
    first = world.process(0)
    world.holder(30, first)
    world.driver.by_pid[first.pid] = 20
    second = world.process(0)
    with pytest.raises(errors.ActivationRefused, match="one holder begins at a time: job:1 began"):
        world.holder(30, second)
    await world.beat()
    world.holder(30, second)
    world.driver.by_pid[second.pid] = 25
    await world.beat()
    # Whose it is, only the order of events tells: 10 were there before, then came 20, then 25.
    assert world.book.priors()[CARD.id].observed == {"lease-1": 20 * GIB, "lease-3": 25 * GIB}
    use = await world.use()
    assert (use.foreign_bytes, use.observed_bytes, use.free_bytes) == (10 * GIB, 45 * GIB, 30 * GIB)


async def test_a_driver_that_hangs_stops_no_beat_and_its_last_reading_stands(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = world.process(40)
    world.holder(50, process)
    await world.beat()
    world.driver.well.clear()
    (probe,) = world.node._probes
    monkeypatch.setattr(probe, "_patience_s", 0.05)
    calls = world.driver.calls
    for _ in range(5):
        began_s = time.monotonic()
        await world.beat()
        assert time.monotonic() - began_s < 5.0
    assert world.driver.calls == calls + 1
    assert world.node.silent == {CARD.id}
    use = await world.use()
    assert (use.observed_bytes, use.foreign_bytes) == (40 * GIB, 1 * GIB)
    assert use.unread_s is not None
    # Deaths are seen all the same; what the dead had is not taken for free without a reading.
    world.dies(process)
    await world.beat()
    assert not await world.leases()
    assert (await world.ask(60)).state is LeaseState.QUEUED
    monkeypatch.undo()
    world.driver.well.set()
    await until(lambda: _beat_and_hear(world), "the driver to be heard again")
    assert (await world.use()).unread_s is None
    assert (await world.ask(60)).state is LeaseState.GRANTED
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2, said
    assert "no reading of GPU-a, the last one stands: the driver of GPU-a has not answered" in said[0]
    assert said[1] == "GPU-a: the driver answers again"


def test_drivers_are_given_about_a_second() -> None:
    class Nothing:
        def devices(self) -> list[object]:
            return []

    assert 0.5 <= PatientProbe(Nothing())._patience_s <= 2  # type: ignore[arg-type]


async def test_a_lease_that_is_held_by_word_goes_when_the_store_says_so(world: World) -> None:
    by_word = world.holder(10)
    timed = world.holder(10, world.process(0), terms='{"lease_ttl_ms": 60000, "kind": "service", "priority": 7}')
    lasting = world.holder(10, world.process(0))
    await world.beat()
    assert set(await world.leases()) == {by_word.lease_id, timed.lease_id, lasting.lease_id}
    for row in (by_word, timed, lasting):
        await world.store.call(Script.RELEASE, {"id": row.lease_id, "epoch": row.epoch, "seq": row.seq})
    await world.beat()
    assert [row.lease_id for row in world.book.rows()] == [lasting.lease_id], "behind this one stands a process"
    assert set(await world.leases()) == {lasting.lease_id}


async def test_a_lease_keeps_all_its_terms_though_store_and_keeper_forget(world: World, valkey: object) -> None:
    who = {"boot_id": "b", "pid": 1, "pid_namespace": 2, "start_ticks": 3}
    terms = {"kind": "service", "priority": 7, "preemptible": True, "grace_ms": 12000, "lease_ttl_ms": 90000}
    terms |= {"order": 1234, "owner": json.dumps(who)}
    row = world.holder(10, terms=json.dumps(terms))
    plain = world.holder(5, world.process(0))
    await world.beat()
    before = await world.leases()
    valkey.flushall()  # type: ignore[attr-defined]
    world.keeper_restarts()
    await world.beat()
    after = await world.leases()
    found = after[row.lease_id]
    assert (found.kind.value, found.priority, found.preemptible, found.grace_s) == ("service", 7, True, 12.0)
    assert (found.ttl_s, found.order, found.owner.pid, found.fence) == (90.0, 1234, 1, before[row.lease_id].fence)
    assert (after[plain.lease_id].kind.value, after[plain.lease_id].priority) == ("job", 10)


async def test_what_was_changed_in_the_store_counts_more_than_what_the_row_began_with(
    world: World, valkey: object
) -> None:
    row = world.holder(10, world.process(0), terms='{"priority": 7, "order": 5}')
    await world.beat()
    fence = {"epoch": row.epoch, "seq": row.seq}
    reply = await world.store.call(Script.RESIZE, {"id": row.lease_id, "priority": 50, **fence})
    assert reply["status"] == "ok"
    await world.beat()
    valkey.flushall()  # type: ignore[attr-defined]
    await world.beat()
    found = (await world.leases())[row.lease_id]
    assert (found.priority, found.order) == (50, 5)


async def test_terms_nobody_understands_are_said_and_do_no_harm(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.holder(10, world.process(0), terms="{nonsense")
    world.holder(10, world.process(0), terms="[7]")
    await world.beat()
    assert len(await world.leases()) == 2
    assert "its terms are not understood" in caplog.text


async def test_the_books_of_the_store_are_audited_now_and_then(
    world: World, caplog: pytest.LogCaptureFixture, valkey: object
) -> None:
    await world.beat()
    valkey.zadd(world.store._keys._key("deadlines"), {"ghost": 1e15})  # type: ignore[attr-defined]
    await world.beat()
    assert "audit" not in caplog.text, "half a minute is not over"
    world.keeper_restarts(audit_s=0.0)
    await world.beat()
    assert "audit of the lease store: lease ghost is gone, expires, and neither waits nor holds memory" in caplog.text


def test_numbers_of_another_pid_namespace_are_never_taken_for_our_own_processes(world: World) -> None:
    process = world.process(0)
    row = world.holder(10, process)
    assert families([row], {CARD.id}) == {row.lease_id: {process.pid}}
    assert row.pid_namespace is not None
    assert families([row.replace(pid_namespace=row.pid_namespace + 1)], {CARD.id}) == {row.lease_id: set()}
    by_word = world.holder(10)
    assert families([by_word], {CARD.id}) == {by_word.lease_id: set()}


def test_who_carries_a_lease_held_by_word_is_its_family(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    row = world.holder(10)
    monkeypatch.setenv("GPUBOSS_LEASE", row.lease_id)
    process = world.process(8)
    assert families([row], {CARD.id}) == {row.lease_id: {process.pid}}
    assert families([row], {"another"}) == {row.lease_id: set()}


async def _beat_and_see(world: World, quarantined: int) -> bool:
    await world.beat()
    return (await world.use()).quarantined_bytes == quarantined


async def _beat_and_hear(world: World) -> bool:
    await world.beat()
    return not world.node.silent
