"""Slots with everything real around them: ledger, keeper, shim, llama-server; and what becomes of what is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import psutil
import pytest
import uvloop

from gpuboss.client import Client, LedgerSettings
from gpuboss.devices import parse_devices
from gpuboss.leases import LeaseState
from gpuboss.ledger_file import Transaction, open_file
from gpuboss.settings import Timings
from inference import events, left_row
from inference.errors import EngineDied, LoadFailed, WillNeverFit
from inference.slot_state import SlotState
from tests.integration.inference.slot_kit import OPTIONS, SHARE, Rig, post, shim_of, stream
from tests.support import until

CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8, "temperature": 0}


async def test_a_slot_loads_answers_and_leaves(rig: Rig) -> None:
    slot = await rig.ready("robin")
    assert [type(event) for event in rig.events] == [events.LeaseGranted, events.SlotReady]
    [row] = rig.rows()
    assert (row.engine_pid, row.shares, row.holder) == (slot.pid, {"sim0": SHARE}, "slot:robin")
    await until(lambda: _is_active(rig), "the lease to be seen in use")
    status, answer = await post(slot.engine, "/v1/chat/completions", CHAT)
    assert (status, answer["model"]) == (200, "robin")
    slot.drain("a test")
    slot.stop("a test")
    await rig.gone(slot)
    await rig.check_nothing_left()


async def _is_active(rig: Rig) -> bool:
    return await rig.leases() == [LeaseState.ACTIVE]


async def test_a_second_model_loads_when_the_first_has_left(rig: Rig) -> None:
    robin = await rig.ready("robin")
    raven = rig.slot("raven")
    raven.start(OPTIONS, 10)
    await until(lambda: raven.lease is not None, "raven's lease to be queued")
    assert raven.lease is not None
    assert raven.lease.state is LeaseState.QUEUED
    robin.stop("room for raven")
    await until(lambda: raven.state is SlotState.READY, "raven to be loaded")
    assert [type(event).__name__ for event in rig.events[2:]] == ["SlotGone", "LeaseGranted", "SlotReady"]
    assert [row.holder for row in rig.rows()] == ["slot:raven"]


async def test_a_load_that_is_not_wanted_any_more_is_ended(rig: Rig) -> None:
    """At every moment of its start: nothing may be left whatever it was doing."""
    dice = random.Random(4)
    for _ in range(8):
        slot = rig.slot("robin")
        slot.start(OPTIONS, 10)
        await asyncio.sleep(dice.uniform(0, 0.06))
        await slot.close()
        await rig.check_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_an_engine_that_is_killed_fails_its_slot_and_nothing_else(rig: Rig, number: int) -> None:
    slot = await rig.ready("robin")
    answer = await stream(slot.engine)
    await anext(answer)
    assert slot.pid is not None
    os.kill(slot.pid, number)
    with pytest.raises(EngineDied, match="the engine of 'robin' ended in the middle of its answer"):
        await answer.read()
    failure = await rig.failed(slot)
    assert failure.was_ready
    assert isinstance(failure.error, EngineDied)
    rig.events.clear()
    await rig.start(slot)
    assert (await post(slot.engine, "/v1/chat/completions", CHAT))[0] == 200


async def test_a_shim_that_is_killed_takes_its_engine_along_and_the_keeper_clears_up(rig: Rig) -> None:
    slot = await rig.ready("robin")
    answer = await stream(slot.engine)
    await anext(answer)
    engine = slot.pid
    assert engine is not None
    os.kill(shim_of(slot), signal.SIGKILL)
    with pytest.raises(EngineDied):
        await answer.read()
    failure = await rig.failed(slot)
    assert "its supervisor was ended by signal 9" in failure.error.message
    assert [type(event) for event in rig.events[2:]] == [events.LeaseLost, events.SlotFailed]
    assert not _lives(engine)
    rig.events.clear()
    await rig.start(slot)


async def test_books_that_cannot_be_written_do_not_keep_a_broker_from_its_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: neither the shim nor the keeper can take the row out, and the keeper frees the lease later."""
    monkeypatch.setattr(left_row, "LAST_WAIT_S", 0.2)
    slot = await rig.ready("robin")
    engine, books = slot.pid, str(rig.ledger.state.ledger_path)
    assert engine is not None
    with contextlib.closing(open_file(books)) as connection, Transaction(connection, books):
        os.kill(shim_of(slot), signal.SIGKILL)
        await until(lambda: rig.told(events.LeaseLost, slot), "the loss of the shim to be noticed")
        assert not rig.told(events.SlotFailed, slot)
        await slot.close()
        assert rig.told(events.SlotGone, slot)
        assert [row.holder for row in rig.rows()] == ["slot:robin"]
        await until(lambda: not _lives(engine), "the engine to be dead")
    await until(lambda: not rig.rows(), "the keeper to take the row out")
    await until(lambda: _is_free(rig), "the keeper to free the lease")


