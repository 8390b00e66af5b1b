"""A caller hangs up, seen from outside: the ticket leaves, or the real engine stops, within a second.

On connections that were used before, and on fresh ones.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.acceptance.broker import Broker, broker
from tests.support import wait_until

PROMISE_S = 1.0
STILL_S = 0.25
"""Without using the processor: an engine that generates always does."""
POLL_S = 0.5
"""On top of it for whole answers: llama-server looks once a second whether somebody still waits, and may be starved."""
CONTEXT = 16_000
"""So many tokens take it half a minute."""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp("b")
    with broker(directory, llama_server, demo=demo_models, models=("robin",), context=CONTEXT) as running:
        running.ask("robin")
        yield running


class Caller:
    """One connection, and a request on it that has no end in time."""

    def __init__(self, subject: Broker, *, stream: bool, used: bool) -> None:
        self._socket = socket.create_connection(("127.0.0.1", subject.port), timeout=10)
        if used:
            self._socket.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in self._socket.recv(4096)
        body = json.dumps(
            {
                "model": "robin",
                "messages": [{"role": "user", "content": "Who are you?"}],
                "max_tokens": CONTEXT,
                "ignore_eos": True,
                "stream": stream,
            }
        ).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        self._socket.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def hear(self) -> bytes:
        """Some of the answer."""
        return self._socket.recv(4096)

    def hang_up(self) -> float:
        """Close the connection; when, monotonic."""
        self._socket.close()
        return time.monotonic()


def _in_flight(subject: Broker) -> int:
    return int(subject.slots()["robin"]["in_flight"])


def _waiting(subject: Broker) -> int:
    return len(subject.get("/api/v1/queue")[1]["queue"])


def _still_since(subject: Broker) -> float:
    """When the engine used the processor last, monotonic; it is looked at until it rests."""
    engine = psutil.Process(subject.slots()["robin"]["pid"])
    used, since_s = engine.cpu_times()[:2], time.monotonic()

    def rests() -> bool:
        nonlocal used, since_s
        if (now := engine.cpu_times()[:2]) != used:
            used, since_s = now, time.monotonic()
        return time.monotonic() - since_s > STILL_S

    wait_until(rests, "the engine to rest", timeout_s=15)
    return since_s


@pytest.fixture(autouse=True)
def _nothing_left(subject: Broker) -> Iterator[None]:
    yield
    wait_until(lambda: not _in_flight(subject) and not _waiting(subject), "every request to be over")
    _still_since(subject)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "kept alive"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_waiting_ticket_leaves_the_queue(subject: Broker, stream: bool, used: bool) -> None:
    served = Caller(subject, stream=False, used=False)
    wait_until(lambda: _in_flight(subject), "the engine's only place to be taken")
    waits = Caller(subject, stream=stream, used=used)
    wait_until(lambda: _waiting(subject), "the other one to wait")
    waits.hang_up()
    wait_until(lambda: not _waiting(subject), "its ticket to leave", timeout_s=PROMISE_S)
    assert _in_flight(subject) == 1, "the first one is served on"
    served.hang_up()


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "kept alive"])
def test_a_stream_stops(subject: Broker, used: bool) -> None:
    caller = Caller(subject, stream=True, used=used)
    while b"data: " not in caller.hear():
        pass
    left_s = caller.hang_up()
    wait_until(lambda: not _in_flight(subject), "its place to be free", timeout_s=PROMISE_S)
    assert _still_since(subject) - left_s < PROMISE_S


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "kept alive"])
def test_an_answer_that_is_no_stream_stops(subject: Broker, used: bool) -> None:
    caller = Caller(subject, stream=False, used=used)
    wait_until(lambda: _in_flight(subject), "the engine to work on it")
    left_s = caller.hang_up()
    wait_until(lambda: not _in_flight(subject), "its place to be free", timeout_s=PROMISE_S)
    assert _still_since(subject) - left_s < PROMISE_S + POLL_S
