"""The control API, the model list, health, and looking through to an engine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from yarl import URL

from inference import errors
from inference.engine_log import log_path
from inference.events import Purpose
from inference.slot_state import SlotState
from tests.integration.coordinator.support import FakeSlot, a_model, events, reply, serving
from tests.support import until


async def test_the_model_list_shows_state_context_and_size(tmp_dir: Path) -> None:
    models = (a_model("robin"), a_model("org/wren:Q4"), a_model("wreck", problem="truncated"))
    async with serving(tmp_dir, models=models) as broker:
        listed = await (await broker.http.get(f"{broker.url}/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["robin", "org/wren:Q4"]
        robin = listed["data"][0]
        assert (robin["object"], robin["state"], robin["context"]) == ("model", "ready", 512)
        assert (robin["size_bytes"], robin["claim_bytes"]) == (2 << 20, 3 << 20)
        one = await (await broker.http.get(f"{broker.url}/v1/models/org/wren:Q4")).json()
        assert (one["id"], one["state"]) == ("org/wren:Q4", "idle")
        missing = await broker.http.get(f"{broker.url}/v1/models/none")
        assert (missing.status, (await missing.json())["error"]["code"]) == (404, "model_not_found")


async def test_operators_see_broken_models_with_the_reason(tmp_dir: Path) -> None:
    async with serving(tmp_dir, models=(a_model("robin"), a_model("wreck", problem="truncated"))) as broker:
        broker.pool.too_large["robin"] = "needs 40GiB"
        listed = await (await broker.http.get(f"{broker.url}/api/v1/models")).json()
        assert {model["id"]: model["problem"] for model in listed["models"]} == {"robin": None, "wreck": "truncated"}
        assert [model["never_fits"] for model in listed["models"]] == ["needs 40GiB", None]


async def test_slots_and_their_story(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        slot = broker.pool.slot_by_id["robin"]
        slot.lease = SimpleNamespace(id="l1", shares={"sim0": 5})
        slot.story = (SimpleNamespace(state=SlotState.LOADING, reason="a request", at_s=time.monotonic() - 60),)
        listed = (await (await broker.http.get(f"{broker.url}/api/v1/slots")).json())["slots"]
        shown = [(one["model"], one["state"], one["pid"], one["shim_pid"], one["devices"]) for one in listed]
        assert shown == [("robin", "ready", 4711, 4710, {"sim0": 5})]
        one = await (await broker.http.get(f"{broker.url}/api/v1/slots/robin")).json()
        assert (one["story"][0]["reason"], round(one["story"][0]["ago_s"])) == ("a request", 60)
        assert (await broker.http.get(f"{broker.url}/api/v1/slots/wren")).status == 404


async def test_the_queue_shows_who_waits(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        asking = asyncio.ensure_future(broker.chat(x_client_id="kitchen", x_priority="batch"))
        await until(lambda: broker.pool.tickets, "the ticket")
        queue = (await (await broker.http.get(f"{broker.url}/api/v1/queue")).json())["queue"]
        assert [(one["position"], one["model"], one["client_id"], one["priority"]) for one in queue] == [
            (1, "robin", "kitchen", "batch")
        ]
        broker.pool.settle()
        assert (await asking).status == 200


async def test_load_answers_when_the_model_is_ready(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        loading = asyncio.ensure_future(broker.http.post(f"{broker.url}/api/v1/models/robin/load"))
        await until(lambda: broker.pool.tickets, "the ticket")
        assert broker.pool.tickets[0].purpose is Purpose.LOAD
        broker.pool.settle(load_s=0.25)
        response = await loading
        body = await response.json()
        assert (response.status, body["model"], body["state"], body["load_ms"]) == (200, "robin", "ready", 250)


async def test_a_load_whose_caller_hangs_up_leaves_the_queue(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.holding = True
        loading = asyncio.ensure_future(broker.http.post(f"{broker.url}/api/v1/models/robin/load"))
        await until(lambda: broker.pool.tickets, "the ticket")
        loading.cancel()
        await until(lambda: broker.pool.closed, "the ticket to leave", timeout_s=1)


async def test_a_load_that_cannot_be_is_refused_with_the_numbers(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.pool.refusal = errors.WillNeverFit("robin claims 40GiB; the largest device, sim0, has 8GiB")
        response = await broker.http.post(f"{broker.url}/api/v1/models/robin/load")
        assert (response.status, (await response.json())["error"]["code"]) == (400, "will_never_fit")
        assert response.headers["x-request-id"].startswith("req-")


async def test_unload(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        response = await broker.http.post(f"{broker.url}/api/v1/models/robin/unload")
        assert await response.json() == {"model": "robin", "state": "idle"}
        assert broker.pool.unloaded == ["robin"]


async def test_the_end_of_an_engines_log(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        log_path(tmp_dir, "robin").write_text("".join(f"line {n}\n" for n in range(50)))
        response = await broker.http.get(f"{broker.url}/api/v1/models/robin/logs?lines=2")
        assert await response.json() == {"model": "robin", "lines": ["line 48", "line 49"]}
        wrong = await broker.http.get(f"{broker.url}/api/v1/models/robin/logs?lines=none")
        assert (wrong.status, (await wrong.json())["error"]["param"]) == (400, "lines")


async def test_health_can_say_no(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        assert (await broker.http.get(f"{broker.url}/health")).status == 200
        broker.pool.store_up = False
        down = await broker.http.get(f"{broker.url}/health")
        assert (down.status, (await down.json())["status"]) == (503, "unhealthy")
        broker.pool.store_up = True
        broker.broker.begin_shutdown()
        ending = await broker.http.get(f"{broker.url}/health")
        assert (ending.status, (await ending.json())["problems"]) == (503, ["shutting down"])


async def test_ready_waits_for_pinned_models(tmp_dir: Path) -> None:
    async with serving(tmp_dir, models=(a_model("robin"), a_model("wren", pin=True))) as broker:
        response = await broker.http.get(f"{broker.url}/health/ready")
        assert (response.status, (await response.json())["problems"]) == (503, ["pinned model wren is idle"])
        broker.pool.slot_by_id["wren"] = FakeSlot(broker.pool.registry.models["wren"])
        assert (await broker.http.get(f"{broker.url}/health/ready")).status == 200


@pytest.mark.parametrize("path", ["/props", "/slots"])
async def test_looking_at_a_loaded_engine(tmp_dir: Path, path: str) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = reply({"n_ctx": 512})
        response = await broker.http.get(f"{broker.url}{path}?model=gpt-4")
        assert await response.json() == {"n_ctx": 512}
        assert response.headers["x-boss-slot"] == "robin"
        assert broker.engine.asked[0].path == path
        assert not broker.pool.tickets, "it would wait for the work that it is to show"


@pytest.mark.parametrize("path", ["/props?model=wren", "/upstream/wren/props"])
async def test_looking_never_loads(tmp_dir: Path, path: str) -> None:
    async with serving(tmp_dir) as broker:
        response = await broker.http.get(f"{broker.url}{path}")
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (409, "model_not_loaded", "model")
        assert "/api/v1/models/wren/load" in error["message"]
        assert not broker.pool.tickets


async def test_upstream_passes_method_path_query_and_body(tmp_dir: Path) -> None:
    async with serving(tmp_dir, models=(a_model("org/robin"), a_model("wren"))) as broker:
        broker.engine.script = reply(b"plain", content_type="text/plain")
        url = f"{broker.url}/upstream/org/robin/infill?a=1&b=%20"
        response = await broker.http.post(url, data=b"{ }", headers={"Content-Type": "application/json"})
        assert (response.status, await response.read()) == (200, b"plain")
        assert response.headers["content-type"] == "text/plain"
        assert response.headers["x-boss-model"] == "org/robin"
        asked = broker.engine.asked[0]
        assert (asked.method, asked.path, asked.body) == ("POST", "/infill?a=1&b=%20", b"{ }")
        assert broker.pool.tickets[0].purpose is Purpose.INFER


async def test_upstream_streams(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = events(b"1", b"2")
        response = await broker.http.post(f"{broker.url}/upstream/robin/v1/messages", json={})
        assert await response.read() == b"data: 1\n\ndata: 2\n\n"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("OPTIONS", "/v1/chat/completions", 405),  # a browser asks so for any web page
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/props", 405),
        ("POST", "/lora-adapters", 405),
        ("POST", "/%70rops", 404),
        ("POST", "/slots/0?action=save", 404),
        ("GET", "/tools", 404),
    ],
)
async def test_upstream_is_for_the_backends_routes_alone(tmp_dir: Path, method: str, path: str, status: int) -> None:
    """Whatever else an engine offers could change something for everybody, or load a model for nothing."""
    async with serving(tmp_dir) as broker:
        response = await broker.http.request(method, URL(f"{broker.url}/upstream/robin{path}", encoded=True))
        assert response.status == status
        assert not broker.pool.tickets
        assert not broker.engine.asked


async def test_a_query_of_many_fields_is_read(tmp_dir: Path) -> None:
    async with serving(tmp_dir) as broker:
        broker.engine.script = reply({})
        many = "&".join(f"f{number}=1" for number in range(100))
        assert (await broker.http.get(f"{broker.url}/props?{many}&model=robin")).status == 200


@pytest.mark.parametrize(("path", "code"), [("/upstream/none/x", "model_not_found"), ("/upstream/robin", "not_found")])
async def test_upstream_of_nothing(tmp_dir: Path, path: str, code: str) -> None:
    async with serving(tmp_dir) as broker:
        response = await broker.http.get(f"{broker.url}{path}")
        assert (response.status, (await response.json())["error"]["code"]) == (404, code)
