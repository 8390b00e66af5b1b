"""Recording: every listener gets the requests that came since, with numbers for names, and is told what was lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from inference.errors import TooManyRecordings
from inference.events import Purpose, Ticket
from inference.simulation import recorder as recorder_module
from inference.simulation.recorder import Listener, Recorder


def ticket(name: str, client: str | None = None, **more: Any) -> Ticket:
    return Ticket(name, "a", 10, 100.0, client_id=client, **more)


async def told(listener: Listener) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await listener.lines(0.01)).splitlines()]


async def test_a_request_is_told_when_its_end_is_known() -> None:
    recorder = Recorder()
    listener = recorder.listen(100.0)
    recorder.arrived(ticket("t1", purpose=Purpose.PEEK, stay_warm_s=5.0), 101.5)
    assert await told(listener) == []
    recorder.served("t1", 0.5, 103.0)
    assert await told(listener) == [
        {"at_s": 1.5, "model": "a", "priority": 10, "purpose": "peek", "service_s": 0.5, "stay_warm_s": 5.0}
    ]
    assert await told(listener) == []


async def test_who_gave_up_and_who_was_refused_are_told_apart() -> None:
    recorder = Recorder()
    listener = recorder.listen(100.0)
    for name in ("t1", "t2"):
        recorder.arrived(ticket(name), 101.0)
    recorder.refused("t1")
    recorder.left("t1", 104.0)  # it is closed as well
    recorder.left("t2", 104.0)
    assert await told(listener) == [
        {"at_s": 1.0, "model": "a", "priority": 10},
        {"at_s": 1.0, "model": "a", "priority": 10, "left_s": 3.0},
    ]


async def test_names_become_numbers_unless_they_are_wanted() -> None:
    recorder = Recorder()
    discreet, curious = recorder.listen(100.0), recorder.listen(100.0, names=True)
    for number, (client, session) in enumerate([("ann", "s"), ("bob", "s"), ("ann", "ann"), (None, None)]):
        recorder.arrived(ticket(f"t{number}", client, session_id=session), 101.0)
        recorder.served(f"t{number}", 1.0, 102.0)
    lines = await told(discreet)
    assert [(line.get("client"), line.get("session")) for line in lines] == [
        ("1", "2"), ("3", "2"), ("1", "4"), (None, None)
    ]  # fmt: skip
    assert "ann" not in json.dumps(lines)
    assert [line.get("client") for line in await told(curious)] == ["ann", "bob", "ann", None]


async def test_names_long_unseen_are_forgotten_and_their_numbers_never_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_NAMES", 3)
    recorder = Recorder()
    listener = recorder.listen(100.0)
    for number, client in enumerate(["ann", "bob", "cid", "ann", "dan", "ann", "bob", "cid", "eve"]):
        recorder.arrived(ticket(f"t{number}", client), 101.0)
        recorder.served(f"t{number}", 1.0, 102.0)
        assert len(listener._numbers) <= 3
    assert [line["client"] for line in await told(listener)] == ["1", "2", "3", "1", "4", "1", "5", "6", "7"]


async def test_what_came_before_is_not_told() -> None:
    recorder = Recorder()
    early = recorder.listen(100.0)
    recorder.arrived(ticket("t1"), 101.0)
    late = recorder.listen(102.0)
    recorder.served("t1", 1.0, 103.0)
    assert len(await told(early)) == 1
    assert await told(late) == []


async def test_so_many_may_listen_at_once_and_another_when_one_has_gone() -> None:
    recorder = Recorder()
    listeners = [recorder.listen(100.0) for _ in range(recorder_module.MOST_LISTENERS)]
    with pytest.raises(TooManyRecordings, match="16 recordings"):
        recorder.listen(100.0)
    listeners[3].close()
    recorder.listen(100.0)


async def test_nothing_is_kept_when_nobody_listens() -> None:
    recorder = Recorder()
    recorder.arrived(ticket("t1"), 101.0)
    assert recorder._open == {}
    listener = recorder.listen(100.0)
    recorder.arrived(ticket("t2"), 101.0)
    assert list(recorder._open) == ["t2"]
    listener.close()
    listener.close()
    assert recorder._open == {}
    recorder.served("t2", 1.0, 102.0)


async def test_a_slow_listener_is_told_how_much_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_LINES", 3)
    recorder = Recorder()
    slow = recorder.listen(100.0)
    for number in range(8):
        recorder.arrived(ticket(f"t{number}"), 101.0 + number)
        recorder.served(f"t{number}", 1.0, 110.0)
    lines = await told(slow)
    assert [line.get("at_s") for line in lines] == [1.0, 2.0, 3.0, None]
    assert lines[-1] == {"lost": 5}
    assert await told(slow) == []


async def test_a_listener_is_woken() -> None:
    recorder = Recorder()
    listener = recorder.listen(100.0)
    waiting = asyncio.create_task(listener.lines(30.0))
    await asyncio.sleep(0)
    recorder.arrived(ticket("t1"), 101.0)
    recorder.served("t1", 1.0, 102.0)
    assert json.loads(await asyncio.wait_for(waiting, 5))["service_s"] == 1.0
