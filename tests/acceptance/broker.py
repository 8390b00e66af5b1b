"""A real broker process for the acceptance tests, and questions to ask it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support import wait_until

MODELS = ("robin", "wren")
CLAIM_MIB = 40
"""What each test manifest claims; devices below are sized in multiples of it."""


def free_port() -> int:
    """A loopback TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Broker:
    """One `model-boss serve` on its own directory; start it, kill it, start it again on the same state."""

    directory: Path
    engine: Path
    room_mib: int = CLAIM_MIB + CLAIM_MIB // 2
    settings: dict[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    _log_from: int = 0
    """Where the present life begins in the log."""

    def write_manifest(self, name: str, **keys: object) -> Path:
        """Write manifests/<name>.yaml from keys, over what was there."""
        path = self.directory / "manifests" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(keys))
        return path

    def write_config(self) -> Path:
        """Write model-boss.yaml: one simulated device, no scanning."""
        keys: dict[str, Any] = {
            "port": self.port,
            "manifests": "manifests",
            "state_dir": str(self.state_dir),
            "reserve": 0,
            "scan_hf_cache": False,
            "devices": [{"id": "sim0", "kind": "sim", "vram": f"{self.room_mib}MiB"}],
            "engines": {"llama_server": str(self.engine)},
        }
        path = self.directory / "model-boss.yaml"
        path.write_text(yaml.safe_dump(keys | self.settings))
        return path

    @property
    def state_dir(self) -> Path:
        """Where ledger, store, sockets and logs go."""
        return self.directory / "state"

    @property
    def url(self) -> str:
        """The broker's address."""
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process without waiting for it."""
        config = self.write_config()
        script = Path(sys.executable).parent / "model-boss"
        with (self.directory / "serve.log").open("ab") as log:
            self._log_from = log.tell()
            self.process = subprocess.Popen(
                [str(script), "serve", "--config", str(config)], stdout=log, stderr=log, start_new_session=True
            )
        return self.process

    def start(self) -> Broker:
        """Start the process and wait until it is healthy."""
        process = self.launch()

        def healthy() -> bool:
            assert process.poll() is None, f"the broker ended:\n{self.log()[-3000:]}"
            with contextlib.suppress(OSError):
                return self.get("/health")[0] == 200
            return False

        wait_until(healthy, "the broker to be healthy")
        return self

    def log(self) -> str:
        """What the broker printed so far."""
        return (self.directory / "serve.log").read_text(errors="replace")

    def log_of_this_life(self) -> str:
        """What it printed since its last start, in whole lines."""
        with (self.directory / "serve.log").open("rb") as log:
            log.seek(self._log_from)
            return log.read().decode(errors="replace").rpartition("\n")[0]

    def states_at(self, wall_s: float) -> dict[str, str]:
        """By model, the slots' states at that moment of this life, by the wall clock.

        Told by the log, which needs `log_level: debug`: it is written at every move, so it tells the last moment too.
        """
        states: dict[str, str] = {}
        with (self.directory / "serve.log").open("rb") as log:
            log.seek(self._log_from)
            for line in log:
                if b'"slot_moved"' in line and line.endswith(b"\n"):
                    move = json.loads(line)
                    if datetime.fromisoformat(move["timestamp"]).timestamp() <= wall_s:
                        states[move["slot"]] = move["state"]
        return states

    def stop(self) -> None:
        """End the broker as Ctrl-C would, and wait until its keeper has left too; what does not end is killed."""
        try:
            if self.process is not None and self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                self.process.wait(30)
            wait_until(lambda: not self.processes(), "every process of this state directory to end")
        except (subprocess.TimeoutExpired, AssertionError):
            if self.process is not None:
                self.kill()
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            raise

    def kill(self) -> None:
        """kill -9 the broker."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Living processes whose command line or environment names this broker's directory, the broker apart."""
        own = {os.getpid(), self.process.pid if self.process else 0}
        return [process for process in psutil.process_iter() if process.pid not in own and self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            told = "\0".join([*process.cmdline(), *process.environ().values()])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        return str(self.directory) in told

    def engines(self) -> list[psutil.Process]:
        """The engine processes of this broker, alive or dying but not yet reaped as zombies."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                command = process.cmdline()  # empty for one that is just ending
                if command and Path(command[0]) == self.engine:
                    found.append(process)
        return found

    # -- HTTP -----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, Any]:
        """GET; the status and the decoded JSON body."""
        return self._send(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Mapping[str, object] | bytes, **headers: str) -> tuple[int, Any]:
        """POST JSON; the status and the decoded JSON body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        return self._send(request)

    def delete(self, path: str) -> tuple[int, Any]:
        """DELETE; the status and the decoded JSON body."""
        return self._send(urllib.request.Request(self.url + path, method="DELETE"))

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"null")

    def ask(self, model: str, question: str = "Who are you?", **keys: object) -> str:
        """A greedy chat answer's text; fails on any status but 200."""
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0}
        status, answer = self.post("/v1/chat/completions", body | keys)
        assert status == 200, (status, answer)
        return str(answer["choices"][0]["message"]["content"])

    def slots(self) -> dict[str, Any]:
        """/api/v1/slots by model."""
        return {slot["model"]: slot for slot in self.get("/api/v1/slots")[1]["slots"]}


@contextlib.contextmanager
def broker(
    directory: Path, engine: Path, *, models: Sequence[str] = MODELS, demo: Path, context: int = 512, **keys: Any
) -> Iterator[Broker]:
    """A started broker that serves `models` by manifests; ended, with all it started, afterwards."""
    subject = Broker(directory, engine, **keys)
    for model in models:
        subject.write_manifest(
            model, id=model, path=str(demo / f"{model}.gguf"), vram=f"{CLAIM_MIB}MiB", context=context
        )
    try:
        yield subject.start()
    finally:
        subject.stop()


def seconds_since(moment: float) -> float:
    """Monotonic seconds since `moment`."""
    return time.monotonic() - moment
