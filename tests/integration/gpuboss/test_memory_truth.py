"""Memory of real processes on the device `cpu`: what is granted rests on what was read, and nothing is given twice."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuboss import errors
from gpuboss.leases import Lease, LeaseState
from tests.integration.gpuboss.host_world import MIB, HostWorld
from tests.integration.gpuboss.keeper_harness import gone
from tests.support import until, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FREE = 900
"""MiB of the empty host, less the reserve."""
PYTHON = 16
"""MiB that a program of the test takes at most before it takes any."""


@pytest.fixture
async def world(tmp_path: Path, valkey_url: str, valkey: object) -> AsyncIterator[HostWorld]:
    made = HostWorld(tmp_path, valkey_url)
    await made.beat()
    yield made
    await made.close()


@pytest.fixture
def left_behind(world: HostWorld) -> Iterator[Path]:
    """300 MiB of shared memory."""
    path = Path(f"/dev/shm/gpuboss-{uuid.uuid4().hex}")
    path.write_bytes(os.urandom(MIB) * 300)
    world.household.shared = path
    yield path
    path.unlink(missing_ok=True)


def about(mib: int) -> object:
    """So many MiB of a program's own, and what any program takes."""
    return pytest.approx((mib + PYTHON / 2) * MIB, abs=PYTHON / 2 * MIB)


async def test_the_reserve_is_nobodys(world: HostWorld) -> None:
    assert (await world.use()).free_bytes == FREE * MIB
    assert (await world.ask(FREE)).state is LeaseState.GRANTED
    assert (await world.ask(1)).state is LeaseState.QUEUED


async def test_a_grant_after_a_stop_waits_for_the_reading_that_shows_the_memory_back(world: HostWorld) -> None:
    lease, program = await world.hold(600, uses=500)
    next_one = await world.ask(700)
    assert next_one.state is LeaseState.QUEUED
    program.kill()
    await world.release(lease)
    assert (await world.find(next_one)).state is LeaseState.QUEUED, "its process is dead, but nobody has looked yet"
    await world.beat()
    granted = await world.find(next_one)
    assert granted.state is LeaseState.GRANTED
    world.enter(granted, world.program())
    await world.beat()
    (ground,) = (await world.find(next_one)).grounds
    assert ground.is_read_since, ground.words
    assert ground.after == "slot:robin"
    assert ground.free_bytes > 700 * MIB


async def test_a_process_that_stays_after_its_release_is_not_given_away(world: HostWorld) -> None:
    lease, program = await world.hold(600, uses=500)
    next_one = await world.ask(700)
    await world.release(lease)
    for _ in range(3):
        assert (await world.find(next_one)).state is LeaseState.QUEUED
        await world.beat()
    use = await world.use()
    assert use.foreign_bytes == about(500), "a program without a lease by now"
    assert use.claimed_bytes == 0
    program.kill()
    await world.beat()
    assert (await world.find(next_one)).state is LeaseState.GRANTED
    assert (await world.use()).foreign_bytes == 0


async def test_the_books_refuse_what_a_store_would_grant_too_early(world: HostWorld) -> None:
    """A store may have forgotten the holder; the node has not read its memory to be back."""
    lease, program = await world.hold(600, uses=500)
    assert lease.fence is not None
    world.book.remove(lease.id, lease.fence.epoch, lease.fence.seq)
    forged = replace(lease, id="forged", shares={"cpu": 400 * MIB})
    with pytest.raises(errors.ActivationRefused, match="600MiB of ended holders, not yet read to be back") as refused:
        world.enter(forged, world.program())
    assert refused.value.settling_bytes == 600 * MIB
    await world.beat()
    with pytest.raises(errors.ActivationRefused, match="processes without a lease 50"):
        world.enter(replace(forged, shares={"cpu": 500 * MIB}), world.program())
    program.kill()
    await world.beat()
    world.enter(forged, world.program())


async def test_a_child_that_outlives_its_holder_is_ended_before_anything_is_granted(world: HostWorld) -> None:
    _, program = await world.hold(600, uses=100)
    child = program.bear(300)
    await world.beat()
    assert (await world.use()).observed_bytes == about(400 + PYTHON)
    next_one = await world.ask(700)
    program.kill()
    assert not gone(child)
    await world.beat()
    wait_until(lambda: gone(child), "the child to be ended")
    await until(lambda: _is_granted(world, next_one), "the grant")


async def test_a_holder_that_takes_more_than_it_claims_counts_for_what_it_takes(world: HostWorld) -> None:
    _, program = await world.hold(200, uses=500)
    use = await world.use()
    assert (use.claimed_bytes, use.observed_bytes, use.foreign_bytes) == (200 * MIB, about(500), 0)
    assert use.free_bytes == about(FREE - 500 - PYTHON)
    assert (await world.ask(500)).state is LeaseState.QUEUED
    program.shrink()
    await world.beat()
    assert (await world.use()).free_bytes == (FREE - 200 - 500) * MIB, "what it claims is its own, and one was granted"


async def test_what_a_holder_took_at_most_is_remembered_while_it_runs(world: HostWorld) -> None:
    lease, program = await world.hold(600, uses=300)
    program.shrink()
    await world.beat()
    use = await world.use()
    assert use.observed_bytes == about(0)
    (peak,) = world.book.peaks()[lease.id]
    assert peak.bytes == about(300)


async def test_a_program_without_a_lease_that_grows_takes_from_what_may_be_granted(world: HostWorld) -> None:
    lease, _ = await world.hold(200, uses=100)
    stranger = world.program()
    stranger.grow(100)
    await world.beat()
    assert (await world.use()).foreign_bytes == about(100)
    stranger.grow(500)
    await world.beat()
    use = await world.use()
    assert use.foreign_bytes == about(600)
    assert use.free_bytes == about(FREE - 200 - 600 - PYTHON)
    assert (await world.find(lease)).state is LeaseState.ACTIVE, "nobody is ended for it"
    waiting = await world.ask(400)
    assert waiting.state is LeaseState.QUEUED
    stranger.kill()
    await world.beat()
    assert (await world.find(waiting)).state is LeaseState.GRANTED


async def test_use_beyond_the_reserve_leaves_less_than_nothing_and_grants_nothing(world: HostWorld) -> None:
    world.program().grow(FREE + 50)
    await world.beat()
    assert (await world.use()).free_bytes < 0
    assert (await world.ask(1)).state is LeaseState.QUEUED


async def test_what_a_dead_holder_left_behind_is_never_granted(world: HostWorld, left_behind: Path) -> None:
    """Shared memory outlives who wrote it. Whose it was the host does not tell: it is in use without a lease."""
    lease, program = await world.hold(400, uses=50)
    program.kill()
    await world.release(lease)
    await world.beat()
    use = await world.use()
    assert (use.foreign_bytes, use.quarantined_bytes) == (300 * MIB, 0)
    assert (await world.ask(700)).state is LeaseState.QUEUED
    os.unlink(left_behind)  # noqa: PTH108 (an async test)
    await world.beat()
    assert (await world.use()).foreign_bytes == 0


async def _is_granted(world: HostWorld, lease: Lease) -> bool:
    await world.beat()
    return (await world.find(lease)).state is LeaseState.GRANTED
