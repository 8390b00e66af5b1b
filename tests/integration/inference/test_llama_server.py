"""What llama-server does with the command line and environment that its backend gives it."""

from __future__ import annotations

import asyncio
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import orjson
import psutil
import pytest

from gpuboss.devices import Device, DeviceKind
from inference.backends import REGISTRY, Launch
from inference.errors import LoadFailed
from inference.model import Category, Model
from inference.proxy import EngineClient
from inference.slot import Slot
from tests.integration.inference.slot_kit import JSON, OPTIONS, Rig, post, stream
from tests.support import until

WHO = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 24, "temperature": 0}


async def busy(engine: EngineClient | None) -> bool:
    """Whether the engine works on anything."""
    assert engine is not None
    slots = orjson.loads(await (await engine.open("GET", "/slots")).read())
    return any(slot["is_processing"] for slot in slots)


@pytest.mark.parametrize("named", [{}, {"model": "gpt-4o"}, {"model": "owl/robin:q8"}])
async def test_chat_answers_carry_the_models_id_whatever_was_asked_for(rig: Rig, named: dict[str, str]) -> None:
    slot = await rig.ready("owl/robin:q8")
    _, answer = await post(slot.engine, "/v1/chat/completions", WHO | named)
    assert answer["model"] == "owl/robin:q8"
    response = await stream(slot.engine, max_tokens=4, **named)
    events = [line for line in (await response.read()).split(b"\n\n") if line.startswith(b"data: {")]
    assert {orjson.loads(line[6:])["model"] for line in events} == {"owl/robin:q8"}


async def test_a_hang_up_ends_a_stream(rig: Rig) -> None:
    slot = await rig.ready("robin", context=4096)
    response = await stream(slot.engine)
    await anext(response)
    assert await busy(slot.engine), "the generation was over before anybody hung up"
    response.close()
    await until(lambda: _idle(slot), "the generation to end", timeout_s=5)


async def test_a_hang_up_ends_an_answer_that_does_not_stream(rig: Rig) -> None:
    """llama-server looks whether anybody is there after a second without results: asking /slots would put it off."""
    slot = await rig.ready("robin", context=16_384)
    [log] = _logs(rig)
    assert slot.engine is not None
    body = {"prompt": "Who", "n_predict": 200_000, "ignore_eos": True}
    asking = asyncio.create_task(slot.engine.open("POST", "/completion", orjson.dumps(body), JSON))
    await until(lambda: "processing task" in log.read_text(), "the generation to begin")
    asking.cancel()
    await asyncio.wait({asking})
    await until(lambda: "cancel task" in log.read_text(), "the generation to end", timeout_s=5)


def _logs(rig: Rig) -> list[Path]:
    return list(rig.ledger.state.log_dir.glob("engine-*.log"))


async def _idle(slot: Slot) -> bool:
    return not await busy(slot.engine)


async def test_the_key_is_needed_and_nobody_else_can_read_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "64")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    slot = await rig.ready("robin")
    assert slot.engine is not None
    assert slot.pid is not None
    stranger = EngineClient(Path(slot.engine._path), "guess", name="robin")
    assert (await post(stranger, "/v1/chat/completions", WHO))[0] == 401
    await stranger.close()
    engine = psutil.Process(slot.pid)
    environment = engine.environ()
    key = environment["LLAMA_API_KEY"]
    assert key.encode() in slot.engine._common
    assert not any(key in argument for argument in engine.cmdline())
    assert "HF_TOKEN" not in environment
    assert not any(name.startswith("LLAMA_ARG_") for name in environment)
    assert environment["HOME"].startswith(str(rig.ledger.state.root))
    props = orjson.loads(await (await slot.engine.open("GET", "/props")).read())
    assert props["default_generation_settings"]["n_ctx"] == 512


async def test_the_socket_is_private_and_goes_with_the_engine(rig: Rig) -> None:
    slot = await rig.ready("robin")
    assert slot.engine is not None
    path = Path(slot.engine._path)
    assert _mode(path) == stat.S_IFSOCK | 0o700
    await slot.close()
    assert _mode(path) is None


def _mode(path: Path) -> int | None:
    return path.lstat().st_mode if path.exists() else None


