"""Inference requests over a real socket: what the engine gets, what the caller gets."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import extensions
from inference import errors
from inference.events import Purpose
from inference.proxy import EngineClient
from tests.integration.coordinator.support import a_model, events, reply, serving


async def test_an_answer_comes_back_with_our_headers(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = reply({"model": "robin", "choices": [1]})
        response = await broker.chat()
        assert response.status == 200
        assert await response.json() == {"model": "robin", "choices": [1]}
        assert response.headers["x-boss-model"] == "robin"
        assert response.headers["x-boss-slot"] == "s1"
        assert response.headers["x-boss-node"] == "here"
        assert response.headers["x-boss-queue-ms"].isdigit()
        assert response.headers["x-boss-load-ms"] == "0"
        assert response.headers["x-request-id"].startswith("req-")
        assert "engine;dur=" in response.headers["server-timing"]


async def test_the_engines_own_headers_stay_with_the_engine(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        response = await broker.chat()
        assert "access-control-allow-origin" not in response.headers
        assert "server" not in response.headers


async def test_bytes_that_need_no_change_go_through_unchanged(tmp_dir: Path) -> None:
    body = b'{ "model":"robin",  "messages":[ ],"temperature":0.10 }'
    async with serving(tmp_dir) as broker:
        headers = {"Content-Type": "application/json", "Authorization": "Bearer callers-own"}
        await broker.http.post(f"{broker.url}/v1/chat/completions", data=body, headers=headers)
        assert broker.engine.asked[0].body == body
        assert broker.engine.asked[0].headers["authorization"] == "Bearer engine-key"


async def test_an_alias_and_extension_fields_do_not_reach_the_engine(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        await broker.chat(model="gpt-4", x_client_id="kitchen", x_priority="high", x_stay_warm_s=5, seed=7)
        assert broker.engine.asked[0].json == {"model": "robin", "messages": [], "seed": 7}
        ticket = broker.pool.tickets[0]
        assert (ticket.model_id, ticket.client_id, ticket.priority, ticket.stay_warm_s) == ("robin", "kitchen", 5, 5.0)


async def test_extension_headers_do_the_same(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        headers = {"X-Boss-Client-Id": "kitchen", "X-Boss-Priority": "17"}
        await broker.http.post(f"{broker.url}/v1/completions", json={"model": "robin"}, headers=headers)
        assert (broker.pool.tickets[0].client_id, broker.pool.tickets[0].priority) == ("kitchen", 17)


@pytest.mark.parametrize("extra", [{"x_prio": 1}, {"x_priority": 5000}, {"x_stay_warm_s": -1}, {"x_client_id": 3}])
async def test_an_extension_that_cannot_be_honoured_is_refused(tmp_dir: Path, extra: dict[str, object]) -> None:
    async with serving(tmp_dir) as broker:
        response = await broker.chat(**extra)
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (400, "invalid_request", next(iter(extra)))
        assert not broker.pool.tickets


@pytest.mark.parametrize(
    ("path", "purpose"),
    [
        ("/v1/chat/completions", Purpose.INFER),
        ("/v1/completions", Purpose.INFER),
        ("/v1/embeddings", Purpose.INFER),
        ("/v1/rerank", Purpose.INFER),
        ("/tokenize", Purpose.PEEK),
        ("/detokenize", Purpose.PEEK),
        ("/apply-template", Purpose.PEEK),
    ],
)
async def test_every_endpoint_reaches_its_namesake_at_the_engine(tmp_dir: Path, path: str, purpose: Purpose) -> None:
    async with serving(tmp_dir) as broker:
        response = await broker.http.post(f"{broker.url}{path}", json={"model": "wren", "input": "x"})
        assert response.status == 200
        assert (broker.engine.asked[0].method, broker.engine.asked[0].path) == ("POST", path)
        assert broker.pool.tickets[0].purpose is purpose


async def test_the_model_may_stand_in_the_query(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        await broker.http.post(f"{broker.url}/tokenize?model=wren", json={"content": "x"})
        assert broker.pool.tickets[0].model_id == "wren"
        assert broker.engine.asked[0].json == {"content": "x", "model": "wren"}


async def test_without_a_model_the_default_serves(tmp_dir: Path) -> None:
    async with serving(tmp_dir, default="wren") as broker:
        await broker.http.post(f"{broker.url}/v1/completions", json={"prompt": "x"})
        assert broker.engine.asked[0].json == {"prompt": "x", "model": "wren"}


async def test_without_a_model_and_a_default_the_setting_is_named(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        response = await broker.http.post(f"{broker.url}/v1/completions", json={"prompt": "x"})
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "model")
        assert "default_model" in error["message"]


@pytest.mark.parametrize("model", [7, "", "x" * 300, ["robin"], {"a": 1}])
async def test_a_model_that_is_no_name_is_refused(tmp_dir: Path, model: object) -> None:
    async with serving(tmp_dir) as broker:
        response = await broker.chat(model=model)
        assert (response.status, (await response.json())["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model": "robin", }', ["line 1 column 18", "character 17"]),
        (b"", ["empty"]),
        (b"[1]", ["array", "object"]),
        (b'"robin"', ["string"]),
        (b'{"model": "\xff"}', ["not valid JSON"]),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, ["not valid JSON"]),
        (b'{"temperature": NaN}', ["not valid JSON"]),
    ],
)
async def test_bad_json_is_told_where(tmp_dir: Path, body: bytes, words: list[str]) -> None:
    async with serving(tmp_dir) as broker:
        headers = {"Content-Type": "application/json"}
        response = await broker.http.post(f"{broker.url}/v1/chat/completions", data=body, headers=headers)
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, "invalid_json")
        assert all(word in error["message"] for word in words), error["message"]


async def test_a_refusal_carries_its_numbers_and_when_to_come_back(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.refusal = errors.QueueFull("512 requests wait already; queue.max_waiting is 512", retry_after_s=900)
        response = await broker.chat()
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (429, "queue_full", None)
        assert "512" in error["message"]
        assert response.headers["retry-after"] == "60"
        assert "x-should-retry" not in response.headers


async def test_a_refusal_that_will_stay_one_says_not_to_come_back(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.refusal = errors.LoadFailed("the engine ended with status 1")
        response = await broker.chat()
        assert (response.status, (await response.json())["error"]["code"]) == (502, "load_failed")
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers


async def test_an_unknown_and_a_broken_model_are_told_apart(tmp_dir: Path) -> None:
    models = (a_model("robin"), a_model("wreck", problem="the file ends after 100 of 2000 bytes"))
    async with serving(tmp_dir, models=models) as broker:
        unknown, broken = await broker.chat(model="no-such"), await broker.chat(model="wreck")
        assert (unknown.status, (await unknown.json())["error"]["code"]) == (404, "model_not_found")
        assert (broken.status, (await broken.json())["error"]["code"]) == (503, "model_broken")


async def test_the_engines_refusal_comes_back_in_our_shape(tmp_dir: Path) -> None:
    error = {"code": 400, "message": "request (900 tokens) exceeds 512", "type": "exceed_context_size_error"}
    async with serving(tmp_dir) as broker:
        broker.engine.script = reply({"error": error}, status="400 Bad Request")
        response = await broker.chat()
        assert response.status == 400
        assert (await response.json())["error"] == {
            "message": "request (900 tokens) exceeds 512",
            "type": "exceed_context_size_error",
            "code": "context_length_exceeded",
            "param": None,
        }
        assert response.headers["x-boss-model"] == "robin"


async def test_what_an_engine_will_not_do_is_not_asked_again(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        error = {"code": 501, "message": "no embeddings here", "type": "not_supported_error"}
        broker.engine.script = reply({"error": error}, status="501 Not Implemented")
        response = await broker.chat()
        assert (response.status, (await response.json())["error"]["code"]) == (501, "not_supported")
        assert response.headers["x-should-retry"] == "false"
        broker.engine.script = reply({"choices": []})
        assert "x-should-retry" not in (await broker.chat()).headers


async def test_an_engine_that_dies_before_it_answers_is_a_502(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:

        async def die(asked: object, writer: object) -> None:
            raise ConnectionError

        broker.engine.script = die
        response = await broker.chat()
        assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_died")
        assert len(broker.engine.asked) == 1, "it may have worked on the request, which is not repeated"


async def test_an_engine_that_dies_in_the_middle_of_a_whole_answer_is_a_502(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:

        async def half(asked: object, writer: object) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            writer.close()

        broker.engine.script = half
        response = await broker.chat()
        assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_died")


async def test_a_large_body_comes_through_and_a_larger_one_is_refused(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:

        def prompt(size: int) -> dict[str, Any]:
            body = json.dumps({"model": "robin", "prompt": "x" * size}).encode()
            return {"data": io.BytesIO(body), "headers": {"Content-Type": "application/json"}}

        fits = await broker.http.post(f"{broker.url}/v1/completions", **prompt(3 << 20))
        assert fits.status == 200
        assert len(broker.engine.asked[0].json["prompt"]) == 3 << 20
        large = await broker.http.post(f"{broker.url}/v1/completions", **prompt(5 << 20))
        assert (large.status, (await large.json())["error"]["code"]) == (413, "request_too_large")


async def test_a_large_body_in_pieces_of_unknown_number_is_refused_too(tmp_dir: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b" " * (64 << 10)

    async with serving(tmp_dir) as broker:
        headers = {"Content-Type": "application/json"}
        response = await broker.http.post(f"{broker.url}/v1/completions", data=pieces(), headers=headers)
        assert response.status == 413


async def test_a_large_answer_comes_back_whole(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = reply({"data": ["y" * (6 << 20)]})
        response = await broker.http.post(f"{broker.url}/v1/embeddings", json={"model": "robin"})
        assert len((await response.json())["data"][0]) == 6 << 20


async def test_a_stream_is_passed_on_as_it_is(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = events(b'{"a":1}', b'{"b": 2}', b"[DONE]")
        response = await broker.chat(stream=True)
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["x-boss-slot"] == "s1"
        assert await response.read() == b'data: {"a":1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'


async def test_wrong_method_and_unknown_path_are_errors_in_openais_shape(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        method = await broker.http.get(f"{broker.url}/v1/chat/completions")
        assert (method.status, method.headers["allow"]) == (405, "POST")
        assert (await method.json())["error"]["code"] == "method_not_allowed"
        routed = await broker.http.delete(f"{broker.url}/health")
        assert (routed.status, (await routed.json())["error"]["code"]) == (405, "method_not_allowed")
        path = await broker.http.get(f"{broker.url}/v1/chat")
        assert (path.status, (await path.json())["error"]["code"]) == (404, "not_found")
        assert path.headers["x-request-id"].startswith("req-")


async def test_the_documentation_lists_raw_and_routed_endpoints(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        schema = json.loads(await (await broker.http.get(f"{broker.url}/openapi.json")).read())
        for path in ("/v1/chat/completions", "/tokenize", "/props", "/health", "/api/v1/slots", "/v1/models"):
            assert path in schema["paths"], path
        assert (await broker.http.get(f"{broker.url}/docs")).status == 200


async def test_the_documentation_tells_every_field_of_our_own(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        schema = json.loads(await (await broker.http.get(f"{broker.url}/openapi.json")).read())
    fields = schema["components"]["schemas"]["ModelBossFields"]["properties"]
    assert set(fields) == {f"x_{name}" for name in extensions.FIELDS}
    headers = schema["components"]["parameters"]
    assert {name.lower() for name in headers} == {f"x-boss-{name.replace('_', '-')}" for name in extensions.FIELDS}
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ModelBossFields"
    }
    told = {one["$ref"] for one in chat["parameters"]}
    assert told == {f"#/components/parameters/{name}" for name in headers}


async def test_a_conversation_a_cooldown_and_a_budget_reach_those_they_are_for(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        await broker.chat(x_session_id="talk 7", x_cooldown_s=2.5, x_budget_s=60)
        assert (broker.pool.tickets[0].session_id, broker.pool.tickets[0].cooldown_s) == ("talk 7", 2.5)
        assert broker.engine.asked[0].json == {"model": "robin", "messages": []}
        headers = {"X-Boss-Session-Id": "talk 8", "X-Boss-Cooldown-S": "0"}
        await broker.http.post(f"{broker.url}/upstream/robin/completion", json={"prompt": "x"}, headers=headers)
        assert (broker.pool.tickets[1].session_id, broker.pool.tickets[1].cooldown_s) == ("talk 8", 0.0)


async def test_a_request_that_finds_a_dead_engine_goes_to_the_next_one(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        live, dead = broker.pool.engine, EngineClient(tmp_dir / "nobody.sock", "engine-key", name="robin")
        broker.pool.engine, broker.pool.next_engine = dead, live
        response = await broker.chat()
        assert response.status == 200
        assert len(broker.pool.tickets) == 2, "it was queued anew"


async def test_a_request_that_finds_two_dead_engines_is_an_error(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.engine = EngineClient(tmp_dir / "nobody.sock", "engine-key", name="robin")
        response = await broker.chat()
        assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_died")
        assert len(broker.pool.tickets) == 2