async def _is_free(rig: Rig) -> bool:
    return await rig.leases() == []


async def test_kills_at_any_moment_of_a_load_leave_nothing(rig: Rig) -> None:
    """Engine or shim, killed while the slot loads: a failure or a success, never a leak."""
    dice = random.Random(7)
    outcomes = set()
    for _ in range(10):
        rig.events.clear()
        slot = rig.slot("robin")
        slot.start(OPTIONS, 10)
        await until(lambda slot=slot: slot.pid is not None or slot.state is not SlotState.LOADING, "the engine to run")
        await asyncio.sleep(dice.uniform(0, 0.03))
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            pid = shim_of(slot) if dice.random() < 0.5 else slot.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        await until(lambda slot=slot: rig.told(events.SlotFailed, slot), "the failure")
        outcomes.add(rig.told(events.SlotReady, slot) != [])
        await rig.check_nothing_left()
    assert False in outcomes, "no load was hit before it was done"


def _lives(pid: int) -> bool:
    """A killed engine whose shim is dead is a zombie until the machine's first process sees to it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_the_death_of_one_engine_is_not_noticed_by_another(rig: Rig) -> None:
    small = ({"sim0": 20 << 20},)
    robin, raven = rig.slot("robin"), rig.slot("raven")
    for slot in (robin, raven):
        slot.start(small, 10)
    await until(lambda: robin.state is raven.state is SlotState.READY, "both to be loaded")
    answer = await stream(raven.engine, max_tokens=300)
    await anext(answer)
    assert robin.pid is not None
    os.kill(robin.pid, signal.SIGKILL)
    await until(lambda: robin.state is SlotState.FAILED, "robin's failure")
    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert raven.state is SlotState.READY


async def test_a_model_larger_than_the_node_is_refused_with_numbers(rig: Rig) -> None:
    slot = rig.slot("robin")
    slot.start(({"sim0": 1 << 30},), 10)
    failure = await rig.failed(slot)
    assert isinstance(failure.error, WillNeverFit)
    assert "1GiB" in failure.error.message
    assert "64MiB" in failure.error.message


async def test_a_truncated_file_fails_the_load_with_the_engines_words(rig: Rig, tmp_dir: Path) -> None:
    broken = tmp_dir / "broken.gguf"
    broken.write_bytes(rig.file.read_bytes()[:100_000])
    slot = rig.slot("robin", path=broken)
    slot.start(OPTIONS, 10)
    failure = await rig.failed(slot)
    assert isinstance(failure.error, LoadFailed)
    assert not failure.was_ready
    assert "ended with code 1; its log ends with:" in failure.error.message
    assert "broken.gguf" in failure.error.message
    assert str(tmp_dir) not in failure.error.message


async def test_a_program_that_is_no_program_fails_the_load(rig: Rig, tmp_dir: Path) -> None:
    rig.binary = tmp_dir / "llama-server"
    slot = rig.slot("robin")
    slot.start(OPTIONS, 10)
    assert "llama-server cannot be started: No such file" in (await rig.failed(slot)).error.message


async def test_engines_log_to_a_private_file_of_their_model(rig: Rig) -> None:
    slot = await rig.ready("owl/robin:q8")
    [log] = rig.ledger.state.log_dir.glob("engine-*.log")
    assert "robin.gguf" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    before = log.stat().st_size
    slot.stop("a test")
    await rig.gone(slot)
    await rig.start(slot)
    assert log.stat().st_size > before


def test_it_is_the_same_on_the_loop_that_the_broker_uses(
    nothing_left_behind: None, tmp_dir: Path, llama_server: Path, demo_models: Path
) -> None:
    async def scenario() -> None:
        settings = LedgerSettings(tmp_dir / "state", parse_devices("sim0=64MiB"), timings=Timings(linger_s=0.0))
        async with await Client.connect(settings, name="test") as ledger:
            rig = Rig(ledger, llama_server, demo_models / "robin.gguf")
            robin = await rig.ready("robin")
            raven = rig.slot("raven")
            raven.start(OPTIONS, 10)
            robin.stop("room for raven")
            await until(lambda: raven.state is SlotState.READY, "raven to be loaded")
            assert (await post(raven.engine, "/v1/chat/completions", CHAT))[0] == 200
            assert raven.pid is not None
            os.kill(raven.pid, signal.SIGKILL)
            await rig.failed(raven)
            await rig.close()

    uvloop.run(scenario())
