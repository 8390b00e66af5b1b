"""`x_budget_s`: the engine's time is bounded, waiting and loading are not its time."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from coordinator import streaming
from tests.integration.coordinator.support import EVENTS_HEAD, Asked, chunk, reply, serving
from tests.support import until

BUDGET_S = 0.2


async def _think(asked: Asked, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def _talk(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A stream without end, whose events come in halves."""
    writer.write(EVENTS_HEAD)
    while True:
        writer.write(chunk(b"data: 1"))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(chunk(b"\n\n"))
        await writer.drain()


async def test_an_answer_over_its_budget_is_a_504_and_the_engine_stops(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = _think
        response = await broker.chat(x_budget_s=BUDGET_S)
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (504, "budget_exceeded", "x_budget_s")
        assert "0.2 s" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
        await until(lambda: broker.engine.hung_up == 1, "the engine to be told")
        assert broker.pool.open_tickets == [], "the engine's place is free"


async def test_a_stream_over_its_budget_ends_with_an_error_event_of_its_own(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = _talk
        response = await broker.chat(stream=True, x_budget_s=BUDGET_S)
        assert response.status == 200
        *events, error, end = (await response.read()).split(b"\n\n")
        assert end == b""
        assert set(filter(None, events)) == {b"data: 1"}
        assert json.loads(error[6:])["error"]["code"] == "budget_exceeded"
        await until(lambda: broker.engine.hung_up == 1, "the engine to be told")
        assert broker.pool.open_tickets == []


async def test_an_answer_within_its_budget_is_untouched(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = reply({"n": 1})
        response = await broker.chat(x_budget_s=60)
        assert await response.json() == {"n": 1}
        assert broker.engine.asked[0].json == {"model": "robin", "messages": []}


async def test_waiting_for_the_engine_costs_nothing_of_the_budget(
    tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "COMMENT_EVERY_S", 0.05)
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        broker.engine.script = reply({"n": 1})
        asking = asyncio.ensure_future(broker.chat(x_budget_s=BUDGET_S))
        await until(lambda: broker.pool.tickets, "the ticket")
        waits_until_s = time.monotonic() + 2 * BUDGET_S
        await until(lambda: time.monotonic() > waits_until_s or asking.done(), "twice the budget to pass")
        assert not asking.done()
        broker.pool.settle()
        assert (await asking).status == 200

    async with serving(tmp_dir) as broker:
        broker.engine.script = _think
        response = await broker.http.post(
            f"{broker.url}/upstream/robin/completion", json={"prompt": "x"}, headers={"X-Boss-Budget-S": f"{BUDGET_S}"}
        )
        assert (response.status, (await response.json())["error"]["code"]) == (504, "budget_exceeded")
        await until(lambda: broker.engine.hung_up == 1, "the engine to be told")


@pytest.mark.parametrize("value", [0, -1, "much", 10**9])
async def test_a_budget_that_is_none_is_refused(tmp_dir: Path, value: object) -> None:
    async with serving(tmp_dir) as broker:
        response = await broker.chat(x_budget_s=value)
        assert (response.status, (await response.json())["error"]["param"]) == (400, "x_budget_s")
        assert not broker.pool.tickets
