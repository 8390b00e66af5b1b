"""What every backend promises, asked of every one that is registered. A new one has to pass this and nothing else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from gpuboss.devices import Device, DeviceKind
from inference.backends import REGISTRY, Backend, Launch
from inference.errors import EngineDied, ModelBroken
from inference.fault import Fault
from inference.model import Category, Model
from inference.process import EndReason, Exited, LaunchOrder, LeaseOrder, Shim, Started
from inference.proxy import EngineClient
from tests.integration.inference.shim_kit import Kit
from tests.support import until

GIB = 1 << 30
DEVICES = (
    Device("GPU-aaaa", DeviceKind.CUDA, "card", 0, 24 * GIB, 0, measured=True),
    Device("GPU-bbbb", DeviceKind.CUDA, "card", 1, 24 * GIB, 0, measured=True),
    Device("sim0", DeviceKind.SIM, "sim0", 2, GIB, 0, measured=False),
    Device("cpu", DeviceKind.CPU, "memory", 3, 16 * GIB, 0, measured=True),
)
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(params=list(REGISTRY))
def backend(request: pytest.FixtureRequest) -> Backend:
    return REGISTRY[request.param]


@pytest.fixture
def model(backend: Backend, demo_models: Path) -> Model:
    file = demo_models / "robin.gguf"
    return Model(
        id="owl/robin:q8",
        category=Category.LLM,
        backend=backend.name,
        path=file,
        claim_bytes=40 << 20,
        claim_basis="a test",
        file_bytes=file.stat().st_size,
        context=512,
    )


def launch(binary: Path, root: Path, **shares: int) -> Launch:
    return Launch(
        binary=binary,
        socket=root / "engine.sock",
        api_key="a-secret-key",
        shares=shares or {"sim0": 1 << 20},
        devices=DEVICES,
        home=root,
    )


def test_it_is_registered_under_its_name_and_serves_something(backend: Backend) -> None:
    assert REGISTRY[backend.name] is backend
    assert backend.categories
    assert backend.stop_grace_s >= 0


def test_its_options_refuse_what_they_do_not_know(backend: Backend) -> None:
    backend.options()
    with pytest.raises(ValidationError):
        backend.options.model_validate({"no_such_option": 1})


def test_its_routes_are_paths_with_methods(backend: Backend) -> None:
    assert all(
        path.startswith("/") and methods <= {"GET", "POST", "DELETE"} for path, methods in backend.routes.items()
    )
    if Category.LLM in backend.categories:
        assert "POST" in backend.routes[CHAT_PATH]


def test_the_command_names_program_and_model_and_no_secret(backend: Backend, model: Model, tmp_path: Path) -> None:
    command = backend.command(model, launch(Path("/opt/engine"), tmp_path))
    assert command.argv[0] == "/opt/engine"
    assert str(model.path) in command.argv
    assert not any("a-secret-key" in argument for argument in command.argv)


def test_the_environment_is_an_allow_list(
    backend: Backend, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LLAMA_ARG_PORT", "HF_TOKEN", "OPENAI_API_KEY", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "mine")
    env = backend.command(model, launch(Path("/opt/engine"), tmp_path)).env
    assert "mine" not in env.values()
    assert env["PATH"] == os.environ["PATH"]
    assert env["HOME"] == str(tmp_path)


def test_the_manifests_environment_counts_but_does_not_reach_what_is_ours(
    backend: Backend, model: Model, tmp_path: Path
) -> None:
    model = replace(model, env={"FRUIT": "pear", "HOME": "/home/ann"})
    env = backend.command(model, launch(Path("/opt/engine"), tmp_path)).env
    assert (env["FRUIT"], env["HOME"]) == ("pear", str(tmp_path))


@pytest.mark.parametrize(
    ("shares", "visible"),
    [
        ({"sim0": GIB}, ""),
        ({"cpu": GIB}, ""),
        ({"GPU-bbbb": GIB}, "GPU-bbbb"),
        ({"GPU-bbbb": GIB, "GPU-aaaa": 3 * GIB, "cpu": GIB}, "GPU-aaaa,GPU-bbbb"),
    ],
)
def test_only_leased_gpus_are_visible(
    backend: Backend, model: Model, tmp_path: Path, shares: dict[str, int], visible: str
) -> None:
    env = backend.command(model, launch(Path("/opt/engine"), tmp_path, **shares)).env
    assert env["CUDA_VISIBLE_DEVICES"] == visible


def test_what_the_registry_would_have_refused_breaks_the_model(backend: Backend, model: Model, tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match="owl/robin:q8"):
        backend.command(replace(model, options={"no_such_option": 1}), launch(Path("/opt/engine"), tmp_path))


async def test_an_engine_that_does_not_listen_yet_is_loading(backend: Backend, tmp_dir: Path) -> None:
    client = EngineClient(tmp_dir / "engine.sock", "key", name="robin")
    assert not (await backend.probe(client)).ready


async def test_an_engine_that_does_not_listen_tells_no_progress(backend: Backend, tmp_dir: Path) -> None:
    client = EngineClient(tmp_dir / "engine.sock", "key", name="robin")
    with pytest.raises(EngineDied):
        await backend.progress(client)


@pytest.mark.parametrize(
    "ended",
    [
        Exited(0, None, 1, EndReason.EXIT),
        Exited(1, None, 1, EndReason.EXIT),
        Exited(None, 9, 1, EndReason.EXIT),
        Exited(None, 11, 1, EndReason.EXIT),
    ],
)
def test_an_end_without_a_word_is_a_crash(backend: Backend, ended: Exited) -> None:
    """It is tried again: nothing says that it would be in vain."""
    assert backend.diagnose(ended, []) is Fault.CRASH
    assert backend.diagnose(ended, ["listening", "a request came", "a request was answered"]) is Fault.CRASH


@pytest.fixture
async def shim(tmp_dir: Path) -> AsyncIterator[tuple[Shim, Kit]]:
    kit = Kit(tmp_dir)
    spawned = await Shim.spawn(kit.ledger)
    yield spawned, kit
    await spawned.close()


async def test_its_engine_becomes_ready_answers_and_ends(
    backend: Backend, model: Model, shim: tuple[Shim, Kit], llama_server: Path
) -> None:
    process, kit = shim
    place = launch(llama_server, kit.root)
    command = backend.command(model, place)
    process.launch(
        LaunchOrder(
            argv=command.argv,
            env=command.env,
            cwd=str(kit.root),
            log=str(kit.log),
            socket=str(place.socket),
            lease=LeaseOrder("lease1", 1, 1, "slot:robin", place.shares),
        )
    )
    assert isinstance(await process.report(), Started)
    client = EngineClient(place.socket, place.api_key, name=model.id)

    async def is_ready() -> bool:
        return (await backend.probe(client)).ready

    await until(is_ready, "the engine to be ready")
    body = b'{"messages":[{"role":"user","content":"Who are you?"}],"max_tokens":16,"temperature":0}'
    response = await client.open("POST", CHAT_PATH, body, [(b"content-type", b"application/json")])
    answer = await response.read()
    assert response.status == 200, answer
    assert b'"model":"owl/robin:q8"' in answer
    idle = await backend.progress(client)
    assert idle == await backend.progress(client), "nothing was asked of it in between"
    await (await client.open("POST", CHAT_PATH, body, [(b"content-type", b"application/json")])).read()
    assert idle is None or idle != await backend.progress(client), "it answered in between"
    process.stop(backend.stop_grace_s)
    async with asyncio.timeout(20):
        assert isinstance(await process.report(), Exited)
    await client.close()
