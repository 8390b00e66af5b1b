"""Many streaming callers at once, of whom some hang up in the middle: each asks for a text of its own and keeps what it
got. And what a broker holds, seen from outside and from within."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import psutil

from tests.acceptance.broker import Broker
from tests.conftest import ROOT
from tests.support import wait_until

PATIENCE_S = 60.0
LONGEST_CUT = 10_000
"""Bytes before which callers hang up who do; a whole answer has more."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One request, and when its caller hangs up."""

    canary: str
    """The text that the engine is made to answer."""
    cut_at: int | None
    """Hangs up once so many bytes came; None: stays to the end."""
    hard: bool
    """Hangs up with a reset instead of an orderly end."""


@dataclass(slots=True)
class Heard:
    """What a caller got."""

    caller: Caller
    status: int = 0
    came: int = 0
    """Bytes, headers included."""
    text: str = ""
    """Of the events that came whole."""
    done: bool = False
    """The stream said that it was complete."""
    error: object = None


class _Answer:
    """httptools' view of one answer."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()

    def on_body(self, body: bytes) -> None:
        self.body += body


def callers(count: int, *, seed: int, cut: bool) -> list[Caller]:
    """So many; with `cut`, every other one hangs up at a random byte."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        word = f"{seed:03d}.{number:05d}.{rng.getrandbits(32):08x}"
        cut_at = rng.randrange(LONGEST_CUT) if cut and number % 2 else None
        made.append(Caller(" ".join([word] * 3), cut_at, hard=rng.random() < 0.5))
    rng.shuffle(made)
    return made


async def ask_all(port: int, model: str, everyone: Sequence[Caller], *, at_once: int) -> list[Heard]:
    """All of them, so many at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(caller: Caller) -> Heard:
        async with places, asyncio.timeout(PATIENCE_S):
            return await _ask(port, model, caller)

    return list(await asyncio.gather(*(one(caller) for caller in everyone)))


async def _ask(port: int, model: str, caller: Caller) -> Heard:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer, came = _Answer(), 0
    try:
        writer.write(_request(model, caller.canary))
        while caller.cut_at is None or came < caller.cut_at:
            data = await reader.read(4096 if caller.cut_at is None else min(4096, caller.cut_at - came))
            if not data:
                break
            came += len(data)
            answer.parser.feed_data(data)
        if caller.hard:
            writer.transport.abort()
    finally:
        writer.close()
    return _heard(caller, answer, came)


def _request(model: str, canary: str) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Who are you?"}],
            "stream": True,
            "max_tokens": 300,
            "temperature": 0,
            "grammar": f'root ::= "{canary}"',
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close"
    )
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _heard(caller: Caller, answer: _Answer, came: int) -> Heard:
    heard = Heard(caller, came=came)
    if answer.parser.get_http_version() != "0.0":
        heard.status = answer.parser.get_status_code()
    for event in bytes(answer.body).split(b"\n\n")[:-1]:
        if event == b"data: [DONE]":
            heard.done = True
        elif event.startswith(b"data: "):
            chunk = json.loads(event[6:])
            heard.error = heard.error or chunk.get("error")
            heard.text += "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
    return heard


@dataclass
class ToldBroker(Broker):
    """A broker that tells what lives inside it."""

    def launch(self) -> subprocess.Popen[bytes]:
        config = self.write_config()
        command = [sys.executable, "-m", "tests.acceptance.serve_and_tell", str(self._told), str(config)]
        with (self.directory / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        return self.process

    @property
    def _told(self) -> Path:
        return self.directory / "told.json"

    def inside(self) -> Mapping[str, Any]:
        """Its tasks, objects and connections to the store, now."""
        assert self.process is not None
        self._told.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        wait_until(self._told.exists, "the broker to tell what lives in it")
        told: Mapping[str, Any] = json.loads(self._told.read_text())
        return told

    def files(self) -> int:
        """Its open descriptors without connections to the store, whose pool a busier moment may enlarge for good."""
        assert self.process is not None
        return Holdings.of(self.process.pid).files - int(self.inside()["store_links"])


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one process holds."""

    files: int
    """Open descriptors: sockets, pipes, files."""
    threads: int
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> Holdings:
        """Of a process, now."""
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.num_threads(), process.memory_info().rss)
