"""The way from a granted lease to an engine that answers, and everything that can go wrong on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from inference import engine_run, events, load_progress
from inference.engine_log import log_path
from inference.errors import LoadFailed, LoadTimeout, NoRoom
from inference.fault import Fault
from inference.load_progress import LoadProgress
from inference.process import EndReason, Exited, Lost, Refused, Started
from inference.slot_state import SlotState
from inference.watchdog import COMPUTING_TIMES
from tests.support import until
from tests.unit.inference.slot_world import OPTIONS, World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    made.ledger.state.log_dir.mkdir()
    yield made
    await made.slot.close()


async def failure(world: World) -> events.SlotFailed:
    await until(lambda: world.told(events.SlotFailed), "the failure to be reported")
    [failed] = world.told(events.SlotFailed)
    assert isinstance(failed, events.SlotFailed)
    assert not failed.was_ready
    return failed


def log(world: World, text: str) -> None:
    with log_path(world.ledger.state.log_dir, "robin").open("a") as file:
        file.write(text)


async def test_an_engine_that_ends_while_it_loads_is_told_with_its_last_words(world: World) -> None:
    log(world, "of an earlier life\n")
    world.backend.ready.clear()
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.backend.probes > 1, "the load to be probed")
    world.backend.fault = Fault.BAD_MODEL
    log(world, "loading\nfailed to open GGUF file '/home/ann/models/robin.gguf'\n")
    world.shim.say(Exited(1, None, 1, EndReason.EXIT))
    failed = await failure(world)
    assert isinstance(failed.error, LoadFailed)
    assert failed.error.message == (
        "'robin' could not be loaded: its engine cannot read the model's file; it ended with code 1; its log ends "
        "with:\n"
        "loading\nfailed to open GGUF file 'robin.gguf'"
    )
    assert failed.fault is failed.error.fault is Fault.BAD_MODEL
    assert world.backend.read_lines == ["loading", "failed to open GGUF file '/home/ann/models/robin.gguf'"]
    assert [how for how, _ in world.ledger.given_back] == ["release"]


async def test_a_shim_that_dies_before_the_engine_runs_fails_the_load(world: World) -> None:
    world.answers.append(Lost(1))
    world.slot.start(OPTIONS, 10)
    failed = await failure(world)
    assert isinstance(failed.error, LoadFailed)
    assert "its supervisor was ended by exit code 1" in failed.error.message


async def test_memory_that_the_nodes_books_do_not_have_is_no_room(world: World) -> None:
    world.answers += [Refused("ActivationRefused", "sim0: 2GiB wanted, 1GiB free; held by slot:raven 1GiB", 0)] * 2
    world.slot.start(OPTIONS, 10)
    failed = await failure(world)
    assert isinstance(failed.error, NoRoom)
    assert "held by slot:raven 1GiB" in failed.error.message
    assert [how for how, _ in world.ledger.given_back] == ["cancel"], "the lease was never used"


async def test_rows_of_leases_that_are_over_do_not_refuse_it(world: World) -> None:
    """The store frees a lease held by word at once; its row goes when the keeper looks."""
    world.answers += [Refused("ActivationRefused", "sim0: 2GiB wanted, 1GiB free; held by job:late", 0), Started(1)]
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.slot.state is SlotState.READY, "the slot to be ready")
    assert world.ledger.sweeps == 1


async def test_memory_that_is_on_its_way_back_is_waited_for(world: World) -> None:
    world.answers += [Refused("ActivationRefused", "settling", 1 << 20)] * 2 + [Started(1)]
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.slot.state is SlotState.READY, "the slot to be ready")
    assert world.ledger.sweeps == 2
    assert len(world.shim.orders) == 3


async def test_memory_that_never_comes_back_is_not_waited_for_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_run, "SETTLE_S", 0.0)
    world.answers += [Refused("ActivationRefused", "settling", 1 << 20)]
    world.slot.start(OPTIONS, 10)
    assert isinstance((await failure(world)).error, NoRoom)


async def test_a_program_that_cannot_be_started_is_named_without_its_folder(world: World) -> None:
    world.answers.append(Refused("Unstartable", "/opt/x/llama-server cannot be started: Permission denied", 0))
    world.slot.start(OPTIONS, 10)
    failed = await failure(world)
    assert isinstance(failed.error, LoadFailed)
    assert failed.error.message == "'robin' cannot be started: llama-server cannot be started: Permission denied"


async def test_an_engine_that_will_never_be_ready_fails_the_load(world: World) -> None:
    world.backend.raises = LoadFailed("it answers /health with 404")
    world.slot.start(OPTIONS, 10)
    assert "404" in (await failure(world)).error.message


async def test_a_load_without_progress_times_out_and_is_ended(world: World) -> None:
    world.backend.ready.clear()
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.backend.probes > 1, "the load to be probed")
    world.now_s += load_progress.STALL_S + 1
    failed = await failure(world)
    assert isinstance(failed.error, LoadTimeout)
    assert failed.fault is Fault.STALL
    assert "no progress for 121 s" in failed.error.message
    assert world.shim.orders[-1] == 0.0, "there is nothing to be saved in it"
    assert [how for how, _ in world.ledger.given_back] == ["release"]


async def test_a_load_that_gets_on_may_take_as_long_as_it_likes(world: World) -> None:
    world.backend.ready.clear()
    world.slot.start(OPTIONS, 10)
    for percent in range(10, 100, 10):
        probes = world.backend.probes
        world.backend.fraction = percent / 100
        world.now_s += load_progress.STALL_S - 1
        await until(lambda probes=probes: world.backend.probes > probes + 1, "the next probes")
        assert world.slot.load_fraction == percent / 100
    world.backend.ready.set()
    await until(lambda: world.slot.state is SlotState.READY, "the slot to be ready")
    assert world.slot.load_fraction is None


async def test_a_probe_that_hangs_does_not_hang_the_slot(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_run, "PROBE_PATIENCE_S", 0.01)

    async def hang(_: object) -> None:
        world.backend.probes += 1
        await asyncio.Event().wait()

    world.backend.probe = hang  # type: ignore[assignment, method-assign]
    world.slot.start(OPTIONS, 10)
    await until(lambda: world.backend.probes > 1, "a second probe")
    world.now_s += load_progress.STALL_S + 1
    assert isinstance((await failure(world)).error, LoadTimeout)


def test_progress_is_a_longer_log_more_memory_or_more_bytes_read(tmp_path: Path) -> None:
    now_s = 0.0
    path = tmp_path / "log"
    progress = LoadProgress(os.getpid(), 1 << 40, path, lambda: now_s)
    for _ in range(3):
        now_s += load_progress.STALL_S - 1
        with path.open("a") as file:
            file.write("more\n")
        progress.look()
        assert progress.stalled_s is None
    assert progress.fraction is not None
    assert 0.0 < progress.fraction < 0.01


def test_a_load_that_only_computes_is_given_more_time_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that translates its programs, say."""
    now_s = 0.0
    progress = LoadProgress(os.getpid(), 1, tmp_path / "log", lambda: now_s)
    process = progress._process
    assert process is not None
    monkeypatch.setattr(process, "memory_info", lambda: SimpleNamespace(rss=1))
    monkeypatch.setattr(process, "io_counters", lambda: SimpleNamespace(read_chars=1, read_bytes=1), raising=False)
    monkeypatch.setattr(process, "cpu_times", lambda: SimpleNamespace(user=now_s, system=0.0))
    while progress.stalled_s is None:
        now_s += 1.0
        progress.look()
    assert now_s == pytest.approx(load_progress.STALL_S * COMPUTING_TIMES, abs=2)


def test_a_process_that_is_gone_makes_no_progress(tmp_path: Path) -> None:
    now_s = 0.0
    progress = LoadProgress(4_000_000, 1, tmp_path / "log", lambda: now_s)
    now_s = load_progress.STALL_S
    progress.look()
    assert progress.stalled_s == load_progress.STALL_S
    assert "0B in memory" in str(progress)
