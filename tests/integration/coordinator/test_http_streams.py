"""Streams that wait, streams that break, and callers that hang up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator import streaming
from inference import errors
from inference.admission import Progress
from inference.slot_state import SlotState
from tests.integration.coordinator.support import EVENTS_HEAD, Asked, Serving, chunk, events, reply, serving
from tests.support import until


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments after 50 ms instead of a second."""
    monkeypatch.setattr(streaming, "COMMENT_EVERY_S", 0.05)


async def _lines(response: aiohttp.ClientResponse, until_line: bytes) -> list[bytes]:
    lines: list[bytes] = []
    while not lines or until_line not in lines[-1]:
        line = await asyncio.wait_for(response.content.readline(), 10)
        assert line, f"the stream ended without {until_line!r}: {lines}"
        lines.append(line)
    return lines


@pytest.mark.usefixtures("_impatient")
async def test_a_stream_that_waits_is_told_its_place_and_its_load_then_gets_the_answer(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        broker.engine.script = events(b'{"a":1}', b"[DONE]")
        response = await broker.chat(stream=True)
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["x-boss-model"] == "robin"
        await _lines(response, b": queued 3 of 7")
        broker.pool.progress = Progress(1, 7, SlotState.LOADING, 0.4)
        await _lines(response, b": loading 40%")
        broker.pool.progress = Progress(1, 7, SlotState.LOADING, None)
        await _lines(response, b": loading\n")
        broker.pool.settle(load_s=0.25)
        late = await _lines(response, b"data:")
        told = dict(line[2:].strip().split(b": ") for line in late if line.startswith(b": x-boss") or b"req-" in line)
        assert told[b"x-boss-slot"] == b"s1"
        assert told[b"x-boss-load-ms"] == b"250"
        assert int(told[b"x-boss-queue-ms"]) > 0
        assert told[b"x-request-id"] == response.headers["x-request-id"].encode()
        assert late[-1] == b'data: {"a":1}\n'
        assert await response.read() == b"\ndata: [DONE]\n\n"


async def test_a_stream_that_need_not_wait_has_no_comments(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = events(b"1")
        assert await (await broker.chat(stream=True)).read() == b"data: 1\n\n"


@pytest.mark.usefixtures("_impatient")
async def test_a_whole_answer_is_held_without_a_byte(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        asking = asyncio.ensure_future(broker.chat())
        await until(lambda: broker.pool.tickets, "the ticket")
        await asyncio.sleep(0.2)  # four comments' time: nothing may come, and nothing else can be waited for
        assert not asking.done()
        broker.pool.settle()
        assert (await asking).status == 200


@pytest.mark.usefixtures("_impatient")
async def test_a_stream_refused_while_it_waits_ends_with_an_error_event(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        response = await broker.chat(stream=True)
        await _lines(response, b": queued")
        broker.pool.admissions[0].refuse(errors.QueueTimeout("waited 300 s; queue.max_wait_s is 300"))
        rest = await _lines(response, b"data:")
        error = json.loads(rest[-1][6:])["error"]
        assert (error["code"], error["type"]) == ("queue_timeout", "server_error")
        assert await response.read() == b"\n"


@pytest.mark.usefixtures("_impatient")
async def test_an_engines_refusal_after_the_headers_left_is_an_event(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        error = {"message": "too long", "type": "exceed_context_size_error", "code": 400}
        broker.engine.script = reply({"error": error}, status="400 Bad Request")
        response = await broker.chat(stream=True)
        await _lines(response, b": queued")
        broker.pool.settle()
        event = json.loads((await _lines(response, b"data:"))[-1][6:])
        assert event["error"]["code"] == "context_length_exceeded"


async def _broken_stream(broker: Serving, first: bytes) -> bytes:
    async def die(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS_HEAD + chunk(first))
        await writer.drain()
        await asyncio.sleep(0.05)  # so that the first chunk travels alone
        writer.close()

    broker.engine.script = die
    response = await broker.chat(stream=True)
    assert response.status == 200
    return await response.read()


async def test_a_stream_whose_engine_dies_ends_with_an_error_event(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        whole, event = (await _broken_stream(broker, b"data: 1\n\n")).split(b"data: 1\n\n")
        assert whole == b""
        assert json.loads(event[6:])["error"]["code"] == "engine_died"


async def test_the_error_event_stands_apart_from_the_event_that_broke(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        body = await _broken_stream(broker, b'data: {"half')
        half, event, end = body.split(b"\n\n")
        assert (half, end) == (b'data: {"half', b"")
        assert json.loads(event[6:])["error"]["code"] == "engine_died"


async def test_a_stream_whose_engine_dies_before_the_first_byte_is_a_proper_502(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:

        async def die(asked: Asked, writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS_HEAD)
            await writer.drain()
            writer.close()

        broker.engine.script = die
        response = await broker.chat(stream=True)
        assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_died")


async def _hang_up_on(broker: Serving, **body: Any) -> asyncio.StreamWriter:
    """A request sent by hand, so that the connection can be cut at will."""
    host, port = broker.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({"model": "robin", "messages": []} | body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    await writer.drain()
    return writer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_who_hangs_up_leaves_the_queue(tmp_dir: Path, stream: bool) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        caller = await _hang_up_on(broker, stream=stream)
        await until(lambda: broker.pool.tickets, "the ticket")
        caller.close()
        await until(lambda: broker.pool.closed, "the ticket to leave", timeout_s=1)
        assert not broker.pool.admissions[0].was_granted
        assert not broker.engine.asked


async def test_a_caller_who_hangs_up_stops_the_engine_before_its_first_byte(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:

        async def think(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(60)

        broker.engine.script = think
        caller = await _hang_up_on(broker)
        await until(lambda: broker.engine.asked, "the engine to be asked")
        caller.close()
        await until(lambda: broker.engine.hung_up == 1, "the engine to be told", timeout_s=1)
        await until(lambda: broker.pool.closed, "the ticket to be closed", timeout_s=1)


async def test_a_caller_who_hangs_up_stops_a_stream(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:

        async def talk(asked: Asked, writer: asyncio.StreamWriter) -> None:
            writer.write(EVENTS_HEAD)
            while True:
                writer.write(chunk(b"data: 1\n\n"))
                await writer.drain()
                await asyncio.sleep(0.01)

        broker.engine.script = talk
        response = await broker.chat(stream=True)
        await response.content.readline()
        response.close()
        await until(lambda: broker.engine.hung_up == 1, "the engine to be told", timeout_s=1)
        await until(lambda: broker.pool.closed, "the ticket to be closed", timeout_s=1)


async def test_a_caller_who_hangs_up_in_the_middle_of_the_body_never_queues(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        host, port = broker.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode())
        writer.write(b"Content-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await broker.http.get(f"{broker.url}/health")).status == 200
        assert not broker.pool.tickets


async def test_the_next_request_on_the_same_connection_is_not_confused_by_a_watcher(tmp_dir: Path) -> None:
    """A request that lasts is watched; the end of its answer must not look like a hang-up to it or to the next."""
    async with serving(tmp_dir) as broker:

        async def slow(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.1)
            await reply({"n": 1})(asked, writer)

        broker.engine.script = slow
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as one:
            for _ in range(3):
                async with one.post(f"{broker.url}/v1/completions", json={"model": "robin"}) as response:
                    assert await response.json() == {"n": 1}
        assert broker.engine.hung_up == 0


async def test_requests_still_waiting_when_the_server_ends_are_told(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        asking = asyncio.ensure_future(broker.chat())
        await until(lambda: broker.pool.tickets, "the ticket")
        for task in asyncio.all_tasks():
            if "run_asgi" in repr(task):
                task.cancel()
        response = await asking
        assert (response.status, (await response.json())["error"]["code"]) == (503, "shutting_down")
