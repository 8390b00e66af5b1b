"""A stand-in for the broker's HTTP API, for tests of the command line: canned answers, and a list of what was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeBroker:
    """`answers` maps "GET /path" to a value, to (status, value), or to a list of such, taken one by one."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.keys: list[str | None] = []
        self.url = ""

    def answer(self, request: str) -> tuple[int, Any]:
        value = self.answers.get(request.partition("?")[0])
        if isinstance(value, list) and value and isinstance(value[0], tuple):
            value = value.pop(0) if len(value) > 1 else value[0]
        if value is None:
            return 404, {"error": {"message": f"{request} is not an endpoint", "code": "not_found"}}
        return value if isinstance(value, tuple) else (200, value)


@contextmanager
def fake_broker() -> Iterator[FakeBroker]:
    """A running one on a free port."""
    fake = FakeBroker()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            request = f"{self.command} {self.path}"
            fake.asked.append(request)
            fake.keys.append(self.headers.get("Authorization"))
            status, value = fake.answer(request)
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _serve

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
