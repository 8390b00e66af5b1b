"""Hundreds of streams at once, half of them cut at random bytes: nothing is left of them, and no answer crosses over.

Every caller has the engine answer a text of the caller's own (by a grammar that allows nothing else), so that a byte
in the wrong answer shows. With MODEL_BOSS_LONG=1 there are 2,000 instead of 400.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuboss.store_link import MOST_LINKS
from tests.acceptance.storm import Heard, Holdings, ToldBroker, ask_all, callers
from tests.support import wait_until

COUNT = 2000 if os.environ.get("MODEL_BOSS_LONG") else 400
AT_ONCE = 200
PARALLEL = 8
GROWTH_BYTES = 16 << 20


@pytest.fixture
def subject(tmp_dir: Path, llama_server: Path, demo_models: Path) -> Iterator[ToldBroker]:
    made = ToldBroker(tmp_dir, llama_server)
    made.write_manifest(
        "robin", id="robin", path=str(demo_models / "robin.gguf"), vram="40MiB", context=512, parallel=PARALLEL
    )
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _storm(subject: ToldBroker, count: int, *, seed: int, cut: bool = True) -> list[Heard]:
    return asyncio.run(ask_all(subject.port, "robin", callers(count, seed=seed, cut=cut), at_once=AT_ONCE))


def _engine(subject: ToldBroker) -> int:
    return int(subject.slots()["robin"]["pid"])


def _check_answers(heard: list[Heard]) -> None:
    stayed = [one for one in heard if one.caller.cut_at is None]
    assert [one for one in stayed if not (one.done and one.text == one.caller.canary)] == []
    left = [one for one in heard if one.caller.cut_at is not None]
    assert [one for one in left if one.done or not one.caller.canary.startswith(one.text)] == []


@pytest.mark.slow
def test_nothing_is_left_of_callers_who_hang_up_and_no_answer_crosses_over(subject: ToldBroker) -> None:
    subject.ask("robin")
    _check_answers(_storm(subject, 100, seed=1))  # what is made once and kept is there from now on
    assert subject.process is not None
    broker, engine = subject.process.pid, _engine(subject)
    wait_until(lambda: not any(subject.inside()["objects"].values()), "the first storm to be over")
    before, inside, engine_before = Holdings.of(broker), subject.inside(), Holdings.of(engine)
    files_before = subject.files()

    began_s = time.monotonic()
    heard = _storm(subject, COUNT, seed=2)
    ended_s = time.monotonic()
    wait_until(lambda: subject.slots()["robin"]["in_flight"] == 0, "nothing to be in flight", timeout_s=1)
    assert subject.get("/api/v1/queue")[1]["queue"] == []
    _check_answers(heard)
    cut = [one for one in heard if one.caller.cut_at is not None]
    assert len(cut) == COUNT // 2
    assert sum(not one.text for one in cut) > COUNT / 100, "some left while they waited"
    assert sum(bool(one.text) for one in cut) > COUNT / 10, "many left in the middle of their answer"

    wait_until(lambda: subject.inside()["objects"] == inside["objects"], "every request's objects to be gone")
    wait_until(lambda: subject.inside()["tasks"] == inside["tasks"], "every request's tasks to be gone")
    wait_until(lambda: subject.files() <= files_before, "every socket and file to be closed")
    assert subject.inside()["store_links"] <= MOST_LINKS + 1, "the pool, and one that blocks"
    wait_until(lambda: Holdings.of(engine).files <= engine_before.files, "every connection to the engine to be closed")
    after = Holdings.of(broker)
    assert after.rss_bytes <= before.rss_bytes + GROWTH_BYTES
    assert _engine(subject) == engine, "it was never loaded anew"

    _check_answers(_storm(subject, 200, seed=3, cut=False))
    grown = (after.rss_bytes - before.rss_bytes) >> 20
    print(f"{COUNT} streams, {len(cut)} cut, in {ended_s - began_s:.1f} s; {after}, grown by {grown} MiB")
