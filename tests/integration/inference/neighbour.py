"""A program that is not ours, in the manner of ComfyUI: holds memory, works for a while, and frees it when asked.

`python -m tests.integration.inference.neighbour PORT_FILE NAME`. GET /queue says whether it works; POST /work {"mb": N}
makes it hold N MiB and be busy until POST /done; POST /free lets the memory go; POST /sulk makes it refuse to.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from inference.external_spec import Call, Spec
from tests.support import wait_until

MIB = 1 << 20
NEEDS = 200 * MIB
"""What it says that it needs."""


@dataclass
class Neighbour:
    """The program, from outside."""

    process: subprocess.Popen[bytes]
    name: str
    url: str

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()

    def post(self, path: str, **body: Any) -> None:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()

    @property
    def asked_to_free(self) -> int:
        with urllib.request.urlopen(f"{self.url}/queue", timeout=10) as answer:
            return len(json.loads(answer.read())["asked_to_free"])

    @property
    def spec(self) -> Spec:
        return Spec(
            name="comfyui",
            match=self.name,
            vram_bytes=NEEDS,
            priority=20,
            busy=Call("GET", f"{self.url}/queue"),
            free=Call("POST", f"{self.url}/free", '{"unload_models": true}'),
            grace_s=30.0,
        )


@contextlib.contextmanager
def a_neighbour(directory: Path, name: str) -> Iterator[Neighbour]:
    port_file = directory / f"port-{uuid.uuid4().hex}"
    module = "tests.integration.inference.neighbour"
    with subprocess.Popen([sys.executable, "-m", module, str(port_file), name]) as process:
        try:
            wait_until(port_file.exists, "the program to listen")
            yield Neighbour(process, name, f"http://127.0.0.1:{port_file.read_text()}")
        finally:
            process.kill()


class State:
    """What it holds and does."""

    def __init__(self) -> None:
        self.memory: list[bytearray] = []
        self.running: list[str] = []
        self.asked_to_free = 0
        self.sulks = False


class Handler(BaseHTTPRequestHandler):
    """One request."""

    state = State()

    def do_GET(self) -> None:
        self._answer(200, {"queue_running": self.state.running, "asked_to_free": "x" * self.state.asked_to_free})

    def do_POST(self) -> None:
        state = self.state
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        match self.path:
            case "/work":
                state.memory.append(bytearray(b"\1" * (body["mb"] * MIB)))
                state.running = ["a picture"]
            case "/done":
                state.running = []
            case "/sulk":
                state.sulks = True
            case "/free":
                state.asked_to_free += 1
                if state.sulks or not body.get("unload_models"):
                    self._answer(500, {})
                    return
                state.memory.clear()
                state.running = []
                gc.collect()
                if sys.platform == "linux":
                    ctypes.CDLL(None).malloc_trim(0)
        self._answer(200, {})

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing."""


def main() -> None:
    """Serve until killed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port_file = Path(sys.argv[1])
    port_file.with_suffix(".new").write_text(str(server.server_port))
    port_file.with_suffix(".new").rename(port_file)
    server.serve_forever()


if __name__ == "__main__":
    main()
