"""What `explain` says is what then happens; and in which words it says it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from gpuboss.identity import ProcessIdentity
from gpuboss.leases import Fence, HolderKind, Lease, LeaseState, Notice
from inference import actions, events, readings
from inference.events import Ticket
from inference.explain import TICKET, Explanation, Verdict, explain
from inference.fault import Fault
from inference.queue import QueueLimits
from tests.unit.inference.scheduler_bench import Bench
from tests.unit.inference.scheduler_rules import GIB, a_device, a_model
from tests.unit.inference.scheduler_world import World

A, B, C = a_model("a", 6), a_model("b", 6), a_model("c", 2)


def said_of(bench: Bench, model_id: str, priority: int = 10) -> Explanation:
    return explain(bench.scheduler, model_id, priority, bench.now)[0]


def what_happened(world: World, decided: Sequence[actions.Action], model_id: str) -> dict[str, object]:
    starts = [one for one in decided if isinstance(one, actions.Start | actions.Ask) and one.model_id == model_id]
    leaving = {one.slot_id for one in decided if isinstance(one, actions.Drain | actions.Stop)}
    board = world.scheduler.board
    refusals = [one for one in decided if isinstance(one, actions.Refuse) and one.ticket_id == TICKET]
    return {
        "granted": any(isinstance(one, actions.Grant) and one.ticket_id == TICKET for one in decided),
        "refusal": refusals[0].error.message if refusals else None,
        "started": any(isinstance(one, actions.Start) for one in starts),
        "options": starts[0].options if starts else (),
        "victims": {slot for slot in leaving if board.slots[slot].beneficiary == model_id},
        "position": board.line.position(TICKET),
    }


def as_said(said: Explanation) -> dict[str, object]:
    return {
        "granted": said.verdict is Verdict.READY,
        "refusal": said.refusal,
        "started": said.verdict in (Verdict.FITS, Verdict.EVICTS),
        "options": said.options,
        "victims": {victim.slot_id for victim in said.victims},
        "position": (said.position, said.waiting),
    }


def test_on_hundreds_of_live_states_what_is_said_is_what_then_happens():
    verdicts: dict[Verdict, int] = {}
    for seed in range(400):
        world, rng = World(seed), random.Random(seed)
        world.feed(events.DevicesRead(world.now, tuple(world.devices)))
        world.feed(events.ModelsChanged(world.now, dict(world.models)))
        for begin in (world.tick, world.someone_comes, world.something_happens, world.a_job_comes):
            world.after(0.0, begin)
        world.advance(world.now + rng.uniform(5.0, 40.0))
        model_id, priority = rng.choice(list(world.models)), rng.choice([1, 5, 10, 20, 50])
        said, _ = explain(world.scheduler, model_id, priority, world.now)
        decided = world.scheduler.handle(events.Arrived(world.now, Ticket(TICKET, model_id, priority, world.now)))
        assert as_said(said) == what_happened(world, decided, model_id), f"seed {seed}: {said}"
        verdicts[said.verdict] = verdicts.get(said.verdict, 0) + 1
    assert all(verdicts.get(verdict, 0) >= 3 for verdict in Verdict), verdicts


def test_explaining_changes_nothing():
    for seed in range(30):
        world = World(seed)
        world.run(20.0)
        before = repr(world.scheduler.board.slots), world.scheduler.waiting(), dict(world.scheduler.board.claims)
        for model_id in world.models:
            explain(world.scheduler, model_id, 5, world.now)
        after = repr(world.scheduler.board.slots), world.scheduler.waiting(), dict(world.scheduler.board.claims)
        assert before == after


def test_a_victim_is_named_with_its_bytes_its_class_and_how_long_it_idled():
    bench = Bench(A, B)
    bench.loaded("a")
    bench.now += 7.0
    said = said_of(bench, "b")
    assert said.verdict is Verdict.EVICTS
    (victim,) = said.victims
    assert (victim.slot_id, victim.freed_bytes, victim.priority, victim.idle_s) == ("a", 6 * GIB, 10, 7.0)
    assert said.options == ({"d0": 6 * GIB},)


def test_what_keeps_its_memory_is_named_with_the_reason():
    pinned, busy, kept = a_model("pinned", 1, pin=True), a_model("busy", 3), a_model("kept", 3)
    bench = Bench(pinned, busy, kept, a_model("b", 8), limits=QueueLimits(min_residency_s=30.0))
    bench.up("pinned")
    bench.ask("busy")
    bench.up("busy")
    bench.ask("kept", priority=5)
    bench.up("kept")
    bench.served("kept2")
    bench.now += 1.0
    said = said_of(bench, "b")
    assert said.verdict is Verdict.WAITS
    why = {blocker.name: blocker.why for blocker in said.blocked_by}
    assert why["pinned"] == "it is pinned"
    assert why["busy"] == "it is busy: 1 in flight, class normal"
    assert why["kept"] == "it is idle, but served class high, which is more important than normal"
    assert said.devices[0].free_bytes == 3 * GIB
    just_loaded = {blocker.name: blocker.why for blocker in said_of(bench, "b", priority=5).blocked_by}
    assert "it was just loaded and stays for 29.0 s more" in just_loaded["kept"]


def test_others_leases_the_queue_and_a_back_off_are_named():
    bench = Bench(A, B, devices=(a_device("d0", 10, others=5, leased=5),))
    said = said_of(bench, "a")
    assert {blocker.name: blocker.why for blocker in said.blocked_by}["other holders"] == (
        "jobs and other brokers lease 5GiB"
    )
    assert said.waits_for_others
    bench = Bench(A)
    bench.ask("a")
    bench.failed("a", was_ready=False, fault=Fault.CRASH)
    said = said_of(bench, "a")
    why = {blocker.name: blocker.why for blocker in said.blocked_by}
    assert why["back-off"].startswith("its engine failed, and is started again in ")
    assert why["queue"] == "1 waiting requests come first"


def a_lease(holder: str, priority: int = 10, **keys: Any) -> Lease:
    return Lease(
        id=holder,
        request_id=holder,
        holder=holder,
        kind=HolderKind.JOB,
        state=keys.pop("state", LeaseState.ACTIVE),
        shares={"d0": GIB},
        priority=priority,
        fence=Fence(1, 1),
        position=None,
        owner=ProcessIdentity("boot", 1, 1, 1),
        since_ms=0,
        **keys,
    )


def test_holders_outside_are_named_with_what_would_make_them_yield():
    bench = Bench(A, B, devices=(a_device("d0", 10, others=5, leased=5),))
    leases = [
        a_lease("job:stays"),
        a_lease("job:lesser", 50, preemptible=True, grace_s=60.0),
        a_lease("job:equal", preemptible=True),
        a_lease("job:told", 20, notice=Notice("w", "job:other", 10, 0, 12.3, acknowledged=True)),
        a_lease("job:waits", state=LeaseState.QUEUED),
    ]
    before = said_of(bench, "a")
    said = before.naming(readings.holders(leases, before.priority))
    assert not said.waits_for_others
    assert {blocker.name: (blocker.held_bytes, blocker.why) for blocker in said.blocked_by if blocker.held_bytes} == {
        "job:stays": (GIB, "it leases 1GiB in class normal until it ends: it is not pre-emptible"),
        "job:lesser": (GIB, "it leases 1GiB in class batch, and would be told to yield within 60 s"),
        "job:equal": (GIB, "it leases 1GiB in class normal, and yields to more important requests alone"),
        "job:told": (GIB, "it leases 1GiB in class low and was told to yield to job:other within 12 s"),
    }
    assert before.naming(()) == before, "who left just now: the sum is all there is"


@pytest.mark.parametrize(
    ("model_id", "words"),
    [("nobody", "is not, or no longer, among the known models"), ("huge", "needs 70GiB")],
)
def test_what_would_be_turned_away_is_told_in_the_words_of_the_refusal(model_id: str, words: str):
    said = said_of(Bench(A, a_model("huge", 70)), model_id)
    assert said.verdict is Verdict.REFUSED
    assert said.refusal is not None
    assert words in said.refusal
