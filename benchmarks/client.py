"""A load client small enough not to be what is measured: blocking sockets, one keep-alive connection, no parsing
beyond the end of a response. Used by `measures.py`.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """One request as the client saw it, in seconds from its first byte sent."""

    first_s: float
    """Until the first byte of the response's body."""
    last_s: float
    """Until its last byte."""


class LoadClient:
    """One HTTP/1.1 connection to `127.0.0.1:port`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def post(self, request: bytes) -> Timing:
        """Send a prepared request and read the whole response.

        A connection that the server closed after an answer (llama-server does after 100) or for idleness is opened
        again, and the clock started again.

        Raises:
            RuntimeError: the status is not 200, or the connection ended early.
        """
        began = time.perf_counter()
        received = self._send(request)
        if not received:
            self.close()
            self._connect()
            began = time.perf_counter()
            received = self._send(request)
        while (header_end := received.find(b"\r\n\r\n")) < 0:
            received += self._receive()
        head, body = received[:header_end].lower(), received[header_end + 4 :]
        chunked = b"transfer-encoding: chunked" in head
        length = 0 if chunked else int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if not body:
            body = self._receive()
        first = time.perf_counter()
        while not (body.endswith(b"0\r\n\r\n") if chunked else len(body) >= length):
            body += self._receive()
        last = time.perf_counter()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{head.decode()}\n{body[:500].decode()}")
        return Timing(first - began, last - began)

    def _send(self, request: bytes) -> bytes:
        """The first bytes of the answer; none when the server had closed the connection."""
        try:
            self._socket.sendall(request)
            return self._socket.recv(1 << 16)
        except (BrokenPipeError, ConnectionResetError):
            return b""

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise RuntimeError("the server closed the connection")
        return data


def chat_request(model: str, *, max_tokens: int, stream: bool) -> bytes:
    """The bytes of a chat completion request with a short prompt."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Who are you?"}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
