"""The servers under comparison, each started on a free port and ended by pid: llama-server itself, its router mode,
and Model Boss. All serve the same models (`Setup`) with the same context, parallel slots and threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served, and how; room is for one model at a time."""

    folder: Path
    """Where the models are, `NAME.gguf`."""
    models: tuple[str, ...]
    vram: str
    """What one of them claims of the device."""
    device: str
    """How large that is."""
    context: int = 512
    """Tokens of one request."""
    parallel: int = 4
    threads: int = 1
    engine_args: tuple[str, ...] = ()
    """What Model Boss gives its engines besides, for the others."""


DEMO = Setup(folder=ROOT / "demo" / "models", models=("robin", "wren"), vram="40MiB", device="64MiB")


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    health_s: float
    """Seconds from its start to the first 200 from /health."""


def free_port() -> int:
    """A TCP port of the loopback interface nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(name: str, command: Sequence[str], port: int, directory: Path) -> Iterator[Target]:
    """Start `command`, wait until it is healthy, and end it afterwards.

    Raises:
        RuntimeError: it ended, or was not healthy within 60 s; the message holds its log's end.
    """
    log = directory / f"{name}.log"
    with log.open("wb") as out:
        began = time.monotonic()
        environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment)
        try:
            yield Target(name, port, process, _wait_healthy(process, port, began, log))
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_healthy(process: subprocess.Popen[bytes], port: int, began: float, log: Path) -> float:
    while time.monotonic() - began < 60:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5),
        ):
            return time.monotonic() - began
        if process.poll() is not None:
            break
        time.sleep(0.002)
    raise RuntimeError(f"{' '.join(process.args)} did not become healthy:\n{log.read_text()[-2000:]}")  # type: ignore[arg-type]  # a list of strings: `running` gave it


def _sizing(setup: Setup) -> list[str]:
    """What Model Boss gives its engine too, so that only what stands in front of it differs."""
    context = str(setup.context * setup.parallel)
    sizes = ["--fit", "off", "-c", context, "-np", str(setup.parallel), "--threads", str(setup.threads)]
    return [*sizes, *setup.engine_args]


@contextlib.contextmanager
def direct(binary: Path, model: str, directory: Path, setup: Setup = DEMO) -> Iterator[Target]:
    """llama-server with one model."""
    port = free_port()
    command = [str(binary), "-m", str(setup.folder / f"{model}.gguf"), "--alias", model, "--host", "127.0.0.1"]
    with running("direct", [*command, "--port", str(port), *_sizing(setup)], port, directory) as target:
        yield target


@contextlib.contextmanager
def router(binary: Path, directory: Path, setup: Setup = DEMO) -> Iterator[Target]:
    """llama-server in router mode with room for one model."""
    port = free_port()
    command = [str(binary), "--models-dir", str(setup.folder), "--models-max", "1", "--host", "127.0.0.1"]
    with running("router", [*command, "--port", str(port), *_sizing(setup)], port, directory) as target:
        yield target


@contextlib.contextmanager
def model_boss(binary: Path, directory: Path, setup: Setup = DEMO) -> Iterator[Target]:
    """Model Boss with room for one model."""
    port = free_port()
    manifests = directory / "manifests"
    manifests.mkdir(exist_ok=True)
    for model in setup.models:
        (manifests / f"{model}.yaml").write_text(
            f"id: {model}\npath: {setup.folder / model}.gguf\nvram: {setup.vram}\ncontext: {setup.context}\n"
            f"parallel: {setup.parallel}\noptions: {{threads: {setup.threads}}}\n"
        )
    config = directory / "model-boss.yaml"
    config.write_text(
        f"port: {port}\nmanifests: manifests\nstate_dir: {directory / 'state'}\nreserve: 0\n"
        f"scan_hf_cache: false\ndevices: [{{id: sim0, kind: sim, vram: {setup.device}}}]\n"
        f"engines: {{llama_server: {binary}}}\n"
    )
    script = Path(sys.executable).parent / "model-boss"
    with running("model-boss", [str(script), "serve", "--config", str(config)], port, directory) as target:
        yield target
