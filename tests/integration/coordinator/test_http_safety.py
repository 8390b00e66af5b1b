"""What the server refuses before anything looks at it, and what it never tells."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from coordinator import logs, wire
from tests.integration.coordinator.support import EVENTS_HEAD, Asked, Serving, chunk, serving
from tests.support import until

BODY = {"model": "robin", "messages": []}


async def _code(broker: Serving, method: str = "POST", path: str = "/v1/chat/completions", **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await broker.http.request(
        method, broker.url + path, json=BODY if method == "POST" else None, headers=named
    )
    if response.status == 200:
        return "ok"
    return str((await response.json())["error"]["code"])


async def test_a_foreign_host_name_is_refused_without_a_key(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        assert await _code(broker, Host="rebound.attacker.example") == "host_not_allowed"
        assert await _code(broker, "GET", "/v1/models", Host="rebound.attacker.example:80") == "host_not_allowed"
        assert await _code(broker, Host="localhost:1234") == "ok"
        assert await _code(broker, Host="[::1]:1234") == "ok"
        assert await _code(broker, Host="BOX.example") == "ok"
        assert len(broker.pool.tickets) == 3


async def test_with_a_key_the_key_decides(tmp_dir: Path) -> None:
    async with serving(tmp_dir, api_key="correct horse") as broker:
        assert await _code(broker) == "invalid_api_key"
        assert await _code(broker, Authorization="Bearer wrong") == "invalid_api_key"
        assert await _code(broker, Authorization="Basic correct horse") == "invalid_api_key"
        assert await _code(broker, "GET", "/v1/models") == "invalid_api_key"
        assert await _code(broker, "GET", "/docs") == "invalid_api_key"
        assert await _code(broker, "GET", "/health") == "ok"
        assert await _code(broker, Authorization="Bearer correct horse", Host="any.example") == "ok"
        assert await _code(broker, Authorization="bearer correct horse", Origin="https://ui.example") == "ok"
        assert broker.engine.asked[0].headers["authorization"] == "Bearer engine-key"


async def test_a_page_of_another_origin_changes_nothing(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        assert await _code(broker, Origin="https://attacker.example") == "cross_site_refused"
        assert await _code(broker, Origin="null") == "cross_site_refused"
        assert await _code(broker, Sec_Fetch_Site="cross-site") == "cross_site_refused"
        assert await _code(broker, Sec_Fetch_Site="same-site") == "cross_site_refused"
        load = "/api/v1/models/robin/load"
        assert await _code(broker, "POST", load, Origin="https://attacker.example") == "cross_site_refused"
        assert not broker.pool.tickets
        assert await _code(broker, Origin=broker.url, Sec_Fetch_Site="same-origin") == "ok"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_body_must_say_it_is_json(tmp_dir: Path, kind: str) -> None:
    async with serving(tmp_dir) as broker:
        for path in ("/v1/chat/completions", "/api/v1/models/robin/load", "/upstream/robin/infill"):
            response = await broker.http.post(
                broker.url + path, data=b'{"model":"robin"}', headers={"Content-Type": kind}
            )
            assert (response.status, (await response.json())["error"]["code"]) == (415, "unsupported_media_type")
        assert not broker.pool.tickets


async def _raw(broker: Serving, request: bytes) -> bytes:
    host, port = broker.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(65536), 5)
    finally:
        writer.close()


async def test_headers_that_two_readers_could_read_differently_are_refused(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        answer = await _raw(broker, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: attacker.example\r\n\r\n")
        assert b" 400 " in answer
        assert b"more than once" in answer


@pytest.mark.parametrize("padding", [b"x: " + b"y" * 300_000 + b"\r\n", b"x: y\r\n" * 200])
async def test_oversized_headers_are_refused_in_the_usual_shape(tmp_dir: Path, padding: bytes) -> None:
    async with serving(tmp_dir) as broker:
        answer = await _raw(broker, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + padding + b"\r\n")
        assert b" 431 " in answer
        assert b"headers_too_large" in answer


async def test_headers_that_never_end_are_cut_off(tmp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEAD_DEADLINE_S", 0.1)
    async with serving(tmp_dir) as broker:
        assert await _raw(broker, b"GET /health HTTP/1.1\r\nHost: local") == b""


async def test_a_caller_who_does_not_read_loses_the_place_at_the_engine(
    tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "READ_DEADLINE_S", 0.1)

    async def endless(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS_HEAD)
        with suppress(ConnectionError):
            while True:
                writer.write(chunk(b"data: " + b"x" * 65536 + b"\n\n"))
                await writer.drain()

    async with serving(tmp_dir) as broker:
        broker.engine.script = endless
        body = b'{"model": "robin", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        host, port = broker.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as caller:
            caller.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: broker.pool.closed, "the place at the engine is free again")


async def test_what_is_not_http_is_refused_in_the_usual_shape(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        answer = await _raw(broker, b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert b" 400 " in answer
        assert b"invalid_request" in answer


async def test_an_unforeseen_error_tells_the_caller_nothing_but_its_number(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:

        def submit(*_: object, **__: object) -> None:
            raise RuntimeError("/secret/path is broken")

        broker.pool.submit = submit  # type: ignore[method-assign]
        response = await broker.chat()
        text = await response.text()
        assert (response.status, (await response.json())["error"]["code"]) == (500, "internal_error")
        assert "secret" not in text
        assert "x-request-id" in text


async def test_no_prompt_and_no_key_reaches_the_log(tmp_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every way a request can go wrong, with canaries in it, at the most talkative level."""
    before = logging.getLogger().handlers[:], logging.getLogger().level
    logs.configure("debug")
    try:
        async with serving(tmp_dir, api_key="canary-key") as broker:
            key = {"Authorization": "Bearer canary-key"}
            bad = {"Authorization": "Bearer canary-wrong"}
            for body in (BODY | {"prompt": "canary-prompt"}, {"model": "canary-model"}, {"x_canary": 1}):
                for headers in (key, bad):
                    await broker.http.post(f"{broker.url}/v1/completions", json=body, headers=headers)
            json_headers = key | {"Content-Type": "application/json"}
            await broker.http.post(f"{broker.url}/v1/completions", data=b'{"canary-prompt', headers=json_headers)

            def submit(*_: object, **__: object) -> None:
                raise RuntimeError("unforeseen")

            broker.pool.submit = submit  # type: ignore[method-assign]
            await broker.http.post(f"{broker.url}/v1/completions", json=BODY | {"p": "canary-p"}, headers=key)
    finally:
        logging.getLogger().handlers[:], level = before
        logging.getLogger().setLevel(level)
    logged = capfd.readouterr().err
    assert "request_failed" in logged
    assert '"request"' in logged, "the access lines are there at this level"
    assert "canary" not in logged
