"""An engine that stands still in the middle of an answer, seen from outside: told in time, while other models serve."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.broker import CLAIM_MIB, Broker, broker
from tests.acceptance.streams import Streamers
from tests.support import wait_until

STALL_S = 4.0
SLACK_S = 1.0
"""The promise; the machine's own hiccups come on top."""
HICCUP_S = 1.5


@pytest.fixture
def subject(tmp_path: Path, llama_server: Path, demo_models: Path) -> Iterator[Broker]:
    """Room for both models."""
    settings = {"stall_s": STALL_S}
    with broker(
        tmp_path, llama_server, demo=demo_models, room_mib=3 * CLAIM_MIB, context=4096, settings=settings
    ) as running:
        yield running


def test_a_stopped_engine_ends_its_streams_within_the_stall_deadline_while_another_model_serves(subject: Broker):
    subject.ask("wren")
    subject.ask("robin")
    stopped_pid = subject.slots()["robin"]["pid"]
    answered: list[float] = []
    over = threading.Event()

    def go_on_asking() -> None:
        while not over.is_set():
            assert "Wren" in subject.ask("wren")
            answered.append(time.monotonic())

    with Streamers(subject, ("robin",), count=3, seed=1) as streamers:
        wait_until(lambda: subject.slots()["robin"]["in_flight"] == 1, "a stream to be under way")
        asking = threading.Thread(target=go_on_asking)
        asking.start()
        try:
            os.kill(stopped_pid, signal.SIGSTOP)
            stopped_s = time.monotonic()
            broken = [one for one in streamers.outcomes() if one.trouble is not None]
            wait_until(
                lambda: any(one.trouble == "engine_stalled" for one in streamers.outcomes()),
                "the stream to be told that its engine stalled",
                timeout_s=STALL_S + 20.0,
            )
            told_s = max(one.ended_s for one in streamers.outcomes() if one.trouble == "engine_stalled")
            assert not broken, "nothing was wrong before"
            assert told_s - stopped_s <= STALL_S + SLACK_S + HICCUP_S
            meanwhile = [moment for moment in answered if stopped_s < moment < told_s]
            assert len(meanwhile) >= 5, f"the other model answered {len(meanwhile)} times meanwhile"
            wait_until(lambda: subject.slots()["robin"]["state"] == "ready", "the model to be loaded again")
            assert subject.slots()["robin"]["pid"] != stopped_pid
        finally:
            over.set()
            asking.join(60)
    assert "Robin" in subject.ask("robin")
