"""The simulator tells what the real broker does: as many swaps, within a tenth, on the same arrivals.

A broker with four tiny models and room for two meets made-up streams of requests; the same streams are simulated with
the load and service times that its answers told. One stream that takes some seconds by default; MODEL_BOSS_LONG=1 plays
all five, with at least 100 swaps each, and `-s` shows the figures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from gpuboss.priority import parse_priority
from inference.events import DeviceRoom
from inference.queue import QueueLimits
from inference.simulation.replay import replay
from inference.simulation.trace import Request, Trace, TraceModel
from inference.simulation.trace_file import read
from tests.acceptance.broker import CLAIM_MIB, Broker
from tests.support import wait_until

LONG = os.environ.get("MODEL_BOSS_LONG") == "1"
MODEL_BOSS = Path(sys.executable).parent / "model-boss"
MODELS = ("red", "green", "blue", "gold")
ROOM_MIB = 2 * CLAIM_MIB + CLAIM_MIB // 2
LIMITS = {"max_waiting": 512, "max_wait_s": 120.0, "max_overtakes": 2, "max_overtaken_s": 1.0}
MOST_APART = 0.10 if LONG else 0.25
"""Of the sum of all swaps. A single short stream has few of them, and chance more to say."""
LEAST_SWAPS = 100 if LONG else 15

Stream = list[tuple[float, str, str]]
"""Moment, model and class of each request."""


def even(rng: random.Random, length_s: float) -> Stream:
    """All models alike, at random."""
    return [(at_s, rng.choice(MODELS), "normal") for at_s in moments(rng, 15.0, length_s)]


def popular(rng: random.Random, length_s: float) -> Stream:
    """One is asked for more than the next."""
    return [(at_s, rng.choices(MODELS, (4, 3, 2, 2))[0], "normal") for at_s in moments(rng, 18.0, length_s)]


def bursts(rng: random.Random, length_s: float) -> Stream:
    """Three at a time for one model."""
    starts = moments(rng, 12.0, length_s)
    return [(at_s + n * 0.01, model, "normal") for at_s in starts for model in [rng.choice(MODELS)] for n in range(3)]


def in_turn(rng: random.Random, length_s: float) -> Stream:
    """One after the other: the worst there is for what is loaded."""
    turns = itertools.cycle(MODELS)
    return [(at_s, next(turns), "normal") for at_s in moments(rng, 16.0, length_s)]


def classes(rng: random.Random, length_s: float) -> Stream:
    """Some are more important."""
    kinds = ("high", "normal", "batch")
    return [(at_s, rng.choice(MODELS), rng.choices(kinds, (1, 4, 2))[0]) for at_s in moments(rng, 15.0, length_s)]


STREAMS: dict[str, Callable[[random.Random, float], Stream]] = {
    "even": even, "popular": popular, "bursts": bursts, "in turn": in_turn, "classes": classes
}  # fmt: skip
LENGTH_S = 24.0 if LONG else 6.0


def moments(rng: random.Random, rate: float, length_s: float) -> list[float]:
    """A Poisson process."""
    found: list[float] = []
    at_s = rng.expovariate(rate)
    while at_s < length_s:
        found.append(at_s)
        at_s += rng.expovariate(rate)
    return found


@dataclass(frozen=True)
class Answer:
    """What the broker said of one request."""

    at_s: float
    """When it was sent, from the stream's beginning."""
    model: str
    priority: str
    queue_s: float
    load_s: float
    service_s: float