async def test_context_is_per_request(rig: Rig) -> None:
    slot = await rig.ready("robin", context=512, parallel=2)
    assert slot.engine is not None
    slots = orjson.loads(await (await slot.engine.open("GET", "/slots")).read())
    assert [one["n_ctx"] for one in slots] == [512, 512]


async def test_options_and_arguments_reach_the_engine(rig: Rig) -> None:
    slot = await rig.ready(
        "robin",
        options={"flash_attn": False, "cache_type_k": "q8_0", "threads": 1, "warmup": False, "ubatch_size": 128},
        extra_args=("--temp=0.25", "--top-k", "7", "--seed", "-1"),
        env={"FRUIT": "pear"},
    )
    assert slot.engine is not None
    assert slot.pid is not None
    props = orjson.loads(await (await slot.engine.open("GET", "/props")).read())
    assert props["default_generation_settings"]["params"]["temperature"] == 0.25
    assert props["default_generation_settings"]["params"]["top_k"] == 7
    assert psutil.Process(slot.pid).environ()["FRUIT"] == "pear"


async def test_an_argument_that_is_not_the_manifests_fails_the_load_by_name(rig: Rig) -> None:
    slot = rig.slot("robin", extra_args=("--port=80",))
    slot.start(OPTIONS, 10)
    assert "--port is not yours to set" in (await rig.failed(slot)).error.message


async def test_an_argument_the_engine_does_not_know_fails_the_load_with_its_words(rig: Rig) -> None:
    slot = rig.slot("robin", extra_args=("--no-such-thing",))
    slot.start(OPTIONS, 10)
    failure = await rig.failed(slot)
    assert isinstance(failure.error, LoadFailed)
    assert "invalid argument: --no-such-thing" in failure.error.message


async def test_a_chat_model_makes_vectors_when_it_is_called_an_embedding_model(rig: Rig) -> None:
    slot = await rig.ready("vectors", category=Category.EMBEDDING, context=1024)
    long = "lease " * 300
    status, answer = await post(slot.engine, "/v1/embeddings", {"model": "vectors", "input": ["a lease", long]})
    assert status == 200, answer
    assert answer["model"] == "vectors"
    data = answer["data"]
    assert isinstance(data, list)
    assert len(data) == 2
    assert data[0]["embedding"] != data[1]["embedding"]


async def test_a_model_scores_texts_when_it_is_called_a_rerank_model(rig: Rig) -> None:
    slot = await rig.ready("scores", category=Category.RERANK)
    body = {"model": "scores", "query": "a lease", "documents": ["a slot", "a pear"]}
    status, answer = await post(slot.engine, "/v1/rerank", body)
    assert status == 200, answer
    results = answer["results"]
    assert isinstance(results, list)
    assert len(results) == 2


def test_every_argument_we_give_is_one_the_engine_knows(llama_server: Path) -> None:
    """Also those that no demo model needs."""
    known = set(subprocess.run([llama_server, "--help"], capture_output=True, text=True, check=True).stdout.split())
    cards = tuple(Device(f"GPU-{n}", DeviceKind.CUDA, "card", n, 1 << 34, 0, measured=True) for n in range(2))
    place = Launch(llama_server, Path("/e.sock"), "key", {"GPU-0": 1 << 30, "GPU-1": 1 << 30}, cards, Path("/"))
    for category in Category:
        model = Model("robin", category, "llama-server", Path("/m"), 1, "a test", 1, 512, mmproj=Path("/p"))
        model = replace(model, chat_template="chatml", options={"warmup": False, "threads_batch": 2, "batch_size": 9})
        given = {word for word in REGISTRY["llama-server"].command(model, place).argv if word.startswith("--")}
        assert given <= {word.strip(",") for word in known}


async def test_every_route_of_the_table_is_one_of_the_engines(rig: Rig) -> None:
    """A 404 would mean that it does not know the path at all."""
    slot = await rig.ready("robin")
    assert slot.engine is not None
    for path, methods in REGISTRY["llama-server"].routes.items():
        for method in methods:
            response = await slot.engine.open(method, path, b"{}" if method == "POST" else b"", JSON)
            await response.read()
            assert response.status != 404, (method, path)
    assert (await slot.engine.open("GET", "/nowhere")).status == 404
