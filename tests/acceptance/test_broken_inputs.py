"""Ten broken inputs: each gets an error that says what is wrong, in numbers, and everything else goes on serving."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.broker import Broker, broker
from tests.support import wait_until

ASK = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 48, "temperature": 0}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    """A broker whose manifests hold one of everything that can be wrong with a model, beside two good ones."""
    directory = tmp_path_factory.mktemp("b")
    whole = (demo_models / "robin.gguf").read_bytes()
    (directory / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with broker(directory, llama_server, demo=demo_models) as running:
        running.write_manifest("missing", id="missing", path=str(directory / "nowhere.gguf"))
        running.write_manifest("cut", id="cut", path=str(directory / "cut.gguf"))
        running.write_manifest("folder", id="folder", path=str(directory))
        running.write_manifest("huge", id="huge", path=str(demo_models / "robin.gguf"), vram="10GiB")
        running.stop()
        yield running.start()


def refused(subject: Broker, model: str) -> tuple[int, dict[str, Any]]:
    """Ask a model that cannot answer; return status and error, having seen that a good one still answers."""
    status, answer = subject.post("/v1/chat/completions", {"model": model, **ASK})
    assert "Robin" in subject.ask("robin")
    return status, answer["error"]


def test_a_missing_file(subject: Broker) -> None:
    status, error = refused(subject, "missing")
    assert (status, error["code"]) == (503, "model_broken")
    assert "nowhere.gguf" in error["message"]
    assert "missing.yaml" in error["message"], "it names the manifest to change"


def test_a_truncated_file(subject: Broker) -> None:
    status, error = refused(subject, "cut")
    assert (status, error["code"]) == (503, "model_broken")
    assert "truncated" in error["message"]
    assert any(character.isdigit() for character in error["message"])


def test_a_directory_as_a_path(subject: Broker) -> None:
    status, error = refused(subject, "folder")
    assert (status, error["code"]) == (503, "model_broken")
    assert "directory" in error["message"]


def test_a_model_larger_than_the_budget(subject: Broker) -> None:
    status, error = refused(subject, "huge")
    assert (status, error["code"]) == (400, "will_never_fit")
    assert "10GiB" in error["message"], "what it needs"
    assert "60MiB" in error["message"], "what there is"
    assert "vram" in error["message"], "it names the setting"
    [listed] = [model for model in subject.get("/api/v1/models")[1]["models"] if model["id"] == "huge"]
    assert listed["never_fits"] == error["message"], "it is told before anybody asks for it"
    [told] = [line for line in subject.log_of_this_life().splitlines() if '"model_never_fits"' in line]
    assert '"huge"' in told


def test_an_unknown_model(subject: Broker) -> None:
    status, error = refused(subject, "robbin")
    assert (status, error["code"]) == (404, "model_not_found")
    assert "robin" in error["message"]


def test_bad_json(subject: Broker) -> None:
    status, answer = subject.post("/v1/chat/completions", b'{"model": "robin", "messages": [')
    assert status == 400
    assert "JSON" in answer["error"]["message"]
    assert "Robin" in subject.ask("robin")


def test_broken_models_are_listed_with_their_problem(subject: Broker) -> None:
    listed = {model["id"]: model for model in subject.get("/api/v1/models")[1]["models"]}
    assert listed["robin"]["problem"] is listed["robin"]["never_fits"] is None
    assert "nowhere.gguf" in listed["missing"]["problem"]


def serve(subject: Broker, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `model-boss serve` to its end and return what it printed."""
    script = Path(sys.executable).parent / "model-boss"
    config = subject.directory / "model-boss.yaml"
    return subprocess.run(
        [str(script), "serve", "--config", str(config), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
        check=False,
    )


def test_an_unknown_manifest_key_keeps_the_rest_serving(subject: Broker) -> None:
    broken = subject.write_manifest("typo", id="typo", path="x.gguf", contxt=512)
    try:
        subject.stop()
        subject.start()
        assert "Robin" in subject.ask("robin")
        told = subject.log()
        assert "typo.yaml:1" in told.replace(", line ", ":"), "file and line"
        assert "contxt" in told
        assert "context" in told, "and the nearest key"
    finally:
        broken.unlink()


def test_a_manifest_that_breaks_while_serving_is_shown_beside_its_model(subject: Broker, demo_models: Path) -> None:
    def slip() -> dict[str, Any]:
        listed = {model["id"]: model for model in subject.get("/api/v1/models")[1]["models"]}
        return listed.get("slip", {})

    path = str(demo_models / "robin.gguf")
    manifest = subject.write_manifest("slip", id="slip", path=path, context=256)
    try:
        wait_until(lambda: "id" in slip(), "the manifest is read")
        subject.write_manifest("slip", id="slip", path=path, context="lots")
        wait_until(lambda: slip()["manifest_problem"] is not None, "what is wrong with it is shown")
        assert "lots" in slip()["manifest_problem"]
        assert (slip()["problem"], slip()["context"]) == (None, 256)
        assert "Robin" in subject.ask("slip")
    finally:
        manifest.unlink()


def test_the_port_is_taken(subject: Broker, tmp_dir: Path, llama_server: Path) -> None:
    other = Broker(tmp_dir, llama_server, port=subject.port)
    other.write_config()
    done = serve(other)
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert str(subject.port) in told
    assert "--port" in told
    assert "Traceback" not in told
    assert "Robin" in subject.ask("robin")


@pytest.fixture
def mounted(tmp_dir: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tiny file system with the given options at `state`; skips where that is not permitted."""
    state = tmp_dir / "state"
    state.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(state)]
        if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount a file system")
        return state

    yield mount
    subprocess.run(["umount", "-l", str(state)], capture_output=True, check=False)


def test_the_state_directory_is_not_writable(mounted: Callable[[str], Path], tmp_dir: Path, llama_server: Path) -> None:
    state = mounted("ro,size=64k")
    told = fails_to_serve(tmp_dir, llama_server)
    assert str(state) in told
    assert "state_dir" in told or "GPUBOSS_STATE_DIR" in told, "it names the setting"


def test_the_state_directory_is_full(mounted: Callable[[str], Path], tmp_dir: Path, llama_server: Path) -> None:
    state = mounted("size=64k")
    (state / "filler").write_bytes(b"x" * (60 << 10))
    assert str(state) in fails_to_serve(tmp_dir, llama_server)


def fails_to_serve(directory: Path, llama_server: Path) -> str:
    """What a broker on this directory says before it gives up."""
    other = Broker(directory, llama_server)
    other.write_config()
    done = serve(other)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def test_no_compiler(tmp_dir: Path) -> None:
    script = Path(sys.executable).parent / "model-boss"
    empty = tmp_dir / "bin"
    empty.mkdir()
    done = subprocess.run(
        [str(script), "engines", "install", "llama-server", "--accelerator", "cpu"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": str(empty), "HOME": str(tmp_dir), "XDG_CACHE_HOME": str(tmp_dir / "cache")},
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode != 0
    assert "compiler" in told
    assert "MODEL_BOSS_LLAMA_SERVER" in told, "another way to take"
    assert "Traceback" not in told


def test_a_second_broker_on_the_same_state_says_so_and_exits(subject: Broker) -> None:
    done = serve(subject, "--port", "0")
    told = done.stdout + done.stderr
    assert done.returncode != 0
    assert subject.process is not None
    assert str(subject.process.pid) in told, "it names the one that runs"
    assert str(subject.state_dir) in told
    assert "Traceback" not in told
    assert "Robin" in subject.ask("robin")


def test_a_dead_engine_is_an_error_and_the_next_request_works(subject: Broker) -> None:
    subject.ask("wren")
    os.kill(subject.slots()["wren"]["pid"], signal.SIGKILL)
    assert "Wren" in subject.ask("wren")


def test_the_disk_fills_up_while_serving(
    mounted: Callable[[str], Path], tmp_dir: Path, llama_server: Path, demo_models: Path
) -> None:
    """What is loaded serves on; a swap waits, for no memory is given back unwritten; all is well once there is room."""
    state = mounted("size=24m")
    with broker(tmp_dir, llama_server, demo=demo_models) as running, ThreadPoolExecutor(1) as other:
        assert "Robin" in running.ask("robin")
        filler = state / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * (64 << 10))
                file.flush()
        assert "Robin" in running.ask("robin"), "a loaded model needs no disk"
        swap = other.submit(running.ask, "wren")
        wait_until(lambda: running.slots()["robin"]["state"] != "ready", "the swap to begin")
        wait_until(lambda: running.get("/health")[0] == 503, "the broker to say that its store takes nothing")
        filler.unlink()
        assert "Wren" in swap.result(60)
        assert "Robin" in running.ask("robin")
