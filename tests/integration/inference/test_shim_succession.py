"""A ready engine outlives a broker that is killed: its shim waits for the next one, for a while, and obeys it then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuboss.node_ledger import NodeLedger
from inference import shim_door
from inference.process import EndReason, Exited, Lost, Shim, Started
from inference.shim_door import PROTOCOL
from inference.takeover import Refusal, TurnedAway, end_by_signal, take_over
from tests.integration.inference.shim_kit import SLEEP, STUBBORN, Kit, Predecessor, alive, carriers
from tests.support import until, wait_until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

DIALOGUES = Path(__file__).with_name("dialogues")
SHORT_S = 0.4


@pytest.fixture
def kit(tmp_dir: Path) -> Iterator[Kit]:
    made = Kit(tmp_dir)
    yield made
    assert made.rows() == []
    assert not list((tmp_dir / "orphans").iterdir())


def left_alone(kit: Kit, code: str = SLEEP, *args: str, grace_s: float = 30.0) -> Predecessor:
    """A ready engine whose broker was killed."""
    order = kit.order(code, *args)
    broker = kit.broker(order, kit.ready(order.lease.id, grace_s=grace_s))
    wait_until(broker.file.exists, "the file by which it is found")
    broker.kill()
    return broker


async def ended(shim: Shim) -> Exited:
    report = await shim.report()
    assert isinstance(report, Exited), report
    return report


@contextlib.asynccontextmanager
async def successor(broker: Predecessor) -> AsyncIterator[Shim]:
    shim = await take_over(broker.address())
    try:
        yield shim
    finally:
        shim.stop(0.0)
        await shim.close()


async def test_the_next_broker_takes_the_engine_over_and_orders_its_end(kit: Kit) -> None:
    broker = left_alone(kit)
    assert carriers(broker.lease) == [broker.engine], "it lives on"
    shim = await take_over(broker.address())
    assert shim.pid == broker.shim
    assert carriers(broker.lease) == [broker.engine], "the very same"
    shim.stop(0.0)
    report = await ended(shim)
    assert (report.signal, report.reason) == (signal.SIGKILL, EndReason.STOPPED)
    await shim.close()
    assert broker.nothing_left()


async def test_an_adopted_engine_that_ends_by_itself_is_reported_to_the_one_who_has_it(kit: Kit) -> None:
    broker = left_alone(kit)
    async with successor(broker) as shim:
        os.kill(broker.engine, signal.SIGSEGV)
        report = await ended(shim)
        assert (report.signal, report.reason) == (signal.SIGSEGV, EndReason.EXIT)
        assert not shim.idle, "it is not given out for another engine"


async def test_a_successor_hears_that_the_shim_was_killed(kit: Kit) -> None:
    broker = left_alone(kit)
    shim = await take_over(broker.address())
    os.kill(broker.shim, signal.SIGKILL)
    assert await shim.report() == Lost(None)
    await shim.close()
    await until(lambda: not carriers(broker.lease), "the engine to be dead")
    clear_up(kit, broker)


@pytest.mark.parametrize("grace_s", [0.0, SHORT_S])
def test_for_whom_nobody_comes_is_ended_when_the_grace_is_over(kit: Kit, grace_s: float) -> None:
    broker = left_alone(kit, STUBBORN, str(kit.root / "pids"), grace_s=grace_s)
    killed_s = time.monotonic()
    wait_until(broker.nothing_left, "everything of it to be gone")
    assert time.monotonic() - killed_s >= grace_s - 0.1, "it waited as long as it was told to"


def test_an_engine_that_was_not_called_ready_ends_with_its_broker(kit: Kit) -> None:
    broker = kit.broker(kit.order(SLEEP))
    broker.kill()
    wait_until(broker.nothing_left, "everything of it to be gone")


def test_an_engine_whose_end_was_ordered_ends_with_its_broker_though_it_was_ready(kit: Kit) -> None:
    pids = kit.root / "pids"
    order = kit.order(STUBBORN, str(pids))
    broker = kit.broker(order, kit.ready(order.lease.id), {"op": "stop", "grace_s": 60.0})
    wait_until(lambda: not broker.file.exists(), "the order to be heard")
    broker.kill()
    wait_until(broker.nothing_left, "everything of it to be gone, in less than the minute it was given")


def test_an_engine_that_ends_while_it_is_alone_leaves_nothing(kit: Kit) -> None:
    broker = left_alone(kit)
    os.kill(broker.engine, signal.SIGKILL)
    wait_until(broker.nothing_left, "shim, files and row to be gone")


def test_a_shim_that_is_told_to_go_while_it_is_alone_ends_its_engine(kit: Kit) -> None:
    broker = left_alone(kit, STUBBORN, str(kit.root / "pids"))
    os.kill(broker.shim, signal.SIGTERM)
    wait_until(broker.nothing_left, "shim, engine, files and row to be gone")


async def test_a_shim_that_stands_still_is_ended_too(kit: Kit) -> None:
    broker = left_alone(kit)
    address = broker.address()
    os.kill(broker.shim, signal.SIGSTOP)
    assert await end_by_signal(address.shim, patience_s=0.2)
    await until(lambda: not carriers(broker.lease), "the engine to be dead")
    assert await end_by_signal(address.shim), "harmless for a dead one"
    clear_up(kit, broker)


async def test_its_broker_may_let_go_of_a_ready_engine_and_it_ends(kit: Kit) -> None:
    shim = await Shim.spawn(kit.ledger)
    order = kit.order(SLEEP)
    shim.launch(order)
    assert isinstance(await shim.report(), Started)
    ready = kit.ready(order.lease.id)
    shim.ready(ready)
    await until(Path(ready.file).exists, "the file")
    await shim.close()
    assert await shim.report() == Lost(0), "it had not to be killed"
    assert not carriers(order.lease.id)


# -- who may come -----------------------------------------------------------------------------------------------------


async def test_what_leads_to_the_engine_is_private_and_no_secret_is_seen_elsewhere(kit: Kit) -> None:
    broker = left_alone(kit)
    record = broker.record()
    assert [path.stat().st_mode & 0o777 for path in (broker.file.parent, broker.file, broker.door)] == [
        *(0o700, 0o600, 0o600)
    ]
    assert len(record["secret"]) == 64
    for pid in (broker.shim, broker.engine):
        for told in ("cmdline", "environ"):
            assert record["secret"].encode() not in seen(pid, told)
    async with successor(broker):
        pass


@pytest.mark.parametrize("secret", ["", "0" * 64])
async def test_a_wrong_secret_is_refused_and_the_engine_waits_on(kit: Kit, secret: str) -> None:
    broker = left_alone(kit)
    assert await refusal(broker, secret=secret) is Refusal.SECRET
    async with successor(broker):
        assert alive(broker.engine)


async def test_a_wrong_secret_does_not_prolong_the_grace(kit: Kit) -> None:
    broker = left_alone(kit, grace_s=SHORT_S)
    began_s = time.monotonic()
    address = broker.address(secret="wrong")
    while not broker.nothing_left():
        with contextlib.suppress(TurnedAway):
            await take_over(address)
        await asyncio.sleep(0.02)
        assert time.monotonic() - began_s < 20 * SHORT_S


async def test_a_second_successor_is_refused(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.takeover.ANSWER_S", 0.3)
    broker = left_alone(kit)
    async with successor(broker):
        assert await refusal(broker) is Refusal.TAKEN
        assert alive(broker.engine)


async def test_of_several_that_come_at_once_one_gets_it(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.takeover.ANSWER_S", 0.3)
    broker = left_alone(kit)
    address = broker.address()
    outcomes = await asyncio.gather(*(take_over(address) for _ in range(5)), return_exceptions=True)
    winners = [outcome for outcome in outcomes if isinstance(outcome, Shim)]
    assert len(winners) == 1
    assert [outcome.why for outcome in outcomes if isinstance(outcome, TurnedAway)] == [Refusal.TAKEN] * 4
    winners[0].stop(0.0)
    await winners[0].close()


async def test_nobody_comes_while_the_broker_lives(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.takeover.ANSWER_S", 0.3)
    order = kit.order(SLEEP)
    broker = kit.broker(order, kit.ready(order.lease.id))
    await until(broker.file.exists, "the file")
    assert await refusal(broker) is Refusal.TAKEN
    broker.kill()
    async with successor(broker):
        pass


async def test_who_comes_the_moment_the_broker_is_killed_is_let_in_as_soon_as_that_is_known(kit: Kit) -> None:
    order = kit.order(SLEEP)
    broker = kit.broker(order, kit.ready(order.lease.id))
    await until(broker.file.exists, "the file")
    coming = asyncio.create_task(take_over(broker.address()))
    await asyncio.sleep(0)
    broker.kill()
    shim = await coming
    shim.stop(0.0)
    await shim.close()


async def test_callers_that_say_nothing_or_nonsense_keep_nobody_out(kit: Kit) -> None:
    broker = left_alone(kit)
    with contextlib.ExitStack() as closing:
        callers = [closing.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3 * shim_door._MOST_VISITORS)]
        for number, caller in enumerate(callers):
            caller.connect(str(broker.door))
            if number % 3 == 1:
                caller.sendall(b"{" * 2 * shim_door._LONGEST_HELLO)
            elif number % 3 == 2:
                caller.sendall(b"[1, 2]\n")
        async with successor(broker):
            assert alive(broker.engine)


# -- versions ---------------------------------------------------------------------------------------------------------


async def test_a_newer_version_is_refused_and_told_what_is_spoken(kit: Kit) -> None:
    broker = left_alone(kit)
    assert await refusal(broker, protocol=PROTOCOL + 1) is Refusal.VERSION
    assert await refusal(broker, protocol=PROTOCOL - 2) is Refusal.VERSION
    reader, writer = await asyncio.open_unix_connection(str(broker.door))
    hello = {"op": "adopt", "protocol": PROTOCOL + 1, "secret": broker.record()["secret"]}
    writer.write(json.dumps(hello).encode() + b"\n")
    assert json.loads(await reader.readline()) == {"event": "turned away", "why": "version", "protocol": PROTOCOL}
    writer.close()
    async with successor(broker):
        pass


def dialogue(version: int) -> list[tuple[str, dict[str, Any]]]:
    """(who, what), as recorded."""
    lines = (DIALOGUES / f"takeover_{version}.jsonl").read_text().splitlines()
    return [next(iter(json.loads(line).items())) for line in lines]


async def test_a_broker_of_the_version_before_is_understood_word_by_word(kit: Kit) -> None:
    broker = left_alone(kit)
    reader, writer = await asyncio.open_unix_connection(str(broker.door))
    for who, what in dialogue(PROTOCOL - 1):
        if who == "visitor":
            said = what | {"secret": broker.record()["secret"]} if "secret" in what else what
            writer.write(json.dumps(said).encode() + b"\n")
        else:
            heard = json.loads(await reader.readline())
            assert heard | {"max_rss_bytes": 0} == what | {"max_rss_bytes": 0}
    writer.close()
    await until(broker.nothing_left, "everything of it to be gone")


async def test_a_shim_of_the_version_before_is_spoken_to_word_by_word(kit: Kit) -> None:
    """It would not understand to be told that its engine is ready."""
    broker = left_alone(kit)
    address = broker.address()
    heard: list[dict[str, Any]] = []
    expected = [what for who, what in dialogue(PROTOCOL - 1) if who == "visitor"]

    async def old_shim(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for who, what in dialogue(PROTOCOL - 1):
            if who == "visitor":
                heard.append(json.loads(await reader.readline()))
            else:
                writer.write(json.dumps(what).encode() + b"\n")
        writer.close()

    path = kit.root / "old.sock"
    async with await asyncio.start_unix_server(old_shim, str(path)):
        shim = await take_over(broker.address(socket=path, protocol=PROTOCOL - 1))
        shim.ready(kit.ready(broker.lease))
        shim.stop(0.0)
        assert isinstance(await shim.report(), Exited)
        shim.let_go()
    assert heard == [expected[0] | {"secret": address.secret}, expected[1]]
    async with successor(broker):
        pass


# -- one broker after the other ---------------------------------------------------------------------------------------


async def test_a_successor_that_dies_before_it_has_called_the_engine_ready_counts_for_nothing(kit: Kit) -> None:
    broker = left_alone(kit, grace_s=3 * SHORT_S)
    killed_s = time.monotonic()
    address = broker.address()
    while time.monotonic() < killed_s + 2 * SHORT_S:
        (await take_over(address)).let_go()
    assert alive(broker.engine), "and the next may come"
    await until(broker.nothing_left, "its grace to be over, which began with its broker's death")


async def test_one_that_dies_after_it_leaves_the_engine_to_a_third_with_another_secret(kit: Kit) -> None:
    broker = left_alone(kit, grace_s=SHORT_S)
    first = broker.record()
    shim = await take_over(broker.address())
    shim.ready(kit.ready(broker.lease, broker="second"))
    await until(lambda: broker.record() != first, "the file to be written anew")
    shim.let_go()
    assert broker.record()["told"] == {"broker": "second"}
    assert await refusal(broker, secret=first["secret"]) is Refusal.SECRET
    await passes(2 * SHORT_S)
    assert alive(broker.engine), "longer than the first broker had wanted it to wait"
    async with successor(broker):
        pass


async def test_one_of_the_version_before_has_called_it_ready_by_adopting_it(kit: Kit) -> None:
    broker = left_alone(kit, grace_s=2 * SHORT_S)
    shim = await take_over(broker.address(protocol=PROTOCOL - 1))
    await passes(1.5 * SHORT_S)
    shim.let_go()
    await passes(SHORT_S)
    assert alive(broker.engine), "its grace began anew"
    await until(broker.nothing_left, "everything of it to be gone")


async def test_where_the_file_cannot_be_written_that_is_said_and_the_engine_ends_with_its_broker(kit: Kit) -> None:
    order = kit.order(SLEEP)
    ready = {"op": "ready", "file": "/nowhere/a.json", "socket": str(kit.root / "a.sock"), "grace_s": 30.0, "told": {}}
    broker = kit.broker(order, ready)
    said = kit.root / "broker.err"
    await until(lambda: "no broker will be able to adopt its engine" in said.read_text(), "it to be said")
    assert not (kit.root / "a.sock").exists()
    assert alive(broker.engine)
    broker.kill()
    await until(broker.nothing_left, "everything of it to be gone")


async def passes(seconds: float) -> None:
    """Until the shims' clock has gone on by so much."""
    since_s = time.monotonic()
    await until(lambda: time.monotonic() > since_s + seconds, "time to pass")


async def refusal(broker: Predecessor, **changes: Any) -> Refusal:
    with pytest.raises(TurnedAway) as turned_away:
        await take_over(broker.address(**changes))
    return turned_away.value.why


def clear_up(kit: Kit, broker: Predecessor) -> None:
    """What a shim that was killed could not: the row is the keeper's to take out, the files are the next broker's."""
    assert [row.lease_id for row in kit.rows()] == [broker.lease]
    assert broker.file.exists()
    with NodeLedger(kit.ledger) as books:
        books.remove(broker.lease, 1, 1)
    broker.file.unlink()
    broker.door.unlink()


def seen(pid: int, what: str) -> bytes:
    """What everybody may read of a process."""
    return Path(f"/proc/{pid}/{what}").read_bytes()