@pytest.fixture
def subject(tmp_dir: Path, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    settings = {"queue": LIMITS, "log_level": "debug"}
    subject = Broker(tmp_dir, llama_server, room_mib=ROOM_MIB, settings=settings)
    for model in MODELS:
        subject.write_manifest(
            model, id=model, path=str(demo_models / "robin.gguf"), vram=f"{CLAIM_MIB}MiB", context=256
        )
    try:
        yield subject.start()
    finally:
        subject.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_simulated_and_real_swaps_agree(subject: Broker) -> None:
    names = list(STREAMS) if LONG else ["classes"]
    stop_s = time_to_stop(subject)
    real, simulated = {}, {}
    for number, name in enumerate(names):
        stream = STREAMS[name](random.Random(number), LENGTH_S)
        forget(subject)
        before = swaps(subject)
        trace = trace_of(play(subject, stream))
        real[name] = swaps(subject) - before
        simulated[name] = replay(trace, stop_s=stop_s).report.swaps
        took = f"a load {trace.load_s['red']:.3f} s, a request {trace.service_s['red']:.3f} s, a stop {stop_s:.3f} s"
        print(f"{name}: {len(stream)} requests, {real[name]} swaps, {simulated[name]} simulated; {took}")
    assert min(real.values()) >= LEAST_SWAPS, "there was something to count"
    apart = abs(sum(simulated.values()) - sum(real.values())) / sum(real.values())
    assert apart <= MOST_APART, (real, simulated)


@pytest.mark.slow
def test_a_recording_of_the_broker_says_the_same(subject: Broker, tmp_dir: Path) -> None:
    out = tmp_dir / "recorded.jsonl.gz"
    stop_s = time_to_stop(subject)
    forget(subject)
    before = swaps(subject)
    stream = STREAMS["popular"](random.Random(7), 4.0)
    with recording(subject, out):
        play(subject, stream)
        wait_until(lambda: len(read(out).trace.requests) == len(stream), "all requests in the recording")
    real = swaps(subject) - before
    command = [MODEL_BOSS, "simulate", "--trace", out, "--stop", f"{stop_s:.3f}s", "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    ours = told["policies"]["ours"]
    print(f"{len(stream)} requests, {real} swaps, {ours['swaps']} simulated from the recording")
    assert ours["served"] == len(stream)
    assert abs(ours["swaps"] - real) <= 2 + MOST_APART * real, "one short stream: chance has something to say"


@contextlib.contextmanager
def recording(subject: Broker, out: Path) -> Iterator[None]:
    """`model-boss trace` beside the broker, as people run it."""
    process = subprocess.Popen([MODEL_BOSS, "trace", "--out", out, "--url", subject.url], start_new_session=True)
    try:
        wait_until(lambda: out.exists() and out.stat().st_size > 0, "the recording to begin")
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def play(subject: Broker, stream: Stream) -> list[Answer]:
    """Ask as the stream says; all answers, by the moment they were asked for."""
    answers: list[Answer] = []
    lock = threading.Lock()
    with (
        openai.OpenAI(base_url=f"{subject.url}/v1", api_key="unused", max_retries=0, timeout=150) as client,
        ThreadPoolExecutor(128) as pool,
    ):
        began_s = time.monotonic()

        def ask(model: str, priority: str) -> None:
            at_s = time.monotonic()
            raw = client.chat.completions.with_raw_response.create(
                model=model,
                messages=[{"role": "user", "content": "Who are you?"}],
                max_tokens=24,
                temperature=0,
                extra_body={"x_priority": priority},
            )
            queue_s, load_s = (float(raw.headers[f"x-boss-{name}-ms"]) / 1000 for name in ("queue", "load"))
            service_s = time.monotonic() - at_s - queue_s
            with lock:
                answers.append(Answer(at_s - began_s, model, priority, queue_s, load_s, service_s))

        asked = []
        for at_s, model, priority in stream:
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))  # the stream's own pace
            asked.append(pool.submit(ask, model, priority))
        for one in asked:
            one.result()
    return sorted(answers, key=lambda answer: answer.at_s)


def forget(subject: Broker) -> None:
    """Nothing is loaded: every stream begins as its simulation does."""
    for model in MODELS:
        assert subject.post(f"/api/v1/models/{model}/unload", {})[0] == 200


def swaps(subject: Broker) -> int:
    """Loads for which another model had to go, so far: all are of one size, and for each exactly one goes."""
    count = 0
    for line in subject.log().splitlines():
        if '"slot_moved"' in line:
            move = json.loads(line)
            count += move["state"] == "draining" and move["reason"].startswith("makes room")
    return count


def time_to_stop(subject: Broker) -> float:
    """Seconds by which a swap takes longer than its load, when nothing else is going on."""
    forget(subject)
    answers = [play(subject, [(0.0, model, "normal")])[0] for model in MODELS * 3]
    return statistics.median(answer.queue_s - answer.load_s for answer in answers[2:])


def trace_of(answers: Sequence[Answer]) -> Trace:
    """The stream with the times it met: a load and a request take what they took on average."""
    load_s = {(answer.model, answer.load_s) for answer in answers if answer.load_s}  # several wait for one load
    service_s = statistics.mean(answer.service_s for answer in answers)
    mean_load_s = statistics.mean(seconds for _, seconds in load_s)
    return Trace(
        devices=(DeviceRoom("sim0", ROOM_MIB << 20, 0, 0, accelerator=True),),
        models=tuple(TraceModel(model, CLAIM_MIB << 20, mean_load_s) for model in MODELS),
        requests=tuple(
            Request(answer.at_s, answer.model, parse_priority(answer.priority), service_s=service_s)
            for answer in answers
        ),
        limits=QueueLimits(**LIMITS),  # type: ignore[arg-type]  # by name
    )
