"""Clients that stream without end, and what became of each stream. Used by the tests that kill things meanwhile."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.acceptance.broker import Broker

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one stream went."""

    model: str
    began_s: float
    first_s: float | None
    """When the first text came."""
    ended_s: float
    tokens: int
    """Chunks that carried text."""
    trouble: str | None
    """None for a whole answer; the error's code; or "cut" for a stream that ended without a word."""

    def flowed_at(self, moment_s: float) -> bool:
        """Was its text coming at that moment?"""
        return self.first_s is not None and self.first_s < moment_s < self.ended_s


class Streamers:
    """`count` threads, each asking a random model for a long streamed answer, again and again."""

    def __init__(self, broker: Broker, models: Sequence[str], *, count: int, seed: int) -> None:
        self._broker = broker
        self._models = models
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + n),), daemon=True, name=f"stream {n}")
            for n in range(count)
        ]

    def __enter__(self) -> Streamers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S + 10)
            assert not thread.is_alive(), f"a stream neither ended nor failed within {PATIENCE_S:g} s"

    def outcomes(self) -> list[Outcome]:
        """The streams that ended so far."""
        with self._lock:
            return list(self._outcomes)

    def _run(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            outcome = self._stream(rng)
            with self._lock:
                self._outcomes.append(outcome)
            if outcome.trouble is not None:
                self._stop.wait(0.05)

    def _stream(self, rng: random.Random) -> Outcome:
        model = rng.choice(self._models)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Who are you?"}],
            "stream": True,
            "max_tokens": rng.randrange(50, 1500),
            "ignore_eos": True,
            # A more important class now and then is what makes busy models drain.
            "x_priority": rng.choice(["normal", "normal", "high"]),
        }
        began_s = time.monotonic()
        first_s: float | None = None
        tokens, trouble = 0, "cut"
        connection = http.client.HTTPConnection("127.0.0.1", self._broker.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                trouble = json.loads(answer.read())["error"]["code"]
            else:
                first_s, tokens, trouble = _read(answer)
        except (OSError, http.client.HTTPException):
            trouble = "cut"
        finally:
            connection.close()
        return Outcome(model, began_s, first_s, time.monotonic(), tokens, trouble)


def _read(answer: http.client.HTTPResponse) -> tuple[float | None, int, str | None]:
    """When text first came, how many chunks of it, and what went wrong."""
    first_s: float | None = None
    tokens = 0
    try:
        for raw in answer:
            line = raw.strip()
            if line == b"data: [DONE]":
                return first_s, tokens, None
            if line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return first_s, tokens, str(chunk["error"]["code"])
                first_s = first_s or time.monotonic()
                tokens += 1
    except (OSError, http.client.HTTPException):
        pass  # an end without a word, as the caller sees it
    return first_s, tokens, "cut"
