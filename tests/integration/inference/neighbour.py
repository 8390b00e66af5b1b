"""A program that is not ours, in the manner of ComfyUI: holds memory, works for a while, and frees it when asked.

`python -m tests.integration.inference.neighbour PORT_FILE NAME`. GET /queue says whether it works; POST /work {"mb": N}
makes it hold N MiB and be busy until POST /done; POST /free lets the memory go; POST /sulk makes it refuse to.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MIB = 1 << 20


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
